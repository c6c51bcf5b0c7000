// How a thread waits for memory that others write, without sleeping in the system.
#pragma once

#include <chrono>

namespace sparsekv {

// A tenth of a microsecond or two, in which the core's other hyperthread runs on.
void pause_briefly();

// The i-th pause, from 1, of a wait for another thread of this process, which may have lost its
// processor: now and then the waiting thread lends its own.
void pause_or_yield(int i);

// Short pauses, so that a change is seen within a microsecond. Where nothing has come for kAwake,
// the thread naps instead: what takes that long is not delayed by a nap, and a flag that is never
// set must not cost a core.
class Patience {
 public:
  void pause();

 private:
  static constexpr std::chrono::milliseconds kAwake{100};
  static constexpr std::chrono::microseconds kNap{50};
  static constexpr int kPausesPerLook = 256;  // the clock is read that seldom

  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  int pauses_ = 0;
  bool is_awake_ = true;
};

}  // namespace sparsekv

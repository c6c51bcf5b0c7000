// Where threads sleep, each by itself.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>

#include "patience.h"

namespace sparsekv {

// For one thread that waits and any one that wakes it. Threads that share a condition variable
// would all queue for its mutex as they wake.
class Bed {
 public:
  // Until woken; at once if that happened already.
  void sleep() {
    std::unique_lock<std::mutex> lock(mutex_);
    woken_.wait(lock, [this] { return is_woken_.load(); });
    is_woken_ = false;
  }

  // The same for a thread that has a core to itself, and is to go on at once.
  void doze() {
    Patience patience;
    while (!is_woken_) patience.pause();
    sleep();  // until who wakes it has let go of the bed
  }

  // With the mutex held: the bed may be gone as soon as its thread gets it.
  void wake() {
    std::lock_guard<std::mutex> lock(mutex_);
    is_woken_ = true;
    woken_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable woken_;
  std::atomic<bool> is_woken_{false};
};

}  // namespace sparsekv

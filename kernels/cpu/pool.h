// The library's own threads: they share the items of loops, and run jobs when their flags are set.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "jobs.h"

namespace sparsekv {

// Threads that sleep until there is work. Several callers may share them.
//
// Threads are pinned, each to one physical core of those that the starting thread may use, in
// order; not if there are more threads than such cores. While jobs wait, one thread that has
// nothing else to do polls their flags; it starts the first job whose flag is set, and wakes
// another to poll on. Jobs start in the order in which they become ready, and may run at the same
// time.
class Pool {
 public:
  explicit Pool(int threads);  // fewer, or none, if the system refuses them
  ~Pool();                     // waiting jobs end as cancelled
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const;

  // Other threads take over what is waiting or unfinished; returns when the old ones are gone, that
  // is, after the jobs they run. The old ones stay if the system refuses any other. Not for jobs to
  // call.
  void resize(int threads);

  // work(0) ... work(count - 1), each once, in any order, on the pool's threads; returns when all
  // are done. Without threads the caller works; a job that calls it works with the others. `work`
  // must not throw. Between items, the helpers leave for jobs that have become ready.
  void run(int64_t count, const std::function<void(int64_t)>& work);

  // Id of a job that starts when its flag is set. 0: there is no thread to run it.
  int64_t submit(std::function<int32_t()> work, const sparsekv_signal& signal);
  Jobs& jobs();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The process's pool, started at first use; a forked child starts its own, without the jobs of its
// parent. At the exit of the process waiting jobs are cancelled, and running ones end.
std::shared_ptr<Pool> shared_pool();

// Null if it has not been started in this process.
std::shared_ptr<Pool> started_pool();

// Number of threads of shared_pool() from now on; 0: default_thread_count().
void set_thread_count(int threads);
int thread_count();

}  // namespace sparsekv

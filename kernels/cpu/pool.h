// The library's own threads, and how many there should be.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace sparsekv {

// Physical cores that this process may use, and no more than its cgroup grants, less one for the
// threads that drive the accelerator; at least 1. Not OMP_NUM_THREADS: launchers set that to 1.
int default_thread_count();

// Threads that sleep until there is work. Several callers may share them.
class Pool {
 public:
  explicit Pool(int threads);  // fewer, or none, if the system refuses them
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const;

  // work(0) ... work(count - 1), each once, in any order, on the pool's threads; returns when all
  // are done. Without threads the caller works. `work` must not throw.
  void run(int64_t count, const std::function<void(int64_t)>& work);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The process's pool, started at first use; a forked child starts its own. Whoever holds the pointer
// may go on using that pool after another took its place.
std::shared_ptr<Pool> shared_pool();

// Number of threads of shared_pool() from the next use on; 0: default_thread_count().
void set_thread_count(int threads);
int thread_count();

}  // namespace sparsekv

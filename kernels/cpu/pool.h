// The library's own threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace sparsekv {

// Threads that sleep until there is work. Several callers may share them.
//
// Threads are pinned, each to one physical core of those that the starting thread may use, in order;
// not if there are more threads than such cores.
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

#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "cores.h"

namespace sparsekv {

namespace {

struct Job {
  Job(int64_t count, const std::function<void(int64_t)>& work)
      : count(count), work(work), unfinished(count) {}

  const int64_t count;
  const std::function<void(int64_t)>& work;
  std::atomic<int64_t> next{0};
  int64_t unfinished;  // under the pool's mutex
  int users = 0;       // threads that hold a reference; under the pool's mutex
  std::condition_variable done;
};

}  // namespace

struct Pool::State {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<Job*> jobs;  // those with items that nobody has taken yet
  bool stopping = false;
  std::vector<std::thread> threads;

  void serve() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      wake.wait(lock, [&] { return stopping || !jobs.empty(); });
      if (jobs.empty()) return;
      Job& job = *jobs.front();
      job.users++;
      lock.unlock();
      int64_t finished = 0;
      for (int64_t i; (i = job.next.fetch_add(1)) < job.count; finished++) job.work(i);
      lock.lock();
      if (!jobs.empty() && jobs.front() == &job) jobs.pop_front();
      job.unfinished -= finished;
      job.users--;
      // The last one out tells the caller, with the mutex held: the job dies as soon as it wakes.
      if (job.unfinished == 0 && job.users == 0) job.done.notify_one();
    }
  }
};

Pool::Pool(int threads) : state_(new State) {
  const std::vector<std::vector<int>> cores = physical_cores();
  const bool are_pinned = size_t(threads) <= cores.size();
  try {
    for (int i = 0; i < threads; i++) {
      const std::vector<int> core = are_pinned ? cores[i] : std::vector<int>();
      state_->threads.emplace_back([state = state_.get(), i, core] {
        if (!core.empty()) pin_to(core);
        // After pinning: a thread that has its name is where it belongs.
        pthread_setname_np(pthread_self(), ("sparsekv-" + std::to_string(i)).c_str());
        state->serve();
      });
    }
  } catch (const std::system_error&) {
    // The system grants no more threads: those there are do the work, or else the caller.
  }
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stopping = true;
  }
  state_->wake.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
}

int Pool::size() const { return int(state_->threads.size()); }

void Pool::run(int64_t count, const std::function<void(int64_t)>& work) {
  if (count <= 0) return;
  if (count == 1 || state_->threads.empty()) {
    for (int64_t i = 0; i < count; i++) work(i);
    return;
  }
  Job job(count, work);
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->jobs.push_back(&job);
  state_->wake.notify_all();
  job.done.wait(lock, [&] { return job.unfinished == 0 && job.users == 0; });
}

namespace {

// Never destroyed: threads may still sleep in it when the process exits.
struct Shared {
  std::mutex mutex;
  std::shared_ptr<Pool> pool;
  int wanted = 0;
};

Shared* shared = nullptr;

// The parent's threads do not exist in a child, and its mutexes may be locked for ever.
void forget_in_child() {
  const int wanted = shared->wanted;
  shared = new Shared;
  shared->wanted = wanted;
}

Shared& shared_state() {
  static const bool created = [] {
    shared = new Shared;
    pthread_atfork(nullptr, nullptr, forget_in_child);
    return true;
  }();
  (void)created;
  return *shared;
}

}  // namespace

std::shared_ptr<Pool> shared_pool() {
  Shared& state = shared_state();
  std::lock_guard<std::mutex> lock(state.mutex);
  if (!state.pool) {
    state.pool = std::make_shared<Pool>(state.wanted ? state.wanted : default_thread_count());
  }
  return state.pool;
}

void set_thread_count(int threads) {
  std::shared_ptr<Pool> old;  // its threads are joined after the mutex is released
  Shared& state = shared_state();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.wanted = threads;
  old.swap(state.pool);
}

int thread_count() { return shared_pool()->size(); }

}  // namespace sparsekv

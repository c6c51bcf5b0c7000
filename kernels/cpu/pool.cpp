#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "cores.h"
#include "patience.h"

namespace sparsekv {

namespace {

struct Loop {
  Loop(int64_t count, const std::function<void(int64_t)>& work)
      : count(count), work(work), unfinished(count) {}

  bool is_over() const { return unfinished == 0 && users == 0; }

  const int64_t count;
  const std::function<void(int64_t)>& work;
  std::atomic<int64_t> next{0};
  int64_t unfinished;  // under the pool's mutex
  int users = 0;       // threads that hold a reference; under the pool's mutex
  std::condition_variable over;
};

// Threads that were started together, and leave together.
struct Crew {
  std::atomic<bool> is_leaving{false};
  std::vector<std::thread> threads;
};

}  // namespace

struct Pool::State {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<Loop*> loops;             // those with items that nobody has taken yet
  std::atomic<bool> has_loops{false};  // for the thread that polls
  Jobs jobs;

  std::mutex resizing;  // held while crews change; never by the threads themselves
  std::unique_ptr<Crew> crew;
  std::atomic<int> size{0};

  std::unique_ptr<Crew> start(int threads);
  void dismiss(Crew& old);
  void serve(const Crew& mine);
  std::shared_ptr<Job> next_job(const Crew& mine);
  void help(std::unique_lock<std::mutex>& lock, Loop& loop, bool may_leave);
  void wake_one();
};

namespace {

thread_local const void* pool_of_this_thread = nullptr;

}  // namespace

std::unique_ptr<Crew> Pool::State::start(int threads) {
  auto started = std::make_unique<Crew>();
  const std::vector<std::vector<int>> cores = physical_cores();
  const bool are_pinned = size_t(threads) <= cores.size();
  try {
    for (int i = 0; i < threads; i++) {
      const std::vector<int> core = are_pinned ? cores[i] : std::vector<int>();
      started->threads.emplace_back([this, i, core, &mine = *started] {
        if (!core.empty()) pin_to(core);
        // After pinning: a thread that has its name is where it belongs.
        pthread_setname_np(pthread_self(), ("sparsekv-" + std::to_string(i)).c_str());
        serve(mine);
      });
    }
  } catch (const std::exception&) {
    // The system grants no more threads: those there are do the work, or else the caller.
  }
  return started;
}

void Pool::State::dismiss(Crew& old) {
  {
    // Both under the mutex: a notification for one thread never reaches one that only leaves.
    std::lock_guard<std::mutex> lock(mutex);
    old.is_leaving = true;
    wake.notify_all();
  }
  for (std::thread& thread : old.threads) thread.join();
}

void Pool::State::serve(const Crew& mine) {
  pool_of_this_thread = this;
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    wake.wait(lock, [&] { return mine.is_leaving || !loops.empty() || jobs.wants_thread(); });
    if (mine.is_leaving) return;
    lock.unlock();
    if (std::shared_ptr<Job> job = next_job(mine)) jobs.run(*job);
    lock.lock();
    if (!loops.empty()) help(lock, *loops.front(), true);
  }
}

// A job to run, after polling for one while there is nothing else to do; null: there is, or no job.
std::shared_ptr<Job> Pool::State::next_job(const Crew& mine) {
  std::shared_ptr<Job> job = jobs.take();
  if (!job && !has_loops && jobs.begin_polling()) {
    Patience patience;
    while (!mine.is_leaving && !has_loops && jobs.has_waiting() && !(job = jobs.take())) {
      patience.pause();
    }
    jobs.end_polling();
  }
  if (jobs.wants_thread()) wake_one();
  return job;
}

// Work on a loop, with the mutex released meanwhile.
void Pool::State::help(std::unique_lock<std::mutex>& lock, Loop& loop, bool may_leave) {
  loop.users++;
  lock.unlock();
  int64_t finished = 0;
  for (int64_t i; (i = loop.next.fetch_add(1)) < loop.count;) {
    loop.work(i);
    finished++;
    if (may_leave && jobs.has_ready()) break;
  }
  lock.lock();
  if (loop.next >= loop.count) {
    const auto at = std::find(loops.begin(), loops.end(), &loop);
    if (at != loops.end()) loops.erase(at);
    has_loops = !loops.empty();
  }
  loop.unfinished -= finished;
  loop.users--;
  // The last one out tells the owner, with the mutex held: the loop dies as soon as it wakes.
  if (loop.is_over()) loop.over.notify_one();
}

// The mutex orders this with threads that are about to sleep: they see the change, or are woken.
void Pool::State::wake_one() {
  { std::lock_guard<std::mutex> lock(mutex); }
  wake.notify_one();
}

Pool::Pool(int threads) : state_(new State) {
  state_->crew = state_->start(threads);
  state_->size = int(state_->crew->threads.size());
}

Pool::~Pool() { state_->dismiss(*state_->crew); }

int Pool::size() const { return state_->size; }

Jobs& Pool::jobs() { return state_->jobs; }

void Pool::resize(int threads) {
  std::lock_guard<std::mutex> lock(state_->resizing);
  std::unique_ptr<Crew> crew = state_->start(threads);
  if (crew->threads.empty()) return;
  state_->size = int(crew->threads.size());
  crew.swap(state_->crew);
  state_->dismiss(*crew);
}

void Pool::run(int64_t count, const std::function<void(int64_t)>& work) {
  if (count <= 0) return;
  if (count == 1 || size() == 0) {
    for (int64_t i = 0; i < count; i++) work(i);
    return;
  }
  Loop loop(count, work);
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->loops.push_back(&loop);
  state_->has_loops = true;
  state_->wake.notify_all();
  // A thread of the pool must work itself: there may be no other. Each other thread that is still
  // at an item ends it without waiting for anything, so this one does not wait for long.
  if (pool_of_this_thread == state_.get()) state_->help(lock, loop, false);
  loop.over.wait(lock, [&] { return loop.is_over(); });
}

int64_t Pool::submit(std::function<int32_t()> work, const sparsekv_signal& signal) {
  if (size() == 0) return 0;
  const int64_t id = state_->jobs.submit(std::move(work), signal);
  if (state_->jobs.wants_thread()) state_->wake_one();
  return id;
}

namespace {

// Never destroyed: threads may still sleep in it when the process exits.
struct Shared {
  std::mutex mutex;
  std::shared_ptr<Pool> pool;
  int wanted = 0;
};

Shared* shared = nullptr;

// The parent's threads do not exist in a child, and its mutexes may be locked for ever. Nothing of
// the old state is touched: the flags of its jobs may lie in memory that both processes see.
void forget_in_child() {
  const int wanted = shared->wanted;
  shared = new Shared;
  shared->wanted = wanted;
}

// What waits for a flag at another place must not wait for ever; and what follows in the exit of
// the process may free memory that running jobs use.
void end_jobs_at_exit() {
  const std::shared_ptr<Pool> pool = started_pool();
  if (!pool) return;
  pool->jobs().cancel_all();
  pool->jobs().wait_for_running();
}

Shared& shared_state() {
  static const bool created = [] {
    shared = new Shared;
    pthread_atfork(nullptr, nullptr, forget_in_child);
    std::atexit(end_jobs_at_exit);
    return true;
  }();
  (void)created;
  return *shared;
}

int number(int wanted) { return wanted ? wanted : default_thread_count(); }

}  // namespace

std::shared_ptr<Pool> shared_pool() {
  Shared& state = shared_state();
  std::lock_guard<std::mutex> lock(state.mutex);
  if (!state.pool) state.pool = std::make_shared<Pool>(number(state.wanted));
  return state.pool;
}

std::shared_ptr<Pool> started_pool() {
  Shared& state = shared_state();
  std::lock_guard<std::mutex> lock(state.mutex);
  return state.pool;
}

void set_thread_count(int threads) {
  Shared& state = shared_state();
  std::shared_ptr<Pool> pool;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    state.wanted = threads;
    pool = state.pool;
  }
  // Without the mutex: this waits for jobs, which ask for the shared pool.
  if (pool) pool->resize(number(threads));
}

int thread_count() { return shared_pool()->size(); }

}  // namespace sparsekv

#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <limits>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "bed.h"
#include "cores.h"
#include "patience.h"
#include "short_lock.h"

namespace sparsekv {

namespace {

struct Loop {
  Loop(int64_t count, const std::function<void(int64_t)>& work)
      : count(count), work(work), unfinished(count) {}

  const int64_t count;
  const std::function<void(int64_t)>& work;
  std::atomic<int64_t> next{0};
  int64_t unfinished;  // under the pool's lock
  int users = 0;       // threads that hold a reference; under the pool's lock
  Bed owner;           // woken when there is neither
};

// Threads that were started together, and leave together.
struct Crew {
  std::atomic<bool> is_leaving{false};
  std::vector<std::thread> threads;
};

}  // namespace

struct Pool::State {
  ShortLock lock;
  std::deque<Loop*> loops;             // those with items that nobody has taken yet
  std::atomic<bool> has_loops{false};  // changes with the lock held
  std::vector<Bed*> sleeping;          // of threads that look for work again once they are woken
  Jobs jobs;

  std::mutex resizing;  // held while crews change; never by the threads themselves
  std::unique_ptr<Crew> crew;
  std::atomic<int> size{0};

  std::unique_ptr<Crew> start(int threads);
  void dismiss(Crew& old);
  void serve(const Crew& mine);
  std::shared_ptr<Job> next_job(const Crew& mine);
  Loop* join();
  void help(Loop& loop, bool may_leave);
  void sleep(const Crew& mine, Bed& bed);
  void wake(size_t most);
};

namespace {

thread_local const void* pool_of_this_thread = nullptr;

}  // namespace

std::unique_ptr<Crew> Pool::State::start(int threads) {
  auto started = std::make_unique<Crew>();
  const std::vector<std::vector<int>> cores = physical_cores();
  const bool are_pinned = size_t(threads) <= cores.size();
  try {
    {
      std::lock_guard<ShortLock> held(lock);
      sleeping.reserve(size_t(size) + threads);  // for another crew that is still here too
    }
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
  old.is_leaving = true;
  wake(std::numeric_limits<size_t>::max());
  for (std::thread& thread : old.threads) thread.join();
}

void Pool::State::serve(const Crew& mine) {
  pool_of_this_thread = this;
  Bed bed;
  while (!mine.is_leaving) {
    if (std::shared_ptr<Job> job = next_job(mine)) jobs.run(*job);
    if (Loop* loop = join()) help(*loop, true);
    sleep(mine, bed);
  }
}

// A job to run, after polling for one while there is nothing else to do; null: there is, or no job,
// or another thread polls.
std::shared_ptr<Job> Pool::State::next_job(const Crew& mine) {
  if (!jobs.wants_thread() || !jobs.begin_polling()) return nullptr;
  std::shared_ptr<Job> job = jobs.take();
  Patience patience;
  while (!job && !mine.is_leaving && !has_loops && jobs.has_waiting()) {
    patience.pause();
    job = jobs.take();
  }
  jobs.end_polling();
  if (jobs.wants_thread()) wake(1);
  return job;
}

// The first loop with items left, of which this thread is a user now; or null.
Loop* Pool::State::join() {
  if (!has_loops) return nullptr;
  std::lock_guard<ShortLock> held(lock);
  if (loops.empty()) return nullptr;
  loops.front()->users++;
  return loops.front();
}

// Work on a loop that was joined.
void Pool::State::help(Loop& loop, bool may_leave) {
  int64_t finished = 0;
  for (int64_t i; (i = loop.next.fetch_add(1)) < loop.count;) {
    loop.work(i);
    finished++;
    if (may_leave && jobs.has_ready()) break;
  }
  bool is_last = false;
  {
    std::lock_guard<ShortLock> held(lock);
    if (loop.next >= loop.count) {  // so nobody joins from now on
      const auto at = std::find(loops.begin(), loops.end(), &loop);
      if (at != loops.end()) loops.erase(at);
      has_loops = !loops.empty();
    }
    loop.unfinished -= finished;
    loop.users--;
    is_last = loop.unfinished == 0 && loop.users == 0;
  }
  if (is_last) loop.owner.wake();  // the last that is done with it, as the owner may end it now
}

void Pool::State::sleep(const Crew& mine, Bed& bed) {
  {
    // What comes after this finds the bed.
    std::lock_guard<ShortLock> held(lock);
    if (mine.is_leaving || has_loops || jobs.wants_thread()) return;
    sleeping.push_back(&bed);
  }
  bed.sleep();
}

// So many of those that sleep now, the first to have gone to sleep first: not of those that found
// nothing to do meanwhile and sleep again, who could go on like that for ever.
void Pool::State::wake(size_t most) {
  size_t left = 0;
  {
    std::lock_guard<ShortLock> held(lock);
    left = std::min(most, sleeping.size());
  }
  for (; left > 0; left--) {
    Bed* bed = nullptr;
    {
      std::lock_guard<ShortLock> held(lock);
      if (sleeping.empty()) return;
      bed = sleeping.front();
      sleeping.erase(sleeping.begin());
    }
    bed->wake();
  }
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
  // A thread of the pool must work itself: there may be no other. Each other thread that is still
  // at an item ends it without waiting for anything, so this one does not wait for long.
  const bool works = pool_of_this_thread == state_.get();
  {
    std::lock_guard<ShortLock> held(state_->lock);
    state_->loops.push_back(&loop);
    state_->has_loops = true;
    if (works) loop.users++;
  }
  state_->wake(size_t(works ? count - 1 : count));
  if (!works) return loop.owner.sleep();
  state_->help(loop, false);
  loop.owner.doze();
}

int64_t Pool::submit(std::function<int32_t()> work, const sparsekv_signal& signal) {
  if (size() == 0) return 0;
  const int64_t id = state_->jobs.submit(std::move(work), signal);
  if (state_->jobs.wants_thread()) state_->wake(1);
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

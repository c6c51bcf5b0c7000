#include "jobs.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>
#include <utility>

namespace sparsekv {

namespace {

// Of the whole process, and copied by fork: a child never gives an id that its parent gave before.
std::atomic<int64_t> next_id{1};

constexpr double kLongestWait = 1e6;  // seconds; the clock counts nanoseconds in 64 bits

int64_t nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// The rule of cuStreamWaitValue32 with GEQ: values may wrap around. Acquire: what was written
// before the flag is read after it.
bool is_set(const sparsekv_signal& signal) {
  if (!signal.wait) return true;
  return int32_t(__atomic_load_n(signal.wait, __ATOMIC_ACQUIRE) - signal.wait_value) >= 0;
}

}  // namespace

// Holds the mutex, ahead of threads that poll.
class Jobs::Lock {
 public:
  explicit Lock(Jobs& jobs) : lock_(jobs.mutex_, std::defer_lock) {
    jobs.num_wanting_++;
    lock_.lock();
    jobs.num_wanting_--;
  }
  std::unique_lock<std::mutex>& get() { return lock_; }

 private:
  std::unique_lock<std::mutex> lock_;
};

int64_t Jobs::submit(std::function<int32_t()> work, const sparsekv_signal& signal) {
  auto job = std::make_shared<Job>();
  job->work = std::move(work);
  job->signal = signal;
  job->id = next_id++;
  Lock lock(*this);
  // Memory first: a job that is known also waits.
  if (waiting_.size() == waiting_.capacity()) waiting_.reserve(2 * waiting_.size() + 16);
  known_.emplace(job->id, job);
  if (signal.status) __atomic_store_n(signal.status, int32_t(JobStatus::unended), __ATOMIC_RELAXED);
  waiting_.push_back(job);
  update();
  return job->id;
}

bool Jobs::wait(int64_t id, double seconds, JobStatus& status, int32_t& error) {
  Lock lock(*this);
  const auto found = known_.find(id);
  if (found == known_.end()) return false;
  const std::shared_ptr<Job> job = found->second;  // it may be released meanwhile
  const auto has_ended = [&] { return job->status != JobStatus::unended; };
  if (seconds > 0) {
    const std::chrono::duration<double> limit(std::min(seconds, kLongestWait));
    ended_.wait_for(lock.get(), limit, has_ended);
  }
  status = job->status;
  error = job->error;
  return true;
}

bool Jobs::cancel(int64_t id) {
  std::function<int32_t()> dropped;  // what it holds is freed after the mutex is released
  Lock lock(*this);
  const auto found = known_.find(id);
  if (found == known_.end()) return false;
  dropped = cancel_if_waiting(found->second);
  return true;
}

bool Jobs::release(int64_t id) {
  std::function<int32_t()> dropped;
  std::shared_ptr<Job> job;
  Lock lock(*this);
  const auto found = known_.find(id);
  if (found == known_.end()) return false;
  job = found->second;
  known_.erase(found);
  dropped = cancel_if_waiting(job);
  ended_.wait(lock.get(), [&] { return job->status != JobStatus::unended; });
  return true;
}

void Jobs::cancel_all() {
  Waiting dropped;
  Lock lock(*this);
  dropped.swap(waiting_);
  update();
  for (const std::shared_ptr<Job>& job : dropped) end(*job, JobStatus::cancelled, SPARSEKV_OK);
}

void Jobs::wait_for_running() {
  Lock lock(*this);
  ended_.wait(lock.get(), [&] { return num_running_ == 0; });
}

std::shared_ptr<Job> Jobs::take() {
  if (!has_waiting()) return nullptr;
  while (num_wanting_.load() > 0) std::this_thread::yield();
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = first_ready();
  if (at == waiting_.end()) return nullptr;
  const std::shared_ptr<Job> job = *at;
  take_from_waiting(at);
  num_running_++;
  return job;
}

void Jobs::run(Job& job) {
  int32_t error;
  job.began = nanoseconds();
  try {
    error = job.work();
  } catch (...) {  // the operations throw nothing else
    error = SPARSEKV_NO_MEMORY;
  }
  job.ended = nanoseconds();
  std::function<int32_t()> finished;
  finished.swap(job.work);
  Lock lock(*this);
  num_running_--;
  end(job, error == SPARSEKV_OK ? JobStatus::done : JobStatus::failed, error);
}

bool Jobs::has_ready() {
  if (!has_waiting()) return false;
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  return lock.owns_lock() && first_ready() != waiting_.end();
}

bool Jobs::begin_polling() {
  Lock lock(*this);
  if (is_polled_ || waiting_.empty()) return false;
  is_polled_ = true;
  update();
  return true;
}

void Jobs::end_polling() {
  Lock lock(*this);
  is_polled_ = false;
  update();
}

// The work of the job, where it has not begun and never will.
std::function<int32_t()> Jobs::cancel_if_waiting(const std::shared_ptr<Job>& job) {
  std::function<int32_t()> work;
  const auto at = std::find(waiting_.begin(), waiting_.end(), job);
  if (at == waiting_.end()) return work;
  work.swap(job->work);
  take_from_waiting(at);
  end(*job, JobStatus::cancelled, SPARSEKV_OK);
  return work;
}

// Flags are read under the mutex only: once a job has left waiting_, its words may be unmapped.
Jobs::Waiting::iterator Jobs::first_ready() {
  return std::find_if(waiting_.begin(), waiting_.end(),
                      [](const std::shared_ptr<Job>& job) { return is_set(job->signal); });
}

// The job itself stays alive: it is known, or the caller holds it.
void Jobs::take_from_waiting(Waiting::iterator at) {
  waiting_.erase(at);
  update();
}

// Under the mutex: who sees the flag and then asks for the job finds it ended; who was told that it
// ended finds the words written, and may unmap them. Release: who acquires the flag sees the status
// and the results; stores of x86 reach readers across PCIe in this order too. Results that other
// threads of the pool wrote came to this one through the pool's lock; an operation that stores
// past the cache fences in the thread that does so.
void Jobs::end(Job& job, JobStatus status, int32_t error) {
  job.status = status;
  job.error = error;
  if (job.signal.ran) {
    __atomic_store_n(job.signal.ran, job.began, __ATOMIC_RELAXED);
    __atomic_store_n(job.signal.ran + 1, job.ended, __ATOMIC_RELEASE);
  }
  if (status != JobStatus::done && job.signal.unless_done) {
    std::fill_n(job.signal.unless_done, job.signal.num_unless_done,
                std::numeric_limits<float>::quiet_NaN());
  }
  if (job.signal.status) __atomic_store_n(job.signal.status, int32_t(status), __ATOMIC_RELEASE);
  if (job.signal.done) __atomic_store_n(job.signal.done, job.signal.done_value, __ATOMIC_RELEASE);
  ended_.notify_all();
}

void Jobs::update() {
  num_waiting_.store(int(waiting_.size()), std::memory_order_relaxed);
  wants_thread_.store(!waiting_.empty() && !is_polled_);
}

}  // namespace sparsekv

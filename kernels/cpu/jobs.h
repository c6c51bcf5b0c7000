// Operations that wait for a flag, and that tell by a status and another flag how they ended, and
// when they ran.
//
// A job is waiting, then running, then ended. It leaves the first state once, under the mutex, by
// the hand of the thread that will run it or of whoever cancels it; that one also ends it. So each
// job ends once, and a cancelled one has not begun: cancelling a running job has no effect.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "api.h"

namespace sparsekv {

enum class JobStatus : int32_t { unended = 0, done = 1, failed = 2, cancelled = 3 };

struct Job {
  std::function<int32_t()> work;  // SPARSEKV_OK or what went wrong; it may throw
  sparsekv_signal signal;
  int64_t id;
  int64_t began = 0, ended = 0;  // to run; of the thread that runs it
  JobStatus status = JobStatus::unended;  // this and `error` under the mutex of the jobs
  int32_t error = SPARSEKV_OK;
};

// Without threads: those of a pool take the jobs and run them. Any thread may call anything.
class Jobs {
 public:
  Jobs() = default;
  ~Jobs() { cancel_all(); }  // none may be running
  Jobs(const Jobs&) = delete;
  Jobs& operator=(const Jobs&) = delete;

  // Id of a new job, known until it is released. None is used twice, not by forked children either.
  int64_t submit(std::function<int32_t()> work, const sparsekv_signal& signal);

  // These return false for an unknown id.
  bool wait(int64_t id, double seconds, JobStatus& status, int32_t& error);
  bool cancel(int64_t id);
  bool release(int64_t id);  // cancels the job, or waits for its end; its id is unknown then

  void cancel_all();
  void wait_for_running();

  // For the threads that serve:

  // The first waiting job whose flag is set, now running: the caller must `run` it. Null: none.
  std::shared_ptr<Job> take();
  void run(Job& job);

  bool has_waiting() const { return num_waiting_.load(std::memory_order_relaxed) > 0; }
  // Whether `take` would find one; false where another thread is just looking.
  bool has_ready();

  // One thread at a time polls: begin_polling() is false for others, and where nothing waits.
  bool begin_polling();
  void end_polling();
  // Jobs wait and nobody polls. A thread that may go to sleep reads it under the lock of those that
  // sleep, and whoever changes it to true wakes one of these afterwards: no change is missed.
  bool wants_thread() const { return wants_thread_.load(); }

 private:
  class Lock;
  using Waiting = std::vector<std::shared_ptr<Job>>;

  std::function<int32_t()> cancel_if_waiting(const std::shared_ptr<Job>& job);
  Waiting::iterator first_ready();
  void take_from_waiting(Waiting::iterator at);
  void end(Job& job, JobStatus status, int32_t error);
  void update();

  std::mutex mutex_;
  // Threads at the mutex that do not poll. Unlocking a mutex hands it to nobody: one that polls
  // would mostly get it again, and the others starve.
  std::atomic<int> num_wanting_{0};
  std::condition_variable ended_;
  std::unordered_map<int64_t, std::shared_ptr<Job>> known_;
  Waiting waiting_;  // in the order of submission
  bool is_polled_ = false;
  int num_running_ = 0;
  std::atomic<int> num_waiting_{0};
  std::atomic<bool> wants_thread_{false};
};

}  // namespace sparsekv

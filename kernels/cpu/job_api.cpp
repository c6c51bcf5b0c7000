#include "job_api.h"

namespace sparsekv {

bool is_valid(const sparsekv_signal& signal) {
  const uintptr_t words = reinterpret_cast<uintptr_t>(signal.wait) |
                          reinterpret_cast<uintptr_t>(signal.done) |
                          reinterpret_cast<uintptr_t>(signal.status) |
                          reinterpret_cast<uintptr_t>(signal.unless_done);
  return words % sizeof(uint32_t) == 0 && signal.num_unless_done >= 0 &&
         reinterpret_cast<uintptr_t>(signal.ran) % sizeof(int64_t) == 0;
}

}  // namespace sparsekv

using namespace sparsekv;

int32_t sparsekv_job_wait(int64_t job, double seconds, int32_t* status, int32_t* error) {
  const std::shared_ptr<Pool> pool = started_pool();
  JobStatus found = JobStatus::unended;
  if (!status || !error) return SPARSEKV_BAD_ARGUMENT;
  if (!pool || !pool->jobs().wait(job, seconds, found, *error)) return SPARSEKV_NO_SUCH_JOB;
  *status = int32_t(found);
  return SPARSEKV_OK;
}

int32_t sparsekv_job_cancel(int64_t job) {
  const std::shared_ptr<Pool> pool = started_pool();
  if (!pool || !pool->jobs().cancel(job)) return SPARSEKV_NO_SUCH_JOB;
  return SPARSEKV_OK;
}

void sparsekv_cancel_jobs(void) {
  const std::shared_ptr<Pool> pool = started_pool();
  if (pool) pool->jobs().cancel_all();
}

int32_t sparsekv_job_release(int64_t job) {
  const std::shared_ptr<Pool> pool = started_pool();
  if (!pool || !pool->jobs().release(job)) return SPARSEKV_NO_SUCH_JOB;
  return SPARSEKV_OK;
}

void sparsekv_store_flag(uint32_t* flag, uint32_t value) {
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

uint32_t sparsekv_load_flag(const uint32_t* flag) {
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}

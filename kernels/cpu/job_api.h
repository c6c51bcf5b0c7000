// For the C interface of operations that can be submitted as jobs.
#pragma once

#include <cstdint>

#include "api.h"
#include "pool.h"

namespace sparsekv {

// Whether the words can be read and written as a whole.
bool is_valid(const sparsekv_signal& signal);

// Submits what `make_work` returns, a function that returns an error code; it and the function may
// throw for want of memory.
template <class MakeWork>
int32_t submit_job(const sparsekv_signal* signal, int64_t* job, const MakeWork& make_work) {
  if (!signal || !job || !is_valid(*signal)) return SPARSEKV_BAD_ARGUMENT;
  try {
    *job = shared_pool()->submit(make_work(), *signal);
  } catch (...) {  // of whatever kind: nothing may leave a C interface
    return SPARSEKV_NO_MEMORY;
  }
  if (*job == 0) return SPARSEKV_NO_THREAD;
  return SPARSEKV_OK;
}

}  // namespace sparsekv

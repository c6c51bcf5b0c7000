// Calls of partial attention, cut into tasks for the pool and merged.
#pragma once

#include <vector>

#include "api.h"
#include "attention_task.h"

namespace sparsekv {

// SPARSEKV_OK, or what is wrong with the call.
int32_t check(const sparsekv_partial_attention_call& call);

struct KernelCall {
  const sparsekv_partial_attention_call& call;
  const Kernel& kernel;
};

// For calls that passed their check. May throw std::bad_alloc, before anything is written.
void partial_attention(const std::vector<KernelCall>& calls);

}  // namespace sparsekv

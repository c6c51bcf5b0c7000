// What this processor can run, and which kernel a shape runs on.
#pragma once

#include "attention_task.h"

namespace sparsekv {

struct Isa {
  const char* name;
  const Kernel* vectors;   // of any shape and dtype
  const Kernel* matrices;  // of the shapes that fill matrices; null: none
  const Kernel* groups;    // of fewer query rows than that, in matrices; null: none
};

// The set of that name; null for `name`: the best one. Null if there is none on this processor.
const Isa* find_isa(const char* name);

// By shape and dtype alone. Matrices for bf16 and at least 4 query rows of a kv head (its query heads
// times the tokens); else vectors, which read faster where there is that little to do.
const Kernel& kernel_for(const Isa& isa, int64_t group_size, int64_t num_queries, Dtype dtype);

}  // namespace sparsekv

// Copies of many pieces that are read once and not soon again: the interface of every instruction
// set.
#pragma once

#include <cstddef>

namespace sparsekv {

struct Piece {
  const char* from;
  char* to;
  size_t bytes;
};

struct CopyKernel {
  const char* name;
  // Copies the pieces, which may lie at any address. When it returns, every thread that learns of
  // it, and every device, sees them.
  void (*copy)(const Piece* pieces, int count);
};

// Null on other processors than x86-64.
extern const CopyKernel* const avx512_copy_kernel;
extern const CopyKernel* const avx2_copy_kernel;
extern const CopyKernel* const portable_copy_kernel;

// The kernel that goes with an instruction set of this processor that the attention can use.
const CopyKernel& copy_kernel_for(const char* isa);

}  // namespace sparsekv

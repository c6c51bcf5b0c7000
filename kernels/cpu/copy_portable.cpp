// Copies by the C library, which chooses its instructions itself: for any processor.
#include "copy.h"

#include <string.h>

namespace sparsekv {
namespace portable {
namespace {

void copy(const Piece* pieces, int count) {
  for (int i = 0; i < count; i++) memcpy(pieces[i].to, pieces[i].from, pieces[i].bytes);
}

const CopyKernel kernel = {"portable", copy};

}  // namespace
}  // namespace portable
}  // namespace sparsekv

const sparsekv::CopyKernel* const sparsekv::portable_copy_kernel = &sparsekv::portable::kernel;

// Blocks of stored keys or values, copied end to end.
#pragma once

#include <cstdint>
#include <vector>

#include "api.h"
#include "copy.h"

namespace sparsekv {

// SPARSEKV_OK, or what is wrong with the call.
int32_t check(const sparsekv_gather_blocks_call& call);

// A call that passed its check, cut into items that any threads may copy in any order. The call's
// arrays must stay as they are until the last item is done.
class BlockGather {
 public:
  // May throw std::bad_alloc; nothing has been written then.
  BlockGather(const sparsekv_gather_blocks_call& call, const CopyKernel& kernel);

  int64_t num_items() const { return num_items_; }
  void copy_item(int64_t item) const;

 private:
  class Pieces;
  void copy_slots(Pieces& pieces, int64_t list, int64_t begin, int64_t end) const;

  const sparsekv_gather_blocks_call call_;
  const CopyKernel& kernel_;
  std::vector<int64_t> starts_;  // of each list, in tokens of out counted through all lists
  int64_t tokens_per_item_;
  int64_t num_items_;
};

// The same on the pool's threads; returns when all is copied.
void gather_blocks(const sparsekv_gather_blocks_call& call, const CopyKernel& kernel);

}  // namespace sparsekv

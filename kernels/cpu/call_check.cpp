// What can be wrong with a call, found before anything is read through its pointers or written.
#include <cstdint>

#include "partial_attention.h"

namespace sparsekv {

namespace {

using Call = sparsekv_partial_attention_call;

constexpr int64_t kLargest = int64_t(1) << 48;  // of a size, stride or position: no sum overflows
constexpr int64_t kLargestDim = int64_t(1) << 16;

bool has_possible_sizes(const Call& call) {
  const int64_t sizes[] = {call.batch, call.num_heads,      call.num_queries, call.num_segments,
                           call.rows,  call.tokens,         call.block_size,  call.max_blocks,
                           call.sliding_window};
  for (const int64_t size : sizes) {
    if (size < 0 || size > kLargest) return false;
  }
  if (call.num_kv_heads < 1 || call.num_heads % call.num_kv_heads != 0 || call.head_dim < 1 ||
      call.head_dim > kLargestDim || call.head_dim_v < 1 || call.head_dim_v > kLargestDim ||
      call.num_heads > kLargestDim || call.dtype < 0 || call.dtype > 2) {
    return false;
  }
  // Counts whose products are formed; no memory holds more.
  return double(call.batch) * double(call.num_heads) * double(call.num_queries) <=
             double(kLargest) &&
         double(call.num_segments) * double(call.tokens) <= double(kLargest) / 4096;
}

int32_t check_positions(const Call& call) {
  if (call.query_start < -kLargest || call.query_start > kLargest) return SPARSEKV_BAD_POSITION;
  for (int64_t n = 0; n < call.num_segments; n++) {
    const int64_t position = call.positions[n];
    if (position < -kLargest || position > kLargest) return SPARSEKV_BAD_POSITION;
    if (call.key_mask && (position < 0 || position + call.tokens > call.key_mask_size)) {
      return SPARSEKV_BAD_POSITION;
    }
  }
  return SPARSEKV_OK;
}

int32_t check_rows(const Call& call) {
  if (!call.row_table) return call.rows < call.batch ? SPARSEKV_BAD_ARGUMENT : SPARSEKV_OK;
  for (int64_t i = 0; i < call.num_segments * call.batch; i++) {
    if (call.row_table[i] < 0 || call.row_table[i] >= call.rows) return SPARSEKV_BAD_ROW;
  }
  return SPARSEKV_OK;
}

int32_t check_blocks(const Call& call) {
  if (call.block_size == 0) return SPARSEKV_OK;
  if (!call.num_blocks || (call.max_blocks > 0 && !call.block_indices)) {
    return SPARSEKV_BAD_ARGUMENT;
  }
  const int64_t num_keys = call.num_segments * call.tokens;
  const int64_t existing = (num_keys + call.block_size - 1) / call.block_size;
  const int64_t pairs = call.batch * call.num_kv_heads;
  for (int64_t pair = 0; pair < pairs; pair++) {
    const int64_t count = call.num_blocks[pair];
    if (count < 0 || count > call.max_blocks || count > existing) return SPARSEKV_BAD_BLOCK;
    uint64_t largest = 0;  // a negative index is a large one
    for (int64_t i = 0; i < count; i++) {
      const uint64_t index = uint64_t(call.block_indices[pair * call.max_blocks + i]);
      largest = index > largest ? index : largest;
    }
    if (count > 0 && largest >= uint64_t(existing)) return SPARSEKV_BAD_BLOCK;
  }
  return SPARSEKV_OK;
}

}  // namespace

int32_t check(const Call& call) {
  if (!has_possible_sizes(call)) return SPARSEKV_BAD_ARGUMENT;
  if (call.batch == 0 || call.num_heads == 0 || call.num_queries == 0) return SPARSEKV_OK;
  if (!call.query || !call.out || !call.lse) return SPARSEKV_BAD_ARGUMENT;
  if (call.num_segments == 0 || call.tokens == 0) return check_blocks(call);
  if (!call.key || !call.value || !call.positions) return SPARSEKV_BAD_ARGUMENT;
  int32_t wrong = check_positions(call);
  if (wrong == SPARSEKV_OK) wrong = check_rows(call);
  if (wrong == SPARSEKV_OK) wrong = check_blocks(call);
  return wrong;
}

}  // namespace sparsekv

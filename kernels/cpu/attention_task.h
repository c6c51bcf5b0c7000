// What the kernels of every instruction set share: one task, and the table of what a set offers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparsekv {

enum class Dtype : int32_t { fp32 = 0, bf16 = 1, fp16 = 2 };

// Keys of one tile: with their scores, and the values that are fetched meanwhile, they stay about
// within the first-level cache.
constexpr int kTile = 64;

// Keys or values of one row and kv head, by segment, physical row and token; strides in bytes, the
// numbers of one token next to each other.
struct Stored {
  const char* start;
  int64_t segment_stride;
  int64_t row_stride;
  int64_t token_stride;
};

// Some query tokens of one row and one kv head against a range of the stored keys.
struct Task {
  const float* query;  // of the kv head's first query head
  int64_t query_head_stride;
  int64_t query_token_stride;
  int64_t first_query_position;
  int num_queries;
  int group_size;
  int head_dim;
  int head_dim_v;
  float scale;

  Stored key;
  Stored value;
  int64_t tokens;             // of one segment
  const int64_t* positions;   // of the first token of each segment
  const int64_t* row_table;   // entry of this row in segment 0; null: `row` everywhere
  int64_t row_table_stride;
  int64_t row;
  const uint8_t* key_mask;    // of this row, by position; null: nothing is hidden by it
  int64_t first_position;     // of this row: keys before it are padding
  int64_t sliding_window;     // a query at position p sees keys at p - sliding_window + 1 ... p
  const int64_t* blocks;      // which blocks to attend to, in this order; null: all keys
  int64_t block_size;         // block n: keys n * block_size ... of all segments, end to end
  int64_t num_keys;           // of all segments
  int64_t begin;              // range of keys, counted through all segments, or through the blocks
  int64_t end;

  float* partial;  // (rows, partial_row_floats): weighted values, total weight, largest score
  float* scratch;  // scratch_floats(...) of them, aligned to 64 bytes
};

// Query rows of a task: row r is head r / num_queries of the group, token r % num_queries.
inline int task_rows(const Task& task) { return task.group_size * task.num_queries; }

// Rows start with a cache line.
inline int64_t partial_row_floats(int64_t head_dim_v) { return (head_dim_v + 2 + 15) / 16 * 16; }

// Upper bounds: of the vector kernels, with rows padded to 8, numbers to 32, lanes up to 16; and of
// the matrix kernels, with rows and numbers of keys padded to 32, numbers of values to 64.
inline size_t vector_scratch_floats(size_t rows, size_t head_dim, size_t head_dim_v) {
  const size_t padded_rows = rows + 24;
  return padded_rows * (head_dim + 32 + head_dim_v + 32 + kTile + 16 + 4) + 2 * kTile * 32 + 256;
}
inline size_t matrix_scratch_floats(size_t rows, size_t head_dim, size_t head_dim_v) {
  const size_t padded_rows = rows + 32, padded_dim = head_dim + 32, padded_dim_v = head_dim_v + 64;
  return padded_rows * (2 * padded_dim + padded_dim_v + 5 * kTile + 4) +
         (2 * kTile + 1) * (padded_dim + padded_dim_v) + 2 * kTile * 64 + 256;
}
inline size_t scratch_floats(size_t rows, size_t head_dim, size_t head_dim_v) {
  const size_t vectors = vector_scratch_floats(rows, head_dim, head_dim_v);
  const size_t matrices = matrix_scratch_floats(rows, head_dim, head_dim_v);
  return vectors > matrices ? vectors : matrices;
}

// Scores inside the library are q.k with the query as it is given, so nothing is rounded before the
// products, but for a negative scale, whose sign moves to the query; so does a scale of 0, which must
// not meet the score of a hidden key. A weight is 2^(weight_exponent * (score - largest score)).
inline float query_sign(float scale) { return scale > 0 ? 1.0f : scale < 0 ? -1.0f : scale; }
inline float weight_exponent(float scale) {
  constexpr float kLog2OfE = 1.4426950408889634f;
  return scale == 0 ? kLog2OfE : (scale < 0 ? -scale : scale) * kLog2OfE;
}

struct Kernel {
  const char* name;
  void (*attend)(const Task& task, Dtype dtype);
  int64_t most_keys;  // of a task, so that its sums of single precision are as exact as its weights
};

// Null on other processors than x86-64, or where the compiler does not know the set.
extern const Kernel* const amx_kernel;
extern const Kernel* const amx_group_kernel;
extern const Kernel* const avx512_kernel;
extern const Kernel* const avx2_kernel;
// On any processor.
extern const Kernel* const portable_kernel;
extern const Kernel* const amx_emulated_kernel;
extern const Kernel* const amx_emulated_group_kernel;

}  // namespace sparsekv

// The library's C interface: plain structs and error codes, nothing of Python or torch.
#pragma once

#include <stdint.h>

#define SPARSEKV_EXPORT extern "C" __attribute__((visibility("default")))

// Counted up when anything below changes its meaning; checked by who loads the library.
#define SPARSEKV_INTERFACE 2

enum {
  SPARSEKV_OK = 0,
  SPARSEKV_BAD_ARGUMENT = 1,    // a size, dtype or pointer that cannot be
  SPARSEKV_BAD_ROW = 2,         // an entry of the row table is no row
  SPARSEKV_BAD_POSITION = 3,    // a position is out of range, or beyond the key mask
  SPARSEKV_NO_MEMORY = 4,       // the workspace does not fit
  SPARSEKV_NO_SUCH_ISA = 5,     // unknown, or not of this processor
  SPARSEKV_BAD_BLOCK = 6,       // a listed block does not exist, or a list is longer than its room
};

// Strides count elements. The numbers of one token, or of one query, lie next to each other.
struct sparsekv_partial_attention_call {
  const float* query;       // (batch, num_heads, num_queries, head_dim)
  const void* key;          // (num_segments, rows, num_kv_heads, tokens, head_dim)
  const void* value;        // (num_segments, rows, num_kv_heads, tokens, head_dim_v)
  const int64_t* positions; // (num_segments,)
  const int64_t* row_table; // (num_segments, batch), end to end; null: row b is row b
  const uint8_t* key_mask;  // (batch, key_mask_size); null: nothing is hidden by it
  const int64_t* key_start; // (batch,), first visible position; null: nothing is hidden by it
  const int64_t* block_indices;  // (batch, num_kv_heads, max_blocks), end to end, each block once
  const int64_t* num_blocks;     // (batch, num_kv_heads), end to end: how many of them count
  float* out;               // (batch, num_heads, num_queries, head_dim_v), end to end
  float* lse;               // (batch, num_heads, num_queries), end to end
  int64_t query_strides[3]; // batch, head, query
  int64_t key_strides[4];   // segment, row, head, token
  int64_t value_strides[4];
  int64_t key_mask_stride;
  int64_t key_mask_size;
  int64_t batch, num_heads, num_queries, head_dim, head_dim_v;
  int64_t num_segments, rows, num_kv_heads, tokens;
  int64_t query_start;
  int64_t sliding_window;   // a query at p sees p - sliding_window + 1 ... p; 0: from the first
  int64_t block_size;       // block n: keys n * block_size ... of all segments; 0: no lists
  int64_t max_blocks;
  float softmax_scale;
  int32_t dtype;            // of keys and values: 0 float32, 1 bfloat16, 2 float16
};

// Attention to one set of keys; returns when out and lse are written, or an error code with both
// untouched. Any number of threads may call it at once.
SPARSEKV_EXPORT int32_t sparsekv_partial_attention(const sparsekv_partial_attention_call* call);

// Strides count bytes. The numbers of one token lie next to each other; out must not overlap the
// source, nor itself.
struct sparsekv_gather_blocks_call {
  const void* source;           // (num_segments, rows, num_kv_heads, tokens, numbers of a token)
  const int64_t* block_indices; // (batch, num_kv_heads, max_blocks), end to end; null: slot n is of
                                // block n
  const int64_t* num_blocks;    // (batch, num_kv_heads), end to end; null: max_blocks everywhere
  const int64_t* row_table;     // as above
  void* out;                    // (batch, num_kv_heads, max_blocks, block_size, numbers of a token)
  int64_t source_strides[4];    // segment, row, head, token
  int64_t out_strides[4];       // row, head, slot, token
  int64_t batch, num_kv_heads, max_blocks, block_size;
  int64_t num_segments, rows, tokens;
  int64_t token_bytes;
};

// Copies blocks of `block_size` tokens, counted through all segments, to the slots of their lists;
// returns when they are written, or an error code with `out` untouched. Slots beyond num_blocks,
// and tokens beyond the last segment, are left as they are.
SPARSEKV_EXPORT int32_t sparsekv_gather_blocks(const sparsekv_gather_blocks_call* call);

SPARSEKV_EXPORT int32_t sparsekv_interface(void);

// Of the sources that the library was built from.
SPARSEKV_EXPORT const char* sparsekv_fingerprint(void);

// Name of the instruction set in use: "avx512", "avx2" or "portable".
SPARSEKV_EXPORT const char* sparsekv_isa(void);

// Uses the named set from now on; null: the best that the processor has.
SPARSEKV_EXPORT int32_t sparsekv_set_isa(const char* name);

// Number of threads, which are started if they have not been.
SPARSEKV_EXPORT int32_t sparsekv_threads(void);

// Number of threads from the next call on; 0: the default number.
SPARSEKV_EXPORT int32_t sparsekv_set_threads(int32_t threads);

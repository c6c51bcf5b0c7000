// The library's C interface: plain structs and error codes, nothing of Python or torch.
#pragma once

#include <stdint.h>

#define SPARSEKV_EXPORT extern "C" __attribute__((visibility("default")))

// Counted up when anything below changes its meaning; checked by who loads the library.
#define SPARSEKV_INTERFACE 6

enum {
  SPARSEKV_OK = 0,
  SPARSEKV_BAD_ARGUMENT = 1,    // a size, dtype or pointer that cannot be
  SPARSEKV_BAD_ROW = 2,         // an entry of the row table is no row
  SPARSEKV_BAD_POSITION = 3,    // a position is out of range, or beyond the key mask
  SPARSEKV_NO_MEMORY = 4,       // the workspace does not fit
  SPARSEKV_NO_SUCH_ISA = 5,     // unknown, or not of this processor
  SPARSEKV_BAD_BLOCK = 6,       // a listed block does not exist, or a list is longer than its room
  SPARSEKV_NO_SUCH_JOB = 7,     // released, or of the process that this one was forked from
  SPARSEKV_NO_THREAD = 8,       // the system grants no thread to run a job
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

// Name of the instruction set in use: "amx", "avx512", "avx2" or "portable"; or "amx_emulated", for
// tests, which no processor has to have.
SPARSEKV_EXPORT const char* sparsekv_isa(void);

// Name of the kernel that computes a call of these shapes in the set in use: that of the set, but
// for "amx" and "amx_emulated" only with bfloat16 and num_queries times num_heads / num_kv_heads of
// at least 4; else "avx512", and "portable".
SPARSEKV_EXPORT const char* sparsekv_kernel(int64_t num_heads, int64_t num_kv_heads,
                                            int64_t num_queries, int32_t dtype);

// Uses the named set from now on; null: the best that the processor has, never "amx_emulated".
SPARSEKV_EXPORT int32_t sparsekv_set_isa(const char* name);

// Number of threads, which are started if they have not been.
SPARSEKV_EXPORT int32_t sparsekv_threads(void);

// Number of threads from now on; 0: the default number. Waits for jobs that run, not for others.
SPARSEKV_EXPORT int32_t sparsekv_set_threads(int32_t threads);

// When a job starts, and what it writes when it ends: first when it ran, and NaN if it is not done,
// then the status, then the flag. All is aligned to 4 bytes, and `ran` to 8, in any mapped memory;
// it must stay until the job has ended.
struct sparsekv_signal {
  const uint32_t* wait;  // starts when int32_t(*wait - wait_value) >= 0; null: at once
  uint32_t* done;        // becomes done_value, whatever the status is; null: nobody asks
  int32_t* status;       // becomes one of the numbers below; null: nobody asks
  int64_t* ran;          // two: become when it began to run and when it ended, in nanoseconds of
                         // the steady clock, 0 and 0 where it never ran; null: nobody asks
  float* unless_done;    // numbers that become NaN where the job fails or is cancelled; null: none
  int64_t num_unless_done;
  uint32_t wait_value;
  uint32_t done_value;
};

enum {
  SPARSEKV_JOB_UNENDED = 0,   // waiting or running; written when the job is submitted
  SPARSEKV_JOB_DONE = 1,      // the results are there
  SPARSEKV_JOB_FAILED = 2,    // some error code; the results are not to be used
  SPARSEKV_JOB_CANCELLED = 3, // nothing of the results was written, but what is `unless_done`
};

// Attention when its flag is set, on the library's threads: `count` calls, one after the other, are
// one job. Returns at once, with the number of the job, or an error code and nothing submitted. The
// structs, positions, row_table and key_start are copied; all else is read and written in place,
// after the flag was set and before the job has ended: wrong block lists make the job fail. Jobs
// start in the order in which they become ready, and may run at the same time.
SPARSEKV_EXPORT int32_t sparsekv_submit_partial_attention(
    const sparsekv_partial_attention_call* calls, int64_t count, const sparsekv_signal* signal,
    int64_t* job);

// Copies of blocks as a job: `count` calls, one after the other, whose structs are copied; all that
// they point to is read in place.
SPARSEKV_EXPORT int32_t sparsekv_submit_gather_blocks(const sparsekv_gather_blocks_call* calls,
                                                      int64_t count, const sparsekv_signal* signal,
                                                      int64_t* job);

// Waits until the job has ended, or for so many seconds, then tells its status and error code.
SPARSEKV_EXPORT int32_t sparsekv_job_wait(int64_t job, double seconds, int32_t* status,
                                          int32_t* error);

// Ends the job, unless it runs already: then it will end as if nobody had asked.
SPARSEKV_EXPORT int32_t sparsekv_job_cancel(int64_t job);

// Cancels all jobs of the process.
SPARSEKV_EXPORT void sparsekv_cancel_jobs(void);

// Cancels the job, or waits for its end if it runs, and forgets its number: afterwards all that the
// job was given may be freed. To be called once for each job.
SPARSEKV_EXPORT int32_t sparsekv_job_release(int64_t job);

// A word that other threads or devices use at the same time: stores order with all that was written
// before, loads with all that is read after.
SPARSEKV_EXPORT void sparsekv_store_flag(uint32_t* flag, uint32_t value);
SPARSEKV_EXPORT uint32_t sparsekv_load_flag(const uint32_t* flag);

// Partial attention in every instruction set there is: the same numbers at once, as a job, and on
// any number of threads.
#include <cstring>
#include <random>
#include <vector>

#include "checks.h"

namespace {

constexpr int64_t kBatch = 2, kKvHeads = 2, kQueries = 2, kDim = 40, kDimV = 24;
constexpr int64_t kSegments = 3, kTokens = 411;
constexpr int64_t kBlockSize = 32, kMaxBlocks = 30;
constexpr int64_t kBlocks = (kSegments * kTokens + kBlockSize - 1) / kBlockSize;

// 48 and 12 query rows a kv head: kernels in matrices have two ways to lay them out.
constexpr int64_t kManyHeads = 48, kFewHeads = 12;

struct Case {
  Case(int32_t dtype, int64_t num_heads)
      : query(kBatch * num_heads * kQueries * kDim),
        stored(kSegments * kBatch * kKvHeads * kTokens * (kDim + kDimV) * (dtype == 0 ? 2 : 1)),
        key_mask(kBatch * kSegments * kTokens) {
    std::mt19937 random(1);
    for (float& x : query) x = float(random() % 2001) / 1000 - 1;
    for (size_t i = 0; i < stored.size(); i++) {
      // float32 and bfloat16 of about 1, or float16 of about 1
      const uint16_t high = dtype == 2 ? 0x3c00 : 0x3f80;
      stored[i] = uint16_t((random() % 2 << 15) | (high + random() % 64));
    }
    for (uint8_t& visible : key_mask) visible = random() % 8 > 0;
    call.query = query.data();
    call.key = stored.data();
    call.value = stored.data() + stored.size() / (kDim + kDimV) * kDim;
    call.positions = positions;
    call.row_table = row_table;
    call.key_mask = key_mask.data();
    const int64_t query_strides[] = {num_heads * kQueries * kDim, kQueries * kDim, kDim};
    std::memcpy(call.query_strides, query_strides, sizeof query_strides);
    for (int i = 0; i < 4; i++) {
      const int64_t tokens[] = {kBatch * kKvHeads * kTokens, kKvHeads * kTokens, kTokens, 1};
      call.key_strides[i] = tokens[i] * kDim;
      call.value_strides[i] = tokens[i] * kDimV;
    }
    call.key_mask_stride = call.key_mask_size = kSegments * kTokens;
    call.batch = call.rows = kBatch;
    call.num_heads = num_heads;
    call.num_queries = kQueries;
    call.head_dim = kDim;
    call.head_dim_v = kDimV;
    call.num_segments = kSegments;
    call.num_kv_heads = kKvHeads;
    call.tokens = kTokens;
    call.query_start = kSegments * kTokens - kQueries;
    call.softmax_scale = 0.15f;
    call.dtype = dtype;
  }

  // Only blocks of uneven lists, from a first position, within a window.
  void hide_most() {
    for (size_t i = 0; i < block_indices.size(); i++) {
      block_indices[i] = int64_t(i % kMaxBlocks * 7 + i / kMaxBlocks) % kBlocks;
    }
    call.block_indices = block_indices.data();
    call.num_blocks = num_blocks;
    call.block_size = kBlockSize;
    call.max_blocks = kMaxBlocks;
    call.key_start = key_start;
    call.sliding_window = 700;
  }

  sparsekv_partial_attention_call into(std::vector<float>& results) {
    const int64_t rows = kBatch * call.num_heads * kQueries;
    results.assign(rows * (kDimV + 1), -7.0f);
    call.out = results.data();
    call.lse = results.data() + rows * kDimV;
    return call;
  }

  const int64_t positions[kSegments] = {2 * kTokens, 0, kTokens};
  const int64_t row_table[kSegments * kBatch] = {0, 1, 1, 0, 1, 1};
  const int64_t num_blocks[kBatch * kKvHeads] = {kMaxBlocks, 7, 0, kMaxBlocks};
  const int64_t key_start[kBatch] = {3, 600};
  std::vector<float> query;
  std::vector<uint16_t> stored;
  std::vector<uint8_t> key_mask;
  std::vector<int64_t> block_indices = std::vector<int64_t>(kBatch * kKvHeads * kMaxBlocks);
  sparsekv_partial_attention_call call = {};
};

void as_a_job_equals_at_once(Case& given) {
  std::vector<float> want, got[4];
  CHECK(sparsekv_set_threads(1) == SPARSEKV_OK);
  auto call = given.into(want);
  CHECK(sparsekv_partial_attention(&call) == SPARSEKV_OK);
  for (const float x : want) CHECK(x == x && x != -7.0f);

  CHECK(sparsekv_set_threads(3) == SPARSEKV_OK);
  Words words[4];
  int64_t jobs[4];
  for (int n = 0; n < 4; n++) {
    call = given.into(got[n]);
    const sparsekv_signal signal = words[n].signal();
    CHECK(sparsekv_submit_partial_attention(&call, 1, &signal, &jobs[n]) == SPARSEKV_OK);
    std::memset(&call, 0xff, sizeof call);  // the library has its own copy
  }
  CHECK(sparsekv_job_cancel(jobs[3]) == SPARSEKV_OK);
  for (const int n : {2, 0, 1}) words[n].set();
  for (int n = 0; n < 3; n++) {
    CHECK(words[n].wait_for_done() == SPARSEKV_JOB_DONE);
    CHECK(got[n] == want);
  }
  for (const float x : got[3]) CHECK(x == -7.0f);
  for (const int64_t job : jobs) CHECK(sparsekv_job_release(job) == SPARSEKV_OK);
}

// Calls of one job are one loop of the pool.
void several_in_a_job_equal_each_alone(Case& given) {
  std::vector<float> want[3], got[3];
  sparsekv_partial_attention_call calls[3];
  CHECK(sparsekv_set_threads(3) == SPARSEKV_OK);
  for (int n = 0; n < 3; n++) {
    given.call.num_segments = n + 1;
    auto call = given.into(want[n]);
    CHECK(sparsekv_partial_attention(&call) == SPARSEKV_OK);
    calls[n] = given.into(got[n]);
  }
  Words words;
  int64_t job;
  const sparsekv_signal signal = words.signal();
  CHECK(sparsekv_submit_partial_attention(calls, 3, &signal, &job) == SPARSEKV_OK);
  words.set();
  CHECK(words.wait_for_done() == SPARSEKV_JOB_DONE);
  for (int n = 0; n < 3; n++) CHECK(got[n] == want[n]);
  CHECK(sparsekv_job_release(job) == SPARSEKV_OK);
}

void equal_however_they_are_called(const char* isa, int32_t dtype, int64_t num_heads) {
  if (sparsekv_set_isa(isa) != SPARSEKV_OK) return;
  Case given(dtype, num_heads);
  as_a_job_equals_at_once(given);
  several_in_a_job_equal_each_alone(given);

  Case lists(dtype, num_heads);
  lists.hide_most();
  as_a_job_equals_at_once(lists);
}

}  // namespace

void test_attention() {
  for (const char* isa : {"avx512", "avx2", "portable"}) {
    for (int32_t dtype = 0; dtype < 3; dtype++) {
      equal_however_they_are_called(isa, dtype, kManyHeads);
    }
  }
  constexpr int32_t kBf16 = 1;  // of others it has no matrices
  for (const int64_t num_heads : {kManyHeads, kFewHeads}) {
    equal_however_they_are_called("amx_emulated", kBf16, num_heads);
  }
}

// Blocks copied to the slots of their lists, at once and as a job, in every instruction set.
#include <vector>

#include "checks.h"

namespace {

constexpr int64_t kRows = 2, kKvHeads = 2, kSegments = 3, kTokens = 500, kTokenBytes = 256;
constexpr int64_t kLists = kRows * kKvHeads;
constexpr int64_t kBlockSize = 16, kMaxBlocks = 90;  // together more than one item of the copy
constexpr int64_t kBlocks = (kSegments * kTokens + kBlockSize - 1) / kBlockSize;
constexpr int64_t kPerSegment = kRows * kKvHeads * kTokens * kTokenBytes;
constexpr uint8_t kUntouched = 0xee;

struct Case {
  Case()
      : source(kSegments * kPerSegment),
        block_indices(kLists * kMaxBlocks) {
    for (size_t i = 0; i < source.size(); i++) source[i] = uint8_t(i % 251 + i / 4096);
    for (size_t i = 0; i < block_indices.size(); i++) block_indices[i] = int64_t(i) * 37 % kBlocks;
    call.source = source.data();
    call.block_indices = block_indices.data();
    call.num_blocks = num_blocks;
    call.row_table = row_table;
    const int64_t head = kTokens * kTokenBytes;
    const int64_t source_strides[] = {kPerSegment, kKvHeads * head, head, kTokenBytes};
    const int64_t slot = kBlockSize * kTokenBytes, list = kMaxBlocks * slot;
    const int64_t out_strides[] = {kKvHeads * list, list, slot, kTokenBytes};
    for (int i = 0; i < 4; i++) {
      call.source_strides[i] = source_strides[i];
      call.out_strides[i] = out_strides[i];
    }
    call.batch = call.rows = kRows;
    call.num_kv_heads = kKvHeads;
    call.max_blocks = kMaxBlocks;
    call.block_size = kBlockSize;
    call.num_segments = kSegments;
    call.tokens = kTokens;
    call.token_bytes = kTokenBytes;
  }

  sparsekv_gather_blocks_call into(std::vector<uint8_t>& out) {
    out.assign(kLists * kMaxBlocks * kBlockSize * kTokenBytes, kUntouched);
    call.out = out.data();
    return call;
  }

  // What a token of a slot of a list is to become: null where nothing is copied.
  const uint8_t* token(int64_t list, int64_t slot, int64_t n) const {
    if (slot >= num_blocks[list]) return nullptr;
    const int64_t at = block_indices[list * kMaxBlocks + slot] * kBlockSize + n;
    if (at >= kSegments * kTokens) return nullptr;
    const int64_t segment = at / kTokens;
    const int64_t row = row_table[segment * kRows + list / kKvHeads];
    const int64_t head = (segment * kRows + row) * kKvHeads + list % kKvHeads;
    return source.data() + (head * kTokens + at % kTokens) * kTokenBytes;
  }

  void check(const std::vector<uint8_t>& out) const {
    const uint8_t* found = out.data();
    for (int64_t list = 0; list < kLists; list++) {
      for (int64_t n = 0; n < kMaxBlocks * kBlockSize; n++, found += kTokenBytes) {
        const uint8_t* want = token(list, n / kBlockSize, n % kBlockSize);
        for (int64_t i = 0; i < kTokenBytes; i++) CHECK(found[i] == (want ? want[i] : kUntouched));
      }
    }
  }

  const int64_t num_blocks[kLists] = {kMaxBlocks, 41, 0, kMaxBlocks};
  const int64_t row_table[kSegments * kRows] = {0, 1, 1, 0, 1, 1};
  std::vector<uint8_t> source;
  std::vector<int64_t> block_indices;
  sparsekv_gather_blocks_call call = {};
};

void blocks_reach_their_slots(const char* isa) {
  if (sparsekv_set_isa(isa) != SPARSEKV_OK) return;
  Case given;
  std::vector<uint8_t> at_once, by_job;
  CHECK(sparsekv_set_threads(3) == SPARSEKV_OK);
  auto call = given.into(at_once);
  CHECK(sparsekv_gather_blocks(&call) == SPARSEKV_OK);
  given.check(at_once);

  std::vector<uint8_t> second;
  sparsekv_gather_blocks_call calls[] = {given.into(by_job), given.into(second)};
  Words words;
  int64_t job;
  const sparsekv_signal signal = words.signal();
  CHECK(sparsekv_submit_gather_blocks(calls, 0, &signal, &job) == SPARSEKV_BAD_ARGUMENT);
  CHECK(sparsekv_submit_gather_blocks(calls, 2, &signal, &job) == SPARSEKV_OK);
  calls[0] = calls[1] = {};  // the library has its own copies
  words.set();
  CHECK(words.wait_for_done() == SPARSEKV_JOB_DONE);
  given.check(by_job);
  given.check(second);
  CHECK(sparsekv_job_release(job) == SPARSEKV_OK);
}

}  // namespace

void test_gather() {
  for (const char* isa : {"avx512", "avx2", "portable"}) blocks_reach_their_slots(isa);
}

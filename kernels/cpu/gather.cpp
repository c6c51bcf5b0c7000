#include "gather.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "pool.h"

namespace sparsekv {

namespace {

using Call = sparsekv_gather_blocks_call;

constexpr int64_t kLargest = int64_t(1) << 48;  // of a size or stride: no product of use overflows

// What one item copies at least, if there is that much: a thread is worth waking for it.
constexpr int64_t kItemBytes = int64_t(512) << 10;

// Pieces that are listed at a time: few enough that the list stays in the first-level cache.
constexpr int kListedPieces = 256;

int64_t divided_up(int64_t a, int64_t b) { return a / b + (a % b > 0); }

int64_t tokens_in(const Call& call) { return call.num_segments * call.tokens; }

int64_t list_length(const Call& call, int64_t list) {
  return call.num_blocks ? call.num_blocks[list] : call.max_blocks;
}

int64_t block_of(const Call& call, int64_t list, int64_t slot) {
  return call.block_indices ? call.block_indices[list * call.max_blocks + slot] : slot;
}

bool fit(std::initializer_list<int64_t> factors) {
  double product = 1;
  for (const int64_t factor : factors) product *= double(factor);
  return product <= double(kLargest);
}

}  // namespace

// Pieces on their way to the kernel; those that continue each other on both sides become one.
class BlockGather::Pieces {
 public:
  explicit Pieces(const CopyKernel& kernel) : kernel_(kernel) {}

  void add(const char* from, char* to, size_t bytes) {
    if (count_ > 0) {
      Piece& last = pieces_[count_ - 1];
      if (last.from + last.bytes == from && last.to + last.bytes == to) {
        last.bytes += bytes;
        return;
      }
      if (count_ == kListedPieces) copy();
    }
    pieces_[count_++] = {from, to, bytes};
  }

  void copy() {
    if (count_ > 0) kernel_.copy(pieces_, count_);
    count_ = 0;
  }

 private:
  const CopyKernel& kernel_;
  int count_ = 0;
  Piece pieces_[kListedPieces];
};

BlockGather::BlockGather(const Call& call, const CopyKernel& kernel)
    : call_(call), kernel_(kernel), starts_(1, 0) {
  const int64_t lists = call.batch * call.num_kv_heads;
  starts_.reserve(lists + 1);
  for (int64_t list = 0; list < lists; list++) {
    starts_.push_back(starts_.back() + list_length(call, list) * call.block_size);
  }
  tokens_per_item_ = std::max<int64_t>(1, kItemBytes / std::max<int64_t>(1, call.token_bytes));
  num_items_ = divided_up(starts_.back(), tokens_per_item_);
}

void BlockGather::copy_item(int64_t item) const {
  int64_t at = item * tokens_per_item_;
  const int64_t end = std::min(starts_.back(), at + tokens_per_item_);
  int64_t list = std::upper_bound(starts_.begin(), starts_.end(), at) - starts_.begin() - 1;
  Pieces pieces(kernel_);
  for (; at < end; list++) {
    const int64_t list_end = std::min(end, starts_[list + 1]);
    copy_slots(pieces, list, at - starts_[list], list_end - starts_[list]);
    at = list_end;
  }
  pieces.copy();
}

// Tokens begin ... end - 1 of one list's slots, as far as there are such tokens in the source.
void BlockGather::copy_slots(Pieces& pieces, int64_t list, int64_t begin, int64_t end) const {
  const int64_t row = list / call_.num_kv_heads, head = list % call_.num_kv_heads;
  const int64_t bytes = call_.token_bytes, size = call_.block_size;
  const int64_t from_step = call_.source_strides[3], to_step = call_.out_strides[3];
  const bool is_dense = from_step == bytes && to_step == bytes;
  const char* source = static_cast<const char*>(call_.source) + head * call_.source_strides[2];
  char* out = static_cast<char*>(call_.out) + row * call_.out_strides[0] +
              head * call_.out_strides[1];
  const int64_t* rows = call_.row_table ? call_.row_table + row : nullptr;

  int64_t slot = begin / size, token = begin % size;
  for (int64_t left = end - begin; left > 0; slot++, token = 0) {
    const int64_t count = std::min(size - token, left);
    left -= count;
    char* to = out + slot * call_.out_strides[2] + token * to_step;
    int64_t at = block_of(call_, list, slot) * size + token;
    const int64_t stop = std::min(at + count, tokens_in(call_));
    while (at < stop) {
      const int64_t segment = at / call_.tokens, within = at - segment * call_.tokens;
      const int64_t physical = rows ? rows[segment * call_.batch] : row;
      const char* from = source + segment * call_.source_strides[0] +
                         physical * call_.source_strides[1] + within * from_step;
      const int64_t tokens = std::min(stop - at, call_.tokens - within);
      if (is_dense) {
        pieces.add(from, to, tokens * bytes);
      } else {
        for (int64_t t = 0; t < tokens; t++) {
          pieces.add(from + t * from_step, to + t * to_step, bytes);
        }
      }
      at += tokens;
      to += tokens * to_step;
    }
  }
}

int32_t check(const Call& call) {
  const int64_t sizes[] = {call.batch, call.num_kv_heads, call.max_blocks,
                           call.num_segments, call.rows, call.tokens};
  for (const int64_t size : sizes) {
    if (size < 0 || size > kLargest) return SPARSEKV_BAD_ARGUMENT;
  }
  for (const int64_t size : {call.block_size, call.token_bytes}) {
    if (size < 1 || size > kLargest) return SPARSEKV_BAD_ARGUMENT;
  }
  // Counts whose products are formed; no memory holds more.
  if (!fit({call.batch, call.num_kv_heads, call.max_blocks, call.block_size, call.token_bytes}) ||
      !fit({call.num_segments, call.tokens}) || !fit({call.num_segments, call.batch})) {
    return SPARSEKV_BAD_ARGUMENT;
  }
  const int64_t lists = call.batch * call.num_kv_heads;
  if (lists == 0) return SPARSEKV_OK;
  if (!call.row_table && call.rows < call.batch) return SPARSEKV_BAD_ARGUMENT;
  for (int64_t i = 0; call.row_table && i < call.num_segments * call.batch; i++) {
    if (call.row_table[i] < 0 || call.row_table[i] >= call.rows) return SPARSEKV_BAD_ROW;
  }
  const int64_t blocks = divided_up(tokens_in(call), call.block_size);
  for (int64_t list = 0; list < lists; list++) {
    const int64_t length = list_length(call, list);
    if (length < 0 || length > call.max_blocks || length > blocks) return SPARSEKV_BAD_BLOCK;
    bool is_wrong = false;  // one test for all: the lists are long, and nothing is copied meanwhile
    for (int64_t slot = 0; slot < length; slot++) {
      is_wrong |= uint64_t(block_of(call, list, slot)) >= uint64_t(blocks);
    }
    if (is_wrong) return SPARSEKV_BAD_BLOCK;
    if (length > 0 && (!call.source || !call.out)) return SPARSEKV_BAD_ARGUMENT;
  }
  return SPARSEKV_OK;
}

const CopyKernel& copy_kernel_for(const char* isa) {
  for (const CopyKernel* kernel : {avx2_copy_kernel, portable_copy_kernel}) {
    if (kernel && std::strcmp(isa, kernel->name) == 0) return *kernel;
  }
  return *avx512_copy_kernel;  // its own, or one that has more besides
}

void gather_blocks(const Call& call, const CopyKernel& kernel) {
  const BlockGather gather(call, kernel);
  shared_pool()->run(gather.num_items(), [&](int64_t item) { gather.copy_item(item); });
}

}  // namespace sparsekv

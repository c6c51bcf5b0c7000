// Copies with stores that pass the caches by, in the vectors of the file that includes this one.
//
// That file defines SPARSEKV_VECTORS, a namespace with copy_line, which moves 64 bytes to an address
// aligned to 64. Such a store reads no line before it writes it and displaces nothing that the
// attention keeps in the caches. Meanwhile pieces further on are fetched: one alone is too short for
// the processor to notice where it leads.

namespace sparsekv {
namespace SPARSEKV_VECTORS {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kLinesAtOnce = 4;
constexpr size_t kLinesAhead = 64;

// What is to be fetched next, line by line through all the pieces.
class Ahead {
 public:
  Ahead(const Piece* pieces, int count) : piece_(pieces), end_(pieces + count) {}

  // Into the second-level cache: the first is too small for what is on its way.
  inline __attribute__((always_inline)) void fetch(size_t lines) {
    for (; lines > 0 && piece_ != end_; lines--) {
      __builtin_prefetch(piece_->from + offset_, 0, 2);
      offset_ += kLine;
      if (offset_ >= piece_->bytes) {
        piece_++;
        offset_ = 0;
      }
    }
  }

 private:
  const Piece* piece_;
  const Piece* const end_;
  size_t offset_ = 0;
};

void copy(const Piece* pieces, int count) {
  Ahead ahead(pieces, count);
  ahead.fetch(kLinesAhead);
  for (const Piece* piece = pieces; piece != pieces + count; piece++) {
    const char* from = piece->from;
    char* to = piece->to;
    size_t left = piece->bytes;
    const size_t unaligned = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
    if (unaligned > 0) {
      const size_t bytes = unaligned < left ? unaligned : left;
      memcpy(to, from, bytes);
      from += bytes;
      to += bytes;
      left -= bytes;
    }
    for (; left >= kLinesAtOnce * kLine; left -= kLinesAtOnce * kLine) {
      ahead.fetch(kLinesAtOnce);
#pragma GCC unroll 4
      for (size_t i = 0; i < kLinesAtOnce; i++, from += kLine, to += kLine) copy_line(to, from);
    }
    for (; left >= kLine; left -= kLine, from += kLine, to += kLine) {
      ahead.fetch(1);
      copy_line(to, from);
    }
    if (left > 0) memcpy(to, from, left);
  }
  _mm_sfence();
}

}  // namespace
}  // namespace SPARSEKV_VECTORS
}  // namespace sparsekv

// What of the next tile is to be fetched while a tile is worked on.
//
// Included inside the namespace of one instruction set, as tiles.h is.

SPARSEKV_INLINE void fetch(const char* p) { __builtin_prefetch(p, 0, 2); }

// Fetches keys or values of a tile line by line, token by token: in order of address where they lie
// end to end. Few lines at a step: the processor can wait for no more than some dozen at once.
class Fetcher {
 public:
  Fetcher() = default;

  // Bytes `first` ... `last` of each token, in that many steps.
  Fetcher(const char* const* tokens, int count, int64_t first, int64_t last, int64_t steps)
      : token_(tokens), tokens_left_(count), first_(first), size_(last - first) {
    const int64_t lines = count * ((size_ + 63) / 64);
    lines_at_a_step_ = steps > 0 ? int((lines + steps - 1) / steps) : 0;
    next_token();
  }

  __attribute__((always_inline)) inline void step() {
    for (int i = 0; i < lines_at_a_step_; i++) {
      fetch(line_);
      line_ += 64;
      if (line_ >= end_) next_token();
    }
  }

 private:
  __attribute__((always_inline)) inline void next_token() {
    if (tokens_left_ == 0 || size_ <= 0) {
      lines_at_a_step_ = 0;
      return;
    }
    tokens_left_--;
    line_ = *token_++ + first_;
    end_ = line_ + size_;
  }

  int lines_at_a_step_ = 0;
  const char* line_ = nullptr;
  const char* end_ = nullptr;
  const char* const* token_ = nullptr;
  int tokens_left_ = 0;
  int64_t first_ = 0;
  int64_t size_ = 0;
};

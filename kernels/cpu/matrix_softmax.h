// Scores of a chunk become weights of bf16: a running softmax, its lanes the query rows.
//
// Included inside the namespace of one instruction set, by way of attention_amx.h.

// Of each query row, over the chunks so far.
struct MatrixSoftmax {
  float* tops;            // the largest score
  float* totals;          // of weights
  float* rounded_totals;  // of weights as they are after rounding
  float* decays;          // what sums of earlier chunks are to be multiplied with
  float factor;           // of a score in the exponent of its weight

  void clear(int rows) const {
    for (int r = 0; r < rows; r++) {
      tops[r] = -__builtin_inff();
      totals[r] = rounded_totals[r] = 0.0f;
    }
  }

  // The difference first: it is exact where it matters, and never above 0.
  Vector weights_of(Vector scores, Vector base) const {
    return power_of_two(times(minus(scores, base), broadcast(factor)));
  }
  // Finite, so that there is no difference of two infinities where nothing was seen.
  static Vector base_of(Vector top) { return maximum(top, broadcast(-__FLT_MAX__)); }
};

// Weights of a chunk, found a step at a time between the products of another.
class Weighing {
 public:
  // Scores of all rows, [matrix of rows][slot][16 rows], of which the first `slots` count; they
  // become [matrix of rows][kSteps matrices], each 16 rows by 32 slots.
  void start(const MatrixSoftmax& softmax, const float* scores, int slots, int row_matrices,
             char* weights) {
    softmax_ = softmax;
    next_scores_ = scores;
    next_weights_ = weights;
    slots_ = slot_ = slots;
    row_ = -kGroup;
    last_row_ = (row_matrices - 1) * kGroup;
  }

  // Two slots of 16 rows, if any are left.
  SPARSEKV_MEMBER void step() {
    if (slot_ == slots_ && !next_rows()) return;
    const float* pair = scores_ + slot_ * 16;
    const Vector even = softmax_.weights_of(load(pair), base_);
    const Vector odd = softmax_.weights_of(load(pair + 16), base_);
    total_ = plus(total_, plus(even, odd));
    const Words words = round_to_pairs(even, odd);
    rounded_ = add_pairs(rounded_, words);
    pairs_[slot_ % kNumbers / 2] = words;
    slot_ += 2;
    if (slot_ % kNumbers == 0) write_matrix();
  }

  void finish() {
    while (slot_ < slots_ || next_rows()) step();
  }

 private:
  __attribute__((noinline)) bool next_rows() {
    if (row_ == last_row_) return false;
    row_ += kGroup;
    scores_ = next_scores_;
    weights_ = next_weights_;
    next_scores_ += kSlots * 16;
    next_weights_ += kSteps * kMatrixBytes;
    const Vector before = load(softmax_.tops + row_);
    Vector highest[4] = {before, before, before, before};
    for (int slot = 0; slot < slots_; slot += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        highest[i] = maximum(load(scores_ + (slot + i) * 16), highest[i]);
      }
    }
    const Vector top = maximum(maximum(highest[0], highest[1]), maximum(highest[2], highest[3]));
    base_ = MatrixSoftmax::base_of(top);
    const Vector decay = softmax_.weights_of(before, base_);
    store(softmax_.tops + row_, top);
    store(softmax_.decays + row_, decay);
    total_ = times(load(softmax_.totals + row_), decay);
    rounded_ = times(load(softmax_.rounded_totals + row_), decay);
    slot_ = 0;
    return true;
  }

  __attribute__((noinline)) void write_matrix() {
    transpose(pairs_);
    for (int i = 0; i < kGroup; i++) store_words(weights_ + 64 * i, pairs_[i]);
    weights_ += kMatrixBytes;
    if (slot_ < slots_) return;
    store(softmax_.totals + row_, total_);
    store(softmax_.rounded_totals + row_, rounded_);
  }

  MatrixSoftmax softmax_;
  const float *next_scores_ = nullptr, *scores_ = nullptr;
  char *next_weights_ = nullptr, *weights_ = nullptr;
  int slots_ = 0, slot_ = 0, row_ = 0, last_row_ = 0;
  Vector base_, total_, rounded_;
  Words pairs_[kGroup];
};

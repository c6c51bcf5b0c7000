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

  // Scores of 16 rows from row `first` on, [slot][16 rows], become matrices of 16 rows by 32 slots;
  // `between` is called after each.
  template <class Between>
  void weigh(int first, const float* scores, int slots, char* weights, Between between) const {
    const Vector before = load(tops + first);
    Vector highest[4] = {before, before, before, before};
    for (int slot = 0; slot < slots; slot += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        highest[i] = maximum(load(scores + (slot + i) * 16), highest[i]);
      }
    }
    const Vector top = maximum(maximum(highest[0], highest[1]), maximum(highest[2], highest[3]));
    const Vector base = base_of(top), decay = weights_of(before, base);
    store(tops + first, top);
    store(decays + first, decay);
    Vector total[2] = {broadcast(0.0f), broadcast(0.0f)};
    Vector rounded = total[0];
    for (int slot = 0; slot < slots; slot += kNumbers, weights += kMatrixBytes) {
      Words pairs[kGroup];
#pragma GCC unroll 16
      for (int i = 0; i < kGroup; i++) {
        const float* pair = scores + (slot + 2 * i) * 16;
        const Vector even = weights_of(load(pair), base);
        const Vector odd = weights_of(load(pair + 16), base);
        total[0] = plus(total[0], even);
        total[1] = plus(total[1], odd);
        pairs[i] = round_to_pairs(even, odd);
        rounded = add_pairs(rounded, pairs[i]);
      }
      transpose(pairs);
#pragma GCC unroll 16
      for (int i = 0; i < kGroup; i++) store_words(weights + 64 * i, pairs[i]);
      between();
    }
    store(totals + first, times_plus(load(totals + first), decay, plus(total[0], total[1])));
    store(rounded_totals + first, times_plus(load(rounded_totals + first), decay, rounded));
  }
};

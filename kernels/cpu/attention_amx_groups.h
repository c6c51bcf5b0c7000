// Partial attention of one task in matrix registers, for keys and values of bf16 and fewer query
// rows than a matrix has: what the query heads of a kv head make in most models. Results are as
// exact as those of vectors.
//
// Included after attention_amx.h, into the same namespace. A tile of keys is multiplied with all
// query rows and its weights found (running softmax), while its values are fetched; these are added
// by weight, while the next tile's keys are fetched.
//
// A weight is the sum of two bf16 numbers, the rounded weight and what that leaves, within 2^-17 of
// it. Up to 8 query rows, the two are different rows of one matrix, whose sums are added at the
// end; the query is laid out twice, so that scores come out for both. More rows take two matrices.
//
// What a weight leaves may be zero, and zero times an infinite value is NaN, as an infinite key
// times a part of the query may be: a task with any result that is not finite is left to the kernel
// for vectors.
//
// For 64 keys of 128 numbers, with values 32 KB: 16 products of keys and 16 of values, 16 cycles
// each, 52 loads of matrices, and some 2000 operations of vectors, for weights and to pack values.
// Where another tenant works on the same core, products and loads wait for each other, 14 and 8 ns
// each: 0.9 us, of the 3 in which a core gets its share of the DRAM.

namespace sparsekv {
namespace SPARSEKV_VECTORS {
namespace {

// kWeightMatrices: 1 for up to 8 query rows, whose weights' parts share a matrix; else 2.
template <int kWeightMatrices>
class GroupAttention {
 public:
  explicit GroupAttention(const Task& task)
      : task_(task),
        rows_(task_rows(task)),
        padded_dim_(rounded_up(task.head_dim, kNumbers)),
        padded_dim_v_(rounded_up(task.head_dim_v, Sums::kSlab)),
        factor_(weight_exponent(task.scale)),
        scratch_(task),
        sums_(1, padded_dim_v_, scratch_.take_floats(kGroup * padded_dim_v_),
              scratch_.take(Sums::packed_bytes())) {
    query_ = scratch_.take(kMostParts * kGroup * padded_dim_ * 2);
    scores_ = scratch_.take_floats(kTile * kGroup);
    weights_ = scratch_.take(kUnits * kWeightMatrices * kMatrixBytes);
    copied_keys_ = scratch_.take(kTile * padded_dim_ * 2);
    copied_values_ = scratch_.take(kTile * padded_dim_v_ * 2);
    tops_ = broadcast(-__builtin_inff());
    totals_ = broadcast(0.0f);
  }

  // Whether all results are finite, and so are right.
  bool run() {
    const int of_keys = kGroups * padded_dim_ / kNumbers;
    const int of_values = 4 * kUnits * padded_dim_v_ / Sums::kSlab;
    Fetcher fetcher(task_, 2, of_values, of_keys + kTile / 2);
    Tiles tiles(task_);
    Tile ring[2];
    bool more = tiles.next(ring[0]);
    fetcher.start_keys(ring[0]);
    fetcher.finish();
    while (lay_out_query(parts_++)) {
    }
    configure_matrices();
    for (int now = 0; more; now = !now) {
      more = tiles.next(ring[!now]);
      gather(ring[now]);
      fetcher.start_values(ring[now]);
      fetcher.announce_keys(ring[!now]);
      score(fetcher);
      hide(ring[now]);
      weigh(fetcher);
      fetcher.finish();
      fetcher.start_keys(ring[!now]);
      fetcher.announce_values(ring[!now]);
      add(fetcher);
      fetcher.finish();
    }
    release_matrices();
    return write();
  }

 private:
  static constexpr int kGroups = kTile / kGroup;
  static constexpr int kUnits = kGroups / 2;
  static constexpr bool kSharesMatrix = kWeightMatrices == 1;
  using Sums = MatrixSums<1, kWeightMatrices>;

  // The query row of a column of scores, or of a row of weights and sums.
  static int row_of(int lane) { return kSharesMatrix ? lane % (kGroup / 2) : lane; }

  // Part `part` of the query as bf16: [part][32 numbers], a matrix being 16 pairs of numbers by 16
  // rows. Tells whether something remains for another part.
  bool lay_out_query(int part) {
    const Vector sign = broadcast(query_sign(task_.scale)), nothing = broadcast(0.0f);
    bool remains = false;
    char* matrix = query_ + int64_t(part) * kGroup * padded_dim_ * 2;
    for (int d = 0; d < padded_dim_; d += kNumbers, matrix += kMatrixBytes) {
      Words words[kGroup];
      for (int i = 0; i < kGroup; i++) {
        Vector parts[2] = {nothing, nothing};
        for (int half = 0; row_of(i) < rows_ && half < 2; half++) {
          Vector x = times(load_query(row_of(i), d + 16 * half), sign);
          for (int p = 0; p < part; p++) x = remaining_part(x, leading_part(x));
          parts[half] = leading_part(x);
          remains |= any_differs(remaining_part(x, parts[half]), nothing);
        }
        words[i] = join_parts(parts[0], parts[1]);
      }
      transpose(words);
      for (int i = 0; i < kGroup; i++) store_words(matrix + 64 * i, words[i]);
    }
    return remains && part + 1 < kMostParts;
  }

  Vector load_query(int row, int d) const {
    const float* from = task_.query + row / task_.num_queries * task_.query_head_stride +
                        row % task_.num_queries * task_.query_token_stride;
    const int count = task_.head_dim - d;
    if (count >= 16) return load(from + d);
    float padded[16] = {};
    if (count > 0) memcpy(padded, from + d, count * sizeof(float));
    return load(padded);
  }

  void gather(const Tile& tile) {
    gather_groups(tile.key, tile.count, task_.head_dim * 2, padded_dim_ * 2, copied_keys_, keys_);
    gather_groups(tile.value, tile.count, task_.head_dim_v * 2, padded_dim_v_ * 2, copied_values_,
                  values_);
  }

  static void gather_groups(const char* const* tokens, int count, int64_t bytes,
                            int64_t padded_bytes, char* copies, Rows* groups) {
    if (count == kTile && bytes == padded_bytes) {  // all groups at once, as is the rule
      const int64_t stride = tokens[1] - tokens[0];
      int64_t uneven = 0;
      for (int i = 1; i < kTile; i++) uneven |= (tokens[i] - tokens[i - 1]) ^ stride;
      for (int g = 0; g < kGroups; g++) groups[g] = {tokens[g * kGroup], stride};
      if (uneven == 0) return;
    }
    for (int first = 0; first < kTile; first += kGroup, groups++) {
      const int left = count < first ? 0 : smaller(kGroup, count - first);
      *groups = rows_of(tokens + first, left, bytes, padded_bytes, copies + first * padded_bytes);
    }
  }

  // scores_: [slot][16 lanes], keys times query rows.
  void score(Fetcher& fetcher) {
    clear_matrix<0>();
    clear_matrix<1>();
    clear_matrix<2>();
    clear_matrix<3>();
    const char* query = query_;
    for (int part = 0; part < parts_; part++) {
      for (int byte = 0; byte < padded_dim_ * 2; byte += 64, query += kMatrixBytes) {
        load_matrix<4>(query, 64);
        load_matrix<5>(keys_[0].start + byte, keys_[0].stride);
        multiply_matrices<0, 5, 4>();
        fetcher.step();
        load_matrix<6>(keys_[1].start + byte, keys_[1].stride);
        multiply_matrices<1, 6, 4>();
        fetcher.step();
        load_matrix<7>(keys_[2].start + byte, keys_[2].stride);
        multiply_matrices<2, 7, 4>();
        fetcher.step();
        load_matrix<5>(keys_[3].start + byte, keys_[3].stride);
        multiply_matrices<3, 5, 4>();
        fetcher.step();
      }
    }
    store_matrix<0>(scores_, 64);
    store_matrix<1>(scores_ + kMatrixFloats, 64);
    store_matrix<2>(scores_ + 2 * kMatrixFloats, 64);
    store_matrix<3>(scores_ + 3 * kMatrixFloats, 64);
  }

  // Slots that hold no key, and keys that only other query tokens see.
  void hide(const Tile& tile) {
    for (int slot = tile.count; slot < kTile; slot++) {
      store(scores_ + slot * kGroup, broadcast(-__builtin_inff()));
    }
    for (int lane = 0; !tile.seen_by_all && lane < kGroup; lane++) {
      const Seen seen = seen_by(task_, tile, row_of(lane) % task_.num_queries);
      for (int slot = 0; slot < tile.count; slot++) {
        if (slot >= seen.first && slot < seen.last) continue;
        scores_[slot * kGroup + lane] = -__builtin_inff();
      }
    }
  }

  // The difference first: it is exact where it matters, and never above 0.
  Vector weights_of(Vector scores, Vector base) const {
    return power_of_two(times(minus(scores, base), broadcast(factor_)));
  }

  // Scores of slots 2 i and 2 i + 1, one in each half; those of a slot lie there twice.
  static Vector scores_of_both(const float* scores, int i) {
    return join_halves(load(scores + 2 * i * kGroup), load(scores + (2 * i + 1) * kGroup));
  }

  Vector largest_scores() const {
    constexpr int kVectors = kSharesMatrix ? kTile / 2 : kTile;
    Vector tops[4] = {tops_, tops_, tops_, tops_};
    for (int first = 0; first < kVectors; first += kGroup) {
#pragma GCC unroll 16
      for (int i = 0; i < kGroup; i++) {
        const Vector scores = kSharesMatrix ? scores_of_both(scores_, first + i)
                                            : load(scores_ + (first + i) * kGroup);
        tops[i % 4] = maximum(scores, tops[i % 4]);
      }
    }
    const Vector top = maximum(maximum(tops[0], tops[1]), maximum(tops[2], tops[3]));
    return kSharesMatrix ? maximum(top, join_upper_lower(top, top)) : top;
  }

  // weights_: [unit][part if rows do not share a matrix], each 16 rows by 32 tokens.
  void weigh(Fetcher& fetcher) {
    const Vector before = tops_;
    tops_ = largest_scores();
    // Finite, so that there is no difference of two infinities where nothing was seen.
    const Vector base = maximum(tops_, broadcast(-__FLT_MAX__));
    decays_ = weights_of(before, base);
    totals_ = times(totals_, decays_);
    char* to = weights_;
    for (int unit = 0; unit < kUnits; unit++) {
      const float* scores = scores_ + unit * 2 * kMatrixFloats;
      Words pairs[kWeightMatrices][kGroup];  // of neighbouring slots
      Vector sum = broadcast(0.0f);
#pragma GCC unroll 16
      for (int i = 0; i < kGroup; i++) {
        if constexpr (kSharesMatrix) {
          const Vector weights = weights_of(scores_of_both(scores, i), base);
          sum = plus(sum, weights);
          const Vector rounded = round_to_bf16(weights), rest = minus(weights, rounded);
          pairs[0][i] = round_to_pairs(join_lower(rounded, rest), join_upper(rounded, rest));
        } else {
          const Vector even = weights_of(load(scores + 2 * i * kGroup), base);
          const Vector odd = weights_of(load(scores + (2 * i + 1) * kGroup), base);
          sum = plus(sum, plus(even, odd));
          pairs[0][i] = round_to_pairs(even, odd);
          pairs[1][i] = round_to_pairs(minus(even, round_to_bf16(even)),
                                       minus(odd, round_to_bf16(odd)));
        }
        fetcher.step();
      }
      totals_ = plus(totals_, sum);
      for (int m = 0; m < kWeightMatrices; m++, to += kMatrixBytes) {
        transpose(pairs[m]);
        for (int i = 0; i < kGroup; i++) store_words(to + 64 * i, pairs[m][i]);
      }
    }
  }

  // sums_, decayed, plus weights times values.
  void add(Fetcher& fetcher) {
    if (!sums_.is_empty() && any_differs(decays_, broadcast(1.0f))) {
      float decays[kGroup];
      store(decays, decays_);
      for (int row = 0; row < kGroup; row++) {
        if (decays[row] != 1.0f) sums_.decay(row, decays[row]);
      }
    }
    sums_.add(values_, kUnits, weights_, [&] { fetcher.step(); });
  }

  bool write() {
    float totals[kGroup], tops[kGroup];
    store(totals, totals_);
    store(tops, tops_);
    Vector wrong = broadcast(0.0f);
    for (int row = 0; row < rows_; row++) {
      float* out = task_.partial + row * partial_row_floats(task_.head_dim_v);
      for (int d = 0; d < task_.head_dim_v; d += kNumbers) {
        Vector numbers[2] = {broadcast(0.0f), broadcast(0.0f)};
        for (int high = 0; high < 2 && !sums_.is_empty(); high++) {
          const float* sums = sums_.of(row, d) + high * kMatrixFloats;
          numbers[high] = load(sums);
          if (kSharesMatrix) numbers[high] = plus(numbers[high], load(sums + kMatrixFloats / 2));
          wrong = plus(wrong, minus(numbers[high], numbers[high]));
        }
        store_numbers(out + d, smaller(kNumbers, task_.head_dim_v - d), numbers[0], numbers[1]);
      }
      const float total = kSharesMatrix ? totals[row] + totals[row + kGroup / 2] : totals[row];
      out[task_.head_dim_v] = total;
      out[task_.head_dim_v + 1] = tops[row];
      wrong = plus(wrong, broadcast(total - total));
    }
    return !any_is_nan(wrong);
  }

  const Task& task_;
  const int rows_, padded_dim_, padded_dim_v_;
  const float factor_;  // of a score in the exponent of its weight
  Scratch scratch_;
  Sums sums_;
  int parts_ = 0;  // of the query
  char *query_, *weights_, *copied_keys_, *copied_values_;
  float* scores_;
  Vector tops_, totals_, decays_;  // by lane; a row that has two lanes has two parts of its total
  Rows keys_[kGroups], values_[kGroups];
};

void attend_group(const Task& task, Dtype dtype) {
  const bool is_right = task_rows(task) <= kGroup / 2 ? GroupAttention<1>(task).run()
                                                      : GroupAttention<2>(task).run();
  if (!is_right) vectors().attend(task, dtype);
}

constexpr Kernel group_kernel = {SPARSEKV_TEXT(SPARSEKV_VECTORS), attend_group};

}  // namespace
}  // namespace SPARSEKV_VECTORS
}  // namespace sparsekv

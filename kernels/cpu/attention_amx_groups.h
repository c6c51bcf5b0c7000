// Partial attention of one task in matrix registers, for keys and values of bf16 and fewer query
// rows than a matrix has: what the query heads of a kv head make in most models.
//
// Included after attention_amx.h, into the same namespace. A tile of keys is multiplied with all
// query rows and its weights found (running softmax), while its values are fetched; these are added
// by weight, while the next tile's keys are fetched.
//
// Keys and values are factors as they lie. A row of a second factor is pairs of numbers, meant to
// belong to two tokens; values lie with two numbers of one token in a pair. So half of the rows of
// the first factor hold weights where they meet the even numbers of the values, and zeros where
// they meet the odd ones; the other half the reverse. For 8 query rows nothing of the product is
// wasted, and 32 numbers of their sums are one matrix, so that those of 128 numbers stay in four
// registers from the first tile to the last. Weights of 5 rows and more are rounded to bf16, as they
// are where there are 16. Up to 4 rows leave room for what rounding takes off their weights, as
// rows of their own: results are then as exact as those of vectors, at no cost.
//
// Zero times an infinite value is NaN, as an infinite key times a part of the query may be: a task
// with any result that is not finite is left to the kernel for vectors.
//
// For 64 keys of 128 numbers, with values 32 KB: 16 products of keys and 16 of values, 16 cycles
// each, 44 loads of matrices and 4 stores, and some 1200 operations of vectors, for weights. What
// counts more is how little is stored, and how evenly lines are asked for. A core that waits for
// 10 GB/s of DRAM has its places for missing lines taken all the time, and each store to a line
// that left the first-level cache waits for one; values packed on the way to the second factor, and
// sums kept in memory, fit beside keys and values no more. And what is not asked for during one
// product is asked for in vain during the next, when all places are taken.
//
// One thread beside busy neighbours, of 12.6 GB/s that it could read: 9.1 with values packed and
// sums in memory, 9.9 without, 10.7 with lines asked for between all loads and products, and 11.5
// with weights in one part; a second part for what rounding leaves of them makes results as exact
// as those of vectors, for as many products more.

namespace sparsekv {
namespace SPARSEKV_VECTORS {
namespace {

// The first `count` of 32 numbers, of which every other is of `even`.
SPARSEKV_INLINE void store_pairs(float* to, int count, Vector even, Vector odd) {
  if (count >= kNumbers) {
    store_alternating(to, even, odd);
  } else {
    float numbers[kNumbers];
    store_alternating(numbers, even, odd);
    memcpy(to, numbers, sizeof(float) * count);
  }
}

// Sums of weights times values for a block of query rows: even numbers in rows 0 ... 7 of a matrix,
// odd ones in rows 8 ... 15. They stay in matrices 0 ... 3 if all fit there.
class GroupSums {
 public:
  static constexpr int kRows = kGroup / 2;
  static constexpr int kSlab = 4 * kNumbers;  // numbers in four matrices

  GroupSums(int blocks, int padded_dim_v, Scratch& scratch)
      : slabs_(rounded_up(padded_dim_v, kSlab) / kSlab),
        padded_dim_v_(padded_dim_v),
        stays_(blocks * slabs_ == 1),
        bytes_(int64_t(blocks) * slabs_ * 4 * kMatrixBytes),
        sums_(scratch.take_floats(bytes_ / 4)) {}

  // With the matrices configured.
  void clear() {
    memset(sums_, 0, bytes_);
    if (stays_) load(sums_);
  }

  // Each row of a block, by a factor in its lane.
  void decay(int block, Vector factors) {
    float by[kGroup];
    SPARSEKV_VECTORS::store(by, factors);
    if (stays_) store(sums_);
    float* row = slab(block, 0);
    for (int i = 0; i < slabs_ * 4 * kGroup; i++, row += 16) {
      SPARSEKV_VECTORS::store(row, times(SPARSEKV_VECTORS::load(row), broadcast(by[i % kGroup])));
    }
    if (stays_) load(sums_);
  }

  // weights: [group], each 16 rows by 16 words. `meanwhile` is called between loads and products.
  template <class Meanwhile>
  SPARSEKV_MEMBER void add(int block, const Rows* values, int groups, const char* weights,
                           const Meanwhile& meanwhile) {
    for (int s = 0; s < slabs_; s++) {
      const int matrices = smaller(4, (padded_dim_v_ - s * kSlab) / kNumbers);
      if (!stays_) load(slab(block, s));
      for (int g = 0; g < groups; g++) {
        const char* from = values[g].start + s * kSlab * 2;
        const int64_t stride = values[g].stride;
        load_matrix<4>(weights + g * kMatrixBytes, 64);
        load_matrix<5>(from, stride);
        meanwhile();
        if (matrices > 1) load_matrix<6>(from + 64, stride);
        meanwhile();
        if (matrices > 2) load_matrix<7>(from + 2 * 64, stride);
        meanwhile();
        multiply_matrices<0, 4, 5>();
        meanwhile();
        if (matrices > 3) load_matrix<5>(from + 3 * 64, stride);
        meanwhile();
        if (matrices > 1) multiply_matrices<1, 4, 6>();
        meanwhile();
        if (matrices > 2) multiply_matrices<2, 4, 7>();
        meanwhile();
        if (matrices > 3) multiply_matrices<3, 4, 5>();
        meanwhile();
      }
      if (!stays_) store(slab(block, s));
    }
  }
  int steps(int groups) const { return slabs_ * groups * 8; }  // in which `meanwhile` is called

  // So that rows can be read.
  void finish() {
    if (stays_) store(sums_);
  }
  // Of 32 numbers from d on: the even ones; the odd ones lie half a matrix further.
  const float* of(int row, int d) const {
    return slab(row / kRows, d / kSlab) + d % kSlab / kNumbers * kMatrixFloats + row % kRows * 16;
  }

 private:
  static void load(const float* from) {
    load_matrix<0>(from, 64);
    load_matrix<1>(from + kMatrixFloats, 64);
    load_matrix<2>(from + 2 * kMatrixFloats, 64);
    load_matrix<3>(from + 3 * kMatrixFloats, 64);
  }
  static void store(float* to) {
    store_matrix<0>(to, 64);
    store_matrix<1>(to + kMatrixFloats, 64);
    store_matrix<2>(to + 2 * kMatrixFloats, 64);
    store_matrix<3>(to + 3 * kMatrixFloats, 64);
  }

  float* slab(int block, int s) const {
    return sums_ + int64_t(block * slabs_ + s) * 4 * kMatrixFloats;
  }

  const int slabs_, padded_dim_v_;
  const bool stays_;
  const int64_t bytes_;
  float* const sums_;  // [block of rows][slab], four matrices each
};

class GroupAttention {
 public:
  explicit GroupAttention(const Task& task)
      : task_(task),
        rows_(task_rows(task)),
        blocks_(rounded_up(rows_, kRows) / kRows),
        padded_dim_(rounded_up(task.head_dim, kNumbers)),
        padded_dim_v_(rounded_up(task.head_dim_v, kNumbers)),
        in_parts_(rows_ <= kRows / 2),
        factor_(weight_exponent(task.scale)),
        scratch_(task),
        sums_(blocks_, padded_dim_v_, scratch_) {
    query_ = scratch_.take(int64_t(blocks_) * kMostParts * query_bytes());
    scores_ = scratch_.take_floats(kTile * kGroup);
    weights_ = scratch_.take(kGroups * kMatrixBytes);
    copied_keys_ = scratch_.take(kTile * padded_dim_ * 2);
    copied_values_ = scratch_.take(kTile * padded_dim_v_ * 2);
    for (Softmax& softmax : softmax_) {
      softmax.tops = broadcast(-__builtin_inff());
      softmax.totals = softmax.rounded_totals = broadcast(0.0f);
    }
  }

  // Whether all results are finite, and so are right.
  bool run() {
    Fetcher fetcher(task_, 2, sums_.steps(kGroups),
                    2 * kGroups * padded_dim_ / kNumbers + kTile / 8 + kTile);
    Tiles tiles(task_);
    Tile ring[2];
    bool more = tiles.next(ring[0]);
    fetcher.follow_keys(ring[0]);
    fetcher.follow_values(ring[0]);
    while (lay_out_query(parts_++)) {
    }
    configure_matrices();
    sums_.clear();
    for (int now = 0; more; now = !now) {
      more = tiles.next(ring[!now]);
      fetcher.follow_keys(ring[!now]);
      gather(ring[now]);
      for (int block = 0; block < blocks_; block++) {
        score(block, ring[now], fetcher);
        weigh(softmax_[block], fetcher);
        if (block + 1 == blocks_) fetcher.follow_values(ring[!now]);
        add(block, fetcher);
      }
    }
    sums_.finish();
    release_matrices();
    return write();
  }

 private:
  static constexpr int kRows = GroupSums::kRows;
  static constexpr int kGroups = kTile / kGroup;
  static constexpr int kMostBlocks = 2;

  // Of the rows of a block, each in two lanes; totals in two parts. Sums are of rounded weights, and
  // divided by the total of those.
  struct Softmax {
    Vector tops, totals, rounded_totals, decays;
  };

  // Lanes of scores, and rows of matrices, are of the rows of a block, twice; or of up to 4, four
  // times: then every other four are of the second part of a weight.
  int row_of(int block, int lane) const {
    return block * kRows + lane % (in_parts_ ? kRows / 2 : kRows);
  }

  int64_t query_bytes() const { return int64_t(kGroup) * padded_dim_ * 2; }  // of a block's part

  // Part `part` of the query as bf16: [block][part][32 numbers], a matrix being 16 pairs of numbers
  // by 8 rows, twice. Tells whether something remains for another part.
  bool lay_out_query(int part) {
    const Vector sign = broadcast(query_sign(task_.scale)), nothing = broadcast(0.0f);
    bool remains = false;
    for (int block = 0; block < blocks_; block++) {
      char* matrix = query_ + (block * kMostParts + part) * query_bytes();
      for (int d = 0; d < padded_dim_; d += kNumbers, matrix += kMatrixBytes) {
        Words words[kGroup];
        for (int i = 0; i < kGroup; i++) {
          const int row = row_of(block, i);
          Vector parts[2] = {nothing, nothing};
          for (int half = 0; row < rows_ && half < 2; half++) {
            Vector x = times(load_query(row, d + 16 * half), sign);
            for (int p = 0; p < part; p++) x = remaining_part(x, leading_part(x));
            parts[half] = leading_part(x);
            remains |= any_differs(remaining_part(x, parts[half]), nothing);
          }
          words[i] = join_parts(parts[0], parts[1]);
        }
        transpose(words);
        for (int i = 0; i < kGroup; i++) store_words(matrix + 64 * i, words[i]);
      }
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

  // scores_: [slot][16 lanes], keys times a block of query rows.
  void score(int block, const Tile& tile, Fetcher& fetcher) {
    float* to = scores_;
    for (const Rows* keys = keys_; keys < keys_ + kGroups; keys += 2, to += 2 * kMatrixFloats) {
      clear_matrix<4>();
      clear_matrix<5>();
      const char* query = query_ + block * kMostParts * query_bytes();
      for (int part = 0; part < parts_; part++) {
        for (int byte = 0; byte < padded_dim_ * 2; byte += 64, query += kMatrixBytes) {
          load_matrix<6>(query, 64);
          load_matrix<7>(keys[0].start + byte, keys[0].stride);
          fetcher.step();
          multiply_matrices<4, 7, 6>();
          fetcher.step();
          load_matrix<7>(keys[1].start + byte, keys[1].stride);
          fetcher.step();
          multiply_matrices<5, 7, 6>();
          fetcher.step();
        }
      }
      store_matrix<4>(to, 64);
      store_matrix<5>(to + kMatrixFloats, 64);
    }
    hide(block, tile);
  }

  // Slots that hold no key, and keys that only other query tokens see.
  void hide(int block, const Tile& tile) {
    for (int slot = tile.count; slot < kTile; slot++) {
      store(scores_ + slot * kGroup, broadcast(-__builtin_inff()));
    }
    for (int lane = 0; !tile.seen_by_all && lane < kGroup; lane++) {
      const Seen seen = seen_by(task_, tile, row_of(block, lane) % task_.num_queries);
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

  // What weights are in matrices: rounded, or so in the lanes of the first part, and in those of the
  // second what rounding took off.
  Vector rounded_weights(Vector exact) const {
    const Vector rounded = round_to_bf16(exact);
    return in_parts_ ? join_fours(rounded, round_to_bf16(minus(exact, rounded))) : rounded;
  }

  // Scores of slots i and 8 + i of a group, one in each half; those of a slot lie there twice.
  Vector scores_of_both(int group, int i) const {
    const float* scores = scores_ + group * kMatrixFloats + i * kGroup;
    return join_halves(load(scores), load(scores + kMatrixFloats / 2));
  }

  Vector largest_scores(Vector before, Fetcher& fetcher) const {
    Vector tops[4] = {before, before, before, before};
    for (int group = 0; group < kGroups; group++) {
#pragma GCC unroll 8
      for (int i = 0; i < kRows; i++) {
        tops[i % 4] = maximum(scores_of_both(group, i), tops[i % 4]);
        if (i % 4 == 0) fetcher.step();
      }
    }
    const Vector top = maximum(maximum(tops[0], tops[1]), maximum(tops[2], tops[3]));
    return maximum(top, join_upper_lower(top, top));
  }

  // weights_: [group], each 16 rows by 16 words, of a token each.
  void weigh(Softmax& softmax, Fetcher& fetcher) {
    const Vector before = softmax.tops;
    softmax.tops = largest_scores(before, fetcher);
    // Finite, so that there is no difference of two infinities where nothing was seen.
    const Vector base = maximum(softmax.tops, broadcast(-__FLT_MAX__));
    softmax.decays = weights_of(before, base);
    Vector total = times(softmax.totals, softmax.decays);
    Vector rounded_total = times(softmax.rounded_totals, softmax.decays);
    char* to = weights_;
    for (int group = 0; group < kGroups; group++, to += kMatrixBytes) {
      Words weights[kRows];
#pragma GCC unroll 8
      for (int i = 0; i < kRows; i++) {
        const Vector exact = weights_of(scores_of_both(group, i), base);
        const Vector rounded = rounded_weights(exact);
        total = plus(total, exact);
        rounded_total = plus(rounded_total, rounded);
        weights[i] = as_words(rounded);
        fetcher.step();
      }
      transpose_halves(weights);  // now of row i, for all tokens of the group
#pragma GCC unroll 8
      for (int i = 0; i < kRows; i++) {
        store_words(to + 64 * i, upper_halves(weights[i]));
        store_words(to + 64 * (kRows + i), weights[i]);
        fetcher.step();
      }
    }
    softmax.totals = total;
    softmax.rounded_totals = rounded_total;
  }

  // A block's sums, decayed, plus weights times values.
  void add(int block, Fetcher& fetcher) {
    const Vector decays = softmax_[block].decays;
    if (any_differs(decays, broadcast(1.0f))) sums_.decay(block, decays);
    sums_.add(block, values_, kGroups, weights_, [&] { fetcher.step(); });
  }

  bool write() {
    Vector wrong = broadcast(0.0f);
    for (int row = 0; row < rows_; row++) {
      float* out = task_.partial + row * partial_row_floats(task_.head_dim_v);
      const Softmax& softmax = softmax_[row / kRows];
      const float total = of_row(softmax.totals, row);
      float rounded = of_row(softmax.rounded_totals, row);
      if (in_parts_) rounded += of_row(softmax.rounded_totals, row + kRows / 2);
      const Vector factor = broadcast(rounded > 0.0f ? total / rounded : 1.0f);
      for (int d = 0; d < task_.head_dim_v; d += kNumbers) {
        const Vector even = times(sums_of(row, d, 0), factor);
        const Vector odd = times(sums_of(row, d, kMatrixFloats / 2), factor);
        wrong = plus(wrong, plus(minus(even, even), minus(odd, odd)));
        store_pairs(out + d, smaller(kNumbers, task_.head_dim_v - d), even, odd);
      }
      float tops[kGroup];
      store(tops, softmax.tops);
      out[task_.head_dim_v] = total;
      out[task_.head_dim_v + 1] = tops[row % kRows];
      wrong = plus(wrong, broadcast(total - total));
    }
    return !any_is_nan(wrong);
  }

  // Of every other of 32 numbers from d on.
  Vector sums_of(int row, int d, int half) const {
    const Vector sums = load(sums_.of(row, d) + half);
    return in_parts_ ? plus(sums, load(sums_.of(row + kRows / 2, d) + half)) : sums;
  }

  static float of_row(Vector totals, int row) {
    float parts[kGroup];
    store(parts, totals);
    return parts[row % kRows] + parts[row % kRows + kRows];
  }

  const Task& task_;
  const int rows_, blocks_, padded_dim_, padded_dim_v_;
  const bool in_parts_;  // weights
  const float factor_;  // of a score in the exponent of its weight
  Scratch scratch_;
  GroupSums sums_;
  int parts_ = 0;  // of the query
  char *query_, *weights_, *copied_keys_, *copied_values_;
  float* scores_;
  Softmax softmax_[kMostBlocks];
  Rows keys_[kGroups], values_[kGroups];
};

void attend_group(const Task& task, Dtype dtype) {
  if (!GroupAttention(task).run()) vectors().attend(task, dtype);
}

constexpr Kernel group_kernel = {SPARSEKV_TEXT(SPARSEKV_VECTORS), attend_group, 8192};

}  // namespace
}  // namespace SPARSEKV_VECTORS
}  // namespace sparsekv

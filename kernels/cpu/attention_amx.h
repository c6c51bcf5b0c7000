// Partial attention of one task in matrix registers of 16 rows of 64 bytes, for keys and values of
// bf16 and at least a matrix of query rows.
//
// The including file defines SPARSEKV_VECTORS, a namespace with Vector (16 floats), Words, their
// arithmetic and the matrices. A chunk of keys is multiplied with all query rows, its weights found (running
// softmax), rounded to bf16, and multiplied with its values; meanwhile the next chunk is fetched.
//
// Keys are one factor as they lie, 16 tokens by 32 numbers; the query, laid out once, is the other.
// Values are packed, two tokens' numbers alternating, for all query rows; this leaves the numbers
// of the sums in another order, which sums() tells.
//
// Floors for each key, of bytes read and of products (16 x 16 x 32, 16 cycles each):
//   16 heads, 576 / 512, values in keys (MLA): 1152 bytes, 18/16 + 32/32 = 2.1 products, 34 cycles
//   64 heads, 512 / 512, keys are values (V4): 1024 bytes, 64/16 + 128/32 = 8 products, 128 cycles
// The second also moves, for each key of a chunk of 128, 2 KB of sums and 2 KB of keys through the
// first-level cache, since 32 keys x 32 rows are what the registers hold.
//
// Operands are loaded together and then multiplied: where the processor slows its matrix unit down
// (a full package), loads and products take turns, and each change of turns costs.

namespace sparsekv {
namespace SPARSEKV_VECTORS {
namespace {

#define SPARSEKV_INLINE_MEMBER inline __attribute__((always_inline))

#include "tiles.h"
#include "chunks.h"

constexpr int kNumbers = 32;  // of bf16 in a row of a matrix
constexpr int kMatrixBytes = 1024;
constexpr int kMatrixFloats = 256;
constexpr int kMatricesOfSums = 4;
constexpr int kMostParts = 3;  // bf16 numbers that add up to any float

SPARSEKV_INLINE int rounded_up(int n, int step) { return (n + step - 1) / step * step; }
SPARSEKV_INLINE int smaller(int a, int b) { return a < b ? a : b; }

// 2^x for x <= 0, or NaN; relative error below 2e-7.
SPARSEKV_INLINE Vector power_of_two(Vector x) {
  x = maximum(broadcast(-200.0f), x);  // in this order NaN stays
  const Vector whole = round_to_whole(x);
  const Vector rest = minus(x, whole);
  Vector y = broadcast(1.326472715e-03f);  // least relative error on [-1/2, 1/2]
  y = times_plus(y, rest, broadcast(9.671512674e-03f));
  y = times_plus(y, rest, broadcast(5.550733744e-02f));
  y = times_plus(y, rest, broadcast(2.402224208e-01f));
  y = times_plus(y, rest, broadcast(6.931469776e-01f));
  y = times_plus(y, rest, broadcast(1.0f));
  return scale_by_power(y, whole);
}

// kRowMatrices: matrices of query rows that are multiplied together, so that with as many of keys,
// or of numbers of the values, they make kMatricesOfSums.
template <int kRowMatrices>
class MatrixAttention {
 public:
  explicit MatrixAttention(const Task& task)
      : task_(task),
        rows_(task_rows(task)),
        row_blocks_((rows_ + kBlockRows - 1) / kBlockRows),
        padded_dim_(rounded_up(task.head_dim, kNumbers)),
        padded_dim_v_(rounded_up(task.head_dim_v, kSlab)),
        values_in_keys_(are_values_in_keys()),
        factor_(weight_exponent(task.scale)) {
    char* free = reinterpret_cast<char*>(task.scratch);
    const auto take = [&free](int64_t bytes) {
      char* taken = free;
      free += (bytes + 63) / 64 * 64;
      return taken;
    };
    const auto take_floats = [&take](int64_t count) {
      return reinterpret_cast<float*>(take(count * 4));
    };
    const int64_t rows = row_blocks_ * kBlockRows;
    query_ = take(kMostParts * rows * padded_dim_ * 2);
    scores_ = take_floats(rows * kSlots);
    weights_ = take(rows * kSlots * 2);
    sums_ = take_floats(rows * padded_dim_v_);
    for (char*& packed : packed_) packed = take(kSlots * kSlab * 2);
    copied_keys_ = take(kSlots * padded_dim_ * 2);
    copied_values_ = take(kSlots * padded_dim_v_ * 2);
    const int64_t zeros = (padded_dim_ > padded_dim_v_ ? padded_dim_ : padded_dim_v_) * 2;
    zeros_ = take(zeros);
    memset(zeros_, 0, zeros);
    tops_ = take_floats(rows);
    totals_ = take_floats(rows);
    rounded_totals_ = take_floats(rows);
    decays_ = take_floats(rows);
    for (int r = 0; r < rows; r++) {
      tops_[r] = -__builtin_inff();
      totals_[r] = rounded_totals_[r] = 0.0f;
    }
    while (lay_out_query(parts_++)) {
    }
  }

  void run() {
    Chunks<kChunkTiles> chunks(task_);
    Chunk<kChunkTiles> chunk[2];
    Ahead<kChunkTiles> ahead(task_.head_dim * 2, values_in_keys_ ? 0 : task_.head_dim_v * 2,
                             lines_for_each_product());
    configure_matrices();
    bool more = chunks.next(chunk[0]);
    ahead.start(chunk[0]);
    ahead.fetch_rest();
    for (int now = 0; more; now = !now) {
      more = chunks.next(chunk[!now]);
      ahead.start(chunk[!now]);
      if (chunk[now].tiles[0].seen_by_all) {
        gather(chunk[now]);
        score(ahead);
        weigh(ahead);
        add(ahead);
      } else {
        attend_each(chunk[now].tiles[0]);
      }
      ahead.fetch_rest();
    }
    release_matrices();
    write();
  }

 private:
  static constexpr int kBlockRows = kRowMatrices * kGroup;
  static constexpr int kOthers = kMatricesOfSums / kRowMatrices;  // matrices of keys, or of numbers
  static constexpr int kSlab = kOthers * 16;  // numbers of the values at a time
  // More query rows have more sums, which a longer chunk moves less often.
  static constexpr int kChunkTiles = kRowMatrices == 1 ? 1 : 2;
  static constexpr int kSlots = kChunkTiles * kTile;
  static constexpr int kSteps = kSlots / kNumbers;  // products along the tokens
  using Fetch = Ahead<kChunkTiles>;

  bool are_values_in_keys() const {
    const Stored &key = task_.key, &value = task_.value;
    return key.start == value.start && key.segment_stride == value.segment_stride &&
           key.row_stride == value.row_stride && key.token_stride == value.token_stride &&
           padded_dim_v_ <= task_.head_dim;
  }

  // So many that the next chunk is there when the products of this one are done.
  int lines_for_each_product() const {
    const int of_keys = (task_.head_dim * 2 + 63) / 64;
    const int of_values = values_in_keys_ ? 0 : (task_.head_dim_v * 2 + 63) / 64;
    const int lines = kSlots * (of_keys + of_values);
    const int products = row_blocks_ * kRowMatrices *
                         (kSlots / 16 * padded_dim_ / kNumbers + kSteps * padded_dim_v_ / 16);
    return (lines + products - 1) / products;
  }

  const float* query_of(int row) const {
    return task_.query + row / task_.num_queries * task_.query_head_stride +
           row % task_.num_queries * task_.query_token_stride;
  }

  // Part `part` of the query as bf16: [part][block of rows][32 numbers][matrix of rows], a matrix
  // being 16 pairs of numbers by 16 rows. Tells whether something remains for another part.
  bool lay_out_query(int part) {
    const Vector sign = broadcast(query_sign(task_.scale)), nothing = broadcast(0.0f);
    bool remains = false;
    char* to = query_ + int64_t(part) * row_blocks_ * kBlockRows * padded_dim_ * 2;
    for (int m = 0; m < row_blocks_ * kRowMatrices; m++) {
      const float* rows[kGroup];  // null beyond the last
      for (int i = 0; i < kGroup; i++) {
        rows[i] = m * kGroup + i < rows_ ? query_of(m * kGroup + i) : nullptr;
      }
      char* matrix = to + (int64_t(m / kRowMatrices) * (padded_dim_ / kNumbers) * kRowMatrices +
                           m % kRowMatrices) * kMatrixBytes;
      for (int d = 0; d < padded_dim_; d += kNumbers, matrix += kRowMatrices * kMatrixBytes) {
        Words words[kGroup];
        for (int i = 0; i < kGroup; i++) {
          Vector parts[2] = {nothing, nothing};
          for (int half = 0; rows[i] && half < 2; half++) {
            Vector x = times(load_query(rows[i], d + 16 * half), sign);
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

  Vector load_query(const float* row, int d) const {
    const int count = task_.head_dim - d;
    if (count >= 16) return load(row + d);
    float padded[16] = {};
    if (count > 0) memcpy(padded, row + d, count * sizeof(float));
    return load(padded);
  }

  void gather(const Chunk<kChunkTiles>& chunk) {
    groups_ = 0;
    for (int i = 0; i < chunk.num_tiles; i++) {
      const Tile& tile = chunk.tiles[i];
      for (int first = 0; first < tile.count; first += kGroup) {
        const int count = smaller(kGroup, tile.count - first);
        const int64_t at = groups_ * kGroup, key_bytes = padded_dim_ * 2;
        const int64_t value_bytes = padded_dim_v_ * 2;
        keys_[groups_] = rows_of(tile.key + first, count, task_.head_dim * 2, key_bytes,
                                 copied_keys_ + at * key_bytes);
        values_[groups_] = values_in_keys_
                               ? keys_[groups_]
                               : rows_of(tile.value + first, count, task_.head_dim_v * 2,
                                         value_bytes, copied_values_ + at * value_bytes);
        seen_[groups_++] = count;
      }
    }
    for (; groups_ % kOthers != 0; groups_++) {
      keys_[groups_] = values_[groups_] = {zeros_, 0};
      seen_[groups_] = 0;
    }
  }

  // scores_: [matrix of rows][slot][16 rows], keys times query rows.
  void score(Fetch& ahead) {
    for (int block = 0; block < row_blocks_; block++) {
      for (int g = 0; g < groups_; g += kOthers) score_block(g, block, ahead);
    }
  }

  void score_block(int g, int block, Fetch& ahead) {
    const int64_t query_bytes = int64_t(kBlockRows) * padded_dim_ * 2;
    const int key_bytes = padded_dim_ * 2;
    clear_matrix<0>();
    clear_matrix<1>();
    clear_matrix<2>();
    clear_matrix<3>();
    Rows keys[kOthers];
    for (int i = 0; i < kOthers; i++) keys[i] = keys_[g + i];
    for (int part = 0; part < parts_; part++) {
      const char* query = query_ + (int64_t(part) * row_blocks_ + block) * query_bytes;
      for (int byte = 0; byte < key_bytes; byte += 64) {
        if constexpr (kRowMatrices == 1) {
          load_matrix<4>(query, 64);
          load_matrix<5>(keys[0].start + byte, keys[0].stride);
          load_matrix<6>(keys[1].start + byte, keys[1].stride);
          load_matrix<7>(keys[2].start + byte, keys[2].stride);
          ahead.fetch_some();
          multiply_matrices<0, 5, 4>();
          multiply_matrices<1, 6, 4>();
          ahead.fetch_some();
          multiply_matrices<2, 7, 4>();
          load_matrix<5>(keys[3].start + byte, keys[3].stride);
          ahead.fetch_some();
          multiply_matrices<3, 5, 4>();
          ahead.fetch_some();
        } else {
          load_matrix<6>(query, 64);
          load_matrix<7>(query + kMatrixBytes, 64);
          load_matrix<4>(keys[0].start + byte, keys[0].stride);
          load_matrix<5>(keys[1].start + byte, keys[1].stride);
          ahead.fetch_some();
          multiply_matrices<0, 4, 6>();
          ahead.fetch_some();
          multiply_matrices<1, 5, 6>();
          ahead.fetch_some();
          multiply_matrices<2, 4, 7>();
          ahead.fetch_some();
          multiply_matrices<3, 5, 7>();
        }
        query += kRowMatrices * kMatrixBytes;
      }
    }
    float* first = scores_ + (int64_t(block) * kRowMatrices * kSlots + g * kGroup) * 16;
    float* second = first + (kRowMatrices == 1 ? 2 * kMatrixFloats : kSlots * 16);
    store_matrix<0>(first, 64);
    store_matrix<1>(first + kMatrixFloats, 64);
    store_matrix<2>(second, 64);
    store_matrix<3>(second + kMatrixFloats, 64);
  }

  // The difference first: it is exact where it matters, and never above 0.
  Vector weights_of(Vector scores, Vector base) const {
    return power_of_two(times(minus(scores, base), broadcast(factor_)));
  }
  // Finite, so that there is no difference of two infinities where nothing was seen.
  static Vector base_of(Vector top) { return maximum(top, broadcast(-__FLT_MAX__)); }

  void weigh(Fetch& ahead) {
    for (int m = 0; m < row_blocks_ * kRowMatrices; m++) {
      if (parts_ > 1) mend(m);
      weigh_rows(m, ahead);
    }
  }

  // weights_: [matrix of rows][32 tokens], a matrix being 16 rows by 32 tokens. The lanes of all
  // vectors are query rows, until the last step.
  void weigh_rows(int m, Fetch& ahead) {
    float* scores = scores_ + int64_t(m) * kSlots * 16;
    for (int g = 0; g < groups_; g++) {
      for (int i = seen_[g]; i < kGroup; i++) {
        store(scores + (g * kGroup + i) * 16, broadcast(-__builtin_inff()));
      }
    }
    const Vector before = load(tops_ + m * 16);
    Vector tops[4] = {before, before, before, before};
    for (int slot = 0; slot < groups_ * kGroup; slot += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) tops[i] = maximum(load(scores + (slot + i) * 16), tops[i]);
    }
    const Vector top = maximum(maximum(tops[0], tops[1]), maximum(tops[2], tops[3]));
    const Vector base = base_of(top), decay = weights_of(before, base);
    store(tops_ + m * 16, top);
    store(decays_ + m * 16, decay);
    Vector totals[2] = {broadcast(0.0f), broadcast(0.0f)};
    Vector rounded = totals[0];
    char* weights = weights_ + int64_t(m) * kSteps * kMatrixBytes;
    for (int slot = 0; slot < groups_ * kGroup; slot += kNumbers, weights += kMatrixBytes) {
      Words pairs[kGroup];
#pragma GCC unroll 16
      for (int i = 0; i < kGroup; i++) {
        const float* pair = scores + (slot + 2 * i) * 16;
        const Vector first = weights_of(load(pair), base);
        const Vector second = weights_of(load(pair + 16), base);
        totals[0] = plus(totals[0], first);
        totals[1] = plus(totals[1], second);
        pairs[i] = round_to_pairs(first, second);
        rounded = add_pairs(rounded, pairs[i]);
      }
      transpose(pairs);
#pragma GCC unroll 16
      for (int i = 0; i < kGroup; i++) store_words(weights + 64 * i, pairs[i]);
      ahead.fetch_some();
      ahead.fetch_some();
    }
    store(totals_ + m * 16,
          times_plus(load(totals_ + m * 16), decay, plus(totals[0], totals[1])));
    store(rounded_totals_ + m * 16, times_plus(load(rounded_totals_ + m * 16), decay, rounded));
  }

  // A query in parts may find NaN where the whole does not: an infinite key times a part of zero.
  void mend(int m) {
    for (int slot = 0; slot < groups_ * kGroup; slot++) {
      float* scores = scores_ + (int64_t(m) * kSlots + slot) * 16;
      const Rows& keys = keys_[slot / kGroup];
      if (!any_is_nan(load(scores))) continue;
      for (int i = 0; i < 16 && m * 16 + i < rows_; i++) {
        if (scores[i] == scores[i]) continue;
        scores[i] = product(m * 16 + i, keys.start + slot % kGroup * keys.stride);
      }
    }
  }

  float product(int row, const char* key) const {
    const float* query = query_of(row);
    float sum = 0.0f;
    for (int d = 0; d < task_.head_dim; d++) {
      uint16_t number;
      memcpy(&number, key + 2 * d, sizeof number);
      const uint32_t bits = uint32_t(number) << 16;
      float x;
      memcpy(&x, &bits, sizeof x);
      sum += query[d] * x;
    }
    return sum * query_sign(task_.scale);
  }

  // [slab of numbers][block of rows][matrix of rows][matrix of numbers], each 16 rows by 16
  // numbers. Two matrices hold 32 numbers: the first one those 0 ... 3 of each eight.
  float* sums(int slab, int block) {
    return sums_ + (int64_t(slab) * row_blocks_ + block) * kMatricesOfSums * kMatrixFloats;
  }

  // sums_, decayed, plus weights times values.
  void add(Fetch& ahead) {
    const int slabs = padded_dim_v_ / kSlab;
    for (int g = 0; g < groups_; g++) {
      const Packing packing = packing_of(g, 0);
      for (int part = 0; part < 4; part++) pack(packing, part);
    }
    // Few rows find a new largest score, once some keys are behind.
    for (int row = 0; row < rows_ && !is_empty_; row++) {
      if (decays_[row] != 1.0f) decay(row, decays_[row]);
    }
    for (int slab = 0; slab < slabs; slab++) {
      for (int block = 0; block < row_blocks_; block++) add_block(slab, block, ahead);
    }
    is_empty_ = false;
  }

  // Between the products, the next slab of values is packed, by the first two blocks of rows.
  void add_block(int slab, int block, Fetch& ahead) {
    const bool packs = (slab + 1) * kSlab < padded_dim_v_ && block < 2;
    const bool packs_both = packs && row_blocks_ == 1;
    float* to = sums(slab, block);
    if (is_empty_) {
      clear_matrix<0>();
      clear_matrix<1>();
      clear_matrix<2>();
      clear_matrix<3>();
    } else {
      load_matrix<0>(to, 64);
      load_matrix<1>(to + kMatrixFloats, 64);
      load_matrix<2>(to + 2 * kMatrixFloats, 64);
      load_matrix<3>(to + 3 * kMatrixFloats, 64);
    }
    const char* weights = weights_ + int64_t(block) * kRowMatrices * kSteps * kMatrixBytes;
    const char* values = packed_[slab % 2];
    for (int k = 0; k < groups_ / 2; k++) {
      const Packing first = packing_of(2 * k + (block & 1), slab + 1);
      const Packing second = packing_of(2 * k + 1, slab + 1);
      const auto between = [&](int part) __attribute__((always_inline)) {
        if (packs) pack(first, part);
        if (packs_both) pack(second, part);
        ahead.fetch_some();
      };
      if constexpr (kRowMatrices == 1) {
        load_matrix<4>(weights, 64);
        load_matrix<5>(values, 64);
        load_matrix<6>(values + kMatrixBytes, 64);
        load_matrix<7>(values + 2 * kMatrixBytes, 64);
        between(0);
        multiply_matrices<0, 4, 5>();
        between(1);
        multiply_matrices<1, 4, 6>();
        between(2);
        multiply_matrices<2, 4, 7>();
        load_matrix<5>(values + 3 * kMatrixBytes, 64);
        between(3);
        multiply_matrices<3, 4, 5>();
      } else {
        load_matrix<6>(values, 64);
        load_matrix<7>(values + kMatrixBytes, 64);
        load_matrix<4>(weights, 64);
        load_matrix<5>(weights + kSteps * kMatrixBytes, 64);
        between(0);
        multiply_matrices<0, 4, 6>();
        between(1);
        multiply_matrices<1, 4, 7>();
        between(2);
        multiply_matrices<2, 5, 6>();
        between(3);
        multiply_matrices<3, 5, 7>();
      }
      weights += kMatrixBytes;
      values += kOthers * kMatrixBytes;
    }
    store_matrix<0>(to, 64);
    store_matrix<1>(to + kMatrixFloats, 64);
    store_matrix<2>(to + 2 * kMatrixFloats, 64);
    store_matrix<3>(to + 3 * kMatrixFloats, 64);
  }

  // One slab of a group's values, and where it goes.
  struct Packing {
    const char* from;
    int64_t stride;
    char* to;
  };

  SPARSEKV_INLINE_MEMBER Packing packing_of(int group, int slab) const {
    const Rows& rows = values_[group];
    return {rows.start + slab * kSlab * 2, rows.stride,
            packed_[slab % 2] + group / 2 * kOthers * kMatrixBytes + group % 2 * kMatrixBytes / 2};
  }

  // A quarter of the group: two pairs of tokens, the numbers of a pair alternating.
  SPARSEKV_INLINE_MEMBER void pack(const Packing& packing, int part) const {
    const char* from = packing.from + part * 4 * packing.stride;
    char* to = packing.to + part * 2 * 64;
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; pair++, from += 2 * packing.stride, to += 64) {
#pragma GCC unroll 2
      for (int j = 0; j < kOthers / 2; j++) {
        const Words even = load_words(from + 64 * j);
        const Words odd = load_words(from + packing.stride + 64 * j);
        store_words(to + 2 * j * kMatrixBytes, alternate_low(even, odd));
        store_words(to + (2 * j + 1) * kMatrixBytes, alternate_high(even, odd));
      }
    }
  }

  void decay(int row, float by) {
    const Vector factor = broadcast(by);
    for (int d = 0; d < padded_dim_v_; d += kNumbers) {
      float *low = sums_of(row, d), *high = low + kMatrixFloats;
      store(low, times(load(low), factor));
      store(high, times(load(high), factor));
    }
  }

  // A tile that only some query tokens see, one row at a time and without rounding: a hidden value
  // must not even be multiplied by zero.
  __attribute__((noinline)) void attend_each(const Tile& tile) {
    if (is_empty_) {
      memset(sums_, 0, sizeof(float) * row_blocks_ * kBlockRows * padded_dim_v_);
      is_empty_ = false;
    }
    const int64_t bytes = padded_dim_v_ * 2;
    for (int t = 0; t < tile.count; t++) {
      memcpy(copied_values_ + t * bytes, tile.value[t], task_.head_dim_v * 2);
    }
    for (int row = 0; row < rows_; row++) {
      const Seen seen = seen_by(task_, tile, row % task_.num_queries);
      alignas(64) float weights[kTile];
      float top = tops_[row];
      for (int t = 0; t < kTile; t++) {
        const bool is_seen = t >= seen.first && t < seen.last;
        weights[t] = is_seen ? product(row, tile.key[t]) : -__builtin_inff();
        if (weights[t] > top) top = weights[t];
      }
      const Vector base = base_of(broadcast(top));
      alignas(64) float decay[16];
      store(decay, weights_of(broadcast(tops_[row]), base));
      for (int t = 0; t < kTile; t += 16) store(weights + t, weights_of(load(weights + t), base));
      float total = 0.0f;
      for (int t = seen.first; t < seen.last; t++) total += weights[t];
      tops_[row] = top;
      totals_[row] = totals_[row] * decay[0] + total;
      rounded_totals_[row] = rounded_totals_[row] * decay[0] + total;
      for (int d = 0; d < padded_dim_v_; d += kNumbers) {
        float *low = sums_of(row, d), *high = low + kMatrixFloats;
        Vector x = times(load(low), broadcast(decay[0]));
        Vector y = times(load(high), broadcast(decay[0]));
        for (int t = seen.first; t < seen.last; t++) {
          const Words value = load_words(copied_values_ + t * bytes + 2 * d);
          const Vector weight = broadcast(weights[t]);
          x = times_plus(as_floats(alternate_low(zero_words(), value)), weight, x);
          y = times_plus(as_floats(alternate_high(zero_words(), value)), weight, y);
        }
        store(low, x);
        store(high, y);
      }
    }
  }

  // Of 32 numbers from d on: those in the first matrix; the others lie a matrix further.
  float* sums_of(int row, int d) {
    const int within = row % kBlockRows;
    return sums(d / kSlab, row / kBlockRows) + within / kGroup * kOthers * kMatrixFloats +
           d % kSlab / 16 * kMatrixFloats + within % kGroup * 16;
  }

  // The sums were of rounded weights, so they are divided by the total of those; the other total,
  // which is exact, stays for who merges.
  void write() {
    for (int row = 0; row < rows_; row++) {
      float* out = task_.partial + int64_t(row) * (task_.head_dim_v + 2);
      const float total = totals_[row], rounded = rounded_totals_[row];
      const float factor = rounded > 0.0f ? total / rounded : 1.0f;
      for (int d = 0; d < task_.head_dim_v; d += kNumbers) {
        float numbers[kNumbers] = {};
        const float* from = sums_of(row, d);
        for (int i = 0; i < kNumbers && !is_empty_; i += 4, from += i % 8 ? 0 : 4) {
          const float* four = from + i % 8 / 4 * kMatrixFloats;
          for (int j = 0; j < 4; j++) numbers[i + j] = four[j] * factor;
        }
        const int count = smaller(kNumbers, task_.head_dim_v - d);
        if (count == kNumbers) {
          memcpy(out + d, numbers, sizeof numbers);
        } else {
          memcpy(out + d, numbers, sizeof(float) * count);
        }
      }
      out[task_.head_dim_v] = total;
      out[task_.head_dim_v + 1] = tops_[row];
    }
  }

  const Task& task_;
  const int rows_, row_blocks_, padded_dim_, padded_dim_v_;
  const bool values_in_keys_;
  const float factor_;  // of a score in the exponent of its weight
  int parts_ = 0;       // of the query
  bool is_empty_ = true;  // sums_ is unwritten: nothing was added yet
  char *query_, *weights_, *packed_[2], *copied_keys_, *copied_values_, *zeros_;
  float *scores_, *sums_, *tops_, *totals_, *rounded_totals_, *decays_;

  // Of the chunk at hand.
  int groups_ = 0;
  int seen_[kSlots / kGroup];  // tokens of each group; what follows them counts for nothing
  Rows keys_[kSlots / kGroup], values_[kSlots / kGroup];
};

void attend(const Task& task, Dtype) {
  if (task_rows(task) <= kGroup) {
    MatrixAttention<1>(task).run();
  } else {
    MatrixAttention<2>(task).run();
  }
}

#define SPARSEKV_TEXT_OF(name) #name
#define SPARSEKV_TEXT(name) SPARSEKV_TEXT_OF(name)
constexpr Kernel kernel = {SPARSEKV_TEXT(SPARSEKV_VECTORS), attend};

}  // namespace
}  // namespace SPARSEKV_VECTORS
}  // namespace sparsekv

// Partial attention of one task, in the vectors of the file that includes this one.
//
// That file defines SPARSEKV_VECTORS, a namespace with Vector, kLanes, kRowBlock, kAccumulators, the
// arithmetic and the dtypes Fp32, Bf16, Fp16. A tile of keys is multiplied with all query rows, its
// weights found (running softmax), its values added; meanwhile the next tile is fetched.
//
// "Chunk": two vectors of consecutive numbers. Interleaved dtypes unpack to even numbers, then odd
// ones; the query is laid out like that beforehand, and results are put in order at the end.

namespace sparsekv {
namespace SPARSEKV_VECTORS {
namespace {

constexpr int kChunk = 2 * kLanes;

SPARSEKV_INLINE void fetch(const char* p) { __builtin_prefetch(p, 0, 2); }
SPARSEKV_INLINE int rounded_up(int n, int step) { return (n + step - 1) / step * step; }

// 2^x for x <= 0, or NaN; relative error below 1e-7.
SPARSEKV_INLINE Vector power_of_two(Vector x) {
  x = maximum(broadcast(-200.0f), x);  // in this order NaN stays
  const Vector whole = round_to_whole(x);
  const Vector rest = minus(x, whole);
  Vector y = broadcast(1.534732010e-04f);  // least relative error on [-1/2, 1/2]
  y = times_plus(y, rest, broadcast(1.340015445e-03f));
  y = times_plus(y, rest, broadcast(9.618484243e-03f));
  y = times_plus(y, rest, broadcast(5.550328082e-02f));
  y = times_plus(y, rest, broadcast(2.402264692e-01f));
  y = times_plus(y, rest, broadcast(6.931472062e-01f));
  y = times_plus(y, rest, broadcast(1.0f));
  return scale_by_power(y, whole);
}

#include "tiles.h"

// One chunk of kTokens keys times the same chunk of kRows query rows, end to end, added to their
// sums.
template <class Number, int kRows>
SPARSEKV_INLINE void multiply_chunk(Vector* sums, const char* const* keys, int64_t key_offset,
                                    const float* query) {
  constexpr int kTokens = kAccumulators / kRows;
  if constexpr (kTokens <= kRows) {  // what is fewer stays in registers
    Vector first[kTokens], second[kTokens];
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; t++) Number::load_pair(keys[t] + key_offset, first[t], second[t]);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) {
      const Vector q = load(query + r * kChunk);
      const Vector p = load(query + r * kChunk + kLanes);
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; t++) {
        sums[r * kTokens + t] = times_plus(first[t], q, sums[r * kTokens + t]);
      }
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; t++) {
        sums[r * kTokens + t] = times_plus(second[t], p, sums[r * kTokens + t]);
      }
    }
  } else {
    Vector q[kRows], p[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) {
      q[r] = load(query + r * kChunk);
      p[r] = load(query + r * kChunk + kLanes);
    }
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; t++) {
      Vector first, second;
      Number::load_pair(keys[t] + key_offset, first, second);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; r++) {
        Vector& sum = sums[r * kTokens + t];
        sum = times_plus(first, q[r], sum);
        sum = times_plus(second, p[r], sum);
      }
    }
  }
}

// What is to be fetched of the values of a tile while another one is worked on: line by line, in
// order of address where the tokens lie end to end.
struct Ahead {
  const char* line = nullptr;  // null: nothing is left
  const char* token_end = nullptr;
  const char* const* token = nullptr;
  const char* const* last = nullptr;
  int64_t bytes = 0;  // of a token
};

SPARSEKV_INLINE Ahead ahead_of(const char* const* tokens, int count, int64_t bytes) {
  return {tokens[0], tokens[0] + bytes, tokens, tokens + count - 1, bytes};
}

SPARSEKV_INLINE void fetch_line(Ahead& ahead) {
  if (!ahead.line) return;
  fetch(ahead.line);
  ahead.line += 64;
  if (ahead.line < ahead.token_end) return;
  if (ahead.token == ahead.last) {
    ahead.line = nullptr;
    return;
  }
  ahead.token++;
  ahead.line = *ahead.token;
  ahead.token_end = ahead.line + ahead.bytes;
}

// One chunk of kRows rows of sums, end to end, += weights x the chunk of `count` values, found at
// `offset` of each, after the sums were scaled.
template <class Number, int kRows>
SPARSEKV_INLINE void add_values(float* sums, const float* decay, const char* const* values,
                                int64_t offset, int count, const float* weights, Ahead& to_fetch) {
  Ahead ahead = to_fetch;
  Vector first[kRows], second[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
    const Vector scale = broadcast(decay[r]);
    first[r] = times(load(sums + r * kChunk), scale);
    second[r] = times(load(sums + r * kChunk + kLanes), scale);
  }
  for (int t = 0; t < count; t++) {
    Vector v, w;
    Number::load_pair(values[t] + offset, v, w);
    fetch_line(ahead);
    if (kChunk * Number::kBytes > 64) fetch_line(ahead);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const Vector weight = broadcast(weights[r * kTile + t]);
      first[r] = times_plus(v, weight, first[r]);
      second[r] = times_plus(w, weight, second[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
    store(sums + r * kChunk, first[r]);
    store(sums + r * kChunk + kLanes, second[r]);
  }
  to_fetch = ahead;
}

template <class Number>
class Attention {
 public:
  explicit Attention(const Task& task)
      : task_(task),
        rows_(task_rows(task)),
        padded_rows_(pad_rows(rows_)),
        padded_dim_(rounded_up(task.head_dim, kChunk)),
        padded_dim_v_(rounded_up(task.head_dim_v, kChunk)),
        factor_(weight_exponent(task.scale)) {
    float* free = task.scratch;
    const auto take = [&free](int64_t count) {
      float* taken = free;
      free += (count + 15) / 16 * 16;  // each from the start of a cache line
      return taken;
    };
    query_ = take(int64_t(padded_rows_) * padded_dim_);
    scores_ = take(int64_t(padded_rows_) * kTile);
    sums_ = take(int64_t(padded_rows_) * padded_dim_v_);
    totals_ = take(int64_t(padded_rows_) * kLanes);
    unpacked_keys_ = take(kTile * kChunk);
    unpacked_values_ = take(kTile * kChunk);
    const int lanes_of_rows = rounded_up(padded_rows_, kLanes);
    tops_ = take(lanes_of_rows);
    bases_ = take(lanes_of_rows);
    decays_ = take(lanes_of_rows);
    for (int i = 0; i < padded_rows_ * padded_dim_v_; i++) sums_[i] = 0.0f;
    for (int i = 0; i < padded_rows_ * kLanes; i++) totals_[i] = 0.0f;
    for (int i = 0; i < lanes_of_rows; i++) tops_[i] = bases_[i] = -__builtin_inff();
    for (int i = 0; i < lanes_of_rows; i++) decays_[i] = 0.0f;
    for (int t = 0; t < kTile; t++) {
      unpacked_[t] = reinterpret_cast<const char*>(unpacked_keys_ + t * kChunk);
    }
    lay_out_query();
  }

  void run() {
    Tiles tiles(task_);
    Tile two[2], *tile = &two[0], *next = &two[1];
    bool more = tiles.next(*tile);
    for (int t = 0; t < tile->count; t++) fetch_token(tile->key[t], task_.head_dim);
    while (more) {
      more = tiles.next(*next);
      score(*tile, *next);
      weigh(*tile);
      add(*tile, *next);
      Tile* done = tile;
      tile = next;
      next = done;
    }
    write();
  }

 private:
  // Rows come in blocks of kRowBlock; the last block may be a smaller power of two.
  static int pad_rows(int rows) {
    const int rest = rows % kRowBlock;
    int block = rest ? 1 : 0;
    while (block < rest) block *= 2;
    return rows - rest + block;
  }

  // The chunks of a block's rows alternate, so that each is found at a constant distance.
  int64_t chunk(int row, int padded_dim, int d) const {
    const int first = row / kRowBlock * kRowBlock;
    const int rows = padded_rows_ - first < kRowBlock ? padded_rows_ - first : kRowBlock;
    return int64_t(first) * padded_dim + d / kChunk * kChunk * rows + (row - first) * kChunk;
  }

  // Place of number d of a row, after unpacking.
  int64_t place(int row, int padded_dim, int d) const {
    const int within = d % kChunk;
    return chunk(row, padded_dim, d) +
           (Number::kInterleaved ? within % 2 * kLanes + within / 2 : within);
  }

  void lay_out_query() {
    for (int i = 0; i < padded_rows_ * padded_dim_; i++) query_[i] = 0.0f;
    const float sign = query_sign(task_.scale);
    for (int r = 0; r < rows_; r++) {
      const float* from = task_.query + r / task_.num_queries * task_.query_head_stride +
                          r % task_.num_queries * task_.query_token_stride;
      for (int d = 0; d < task_.head_dim; d++) query_[place(r, padded_dim_, d)] = from[d] * sign;
    }
  }

  SPARSEKV_INLINE void fetch_token(const char* p, int dim) {
    for (int byte = 0; byte < dim * Number::kBytes; byte += 64) fetch(p + byte);
  }

  // Chunk at number `offset` of `count` tokens as floats, zeros beyond the last number.
  static void unpack(const char* const* tokens, int count, int offset, int dim, float* to) {
    const int valid = dim - offset;
    for (int t = 0; t < count; t++, to += kChunk) {
      const char* p = tokens[t] + offset * Number::kBytes;
      alignas(64) char padded[kChunk * Number::kBytes];
      if (valid < kChunk) {
        memset(padded, 0, sizeof padded);
        memcpy(padded, p, valid * Number::kBytes);
        p = padded;
      }
      Vector first, second;
      Number::load_pair(p, first, second);
      store(to, first);
      store(to + kLanes, second);
    }
  }

  // scores_: (rows, kTile), query rows times the keys of the tile.
  void score(const Tile& tile, const Tile& next) {
    const int whole = task_.head_dim / kChunk * kChunk;
    if (whole < task_.head_dim) {
      unpack(tile.key, tile.count, whole, task_.head_dim, unpacked_keys_);
    }
    for (int r = 0; r < padded_rows_;) {
      const Tile* ahead = r == 0 ? &next : nullptr;
      const int left = padded_rows_ - r;
      if (left >= kRowBlock) {
        score_rows<kRowBlock>(tile, r, whole, ahead);
        r += kRowBlock;
      } else if (left >= 4) {
        score_rows<4>(tile, r, whole, ahead);
        r += 4;
      } else if (left >= 2) {
        score_rows<2>(tile, r, whole, ahead);
        r += 2;
      } else {
        score_rows<1>(tile, r, whole, ahead);
        r += 1;
      }
    }
  }

  template <int kRows>
  void score_rows(const Tile& tile, int row, int whole, const Tile* ahead) {
    constexpr int kTokens = kAccumulators / kRows;
    const float* query = query_ + int64_t(row) * padded_dim_;
    for (int t = 0; t < tile.count; t += kTokens) {
      const char *keys[kTokens], *unpacked[kTokens];
      for (int i = 0; i < kTokens; i++) {
        const int token = t + i < tile.count ? t + i : tile.count - 1;
        keys[i] = tile.key[token];
        unpacked[i] = unpacked_[token];
        if (ahead && t + i < ahead->count) fetch_token(ahead->key[t + i], task_.head_dim);
      }
      Vector products[kAccumulators];
#pragma GCC unroll 16
      for (int i = 0; i < kAccumulators; i++) products[i] = zero();
      for (int d = 0; d < whole; d += kChunk) {
        multiply_chunk<Number, kRows>(products, keys, d * Number::kBytes, query + d * kRows);
      }
      if (whole < task_.head_dim) {
        multiply_chunk<Fp32, kRows>(products, unpacked, 0, query + whole * kRows);
      }
      alignas(64) float found[kAccumulators];
#pragma GCC unroll 4
      for (int i = 0; i < kAccumulators; i += kLanes) store(found + i, sums(products + i));
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        memcpy(scores_ + (row + r) * kTile + t, found + r * kTokens, sizeof(float) * kTokens);
      }
    }
  }

  // The difference first: it is exact where it matters, and never above 0.
  Vector weights_of(Vector scores, Vector base) const {
    return power_of_two(times(minus(scores, base), broadcast(factor_)));
  }

  // Tokens of the tile that a query row sees.
  Seen seen(const Tile& tile, int row) const {
    return seen_by(task_, tile, row % task_.num_queries);
  }

  // Scores become weights, relative to the largest score of the row so far.
  void weigh(const Tile& tile) {
    const int width = rounded_up(tile.count, kLanes);
    for (int r = 0; r < rows_; r++) {
      float* scores = scores_ + r * kTile;
      const Seen range = seen(tile, r);
      for (int t = 0; t < range.first; t++) scores[t] = -__builtin_inff();
      for (int t = range.last; t < width; t++) scores[t] = -__builtin_inff();
      Vector top = load(scores);
      for (int t = kLanes; t < width; t += kLanes) top = maximum(load(scores + t), top);
      const float found = largest(top);
      decays_[r] = tops_[r];
      if (found > tops_[r]) tops_[r] = found;
      bases_[r] = tops_[r] < -__FLT_MAX__ ? -__FLT_MAX__ : tops_[r];  // finite: no -inf + inf
    }
    for (int r = 0; r < rows_; r += kLanes) {
      store(decays_ + r, weights_of(load(decays_ + r), load(bases_ + r)));
    }
    for (int r = 0; r < rows_; r++) {
      float* scores = scores_ + r * kTile;
      const Vector base = broadcast(bases_[r]);
      Vector sum = times(load(totals_ + r * kLanes), broadcast(decays_[r]));
      for (int t = 0; t < width; t += kLanes) {
        const Vector weights = weights_of(load(scores + t), base);
        store(scores + t, weights);
        sum = plus(sum, weights);
      }
      store(totals_ + r * kLanes, sum);
    }
  }

  // sums_: (rows, padded head_dim_v), decayed, plus weights times values.
  void add(const Tile& tile, const Tile& next) {
    Ahead ahead, nothing;
    if (next.count > 0 && next.value[0] != next.key[0]) {  // else keys are fetched already
      ahead = ahead_of(next.value, next.count, int64_t(task_.head_dim_v) * Number::kBytes);
    }
    for (int d = 0; d < padded_dim_v_; d += kChunk) {
      if (tile.seen_by_all && padded_rows_ <= kRowBlock && d + kChunk <= task_.head_dim_v) {
        add_rows<Number>(tile.value, int64_t(d) * Number::kBytes, tile.count, d, ahead);
        continue;
      }
      unpack(tile.value, tile.count, d, task_.head_dim_v, unpacked_values_);
      if (tile.seen_by_all) {
        add_rows<Fp32>(unpacked_, unpacked_values(), tile.count, d, ahead);
        continue;
      }
      for (int r = 0; r < rows_; r++) {  // a hidden value must not even be multiplied by zero
        const Seen range = seen(tile, r);
        add_values<Fp32, 1>(sums_ + chunk(r, padded_dim_v_, d), decays_ + r, unpacked_ + range.first,
                            unpacked_values(), range.last - range.first,
                            scores_ + r * kTile + range.first, nothing);
      }
    }
  }

  // From the unpacked keys of a token to its unpacked values.
  int64_t unpacked_values() const { return (unpacked_values_ - unpacked_keys_) * int64_t{4}; }

  template <class Unpacked>
  void add_rows(const char* const* values, int64_t offset, int count, int d, Ahead& ahead) {
    Ahead nothing;
    for (int r = 0; r < padded_rows_;) {
      float* sums = sums_ + chunk(r, padded_dim_v_, d);
      const float *decay = decays_ + r, *weights = scores_ + r * kTile;
      Ahead& fetched = r == 0 ? ahead : nothing;
      const int left = padded_rows_ - r;
      if (left >= kRowBlock) {
        add_values<Unpacked, kRowBlock>(sums, decay, values, offset, count, weights, fetched);
        r += kRowBlock;
      } else if (left >= 4) {
        add_values<Unpacked, 4>(sums, decay, values, offset, count, weights, fetched);
        r += 4;
      } else if (left >= 2) {
        add_values<Unpacked, 2>(sums, decay, values, offset, count, weights, fetched);
        r += 2;
      } else {
        add_values<Unpacked, 1>(sums, decay, values, offset, count, weights, fetched);
        r += 1;
      }
    }
  }

  void write() {
    for (int r = 0; r < rows_; r++) {
      float* out = task_.partial + int64_t(r) * (task_.head_dim_v + 2);
      for (int d = 0; d < task_.head_dim_v; d++) out[d] = sums_[place(r, padded_dim_v_, d)];
      out[task_.head_dim_v] = total(load(totals_ + r * kLanes));
      out[task_.head_dim_v + 1] = tops_[r];
    }
  }

  const Task& task_;
  const int rows_, padded_rows_, padded_dim_, padded_dim_v_;
  const float factor_;  // of a score in the exponent of its weight
  float *query_, *scores_, *sums_, *totals_, *unpacked_keys_, *unpacked_values_;
  float *tops_, *bases_, *decays_;
  const char* unpacked_[kTile];  // of each token of a tile, in unpacked_keys_
};

void attend(const Task& task, Dtype dtype) {
  switch (dtype) {
    case Dtype::fp32:
      return Attention<Fp32>(task).run();
    case Dtype::bf16:
      return Attention<Bf16>(task).run();
    case Dtype::fp16:
      return Attention<Fp16>(task).run();
  }
}

#define SPARSEKV_TEXT_OF(name) #name
#define SPARSEKV_TEXT(name) SPARSEKV_TEXT_OF(name)
constexpr Kernel kernel = {SPARSEKV_TEXT(SPARSEKV_VECTORS), attend};

}  // namespace
}  // namespace SPARSEKV_VECTORS
}  // namespace sparsekv

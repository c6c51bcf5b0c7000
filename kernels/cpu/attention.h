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

// Consecutive stored keys that at least one query token sees.
struct Tile {
  const char* key = nullptr;
  const char* value = nullptr;
  int count = 0;
  int64_t position = 0;  // of the first
};

// The tiles of a task, in order. One never crosses a segment, a hidden key, or the border between
// keys that all query tokens see and keys that only the later ones see.
class Tiles {
 public:
  explicit Tiles(const Task& task) : task_(task), at_(task.begin) {}

  bool next(Tile& tile) {
    while (at_ < task_.end) {
      const int64_t segment = at_ / task_.tokens, first = segment * task_.tokens;
      const int64_t position = task_.positions[segment];
      const int64_t seen_by_all = task_.first_query_position - position + 1;
      const int64_t segment_end = smaller(task_.tokens, task_.end - first);
      const int64_t end = smaller(segment_end, seen_by_all + task_.num_queries - 1);
      int64_t offset = at_ - first;
      const uint8_t* mask = task_.key_mask ? task_.key_mask + position : nullptr;
      if (mask) {
        while (offset < end && !mask[offset]) offset++;
      }
      if (offset >= end) {
        at_ = first + segment_end;
        continue;
      }
      int64_t stop = smaller(offset + kTile, end);
      if (offset < seen_by_all) stop = smaller(stop, seen_by_all);
      int count = 1;
      while (offset + count < stop && (!mask || mask[offset + count])) count++;
      tile = {address(task_.key, segment, offset), address(task_.value, segment, offset), count,
              position + offset};
      at_ = first + offset + count;
      return true;
    }
    return false;
  }

 private:
  static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

  const char* address(const Stored& stored, int64_t segment, int64_t offset) const {
    const int64_t row =
        task_.row_table ? task_.row_table[segment * task_.row_table_stride] : task_.row;
    return stored.start + segment * stored.segment_stride + row * stored.row_stride +
           offset * stored.token_stride;
  }

  const Task& task_;
  int64_t at_;
};

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

// What a value block is to fetch meanwhile: one step for each token, one for each chunk.
struct Ahead {
  const char* start = nullptr;  // null: nothing
  int64_t token_step = 0;
  int64_t chunk_step = 0;
};

// One chunk of kRows rows of sums, end to end, += weights x the chunk of `count` values, after the
// sums were scaled.
template <class Number, int kRows>
SPARSEKV_INLINE void add_values(float* sums, const float* decay, const char* values,
                                int64_t value_stride, int count, const float* weights,
                                const char* ahead, int64_t ahead_step) {
  Vector first[kRows], second[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
    const Vector scale = broadcast(decay[r]);
    first[r] = times(load(sums + r * kChunk), scale);
    second[r] = times(load(sums + r * kChunk + kLanes), scale);
  }
  for (int t = 0; t < count; t++) {
    Vector v, w;
    Number::load_pair(values + t * value_stride, v, w);
    if (ahead) {
      fetch(ahead + t * ahead_step);
      if (kChunk * Number::kBytes > 64) fetch(ahead + t * ahead_step + 64);
    }
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
    lay_out_query();
  }

  void run() {
    Tiles tiles(task_);
    Tile tile, next;
    bool more = tiles.next(tile);
    if (more) fetch_tile(tile.key, task_.key.token_stride, tile.count, task_.head_dim);
    while (more) {
      more = tiles.next(next);
      score(tile, more ? &next : nullptr);
      weigh(tile);
      add(tile, more ? &next : nullptr);
      tile = next;
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

  static void fetch_tile(const char* p, int64_t stride, int count, int dim) {
    for (int t = 0; t < count; t++) fetch_token(p + t * stride, dim);
  }
  SPARSEKV_INLINE void fetch_token(const char* p, int dim) {
    for (int byte = 0; byte < dim * Number::kBytes; byte += 64) fetch(p + byte);
  }

  // Chunk at `offset` of `count` tokens as floats, zeros beyond the last number.
  static void unpack(const char* from, int64_t stride, int count, int offset, int dim, float* to) {
    const int valid = dim - offset;
    for (int t = 0; t < count; t++, from += stride, to += kChunk) {
      const char* p = from + offset * Number::kBytes;
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
  void score(const Tile& tile, const Tile* next) {
    const int whole = task_.head_dim / kChunk * kChunk;
    if (whole < task_.head_dim) {
      unpack(tile.key, task_.key.token_stride, tile.count, whole, task_.head_dim, unpacked_keys_);
    }
    for (int r = 0; r < padded_rows_;) {
      const Tile* ahead = r == 0 ? next : nullptr;
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
    const int64_t stride = task_.key.token_stride;
    const float* query = query_ + int64_t(row) * padded_dim_;
    for (int t = 0; t < tile.count; t += kTokens) {
      const char *keys[kTokens], *unpacked[kTokens];
      for (int i = 0; i < kTokens; i++) {
        const int token = t + i < tile.count ? t + i : tile.count - 1;
        keys[i] = tile.key + token * stride;
        unpacked[i] = reinterpret_cast<const char*>(unpacked_keys_ + token * kChunk);
        if (ahead && t + i < ahead->count) fetch_token(ahead->key + (t + i) * stride, task_.head_dim);
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

  // Keys of the tile that a query row sees: the first ones.
  int num_seen(const Tile& tile, int row) const {
    const int64_t last = task_.first_query_position + row % task_.num_queries - tile.position;
    return last + 1 < tile.count ? (last < 0 ? 0 : int(last + 1)) : tile.count;
  }
  bool is_partly_seen(const Tile& tile) const {
    return tile.position + tile.count - 1 > task_.first_query_position;
  }

  // The difference first: it is exact where it matters, and never above 0.
  Vector weights_of(Vector scores, Vector base) const {
    return power_of_two(times(minus(scores, base), broadcast(factor_)));
  }

  // Scores become weights, relative to the largest score of the row so far.
  void weigh(const Tile& tile) {
    const bool partly = is_partly_seen(tile);
    const int width = rounded_up(tile.count, kLanes);
    for (int r = 0; r < rows_; r++) {
      float* scores = scores_ + r * kTile;
      for (int t = partly ? num_seen(tile, r) : tile.count; t < width; t++) {
        scores[t] = -__builtin_inff();
      }
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
  void add(const Tile& tile, const Tile* next) {
    const Stored& value = task_.value;
    const bool partly = is_partly_seen(tile);
    const Ahead ahead = next ? values_ahead(*next) : Ahead{};
    for (int d = 0; d < padded_dim_v_; d += kChunk) {
      const char* fetched = ahead.start ? ahead.start + d / kChunk * ahead.chunk_step : nullptr;
      if (!partly && padded_rows_ <= kRowBlock && d + kChunk <= task_.head_dim_v) {
        add_rows<Number>(tile.value + d * Number::kBytes, value.token_stride, tile.count, d,
                         fetched, ahead.token_step);
        continue;
      }
      unpack(tile.value, value.token_stride, tile.count, d, task_.head_dim_v, unpacked_values_);
      const char* unpacked = reinterpret_cast<const char*>(unpacked_values_);
      if (!partly) {
        add_rows<Fp32>(unpacked, kChunk * 4, tile.count, d, fetched, ahead.token_step);
        continue;
      }
      for (int r = 0; r < rows_; r++) {  // a hidden value must not even be multiplied by zero
        add_values<Fp32, 1>(sums_ + chunk(r, padded_dim_v_, d), decays_ + r, unpacked, kChunk * 4,
                            num_seen(tile, r), scores_ + r * kTile, nullptr, 0);
      }
    }
  }

  template <class Unpacked>
  void add_rows(const char* values, int64_t stride, int count, int d, const char* ahead,
                int64_t step) {
    for (int r = 0; r < padded_rows_;) {
      float* sums = sums_ + chunk(r, padded_dim_v_, d);
      const float *decay = decays_ + r, *weights = scores_ + r * kTile;
      const char* fetched = r == 0 ? ahead : nullptr;
      const int left = padded_rows_ - r;
      if (left >= kRowBlock) {
        add_values<Unpacked, kRowBlock>(sums, decay, values, stride, count, weights, fetched, step);
        r += kRowBlock;
      } else if (left >= 4) {
        add_values<Unpacked, 4>(sums, decay, values, stride, count, weights, fetched, step);
        r += 4;
      } else if (left >= 2) {
        add_values<Unpacked, 2>(sums, decay, values, stride, count, weights, fetched, step);
        r += 2;
      } else {
        add_values<Unpacked, 1>(sums, decay, values, stride, count, weights, fetched, step);
        r += 1;
      }
    }
  }

  // Values of the next tile in order of address where tokens lie end to end, else column by column.
  Ahead values_ahead(const Tile& next) const {
    if (next.value == next.key) return {};  // keys are fetched already
    const int64_t chunk = kChunk * Number::kBytes, stride = task_.value.token_stride;
    if (stride == int64_t(task_.head_dim_v) * Number::kBytes) {
      return {next.value, chunk, chunk * next.count};
    }
    return {next.value, stride, chunk};
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

// Partial attention of one task, in the vectors of the file that includes this one.
//
// That file defines SPARSEKV_VECTORS, a namespace with Vector, kLanes, kRowBlock, kAccumulators, the
// arithmetic and the dtypes Fp32, Bf16, Fp16. A tile of keys is multiplied with all query rows, its
// weights found (running softmax), its values added; meanwhile the next tile is fetched.
//
// "Chunk": two vectors of consecutive numbers. Interleaved dtypes unpack to even numbers, then odd
// ones; the query is laid out like that beforehand, and results are put in order at the end.
//
// What bounds it: every byte of keys and values is read once, and every query row takes a
// multiplication and an addition for every number of a key and of a value. In bf16, for one key:
//
//   query heads of a kv head, head sizes    bytes   operations   operations a byte
//   Mixtral    4, 128 and 128                 512        2 048         4
//   Qwen3      8, 128 and 128                 512        4 096         8
//   MLA       16, 576 and 512, shared       1 152       34 816        30
//   V4        64, 512 and 512, shared       1 024      131 072       128
//
// A core of 184 G operations a second and 17 GB/s of its memory (two FMA units of AVX-512 near
// 3 GHz) is bound by memory up to 11 operations a byte. So Qwen3 and Mixtral are bound by memory
// where more than a few cores share it, if the next tile is fetched meanwhile, and MLA and V4 by
// arithmetic: at most 6.1 and 1.4 GB/s a core. There 16 query rows have a lane each in the scores:
// lane_scores.h and values.h say what a chunk costs.

namespace sparsekv {
namespace SPARSEKV_VECTORS {
namespace {

#define SPARSEKV_MEMBER inline __attribute__((always_inline))

constexpr int kChunk = 2 * kLanes;

SPARSEKV_INLINE int rounded_up(int n, int step) { return (n + step - 1) / step * step; }

// In this order: each needs those before it.
#include "tiles.h"
#include "fetcher.h"
#include "scores.h"
#include "lane_scores.h"
#include "powers.h"
#include "softmax.h"
#include "values.h"

template <int kSize>
struct Size {
  static constexpr int kRows = kSize;
};

// Calls `work` with each block of rows from `first` on, its first row and its size as a
// compile-time constant.
template <class Work>
SPARSEKV_INLINE void for_blocks(int first, int padded_rows, Work work) {
  int r = first;
  for (; padded_rows - r >= kRowBlock; r += kRowBlock) work(r, Size<kRowBlock>());
  if (padded_rows - r == 4) work(r, Size<4>());
  if (padded_rows - r == 2) work(r, Size<2>());
  if (padded_rows - r == 1) work(r, Size<1>());
}

template <class Number>
class Attention {
 public:
  explicit Attention(const Task& task)
      : task_(task),
        rows_(task_rows(task)),
        lane_rows_(rows_ / kLaneRows * kLaneRows),
        padded_rows_(pad_rows(rows_)),
        padded_dim_(rounded_up(task.head_dim, kChunk)),
        padded_dim_v_(rounded_up(task.head_dim_v, kChunk)) {
    float* free = task.scratch;
    const auto take = [&free](int64_t count) {
      float* taken = free;
      free += (count + 15) / 16 * 16;  // each from the start of a cache line
      return taken;
    };
    query_ = take(int64_t(padded_rows_) * padded_dim_);
    scores_ = take(int64_t(padded_rows_) * kTile);
    sums_ = take(int64_t(padded_rows_) * padded_dim_v_);
    softmax_.totals = take(int64_t(padded_rows_) * kLanes);
    unpacked_keys_ = take(kTile * kChunk);
    unpacked_values_ = take(kTile * kChunk);
    const int lanes_of_rows = rounded_up(padded_rows_, kLanes);
    softmax_.tops = take(lanes_of_rows);
    softmax_.bases = take(lanes_of_rows);
    softmax_.decays = take(lanes_of_rows);
    softmax_.factor = weight_exponent(task.scale);
    memset(sums_, 0, sizeof(float) * padded_rows_ * padded_dim_v_);
    memset(softmax_.totals, 0, sizeof(float) * padded_rows_ * kLanes);
    for (int i = 0; i < lanes_of_rows; i++) softmax_.tops[i] = -__builtin_inff();
    for (int i = 0; i < lanes_of_rows; i++) softmax_.bases[i] = -__builtin_inff();
    for (int i = 0; i < lanes_of_rows; i++) softmax_.decays[i] = 0.0f;
    lay_out_query();
  }

  void run() {
    Tiles tiles(task_);
    Tile two[2], *tile = &two[0], *next = &two[1];
    bool more = tiles.next(*tile);
    const bool together = are_values_in_keys(task_);
    Fetcher fetcher(task_, Number::kBytes, value_steps() + (together ? key_steps() : 0),
                    key_steps());
    fetcher.follow_keys(*tile);
    fetcher.follow_values(*tile);
    while (more) {
      more = tiles.next(*next);
      fetcher.follow_keys(*next);
      if (together) fetcher.follow_values(*next);
      score(*tile, fetcher);
      weigh(*tile);
      if (!together) fetcher.follow_values(*next);
      add(*tile, fetcher);
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

  // Steps of the fetcher in a whole tile, with its keys and with its values.
  int64_t key_steps() const {
    int64_t steps = lane_rows_ / kLaneRows * kTile;
    for_blocks(lane_rows_, padded_rows_, [&steps](int, auto size) {
      steps += kTile / (kAccumulators / decltype(size)::kRows);
    });
    return steps * (task_.head_dim / kChunk);
  }
  int64_t value_steps() const {
    int64_t steps = 0;
    for_blocks(0, padded_rows_, [&steps](int, auto) { steps += kTile; });
    return steps * (padded_dim_v_ / kChunk);
  }

  // The chunks of a block's rows alternate, so that each is found at a constant distance.
  int64_t chunk(int row, int padded_dim, int d) const {
    const int first = row / kRowBlock * kRowBlock;
    const int rows = padded_rows_ - first < kRowBlock ? padded_rows_ - first : kRowBlock;
    return int64_t(first) * padded_dim + d / kChunk * kChunk * rows + (row - first) * kChunk;
  }

  // Numbers in order <-> as a chunk is after unpacking.
  static void to_chunk(const float* from, float sign, float* to) {
    for (int i = 0; i < kLanes; i++) {
      to[i] = from[Number::kInterleaved ? 2 * i : i] * sign;
      to[kLanes + i] = from[Number::kInterleaved ? 2 * i + 1 : kLanes + i] * sign;
    }
  }
  static void from_chunk(const float* from, float* to) {
    for (int i = 0; i < kLanes; i++) {
      to[Number::kInterleaved ? 2 * i : i] = from[i];
      to[Number::kInterleaved ? 2 * i + 1 : kLanes + i] = from[kLanes + i];
    }
  }

  const float* query_row(int r) const {
    return task_.query + r / task_.num_queries * task_.query_head_stride +
           r % task_.num_queries * task_.query_token_stride;
  }

  void lay_out_query() {
    const float sign = query_sign(task_.scale);
    for (int r = 0; r < lane_rows_; r += kLaneRows) lay_out_lanes(r, sign);
    for (int r = lane_rows_; r < padded_rows_; r++) {
      const float* from = r < rows_ ? query_row(r) : nullptr;
      for (int d = 0; d < padded_dim_; d += kChunk) {
        float* to = query_ + chunk(r, padded_dim_, d);
        if (r < rows_ && d + kChunk <= task_.head_dim) {
          to_chunk(from + d, sign, to);
          continue;
        }
        alignas(64) float numbers[kChunk] = {};
        for (int i = 0; r < rows_ && i < task_.head_dim - d; i++) numbers[i] = from[d + i];
        to_chunk(numbers, sign, to);
      }
    }
  }

  // kLaneRows rows from r on: (numbers as unpacked, rows).
  void lay_out_lanes(int r, float sign) {
    const float* rows[kLaneRows];
    for (int i = 0; i < kLaneRows; i++) rows[i] = query_row(r + i);
    float* to = query_ + int64_t(r) * padded_dim_;
    for (int d = 0; d < padded_dim_; d++, to += kLaneRows) {
      const int place = d % kChunk, lane = place % kLanes, second = place / kLanes;
      const int number = Number::kInterleaved ? d - place + 2 * lane + second : d;
      for (int i = 0; i < kLaneRows; i++) {
        to[i] = number < task_.head_dim ? rows[i][number] * sign : 0.0f;
      }
    }
  }

  // Chunk at number `offset` of the tokens as floats, zeros beyond the last number.
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
  void score(const Tile& tile, Fetcher& fetcher) {
    const int whole = task_.head_dim / kChunk * kChunk;
    const bool has_rest = whole < task_.head_dim;
    if (has_rest) unpack(tile.key, tile.count, whole, task_.head_dim, unpacked_keys_);
    for (int r = 0; r < lane_rows_; r += kLaneRows) {
      score_lanes<Number>(tile, query_ + int64_t(r) * padded_dim_, whole,
                          has_rest ? unpacked_keys_ : nullptr, scores_ + r * kTile, fetcher);
    }
    for_blocks(lane_rows_, padded_rows_, [&](int r, auto size) {
      score_rows<Number, decltype(size)::kRows>(
          tile, query_ + int64_t(r) * padded_dim_, whole, has_rest ? unpacked_keys_ : nullptr,
          scores_ + r * kTile, fetcher);
    });
  }

  void weigh(const Tile& tile) {
    for (int r = 0; r < lane_rows_; r += kLaneRows) {
      softmax_.weigh_lanes(task_, tile, r, scores_ + r * kTile);
    }
    softmax_.weigh(task_, tile, lane_rows_, scores_);
  }

  RowWeights row_weights(int r) const { return {scores_ + r * kTile}; }
  LaneWeights lane_weights(int r) const {
    return {scores_ + r / kLaneRows * kLaneRows * kTile + r % kLaneRows};
  }

  // sums_: (rows, padded head_dim_v), decayed, plus weights times values.
  void add(const Tile& tile, Fetcher& fetcher) {
    for (int d = 0; d < padded_dim_v_; d += kChunk) {
      if (tile.seen_by_all && d + kChunk <= task_.head_dim_v) {
        add_lying(Lying<Number>{tile.value, int64_t(d) * Number::kBytes}, tile.count, d, fetcher);
        continue;
      }
      unpack(tile.value, tile.count, d, task_.head_dim_v, unpacked_values_);
      if (tile.seen_by_all) {
        add_rows(0, padded_rows_, Unpacked{unpacked_values_}, tile.count, d, fetcher);
      } else {
        add_seen(tile, d, fetcher);
      }
    }
  }

  // The first block of rows unpacks the values for the others, among its multiplications.
  void add_lying(Lying<Number> values, int count, int d, Fetcher& fetcher) {
    if (padded_rows_ <= kRowBlock) {
      add_rows(0, padded_rows_, values, count, d, fetcher);
      return;
    }
    add_rows(0, kRowBlock, Kept<Number>{values, unpacked_values_}, count, d, fetcher);
    add_rows(kRowBlock, padded_rows_, Unpacked{unpacked_values_}, count, d, fetcher);
  }

  // Of rows from `first` to `last`.
  template <class Values>
  void add_rows(int first, int last, Values values, int count, int d, Fetcher& fetcher) {
    for_blocks(first, last, [&](int r, auto size) {
      constexpr int kRows = decltype(size)::kRows;
      float* sums = sums_ + chunk(r, padded_dim_v_, d);
      if (r < lane_rows_) {
        add_values<kRows>(sums, softmax_.decays + r, values, count, lane_weights(r), fetcher);
      } else {
        add_values<kRows>(sums, softmax_.decays + r, values, count, row_weights(r), fetcher);
      }
    });
  }

  // Row by row: a hidden value must not even be multiplied by zero.
  void add_seen(const Tile& tile, int d, Fetcher& fetcher) {
    for (int r = 0; r < rows_; r++) {
      const Seen seen = seen_by(task_, tile, r % task_.num_queries);
      float* sums = sums_ + chunk(r, padded_dim_v_, d);
      const Unpacked values{unpacked_values_ + seen.first * kChunk};
      const int count = seen.last - seen.first;
      if (r < lane_rows_) {
        const LaneWeights weights{lane_weights(r).start + seen.first * kLaneRows};
        add_values<1>(sums, softmax_.decays + r, values, count, weights, fetcher);
      } else {
        const RowWeights weights{row_weights(r).start + seen.first};
        add_values<1>(sums, softmax_.decays + r, values, count, weights, fetcher);
      }
    }
  }

  void write() {
    for (int r = 0; r < rows_; r++) {
      float* out = task_.partial + r * partial_row_floats(task_.head_dim_v);
      for (int d = 0; d < task_.head_dim_v; d += kChunk) {
        const float* sums = sums_ + chunk(r, padded_dim_v_, d);
        if (d + kChunk <= task_.head_dim_v) {
          from_chunk(sums, out + d);
          continue;
        }
        alignas(64) float numbers[kChunk];
        from_chunk(sums, numbers);
        memcpy(out + d, numbers, sizeof(float) * (task_.head_dim_v - d));
      }
      out[task_.head_dim_v] =
          r < lane_rows_ ? softmax_.totals[r] : total(load(softmax_.totals + r * kLanes));
      out[task_.head_dim_v + 1] = softmax_.tops[r];
    }
  }

  const Task& task_;
  const int rows_, lane_rows_, padded_rows_, padded_dim_, padded_dim_v_;
  float *query_, *scores_, *sums_, *unpacked_keys_, *unpacked_values_;
  Softmax softmax_;
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
constexpr Kernel kernel = {SPARSEKV_TEXT(SPARSEKV_VECTORS), attend, 8192};

}  // namespace
}  // namespace SPARSEKV_VECTORS
}  // namespace sparsekv

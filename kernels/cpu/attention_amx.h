// Partial attention of one task in matrix registers of 16 rows of 64 bytes, for keys and values of
// bf16 and at least a matrix of query rows.
//
// The including file defines SPARSEKV_VECTORS, a namespace with Vector (16 floats), Words, their
// arithmetic and the matrices. A chunk of keys is multiplied with all query rows, its weights found
// (running softmax), rounded to bf16, and multiplied with its values. Chunks overlap: the weights
// of one are found between the products of the keys of the next; the one after that is fetched.
//
// Keys are one factor as they lie, 16 tokens by 32 numbers; the query, laid out once, is the other.
// Values are packed, two tokens' numbers alternating, for all query rows; this leaves the numbers
// of the sums in another order, which MatrixSums tells.
//
// Floors for each key, of bytes read and of products (16 x 16 x 32, 16 cycles each):
//   16 heads, 576 / 512, values in keys (MLA): 1152 bytes, 18/16 + 32/32 = 2.1 products, 34 cycles
//   64 heads, 512 / 512, keys are values (V4): 1024 bytes, 64/16 + 128/32 = 8 products, 128 cycles
// The second also moves, for each key of a chunk of 128, 2 KB of sums and 2 KB of keys through the
// first-level cache, since 32 keys x 32 rows are what the registers hold.
//
// Measured with keys in the second-level cache, on a core near 2.5 GHz: 66 and 160 ns a key, where
// the products take 14 and 52. The rest is lines that come from that cache to be multiplied or
// packed: of MLA more than 40, for the 18 of a key. Each occupies one of a core's 16 buffers for as
// long as it is waited for, and so does what is fetched from DRAM; one waits for the other. Chunks
// of more keys would move the sums less often, but three chunks must stay in the second-level
// cache, of which less than 1 MB was of use: from 192 keys on, what is won is lost again.
//
// Operands are loaded together and then multiplied. On a core of its own, loads hide behind
// products of 6 ns in any order. On most cores of a shared machine products take 14 ns, loads 8 and
// stores 9, one after the other and whatever their size, and a load between products costs more
// than before them. A probe of one product for each load tells the two apart, 7 ns against 23.

namespace sparsekv {
namespace SPARSEKV_VECTORS {
namespace {

#define SPARSEKV_MEMBER inline __attribute__((always_inline))

#include "tiles.h"
#include "fetcher.h"
#include "chunks.h"

constexpr int kNumbers = 32;  // of bf16 in a row of a matrix
constexpr int kMatrixBytes = 1024;
constexpr int kMatrixFloats = 256;
constexpr int kMatricesOfSums = 4;
constexpr int kSteps = kSlots / kNumbers;  // matrices of weights along the keys of a chunk
constexpr int kMostParts = 3;              // bf16 numbers that add up to any float

SPARSEKV_INLINE int rounded_up(int n, int step) { return (n + step - 1) / step * step; }
SPARSEKV_INLINE int smaller(int a, int b) { return a < b ? a : b; }

// What is left of a task's memory to work in.
class Scratch {
 public:
  explicit Scratch(const Task& task) : free_(reinterpret_cast<char*>(task.scratch)) {}

  char* take(int64_t bytes) {
    char* taken = free_;
    free_ += (bytes + 63) / 64 * 64;
    return taken;
  }
  float* take_floats(int64_t count) { return reinterpret_cast<float*>(take(count * 4)); }

 private:
  char* free_;
};

// The first `count` of 32 numbers, of which `low` holds those 0 ... 3 of each eight.
SPARSEKV_INLINE void store_numbers(float* to, int count, Vector low, Vector high) {
  if (count >= kNumbers) {
    store_by_fours(to, low, high);
  } else {
    float numbers[kNumbers];
    store_by_fours(numbers, low, high);
    memcpy(to, numbers, sizeof(float) * count);
  }
}

// In this order: each needs those before it.
#include "powers.h"
#include "matrix_query.h"
#include "matrix_softmax.h"
#include "matrix_values.h"
#include "matrix_chunk.h"
#include "matrix_scores.h"
#include "matrix_sums.h"

template <int kRowMatrices>
class MatrixAttention {
 public:
  explicit MatrixAttention(const Task& task)
      : task_(task),
        rows_(task_rows(task)),
        row_blocks_((rows_ + kBlockRows - 1) / kBlockRows),
        padded_rows_(row_blocks_ * kBlockRows),
        padded_dim_(rounded_up(task.head_dim, kNumbers)),
        padded_dim_v_(rounded_up(task.head_dim_v, MatrixSums<kRowMatrices>::kSlab)),
        values_in_keys_(are_values_in_keys(task) && padded_dim_v_ <= task.head_dim),
        scratch_(task),
        query_(task, row_blocks_, kRowMatrices, padded_dim_,
               scratch_.take(int64_t(kMostParts) * padded_rows_ * padded_dim_ * 2)),
        sums_(row_blocks_, padded_dim_v_,
              scratch_.take_floats(int64_t(padded_rows_) * padded_dim_v_),
              scratch_.take(MatrixSums<kRowMatrices>::packed_bytes())),
        weights_(scratch_.take(int64_t(padded_rows_) * kSlots * 2)),
        scores_{scratch_.take_floats(int64_t(padded_rows_) * kSlots),
                scratch_.take_floats(int64_t(padded_rows_) * kSlots)} {
    const int key_bytes = padded_dim_ * 2, value_bytes = padded_dim_v_ * 2;
    const int zero_bytes = key_bytes > value_bytes ? key_bytes : value_bytes;
    char* zeros = scratch_.take(zero_bytes);
    memset(zeros, 0, zero_bytes);
    for (MatrixChunk& chunk : matrices_) {
      char* keys = scratch_.take(int64_t(kSlots) * key_bytes);
      char* values = scratch_.take(int64_t(kSlots) * value_bytes);
      chunk.place(keys, values, zeros, key_bytes, value_bytes);
    }
    softmax_ = {scratch_.take_floats(padded_rows_), scratch_.take_floats(padded_rows_),
                scratch_.take_floats(padded_rows_), scratch_.take_floats(padded_rows_),
                weight_exponent(task.scale)};
    softmax_.clear(rows_);
  }

  void run() {
    Chunks chunks(task_);
    Chunk chunk[2];
    Ahead ahead(task_.head_dim * 2, values_in_keys_ ? 0 : task_.head_dim_v * 2,
                products_of_chunk());
    configure_matrices();
    bool more = chunks.next(chunk[0], 1);  // a short one: nothing else is done while it is fetched
    ahead.start(chunk[0]);
    ahead.fetch_rest();
    query_.lay_out();  // meanwhile
    for (int now = 0; more; now = !now) {
      more = chunks.next(chunk[!now]);
      if (more) {
        ahead.start(chunk[!now]);
      } else {
        ahead.start(task_.partial, rows_ * partial_row_floats(task_.head_dim_v) * 4);
      }
      if (chunk[now].tiles[0].seen_by_all) {
        matrices_[now].gather(task_, chunk[now], values_in_keys_, Blocking<kRowMatrices>::kOthers);
        score(matrices_[now], scores_[now], ahead);
        add_scored(ahead);
        scored_ = &matrices_[now];
        start_weighing(scores_[now]);
      } else {
        add_scored(ahead);
        attend_each(chunk[now].tiles[0]);
      }
      ahead.fetch_rest();
    }
    add_scored(ahead);
    release_matrices();
    write();
  }

 private:
  static constexpr int kBlockRows = Blocking<kRowMatrices>::kRows;

  int products_of_chunk() const {
    return row_blocks_ * kRowMatrices *
           (kSlots / kGroup * padded_dim_ / kNumbers + kSteps * padded_dim_v_ / 16);
  }

  // scores: [matrix of rows][slot][16 rows].
  void score(const MatrixChunk& chunk, float* scores, Ahead& ahead) {
    for (int block = 0; block < row_blocks_; block++) {
      for (int g = 0; g < chunk.groups; g += Blocking<kRowMatrices>::kOthers) {
        const int64_t at = int64_t(block) * kRowMatrices * kSlots + g * kGroup;
        score_block<kRowMatrices>(query_, block, padded_dim_ * 2, chunk.keys + g, scores + at * 16,
                                  ahead, weighing_);
      }
    }
  }

  void start_weighing(float* all_scores) {
    const int row_matrices = row_blocks_ * kRowMatrices;
    for (int m = 0; m < row_matrices; m++) {
      float* scores = all_scores + int64_t(m) * kSlots * 16;
      if (query_.parts() > 1) mend(m, scores);
      for (int g = 0; g < scored_->groups; g++) {
        for (int i = scored_->seen[g]; i < kGroup; i++) {
          store(scores + (g * kGroup + i) * 16, broadcast(-__builtin_inff()));
        }
      }
    }
    weighing_.start(softmax_, all_scores, scored_->slots(), row_matrices, weights_);
  }

  // A query in parts may find NaN where the whole does not: an infinite key times a part of zero.
  void mend(int m, float* all_scores) {
    for (int slot = 0; slot < scored_->slots(); slot++) {
      float* scores = all_scores + slot * 16;
      const Rows& keys = scored_->keys[slot / kGroup];
      if (!any_is_nan(load(scores))) continue;
      for (int i = 0; i < 16 && m * 16 + i < rows_; i++) {
        if (scores[i] == scores[i]) continue;
        scores[i] = query_.product(m * 16 + i, keys.start + slot % kGroup * keys.stride);
      }
    }
  }

  // The values of the chunk that was scored last, if it still waits for that.
  void add_scored(Ahead& ahead) {
    if (!scored_) return;
    weighing_.finish();
    // Few rows find a new largest score, once some keys are behind.
    for (int row = 0; row < rows_ && !sums_.is_empty(); row++) {
      if (softmax_.decays[row] != 1.0f) sums_.decay(row, softmax_.decays[row]);
    }
    Ahead::Lines lines = ahead.lines;
    sums_.add(scored_->values, scored_->groups / 2, weights_, [&] { ahead.fetch_some(lines); });
    ahead.lines = lines;
    scored_ = nullptr;
  }

  // A tile that only some query tokens see, one row at a time and without rounding: a hidden value
  // must not even be multiplied by zero.
  __attribute__((noinline)) void attend_each(const Tile& tile) {
    if (sums_.is_empty()) sums_.clear();
    const int64_t bytes = padded_dim_v_ * 2;
    char* values = matrices_[0].copied_values();
    for (int t = 0; t < tile.count; t++) {
      memcpy(values + t * bytes, tile.value[t], task_.head_dim_v * 2);
    }
    for (int row = 0; row < rows_; row++) {
      const Seen seen = seen_by(task_, tile, row % task_.num_queries);
      alignas(64) float weights[kTile];
      float top = softmax_.tops[row];
      for (int t = 0; t < kTile; t++) {
        const bool is_seen = t >= seen.first && t < seen.last;
        weights[t] = is_seen ? query_.product(row, tile.key[t]) : -__builtin_inff();
        if (weights[t] > top) top = weights[t];
      }
      const Vector base = softmax_.base_of(broadcast(top));
      alignas(64) float decay[16];
      store(decay, softmax_.weights_of(broadcast(softmax_.tops[row]), base));
      for (int t = 0; t < kTile; t += 16) {
        store(weights + t, softmax_.weights_of(load(weights + t), base));
      }
      float total = 0.0f;
      for (int t = seen.first; t < seen.last; t++) total += weights[t];
      softmax_.tops[row] = top;
      softmax_.totals[row] = softmax_.totals[row] * decay[0] + total;
      softmax_.rounded_totals[row] = softmax_.rounded_totals[row] * decay[0] + total;
      for (int d = 0; d < padded_dim_v_; d += kNumbers) {
        float *low = sums_.of(row, d), *high = low + kMatrixFloats;
        Vector x = times(load(low), broadcast(decay[0]));
        Vector y = times(load(high), broadcast(decay[0]));
        for (int t = seen.first; t < seen.last; t++) {
          const Words value = load_words(values + t * bytes + 2 * d);
          const Vector weight = broadcast(weights[t]);
          x = times_plus(as_floats(alternate_low(zero_words(), value)), weight, x);
          y = times_plus(as_floats(alternate_high(zero_words(), value)), weight, y);
        }
        store(low, x);
        store(high, y);
      }
    }
  }

  // The sums were of rounded weights, so they are divided by the total of those; the other total,
  // which is exact, stays for who merges.
  void write() {
    for (int row = 0; row < rows_; row++) {
      float* out = task_.partial + row * partial_row_floats(task_.head_dim_v);
      const float total = softmax_.totals[row], rounded = softmax_.rounded_totals[row];
      const float factor = rounded > 0.0f ? total / rounded : 1.0f;
      for (int d = 0; d < task_.head_dim_v; d += kNumbers) {
        Vector low = broadcast(0.0f), high = low;
        if (!sums_.is_empty()) {
          const float* sums = sums_.of(row, d);
          low = times(load(sums), broadcast(factor));
          high = times(load(sums + kMatrixFloats), broadcast(factor));
        }
        store_numbers(out + d, smaller(kNumbers, task_.head_dim_v - d), low, high);
      }
      out[task_.head_dim_v] = total;
      out[task_.head_dim_v + 1] = softmax_.tops[row];
    }
  }

  const Task& task_;
  const int rows_, row_blocks_, padded_rows_, padded_dim_, padded_dim_v_;
  const bool values_in_keys_;
  Scratch scratch_;
  MatrixQuery query_;
  MatrixSums<kRowMatrices> sums_;
  char* const weights_;  // [matrix of rows][32 tokens], a matrix being 16 rows by 32 tokens
  float* const scores_[2];
  MatrixChunk matrices_[2];
  const MatrixChunk* scored_ = nullptr;  // its values are still to be added
  MatrixSoftmax softmax_;
  Weighing weighing_;
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
constexpr Kernel kernel = {SPARSEKV_TEXT(SPARSEKV_VECTORS), attend, 32768};

}  // namespace
}  // namespace SPARSEKV_VECTORS
}  // namespace sparsekv

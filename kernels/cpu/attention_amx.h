// Partial attention of one task in matrix registers of 16 rows of 64 bytes, for keys and values of
// bf16 and at least a matrix of query rows.
//
// The including file defines SPARSEKV_VECTORS, a namespace with Vector (16 floats), Words, their
// arithmetic and the matrices. A chunk of keys is multiplied with all query rows, its weights found
// (running softmax), rounded to bf16, and multiplied with its values; meanwhile the next chunk is
// fetched.
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

#define SPARSEKV_MEMBER inline __attribute__((always_inline))

#include "tiles.h"
#include "fetcher.h"
#include "chunks.h"

constexpr int kNumbers = 32;  // of bf16 in a row of a matrix
constexpr int kMatrixBytes = 1024;
constexpr int kMatrixFloats = 256;
constexpr int kMatricesOfSums = 4;
constexpr int kMostParts = 3;  // bf16 numbers that add up to any float

SPARSEKV_INLINE int rounded_up(int n, int step) { return (n + step - 1) / step * step; }
SPARSEKV_INLINE int smaller(int a, int b) { return a < b ? a : b; }

// In this order: each needs those before it.
#include "powers.h"
#include "matrix_query.h"
#include "matrix_softmax.h"
#include "matrix_values.h"

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
        values_in_keys_(are_values_in_keys(task) && padded_dim_v_ <= task.head_dim),
        query_(task, row_blocks_, kRowMatrices, padded_dim_,
               reinterpret_cast<char*>(task.scratch)) {
    const int64_t rows = row_blocks_ * kBlockRows;
    char* free = reinterpret_cast<char*>(task.scratch) + kMostParts * rows * padded_dim_ * 2;
    const auto take = [&free](int64_t bytes) {
      char* taken = free;
      free += (bytes + 63) / 64 * 64;
      return taken;
    };
    const auto take_floats = [&take](int64_t count) {
      return reinterpret_cast<float*>(take(count * 4));
    };
    for (float*& scores : scores_) scores = take_floats(rows * kSlots);
    weights_ = take(rows * kSlots * 2);
    sums_ = take_floats(rows * padded_dim_v_);
    packed_ = take((kSteps + 1) * kUnitBytes);
    for (Gathered& gathered : gathered_) {
      gathered.copied_keys = take(kSlots * padded_dim_ * 2);
      gathered.copied_values = take(kSlots * padded_dim_v_ * 2);
    }
    const int64_t zeros = (padded_dim_ > padded_dim_v_ ? padded_dim_ : padded_dim_v_) * 2;
    zeros_ = take(zeros);
    memset(zeros_, 0, zeros);
    softmax_ = {take_floats(rows), take_floats(rows), take_floats(rows), take_floats(rows),
                weight_exponent(task.scale)};
    softmax_.clear(rows_);
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
    query_.lay_out();  // meanwhile
    for (int now = 0; more; now = !now) {
      more = chunks.next(chunk[!now]);
      ahead.start(chunk[!now]);
      if (chunk[now].tiles[0].seen_by_all) {
        gather(chunk[now], gathered_[now]);
        score(gathered_[now], scores_[now], ahead);
        add_pending(ahead);
        pending_ = &gathered_[now];
        start_weighing(scores_[now]);
      } else {
        add_pending(ahead);
        attend_each(chunk[now].tiles[0]);
      }
      ahead.fetch_rest();
    }
    add_pending(ahead);
    release_matrices();
    write();
  }

 private:
  static constexpr int kBlockRows = kRowMatrices * kGroup;
  static constexpr int kOthers = kMatricesOfSums / kRowMatrices;  // matrices of keys, or of numbers
  static constexpr int kSlab = kOthers * 16;  // numbers of the values at a time
  static constexpr int kUnitBytes = kOthers * kMatrixBytes;  // of packed values of 32 tokens
  static constexpr int kChunkTiles = 2;
  static constexpr int kSlots = kChunkTiles * kTile;
  static constexpr int kSteps = kSlots / kNumbers;  // products along the tokens
  using Fetch = Ahead<kChunkTiles>;

  // So many that the next chunk is there when the products of this one are done.
  int lines_for_each_product() const {
    const int of_keys = (task_.head_dim * 2 + 63) / 64;
    const int of_values = values_in_keys_ ? 0 : (task_.head_dim_v * 2 + 63) / 64;
    const int lines = kSlots * (of_keys + of_values);
    const int products = row_blocks_ * kRowMatrices *
                         (kSlots / 16 * padded_dim_ / kNumbers + kSteps * padded_dim_v_ / 16);
    return (lines + products - 1) / products;
  }

  // The tokens of a chunk in groups.
  struct Gathered {
    int groups;
    int seen[kSlots / kGroup];  // tokens of each group; what follows them counts for nothing
    Rows keys[kSlots / kGroup], values[kSlots / kGroup];
    char *copied_keys, *copied_values;
  };

  void gather(const Chunk<kChunkTiles>& chunk, Gathered& to) const {
    to.groups = 0;
    for (int i = 0; i < chunk.num_tiles; i++) {
      const Tile& tile = chunk.tiles[i];
      for (int first = 0; first < tile.count; first += kGroup) {
        const int count = smaller(kGroup, tile.count - first);
        const int64_t at = to.groups * kGroup, key_bytes = padded_dim_ * 2;
        const int64_t value_bytes = padded_dim_v_ * 2;
        const Rows keys = rows_of(tile.key + first, count, task_.head_dim * 2, key_bytes,
                                  to.copied_keys + at * key_bytes);
        to.keys[to.groups] = keys;
        to.values[to.groups] = values_in_keys_
                                   ? keys
                                   : rows_of(tile.value + first, count, task_.head_dim_v * 2,
                                             value_bytes, to.copied_values + at * value_bytes);
        to.seen[to.groups++] = count;
      }
    }
    for (; to.groups % kOthers != 0; to.groups++) {
      to.keys[to.groups] = to.values[to.groups] = {zeros_, 0};
      to.seen[to.groups] = 0;
    }
  }

  // scores: [matrix of rows][slot][16 rows], keys times query rows.
  void score(const Gathered& chunk, float* scores, Fetch& ahead) {
    for (int block = 0; block < row_blocks_; block++) {
      for (int g = 0; g < chunk.groups; g += kOthers) {
        const int64_t at = int64_t(block) * kRowMatrices * kSlots + g * kGroup;
        score_block(chunk.keys + g, block, scores + at * 16, ahead);
      }
    }
  }

  void score_block(const Rows* groups, int block, float* first, Fetch& ahead) {
    const int key_bytes = padded_dim_ * 2;
    clear_matrix<0>();
    clear_matrix<1>();
    clear_matrix<2>();
    clear_matrix<3>();
    Rows keys[kOthers];
    for (int i = 0; i < kOthers; i++) keys[i] = groups[i];
    typename Fetch::Lines lines = ahead.lines;
    const auto between = [&]() __attribute__((always_inline)) { ahead.fetch_some(lines); };
    for (int part = 0; part < query_.parts(); part++) {
      const char* query = query_.block(part, block);
      for (int byte = 0; byte < key_bytes; byte += 64) {
        if constexpr (kRowMatrices == 1) {
          load_matrix<4>(query, 64);
          load_matrix<5>(keys[0].start + byte, keys[0].stride);
          load_matrix<6>(keys[1].start + byte, keys[1].stride);
          load_matrix<7>(keys[2].start + byte, keys[2].stride);
          between();
          weighing_.step();
          multiply_matrices<0, 5, 4>();
          between();
          multiply_matrices<1, 6, 4>();
          between();
          weighing_.step();
          multiply_matrices<2, 7, 4>();
          load_matrix<5>(keys[3].start + byte, keys[3].stride);
          between();
          multiply_matrices<3, 5, 4>();
        } else {
          load_matrix<6>(query, 64);
          load_matrix<7>(query + kMatrixBytes, 64);
          load_matrix<4>(keys[0].start + byte, keys[0].stride);
          load_matrix<5>(keys[1].start + byte, keys[1].stride);
          between();
          weighing_.step();
          multiply_matrices<0, 4, 6>();
          between();
          multiply_matrices<1, 5, 6>();
          between();
          weighing_.step();
          multiply_matrices<2, 4, 7>();
          between();
          multiply_matrices<3, 5, 7>();
        }
        query += kRowMatrices * kMatrixBytes;
      }
    }
    ahead.lines = lines;
    float* second = first + (kRowMatrices == 1 ? 2 * kMatrixFloats : kSlots * 16);
    store_matrix<0>(first, 64);
    store_matrix<1>(first + kMatrixFloats, 64);
    store_matrix<2>(second, 64);
    store_matrix<3>(second + kMatrixFloats, 64);
  }

  // weights_: [matrix of rows][32 tokens], a matrix being 16 rows by 32 tokens.
  void start_weighing(float* all_scores) {
    const int slots = pending_->groups * kGroup;
    for (int m = 0; m < row_blocks_ * kRowMatrices; m++) {
      float* scores = all_scores + int64_t(m) * kSlots * 16;
      if (query_.parts() > 1) mend(m, scores);
      for (int g = 0; g < pending_->groups; g++) {
        for (int i = pending_->seen[g]; i < kGroup; i++) {
          store(scores + (g * kGroup + i) * 16, broadcast(-__builtin_inff()));
        }
      }
    }
    weighing_.start(softmax_, all_scores, kSlots, slots, row_blocks_ * kRowMatrices, weights_);
  }

  // A query in parts may find NaN where the whole does not: an infinite key times a part of zero.
  void mend(int m, float* all_scores) {
    for (int slot = 0; slot < pending_->groups * kGroup; slot++) {
      float* scores = all_scores + slot * 16;
      const Rows& keys = pending_->keys[slot / kGroup];
      if (!any_is_nan(load(scores))) continue;
      for (int i = 0; i < 16 && m * 16 + i < rows_; i++) {
        if (scores[i] == scores[i]) continue;
        scores[i] = query_.product(m * 16 + i, keys.start + slot % kGroup * keys.stride);
      }
    }
  }

  // [slab of numbers][block of rows][matrix of rows][matrix of numbers], each 16 rows by 16
  // numbers. Two matrices hold 32 numbers: the first one those 0 ... 3 of each eight.
  float* sums(int slab, int block) {
    return sums_ + (int64_t(slab) * row_blocks_ + block) * kMatricesOfSums * kMatrixFloats;
  }

  // sums_, decayed, plus weights times values of the chunk that was scored before, if there is one.
  void add_pending(Fetch& ahead) {
    if (!pending_) return;
    weighing_.finish();
    for (int part = 0; part < 4; part++) pack(unit_at(0, 0), part);
    // Few rows find a new largest score, once some keys are behind.
    for (int row = 0; row < rows_ && !is_empty_; row++) {
      if (softmax_.decays[row] != 1.0f) decay(row, softmax_.decays[row]);
    }
    for (int slab = 0; slab < padded_dim_v_ / kSlab; slab++) {
      for (int block = 0; block < row_blocks_; block++) add_block(slab, block, ahead);
    }
    is_empty_ = false;
    pending_ = nullptr;
  }

  // Values of 32 tokens are a unit. While one is multiplied, the next is packed: by the first block
  // of rows, and the first unit of the next slab by the last block.
  void add_block(int slab, int block, Fetch& ahead) {
    const int units = pending_->groups / 2;
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
    typename Fetch::Lines lines = ahead.lines;
    const char* weights = weights_ + int64_t(block) * kRowMatrices * kSteps * kMatrixBytes;
    const bool has_more = block + 1 == row_blocks_ && (slab + 1) * kSlab < padded_dim_v_;
    for (int k = 0; k < units; k++, weights += kMatrixBytes) {
      const char* values = unit_at(slab, k).packed;
      const bool is_last = k + 1 == units;
      const bool packs = is_last ? has_more : block == 0;
      const Unit next = is_last ? unit_at(slab + 1, 0) : unit_at(slab, k + 1);
      const auto between = [&](int part) __attribute__((always_inline)) {
        if (packs) pack(next, part);
        ahead.fetch_some(lines);
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
    }
    ahead.lines = lines;
    store_matrix<0>(to, 64);
    store_matrix<1>(to + kMatrixFloats, 64);
    store_matrix<2>(to + 2 * kMatrixFloats, 64);
    store_matrix<3>(to + 3 * kMatrixFloats, 64);
  }

  struct Unit {
    Packing<kOthers> first, second;  // of its groups
    char* packed;
  };

  // With one block of rows, two units are alive at a time; else those of a slab, and one more.
  Unit unit_at(int slab, int k) const {
    const int units = pending_->groups / 2, alive = row_blocks_ == 1 ? 2 : units + 1;
    char* packed = packed_ + (slab * units + k) % alive * kUnitBytes;
    const Rows &first = pending_->values[2 * k], &second = pending_->values[2 * k + 1];
    const int64_t offset = slab * kSlab * 2;
    return {{first.start + offset, first.stride, packed},
            {second.start + offset, second.stride, packed + kMatrixBytes / 2},
            packed};
  }

  SPARSEKV_MEMBER static void pack(const Unit& unit, int part) {
    unit.first.pack(part);
    unit.second.pack(part);
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
      memcpy(gathered_[0].copied_values + t * bytes, tile.value[t], task_.head_dim_v * 2);
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
        float *low = sums_of(row, d), *high = low + kMatrixFloats;
        Vector x = times(load(low), broadcast(decay[0]));
        Vector y = times(load(high), broadcast(decay[0]));
        for (int t = seen.first; t < seen.last; t++) {
          const Words value = load_words(gathered_[0].copied_values + t * bytes + 2 * d);
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
      const float total = softmax_.totals[row], rounded = softmax_.rounded_totals[row];
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
      out[task_.head_dim_v + 1] = softmax_.tops[row];
    }
  }

  const Task& task_;
  const int rows_, row_blocks_, padded_dim_, padded_dim_v_;
  const bool values_in_keys_;
  MatrixQuery query_;
  MatrixSoftmax softmax_;
  bool is_empty_ = true;  // sums_ is unwritten: nothing was added yet
  char *weights_, *packed_, *zeros_;
  float *scores_[2], *sums_;
  Weighing weighing_;
  Gathered gathered_[2];
  const Gathered* pending_ = nullptr;  // scored, but not yet added
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

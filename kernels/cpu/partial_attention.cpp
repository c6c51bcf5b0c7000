#include "partial_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "pool.h"

namespace sparsekv {

namespace {

using Call = sparsekv_partial_attention_call;

constexpr int64_t kLargest = int64_t(1) << 48;  // of a size, stride or position: no sum overflows
constexpr int64_t kLargestDim = int64_t(1) << 16;

// Query rows that share one pass over the keys, if a kv head has that many.
constexpr int64_t kRowsPerPass = 64;
constexpr int64_t kQueriesPerPass = 8;

// Keys of one task: enough to be worth its start, few enough that all threads end together and that
// a sum of single precision stays exact to its last digits.
constexpr int64_t kLeastKeys = 512;
constexpr int64_t kMostKeys = 2048;
constexpr int64_t kTasksWanted = 256;

// Partial results that may be alive at a time.
constexpr int64_t kWorkspaceFloats = int64_t(16) << 20;

// Multiplications that the calling thread does itself rather than wake another.
constexpr int64_t kWorthAThread = 100000;

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How a call is cut. It depends on the shapes alone: results are the same with any number of
// threads.
struct Plan {
  explicit Plan(const Call& call) {
    group_size = call.num_heads / call.num_kv_heads;
    num_keys = call.num_segments * call.tokens;
    pairs = call.batch * call.num_kv_heads;
    const int64_t together = std::max(kQueriesPerPass, kRowsPerPass / group_size);
    queries_per_pass = std::min(call.num_queries, together);
    passes = divided_up(call.num_queries, queries_per_pass);
    rows = group_size * queries_per_pass;
    row_floats = call.head_dim_v + 2;

    const int64_t even = divided_up(pairs * passes * num_keys, kTasksWanted);
    keys_per_task = std::clamp(divided_up(even, kTile) * kTile, kLeastKeys, kMostKeys);
    const int64_t ranges_that_fit =
        std::max<int64_t>(1, kWorkspaceFloats / (pairs * rows * row_floats));
    keys_per_task = std::max(
        keys_per_task, divided_up(divided_up(num_keys, ranges_that_fit), kTile) * kTile);
    ranges = std::max<int64_t>(1, divided_up(num_keys, keys_per_task));
    passes_at_once = std::clamp<int64_t>(
        kWorkspaceFloats / (pairs * ranges * rows * row_floats), 1, passes);
  }

  int64_t group_size, num_keys, pairs, queries_per_pass, passes, rows, row_floats;
  int64_t keys_per_task, ranges, passes_at_once;
};

Stored stored(const void* start, const int64_t* strides, int64_t head, int64_t bytes) {
  return {static_cast<const char*>(start) + head * strides[2] * bytes, strides[0] * bytes,
          strides[1] * bytes, strides[3] * bytes};
}

class Work {
 public:
  Work(const Call& call, const Kernel& kernel)
      : call_(call),
        kernel_(kernel),
        plan_(call),
        pool_(shared_pool()),
        scratch_size_(scratch_floats(plan_.rows, call.head_dim, call.head_dim_v) + 16),
        partials_(new float[plan_.passes_at_once * plan_.pairs * plan_.ranges * plan_.rows *
                            plan_.row_floats]),
        unfinished_(plan_.passes_at_once * plan_.pairs),
        scratch_(new float[scratch_size_ * std::max(1, pool_->size() + 1)]),
        free_scratch_(std::max(1, pool_->size() + 1)) {}

  void run() {
    for (int64_t pass = 0; pass < plan_.passes; pass += plan_.passes_at_once) {
      const int64_t passes = std::min(plan_.passes_at_once, plan_.passes - pass);
      const int64_t lists = passes * plan_.pairs;
      for (int64_t list = 0; list < lists; list++) unfinished_[list] = int(plan_.ranges);
      for (size_t i = 0; i < free_scratch_.size(); i++) free_scratch_[i] = true;
      const auto work = [this, pass](int64_t item) { attend(pass, item); };
      const int64_t products = lists * plan_.rows * plan_.num_keys * call_.head_dim;
      if (products < kWorthAThread) {
        for (int64_t item = 0; item < lists * plan_.ranges; item++) work(item);
      } else {
        pool_->run(lists * plan_.ranges, work);
      }
    }
  }

 private:
  int64_t num_queries(int64_t pass) const {
    return std::min(plan_.queries_per_pass, call_.num_queries - pass * plan_.queries_per_pass);
  }

  // One task; the last of those that share query rows merges them.
  void attend(int64_t first_pass, int64_t item) {
    const int64_t list = item / plan_.ranges, range = item % plan_.ranges;
    const int64_t pass = first_pass + list / plan_.pairs, pair = list % plan_.pairs;
    const int64_t row = pair / call_.num_kv_heads, kv_head = pair % call_.num_kv_heads;
    const int64_t first_query = pass * plan_.queries_per_pass;
    const int64_t bytes = Dtype(call_.dtype) == Dtype::fp32 ? 4 : 2;

    Task task;
    task.query = call_.query + row * call_.query_strides[0] +
                 kv_head * plan_.group_size * call_.query_strides[1] +
                 first_query * call_.query_strides[2];
    task.query_head_stride = call_.query_strides[1];
    task.query_token_stride = call_.query_strides[2];
    task.first_query_position = call_.query_start + first_query;
    task.num_queries = int(num_queries(pass));
    task.group_size = int(plan_.group_size);
    task.head_dim = int(call_.head_dim);
    task.head_dim_v = int(call_.head_dim_v);
    task.scale = call_.softmax_scale;
    task.key = stored(call_.key, call_.key_strides, kv_head, bytes);
    task.value = stored(call_.value, call_.value_strides, kv_head, bytes);
    task.tokens = call_.tokens;
    task.positions = call_.positions;
    task.row_table = call_.row_table ? call_.row_table + row : nullptr;
    task.row_table_stride = call_.batch;
    task.row = row;
    task.key_mask = call_.key_mask ? call_.key_mask + row * call_.key_mask_stride : nullptr;
    task.begin = range * plan_.keys_per_task;
    task.end = std::min(plan_.num_keys, task.begin + plan_.keys_per_task);
    task.partial = partial(list, range);

    const size_t taken = take_scratch();
    float* scratch = scratch_.get() + taken * scratch_size_;
    task.scratch = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) & ~63ull);
    kernel_.attend(task, Dtype(call_.dtype));
    free_scratch_[taken].store(true, std::memory_order_release);
    if (unfinished_[list].fetch_sub(1) == 1) merge(list, pass, row, kv_head);
  }

  // There is one for each thread that may work, so the search ends.
  size_t take_scratch() {
    for (size_t i = 0;; i = (i + 1) % free_scratch_.size()) {
      if (free_scratch_[i].exchange(false, std::memory_order_acquire)) return i;
    }
  }

  float* partial(int64_t list, int64_t range) const {
    return partials_.get() + (list * plan_.ranges + range) * plan_.rows * plan_.row_floats;
  }

  // Weighted values and weights of all ranges, relative to the largest score of them all.
  void merge(int64_t list, int64_t pass, int64_t row, int64_t kv_head) const {
    const int64_t dim = call_.head_dim_v, tokens = num_queries(pass);
    const float factor_of_weight = weight_exponent(call_.softmax_scale);
    constexpr float kNothing = -std::numeric_limits<float>::infinity();
    for (int64_t r = 0; r < plan_.group_size * tokens; r++) {
      const int64_t head = kv_head * plan_.group_size + r / tokens;
      const int64_t query = pass * plan_.queries_per_pass + r % tokens;
      const int64_t place = (row * call_.num_heads + head) * call_.num_queries + query;
      float* out = call_.out + place * dim;
      float top = kNothing;
      for (int64_t range = 0; range < plan_.ranges; range++) {
        top = std::max(top, partial(list, range)[r * plan_.row_floats + dim + 1]);
      }
      const float base = std::max(top, -std::numeric_limits<float>::max());
      std::fill(out, out + dim, 0.0f);
      double total = 0.0;
      for (int64_t range = 0; range < plan_.ranges; range++) {
        const float* part = partial(list, range) + r * plan_.row_floats;
        const float weight = std::exp2((part[dim + 1] - base) * factor_of_weight);
        total += double(weight) * part[dim];
        for (int64_t d = 0; d < dim; d++) out[d] += weight * part[d];
      }
      const float factor = total == 0.0 ? 1.0f : float(1.0 / total);
      for (int64_t d = 0; d < dim; d++) out[d] *= factor;
      const double scale = std::abs(double(call_.softmax_scale));
      call_.lse[place] = total == 0.0 ? kNothing : float(top * scale + std::log(total));
    }
  }

  const Call& call_;
  const Kernel& kernel_;
  const Plan plan_;
  const std::shared_ptr<Pool> pool_;
  const size_t scratch_size_;
  const std::unique_ptr<float[]> partials_;
  std::vector<std::atomic<int>> unfinished_;  // ranges of each list of query rows
  const std::unique_ptr<float[]> scratch_;
  std::vector<std::atomic<bool>> free_scratch_;
};

}  // namespace

int32_t check(const Call& call) {
  const int64_t sizes[] = {call.batch,        call.num_heads, call.num_queries,
                           call.num_segments, call.rows,      call.tokens};
  for (const int64_t size : sizes) {
    if (size < 0 || size > kLargest) return SPARSEKV_BAD_ARGUMENT;
  }
  if (call.num_kv_heads < 1 || call.num_heads % call.num_kv_heads != 0 || call.head_dim < 1 ||
      call.head_dim > kLargestDim || call.head_dim_v < 1 || call.head_dim_v > kLargestDim ||
      call.num_heads > kLargestDim || call.dtype < 0 || call.dtype > 2) {
    return SPARSEKV_BAD_ARGUMENT;
  }
  // Counts whose products are formed; no memory holds more.
  if (double(call.batch) * double(call.num_heads) * double(call.num_queries) > double(kLargest) ||
      double(call.num_segments) * double(call.tokens) > double(kLargest) / 4096) {
    return SPARSEKV_BAD_ARGUMENT;
  }
  if (call.batch == 0 || call.num_heads == 0 || call.num_queries == 0) return SPARSEKV_OK;
  if (!call.query || !call.out || !call.lse) return SPARSEKV_BAD_ARGUMENT;
  if (call.num_segments == 0 || call.tokens == 0) return SPARSEKV_OK;
  if (!call.key || !call.value || !call.positions) return SPARSEKV_BAD_ARGUMENT;
  if (!call.row_table && call.rows < call.batch) return SPARSEKV_BAD_ARGUMENT;
  if (call.query_start < -kLargest || call.query_start > kLargest) return SPARSEKV_BAD_POSITION;
  for (int64_t n = 0; n < call.num_segments; n++) {
    const int64_t position = call.positions[n];
    if (position < -kLargest || position > kLargest) return SPARSEKV_BAD_POSITION;
    if (call.key_mask && (position < 0 || position + call.tokens > call.key_mask_size)) {
      return SPARSEKV_BAD_POSITION;
    }
  }
  for (int64_t i = 0; call.row_table && i < call.num_segments * call.batch; i++) {
    if (call.row_table[i] < 0 || call.row_table[i] >= call.rows) return SPARSEKV_BAD_ROW;
  }
  return SPARSEKV_OK;
}

void partial_attention(const Call& call, const Kernel& kernel) {
  if (call.batch > 0 && call.num_heads > 0 && call.num_queries > 0) Work(call, kernel).run();
}

}  // namespace sparsekv

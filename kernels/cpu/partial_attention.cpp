#include "partial_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "plan.h"
#include "pool.h"
#include "workspace.h"

namespace sparsekv {

namespace {

using Call = sparsekv_partial_attention_call;

// Multiplications that the calling thread does itself rather than wake another.
constexpr double kWorthAThread = 200000;

// Beyond every position and every distance of two.
constexpr int64_t kFar = int64_t(1) << 52;

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
        scratch_size_((scratch_floats(plan_.rows, call.head_dim, call.head_dim_v) + 15) / 16 * 16),
        partials_size_(plan_.passes_at_once * plan_.ranges() * plan_.rows * plan_.row_floats),
        workspace_(partials_size_ + scratch_size_ * std::max(1, pool_->size() + 1)),
        unfinished_(plan_.passes_at_once * plan_.pairs),
        free_scratch_(std::max(1, pool_->size() + 1)) {}

  void run() {
    for (int64_t pass = 0; pass < plan_.passes; pass += plan_.passes_at_once) {
      const int64_t passes = std::min(plan_.passes_at_once, plan_.passes - pass);
      for (int64_t list = 0; list < passes * plan_.pairs; list++) {
        unfinished_[list] = int(plan_.num_ranges(list % plan_.pairs));
      }
      for (size_t i = 0; i < free_scratch_.size(); i++) free_scratch_[i] = true;
      const auto work = [this, pass](int64_t item) { attend(pass, item); };
      const int64_t items = passes * plan_.ranges();
      if (plan_.products < kWorthAThread) {
        for (int64_t item = 0; item < items; item++) work(item);
      } else {
        pool_->run(items, work);
      }
    }
  }

 private:
  int64_t num_queries(int64_t pass) const {
    return std::min(plan_.queries_per_pass, call_.num_queries - pass * plan_.queries_per_pass);
  }

  // One task; the last of those that share query rows merges them.
  void attend(int64_t first_pass, int64_t item) {
    const int64_t pass_at_once = item / plan_.ranges(), range = item % plan_.ranges();
    const int64_t pair = plan_.pair_of(range), list = pass_at_once * plan_.pairs + pair;
    const int64_t pass = first_pass + pass_at_once;
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
    task.first_position = call_.key_start ? std::clamp(call_.key_start[row], -kFar, kFar) : -kFar;
    task.sliding_window = call_.sliding_window > 0 ? call_.sliding_window : kFar;
    task.blocks = call_.block_size > 0 ? call_.block_indices + pair * call_.max_blocks : nullptr;
    task.block_size = plan_.block_size;
    task.num_keys = plan_.num_keys;
    task.begin = plan_.begin(range);
    task.end = plan_.end(range, pair);
    task.partial = partial(pass_at_once, range);

    const size_t taken = take_scratch();
    task.scratch = workspace_.get() + partials_size_ + taken * scratch_size_;
    kernel_.attend(task, Dtype(call_.dtype));
    if (unfinished_[list].fetch_sub(1) == 1) merge(pass_at_once, pass, pair, task.scratch);
    free_scratch_[taken].store(true, std::memory_order_release);
  }

  // There is one for each thread that may work, so the search ends.
  size_t take_scratch() {
    for (size_t i = 0;; i = (i + 1) % free_scratch_.size()) {
      if (free_scratch_[i].exchange(false, std::memory_order_acquire)) return i;
    }
  }

  float* partial(int64_t pass_at_once, int64_t range) const {
    return workspace_.get() +
           (pass_at_once * plan_.ranges() + range) * plan_.rows * plan_.row_floats;
  }

  // Weighted values and weights of all ranges, relative to the largest score of them all. Partial
  // results are read as they lie: what others wrote is far away.
  void merge(int64_t pass_at_once, int64_t pass, int64_t pair, float* scratch) const {
    const int64_t row = pair / call_.num_kv_heads, kv_head = pair % call_.num_kv_heads;
    const int64_t dim = call_.head_dim_v, tokens = num_queries(pass);
    const int64_t rows = plan_.group_size * tokens, size = plan_.rows * plan_.row_floats;
    const float* const first = partial(pass_at_once, plan_.first_range(pair));
    const float* const last = first + plan_.num_ranges(pair) * size;
    const float factor_of_weight = weight_exponent(call_.softmax_scale);
    const auto place = [&](int64_t r) {
      const int64_t head = kv_head * plan_.group_size + r / tokens;
      const int64_t query = pass * plan_.queries_per_pass + r % tokens;
      return (row * call_.num_heads + head) * call_.num_queries + query;
    };

    constexpr float kNothing = -std::numeric_limits<float>::infinity();
    double* const totals = reinterpret_cast<double*>(scratch);
    float* const tops = scratch + 2 * plan_.rows;
    for (int64_t r = 0; r < rows; r++) {
      totals[r] = 0.0;
      tops[r] = kNothing;
      std::fill_n(call_.out + place(r) * dim, dim, 0.0f);
    }
    for (const float* part = first; part < last; part += size) {
      for (int64_t r = 0; r < rows; r++) {
        tops[r] = std::max(tops[r], part[r * plan_.row_floats + dim + 1]);
      }
    }
    for (const float* partial = first; partial < last; partial += size) {
      for (int64_t r = 0; r < rows; r++) {
        const float* const part = partial + r * plan_.row_floats;
        const float base = std::max(tops[r], -std::numeric_limits<float>::max());
        const float weight = std::exp2((part[dim + 1] - base) * factor_of_weight);
        float* const out = call_.out + place(r) * dim;
        totals[r] += double(weight) * part[dim];
        for (int64_t d = 0; d < dim; d++) out[d] += weight * part[d];
      }
    }
    const double scale = std::abs(double(call_.softmax_scale));
    for (int64_t r = 0; r < rows; r++) {
      float* const out = call_.out + place(r) * dim;
      const float factor = totals[r] == 0.0 ? 1.0f : float(1.0 / totals[r]);
      for (int64_t d = 0; d < dim; d++) out[d] *= factor;
      call_.lse[place(r)] =
          totals[r] == 0.0 ? kNothing : float(tops[r] * scale + std::log(totals[r]));
    }
  }

  const Call& call_;
  const Kernel& kernel_;
  const Plan plan_;
  const std::shared_ptr<Pool> pool_;
  const size_t scratch_size_;
  const size_t partials_size_;
  const Workspace workspace_;  // partial results, then the scratch of each thread
  std::vector<std::atomic<int>> unfinished_;  // ranges of each list of query rows
  std::vector<std::atomic<bool>> free_scratch_;
};

}  // namespace

void partial_attention(const Call& call, const Kernel& kernel) {
  if (call.batch > 0 && call.num_heads > 0 && call.num_queries > 0) Work(call, kernel).run();
}

}  // namespace sparsekv

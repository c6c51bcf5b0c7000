#include "partial_attention.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "merge.h"
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
        plan_(call, kernel.most_keys),
        pool_(shared_pool()),
        scratch_size_((scratch_floats(plan_.rows, call.head_dim, call.head_dim_v) + 15) / 16 * 16),
        partials_size_(plan_.passes_at_once * plan_.ranges() * plan_.rows * plan_.row_floats),
        workspace_(partials_size_ + scratch_size_ * std::max(1, pool_->size() + 1)),
        merge_(call, plan_, workspace_.get()),
        free_scratch_(std::max(1, pool_->size() + 1)) {}

  void run() {
    for (int64_t pass = 0; pass < plan_.passes; pass += plan_.passes_at_once) {
      const int64_t passes = std::min(plan_.passes_at_once, plan_.passes - pass);
      merge_.start(pass, passes);
      for (size_t i = 0; i < free_scratch_.size(); i++) free_scratch_[i] = true;
      const int64_t items = passes * plan_.ranges();
      if (plan_.products < kWorthAThread) {
        for (int64_t item = 0; item < items; item++) attend(pass, item);
        continue;
      }
      const int64_t helps = merge_.num_helps(pool_->size());
      pool_->run(items + helps, [this, pass, items, helps](int64_t item) {
        item < items ? attend(pass, item) : merge_.help(item - items, helps);
      });
    }
  }

 private:
  // One task.
  void attend(int64_t first_pass, int64_t item) {
    const int64_t pass_at_once = item / plan_.ranges(), range = item % plan_.ranges();
    const int64_t pair = plan_.pair_of(range);
    const int64_t row = pair / call_.num_kv_heads, kv_head = pair % call_.num_kv_heads;
    const int64_t first_query = (first_pass + pass_at_once) * plan_.queries_per_pass;
    const int64_t bytes = Dtype(call_.dtype) == Dtype::fp32 ? 4 : 2;

    Task task;
    task.query = call_.query + row * call_.query_strides[0] +
                 kv_head * plan_.group_size * call_.query_strides[1] +
                 first_query * call_.query_strides[2];
    task.query_head_stride = call_.query_strides[1];
    task.query_token_stride = call_.query_strides[2];
    task.first_query_position = call_.query_start + first_query;
    task.num_queries = int(std::min(plan_.queries_per_pass, call_.num_queries - first_query));
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
    free_scratch_[taken].store(true, std::memory_order_release);
    merge_.finish_range(pass_at_once * plan_.pairs + pair);
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

  const Call& call_;
  const Kernel& kernel_;
  const Plan plan_;
  const std::shared_ptr<Pool> pool_;
  const size_t scratch_size_;
  const size_t partials_size_;
  const Workspace workspace_;  // partial results, then the scratch of each thread
  Merge merge_;
  std::vector<std::atomic<bool>> free_scratch_;
};

}  // namespace

void partial_attention(const Call& call, const Kernel& kernel) {
  if (call.batch > 0 && call.num_heads > 0 && call.num_queries > 0) Work(call, kernel).run();
}

}  // namespace sparsekv

#include "partial_attention.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
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

// One call. Passes are computed a number at a time, for which there is room.
class Work {
 public:
  Work(const Call& call, const Kernel& kernel)
      : call_(call), kernel_(kernel), plan_(call, kernel.most_keys), merge_(call, plan_) {}

  // Floats: of the partial results of the passes at a time, and of what a thread needs for a task.
  size_t partials_size() const {
    return plan_.passes_at_once * plan_.ranges() * plan_.rows * plan_.row_floats;
  }
  size_t scratch_size() const {
    return scratch_floats(plan_.rows, call_.head_dim, call_.head_dim_v);
  }
  double products() const { return plan_.products; }

  // The next passes; false: there are none. No thread is at work.
  bool start(float* partials, int threads) {
    first_pass_ += passes_;
    passes_ = std::min(plan_.passes_at_once, plan_.passes - first_pass_);
    tasks_ = passes_ * plan_.ranges();
    partials_ = partials;
    merge_.start(first_pass_, passes_, partials);
    helps_ = merge_.num_helps(threads);
    return passes_ > 0;
  }

  int64_t tasks() const { return tasks_; }
  int64_t helps() const { return helps_; }

  void attend(int64_t item, float* scratch) {
    const int64_t pass_at_once = item / plan_.ranges();
    kernel_.attend(task(pass_at_once, item % plan_.ranges(), scratch), Dtype(call_.dtype));
  }
  // After `attend`, which has let go of its scratch.
  void finish(int64_t item) {
    const int64_t pair = plan_.pair_of(item % plan_.ranges());
    merge_.finish_range(item / plan_.ranges() * plan_.pairs + pair);
  }
  void help(int64_t n) { merge_.help(n, helps_); }

 private:
  Task task(int64_t pass_at_once, int64_t range, float* scratch) const {
    const int64_t pair = plan_.pair_of(range);
    const int64_t row = pair / call_.num_kv_heads, kv_head = pair % call_.num_kv_heads;
    const int64_t first_query = (first_pass_ + pass_at_once) * plan_.queries_per_pass;
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
    task.partial =
        partials_ + (pass_at_once * plan_.ranges() + range) * plan_.rows * plan_.row_floats;
    task.scratch = scratch;
    return task;
  }

  const Call& call_;
  const Kernel& kernel_;
  const Plan plan_;
  Merge merge_;
  float* partials_ = nullptr;
  int64_t first_pass_ = 0, passes_ = 0, tasks_ = 0, helps_ = 0;
};

// Calls that are computed together, as one: threads that find nothing left of one go on with the
// next, and what each call would wait for at its end is waited for once.
class Works {
 public:
  explicit Works(const std::vector<KernelCall>& calls) : pool_(shared_pool()) {
    for (const auto& [call, kernel] : calls) {
      if (call.batch > 0 && call.num_heads > 0 && call.num_queries > 0) {
        works_.emplace_back(call, kernel);
      }
    }
    for (const Work& work : works_) {
      scratch_size_ = std::max(scratch_size_, in_lines(work.scratch_size()));
      partials_size_ += in_lines(work.partials_size());
      products_ += work.products();
    }
    free_scratch_ = std::vector<std::atomic<bool>>(std::max(1, pool_->size() + 1));
    workspace_.emplace(partials_size_ + scratch_size_ * free_scratch_.size());
    for (std::atomic<bool>& is_free : free_scratch_) is_free = true;
  }

  void run() {
    while (start()) {
      int64_t tasks = 0, helps = 0;
      for (const Work& work : works_) {
        tasks += work.tasks();
        helps += work.helps();
      }
      if (products_ < kWorthAThread) {
        for (int64_t item = 0; item < tasks; item++) attend(item);
        continue;
      }
      pool_->run(tasks + helps, [this, tasks](int64_t item) {
        item < tasks ? attend(item) : help(item - tasks);
      });
    }
  }

 private:
  static size_t in_lines(size_t floats) { return (floats + 15) / 16 * 16; }

  // The next passes of all calls; false: there are none.
  bool start() {
    bool is_any = false;
    float* partials = workspace_->get();
    for (Work& work : works_) {
      is_any |= work.start(partials, pool_->size());
      partials += in_lines(work.partials_size());
    }
    return is_any;
  }

  void attend(int64_t item) {
    Work& work = of_item(item, &Work::tasks);
    const size_t taken = take_scratch();
    work.attend(item, workspace_->get() + partials_size_ + taken * scratch_size_);
    free_scratch_[taken].store(true, std::memory_order_release);
    work.finish(item);
  }

  void help(int64_t item) {
    Work& work = of_item(item, &Work::helps);
    work.help(item);
  }

  // Whose item it is; the item becomes its number there.
  Work& of_item(int64_t& item, int64_t (Work::*count)() const) {
    auto work = works_.begin();
    for (; item >= ((*work).*count)(); ++work) item -= ((*work).*count)();
    return *work;
  }

  // There is one for each thread that may work, so the search ends.
  size_t take_scratch() {
    for (size_t i = 0;; i = (i + 1) % free_scratch_.size()) {
      if (free_scratch_[i].exchange(false, std::memory_order_acquire)) return i;
    }
  }

  const std::shared_ptr<Pool> pool_;
  std::deque<Work> works_;
  size_t scratch_size_ = 0, partials_size_ = 0;
  double products_ = 0;
  std::vector<std::atomic<bool>> free_scratch_;
  std::optional<Workspace> workspace_;  // partial results of each call, the scratch of each thread
};

}  // namespace

void partial_attention(const std::vector<KernelCall>& calls) { Works(calls).run(); }

}  // namespace sparsekv

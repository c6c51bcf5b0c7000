// Partial results of ranges of keys become results.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "api.h"
#include "attention_task.h"
#include "patience.h"
#include "plan.h"

namespace sparsekv {

// A list is the query rows of a pass and a pair, each with a partial result of every range; they are
// merged when the last of these is there, some rows at a time. Who wrote it does that, while the
// others go on with other ranges; those who find no range left help, for the end of a call would
// else be the work of one thread.
class Merge {
 public:
  Merge(const sparsekv_partial_attention_call& call, const Plan& plan)
      : call_(call),
        plan_(plan),
        rows_of_piece_(rows_of_piece(plan)),
        pieces_((plan.rows + rows_of_piece_ - 1) / rows_of_piece_),
        unfinished_(plan.passes_at_once * plan.pairs),
        is_taken_(unfinished_.size() * pieces_) {}

  // Lists of so many passes; no thread is at work.
  // partials: (passes at once, ranges, rows, row_floats), as attention writes them.
  void start(int64_t first_pass, int64_t passes, const float* partials) {
    first_pass_ = first_pass;
    partials_ = partials;
    lists_ = passes * plan_.pairs;
    for (int64_t list = 0; list < lists_; list++) {
      unfinished_[list] = int(plan_.num_ranges(list % plan_.pairs));
    }
    for (int64_t i = 0; i < lists_ * pieces_; i++) is_taken_[i] = false;
  }

  // Called once for every partial result of a list that was written.
  void finish_range(int64_t list) {
    if (unfinished_[list].fetch_sub(1) > 1) return;
    for (int64_t piece = 0; piece < pieces_; piece++) take(list * pieces_ + piece);
  }

  // What those may be given who find no range left, when there are so many of them: all that is not
  // finished then are the last lists, but for one that a thread without a processor is late with.
  int64_t num_helps(int threads) const { return std::min<int64_t>(lists_, threads) * pieces_; }

  // Number n of so many. Waits for ranges that other threads are at.
  void help(int64_t n, int64_t helps) {
    const int64_t item = lists_ * pieces_ - helps + n;
    if (is_taken_[item]) return;
    for (int i = 1; unfinished_[item / pieces_] > 0; i++) pause_or_yield(i);
    take(item);
  }

 private:
  static constexpr int64_t kMostRows = 16;
  static constexpr int64_t kFloats = 16384;  // of partial results: some microseconds

  static int64_t rows_of_piece(const Plan& plan) {
    const int64_t ranges = std::max<int64_t>(1, plan.ranges() / std::max<int64_t>(1, plan.pairs));
    return std::clamp<int64_t>(kFloats / (ranges * plan.row_floats), 1, kMostRows);
  }

  // Unless another thread has.
  void take(int64_t item) {
    if (is_taken_[item].exchange(true)) return;
    const int64_t list = item / pieces_, pass = first_pass_ + list / plan_.pairs;
    const int64_t first_query = pass * plan_.queries_per_pass;
    const int64_t tokens = std::min(plan_.queries_per_pass, call_.num_queries - first_query);
    const int64_t first = item % pieces_ * rows_of_piece_;
    const int64_t last = std::min(first + rows_of_piece_, plan_.group_size * tokens);
    if (first < last) merge(list, first_query, tokens, first, last);
  }

  // Weighted values and weights of all ranges, relative to the largest score of them all. Partial
  // results are read as they lie: what others wrote is far away.
  void merge(int64_t list, int64_t first_query, int64_t tokens, int64_t begin, int64_t end) const {
    const int64_t pair = list % plan_.pairs;
    const int64_t row = pair / call_.num_kv_heads, kv_head = pair % call_.num_kv_heads;
    const int64_t dim = call_.head_dim_v, size = plan_.rows * plan_.row_floats;
    const int64_t from = list / plan_.pairs * plan_.ranges() + plan_.first_range(pair);
    const float* const first = partials_ + from * size;
    const float* const last = first + plan_.num_ranges(pair) * size;
    const float factor_of_weight = weight_exponent(call_.softmax_scale);
    const auto place = [&](int64_t r) {
      const int64_t head = kv_head * plan_.group_size + r / tokens;
      return (row * call_.num_heads + head) * call_.num_queries + first_query + r % tokens;
    };

    constexpr float kNothing = -std::numeric_limits<float>::infinity();
    double totals[kMostRows];
    float tops[kMostRows];
    for (int64_t r = begin; r < end; r++) {
      totals[r - begin] = 0.0;
      tops[r - begin] = kNothing;
      std::fill_n(call_.out + place(r) * dim, dim, 0.0f);
    }
    for (const float* partial = first; partial < last; partial += size) {
      for (int64_t r = begin; r < end; r++) {
        tops[r - begin] = std::max(tops[r - begin], partial[r * plan_.row_floats + dim + 1]);
      }
    }
    for (const float* partial = first; partial < last; partial += size) {
      for (int64_t r = begin; r < end; r++) {
        const float* const part = partial + r * plan_.row_floats;
        const float base = std::max(tops[r - begin], -std::numeric_limits<float>::max());
        const float weight = std::exp2((part[dim + 1] - base) * factor_of_weight);
        float* const out = call_.out + place(r) * dim;
        totals[r - begin] += double(weight) * part[dim];
        for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(part + size + d);
        for (int64_t d = 0; d < dim; d++) out[d] += weight * part[d];
      }
    }
    const double scale = std::abs(double(call_.softmax_scale));
    for (int64_t r = begin; r < end; r++) {
      float* const out = call_.out + place(r) * dim;
      const double total = totals[r - begin];
      const float factor = total == 0.0 ? 1.0f : float(1.0 / total);
      for (int64_t d = 0; d < dim; d++) out[d] *= factor;
      call_.lse[place(r)] =
          total == 0.0 ? kNothing : float(tops[r - begin] * scale + std::log(total));
    }
  }

  const sparsekv_partial_attention_call& call_;
  const Plan& plan_;
  const float* partials_ = nullptr;
  const int64_t rows_of_piece_, pieces_;  // of a list
  int64_t first_pass_ = 0, lists_ = 0;
  std::vector<std::atomic<int>> unfinished_;  // ranges of each list
  std::vector<std::atomic<bool>> is_taken_;   // of each piece of each list
};

}  // namespace sparsekv

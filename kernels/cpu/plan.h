// How a call of partial attention is cut into tasks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "api.h"
#include "attention_task.h"

namespace sparsekv {

// A pair is a row and a kv head; a pass, a number of query tokens that share each key that is read;
// a range, some of a pair's keys: all of them, or those of its list of blocks. One pass of one pair
// over one range is a task. All depends on shapes and lists alone: results are the same with any
// number of threads.
class Plan {
 public:
  explicit Plan(const sparsekv_partial_attention_call& call) {
    group_size = call.num_heads / call.num_kv_heads;
    num_keys = call.num_segments * call.tokens;
    block_size = std::min(call.block_size, std::max<int64_t>(1, num_keys));
    pairs = call.batch * call.num_kv_heads;
    const int64_t together = std::max(kQueriesPerPass, kRowsPerPass / group_size);
    queries_per_pass = std::min(call.num_queries, together);
    passes = divided_up(call.num_queries, queries_per_pass);
    rows = group_size * queries_per_pass;
    row_floats = call.head_dim_v + 2;

    lengths_.assign(pairs, num_keys);
    for (int64_t pair = 0; call.block_size > 0 && pair < pairs; pair++) {
      lengths_[pair] = call.num_blocks[pair] * block_size;
    }
    int64_t total = 0, longest = 1;
    for (const int64_t length : lengths_) {
      total += length;
      longest = std::max(longest, length);
    }

    const int64_t products_per_key = rows * (call.head_dim + call.head_dim_v);
    const int64_t least = std::clamp<int64_t>(kLeastProducts / products_per_key, kTile, kLeastKeys);
    const int64_t even = divided_up(passes * total, kTasksWanted);
    const int64_t partials_that_fit = kWorkspaceFloats / (rows * row_floats);
    // A pair's last range may be a short one, hence one more for each.
    const int64_t fitting =
        partials_that_fit > pairs ? divided_up(total, partials_that_fit - pairs) : longest;
    keys_per_task = std::max(std::clamp(even, least, kMostKeys), fitting);
    keys_per_task = divided_up(keys_per_task, kTile) * kTile;

    first_range_.assign(pairs + 1, 0);
    for (int64_t pair = 0; pair < pairs; pair++) {
      const int64_t ranges = std::max<int64_t>(1, divided_up(lengths_[pair], keys_per_task));
      first_range_[pair + 1] = first_range_[pair] + ranges;
    }
    passes_at_once = std::clamp<int64_t>(partials_that_fit / ranges(), 1, passes);
    products = pairs > 0 ? double(passes) * double(total) * double(products_per_key) : 0;
  }

  int64_t group_size, num_keys, block_size, pairs, queries_per_pass, passes, rows, row_floats;
  int64_t keys_per_task, passes_at_once;
  double products;  // multiplications of the whole call

  // Of all pairs; those of a pair lie end to end.
  int64_t ranges() const { return first_range_.back(); }
  int64_t first_range(int64_t pair) const { return first_range_[pair]; }
  int64_t num_ranges(int64_t pair) const { return first_range_[pair + 1] - first_range_[pair]; }
  int64_t length(int64_t pair) const { return lengths_[pair]; }
  int64_t pair_of(int64_t range) const {
    return std::upper_bound(first_range_.begin(), first_range_.end(), range) -
           first_range_.begin() - 1;
  }

 private:
  static constexpr int64_t kRowsPerPass = 64;  // if a kv head has that many query rows
  static constexpr int64_t kQueriesPerPass = 8;

  // Keys of one task: enough to be worth its start and its partial result, few enough that all
  // threads end together and that a sum of single precision stays exact to its last digits.
  static constexpr int64_t kLeastProducts = int64_t(16) << 20;
  static constexpr int64_t kLeastKeys = 512;
  static constexpr int64_t kMostKeys = 8192;
  static constexpr int64_t kTasksWanted = 512;

  // Partial results that may be alive at a time.
  static constexpr int64_t kWorkspaceFloats = int64_t(16) << 20;

  static int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

  std::vector<int64_t> lengths_;      // keys of each pair
  std::vector<int64_t> first_range_;  // of each pair, and the number of all
};

}  // namespace sparsekv

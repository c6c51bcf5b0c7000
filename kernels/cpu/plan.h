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
  // most_keys: of a range, unless the partial results would need too much room.
  Plan(const sparsekv_partial_attention_call& call, int64_t most_keys) {
    group_size = call.num_heads / call.num_kv_heads;
    num_keys = call.num_segments * call.tokens;
    block_size = std::min(call.block_size, std::max<int64_t>(1, num_keys));
    pairs = call.batch * call.num_kv_heads;
    const int64_t together = std::max(kQueriesPerPass, kRowsPerPass / group_size);
    queries_per_pass = std::min(call.num_queries, together);
    passes = divided_up(call.num_queries, queries_per_pass);
    rows = group_size * queries_per_pass;
    row_floats = partial_row_floats(call.head_dim_v);

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
    const int64_t partials_that_fit = std::max(pairs, kWorkspaceFloats / (rows * row_floats));
    int64_t least = std::clamp<int64_t>(kLeastProducts / products_per_key, kTile, kLeastKeys);
    for (int64_t most = most_keys;; least *= 2, most *= 2) {
      cut(total, least, most);
      if (ranges() <= partials_that_fit || least >= longest) break;
    }
    passes_at_once = std::clamp<int64_t>(partials_that_fit / ranges(), 1, passes);
    products = pairs > 0 ? double(passes) * double(total) * double(products_per_key) : 0;
  }

  int64_t group_size, num_keys, block_size, pairs, queries_per_pass, passes, rows, row_floats;
  int64_t passes_at_once;
  double products;  // multiplications of the whole call

  // Of all pairs; those of a pair lie end to end.
  int64_t ranges() const { return int64_t(begins_.size()); }
  int64_t first_range(int64_t pair) const { return first_range_[pair]; }
  int64_t num_ranges(int64_t pair) const { return first_range_[pair + 1] - first_range_[pair]; }
  // Of its pair's keys, or of those of its blocks: the first, and the one after the last.
  int64_t begin(int64_t range) const { return begins_[range]; }
  int64_t end(int64_t range, int64_t pair) const {
    return range + 1 < first_range_[pair + 1] ? begins_[range + 1] : lengths_[pair];
  }
  int64_t pair_of(int64_t range) const {
    return std::upper_bound(first_range_.begin(), first_range_.end(), range) -
           first_range_.begin() - 1;
  }

 private:
  static constexpr int64_t kRowsPerPass = 64;  // if a kv head has that many query rows
  static constexpr int64_t kQueriesPerPass = 8;

  // Keys of one task: enough to be worth its start and its partial result. Tasks become shorter
  // towards the end, each a part of what is left then, so that few are needed for all threads to end
  // together.
  static constexpr int64_t kLeastProducts = int64_t(160) << 20;
  static constexpr int64_t kLeastKeys = 512;
  static constexpr int64_t kTasksAtOnce = 32;

  // Partial results that may be alive at a time.
  static constexpr int64_t kWorkspaceFloats = int64_t(16) << 20;

  static int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

  // Into ranges of at least and at most so many keys, but for the last of a pair.
  void cut(int64_t total, int64_t least, int64_t most) {
    first_range_.clear();
    begins_.clear();
    int64_t left = total;
    for (const int64_t length : lengths_) {
      first_range_.push_back(ranges());
      int64_t begin = 0;
      do {
        const int64_t share = divided_up(passes * left, kTasksAtOnce);
        const int64_t keys = std::clamp(share, least, most);
        const int64_t end = std::min(length, begin + divided_up(keys, kTile) * kTile);
        begins_.push_back(begin);
        left -= end - begin;
        begin = end;
      } while (begin < length);
    }
    first_range_.push_back(ranges());
  }

  std::vector<int64_t> lengths_;      // keys of each pair
  std::vector<int64_t> first_range_;  // of each pair, and the number of all
  std::vector<int64_t> begins_;       // of each range, among the keys of its pair
};

}  // namespace sparsekv

// How calls are cut: into tasks for many threads, of ranges that are worth one each.
#include "plan.h"

#include "checks.h"

using sparsekv::kTile;
using sparsekv::Plan;

namespace {

constexpr int64_t kAnyNumberOfKeys = int64_t(1) << 40;
constexpr int64_t kShortestWorthATask = 512;
constexpr int kThreads = 32;

sparsekv_partial_attention_call of(int64_t num_heads, int64_t head_dim, int64_t head_dim_v,
                                   int64_t num_keys) {
  sparsekv_partial_attention_call call = {};
  call.batch = call.rows = call.num_kv_heads = call.num_queries = call.num_segments = 1;
  call.num_heads = num_heads;
  call.head_dim = head_dim;
  call.head_dim_v = head_dim_v;
  call.tokens = num_keys;
  return call;
}

sparsekv_partial_attention_call gqa(int64_t num_keys) { return of(8, 128, 128, num_keys); }
sparsekv_partial_attention_call mla(int64_t num_keys) { return of(16, 576, 512, num_keys); }
sparsekv_partial_attention_call v4(int64_t num_keys) { return of(64, 512, 512, num_keys); }

Plan plan_of(const sparsekv_partial_attention_call& call) { return Plan(call, kAnyNumberOfKeys); }

int64_t passes(int64_t group_size, int64_t num_queries) {
  auto call = of(group_size, 128, 128, 4096);
  call.num_queries = num_queries;
  return plan_of(call).passes;
}

void query_tokens_share_the_keys_they_read() {
  CHECK(passes(1, 8) == 1);
  CHECK(passes(1, 64) == 1 && passes(1, 65) == 2);
  CHECK(passes(16, 8) == 1 && passes(16, 9) == 2);
}

// Each key of a pair is in one range.
void ranges_lie_end_to_end() {
  auto call = gqa(100000);
  call.batch = 3;
  const Plan plan = plan_of(call);
  for (int64_t pair = 0; pair < 3; pair++) {
    int64_t at = 0;
    for (int64_t n = 0; n < plan.num_ranges(pair); n++) {
      const int64_t range = plan.first_range(pair) + n;
      CHECK(plan.pair_of(range) == pair);
      CHECK(plan.begin(range) == at && plan.end(range, pair) > at);
      at = plan.end(range, pair);
    }
    CHECK(at == 100000);
  }
}

// No thread has more to do than its part because of one range that is too long to share.
void a_long_row_is_enough_for_many_threads() {
  const int64_t num_keys = int64_t(1) << 20;
  for (const auto& call : {gqa(num_keys), mla(num_keys), v4(num_keys)}) {
    const Plan plan = plan_of(call);
    int64_t largest = 0;
    for (int64_t range = 0; range < plan.ranges(); range++) {
      largest = std::max(largest, plan.end(range, 0) - plan.begin(range));
    }
    for (int threads = 1; threads <= kThreads; threads++) {
      CHECK(plan.ranges() >= threads);
      CHECK(largest <= num_keys / threads + kTile);
    }
  }
}

// Where a range costs much besides its keys, because its partial result is large.
void a_short_row_is_cut_as_often_as_is_worth_it() {
  for (const auto& call : {mla(4096), v4(4096)}) {
    const Plan plan = plan_of(call);
    CHECK(plan.ranges() == 4096 / kShortestWorthATask);
  }
}

}  // namespace

void test_plan() {
  query_tokens_share_the_keys_they_read();
  ranges_lie_end_to_end();
  a_long_row_is_enough_for_many_threads();
  a_short_row_is_cut_as_often_as_is_worth_it();
}

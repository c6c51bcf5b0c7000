// Loops of several callers on one pool, whose threads are replaced meanwhile.
#include <atomic>
#include <vector>

#include "checks.h"
#include "pool.h"

using sparsekv::Pool;

namespace {

// Plain counters: the pool itself must order their use.
void run_loop(Pool& pool, int64_t count) {
  std::vector<int> times(count, 0);
  pool.run(count, [&](int64_t i) { times[i]++; });
  for (const int n : times) CHECK(n == 1);
}

void each_item_runs_once(int threads) {
  Pool pool(threads);
  CHECK(pool.size() == threads);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; caller++) {
    callers.emplace_back([&pool, caller] {
      for (int n = 0; n < 60; n++) run_loop(pool, n % 7 + 20 * caller);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void threads_may_be_replaced_meanwhile() {
  Pool pool(2);
  std::atomic<bool> is_over{false};
  std::thread caller([&] {
    while (!is_over) run_loop(pool, 40);
  });
  for (const int threads : {1, 4, 3, 1, 2}) {
    pool.resize(threads);
    CHECK(pool.size() == threads);
  }
  is_over = true;
  caller.join();
}

// They find nothing to do as they are woken, and sleep again at once.
void many_idle_threads_may_be_replaced() {
  Pool pool(24);
  for (const int threads : {16, 48, 15, 16}) {
    pool.resize(threads);
    CHECK(pool.size() == threads);
  }
}

}  // namespace

void test_loops() {
  for (const int threads : {1, 2, 4}) each_item_runs_once(threads);
  threads_may_be_replaced_meanwhile();
  for (int i = 0; i < 20; i++) many_idle_threads_may_be_replaced();
}

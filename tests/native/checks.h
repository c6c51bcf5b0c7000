// What the native tests share: a check that stays in optimised builds, and words of flags.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "api.h"

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);   \
      std::abort();                                                                  \
    }                                                                                \
  } while (0)

// The words of one job.
struct Words {
  uint32_t wait = 0;
  uint32_t done = 0;
  int32_t status = -1;
  int64_t ran[2] = {-1, -1};

  sparsekv_signal signal(uint32_t wait_value = 1, uint32_t done_value = 1) {
    return {&wait, &done, &status, ran, nullptr, 0, wait_value, done_value};
  }
  void set(uint32_t value = 1) { sparsekv_store_flag(&wait, value); }
  // Returns the status, which precedes the flag, as does when the job ran.
  int32_t wait_for_done(uint32_t value = 1) const {
    while (sparsekv_load_flag(&done) != value) std::this_thread::yield();
    const int32_t ended = __atomic_load_n(&status, __ATOMIC_RELAXED);
    if (ended == SPARSEKV_JOB_CANCELLED) CHECK(ran[0] == 0 && ran[1] == 0);
    if (ended != SPARSEKV_JOB_CANCELLED) CHECK(0 < ran[0] && ran[0] <= ran[1]);
    return ended;
  }
};

void test_plan();
void test_cores();
void test_loops();
void test_jobs();
void test_attention();
void test_gather();

#include "patience.h"

#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace sparsekv {

namespace {

#if defined(__x86_64__)

constexpr uint64_t kTicks = 400;  // of the time stamp counter: 0.1 to 0.2 us

bool has_tpause() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & (1u << 5)) != 0;  // WAITPKG
}

// The core rests until the counter gets there. In the lighter of both states, 1: it wakes faster.
void rest_until(uint64_t counter) {
  asm volatile("tpause %0" ::"r"(1u), "a"(uint32_t(counter)), "d"(uint32_t(counter >> 32)) : "cc");
}

#endif

}  // namespace

void pause_briefly() {
#if defined(__x86_64__)
  static const bool is_restful = has_tpause();
  if (is_restful) {
    rest_until(__builtin_ia32_rdtsc() + kTicks);
  } else {
    for (int i = 0; i < 4; i++) __builtin_ia32_pause();
  }
#elif defined(__aarch64__)
  asm volatile("isb");
#else
  std::this_thread::yield();
#endif
}

void pause_or_yield(int i) { i % 64 == 0 ? std::this_thread::yield() : pause_briefly(); }

void Patience::pause() {
  if (!is_awake_) {
    std::this_thread::sleep_for(kNap);
    return;
  }
  pause_briefly();
  if (++pauses_ % kPausesPerLook == 0) {
    is_awake_ = std::chrono::steady_clock::now() - start_ < kAwake;
  }
}

}  // namespace sparsekv

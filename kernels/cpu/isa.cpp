#include "isa.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sparsekv {

namespace {

constexpr int64_t kLeastRowsOfMatrices = 16;
constexpr int64_t kLeastRowsOfGroups = 4;

#if defined(__x86_64__)

// They read the processor and what the system saves of it; nothing of the sets themselves runs.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool processor_has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  constexpr unsigned kAvx512Bf16 = 1u << 5;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kAvx512Bf16) != 0;
}

// Linux saves the matrices only of processes that ask for it; once is enough for all threads, and
// for children. It refuses where a thread's signal stack is too small to hold them.
bool system_grants_amx() {
  unsigned low, high;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3u << 17;
  if ((low & kTileState) != kTileState) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_amx() {
  static const bool has = has_avx512() && processor_has_amx() && system_grants_amx();
  return has;
}

#else

bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_amx() { return false; }

#endif

}  // namespace

const Isa* find_isa(const char* name) {
  static const Isa amx = {"amx", avx512_kernel, amx_kernel, amx_group_kernel};
  static const Isa avx512 = {"avx512", avx512_kernel, nullptr, nullptr};
  static const Isa avx2 = {"avx2", avx2_kernel, nullptr, nullptr};
  static const Isa portable = {"portable", portable_kernel, nullptr, nullptr};
  static const Isa emulated = {"amx_emulated", portable_kernel, amx_emulated_kernel,
                               amx_emulated_group_kernel};
  const Isa* const candidates[] = {amx_kernel && has_amx() ? &amx : nullptr,
                                   avx512_kernel && has_avx512() ? &avx512 : nullptr,
                                   avx2_kernel && has_avx2() ? &avx2 : nullptr, &portable,
                                   &emulated};  // the last one only by its name
  for (const Isa* isa : candidates) {
    if (isa && (!name || std::strcmp(isa->name, name) == 0)) return isa;
  }
  return nullptr;
}

const Kernel& kernel_for(const Isa& isa, int64_t group_size, int64_t num_queries, Dtype dtype) {
  if (!isa.matrices || dtype != Dtype::bf16 || group_size < 1) return *isa.vectors;
  const auto has_rows = [&](int64_t least) { return num_queries > (least - 1) / group_size; };
  if (has_rows(kLeastRowsOfMatrices)) return *isa.matrices;
  return has_rows(kLeastRowsOfGroups) ? *isa.groups : *isa.vectors;
}

}  // namespace sparsekv

// Copies in AVX2: two stores a line.
//
// How the code is chosen, and what this file must not contain: see attention_avx512.cpp.
#include "copy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif

#define SPARSEKV_VECTORS avx2

namespace sparsekv {
namespace SPARSEKV_VECTORS {

static inline __attribute__((always_inline)) void copy_line(char* to, const char* from) {
  const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + 1);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), first);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, second);
}

}  // namespace SPARSEKV_VECTORS
}  // namespace sparsekv

#include "copy_stream.h"

static const sparsekv::CopyKernel kernel = {"avx2", sparsekv::avx2::copy};

#if defined(__clang__)
#pragma clang attribute pop
#endif

const sparsekv::CopyKernel* const sparsekv::avx2_copy_kernel = &kernel;
#else
const sparsekv::CopyKernel* const sparsekv::avx2_copy_kernel = nullptr;
#endif

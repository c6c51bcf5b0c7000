// Partial attention in AVX2 with FMA and F16C: 8 floats a vector, 16 registers.
//
// How the code is chosen, and what this file must not contain: see attention_avx512.cpp.
#include "attention_task.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define SPARSEKV_VECTORS avx2

namespace sparsekv {
namespace SPARSEKV_VECTORS {

using Vector = __m256;
constexpr int kLanes = 8;
constexpr int kRowBlock = 4;      // query rows at a time, at most
constexpr int kAccumulators = 8;  // scores at a time

#define SPARSEKV_INLINE static inline __attribute__((always_inline))

SPARSEKV_INLINE Vector zero() { return _mm256_setzero_ps(); }
SPARSEKV_INLINE Vector broadcast(float x) { return _mm256_set1_ps(x); }
SPARSEKV_INLINE Vector load(const float* p) { return _mm256_loadu_ps(p); }
SPARSEKV_INLINE void store(float* p, Vector x) { _mm256_storeu_ps(p, x); }
// Keeps x in a register, where compilers would rather load it at each use.
SPARSEKV_INLINE void hold(Vector& x) { __asm__("" : "+x"(x)); }
SPARSEKV_INLINE Vector plus(Vector a, Vector b) { return _mm256_add_ps(a, b); }
SPARSEKV_INLINE Vector minus(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
SPARSEKV_INLINE Vector times(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
SPARSEKV_INLINE Vector times_plus(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
// b where either is NaN
SPARSEKV_INLINE Vector maximum(Vector a, Vector b) { return _mm256_max_ps(a, b); }

SPARSEKV_INLINE float largest(Vector x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
SPARSEKV_INLINE float total(Vector x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

SPARSEKV_INLINE Vector round_to_whole(Vector x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^n for whole n, 0 where that is too small
SPARSEKV_INLINE Vector scale_by_power(Vector x, Vector n) {
  const __m256 too_small = _mm256_cmp_ps(n, _mm256_set1_ps(-126.0f), _CMP_LT_OQ);
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  const __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  return _mm256_andnot_ps(too_small, _mm256_mul_ps(x, power));
}

// Lane i of the result: the sum of all lanes of a[i].
SPARSEKV_INLINE Vector sums(const Vector* a) {
  Vector pairs[4], quads[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) pairs[i] = _mm256_hadd_ps(a[2 * i], a[2 * i + 1]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) quads[i] = _mm256_hadd_ps(pairs[2 * i], pairs[2 * i + 1]);
  return plus(_mm256_permute2f128_ps(quads[0], quads[1], 0x20),
              _mm256_permute2f128_ps(quads[0], quads[1], 0x31));
}

// Numbers of each dtype, two vectors at a time. `interleaved`: even ones first, then odd ones.
struct Fp32 {
  static constexpr int kBytes = 4;
  static constexpr bool kInterleaved = false;
  SPARSEKV_INLINE void load_pair(const char* p, Vector& first, Vector& second) {
    first = load(reinterpret_cast<const float*>(p));
    second = load(reinterpret_cast<const float*>(p) + kLanes);
  }
};
struct Bf16 {
  static constexpr int kBytes = 2;
  static constexpr bool kInterleaved = true;
  SPARSEKV_INLINE void load_pair(const char* p, Vector& first, Vector& second) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    first = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
    second = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(-65536)));
  }
};
struct Fp16 {
  static constexpr int kBytes = 2;
  static constexpr bool kInterleaved = false;
  SPARSEKV_INLINE void load_pair(const char* p, Vector& first, Vector& second) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(p);
    first = _mm256_cvtph_ps(_mm_loadu_si128(halves));
    second = _mm256_cvtph_ps(_mm_loadu_si128(halves + 1));
  }
};

}  // namespace SPARSEKV_VECTORS
}  // namespace sparsekv

#include "attention.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

const sparsekv::Kernel* const sparsekv::avx2_kernel = &sparsekv::avx2::kernel;
#else
const sparsekv::Kernel* const sparsekv::avx2_kernel = nullptr;
#endif

// Partial attention in AVX-512: 16 floats a vector, 32 registers.
//
// The code is chosen by SPARSEKV_VECTORS, defined here, and never by __AVX512F__: compilers compile
// for a set named by a pragma without defining its macro, and would silently take the slow branch.
// No templates of the standard library in this file: the linker may keep this file's copy of one
// for everybody, also where these instructions do not exist.
#include "attention_task.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#define SPARSEKV_VECTORS avx512

namespace sparsekv {
namespace SPARSEKV_VECTORS {

using Vector = __m512;
constexpr int kLanes = 16;
constexpr int kRowBlock = 8;       // query rows at a time, at most
constexpr int kAccumulators = 16;  // scores at a time

#define SPARSEKV_INLINE static inline __attribute__((always_inline))

SPARSEKV_INLINE Vector zero() { return _mm512_setzero_ps(); }
SPARSEKV_INLINE Vector broadcast(float x) { return _mm512_set1_ps(x); }
SPARSEKV_INLINE Vector load(const float* p) { return _mm512_loadu_ps(p); }
SPARSEKV_INLINE void store(float* p, Vector x) { _mm512_storeu_ps(p, x); }
// Keeps x in a register, where compilers would rather load it at each use.
SPARSEKV_INLINE void hold(Vector& x) { __asm__("" : "+v"(x)); }
SPARSEKV_INLINE Vector plus(Vector a, Vector b) { return _mm512_add_ps(a, b); }
SPARSEKV_INLINE Vector minus(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
SPARSEKV_INLINE Vector times(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
SPARSEKV_INLINE Vector times_plus(Vector a, Vector b, Vector c) {
  return _mm512_fmadd_ps(a, b, c);
}
// b where either is NaN
SPARSEKV_INLINE Vector maximum(Vector a, Vector b) { return _mm512_max_ps(a, b); }

SPARSEKV_INLINE float largest(Vector x) { return _mm512_reduce_max_ps(x); }
SPARSEKV_INLINE float total(Vector x) { return _mm512_reduce_add_ps(x); }

SPARSEKV_INLINE Vector round_to_whole(Vector x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^n for whole n, 0 where that is too small
SPARSEKV_INLINE Vector scale_by_power(Vector x, Vector n) { return _mm512_scalef_ps(x, n); }

// Lane i of the result: the sum of all lanes of a[i].
SPARSEKV_INLINE Vector sums(const Vector* a) {
  Vector pairs[8], quads[4], halves[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    pairs[i] = plus(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                   _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512d x = _mm512_castps_pd(pairs[2 * i]), y = _mm512_castps_pd(pairs[2 * i + 1]);
    quads[i] = plus(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                   _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    halves[i] = plus(_mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0x88),
                    _mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0xdd));
  }
  return plus(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
             _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
}

SPARSEKV_INLINE void split_bf16(__m512i x, Vector& first, Vector& second) {
  first = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  second = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(-65536)));
}
SPARSEKV_INLINE void split_fp16(__m512i x, Vector& first, Vector& second) {
  first = _mm512_cvtph_ps(_mm512_castsi512_si256(x));
  second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1));
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
    split_bf16(_mm512_loadu_si512(p), first, second);
  }
};
struct Fp16 {
  static constexpr int kBytes = 2;
  static constexpr bool kInterleaved = false;
  SPARSEKV_INLINE void load_pair(const char* p, Vector& first, Vector& second) {
    split_fp16(_mm512_loadu_si512(p), first, second);
  }
};

}  // namespace SPARSEKV_VECTORS
}  // namespace sparsekv

#include "attention.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

const sparsekv::Kernel* const sparsekv::avx512_kernel = &sparsekv::avx512::kernel;
#else
const sparsekv::Kernel* const sparsekv::avx512_kernel = nullptr;
#endif

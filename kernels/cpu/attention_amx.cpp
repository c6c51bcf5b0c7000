// Partial attention in AMX: matrix registers of 16 rows of 64 bytes, AVX-512 for what lies between.
//
// As in the other files, the code is chosen by names defined here, never by the compiler's macros,
// and no template of the standard library is used. The matrix instructions are written out: the
// compiler's own do not say that they read and write memory, and could be moved across the stores
// that fill their operands.
#include "attention_task.h"

#if defined(__x86_64__) && defined(__has_include)
#if __has_include(<amxbf16intrin.h>)  // else the assembler may not know them either
#define SPARSEKV_HAS_AMX
#endif
#endif

#if defined(SPARSEKV_HAS_AMX)
#include <immintrin.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("amx-tile,amx-bf16,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl"))), \
    apply_to = function)
#else
#pragma GCC target("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif

#define SPARSEKV_VECTORS amx
#define SPARSEKV_INLINE static inline __attribute__((always_inline))

namespace sparsekv {
namespace SPARSEKV_VECTORS {

using Vector = __m512;   // 16 floats
using Words = __m512i;   // 16 words of 32 bits, or 32 numbers of bf16

SPARSEKV_INLINE Vector broadcast(float x) { return _mm512_set1_ps(x); }
SPARSEKV_INLINE Vector load(const float* p) { return _mm512_loadu_ps(p); }
SPARSEKV_INLINE void store(float* p, Vector x) { _mm512_storeu_ps(p, x); }
SPARSEKV_INLINE Vector plus(Vector a, Vector b) { return _mm512_add_ps(a, b); }
SPARSEKV_INLINE Vector minus(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
SPARSEKV_INLINE Vector times(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
SPARSEKV_INLINE Vector times_plus(Vector a, Vector b, Vector c) {
  return _mm512_fmadd_ps(a, b, c);
}
// b where either is NaN
SPARSEKV_INLINE Vector maximum(Vector a, Vector b) { return _mm512_max_ps(a, b); }
SPARSEKV_INLINE bool any_differs(Vector a, Vector b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ) != 0;
}
SPARSEKV_INLINE bool any_is_nan(Vector x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
SPARSEKV_INLINE Vector round_to_whole(Vector x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^n for whole n, 0 where that is too small
SPARSEKV_INLINE Vector scale_by_power(Vector x, Vector n) { return _mm512_scalef_ps(x, n); }

SPARSEKV_INLINE Words load_words(const void* p) { return _mm512_loadu_si512(p); }
SPARSEKV_INLINE void store_words(void* p, Words x) { _mm512_storeu_si512(p, x); }
SPARSEKV_INLINE Words zero_words() { return _mm512_setzero_si512(); }
SPARSEKV_INLINE Vector as_floats(Words x) { return _mm512_castsi512_ps(x); }
SPARSEKV_INLINE Words as_words(Vector x) { return _mm512_castps_si512(x); }
// The upper half of each word as its lower half, with zeros above.
SPARSEKV_INLINE Words upper_halves(Words x) { return _mm512_srli_epi32(x, 16); }
SPARSEKV_INLINE Words either(Words a, Words b) { return _mm512_or_si512(a, b); }

// Numbers 0 ... 3 of each eight of a and b, alternating; and numbers 4 ... 7.
SPARSEKV_INLINE Words alternate_low(Words a, Words b) { return _mm512_unpacklo_epi16(a, b); }
SPARSEKV_INLINE Words alternate_high(Words a, Words b) { return _mm512_unpackhi_epi16(a, b); }

// The first 8 bits of a float's fraction: bf16, rounded towards 0; infinity and NaN stay.
SPARSEKV_INLINE Vector leading_part(Vector x) {
  const Vector cut = _mm512_and_ps(x, as_floats(_mm512_set1_epi32(-65536)));
  return _mm512_mask_mov_ps(cut, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                            broadcast(__builtin_nanf("")));
}
// What is left of x beside a part of it; nothing where the part is infinite or NaN.
SPARSEKV_INLINE Vector remaining_part(Vector x, Vector part) {
  const Vector size = _mm512_abs_ps(part);
  return _mm512_maskz_sub_ps(
      _mm512_cmp_ps_mask(size, broadcast(__builtin_inff()), _CMP_LT_OQ), x, part);
}
// 32 numbers of bf16 in order, from floats that are bf16 already.
SPARSEKV_INLINE Words join_parts(Vector first, Vector second) {
  return reinterpret_cast<Words>(_mm512_cvtne2ps_pbh(second, first));
}

// Words of two bf16 numbers: of a, rounded to nearest, in the low half, of b in the high half. NaN
// stays NaN unless every bit of its fraction is set.
SPARSEKV_INLINE Words round_to_pairs(Vector a, Vector b) {
  const Words half = _mm512_set1_epi32(0x8000);
  const Words low = _mm512_add_epi32(_mm512_castps_si512(a), half);
  const Words high = _mm512_add_epi32(_mm512_castps_si512(b), half);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high);
}
// Rounded to nearest: a float of which the upper half is a bf16 number. NaN as above.
SPARSEKV_INLINE Vector round_to_bf16(Vector x) {
  const Words bits = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
  return as_floats(_mm512_and_si512(bits, _mm512_set1_epi32(-65536)));
}
// Lanes 0 ... 3 and 8 ... 11 of a, the others of b.
SPARSEKV_INLINE Vector join_fours(Vector a, Vector b) { return _mm512_mask_mov_ps(a, 0xf0f0, b); }
// Lanes 0 ... 7 of a and 8 ... 15 of b; 0 ... 7 of both; 8 ... 15 of both; 8 ... 15 and 0 ... 7.
SPARSEKV_INLINE Vector join_halves(Vector a, Vector b) {
  return _mm512_mask_mov_ps(a, 0xff00, b);
}
SPARSEKV_INLINE Vector join_lower(Vector a, Vector b) { return _mm512_shuffle_f32x4(a, b, 0x44); }
SPARSEKV_INLINE Vector join_upper(Vector a, Vector b) { return _mm512_shuffle_f32x4(a, b, 0xee); }
SPARSEKV_INLINE Vector join_upper_lower(Vector a, Vector b) {
  return _mm512_shuffle_f32x4(a, b, 0x4e);
}
// 32 floats: of a, of b, of a ...
SPARSEKV_INLINE void store_alternating(float* p, Vector a, Vector b) {
  const Words first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const Words eight = _mm512_set1_epi32(8);
  store(p, _mm512_permutex2var_ps(a, first, b));
  store(p + 16, _mm512_permutex2var_ps(a, _mm512_add_epi32(first, eight), b));
}
// 32 floats, by fours: of a, of b, of a ...
SPARSEKV_INLINE void store_by_fours(float* p, Vector a, Vector b) {
  const Vector lower = join_lower(a, b), upper = join_upper(a, b);
  store(p, _mm512_shuffle_f32x4(lower, lower, 0xd8));
  store(p + 16, _mm512_shuffle_f32x4(upper, upper, 0xd8));
}
// sum + low half + high half of each word
SPARSEKV_INLINE Vector add_pairs(Vector sum, Words pairs) {
  const Words ones = _mm512_set1_epi16(0x3f80);
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(pairs), reinterpret_cast<__m512bh>(ones));
}

// 16 rows of 16 words become columns.
SPARSEKV_INLINE void transpose(Words* rows) {
  Words t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    rows[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    rows[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    rows[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

// 8 rows of 8 words become columns, in the lower halves and in the upper halves.
SPARSEKV_INLINE void transpose_halves(Words* rows) {
  Words t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  Words q[8];
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    q[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    q[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    q[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    q[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  const Words first = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
  const Words second = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    rows[i] = _mm512_permutex2var_epi64(q[i], first, q[4 + i]);
    rows[4 + i] = _mm512_permutex2var_epi64(q[i], second, q[4 + i]);
  }
}

// What takes over where matrices do not do.
inline const Kernel& vectors() { return *avx512_kernel; }

// All eight matrix registers: 16 rows of 64 bytes. Before and after a task.
SPARSEKV_INLINE void configure_matrices() {
  alignas(64) uint8_t config[64] = {1};  // the palette
  for (int i = 0; i < 8; i++) {
    config[16 + 2 * i] = 64;  // bytes of a row
    config[48 + i] = 16;      // rows
  }
  asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
}
SPARSEKV_INLINE void release_matrices() { asm volatile("tilerelease"); }

template <int kMatrix>
SPARSEKV_INLINE void clear_matrix() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kMatrix));
}
template <int kMatrix>
SPARSEKV_INLINE void load_matrix(const void* start, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
               :
               : "r"(start), "r"(stride), "i"(kMatrix)
               : "memory");
}
template <int kMatrix>
SPARSEKV_INLINE void store_matrix(void* start, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
               :
               : "r"(start), "r"(stride), "i"(kMatrix)
               : "memory");
}
// sums[m][n] += a[m][2 k] * b[k][2 n] + a[m][2 k + 1] * b[k][2 n + 1]; sums of float, else bf16.
template <int kSums, int kA, int kB>
SPARSEKV_INLINE void multiply_matrices() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}

}  // namespace SPARSEKV_VECTORS
}  // namespace sparsekv

#include "attention_amx.h"
#include "attention_amx_groups.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

const sparsekv::Kernel* const sparsekv::amx_kernel = &sparsekv::amx::kernel;
const sparsekv::Kernel* const sparsekv::amx_group_kernel = &sparsekv::amx::group_kernel;
#else
const sparsekv::Kernel* const sparsekv::amx_kernel = nullptr;
const sparsekv::Kernel* const sparsekv::amx_group_kernel = nullptr;
#endif

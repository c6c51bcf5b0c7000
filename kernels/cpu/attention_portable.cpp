// Partial attention in the compiler's own vectors of 4 floats: for any processor.
#include "attention_task.h"

#include <string.h>

#define SPARSEKV_VECTORS portable

namespace sparsekv {
namespace SPARSEKV_VECTORS {

typedef float Vector __attribute__((vector_size(16)));
typedef int32_t Whole __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kRowBlock = 4;      // query rows at a time, at most
constexpr int kAccumulators = 8;  // scores at a time

#define SPARSEKV_INLINE static inline __attribute__((always_inline))

SPARSEKV_INLINE Vector broadcast(float x) { return Vector{x, x, x, x}; }
SPARSEKV_INLINE Vector zero() { return broadcast(0.0f); }
SPARSEKV_INLINE Vector load(const float* p) {
  Vector x;
  memcpy(&x, p, sizeof x);
  return x;
}
SPARSEKV_INLINE void store(float* p, Vector x) { memcpy(p, &x, sizeof x); }
SPARSEKV_INLINE void hold(Vector&) {}
SPARSEKV_INLINE Vector plus(Vector a, Vector b) { return a + b; }
SPARSEKV_INLINE Vector minus(Vector a, Vector b) { return a - b; }
SPARSEKV_INLINE Vector times(Vector a, Vector b) { return a * b; }
SPARSEKV_INLINE Vector times_plus(Vector a, Vector b, Vector c) { return a * b + c; }
// b where either is NaN
SPARSEKV_INLINE Vector maximum(Vector a, Vector b) { return a > b ? a : b; }

SPARSEKV_INLINE float largest(Vector x) {
  const float low = x[0] > x[1] ? x[0] : x[1], high = x[2] > x[3] ? x[2] : x[3];
  return low > high ? low : high;
}
SPARSEKV_INLINE float total(Vector x) { return (x[0] + x[1]) + (x[2] + x[3]); }

// For |x| below 2^22, or NaN: what is added shifts the fraction out.
SPARSEKV_INLINE Vector round_to_whole(Vector x) {
  const Vector shift = broadcast(12582912.0f);  // 1.5 * 2^23
  return (x + shift) - shift;
}
// x * 2^n for whole n, 0 where that is too small
SPARSEKV_INLINE Vector scale_by_power(Vector x, Vector n) {
  const Bits shifted = (Bits)(n + broadcast(12582912.0f));  // n in the low bits
  const Vector power = (Vector)((shifted + 127u) << 23);
  const Bits kept = ~(Bits)(n < broadcast(-126.0f));
  return (Vector)((Bits)(x * power) & kept);
}

// Lane i of the result: the sum of all lanes of a[i].
SPARSEKV_INLINE Vector sums(const Vector* a) {
  return Vector{total(a[0]), total(a[1]), total(a[2]), total(a[3])};
}

SPARSEKV_INLINE Bits load_bits(const char* p) {
  Bits x;
  memcpy(&x, p, sizeof x);
  return x;
}

// Numbers of each dtype, two vectors at a time. `interleaved`: even ones first, then odd ones (in
// the byte order of the machine, little end first).
struct Fp32 {
  static constexpr int kBytes = 4;
  static constexpr bool kInterleaved = false;
  SPARSEKV_INLINE void load_pair(const char* p, Vector& first, Vector& second) {
    first = (Vector)load_bits(p);
    second = (Vector)load_bits(p + sizeof(Vector));
  }
};
struct Bf16 {
  static constexpr int kBytes = 2;
  static constexpr bool kInterleaved = true;
  SPARSEKV_INLINE void load_pair(const char* p, Vector& first, Vector& second) {
    const Bits x = load_bits(p);
    first = (Vector)(x << 16);
    second = (Vector)(x & 0xffff0000u);
  }
};
struct Fp16 {
  static constexpr int kBytes = 2;
  static constexpr bool kInterleaved = true;
  SPARSEKV_INLINE void load_pair(const char* p, Vector& first, Vector& second) {
    const Bits x = load_bits(p);
    first = widen(x & 0xffffu);
    second = widen(x >> 16);
  }
  // Exponent and fraction moved to their places in a float, which is then 2^112 too small; exact
  // for subnormal numbers too. An exponent of all ones stays one: infinity and NaN.
  SPARSEKV_INLINE Vector widen(Bits half) {
    const Bits magnitude = (half & 0x7fffu) << 13;
    const Bits value = (Bits)((Vector)magnitude * broadcast(5.192296858534828e33f));
    const Bits special = (Bits)(magnitude >= 0x0f800000u) & 0x7f800000u;
    return (Vector)(value | special | (half & 0x8000u) << 16);
  }
};

}  // namespace SPARSEKV_VECTORS
}  // namespace sparsekv

#include "attention.h"

const sparsekv::Kernel* const sparsekv::portable_kernel = &sparsekv::portable::kernel;

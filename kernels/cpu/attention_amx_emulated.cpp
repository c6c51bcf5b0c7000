// The AMX kernel with its matrix registers and vectors in plain C++: for tests on any processor.
#include "attention_task.h"

#include <string.h>

#define SPARSEKV_VECTORS amx_emulated
#define SPARSEKV_INLINE static inline __attribute__((always_inline))

namespace sparsekv {
namespace SPARSEKV_VECTORS {

struct Vector {
  float lane[16];
};
struct Words {
  uint32_t lane[16];
};

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

template <class Function>
SPARSEKV_INLINE Vector each(Function function) {
  Vector x;
  for (int i = 0; i < 16; i++) x.lane[i] = function(i);
  return x;
}
template <class Function>
SPARSEKV_INLINE Words each_word(Function function) {
  Words x;
  for (int i = 0; i < 16; i++) x.lane[i] = function(i);
  return x;
}

SPARSEKV_INLINE Vector broadcast(float x) {
  return each([&](int) { return x; });
}
SPARSEKV_INLINE Vector load(const float* p) {
  return each([&](int i) { return p[i]; });
}
SPARSEKV_INLINE void store(float* p, Vector x) { memcpy(p, x.lane, sizeof x.lane); }
SPARSEKV_INLINE Vector plus(Vector a, Vector b) {
  return each([&](int i) { return a.lane[i] + b.lane[i]; });
}
SPARSEKV_INLINE Vector minus(Vector a, Vector b) {
  return each([&](int i) { return a.lane[i] - b.lane[i]; });
}
SPARSEKV_INLINE Vector times(Vector a, Vector b) {
  return each([&](int i) { return a.lane[i] * b.lane[i]; });
}
SPARSEKV_INLINE Vector times_plus(Vector a, Vector b, Vector c) {
  return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
}
SPARSEKV_INLINE Vector maximum(Vector a, Vector b) {
  return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
SPARSEKV_INLINE bool any_differs(Vector a, Vector b) {
  bool any = false;
  for (int i = 0; i < 16; i++) any |= a.lane[i] != b.lane[i];
  return any;
}
SPARSEKV_INLINE bool any_is_nan(Vector x) { return any_differs(x, x); }
SPARSEKV_INLINE Vector round_to_whole(Vector x) {
  return each([&](int i) { return __builtin_rintf(x.lane[i]); });
}
SPARSEKV_INLINE Vector scale_by_power(Vector x, Vector n) {
  return each([&](int i) {  // NaN is no whole number, and stays
    return n.lane[i] == n.lane[i] ? __builtin_ldexpf(x.lane[i], int(n.lane[i])) : x.lane[i];
  });
}

SPARSEKV_INLINE Words load_words(const void* p) {
  Words x;
  memcpy(x.lane, p, sizeof x.lane);
  return x;
}
SPARSEKV_INLINE void store_words(void* p, Words x) { memcpy(p, x.lane, sizeof x.lane); }
SPARSEKV_INLINE Words zero_words() { return {}; }
SPARSEKV_INLINE Vector as_floats(Words x) {
  return each([&](int i) { return float_of(x.lane[i]); });
}

SPARSEKV_INLINE Words as_words(Vector x) {
  return each_word([&](int i) { return bits_of(x.lane[i]); });
}
SPARSEKV_INLINE Words upper_halves(Words x) {
  return each_word([&](int i) { return x.lane[i] >> 16; });
}
SPARSEKV_INLINE Words either(Words a, Words b) {
  return each_word([&](int i) { return a.lane[i] | b.lane[i]; });
}

SPARSEKV_INLINE Words alternate(Words a, Words b, int first) {
  return each_word([&](int i) {
    const int number = i / 4 * 8 + first + i % 4, word = number / 2, shift = number % 2 * 16;
    return (a.lane[word] >> shift & 0xffffu) | (b.lane[word] >> shift) << 16;
  });
}
SPARSEKV_INLINE Words alternate_low(Words a, Words b) { return alternate(a, b, 0); }
SPARSEKV_INLINE Words alternate_high(Words a, Words b) { return alternate(a, b, 4); }

SPARSEKV_INLINE Vector leading_part(Vector x) {
  return each([&](int i) {
    const float number = x.lane[i];
    return number != number ? number : float_of(bits_of(number) & 0xffff0000u);
  });
}
SPARSEKV_INLINE Vector remaining_part(Vector x, Vector part) {
  return each([&](int i) {
    return __builtin_isfinite(part.lane[i]) ? x.lane[i] - part.lane[i] : 0.0f;
  });
}
SPARSEKV_INLINE Words join_parts(Vector first, Vector second) {
  return each_word([&](int i) {
    const float* from = i < 8 ? first.lane + 2 * i : second.lane + 2 * (i - 8);
    return bits_of(from[0]) >> 16 | (bits_of(from[1]) & 0xffff0000u);
  });
}
SPARSEKV_INLINE Words round_to_pairs(Vector a, Vector b) {
  return each_word([&](int i) {
    const uint32_t low = bits_of(a.lane[i]) + 0x8000u, high = bits_of(b.lane[i]) + 0x8000u;
    return low >> 16 | (high & 0xffff0000u);
  });
}
SPARSEKV_INLINE Vector round_to_bf16(Vector x) {
  return each([&](int i) { return float_of((bits_of(x.lane[i]) + 0x8000u) & 0xffff0000u); });
}
SPARSEKV_INLINE Vector join_fours(Vector a, Vector b) {
  return each([&](int i) { return i % 8 < 4 ? a.lane[i] : b.lane[i]; });
}
SPARSEKV_INLINE Vector join_halves(Vector a, Vector b) {
  return each([&](int i) { return i < 8 ? a.lane[i] : b.lane[i]; });
}
SPARSEKV_INLINE Vector join_upper_lower(Vector a, Vector b) {
  return each([&](int i) { return i < 8 ? a.lane[i + 8] : b.lane[i - 8]; });
}
SPARSEKV_INLINE void store_alternating(float* p, Vector a, Vector b) {
  for (int i = 0; i < 16; i++) {
    p[2 * i] = a.lane[i];
    p[2 * i + 1] = b.lane[i];
  }
}
SPARSEKV_INLINE void store_by_fours(float* p, Vector a, Vector b) {
  for (int i = 0; i < 16; i++) {
    p[i / 4 * 8 + i % 4] = a.lane[i];
    p[i / 4 * 8 + i % 4 + 4] = b.lane[i];
  }
}
SPARSEKV_INLINE Vector add_pairs(Vector sum, Words pairs) {
  return each([&](int i) {
    const uint32_t word = pairs.lane[i];
    return sum.lane[i] + float_of(word << 16) + float_of(word & 0xffff0000u);
  });
}
SPARSEKV_INLINE void transpose(Words* rows) {
  for (int i = 0; i < 16; i++) {
    for (int j = 0; j < i; j++) {
      const uint32_t kept = rows[i].lane[j];
      rows[i].lane[j] = rows[j].lane[i];
      rows[j].lane[i] = kept;
    }
  }
}

SPARSEKV_INLINE void transpose_halves(Words* rows) {
  for (int first = 0; first < 16; first += 8) {
    for (int i = 0; i < 8; i++) {
      for (int j = 0; j < i; j++) {
        const uint32_t kept = rows[i].lane[first + j];
        rows[i].lane[first + j] = rows[j].lane[first + i];
        rows[j].lane[first + i] = kept;
      }
    }
  }
}

inline const Kernel& vectors() { return *portable_kernel; }

// The matrix registers of a thread: 16 rows of 64 bytes.
static thread_local char matrices[8][16][64];

SPARSEKV_INLINE void configure_matrices() { memset(matrices, 0, sizeof matrices); }
SPARSEKV_INLINE void release_matrices() {}

template <int kMatrix>
void clear_matrix() {
  memset(matrices[kMatrix], 0, sizeof matrices[kMatrix]);
}
template <int kMatrix>
void load_matrix(const void* start, int64_t stride) {
  const char* from = static_cast<const char*>(start);
  for (int row = 0; row < 16; row++) memcpy(matrices[kMatrix][row], from + row * stride, 64);
}
template <int kMatrix>
void store_matrix(void* start, int64_t stride) {
  char* to = static_cast<char*>(start);
  for (int row = 0; row < 16; row++) memcpy(to + row * stride, matrices[kMatrix][row], 64);
}

template <int kSums, int kA, int kB>
void multiply_matrices() {
  float sums[16][16];
  memcpy(sums, matrices[kSums], sizeof sums);
  for (int k = 0; k < 16; k++) {
    const Words b = load_words(matrices[kB][k]);
    for (int m = 0; m < 16; m++) {
      uint32_t a;
      memcpy(&a, matrices[kA][m] + 4 * k, sizeof a);
      const float even = float_of(a << 16), odd = float_of(a & 0xffff0000u);
      for (int n = 0; n < 16; n++) {
        sums[m][n] += even * float_of(b.lane[n] << 16);
        sums[m][n] += odd * float_of(b.lane[n] & 0xffff0000u);
      }
    }
  }
  memcpy(matrices[kSums], sums, sizeof sums);
}

}  // namespace SPARSEKV_VECTORS
}  // namespace sparsekv

#include "attention_amx.h"
#include "attention_amx_groups.h"

const sparsekv::Kernel* const sparsekv::amx_emulated_kernel = &sparsekv::amx_emulated::kernel;
const sparsekv::Kernel* const sparsekv::amx_emulated_group_kernel =
    &sparsekv::amx_emulated::group_kernel;

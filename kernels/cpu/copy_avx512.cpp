// Copies in AVX-512: one store a line.
//
// How the code is chosen, and what this file must not contain: see attention_avx512.cpp.
#include "copy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC target("avx512f")
#endif

#define SPARSEKV_VECTORS avx512

namespace sparsekv {
namespace SPARSEKV_VECTORS {

static inline __attribute__((always_inline)) void copy_line(char* to, const char* from) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}

}  // namespace SPARSEKV_VECTORS
}  // namespace sparsekv

#include "copy_stream.h"

static const sparsekv::CopyKernel kernel = {"avx512", sparsekv::avx512::copy};

#if defined(__clang__)
#pragma clang attribute pop
#endif

const sparsekv::CopyKernel* const sparsekv::avx512_copy_kernel = &kernel;
#else
const sparsekv::CopyKernel* const sparsekv::avx512_copy_kernel = nullptr;
#endif

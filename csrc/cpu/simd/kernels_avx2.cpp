// The kernels for x86 with AVX2 and FMA.
#include "cpu/simd/kernels.h"

#if defined(ELLA_X86_KERNELS)
#include <type_traits>
#include <utility>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define ELLA_SET avx2
#define ELLA_VECTOR_BYTES 32
#define ELLA_REGISTERS 16
#define ELLA_TILE_ROWS 6
#define ELLA_TILE_VECTORS 2
#include "cpu/simd/kernels.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

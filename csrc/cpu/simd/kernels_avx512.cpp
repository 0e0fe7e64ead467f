// The kernels for x86 with AVX-512 (F, DQ, BW, VL).
#include "cpu/simd/kernels.h"

#if defined(ELLA_X86_KERNELS)
#include <type_traits>
#include <utility>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#endif
#define ELLA_SET avx512
#define ELLA_VECTOR_BYTES 64
#define ELLA_REGISTERS 32
#define ELLA_TILE_ROWS 6
#define ELLA_TILE_VECTORS 4
#include "cpu/simd/kernels.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

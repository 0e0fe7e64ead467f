// The kernels for x86 with AVX-512 (F, DQ, BW, VL).
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#define ELLA_SET avx512
#define ELLA_VECTOR_BYTES 64
#define ELLA_TILE_ROWS 6
#define ELLA_TILE_VECTORS 4
#include "kernels.inc"
#endif

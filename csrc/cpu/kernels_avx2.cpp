// The kernels for x86 with AVX2 and FMA.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2,fma")
#define ELLA_SET avx2
#define ELLA_VECTOR_BYTES 32
#define ELLA_TILE_ROWS 6
#define ELLA_TILE_VECTORS 2
#include "kernels.inc"
#endif

// The kernels for whatever the compiler targets by itself, but for ARM, which has a file of its own.
#include "cpu/simd/kernels.h"

#if !defined(ELLA_NEON_KERNELS)
#include <type_traits>
#include <utility>

#define ELLA_SET baseline
#define ELLA_VECTOR_BYTES 16
#define ELLA_REGISTERS 16
#define ELLA_TILE_ROWS 4
#define ELLA_TILE_VECTORS 2
#include "cpu/simd/kernels.inc"
#endif

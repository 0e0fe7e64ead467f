// The kernels for 64-bit ARM. All its processors have these 32 registers of 16 bytes.
#include "cpu/simd/kernels.h"

#if defined(ELLA_NEON_KERNELS)
#include <type_traits>
#include <utility>

// 20 accumulators: processors with four multiply-add units, each of latency 4, need 16. The compilers load all of a row's
// factors before they use them, and 6 rows leave too few registers for that.
#define ELLA_SET neon
#define ELLA_VECTOR_BYTES 16
#define ELLA_REGISTERS 32
#define ELLA_TILE_ROWS 5
#define ELLA_TILE_VECTORS 4
#include "cpu/simd/kernels.inc"
#endif

// Matrix products of a warp on tensor cores, from TF32 operands: at float32 accuracy, or at TF32's.
// Under the simulator the product is an emulation that exchanges fragments among the lanes; here it is one instruction.
#pragma once

#include <type_traits>

#include "common/device.h"

namespace ella {

// How tensor cores multiply float32 numbers.
//   split     three products of each pair, of which each number is split in two TF32 numbers: float32 accuracy
//   rounded   one product of each pair, of elements rounded to TF32, a relative error of at most 2^-11 in each; exact where
//             they are TF32 numbers, as float16 and bfloat16 elements are
enum class Tf32 { split, rounded };

// Calls f with that number as a type.
template <class F>
void with_tf32(bool allowed, const F& f) {
  if (allowed) {
    f(std::integral_constant<Tf32, Tf32::rounded>{});
  } else {
    f(std::integral_constant<Tf32, Tf32::split>{});
  }
}

// value = big + small + at most 2^-22 |value|, both of TF32's precision: 11 significant bits, of which a tensor core reads no
// more than the upper 19 bits of the word.
//
// big rounds to nearest, ties away, as cvt.rna.tf32.f32 does, whose expansion takes 4 instructions where this takes 2; small
// keeps 13 bits that the tensor core cuts off. NaN, and what exceeds the largest TF32, gives a NaN in small.
__device__ __forceinline__ void split_tf32(float value, float& big, float& small) {
  big = __uint_as_float((__float_as_uint(value) + 0x1000u) & 0xffffe000u);
  small = value - big;
}

#ifdef ELLA_SIMULATOR

using cusim::mma_tf32;
using cusim::round_tf32;

#else

// The TF32 number nearest to the value, of two the one away from zero; NaN stays NaN, which adding to the bits would not do.
__device__ __forceinline__ float round_tf32(float value) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return __uint_as_float(bits);
}

// c (16, 8) += a (16, 8) b (8, 8), by all 32 lanes. With g = lane / 4 and t = lane % 4 a lane holds
//   a: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)    b: (t, g), (t + 4, g)
//   c: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
// Sources: PTX ISA, "Matrix Fragments for mma.m16n8k8". The sum is cut, not rounded, to float32.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

#endif

}  // namespace ella

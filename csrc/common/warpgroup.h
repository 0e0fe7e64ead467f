// Matrix products of a warpgroup (four warps) on Hopper's tensor cores, sm_90a only: one operand in registers, the other in
// shared memory, the product asynchronous. Under the simulator they are emulated, the moment at which they read shared memory
// included (python_tests/cuda_sim/cusim/warpgroup.h).
//
// The operand in shared memory has 64 columns of 32 TF32 values, the 32 of a column together: 128 bytes, of which the hardware
// swizzles the 16-byte pieces, piece p of column c lying at p ^ c % 8, so that neither eight columns' same piece nor a column's
// eight pieces share a bank. The memory starts on a multiple of 1024 bytes.
// Sources: PTX ISA, "Asynchronous warpgroup level matrix instructions": register fragments of m64nNk8, matrix descriptor,
// K-major layout with 128-byte swizzle.
#pragma once

#include "common/device_memory.h"

namespace ella {

constexpr int kWarpgroup = 128;  // threads
constexpr int kSwizzledDepth = 32, kSwizzledColumns = 64, kSwizzledOperand = kSwizzledDepth * kSwizzledColumns;

// The place of the four values at depths 4 piece.. of a column, in floats.
__host__ __device__ __forceinline__ constexpr int swizzled_piece(int column, int piece) {
  return column * kSwizzledDepth + (piece ^ column % 8) * 4;
}

#ifdef ELLA_SIMULATOR

using cusim::store_vector_for_products;
using cusim::SwizzledOperand;
using cusim::warpgroup_commit;
using cusim::warpgroup_fence;
using cusim::warpgroup_multiply;
using cusim::warpgroup_wait;
using cusim::writes_before_products;
#define ELLA_SWIZZLED_MEMORY(name) ::ella::SharedMemory name

#else

#define ELLA_SWIZZLED_MEMORY(name)                                       \
  extern __shared__ __align__(1024) unsigned char ella_swizzled_bytes[]; \
  ::ella::SharedMemory name(ella_swizzled_bytes)

// As an instruction: nvcc takes a float4's store apart, and four stores 16 bytes apart are a bank conflict of four ways each.
__device__ __forceinline__ void store_vector_for_products(float* to, const float (&values)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
}

// Code for other architectures may not reach what follows: their assembler does not know it.

// An operand in shared memory, as the instruction wants it: address (18 bits) and the 1024 bytes from eight columns to the
// next eight, both in units of 16 bytes, and the kind of swizzle. The leading dimension has no meaning for this layout.
class SwizzledOperand {
 public:
  __device__ __forceinline__ explicit SwizzledOperand(const float* begin) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(begin));
    if (address % 1024 != 0) __trap();
    descriptor_ = uint64_t{1} << 62 | uint64_t{1024 / 16} << 32 | uint64_t{1} << 16 | (address & 0x3ffff) / 16;
  }
  // From depth 8 step on.
  __device__ __forceinline__ uint64_t descriptor(int step) const { return descriptor_ + step * (8 * sizeof(float) / 16); }

 private:
  uint64_t descriptor_;
};

// Before the first product and whenever registers that a product reads or adds to were touched by other instructions.
__device__ __forceinline__ void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Makes this thread's writes to shared memory visible to products that are issued after a barrier.
__device__ __forceinline__ void writes_before_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define ELLA_EIGHT(c, i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define ELLA_THIRTY_TWO(c) ELLA_EIGHT(c, 0), ELLA_EIGHT(c, 8), ELLA_EIGHT(c, 16), ELLA_EIGHT(c, 24)

// c (64, 64) = a (64, 8) b (8, 64), plus c if `add`; b is the operand from depth 8 step on. Of a warp's 16 rows, and with
// g = lane / 4 and t = lane % 4, a lane holds
//   a: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)
//   c[4 j..]: (g, 8 j + 2 t), (g, 8 j + 2 t + 1), (g + 8, 8 j + 2 t), (g + 8, 8 j + 2 t + 1)
// Nobody touches a, c and the operand until warpgroup_wait.
__device__ __forceinline__ void warpgroup_multiply(float (&c)[32], const float (&a)[4], const SwizzledOperand& b, int step,
                                                   bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, add, 1, 1;\n"
      "}\n"
      : ELLA_THIRTY_TWO(c)
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "l"(b.descriptor(step)), "r"(static_cast<int>(add)));
}

// Waits until at most `Pending` of the committed groups of products are under way; what the others read and wrote may then be
// touched, c among it.
template <int Pending>
__device__ __forceinline__ void warpgroup_wait(float (&c)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;" : ELLA_THIRTY_TWO(c) : "n"(Pending) : "memory");
}

#undef ELLA_EIGHT
#undef ELLA_THIRTY_TWO

#endif

}  // namespace ella

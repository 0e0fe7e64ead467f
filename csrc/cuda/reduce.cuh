// Sums in a fixed order: within a warp, a block, and across the partial results of many blocks.
#pragma once

#include "common/device_memory.h"

namespace ella {

constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

struct Sum {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

// A NaN on either side wins, as in torch.
struct Maximum {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return b > a || b != b ? b : a;
  }
};

// Over `width` neighbouring lanes (a power of two up to 32), by a butterfly: every lane gets the same bits, because a + b and
// b + a are the same number.
template <class T, class Operation>
__device__ __forceinline__ T warp_reduce(T value, Operation operation, int width = kWarp) {
  for (int step = width / 2; step > 0; step /= 2) value = operation(value, __shfl_xor_sync(kFullWarp, value, step));
  return value;
}

// Over all threads of a block, whose size is a multiple of 32 and at most 1024; the result is thread 0's. `scratch` holds one
// value per warp. Starts with a barrier, so scratch may be used again at once.
template <class T, class Operation>
__device__ __forceinline__ T block_reduce(T value, SharedArray<T> scratch, Operation operation) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  value = warp_reduce(value, operation);
  __syncthreads();
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < warps; ++i) value = operation(value, static_cast<T>(scratch[i]));
  }
  return value;
}

// Whether this is the last of so many blocks to come here: what thread 0 of every other block wrote to global memory before
// (with a barrier before the call, what all of its threads wrote) is then seen by all threads of this one. Which block is last
// depends on the run; what it computes from what all have left, in an order of its own, does not. `ticket` counts the blocks
// from zero, and is zero again after the last (tickets.cuh); `flag` holds one value.
__device__ __forceinline__ bool last_block(unsigned* ticket, SharedArray<unsigned> flag, unsigned blocks) {
  if (threadIdx.x == 0) {
    __threadfence();
    flag[0] = atomicInc(ticket, blocks - 1) == blocks - 1 ? 1u : 0u;
  }
  __syncthreads();
  const bool last = static_cast<unsigned>(flag[0]) != 0;
  if (last) __threadfence();
  return last;
}

// out[i] = sum_s parts[s][i], s ascending.
//   parts (splits, count), out (count)
template <class T>
__global__ void __launch_bounds__(256)
    sum_parts_kernel(const T* __restrict__ parts, T* __restrict__ out, int64_t splits, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= count) return;
  T total = parts[i];
  for (int64_t s = 1; s < splits; ++s) total += parts[s * count + i];
  out[i] = total;
}

}  // namespace ella

// Products whose operands come to shared memory slab by slab: a ring of stages, filled by asynchronous copies while earlier
// slabs are multiplied.
//
// start(stage) starts the copies of the next slab, each thread its own, and commits nothing.
#pragma once

#include "common/device_memory.h"

namespace ella {

template <int Stages>
__device__ __forceinline__ int next_stage(int stage) {
  return stage + 1 == Stages ? 0 : stage + 1;
}

// Starts the first Stages - 1 of `slabs`, a group of copies each.
template <int Stages, class Count, class Start>
__device__ __forceinline__ void start_slabs(Count slabs, Start&& start) {
#pragma unroll 1
  for (int s = 0; s < Stages - 1; ++s) {
    if (s < slabs) start(s);
    copy_async_commit();
  }
}

// Where the slab in `stage` is about to be multiplied: starts the one Stages - 1 later, if `there` is one, in the stage before.
template <int Stages, class Start>
__device__ __forceinline__ void start_slab_ahead(int stage, bool there, Start&& start) {
  if (there) start(stage == 0 ? Stages - 1 : stage - 1);
  copy_async_commit();
}

// Calls multiply(stage) for each of `slabs` in order, for all threads of a block; one barrier a slab suffices. The threads may
// still read the last slab when it returns.
template <int Stages, class Count, class Start, class Multiply>
__device__ __forceinline__ void multiply_slabs(Count slabs, Start&& start, Multiply&& multiply) {
  start_slabs<Stages>(slabs, start);
  int stage = 0;
  for (Count left = slabs; left > 0; --left) {
    copy_async_wait<Stages - 2>();
    __syncthreads();  // this slab is there for all, and all are done with the one whose stage is filled next
    start_slab_ahead<Stages>(stage, left > Stages - 1, start);
    multiply(stage);
    stage = next_stage<Stages>(stage);
  }
}

}  // namespace ella

// Runs CUDA kernel source on the CPU: `g++ -x c++ -include cusim.h kernel.cu`. For correctness, not for speed.
//
// One fiber per CUDA thread, one block after another, one launch at a time. A fiber runs until it meets a barrier, so what one
// thread does between two barriers is seen by the others at once or not at all, depending on the order in which threads and
// blocks are run; schedule.h has three orders for each. Beyond wrong results, the simulator stops a launch with an error that
// names kernel, block and thread for
//   barriers      that not all threads reach, or reach at different lines; shuffles and votes whose mask is not who is there
//   shared memory accesses out of an array's bounds, reads of what nobody wrote, two threads touching one element without a
//                 barrier between (one of them writing), reads of an asynchronous copy that was not waited for
// Shared memory and scratch tensors start as NaN. Tensor-core products are emulated, layout and rounding (tensor_core.h), also
// asynchronous ones (warpgroup.h). Not covered: inline PTX,
// bulk-copy instructions, clusters, bounds and races in global memory (tests surround inputs with NaN and compare block
// orders), local arrays, timing.
#pragma once

#define ELLA_SIMULATOR 1

#include "block.h"
#include "language.h"
#include "launches.h"
#include "path.h"
#include "schedule.h"
#include "shared.h"
#include "tensor_core.h"
#include "warp.h"
#include "warpgroup.h"

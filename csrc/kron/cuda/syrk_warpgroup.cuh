// Symmetric products of float32 numbers on Hopper's tensor cores (sm_90a): as syrk_tensor.cuh, for tiles of 128, by products of
// warpgroups, whose instructions can reach the full rate; those of single warps get about two thirds of it (Luo et al.,
// "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking", arXiv 2402.13499).
//
// Accuracy. As there (tensor_fragments.cuh): the split, and sums of 16 rows from zero, small terms first, which ordinary
// additions add to the total. Where elements are rounded (Tf32::rounded) each is one TF32 number and each pair one product.
//
// Tiles. Two warpgroups of 64 x 128 results each, in two chains of products for 64 columns each: while one runs, the other's
// sums are added, but for the last of a slab, after which the tensor cores wait for the barrier and the next rows. A product of
// depth 8 keeps the tensor cores busy for 32 cycles, three for each 8 rows and each chain; a slab of 32 rows so takes both
// warpgroups 1536 cycles. Meanwhile shared memory, at 128 bytes a cycle, has to move per slab
//   64 bytes a cycle for the columns' operand, which each product reads, that is    96 KB
//   both operands' values as they arrive                                           32 KB
//   the rows' operand, which each thread reads and splits in registers             16 KB
//   the columns' operand, read once, and written as two                            48 KB
// in all just as much time. Were the rows' operand to lie in shared memory too, it would be half as much again.
//
// A slab's products run while the columns of the next are split and the third after it is on its way. One barrier a slab
// suffices: it says that the next slab has arrived, that its split columns are there and that nobody reads the
// previous one any more.
//
// Rows come by ordinary asynchronous copies, whose instructions fit beside the products: the copy engine's boxes neither wrap
// around an image, as patches do, nor start where a block of a factor is not 16 bytes aligned.
//
// Both warpgroups always multiply, also where all their results lie outside the factor: with a branch around the products the
// compiler runs one after the other.
//
// A tile that no other block adds to goes through shared memory to the factor, so that neighbouring threads update neighbouring
// elements: per tile 64 KB written and 128 KB read there, against 256 KB of a float factor read and written.
//
// Registers: 64 sums, 64 results under way, 32 values of the rows' operand, which both chains share, a thread.
#pragma once

#include "common/tensor_core.h"
#include "common/warpgroup.h"
#include "cuda/slab_pipeline.cuh"
#include "kron/cuda/syrk_slabs.cuh"

namespace ella {

struct SyrkWarpgroupTile {
  static constexpr int BT = 128;
  static constexpr int kBlocks = 1;  // that a multiprocessor has
  static constexpr int kSlabRows = kSwizzledDepth, kStages = 4, kOperands = 2;
  // Both strides let a warp read 8 columns of 4 rows each, one value a lane, from 32 banks.
  static constexpr int kStride = BT + 8;
  static constexpr int kGroupRows = kSlabRows, kGroupStride = 0, kColumnStride = kSlabRows + 4;
  static constexpr int kOperand = BT * kColumnStride, kStage = kOperands * kOperand;
  static constexpr int kParts = BT / kSwizzledColumns;          // of the columns, a chain for each
  static constexpr int kSplit = 2 * kParts * kSwizzledOperand;  // big of all parts, small of all parts
  // Of the results in shared memory: a warp writes 8 rows of 4 values each, two to a bank, and reads rows and columns from 32.
  static constexpr int kTileStride = BT + 9;
  static_assert(BT * kTileStride <= kStages * kStage, "the tile reuses the staging memory");
  static_assert(kSlabRows * kStride <= kOperand && 2 * kWarpgroup == kSyrkThreads);

  __device__ __forceinline__ static int column_of_slot(int slot) { return slot; }

  template <class Column>
  static constexpr size_t shared_bytes() {
    return shared_size(2 * kSplit * sizeof(float)) + shared_size(kStages * kStage * sizeof(float)) +
           shared_size(kOperands * BT * sizeof(Column));
  }
};

// The place of an operand's value, in floats.
template <SyrkCopy COPY>
__device__ __forceinline__ int syrk_staged(int row, int column) {
  using Shape = SyrkWarpgroupTile;
  return COPY == SyrkCopy::rows ? column * Shape::kColumnStride + row : row * Shape::kStride + column;
}

// Splits or rounds a slab's columns for the products.
//   operand: as staged; split: big and small parts, or rounded ones
template <SyrkCopy COPY, Tf32 TF32>
__device__ __forceinline__ void split_columns(SharedArray<float> operand, SharedArray<float> split) {
  using Shape = SyrkWarpgroupTile;
#pragma unroll
  for (int unit = 0; unit < Shape::kSlabRows * Shape::BT / 4 / kSyrkThreads; ++unit) {
    const int at = threadIdx.x + unit * kSyrkThreads, column = at % Shape::BT, piece = at / Shape::BT;
    float value[4], big[4], small[4];
    if constexpr (COPY == SyrkCopy::rows) {
      load_vector(value, operand + syrk_staged<COPY>(4 * piece, column));
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) value[k] = operand[syrk_staged<COPY>(4 * piece + k, column)];
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (TF32 == Tf32::split) {
        split_tf32(value[k], big[k], small[k]);
      } else {
        big[k] = round_tf32(value[k]);
      }
    }
    const int to = swizzled_piece(column, piece);  // a column's place among all is that in its part
    store_vector_for_products(split + to, big);
    if constexpr (TF32 == Tf32::split) store_vector_for_products(split + (Shape::kSplit / 2 + to), small);
  }
  writes_before_products();
}

// The rows' operand of a warp in 16 rows of a slab: two steps of products.
template <Tf32 TF32>
struct SyrkRows {
  float big[2][4], small[2][4];  // small: where elements are split

  //   operand: from the warp's first column on, as staged
  template <SyrkCopy COPY>
  __device__ __forceinline__ void read(SharedArray<float> operand, int first) {
    const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float value = operand[syrk_staged<COPY>(first + 8 * step + t + i / 2 * 4, g + i % 2 * 8)];
        if constexpr (TF32 == Tf32::split) {
          split_tf32(value, big[step][i], small[step][i]);
        } else {
          big[step][i] = round_tf32(value);
        }
      }
    }
  }
};

// Starts chain (64, 64) = rows^T columns over 16 rows of a slab, the first or the second.
//   split: the columns' part
template <Tf32 TF32>
__device__ __forceinline__ void start_products(const SyrkRows<TF32>& rows, SharedArray<float> split, int sixteen,
                                               float (&chain)[32]) {
  constexpr bool kSplits = TF32 == Tf32::split;
  const SwizzledOperand big(split), small(split + SyrkWarpgroupTile::kSplit / 2);
  warpgroup_fence();
  if constexpr (kSplits) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      warpgroup_multiply(chain, rows.small[step], big, 2 * sixteen + step, step > 0);
      warpgroup_multiply(chain, rows.big[step], small, 2 * sixteen + step, true);
    }
  }
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    warpgroup_multiply(chain, rows.big[step], big, 2 * sixteen + step, kSplits || step > 0);
  }
  warpgroup_commit();
}

// Adds what a chain has come to, when at most `Pending` later ones are under way.
template <int Pending>
__device__ __forceinline__ void finish_products(float (&chain)[32], float (&sum)[32]) {
  warpgroup_wait<Pending>(chain);
#pragma unroll
  for (int i = 0; i < 32; ++i) sum[i] += chain[i];
}

//   parts: of the launch, see SyrkSum; empty where no sum has several splits
template <SyrkCopy COPY, Tf32 TF32, class Rows>
__global__ void __launch_bounds__(kSyrkThreads, 1)
    syrk_warpgroup_kernel(const __grid_constant__ SyrkSums sums, const __grid_constant__ SyrkRowsOf<Rows> rows_of,
                          float* parts) {
#if defined(ELLA_SIMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = SyrkWarpgroupTile;
  constexpr int BT = Shape::BT;
  ELLA_SWIZZLED_MEMORY(memory);
  const SharedArray<float> split = memory.array<float>(2 * Shape::kSplit);  // first: it wants the alignment
  const SharedArray<float> staging = memory.array<float>(Shape::kStages * Shape::kStage);
  const SharedArray<typename Rows::Column> columns = memory.array<typename Rows::Column>(Shape::kOperands * BT);
  const int own = sums.find(blockIdx.x, &SyrkSum::first_block);
  const SyrkSum& of = sums.sum[own];
  const int64_t d = of.d;
  const SyrkTask syrk_task(BT, of);
  SyrkSlabs<Shape, COPY, Rows> slabs(rows_of.rows[own], syrk_task, d, staging, columns);

  const int warp = __shfl_sync(kFullWarp, threadIdx.x / kWarp, 0), down = 16 * warp;
  const SharedArray<float> rows_operand = staging + syrk_staged<COPY>(0, down);
  const SharedArray<float> columns_operand = staging + (syrk_task.i0 == syrk_task.j0 ? 0 : Shape::kOperand);
  float sum[2][32] = {}, chain[2][32] = {};

  const auto start = [&](int stage) { slabs.start(stage); };
  const int64_t count_slabs = syrk_task.slabs(Shape::kSlabRows);
  start_slabs<Shape::kStages>(count_slabs, start);
  copy_async_wait<Shape::kStages - 2>();
  __syncthreads();
  split_columns<COPY, TF32>(columns_operand, split);
  int stage = 0, half = 0;
  for (int64_t left = count_slabs; left > 0; --left) {
    copy_async_wait<Shape::kStages - 3>();
    __syncthreads();
    const SharedArray<float> now = split + half * Shape::kSplit, right = now + kSwizzledOperand;
    SyrkRows<TF32> first, second;
    first.template read<COPY>(rows_operand + stage * Shape::kStage, 0);
    start_products(first, now, 0, chain[0]);
    start_products(first, right, 0, chain[1]);
    second.template read<COPY>(rows_operand + stage * Shape::kStage, 16);
    start_slab_ahead<Shape::kStages>(stage, left > Shape::kStages - 1, start);
    stage = next_stage<Shape::kStages>(stage), half ^= 1;
    finish_products<1>(chain[0], sum[0]);
    start_products(second, now, 1, chain[0]);
    finish_products<1>(chain[1], sum[1]);
    start_products(second, right, 1, chain[1]);
    if (left > 1) split_columns<COPY, TF32>(columns_operand + stage * Shape::kStage, split + half * Shape::kSplit);
    finish_products<1>(chain[0], sum[0]);
    finish_products<0>(chain[1], sum[1]);
  }

  const int lane = threadIdx.x % kWarp;
  const bool alone = of.splits == 1;
  if (alone) __syncthreads();  // all are done with the last slab, over which the tile is laid
#pragma unroll
  for (int v = 0; v < 64; v += 2) {
    const int i = down + lane / 4 + v / 2 % 2 * 8, j = v / 4 * 8 + lane % 4 * 2;
    const float first = sum[v / 32][v % 32], second = sum[v / 32][v % 32 + 1];
    if (alone) {
      staging[i * Shape::kTileStride + j] = first;
      staging[i * Shape::kTileStride + j + 1] = second;
    } else {
      store_pair(parts + syrk_task.part * (BT * BT) + i * BT + j, first, second);
    }
  }
  if (!alone) return;
  __syncthreads();  // the tile is there for all
  const auto update = [&](auto* factor, auto alpha) {
    update_square<BT, kSyrkThreads>(factor, d, syrk_task.i0, syrk_task.j0, alpha, staging, Shape::kTileStride);
  };
  if (of.wide) {
    update(of.block<double>(syrk_task.g), of.alpha);
  } else {
    update(of.block<float>(syrk_task.g), static_cast<float>(of.alpha));
  }
#else
  __trap();  // never launched on other architectures
#endif
}

}  // namespace ella

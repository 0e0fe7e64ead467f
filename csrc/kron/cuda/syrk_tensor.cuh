// Symmetric products of float32 numbers on tensor cores.
//
// Accuracy and layout: tensor_fragments.cuh.
//
// Tiles. 8 warps of 32 x 64 (BT 128) or 32 x 32 (BT 64, 32) results each; where that is more than the tile, groups of warps
// take every kGroups-th 16 rows of a slab and are added in order at the end. For 32 x 64 results and 8 rows a warp reads 6
// vectors a lane, splits 24 values (3 instructions each), multiplies 48 times and adds 32 times (16 rows: 64): 48 products of
// 1024 FMA keep the tensor cores busy for 192 cycles of a quarter of an A100 multiprocessor, the other 126 instructions fit
// beside them. For 32 x 32 it is 4 vectors, 48 and 16 instructions beside 24 products. Warps whose results all lie below the
// diagonal, or outside the factor, copy but do not multiply.
//
// A slab is 2048 values of each operand (BT 32 has but one operand: 4096), three stages of about 18 KB, filled by asynchronous
// copies two slabs ahead, so that one barrier a slab suffices.
#pragma once

#include "cuda/slab_pipeline.cuh"
#include "cuda/tensor_fragments.cuh"
#include "kron/cuda/syrk_slabs.cuh"

namespace ella {

template <int BT_>
struct SyrkTensorTile {
  static constexpr int BT = BT_;
  static constexpr int kHalves = BT == 128 ? 2 : 1;  // of 32 columns, per warp
  static constexpr int kDown = BT / 32, kAcross = BT / (32 * kHalves);
  static constexpr int kGroups = kSyrkThreads / kWarp / (kDown * kAcross);
  static constexpr int kBlocks = BT == 128 ? 1 : 2;  // that a multiprocessor has, by the registers
  static constexpr int kSlabRows = 16 * kGroups, kStages = 3;
  static constexpr int kOperands = BT == 32 ? 1 : 2;
  static constexpr int kStride = BT + 8;             // of rows: a quarter warp's 2 x 4 vectors cover all banks
  static constexpr int kGroupStride = 16 * BT + 16;  // of 16 rows, where columns lie together: two groups' writes to one column
  static constexpr int kGroupRows = 16, kColumnStride = 16;
  static constexpr int kOperand = kSlabRows * kStride, kStage = kOperands * kOperand;
  static constexpr int kResults = kHalves * 32;  // a lane's
  static_assert(kGroups * kDown * kAcross * kWarp == kSyrkThreads && kGroups * kGroupStride <= kOperand, "the tile must fit");
  static_assert(kGroups == 1 || (kGroups - 1) * BT * BT <= kStages * kStage, "the groups' sums reuse the staging memory");

  __device__ __forceinline__ static int column_of_slot(int slot) { return ella::column_of_slot(slot); }

  template <class Column>
  static constexpr size_t shared_bytes() {
    return shared_size(kStages * kStage * sizeof(float)) + shared_size(kOperands * BT * sizeof(Column));
  }
};

//   parts: of the launch, see SyrkSum; empty where no sum has several splits
template <int BT, SyrkCopy COPY, Tf32 TF32, class Rows>
__global__ void __launch_bounds__(kSyrkThreads, SyrkTensorTile<BT>::kBlocks)
    syrk_tensor_kernel(const __grid_constant__ SyrkSums sums, const __grid_constant__ SyrkRowsOf<Rows> rows_of, float* parts) {
  using Shape = SyrkTensorTile<BT>;
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<float> staging = memory.array<float>(Shape::kStages * Shape::kStage);
  const SharedArray<typename Rows::Column> columns = memory.array<typename Rows::Column>(Shape::kOperands * BT);
  const int own = sums.find(blockIdx.x, &SyrkSum::first_block);
  const SyrkSum& of = sums.sum[own];
  const int64_t d = of.d;
  const SyrkTask syrk_task(BT, of);
  SyrkSlabs<Shape, COPY, Rows> slabs(rows_of.rows[own], syrk_task, d, staging, columns);

  const int warp = __shfl_sync(kFullWarp, threadIdx.x / kWarp, 0);  // the compiler sees that it is one number for all lanes
  const int group = warp / (Shape::kDown * Shape::kAcross);
  const int down = warp / Shape::kAcross % Shape::kDown * 32, across = warp % Shape::kAcross * (32 * Shape::kHalves);
  constexpr bool kKMajor = COPY == SyrkCopy::rows;
  const bool diagonal = Shape::kOperands == 1 || syrk_task.i0 == syrk_task.j0;
  const int second = diagonal ? 0 : 1;
  bool wanted[Shape::kHalves], any = false;  // the same for all lanes
#pragma unroll
  for (int h = 0; h < Shape::kHalves; ++h) {
    wanted[h] = syrk_task.i0 + down < d && syrk_task.j0 + across + 32 * h < d && (!diagonal || across + 32 * h >= down);
    any = any || wanted[h];
  }
  Results sum[Shape::kHalves] = {};

  const auto start = [&](int stage) { slabs.start(stage); };
  multiply_slabs<Shape::kStages>(syrk_task.slabs(Shape::kSlabRows), start, [&](int stage) {
    if (!any) return;
    const Tf32Fragment<TF32> a(read_fragment<Shape, kKMajor>(staging + stage * Shape::kStage, group, down));
#pragma unroll
    for (int h = 0; h < Shape::kHalves; ++h) {
      if (!wanted[h]) continue;
      const SharedArray<float> operand = staging + (stage * Shape::kStage + second * Shape::kOperand);
      add_product(sum[h], a, Tf32Fragment<TF32>(read_fragment<Shape, kKMajor>(operand, group, across + 32 * h)));
    }
  });

  if constexpr (Shape::kGroups >
                1) {  // [group - 1][result][thread of a group], each thread's results are the same in all groups
    constexpr int kThreads = kSyrkThreads / Shape::kGroups;
    const int thread = threadIdx.x % kThreads;
    float (&flat)[Shape::kResults] = reinterpret_cast<float (&)[Shape::kResults]>(sum);
    __syncthreads();  // all are done with the last slab
    if (group > 0) {
#pragma unroll
      for (int v = 0; v < Shape::kResults; ++v) {
        staging[((group - 1) * Shape::kResults + v) * kThreads + thread] = flat[v];
      }
    }
    __syncthreads();
    if (group > 0) return;
#pragma unroll
    for (int v = 0; v < Shape::kResults; ++v) {
#pragma unroll
      for (int other = 0; other < Shape::kGroups - 1; ++other) {
        flat[v] += staging[(other * Shape::kResults + v) * kThreads + thread];
      }
    }
  }

  const int in_i = down + result_row();
#pragma unroll
  for (int h = 0; h < Shape::kHalves; ++h) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int in_j = across + 32 * h + result_column() + 4 * half;
      float block[4][4];
      result_block(sum[h], half, block);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if (of.splits > 1) {
          store_vector(parts + syrk_task.part * (BT * BT) + (in_i + r) * BT + in_j, block[r]);
          continue;
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          update_factor(of, syrk_task.g, syrk_task.i0 + in_i + r, syrk_task.j0 + in_j + c, block[r][c]);
        }
      }
    }
  }
}

}  // namespace ella

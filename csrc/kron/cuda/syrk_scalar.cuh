// Symmetric products by ordinary multiply-adds: double, and blocks too small for tensor cores.
//
// Tiles. 256 threads hold SIDE x SIDE x (4 x 4) sums of a BT x BT tile; where the tile is small, several groups of threads
// take every GROUPS-th part of a slab's rows and are added in order at the end.
//   BT  16: 16 groups    32: 4 groups    64 (double): 1 group
// A thread reads 2 vectors for 16 FMA. A slab is 2048 (float) or 1024 (double) values of each operand, two stages, filled by
// asynchronous copies while the previous one is multiplied; a factor of one tile has one operand: 19 to 35 KB.
#pragma once

#include "cuda/slab_pipeline.cuh"
#include "kron/cuda/syrk_tile.cuh"

namespace ella {

template <class T, int BT_>
struct SyrkScalarTile {
  static constexpr int BT = BT_, SIDE = BT / 4;
  static constexpr int kBlocks = 2;  // that a multiprocessor should have, by the registers
  static constexpr int kGroups = kSyrkThreads / (SIDE * SIDE);
  static constexpr int kSlabRows = (sizeof(T) == 4 ? 2048 : 1024) / BT, kStages = 2;
  static constexpr int kGroupRows = kSlabRows / kGroups;
  static constexpr int kStride = BT + 16 / sizeof(T);  // keeps 16-byte alignment, spreads copies down a column over banks
  static constexpr int kOperands = BT < 64 ? 1 : 2;    // the narrow ones are for factors of one tile
  static constexpr int kOperand = kSlabRows * kStride, kStage = kOperands * kOperand;
  static constexpr int kSums = kGroups == 1 ? 0 : kGroups * BT * BT;  // of all groups, where the slabs were
  static constexpr int kStaging = kStages * kStage > kSums ? kStages * kStage : kSums;
  static_assert(SIDE * SIDE * kGroups == kSyrkThreads && kGroupRows * kGroups == kSlabRows, "the tile must divide evenly");

  template <class Column>
  static constexpr size_t shared_bytes() {
    return shared_size(kStaging * sizeof(T)) + shared_size(kOperands * BT * sizeof(Column));
  }
};

// Leaves in sum of group 0's threads the products of a tile, where BT < 64 of the only one: rows 4 (t / SIDE).., columns 4 (t %
// SIDE).. of it.
template <class T, int BT, class Rows>
__device__ __forceinline__ void syrk_scalar_tile(const Rows& rows, const SyrkTask& syrk_task, int64_t d, SharedArray<T> staging,
                                                 SharedArray<typename Rows::Column> columns, T (&sum)[4][4]) {
  using Shape = SyrkScalarTile<T, BT>;
  constexpr int SIDE = Shape::SIDE;
  const int64_t g = syrk_task.g, i0 = syrk_task.i0, j0 = syrk_task.j0, r_begin = syrk_task.begin, r_end = syrk_task.end;
  const int t = threadIdx.x;
  const bool diagonal = Shape::kOperands == 1 || i0 == j0;
  for (int i = t; i < Shape::kOperands * BT; i += kSyrkThreads) {
    const int64_t column = i < BT ? i0 + i : j0 + i - BT;
    columns[i] = rows.column(g, min(column, d - 1));
  }
  __syncthreads();

  // Thread t copies elements (row, column) whose fast index is the one that is adjacent in memory.
  const bool rows_adjacent = rows.rows_adjacent();
  const int copies = Shape::kSlabRows * BT / kSyrkThreads;
  int64_t r0 = r_begin;  // the next slab's first row
  const auto start = [&](int stage) {
    if (rows_adjacent) {  // one row a thread
      const int k = t % Shape::kSlabRows;
      const bool in_rows = r0 + k < r_end;
      const typename Rows::Row row = rows.row(min(r0 + k, r_end - 1));
#pragma unroll 4
      for (int e = 0; e < copies; ++e) {
        const int i = t / Shape::kSlabRows + e * (kSyrkThreads / Shape::kSlabRows);
        for (int operand = 0; operand < (diagonal ? 1 : 2); ++operand) {
          const typename Rows::Column column = columns[operand * BT + i];
          const bool inside = in_rows && (operand ? j0 : i0) + i < d && rows.inside(row, column);
          const T* const from = rows.address(row, column);
          copy_async(staging + (stage * Shape::kStage + operand * Shape::kOperand + k * Shape::kStride + i), from, inside);
        }
      }
    } else {  // one column a thread
      const int i = t % BT;
      for (int operand = 0; operand < (diagonal ? 1 : 2); ++operand) {
        const bool in_columns = (operand ? j0 : i0) + i < d;
        const typename Rows::Column column = columns[operand * BT + i];
#pragma unroll 4
        for (int e = 0; e < copies; ++e) {
          const int k = t / BT + e * (kSyrkThreads / BT);
          const bool inside = in_columns && r0 + k < r_end;
          const T* const from = rows.address(rows.row(min(r0 + k, r_end - 1)), column);
          copy_async(staging + (stage * Shape::kStage + operand * Shape::kOperand + k * Shape::kStride + i), from, inside);
        }
      }
    }
    r0 += Shape::kSlabRows;
  };

  const int group = t / (SIDE * SIDE), tx = t % SIDE, ty = t / SIDE % SIDE;
  const int second = diagonal ? 0 : Shape::kOperand;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[i][j] = T(0);
  }
  multiply_slabs<Shape::kStages>(syrk_task.slabs(Shape::kSlabRows), start, [&](int stage) {
    const SharedArray<T> slab_rows = staging + (stage * Shape::kStage + group * Shape::kGroupRows * Shape::kStride);
#pragma unroll
    for (int k = 0; k < Shape::kGroupRows; ++k) {
      T a[4], b[4];
      load_vector(a, slab_rows + (k * Shape::kStride + 4 * ty));
      load_vector(b, slab_rows + (second + k * Shape::kStride + 4 * tx));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = fma(a[i], b[j], sum[i][j]);
      }
    }
  });

  if constexpr (Shape::kGroups > 1) {
    __syncthreads();  // all are done with the last slab, over which the groups' sums are laid
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) staging[group * BT * BT + (4 * ty + i) * BT + 4 * tx + j] = sum[i][j];
    }
    __syncthreads();
    if (group == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          for (int other = 1; other < Shape::kGroups; ++other) {
            sum[i][j] += staging[other * BT * BT + (4 * ty + i) * BT + 4 * tx + j];
          }
        }
      }
    }
  }
}

//   parts: of the launch, see SyrkSum; empty where no sum has several splits
template <class T, int BT, class Rows>
__global__ void __launch_bounds__(kSyrkThreads, SyrkScalarTile<T, BT>::kBlocks)
    syrk_scalar_kernel(const __grid_constant__ SyrkSums sums, const __grid_constant__ SyrkRowsOf<Rows> rows_of, T* parts) {
  using Shape = SyrkScalarTile<T, BT>;
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<T> staging = memory.array<T>(Shape::kStaging);
  const SharedArray<typename Rows::Column> columns = memory.array<typename Rows::Column>(Shape::kOperands * BT);
  const int own = sums.find(blockIdx.x, &SyrkSum::first_block);
  const SyrkSum& of = sums.sum[own];
  const SyrkTask syrk_task(BT, of);
  T sum[4][4];
  const Rows rows = rows_of.rows[own];  // among a kernel's arguments each use would read it
  syrk_scalar_tile<T, BT>(rows, syrk_task, of.d, staging, columns, sum);
  const int t = threadIdx.x, tx = t % Shape::SIDE, ty = t / Shape::SIDE % Shape::SIDE;
  if (t >= Shape::SIDE * Shape::SIDE) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (of.splits > 1) {
        parts[syrk_task.part * (BT * BT) + (4 * ty + i) * BT + 4 * tx + j] = sum[i][j];
      } else {
        update_factor(of, syrk_task.g, syrk_task.i0 + 4 * ty + i, syrk_task.j0 + 4 * tx + j, sum[i][j]);
      }
    }
  }
}

}  // namespace ella

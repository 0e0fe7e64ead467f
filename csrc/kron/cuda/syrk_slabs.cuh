// The rows of a symmetric product's operands as they come to shared memory, a slab of them at a time, for both kernels on
// tensor cores (syrk_tensor.cuh, syrk_warpgroup.cuh).
#pragma once

#include "kron/cuda/syrk_tile.cuh"

namespace ella {

// What a thread copies, and how a slab lies in shared memory: neighbouring rows (each column's rows together), neighbouring
// columns, or four of them at once (each row's columns together).
enum class SyrkCopy { rows, columns, vectors };

// Copies one slab of both operands; the pieces that do not change from slab to slab are its members. A slab's layout is
// Shape's:
//   kSlabRows, kOperands; kStage, kOperand: floats from one stage, one operand to the next
//   kStride: floats from row to row, where each row's columns are together
//   kGroupRows, kGroupStride, kColumnStride, column_of_slot: where each column's rows are together, it is so many of them, the
//   next follow a group stride later; from column to column, which come in the order of their slots
template <class Shape, SyrkCopy COPY, class Rows>
class SyrkSlabs {
  static constexpr int BT = Shape::BT, kWide = COPY == SyrkCopy::vectors ? 4 : 1;
  // Whether a thread keeps the first of its four columns: each fourth from shared memory is a bank conflict of four ways. Where
  // two blocks are to fit there are no registers for it.
  static constexpr bool kOwn = COPY == SyrkCopy::vectors && Shape::kBlocks == 1;
  using Column = typename Rows::Column;

 public:
  __device__ __forceinline__ SyrkSlabs(const Rows& rows, const SyrkTask& syrk_task, int64_t d, SharedArray<float> staging,
                                       SharedArray<Column> columns)
      : rows_(rows), task_(syrk_task), d_(d), r0_(syrk_task.begin), staging_(staging), columns_(columns) {
    if constexpr (kOwn) {
#pragma unroll
      for (int operand = 0; operand < Shape::kOperands; ++operand) {
        own_[operand] = rows.column(syrk_task.g, (operand ? syrk_task.j0 : syrk_task.i0) + threadIdx.x % (BT / kWide) * kWide);
      }
    } else {
      for (int i = threadIdx.x; i < Shape::kOperands * BT; i += kSyrkThreads) {
        const int at = COPY == SyrkCopy::rows ? Shape::column_of_slot(i % BT) : i % BT;
        columns_[i] = rows.column(syrk_task.g, (i < BT ? syrk_task.i0 : syrk_task.j0) + at);
      }
      __syncthreads();
    }
  }

  // Starts the copy of the next slab to `stage`; zeros where there are no more rows or columns.
  __device__ __forceinline__ void start(int stage) {
    const int t = threadIdx.x;
    const int64_t r0 = r0_;
    const int rows = static_cast<int>(min(task_.end - r0, static_cast<int64_t>(Shape::kSlabRows)));
    r0_ += Shape::kSlabRows;
    const bool diagonal = Shape::kOperands == 1 || task_.i0 == task_.j0;
    if constexpr (COPY == SyrkCopy::rows) {  // one row a thread
      constexpr int kAtOnce = kSyrkThreads / Shape::kSlabRows, kGroup = Shape::kGroupRows;
      const int k = t % Shape::kSlabRows, first = t / Shape::kSlabRows;
      const typename Rows::Row row = rows_.row(r0 + k);
#pragma unroll
      for (int operand = 0; operand < Shape::kOperands; ++operand) {
        if (operand == 1 && diagonal) break;
        const int columns = static_cast<int>(min(d_ - (operand ? task_.j0 : task_.i0), int64_t{BT}));
        const int to = stage * Shape::kStage + operand * Shape::kOperand + k / kGroup * Shape::kGroupStride + k % kGroup;
#pragma unroll 4
        for (int e = 0; e < BT / kAtOnce; ++e) {
          const int slot = first + e * kAtOnce;
          const Column column = columns_[operand * BT + slot];
          const bool inside = k < rows && Shape::column_of_slot(slot) < columns && rows_.inside(row, column);
          const float* const from = rows_.address(row, column);
          copy_async(staging_ + (to + slot * Shape::kColumnStride), from, inside);
        }
      }
    } else {  // one column, or four, a thread
      constexpr int kAtOnce = kSyrkThreads * kWide / BT;
      const int i = t % (BT / kWide) * kWide, first = t / (BT / kWide);
      // Not row(r0 + k): among a kernel's arguments each use would read them.
      const typename Rows::Row from = rows_.row(r0 + first);
      const int64_t step = rows_.row(kAtOnce) - rows_.row(0);
#pragma unroll
      for (int operand = 0; operand < Shape::kOperands; ++operand) {
        if (operand == 1 && diagonal) break;
        const bool in_columns = (operand ? task_.j0 : task_.i0) + i < d_;
        Column column;
        if constexpr (kOwn) {
          column = own_[operand];
        } else {
          column = columns_[operand * BT + i];
        }
        const int to = stage * Shape::kStage + operand * Shape::kOperand + i;
#pragma unroll 4
        for (int e = 0; e < Shape::kSlabRows / kAtOnce; ++e) {
          const int k = first + e * kAtOnce;
          const bool inside = in_columns && k < rows;
          const float* const element = rows_.address(from + e * step, column);
          if constexpr (COPY == SyrkCopy::vectors) {
            copy_async_vector(staging_ + (to + k * Shape::kStride), element, inside);
          } else {
            copy_async(staging_ + (to + k * Shape::kStride), element, inside);
          }
        }
      }
    }
  }

 private:
  const Rows& rows_;
  const SyrkTask& task_;
  const int64_t d_;
  int64_t r0_;  // the next slab's first row
  const SharedArray<float> staging_;
  const SharedArray<Column> columns_;  // of all slots, where threads do not keep
  Column own_[Shape::kOperands];
};

}  // namespace ella

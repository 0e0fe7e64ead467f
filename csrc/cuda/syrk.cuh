// factor[g] += alpha * sum_r a a^T for the rows a = rows(r, g, :), the one computation behind both Kronecker accumulations. How
// an element of a row is found is the `Rows` policy's affair (strides, or a patch of an image):
//   using Row, Column; const T* address(Row, Column, bool& inside)
//   Row row(int64_t r), Column column(int64_t g, int64_t i): the parts of the address that depend on one of them
//   bool rows_adjacent(): neighbouring rows, not neighbouring columns, are neighbours in memory
//
// Only tiles on and above the diagonal are computed; an update is added at (i,j) and (j,i), and inside a diagonal tile (i,j)
// and (j,i) sum the same products in the same order, so a symmetric factor stays symmetric to the bit.
//
// Tiles. 256 threads hold SIDE x SIDE x (TM x TM) sums of a BT x BT tile; where the tile is small, several groups of threads
// take every GROUPS-th part of a slab's rows and are added in order at the end.
//   BT  16: 4x4 a thread, 16 groups    32: 4x4, 4 groups    64: 4x4, 1 group    128 (float): 8x8, 1 group
// 8x8 reads 4 vectors for 64 FMA, 4x4 2 for 16. A slab is 2048 (float) or 1024 (double) values of each operand, two stages,
// filled by asynchronous copies while the previous one is multiplied: about 33 KB.
// syrk_tile is what a tensor-core version replaces.
#pragma once

#include <algorithm>

#include "../common/device_memory.h"
#include "reduce.cuh"

namespace ella {

constexpr int kSyrkThreads = 256;

template <class T, int BT_>
struct SyrkTile {
  static constexpr int BT = BT_, TM = BT == 128 ? 8 : 4, SIDE = BT / TM;
  static constexpr int kGroups = kSyrkThreads / (SIDE * SIDE);
  static constexpr int kSlabRows = (sizeof(T) == 4 ? 2048 : 1024) / BT;
  static constexpr int kGroupRows = kSlabRows / kGroups;
  static constexpr int kStride = BT + 16 / sizeof(T);  // keeps 16-byte alignment, spreads copies down a column over banks
  static constexpr int kOperand = kSlabRows * kStride, kStage = 2 * kOperand;
  static_assert(SIDE * SIDE * kGroups == kSyrkThreads && kGroupRows * kGroups == kSlabRows, "the tile must divide evenly");
  static_assert(kGroups == 1 || kGroups * BT * BT <= 2 * kStage, "the groups' sums reuse the staging memory");

  template <class Column>
  static constexpr size_t shared_bytes() {
    return shared_size(2 * kStage * sizeof(T)) + shared_size(2 * BT * sizeof(Column));
  }
};

// The upper triangle of tiles, row by row: tile p of `side` x `side` lies at (row, column), row <= column.
__device__ __forceinline__ void triangle_position(int64_t p, int64_t side, int64_t& row, int64_t& column) {
  // Tiles before row i: i side - i (i - 1) / 2. Its root in floating point may be one off.
  const double half = static_cast<double>(side) + 0.5;
  row = static_cast<int64_t>(half - sqrt(max(half * half - 2.0 * static_cast<double>(p), 0.0)));
  while (row > 0 && row * side - row * (row - 1) / 2 > p) --row;
  while ((row + 1) * side - (row + 1) * row / 2 <= p) ++row;
  column = p - (row * side - row * (row - 1) / 2) + row;
}

// factor[i,j] += alpha * value, and its mirror image for a tile above the diagonal.
//   factor (d, d)
template <class T>
__device__ __forceinline__ void update_factor(T* factor, int64_t d, int64_t i, int64_t j, bool diagonal, T alpha, T value) {
  if (i >= d || j >= d) return;
  factor[i * d + j] = fma(alpha, value, factor[i * d + j]);
  if (!diagonal) factor[j * d + i] = fma(alpha, value, factor[j * d + i]);
}

// Leaves in sum[TM][TM] of group 0's threads the products of columns i0.. and j0.. over rows [r_begin, r_end).
template <class T, int BT, class Rows>
__device__ __forceinline__ void syrk_tile(const Rows& rows, int64_t g, int64_t d, int64_t i0, int64_t j0, int64_t r_begin,
                                          int64_t r_end, SharedArray<T> staging, SharedArray<typename Rows::Column> columns,
                                          T (&sum)[SyrkTile<T, BT>::TM][SyrkTile<T, BT>::TM]) {
  using Shape = SyrkTile<T, BT>;
  constexpr int TM = Shape::TM, SIDE = Shape::SIDE;
  const int t = threadIdx.x;
  const bool diagonal = i0 == j0;
  for (int i = t; i < 2 * BT; i += kSyrkThreads) {
    const int64_t column = i < BT ? i0 + i : j0 + i - BT;
    columns[i] = rows.column(g, min(column, d - 1));
  }
  __syncthreads();

  // Thread t copies elements (row, column) whose fast index is the one that is adjacent in memory.
  const bool rows_adjacent = rows.rows_adjacent();
  const int copies = Shape::kSlabRows * BT / kSyrkThreads;
  const auto load = [&](int stage, int64_t r0) {
    if (rows_adjacent) {  // one row a thread
      const int k = t % Shape::kSlabRows;
      const bool in_rows = r0 + k < r_end;
      const typename Rows::Row row = rows.row(min(r0 + k, r_end - 1));
      for (int e = 0; e < copies; ++e) {
        const int i = t / Shape::kSlabRows + e * (kSyrkThreads / Shape::kSlabRows);
        for (int operand = 0; operand < (diagonal ? 1 : 2); ++operand) {
          bool inside = in_rows && (operand ? j0 : i0) + i < d;
          const typename Rows::Column column = columns[operand * BT + i];
          const T* const from = rows.address(row, column, inside);
          copy_async(staging + (stage * Shape::kStage + operand * Shape::kOperand + k * Shape::kStride + i), from, inside);
        }
      }
    } else {  // one column a thread
      const int i = t % BT;
      for (int operand = 0; operand < (diagonal ? 1 : 2); ++operand) {
        const bool in_columns = (operand ? j0 : i0) + i < d;
        const typename Rows::Column column = columns[operand * BT + i];
        for (int e = 0; e < copies; ++e) {
          const int k = t / BT + e * (kSyrkThreads / BT);
          bool inside = in_columns && r0 + k < r_end;
          const T* const from = rows.address(rows.row(min(r0 + k, r_end - 1)), column, inside);
          copy_async(staging + (stage * Shape::kStage + operand * Shape::kOperand + k * Shape::kStride + i), from, inside);
        }
      }
    }
    copy_async_commit();
  };

  const int group = t / (SIDE * SIDE), tx = t % SIDE, ty = t / SIDE % SIDE;
  const int second = diagonal ? 0 : Shape::kOperand;
#pragma unroll
  for (int i = 0; i < TM; ++i) {
#pragma unroll
    for (int j = 0; j < TM; ++j) sum[i][j] = T(0);
  }
  const int64_t slabs = ceil_div(r_end - r_begin, static_cast<int64_t>(Shape::kSlabRows));
  load(0, r_begin);
  for (int64_t slab = 0; slab < slabs; ++slab) {
    const int stage = slab & 1;
    if (slab + 1 < slabs) {
      load(stage ^ 1, r_begin + (slab + 1) * Shape::kSlabRows);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();
    const SharedArray<T> slab_rows = staging + (stage * Shape::kStage + group * Shape::kGroupRows * Shape::kStride);
#pragma unroll
    for (int k = 0; k < Shape::kGroupRows; ++k) {
      // A thread's columns come in fours, SIDE * 4 apart: a quarter warp reads 128 neighbouring bytes.
      T a[TM], b[TM];
#pragma unroll
      for (int i = 0; i < TM; i += 4) {
        T four[4];
        load_vector(four, slab_rows + (k * Shape::kStride + i * SIDE + 4 * ty));
        a[i] = four[0], a[i + 1] = four[1], a[i + 2] = four[2], a[i + 3] = four[3];
        load_vector(four, slab_rows + (second + k * Shape::kStride + i * SIDE + 4 * tx));
        b[i] = four[0], b[i + 1] = four[1], b[i + 2] = four[2], b[i + 3] = four[3];
      }
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TM; ++j) sum[i][j] = fma(a[i], b[j], sum[i][j]);
      }
    }
    __syncthreads();  // before the next copies overwrite this stage
  }

  if constexpr (Shape::kGroups > 1) {
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
      for (int j = 0; j < TM; ++j) staging[group * BT * BT + (4 * ty + i) * BT + 4 * tx + j] = sum[i][j];
    }
    __syncthreads();
    if (group == 0) {
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TM; ++j) {
          for (int other = 1; other < Shape::kGroups; ++other) {
            sum[i][j] += staging[other * BT * BT + (4 * ty + i) * BT + 4 * tx + j];
          }
        }
      }
    }
  }
}

// Block: (share of the rows, tile, g), share fastest. With one share the factor is updated here, with more each block leaves
// its tile in a workspace for syrk_finish_kernel.
//   factor (groups, d, d), parts (shares, groups, tiles, BT, BT) or null
template <class T, int BT, class Rows>
__global__ void __launch_bounds__(kSyrkThreads) syrk_kernel(Rows rows, T* factor, T* __restrict__ parts, int64_t d,
                                                            int64_t count, int64_t share_rows, int64_t shares, T alpha) {
  using Shape = SyrkTile<T, BT>;
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<T> staging = memory.array<T>(2 * Shape::kStage);
  const SharedArray<typename Rows::Column> columns = memory.array<typename Rows::Column>(2 * BT);
  const int64_t side = ceil_div(d, int64_t{BT}), tiles = side * (side + 1) / 2;
  const int64_t share = blockIdx.x % shares, tile = blockIdx.x / shares % tiles, g = blockIdx.x / shares / tiles;
  int64_t row, column;
  triangle_position(tile, side, row, column);
  T sum[Shape::TM][Shape::TM];
  syrk_tile<T, BT>(rows, g, d, row * BT, column * BT, share * share_rows, min((share + 1) * share_rows, count), staging,
                   columns, sum);
  const int t = threadIdx.x, tx = t % Shape::SIDE, ty = t / Shape::SIDE % Shape::SIDE;
  if (t >= Shape::SIDE * Shape::SIDE) return;
  T* const part = parts == nullptr ? nullptr : parts + (share * (gridDim.x / shares) + g * tiles + tile) * (BT * BT);
#pragma unroll
  for (int i = 0; i < Shape::TM; ++i) {
#pragma unroll
    for (int j = 0; j < Shape::TM; ++j) {
      const int in_i = i / 4 * (4 * Shape::SIDE) + 4 * ty + i % 4, in_j = j / 4 * (4 * Shape::SIDE) + 4 * tx + j % 4;
      if (part != nullptr) {
        part[in_i * BT + in_j] = sum[i][j];
      } else {
        update_factor(factor + g * d * d, d, row * BT + in_i, column * BT + in_j, row == column, alpha, sum[i][j]);
      }
    }
  }
}

// Adds the shares of every tile in order and updates the factor. One thread per element of a tile, 256 a block.
//   factor (groups, d, d), parts (shares, groups, tiles, BT, BT)
template <class T, int BT>
__global__ void __launch_bounds__(256)
    syrk_finish_kernel(T* factor, const T* __restrict__ parts, int64_t groups, int64_t d, int64_t shares, T alpha) {
  const int64_t side = ceil_div(d, int64_t{BT}), tiles = side * (side + 1) / 2, count = groups * tiles * (BT * BT);
  const int64_t at = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (at >= count) return;
  T total = parts[at];
  for (int64_t share = 1; share < shares; ++share) total += parts[share * count + at];
  const int64_t tile = at / (BT * BT) % tiles, g = at / (BT * BT) / tiles;
  int64_t row, column;
  triangle_position(tile, side, row, column);
  update_factor(factor + g * d * d, d, row * BT + at / BT % BT, column * BT + at % BT, row == column, alpha, total);
}

template <class T, int BT, class Rows>
void syrk_with_tile(const Device& device, const char* name, const Rows& rows, const Tensor& factor, int64_t groups, int64_t d,
                    int64_t count, double alpha) {
  using Shape = SyrkTile<T, BT>;
  const int64_t side = ceil_div(d, int64_t{BT}), blocks = groups * side * (side + 1) / 2;
  // Rows are shared out until every multiprocessor has two blocks, but not below four slabs a share.
  const int64_t slabs = ceil_div(count, static_cast<int64_t>(Shape::kSlabRows));
  const int64_t wanted = std::clamp<int64_t>(2 * device.multiprocessors() / blocks, 1, ceil_div(slabs, int64_t{4}));
  const int64_t share_rows = ceil_div(slabs, wanted) * Shape::kSlabRows, shares = ceil_div(count, share_rows);
  T* const data = factor.mutable_data_ptr<T>();
  const size_t shared = Shape::template shared_bytes<typename Rows::Column>();
  std::optional<Tensor> parts;
  if (shares > 1) parts = device_empty(factor, {shares, blocks, BT * BT});
  launch(device, name, syrk_kernel<T, BT, Rows>, blocks * shares, kSyrkThreads, shared, rows, data,
         parts ? parts->mutable_data_ptr<T>() : nullptr, d, count, share_rows, shares, alpha);
  if (parts) {
    launch(device, name, syrk_finish_kernel<T, BT>, ceil_div(blocks * (BT * BT), int64_t{256}), 256, 0, data,
           parts->const_data_ptr<T>(), groups, d, shares, alpha);
  }
}

// factor (groups, d, d) += alpha * sum over `count` rows; `count` and the factor are not empty.
template <class T, class Rows>
void syrk(const Device& device, const char* name, const Rows& rows, const Tensor& factor, int64_t groups, int64_t d,
          int64_t count, double alpha) {
  if (d <= 16) {
    syrk_with_tile<T, 16>(device, name, rows, factor, groups, d, count, alpha);
  } else if (d <= 32) {
    syrk_with_tile<T, 32>(device, name, rows, factor, groups, d, count, alpha);
  } else if (sizeof(T) == 8 || d <= 96) {
    syrk_with_tile<T, 64>(device, name, rows, factor, groups, d, count, alpha);
  } else if constexpr (sizeof(T) == 4) {
    syrk_with_tile<T, 128>(device, name, rows, factor, groups, d, count, alpha);
  }
}

}  // namespace ella

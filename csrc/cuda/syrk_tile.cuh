// What both symmetric products (syrk_scalar.cuh, syrk_tensor.cuh) share: the triangle of tiles, the rows shared out over
// blocks, the update of the factor.
//
// Only tiles on and above the diagonal are computed, and of a diagonal tile only what lies on and above the diagonal counts:
// an update is added at (i,j) and at (j,i), so a symmetric factor stays symmetric to the bit.
#pragma once

#include <algorithm>

#include "../common/device_memory.h"
#include "reduce.cuh"

namespace ella {

constexpr int kSyrkThreads = 256;

// The upper triangle of tiles, row by row: tile p of `side` x `side` lies at (row, column), row <= column.
__device__ __forceinline__ void triangle_position(int64_t p, int64_t side, int64_t& row, int64_t& column) {
  // Tiles before row i: i side - i (i - 1) / 2. Its root in floating point may be one off.
  const double half = static_cast<double>(side) + 0.5;
  row = static_cast<int64_t>(half - sqrt(max(half * half - 2.0 * static_cast<double>(p), 0.0)));
  while (row > 0 && row * side - row * (row - 1) / 2 > p) --row;
  while ((row + 1) * side - (row + 1) * row / 2 <= p) ++row;
  column = p - (row * side - row * (row - 1) / 2) + row;
}

// What a thread block computes: columns i0.. and j0.. of block g over the rows [begin, end). Block: (share of the rows, tile,
// g), share fastest.
struct SyrkPlace {
  int64_t g, i0, j0, begin, end;
  int64_t part;  // its tile's place in the workspace (shares, groups, tiles)

  __device__ __forceinline__ SyrkPlace(int BT, int64_t d, int64_t count, int64_t share_rows, int64_t shares) {
    const int64_t side = ceil_div(d, static_cast<int64_t>(BT)), tiles = side * (side + 1) / 2;
    const int64_t share = blockIdx.x % shares, tile = blockIdx.x / shares % tiles;
    g = blockIdx.x / shares / tiles;
    triangle_position(tile, side, i0, j0);
    i0 *= BT, j0 *= BT;
    begin = share * share_rows, end = min(begin + share_rows, count);
    part = share * (gridDim.x / shares) + g * tiles + tile;
  }
};

// factor[i,j] += alpha * value and, off the diagonal, its mirror image; nothing outside the factor and below the diagonal.
//   factor (d, d)
template <class T>
__device__ __forceinline__ void update_factor(T* factor, int64_t d, int64_t i, int64_t j, T alpha, T value) {
  if (i > j || j >= d) return;
  factor[i * d + j] = fma(alpha, value, factor[i * d + j]);
  if (i != j) factor[j * d + i] = fma(alpha, value, factor[j * d + i]);
}

// Squares of a tile, for which a thread block adds the shares up: a row of 32 floats is 128 bytes of a factor.
template <int BT>
struct SyrkFinishSquare {
  static constexpr int kThreads = 256;
  static constexpr int kSide = BT < 32 ? BT : 32, kAcross = BT / kSide;
  static constexpr int kRows = kThreads / kSide, kEach = kSide / kRows;  // rows at once; rows of a thread
  static constexpr int kStride = kSide + 1;                              // its columns too lie in different banks
  static_assert(kSide * kAcross == BT && kRows * kEach == kSide, "whole squares, whole rows");

  template <class T>
  static constexpr size_t shared_bytes() {
    return shared_size(kSide * kStride * sizeof(T));
  }
};

// Adds the shares of every tile in order and updates the factor, its rows and those of its mirror image by whole sectors.
// Block: (square of a tile, tile, g), square fastest; those below the diagonal have nothing to do.
//   factor (groups, d, d), parts (shares, groups, tiles, BT, BT)
template <class T, int BT>
__global__ void __launch_bounds__(SyrkFinishSquare<BT>::kThreads)
    syrk_finish_kernel(T* factor, const T* __restrict__ parts, int64_t groups, int64_t d, int64_t shares, T alpha) {
  using Shape = SyrkFinishSquare<BT>;
  constexpr int kSquares = Shape::kAcross * Shape::kAcross;
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<T> square = memory.array<T>(Shape::kSide * Shape::kStride);
  const int64_t side = ceil_div(d, int64_t{BT}), tiles = side * (side + 1) / 2, count = groups * tiles * (BT * BT);
  const int in_tile = blockIdx.x % kSquares, down = in_tile / Shape::kAcross * Shape::kSide,
            across = in_tile % Shape::kAcross * Shape::kSide;
  const int64_t tile = blockIdx.x / kSquares % tiles, g = blockIdx.x / kSquares / tiles;
  int64_t i0, j0;
  triangle_position(tile, side, i0, j0);
  i0 = i0 * BT + down, j0 = j0 * BT + across;
  if (j0 < i0 || i0 >= d || j0 >= d) return;

  const int column = threadIdx.x % Shape::kSide, first = threadIdx.x / Shape::kSide;
  const T* from = parts + ((g * tiles + tile) * BT + down + first) * BT + across + column;
  T total[Shape::kEach];
#pragma unroll
  for (int e = 0; e < Shape::kEach; ++e) total[e] = from[e * Shape::kRows * BT];
#pragma unroll 8  // reads are on their way together: where tiles are few, these waits are all that a block does
  for (int64_t share = 1; share < shares; ++share) {
    from += count;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) total[e] += from[e * Shape::kRows * BT];
  }

  factor += g * d * d;
#pragma unroll
  for (int e = 0; e < Shape::kEach; ++e) {
    const int row = first + e * Shape::kRows;
    square[row * Shape::kStride + column] = total[e];
    const int64_t i = i0 + row, j = j0 + column;
    if (i <= j && j < d) factor[i * d + j] = fma(alpha, total[e], factor[i * d + j]);
  }
  __syncthreads();  // the square is there for its mirror image
#pragma unroll
  for (int e = 0; e < Shape::kEach; ++e) {
    const int row = first + e * Shape::kRows;  // of the mirror image
    const int64_t i = i0 + column, j = j0 + row;
    if (i < j && j < d) factor[j * d + i] = fma(alpha, square[column * Shape::kStride + row], factor[j * d + i]);
  }
}

// Into how many shares to cut the rows so that `blocks` of each fill the device's `slots` in the fewest rounds for the work; a
// larger number has to save a tenth, for every share costs a workspace to write and add.
inline int64_t syrk_shares(int64_t blocks, int64_t slots, int64_t most) {
  const auto rounds = [&](int64_t shares) {  // of one share's length, in units of all rows
    return static_cast<double>(ceil_div(blocks * shares, slots)) / static_cast<double>(shares);
  };
  int64_t best = 1;
  for (int64_t shares = 2; shares <= std::min(most, 2 * slots / blocks); ++shares) {
    if (rounds(shares) < 0.9 * rounds(best)) best = shares;
  }
  return best;
}

// Launches `kernel`, whose tiles are Shape's, for all blocks and shares of the rows, and adds the shares up.
template <class T, class Shape, class Rows>
void launch_syrk(const Device& device, const char* name, void (*kernel)(Rows, T*, T*, int64_t, int64_t, int64_t, int64_t, T),
                 const Rows& rows, const Tensor& factor, int64_t groups, int64_t d, int64_t count, double alpha) {
  constexpr int BT = Shape::BT;
  const int64_t side = ceil_div(d, int64_t{BT}), blocks = groups * side * (side + 1) / 2;
  const int64_t slabs = ceil_div(count, static_cast<int64_t>(Shape::kSlabRows));
  const int64_t most = ceil_div(slabs, int64_t{4});  // at least four slabs a share
  const int64_t wanted = syrk_shares(blocks, Shape::kBlocks * device.multiprocessors(), most);
  const int64_t share_rows = ceil_div(slabs, wanted) * Shape::kSlabRows, shares = ceil_div(count, share_rows);
  T* const data = factor.mutable_data_ptr<T>();
  std::optional<Tensor> parts;
  if (shares > 1) parts = device_empty(factor, {shares, blocks, BT * BT});
  launch(device, name, kernel, blocks * shares, kSyrkThreads, Shape::template shared_bytes<typename Rows::Column>(), rows, data,
         parts ? parts->mutable_data_ptr<T>() : nullptr, d, count, share_rows, shares, alpha);
  if (parts) {
    using Square = SyrkFinishSquare<BT>;
    launch(device, name, syrk_finish_kernel<T, BT>, blocks * Square::kAcross * Square::kAcross, Square::kThreads,
           Square::template shared_bytes<T>(), data, parts->const_data_ptr<T>(), groups, d, shares, alpha);
  }
}

}  // namespace ella

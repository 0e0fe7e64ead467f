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
  update_factor(factor + g * d * d, d, row * BT + at / BT % BT, column * BT + at % BT, alpha, total);
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
    launch(device, name, syrk_finish_kernel<T, BT>, ceil_div(blocks * (BT * BT), int64_t{256}), 256, 0, data,
           parts->const_data_ptr<T>(), groups, d, shares, alpha);
  }
}

}  // namespace ella

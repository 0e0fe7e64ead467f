// What the three symmetric products (syrk_scalar.cuh, syrk_tensor.cuh, syrk_warpgroup.cuh) share: the triangle of tiles, the
// rows shared out over blocks, the update of the factor.
//
// Only tiles on and above the diagonal are computed, and of a diagonal tile only what lies on and above the diagonal counts:
// an update is added at (i,j) and at (j,i), so a symmetric factor stays symmetric to the bit.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/device_memory.h"
#include "cuda/reduce.cuh"

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

// What a thread block computes: columns i0.. and j0.. of block g over the rows [begin, end). Block: (split of the rows, tile,
// g), split fastest.
struct SyrkTask {
  int64_t g, i0, j0, begin, end;
  int64_t part;  // its tile's place in the workspace (splits, groups, tiles)

  // Of the rows first..last.
  __device__ __forceinline__ SyrkTask(int BT, int64_t d, int64_t first, int64_t last, int64_t split_rows, int64_t splits) {
    const int64_t side = ceil_div(d, static_cast<int64_t>(BT)), tiles = side * (side + 1) / 2;
    const int64_t split = blockIdx.x % splits, tile = blockIdx.x / splits % tiles;
    g = blockIdx.x / splits / tiles;
    triangle_position(tile, side, i0, j0);
    i0 *= BT, j0 *= BT;
    begin = first + split * split_rows, end = min(begin + split_rows, last);
    part = split * (gridDim.x / splits) + g * tiles + tile;
  }

  __device__ __forceinline__ int64_t slabs(int64_t rows) const { return ceil_div(end - begin, rows); }
};

// What sums in T join: blocks of T, or of double where `wide` is not null. One kernel serves both, for it is the last few of
// its instructions that differ.
//   own, wide (groups, d, d)
template <class T>
struct SyrkFactor {
  T* own;
  double* wide;

  SyrkFactor(const Tensor& factor, bool widens)
      : own(widens ? nullptr : factor.mutable_data_ptr<T>()), wide(widens ? factor.mutable_data_ptr<double>() : nullptr) {}
};

// factor[i,j] += alpha * value and, off the diagonal, its mirror image; nothing outside the factor and below the diagonal.
//   factor (d, d)
template <class T>
__device__ __forceinline__ void update_block(T* factor, int64_t d, int64_t i, int64_t j, T alpha, T value) {
  if (i > j || j >= d) return;
  factor[i * d + j] = fma(alpha, value, factor[i * d + j]);
  if (i != j) factor[j * d + i] = fma(alpha, value, factor[j * d + i]);
}

// The same for block g.
template <class T>
__device__ __forceinline__ void update_factor(const SyrkFactor<T>& factor, int64_t g, int64_t d, int64_t i, int64_t j,
                                              double alpha, T value) {
  if constexpr (sizeof(T) < sizeof(double)) {
    if (factor.wide != nullptr) {
      update_block(factor.wide + g * d * d, d, i, j, alpha, static_cast<double>(value));
      return;
    }
  }
  update_block(factor.own + g * d * d, d, i, j, static_cast<T>(alpha), value);
}

// factor[i0 + r, j0 + c] += alpha * square[r, c] and, off the diagonal, the mirror image, for a square of SIDE rows in shared
// memory; nothing outside the factor and below the diagonal. Neighbouring threads update neighbouring elements, of the mirror
// image too, and each reads a batch of them before it writes the first: compilers keep the order of what may be the same
// memory, and a thread would wait for each.
//   factor (d, d); stride: from row to row of the square, odd for its columns too to lie in different banks
template <int SIDE, int THREADS, class Total, class T>
__device__ __forceinline__ void update_square(Total* factor, int64_t d, int64_t i0, int64_t j0, Total alpha,
                                              SharedArray<T> square, int stride) {
  constexpr int kRows = THREADS / SIDE, kEach = SIDE / kRows;  // rows at once; rows of a thread
  constexpr int kBatch = kEach < 8 ? kEach : 8;                // of them: 16 elements are under way
  static_assert(kRows * SIDE == THREADS && kBatch * (kEach / kBatch) * kRows == SIDE, "whole rows, whole batches");
  const int column = threadIdx.x % SIDE, first = threadIdx.x / SIDE;
#pragma unroll 1
  for (int batch = 0; batch < kEach; batch += kBatch) {
    Total upper[kBatch], lower[kBatch];
#pragma unroll
    for (int e = 0; e < kBatch; ++e) {
      const int row = first + (batch + e) * kRows;
      const int64_t i = i0 + row, j = j0 + column, mirror_i = i0 + column, mirror_j = j0 + row;
      upper[e] = i <= j && j < d ? factor[i * d + j] : Total(0);
      lower[e] = mirror_i < mirror_j && mirror_j < d ? factor[mirror_j * d + mirror_i] : Total(0);
    }
#pragma unroll
    for (int e = 0; e < kBatch; ++e) {
      const int row = first + (batch + e) * kRows;
      const int64_t i = i0 + row, j = j0 + column, mirror_i = i0 + column, mirror_j = j0 + row;
      const Total here = static_cast<Total>(square[row * stride + column]);
      const Total mirror = static_cast<Total>(square[column * stride + row]);
      if (i <= j && j < d) factor[i * d + j] = fma(alpha, here, upper[e]);
      if (mirror_i < mirror_j && mirror_j < d) factor[mirror_j * d + mirror_i] = fma(alpha, mirror, lower[e]);
    }
  }
}

// Squares of a tile, for which a thread block adds the splits up: a row of 32 floats is 128 bytes of a factor.
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

// Adds the splits of every tile in order, in the factor's type, and updates it, its rows and those of its mirror image by whole
// sectors. Block: (square of a tile, tile, g), square fastest; those below the diagonal have nothing to do.
//   factor (groups, d, d), parts (splits, groups, tiles, BT, BT)
template <class T, class Total, int BT>
__global__ void __launch_bounds__(SyrkFinishSquare<BT>::kThreads)
    syrk_finish_kernel(Total* factor, const T* __restrict__ parts, int64_t groups, int64_t d, int64_t splits, Total alpha) {
  using Shape = SyrkFinishSquare<BT>;
  constexpr int kSquares = Shape::kAcross * Shape::kAcross;
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<Total> square = memory.array<Total>(Shape::kSide * Shape::kStride);
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
  Total total[Shape::kEach];
#pragma unroll
  for (int e = 0; e < Shape::kEach; ++e) total[e] = from[e * Shape::kRows * BT];
#pragma unroll 8  // reads are on their way together: where tiles are few, these waits are all that a block does
  for (int64_t split = 1; split < splits; ++split) {
    from += count;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) total[e] += from[e * Shape::kRows * BT];
  }

#pragma unroll
  for (int e = 0; e < Shape::kEach; ++e) square[(first + e * Shape::kRows) * Shape::kStride + column] = total[e];
  __syncthreads();  // the square is there for all
  update_square<Shape::kSide, Shape::kThreads>(factor + g * d * d, d, i0, j0, alpha, square, Shape::kStride);
}

// Into how many splits to cut the rows so that `blocks` of each fill the device's `slots` in the fewest rounds for the work; a
// larger number has to save a tenth, for every split costs a workspace to write and add.
inline int64_t syrk_splits(int64_t blocks, int64_t slots, int64_t max_count) {
  const auto rounds = [&](int64_t splits) {  // of one split's length, in units of all rows
    return static_cast<double>(ceil_div(blocks * splits, slots)) / static_cast<double>(splits);
  };
  int64_t best = 1;
  for (int64_t splits = 2; splits <= std::min(max_count, 2 * slots / blocks); ++splits) {
    if (rounds(splits) < 0.9 * rounds(best)) best = splits;
  }
  return best;
}

// Rows of a split whose sums in float join a factor in double: 64 sums of 16 rows on tensor cores.
constexpr int64_t kSyrkShortRows = 1024;

// Launches `kernel`, whose tiles are Shape's, for all blocks and splits of the rows, and adds the splits up: `split` of them, 0
// for as many as fill the device, but of a slab at least. A factor wider than T gets splits of no more than kSyrkShortRows
// rows: the rest of the rows is for launches to come.
template <class T, class Shape, class Rows>
void launch_syrk(const Device& device, const char* name,
                 void (*kernel)(Rows, SyrkFactor<T>, T*, int64_t, int64_t, int64_t, int64_t, int64_t, double), const Rows& rows,
                 const Tensor& factor, int64_t groups, int64_t d, int64_t count, double alpha, int64_t split) {
  constexpr int BT = Shape::BT;
  constexpr int64_t kSlab = Shape::kSlabRows;
  static_assert(kSyrkShortRows % kSlab == 0, "whole slabs");
  const bool widens = sizeof(T) < sizeof(double) && factor.scalar_type() == ScalarType::Double;
  const SyrkFactor<T> target(factor, widens);
  const int64_t side = ceil_div(d, int64_t{BT}), blocks = groups * side * (side + 1) / 2;
  const int64_t max_count = ceil_div(ceil_div(count, kSlab), int64_t{4});  // at least four slabs a split
  const int64_t wanted = split ? split : syrk_splits(blocks, Shape::kBlocks * device.multiprocessors(), max_count);
  const int64_t launches = widens ? ceil_div(count, wanted * kSyrkShortRows) : 1;
  const int64_t each = ceil_div(ceil_div(count, launches), kSlab), split_rows = ceil_div(each, wanted) * kSlab;
  std::optional<Tensor> parts;  // of one launch after the other
  for (int64_t first = 0; first < count; first += each * kSlab) {
    const int64_t last = std::min(first + each * kSlab, count), splits = ceil_div(last - first, split_rows);
    if (splits > 1 && !parts) {
      parts = device_empty(factor, {splits, blocks, BT * BT}, sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float);
    }
    launch(device, name, kernel, blocks * splits, kSyrkThreads, Shape::template shared_bytes<typename Rows::Column>(), rows,
           target, splits > 1 ? parts->mutable_data_ptr<T>() : nullptr, d, first, last, split_rows, splits, alpha);
    if (splits == 1) continue;
    const auto finish = [&](auto* total) {
      using Square = SyrkFinishSquare<BT>;
      using Total = std::remove_pointer_t<decltype(total)>;
      launch(device, name, syrk_finish_kernel<T, Total, BT>, blocks * Square::kAcross * Square::kAcross, Square::kThreads,
             Square::template shared_bytes<Total>(), total, parts->const_data_ptr<T>(), groups, d, splits,
             static_cast<Total>(alpha));
    };
    if (widens) {
      finish(target.wide);
    } else {
      finish(target.own);
    }
  }
}

}  // namespace ella

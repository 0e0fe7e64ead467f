// What the three symmetric products (syrk_scalar.cuh, syrk_tensor.cuh, syrk_warpgroup.cuh) share: the triangle of tiles, the
// rows shared out over blocks, the update of the factor.
//
// Only tiles on and above the diagonal are computed, and of a diagonal tile only what lies on and above the diagonal counts:
// an update is added at (i,j) and at (j,i), so a symmetric factor stays symmetric to the bit.
#pragma once

#include <algorithm>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

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

// One of the sums of a launch, factor[g] += alpha * sum over its rows first..last, in `splits` of split_rows: with one split
// the kernel updates the factor, with more each block leaves its tile in a workspace for syrk_finish_kernel.
//   factor (groups, d, d), of double where `wide`, else of the products' type
struct SyrkSum {
  void* factor;
  double alpha;
  int64_t d, first, last, split_rows;
  int64_t part;       // of its first tile in the workspace, where it lies as (splits, groups, tiles)
  int splits, tiles;  // of all groups
  int first_block;    // of the launch's: (split of the rows, tile, g), split fastest
  int first_tile;     // of those that have splits, in all of the launch
  bool wide;

  template <class T>
  __device__ __forceinline__ T* block(int64_t g) const {
    return static_cast<T*>(factor) + g * d * d;
  }
};

// The sums of a launch, by value: of a graph that replays it they are a part. They and what finds their rows fill most of the
// 4 KB that arguments may have everywhere.
constexpr int kSyrkSums = 20;

struct SyrkSums {
  SyrkSum sum[kSyrkSums];

  // The last one whose `first` is no later.
  __device__ __forceinline__ int find(unsigned at, int SyrkSum::* first) const {
    int own = 0;
#pragma unroll
    for (int s = 1; s < kSyrkSums; ++s) own = sum[s].*first <= static_cast<int>(at) ? s : own;
    return own;
  }
};

template <class Rows>
struct SyrkRowsOf {
  Rows rows[kSyrkSums];
  static_assert(sizeof(rows) + sizeof(SyrkSums) <= 4000, "arguments of a kernel may have 4 KB");
};

// What a thread block computes: columns i0.. and j0.. of block g over the rows [begin, end).
struct SyrkTask {
  int64_t g, i0, j0, begin, end;
  int64_t part;  // its tile's place in the workspace

  __device__ __forceinline__ SyrkTask(int BT, const SyrkSum& sum) {
    const int64_t side = ceil_div(sum.d, static_cast<int64_t>(BT)), tiles = side * (side + 1) / 2;
    const int block = static_cast<int>(blockIdx.x) - sum.first_block, split = block % sum.splits, place = block / sum.splits;
    g = place / tiles;
    triangle_position(place - g * tiles, side, i0, j0);
    i0 *= BT, j0 *= BT;
    begin = sum.first + split * sum.split_rows, end = min(begin + sum.split_rows, sum.last);
    part = sum.part + static_cast<int64_t>(split) * sum.tiles + place;
  }

  __device__ __forceinline__ int64_t slabs(int64_t rows) const { return ceil_div(end - begin, rows); }
};

// factor[i,j] += alpha * value and, off the diagonal, its mirror image; nothing outside the factor and below the diagonal.
//   factor (d, d)
template <class T>
__device__ __forceinline__ void update_block(T* factor, int64_t d, int64_t i, int64_t j, T alpha, T value) {
  if (i > j || j >= d) return;
  factor[i * d + j] = fma(alpha, value, factor[i * d + j]);
  if (i != j) factor[j * d + i] = fma(alpha, value, factor[j * d + i]);
}

// The same for block g of a sum's factor.
template <class T>
__device__ __forceinline__ void update_factor(const SyrkSum& sum, int64_t g, int64_t i, int64_t j, T value) {
  if constexpr (sizeof(T) < sizeof(double)) {
    if (sum.wide) {
      update_block(sum.block<double>(g), sum.d, i, j, sum.alpha, static_cast<double>(value));
      return;
    }
  }
  update_block(sum.block<T>(g), sum.d, i, j, static_cast<T>(sum.alpha), value);
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
// sectors. Blocks of a sum: (square of a tile, tile, g), square fastest; those below the diagonal have nothing to do.
//   parts: of the whole launch, (tiles, BT, BT)
template <class T, class Total, int BT>
__global__ void __launch_bounds__(SyrkFinishSquare<BT>::kThreads, 4)
    syrk_finish_kernel(const __grid_constant__ SyrkSums sums, const T* __restrict__ parts) {
  using Shape = SyrkFinishSquare<BT>;
  constexpr int kSquares = Shape::kAcross * Shape::kAcross;
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<Total> square = memory.array<Total>(Shape::kSide * Shape::kStride);
  const int in_tile = blockIdx.x % kSquares, at = blockIdx.x / kSquares;
  const SyrkSum& sum = sums.sum[sums.find(at, &SyrkSum::first_tile)];
  const int64_t d = sum.d, side = ceil_div(d, int64_t{BT}), tiles = side * (side + 1) / 2, place = at - sum.first_tile;
  const int down = in_tile / Shape::kAcross * Shape::kSide, across = in_tile % Shape::kAcross * Shape::kSide;
  const int64_t g = place / tiles;
  int64_t i0, j0;
  triangle_position(place - g * tiles, side, i0, j0);
  i0 = i0 * BT + down, j0 = j0 * BT + across;
  if (j0 < i0 || i0 >= d || j0 >= d) return;

  const int column = threadIdx.x % Shape::kSide, first = threadIdx.x / Shape::kSide;
  const int64_t step = static_cast<int64_t>(sum.tiles) * (BT * BT);
  const T* from = parts + ((sum.part + place) * BT + down + first) * BT + across + column;
  Total total[Shape::kEach];
#pragma unroll
  for (int e = 0; e < Shape::kEach; ++e) total[e] = from[e * Shape::kRows * BT];
#pragma unroll 8  // reads are on their way together: where tiles are few, these waits are all that a block does
  for (int split = 1; split < sum.splits; ++split) {
    from += step;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) total[e] += from[e * Shape::kRows * BT];
  }

#pragma unroll
  for (int e = 0; e < Shape::kEach; ++e) square[(first + e * Shape::kRows) * Shape::kStride + column] = total[e];
  __syncthreads();  // the square is there for all
  update_square<Shape::kSide, Shape::kThreads>(sum.block<Total>(g), d, i0, j0, static_cast<Total>(sum.alpha), square,
                                               Shape::kStride);
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

#ifndef ELLA_MAX_PART_BYTES
#define ELLA_MAX_PART_BYTES (1 << 28)
#endif
constexpr int64_t kMaxPartBytes = ELLA_MAX_PART_BYTES;  // of a launch's workspace, unless a single split has more

// What a launcher is asked for: factor (groups, d, d), of T or double, += alpha * sum over `count` rows; none is 0. `tf32`:
// tensor cores may round the rows to TF32, which changes nothing where they are TF32 numbers already.
template <class Rows>
struct SyrkRequest {
  Rows rows;
  Tensor factor;
  int64_t groups, d, count;
  double alpha;
  bool tf32;
};

// Launches `kernel`, whose tiles are Shape's, for as many of the requests at a time as fit a table and the workspace, and adds
// the splits up. Each is cut as if it were alone: `split` times, 0 for as often as fills the device, but with a slab at least
// and, where the factor is wider than T, no more than kSyrkShortRows rows each.
template <class T, class Shape, class Rows>
void launch_syrk(const Device& device, const char* name, void (*kernel)(SyrkSums, SyrkRowsOf<Rows>, T*), bool wide,
                 const std::vector<SyrkRequest<Rows>>& requests, int64_t split) {
  constexpr int BT = Shape::BT;
  constexpr int64_t kSlab = Shape::kSlabRows, kMost = kMaxPartBytes / (BT * BT * sizeof(T));
  static_assert(kSyrkShortRows % kSlab == 0, "whole slabs");
  SyrkSums sums{};
  SyrkRowsOf<Rows> rows{};
  int count = 0;
  int64_t blocks = 0, tiles = 0, parts = 0;
  const auto run = [&] {
    for (int s = count; s < kSyrkSums; ++s) sums.sum[s].first_block = sums.sum[s].first_tile = std::numeric_limits<int>::max();
    const Tensor workspace = device_empty(requests.front().factor, {parts, BT * BT}, kScalarType<T>);
    T* const memory = workspace.template mutable_data_ptr<T>();
    launch(device, name, kernel, blocks, kSyrkThreads, Shape::template shared_bytes<typename Rows::Column>(), sums, rows,
           memory);
    const auto finish = [&](auto zero) {
      using Total = decltype(zero);
      using Square = SyrkFinishSquare<BT>;
      launch(device, name, syrk_finish_kernel<T, Total, BT>, tiles * Square::kAcross * Square::kAcross, Square::kThreads,
             Square::template shared_bytes<Total>(), sums, memory);
    };
    if (wide) {
      finish(double{});
    } else {
      finish(T{});
    }
    count = 0, blocks = 0, tiles = 0, parts = 0;
  };
  for (const SyrkRequest<Rows>& r : requests) {
    const int64_t side = ceil_div(r.d, int64_t{BT}), own = r.groups * side * (side + 1) / 2, slabs = ceil_div(r.count, kSlab);
    ELLA_CHECK(own <= kMaxBlocks, "ella_cuda: ", name, ": ", own, " blocks exceed the grid limit ", kMaxBlocks);
    const int64_t fitting = Shape::kBlocks * device.multiprocessors();  // and four slabs a split at least
    int64_t wanted = split ? split : syrk_splits(own, fitting, ceil_div(slabs, int64_t{4}));
    if (wide) wanted = std::max(wanted, ceil_div(r.count, kSyrkShortRows));
    const int64_t split_rows = ceil_div(slabs, wanted) * kSlab;
    const int64_t at_once = std::max(kMost / own, int64_t{1}) * split_rows;
    for (int64_t first = 0; first < r.count; first += at_once) {
      const int64_t last = std::min(first + at_once, r.count), splits = ceil_div(last - first, split_rows);
      const int64_t kept = splits > 1 ? own : 0;  // tiles in the workspace, of a split
      const bool full = count == kSyrkSums || parts + splits * kept > kMost || blocks + splits * own > kMaxBlocks;
      if (first > 0 || (count > 0 && full)) run();
      SyrkSum& sum = sums.sum[count];
      sum = {r.factor.mutable_data_ptr(), r.alpha, r.d, first, last, split_rows, parts};
      sum.splits = static_cast<int>(splits), sum.tiles = static_cast<int>(own), sum.wide = wide;
      sum.first_block = static_cast<int>(blocks), sum.first_tile = static_cast<int>(tiles);
      rows.rows[count++] = r.rows;
      blocks += splits * own, tiles += kept, parts += splits * kept;
    }
  }
  if (count > 0) run();
}

}  // namespace ella

// factor += alpha * sum a a^T over the patches a of a 'same' convolution with circular padding, by lags. There
//   sum_p x[c, p + r] x[c', p + r'] = sum_q x[c, q] x[c', q + r' - r]
// depends on the lag r' - r alone: (2 kh - 1) (2 kw - 1) sums for each pair of channels in place of (kh kw)^2, of which those
// with rows below 0 are the other channel's with rows above.
//
// Sums. A block copies some rows of some images with their border to shared memory. A thread has kChannels channels c, one
// other c', one row of lags and all 2 kw - 1 lags in it, and walks along the rows: for four positions it reads 4 kChannels
// values of c and four new ones of c', whose window stays in registers, and multiplies 4 kChannels (2 kw - 1) times (100 or
// 108). Where that takes fewer threads than a block has, groups of threads take every kth row and are added in order.
//
// Blocks leave their sums in a workspace; lag_total_kernel adds them in order in the factor's type, and lag_spread_kernel adds
// alpha times a sum to each of the places of the factor that it belongs to.
#pragma once

#include <algorithm>
#include <optional>

#include "common/cuda_path.h"
#include "cuda/elements.cuh"
#include "kron/checks.h"
#include "kron/cuda/syrk_tile.cuh"

namespace ella {

constexpr int kLagThreads = 256;
constexpr int64_t kLagBytes = 96 * 1024;  // of shared memory, which every architecture from 8.0 on grants
constexpr int64_t kLagPositions = 512;  // of a unit; two blocks fit a multiprocessor, and one multiplies while the other copies
constexpr int64_t kLagSplits = 1024;    // of a launch
#ifndef ELLA_MAX_LAG_ELEMENTS
#define ELLA_MAX_LAG_ELEMENTS (1 << 22)
#endif
constexpr int64_t kMaxLagElements = ELLA_MAX_LAG_ELEMENTS;  // of a launch's workspace, unless blocks would be too few

// KW: the kernel's width.
template <int KW_>
struct LagTile {
  static constexpr int KW = KW_, kReach = KW - 1, kLags = 2 * KW - 1;
  static constexpr int kChannels = KW == 3 ? 5 : 3;
  static constexpr int kMargin = (kReach + 3) / 4 * 4;  // on each side of a row, for vectors to start on multiples of four
  static constexpr int kResults = kChannels * kLags;    // a thread's
};

// How the work is cut. A unit is `band` rows of `images` images; splits are of so many units.
struct LagShape {
  int64_t N, units, first;  // of a launch: its first unit, the one after its last
  int64_t split_units;
  int C, H, W, kernel_h;
  int images, band, bands;  // bands of an image
  int pitch;                // elements from row to row in shared memory
  int tasks, groups;        // of threads: tasks, and groups of threads that share them
  int passes;               // blocks for all tasks

  __host__ __device__ int staged_rows() const { return band + kernel_h - 1; }
  __host__ __device__ int staged() const { return images * C * staged_rows() * pitch; }
};

// Block: (pass, split), pass fastest.
//   parts (splits, kResults, tasks)
template <class T, int KW>
__global__ void __launch_bounds__(kLagThreads, 2) lag_kernel(Image<T> x, LagShape s, T* __restrict__ parts) {
  using Tile = LagTile<KW>;
  constexpr int kMargin = Tile::kMargin, kLags = Tile::kLags, kChannels = Tile::kChannels;
  ELLA_SHARED_MEMORY(memory);
  const int needed = s.staged(), results = kLagThreads * Tile::kResults;
  const SharedArray<T> staged = memory.array<T>(needed > results ? needed : results);
  const int t = threadIdx.x, width = min(s.tasks, kLagThreads), group = t / width;
  const int64_t split = blockIdx.x / s.passes;
  const int task = static_cast<int>(blockIdx.x % s.passes) * kLagThreads + t % width;
  const bool active = group < s.groups && task < s.tasks;
  const int down = task % s.kernel_h, other = task / s.kernel_h % s.C, first = task / s.kernel_h / s.C * kChannels;
  const int R = s.staged_rows(), columns = 2 * kMargin + (s.W + 3) / 4 * 4;

  T sum[kChannels][kLags] = {};
  const int64_t begin = s.first + split * s.split_units, end = min(begin + s.split_units, s.units);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t n0 = unit / s.bands * s.images;
    const int y0 = static_cast<int>(unit % s.bands) * s.band;
    const int images = static_cast<int>(min(s.N - n0, static_cast<int64_t>(s.images))), rows = min(s.band, s.H - y0);
    __syncthreads();  // all are done with the unit before
    const int height = rows + s.kernel_h - 1;
    for (int line = t / kWarp; line < images * s.C * height; line += kLagThreads / kWarp) {  // one a warp
      const int r = line % height, c = line / height % s.C, m = line / height / s.C;
      const T* const from = x.data + (n0 + m) * x.n + c * x.c + (y0 + r) % s.H * x.h;
      const int to = ((m * s.C + c) * R + r) * s.pitch;
      for (int column = t % kWarp; column < columns; column += kWarp) {
        const int64_t w = (column - kMargin + kMargin * s.W) % s.W;
        copy_async(staged + (to + column), from + w * x.w, true);
      }
    }
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();  // the unit is there for all
    if (!active) continue;
    for (int line = group; line < images * rows; line += s.groups) {
      const int m = line / rows, y = line - m * rows;
      int at[kChannels];
#pragma unroll
      for (int k = 0; k < kChannels; ++k) {
        at[k] = ((m * s.C + min(first + k, s.C - 1)) * R + y) * s.pitch + kMargin;
      }
      const SharedArray<T> others = staged + ((m * s.C + other) * R + y + down) * s.pitch;
      T window[2 * kMargin + 4];
#pragma unroll
      for (int i = 0; i < 2 * kMargin; i += 4) {
        T four[4];
        load_vector(four, others + i);
#pragma unroll
        for (int p = 0; p < 4; ++p) window[i + p] = four[p];
      }
      for (int w = 0; w < s.W; w += 4) {
        T four[4];
        load_vector(four, others + (w + 2 * kMargin));
#pragma unroll
        for (int p = 0; p < 4; ++p) window[2 * kMargin + p] = four[p];
#pragma unroll
        for (int k = 0; k < kChannels; ++k) {
          T own[4];
          load_vector(own, staged + (at[k] + w));
#pragma unroll
          for (int p = 0; p < 4; ++p) {
            const T value = w + p < s.W ? own[p] : T(0);
#pragma unroll
            for (int lag = 0; lag < kLags; ++lag) {
              sum[k][lag] = fma(value, window[kMargin - Tile::kReach + p + lag], sum[k][lag]);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 2 * kMargin; ++i) window[i] = window[i + 4];
      }
    }
  }

  if (s.groups > 1) {
    __syncthreads();  // all are done with the last unit, over which the sums are laid
#pragma unroll
    for (int i = 0; i < Tile::kResults; ++i) staged[i * kLagThreads + t] = sum[i / kLags][i % kLags];
    __syncthreads();
    if (group > 0) return;
#pragma unroll
    for (int i = 0; i < Tile::kResults; ++i) {
      for (int more = 1; more < s.groups; ++more) {
        sum[i / kLags][i % kLags] += staged[i * kLagThreads + more * width + t];
      }
    }
  }
  if (!active) return;
#pragma unroll
  for (int i = 0; i < Tile::kResults; ++i) {
    parts[(split * Tile::kResults + i) * s.tasks + task] = sum[i / kLags][i % kLags];
  }
}

constexpr int kLagTotals = 32, kLagTotalGroups = 16;

// totals[i] = sum_s parts[s][i], after what is there already unless `fresh`; every group of threads takes every
// kLagTotalGroups-th part.
//   parts (splits, count), totals (count)
template <class T, class Total>
__global__ void __launch_bounds__(kLagTotals* kLagTotalGroups)
    lag_total_kernel(const T* __restrict__ parts, Total* __restrict__ totals, int64_t splits, int64_t count, bool fresh) {
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<Total> sums = memory.array<Total>(kLagTotals * kLagTotalGroups);
  const int lane = threadIdx.x % kLagTotals, group = threadIdx.x / kLagTotals;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kLagTotals + lane;
  Total total = 0;
  if (at < count) {
#pragma unroll 8  // reads are on their way together
    for (int64_t split = group; split < splits; split += kLagTotalGroups) total += parts[split * count + at];
  }
  sums[threadIdx.x] = total;
  __syncthreads();
  if (group > 0 || at >= count) return;
  for (int other = 1; other < kLagTotalGroups; ++other) total += sums[other * kLagTotals + lane];
  totals[at] = fresh ? total : totals[at] + total;
}

// factor[i, j] += alpha * its total. Block: (256 columns, row), columns fastest. The factor is symmetric to the bit: both of a
// pair of places read the same total.
//   totals (kResults, tasks), factor (P, P) with P = C kernel_h KW
template <class Total, int KW>
__global__ void __launch_bounds__(kElementThreads)
    lag_spread_kernel(const Total* __restrict__ totals, Total* __restrict__ factor, int C, int kernel_h, int tasks,
                      Total alpha) {
  using Tile = LagTile<KW>;
  const int area = kernel_h * KW, P = C * area, strips = ceil_div(P, kElementThreads);
  const int i = static_cast<int>(blockIdx.x / strips),
            j = static_cast<int>(blockIdx.x % strips) * kElementThreads + threadIdx.x;
  if (j >= P) return;
  int c = i / area, other = j / area;
  int down = j % area / KW - i % area / KW, right = j % KW - i % KW;  // area is a multiple of KW
  if (down < 0 || (down == 0 && (c > other || (c == other && right < 0)))) {
    const int swapped = c;
    c = other, other = swapped, down = -down, right = -right;
  }
  const int task = (c / Tile::kChannels * C + other) * kernel_h + down;
  const int result = c % Tile::kChannels * Tile::kLags + right + Tile::kReach;
  const int64_t at = static_cast<int64_t>(i) * P + j;
  factor[at] = fma(alpha, totals[static_cast<int64_t>(result) * tasks + task], factor[at]);
}

// The multiply-adds that take as long as an element's way to device memory and back. On paper: an H100's 33.5e12
// multiply-adds a second against 3e12 bytes.
constexpr int64_t kLagElementCost = 90;

// How lags are cut for images of that shape; nothing where they do not fit shared memory or splits would not be short.
template <class T, int KW>
std::optional<LagShape> lag_shape(const ConvGeometry& g) {
  using Tile = LagTile<KW>;
  constexpr int64_t kMax = 1 << 15;
  if (g.W > kLagPositions || g.H > kMax || g.C > kMax / g.kernel_h || g.kernel_h > kMax) return std::nullopt;
  LagShape s{};
  s.N = g.N, s.C = g.C, s.H = g.H, s.W = g.W, s.kernel_h = g.kernel_h;
  s.pitch = 2 * Tile::kMargin + ceil_div(s.W, 4) * 4;
  if (s.pitch % 8 == 0) s.pitch += 4;  // neighbouring rows' vectors in different banks
  const int64_t max_elements = kLagBytes / static_cast<int64_t>(sizeof(T)), row = int64_t{s.C} * s.pitch;
  const int64_t fitting = max_elements / row - (s.kernel_h - 1);  // rows of an image
  if (fitting < 1) return std::nullopt;
  s.band = std::min({g.H, kLagPositions / g.W, fitting});
  s.bands = ceil_div(s.H, s.band);
  s.band = ceil_div(s.H, s.bands);
  const int64_t images = std::min(kLagPositions / (g.H * g.W), max_elements / (row * s.staged_rows()));
  s.images = s.bands > 1 ? 1 : std::max(std::min(images, g.N), int64_t{1});
  s.units = ceil_div(s.N, int64_t{s.images}) * s.bands;
  const int64_t tasks = ceil_div(g.C, int64_t{Tile::kChannels}) * g.C * g.kernel_h;
  if (tasks > 1 << 24) return std::nullopt;
  s.tasks = tasks, s.passes = ceil_div(s.tasks, kLagThreads), s.groups = std::max(kLagThreads / s.tasks, 1);
  return s;
}

// factor (P, P) += alpha * sum over the patches of x; neither is empty.
template <class T, int KW>
void add_lags(const Device& device, const char* name, const Tensor& factor, const Image<T>& x, LagShape s, double alpha,
              int64_t split) {
  using Tile = LagTile<KW>;
  const bool widens = factor.scalar_type() != kScalarType<T>;
  const int64_t all = s.units, count = int64_t{s.tasks} * Tile::kResults;
  const int64_t wanted = split ? split : std::max(ceil_div(2 * device.multiprocessors(), int64_t{s.passes}), int64_t{1});
  s.split_units = widens ? 1 : ceil_div(all, std::min(wanted, kLagSplits));
  const int64_t fitting = std::max(kMaxLagElements / count, wanted);
  const int64_t at_once = s.split_units * std::min({ceil_div(all, s.split_units), fitting, kLagSplits});
  const Tensor parts = device_empty(factor, {at_once / s.split_units, count}, kScalarType<T>);
  const Tensor totals = device_empty(factor, {count});
  const int64_t elements = std::max<int64_t>(s.staged(), kLagThreads * Tile::kResults);
  for (s.first = 0; s.first < all; s.first += at_once) {
    s.units = std::min(s.first + at_once, all);
    const int64_t splits = ceil_div(s.units - s.first, s.split_units);
    launch(device, name, lag_kernel<T, KW>, splits * s.passes, kLagThreads, shared_size(elements * sizeof(T)), x, s,
           parts.mutable_data_ptr<T>());
    const auto total = [&](auto zero) {
      using Total = decltype(zero);
      launch(device, name, lag_total_kernel<T, Total>, ceil_div(count, int64_t{kLagTotals}), kLagTotals * kLagTotalGroups,
             shared_size(kLagTotals * kLagTotalGroups * sizeof(Total)), parts.const_data_ptr<T>(),
             totals.mutable_data_ptr<Total>(), splits, count, s.first == 0);
      if (s.units < all) return;
      const int64_t P = int64_t{s.C} * s.kernel_h * KW;
      launch(device, name, lag_spread_kernel<Total, KW>, P * ceil_div(P, int64_t{kElementThreads}), kElementThreads, 0,
             totals.const_data_ptr<Total>(), factor.mutable_data_ptr<Total>(), s.C, s.kernel_h, s.tasks,
             static_cast<Total>(alpha));
    };
    if (widens) {
      total(double{});
    } else {
      total(T{});
    }
  }
}

}  // namespace ella

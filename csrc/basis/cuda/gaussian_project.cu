// gaussian_project and its first and second derivatives. With d = u[x] - v[a], e = exp(-|d|^2 / 2), delta = du[x] - dv[a] and
// S[a,x] = sum_m grad[m,a] x[m,x]:
//   project   out[m,a] = sum_x x[m,x] e           tangent   the same with -(d . delta) e
//   gradient  of u[x]: sum_a -S e d               hvp       the same with S e ((d . delta) d - delta); of v[a]: the
//   negative sums
// project and tangent: matrix_kernel writes e of some anchors, torch's product, which is cuBLAS's, takes it from there.
// gradient and hvp: S does not exist beyond a tile, which derivative_kernel makes in registers and reduces there.
//
// Tiles. 256 threads hold 64 anchors x 64 points, 4 x 4 a thread. Slabs of 16 are copied into one of two stages, one barrier
// each. Differences of float coordinates are taken between pairs of floats (high and low part), as exact as in double and
// without its rate; matrix_kernel, which takes each once, subtracts in double. Sums over slabs are shared out among blocks
// where tiles are few; the splits are added in order by a second kernel.
#include <algorithm>
#include <optional>
#include <tuple>

#include "basis/ops.h"
#include "cuda/elements.cuh"
#include "cuda/library.cuh"
#include "cuda/reduce.cuh"

namespace ella {
namespace {

constexpr int kThreads = 256;
constexpr int kSide = 16;  // threads along either side of a tile
constexpr int kSlab = 16;  // terms of a sum in shared memory at once
constexpr int kTile = 64;  // anchors of a tile, and points of a tile of S

template <class T>
struct Shape {
  static constexpr int kPad = 16 / sizeof(T);             // keeps 16-byte alignment, spreads copies down a column over banks
  static constexpr int kBlocks = sizeof(T) == 4 ? 2 : 1;  // resident on a multiprocessor: at most 128 or 255 registers
  static constexpr int kTileStride = kTile + kPad;
};

// Coordinates by axis, that of point i along axis p at [p * count + i], as pairs high + low.
template <class T>
struct Points {
  const T *high, *low, *direction_high, *direction_low;
  int64_t count;
};

struct Source {
  const double* data;
  int64_t stride0, stride1, count;

  __device__ __forceinline__ double at(int64_t i, int64_t p) const { return data[i * stride0 + p * stride1]; }
};

struct Sources {
  Source source[4];  // u, v and their directions, or empty ones
};

// For every source its high parts (axes, count), then its low parts, one source after the other.
//   out (2 * axes * sum of counts)
template <class T>
__global__ void __launch_bounds__(kThreads) split_kernel(Sources sources, T* __restrict__ out, int64_t axes) {
  int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const Source source = sources.source[s];
    const int64_t size = axes * source.count;
    if (at >= 0 && at < size) {
      const double value = source.at(at % source.count, at / source.count);
      const T high = static_cast<T>(value);
      out[at] = high;
      out[at + size] = static_cast<T>(value - static_cast<double>(high));
    }
    at -= size;
    out += 2 * size;
  }
}

template <class T>
__device__ __forceinline__ T difference(T high, T low, T other_high, T other_low) {
  if constexpr (sizeof(T) == 4) {
    return (high - other_high) + (low - other_low);
  } else {
    return high - other_high;
  }
}

// The product with a value of e: zero where that is, even if the other factor has overflowed.
template <class T>
__device__ __forceinline__ T unless_zero(T value, T factor) {
  return value == T(0) ? T(0) : value * factor;
}

// Values of e there are at a time, or those of one anchor. Tests say fewer, so that small shapes take several parts.
#ifndef ELLA_MAX_MATRIX
#define ELLA_MAX_MATRIX (1 << 23)
#endif
constexpr int64_t kMaxMatrix = ELLA_MAX_MATRIX;

// matrix[a,x] = e for the anchors from `first` on, or its derivative along the direction.
//   sources u, v and, for the derivative, their directions; matrix (count / X, X)
template <class T, bool Tangent, class Index>
__global__ void __launch_bounds__(kElementThreads)
    matrix_kernel(Sources sources, int64_t axes, int64_t first, Divisor<Index> X, Index count, T* __restrict__ matrix) {
  write_elements(matrix, count, [&](Index element) {
    const int64_t a = first + X(element), x = X.rest(element);
    T square = 0, along = 0;
#pragma unroll 1
    for (int64_t p = 0; p < axes; ++p) {
      const T d = static_cast<T>(sources.source[0].at(x, p) - sources.source[1].at(a, p));
      square = fma(d, d, square);
      if constexpr (Tangent) along = fma(d, static_cast<T>(sources.source[2].at(x, p) - sources.source[3].at(a, p)), along);
    }
    const T value = exp(T(-0.5) * square);
    return Tangent ? unless_zero(value, -along) : value;
  });
}

// out[first + i, p] = the sum over the 16 groups of threads of their value for element i of a tile side, in order.
//   sums [group][kTile], out (count, axes)
__device__ __forceinline__ void sum_groups(SharedArray<double> sums, double* out, int64_t first, int64_t count, int64_t axes,
                                           int64_t p) {
  __syncthreads();
  const int i = threadIdx.x;
  if (i < kTile && first + i < count) {
    double total = 0;
    for (int group = 0; group < kSide; ++group) total += sums[group * kTile + i];
    out[(first + i) * axes + p] = total;
  }
  __syncthreads();  // before sums are overwritten
}

// Block: (split of the rows, point tile, anchor tile), split fastest.
//   grad (M, A) and x (M, X) by strides, by_point (anchor tiles * splits, X, axes), by_anchor (point tiles * splits, A, axes)
template <class T, bool Hessian>
__global__ void __launch_bounds__(kThreads, Shape<T>::kBlocks)
    derivative_kernel(const T* __restrict__ grad, int64_t grad_row, int64_t grad_column, const T* __restrict__ x, int64_t x_row,
                      int64_t x_column, Points<T> u, Points<T> v, int64_t axes, double* __restrict__ by_point,
                      double* __restrict__ by_anchor, int64_t M, int64_t split_rows, int64_t splits) {
  using S = Shape<T>;
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<T> left = memory.array<T>(2 * kSlab * S::kTileStride);   // [stage][row][anchor]
  const SharedArray<T> right = memory.array<T>(2 * kSlab * S::kTileStride);  // [stage][row][point]
  const SharedArray<double> sums = memory.array<double>(kSide * kTile);
  const int64_t A = v.count, X = u.count, tiles = ceil_div(X, int64_t{kTile});
  const int64_t split = blockIdx.x % splits, point_tile = blockIdx.x / splits % tiles,
                anchor_tile = blockIdx.x / splits / tiles;
  const int64_t x0 = point_tile * kTile, a0 = anchor_tile * kTile;
  const int64_t begin = split * split_rows, end = min(begin + split_rows, M);
  const int t = threadIdx.x, tx = t % kSide, ty = t / kSide;

  const auto load = [&](int stage, int64_t r0) {
    const int i = t % kTile;
#pragma unroll
    for (int e = 0; e < kSlab * kTile / kThreads; ++e) {
      const int k = t / kTile + e * (kThreads / kTile), to = stage * kSlab * S::kTileStride + k * S::kTileStride + i;
      copy_async(left + to, grad + (r0 + k) * grad_row + (a0 + i) * grad_column, r0 + k < end && a0 + i < A);
      copy_async(right + to, x + (r0 + k) * x_row + (x0 + i) * x_column, r0 + k < end && x0 + i < X);
    }
    copy_async_commit();
  };

  T sum[4][4] = {};  // of S, for anchors 4 ty + i and points 4 tx + j
  const int64_t slabs = ceil_div(end - begin, int64_t{kSlab});
  load(0, begin);
  for (int64_t slab = 0; slab < slabs; ++slab) {
    const int stage = slab & 1;
    copy_async_wait<0>();
    __syncthreads();  // this stage is filled, and nobody reads the other one any more
    if (slab + 1 < slabs) load(stage ^ 1, begin + (slab + 1) * kSlab);
#pragma unroll
    for (int k = 0; k < kSlab; ++k) {
      T a[4], b[4];
      load_vector(a, left + (stage * kSlab * S::kTileStride + k * S::kTileStride + 4 * ty));
      load_vector(b, right + (stage * kSlab * S::kTileStride + k * S::kTileStride + 4 * tx));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = fma(a[i], b[j], sum[i][j]);
      }
    }
  }

  // sum[i][j] becomes S e; elements beyond the ends are zero, their coordinates those of the last.
  T square[4][4] = {}, along[4][4] = {};
  int64_t point[4], anchor[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    point[i] = min(x0 + 4 * tx + i, X - 1);
    anchor[i] = min(a0 + 4 * ty + i, A - 1);
  }
#pragma unroll 1
  for (int64_t p = 0; p < axes; ++p) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t at = p * X + point[j];
      const T high = u.high[at], low = u.low[at];
      const T direction_high = Hessian ? u.direction_high[at] : T(0), direction_low = Hessian ? u.direction_low[at] : T(0);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t of = p * A + anchor[i];
        const T d = difference(high, low, v.high[of], v.low[of]);
        square[i][j] = fma(d, d, square[i][j]);
        if constexpr (Hessian) {
          along[i][j] =
              fma(d, difference(direction_high, direction_low, v.direction_high[of], v.direction_low[of]), along[i][j]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Zero beyond the ends also where the last point's coordinates are not a number.
      const bool inside = x0 + 4 * tx + j < X && a0 + 4 * ty + i < A;
      sum[i][j] = inside ? sum[i][j] * exp(T(-0.5) * square[i][j]) : T(0);
    }
  }
  double* const to_points = by_point + (anchor_tile * splits + split) * X * axes;
  double* const to_anchors = by_anchor + (point_tile * splits + split) * A * axes;
#pragma unroll 1
  for (int64_t p = 0; p < axes; ++p) {
    T of_point[4] = {}, of_anchor[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t at = p * X + point[j];
      const T high = u.high[at], low = u.low[at];
      const T direction_high = Hessian ? u.direction_high[at] : T(0), direction_low = Hessian ? u.direction_low[at] : T(0);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t of = p * A + anchor[i];
        T factor = -difference(high, low, v.high[of], v.low[of]);
        if constexpr (Hessian) {
          factor = -along[i][j] * factor - difference(direction_high, direction_low, v.direction_high[of], v.direction_low[of]);
        }
        const T term = unless_zero(sum[i][j], factor);
        of_point[j] += term;
        of_anchor[i] -= term;
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[ty * kTile + 4 * tx + j] = static_cast<double>(of_point[j]);
    sum_groups(sums, to_points, x0, X, axes, p);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[tx * kTile + 4 * ty + i] = static_cast<double>(of_anchor[i]);
    sum_groups(sums, to_anchors, a0, A, axes, p);
  }
}

inline Source source(const Tensor& t) { return {t.const_data_ptr<double>(), t.stride(0), t.stride(1), t.size(0)}; }

Sources sources_of(const Tensor& u, const Tensor& v, const std::optional<Tensor>& du, const std::optional<Tensor>& dv) {
  const Source none{nullptr, 0, 0, 0};
  return {{source(u), source(v), du ? source(*du) : none, dv ? source(*dv) : none}};
}

// The coordinates of a call as derivative_kernel reads them, in memory of their own.
template <class T>
class Coordinates {
 public:
  Coordinates(const Device& device, const char* name, const GaussianSizes& s, const Tensor& u, const Tensor& v,
              const std::optional<Tensor>& du, const std::optional<Tensor>& dv)
      : u_size_(s.P * s.X),
        v_size_(s.P * s.A),
        moving_(du.has_value()),
        values_(device_empty(u, {2 * (u_size_ + v_size_) * (moving_ ? 2 : 1)}, kScalarType<T>)) {
    launch(device, name, split_kernel<T>, ceil_div(values_.numel() / 2, int64_t{kThreads}), kThreads, 0,
           sources_of(u, v, du, dv), values_.mutable_data_ptr<T>(), s.P);
    const T* at = values_.const_data_ptr<T>();
    const T *at_v = at + 2 * u_size_, *du_at = moving_ ? at_v + 2 * v_size_ : at, *dv_at = moving_ ? du_at + 2 * u_size_ : at;
    this->u = {at, at + u_size_, du_at, du_at + u_size_, s.X};
    this->v = {at_v, at_v + v_size_, dv_at, dv_at + v_size_, s.A};
  }

  Points<T> u, v;

 private:
  const int64_t u_size_, v_size_;
  const bool moving_;
  const Tensor values_;
};

// How many splits `length` terms are cut into, and how long each is: until every multiprocessor has two blocks, but not below
// four slabs a split.
struct Splits {
  Splits(const Device& device, int64_t length, int64_t blocks) {
    const int64_t slabs = ceil_div(length, int64_t{kSlab});
    const int64_t wanted =
        std::clamp<int64_t>(2 * device.multiprocessors() / blocks, 1, std::max<int64_t>(ceil_div(slabs, int64_t{4}), 1));
    this->length = std::max<int64_t>(ceil_div(slabs, wanted), 1) * kSlab;
    count = std::max<int64_t>(ceil_div(length, this->length), 1);
  }
  int64_t length, count;
};

template <class T>
void sum_parts(const Device& device, const char* name, const Tensor& parts, const Tensor& out, int64_t splits) {
  launch(device, name, sum_parts_kernel<T>, ceil_div(out.numel(), int64_t{kThreads}), kThreads, 0, parts.const_data_ptr<T>(),
         out.mutable_data_ptr<T>(), splits, out.numel());
}

template <class T, bool Tangent>
Tensor project(const char* name, const GaussianSizes& s, const Tensor& x, const Tensor& u, const Tensor& v,
               const std::optional<Tensor>& du, const std::optional<Tensor>& dv) {
  if (s.M == 0 || s.X == 0 || s.A == 0) return zeros_of(x, {s.M, s.A});
  const Device device(x);
  const Sources sources = sources_of(u, v, du, dv);
  const Tensor out = device_empty(x, {1, s.M, s.A}), rows = torch::stable::unsqueeze(x, 0);
  const int64_t at_once = std::clamp<int64_t>(kMaxMatrix / s.X, 1, s.A);
  for (int64_t first = 0; first < s.A; first += at_once) {
    const int64_t anchors = std::min(at_once, s.A - first), count = anchors * s.X;
    const Tensor matrix = device_empty(x, {1, anchors, s.X});
    with_index_type(count, [&](auto index) {
      using Index = decltype(index);
      launch(device, name, matrix_kernel<T, Tangent, Index>, element_blocks(count), kElementThreads, 0, sources, s.P, first,
             Divisor<Index>(s.X), static_cast<Index>(count), matrix.mutable_data_ptr<T>());
    });
    library::multiply(rows, library::swapped(matrix, 1, 2), library::part(out, 2, first, anchors));
  }
  return torch::stable::squeeze(out, 0);
}

template <class T, bool Hessian>
std::tuple<Tensor, Tensor> derivative(const char* name, const GaussianSizes& s, const Tensor& grad, const Tensor& x,
                                      const Tensor& u, const Tensor& v, const std::optional<Tensor>& du,
                                      const std::optional<Tensor>& dv) {
  if (s.M == 0 || s.X == 0 || s.A == 0 || s.P == 0) return {zeros_of(u, {s.X, s.P}), zeros_of(v, {s.A, s.P})};
  const Device device(x);
  const Coordinates<T> at(device, name, s, u, v, du, dv);
  const int64_t across = ceil_div(s.X, int64_t{kTile}), down = ceil_div(s.A, int64_t{kTile});
  const Splits splits(device, s.M, across * down);
  const Tensor by_point = device_empty(u, {down * splits.count, s.X, s.P});
  const Tensor by_anchor = device_empty(v, {across * splits.count, s.A, s.P});
  constexpr size_t shared =
      2 * shared_size(2 * kSlab * Shape<T>::kTileStride * sizeof(T)) + shared_size(kSide * kTile * sizeof(double));
  launch(device, name, derivative_kernel<T, Hessian>, across * down * splits.count, kThreads, shared, grad.const_data_ptr<T>(),
         grad.stride(0), grad.stride(1), x.const_data_ptr<T>(), x.stride(0), x.stride(1), at.u, at.v, s.P,
         by_point.mutable_data_ptr<double>(), by_anchor.mutable_data_ptr<double>(), s.M, splits.length, splits.count);
  const Tensor gu = device_empty(u, {s.X, s.P}), gv = device_empty(v, {s.A, s.P});
  sum_parts<double>(device, name, by_point, gu, down * splits.count);
  sum_parts<double>(device, name, by_anchor, gv, across * splits.count);
  return {gu, gv};
}

Tensor project_any(const char* name, const GaussianSizes& s, const Tensor& x, const Tensor& u, const Tensor& v,
                   const std::optional<Tensor>& du, const std::optional<Tensor>& dv) {
  std::optional<Tensor> out;
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "gaussian_project", [&] {
    out = du ? project<scalar_t, true>(name, s, x, u, v, du, dv) : project<scalar_t, false>(name, s, x, u, v, du, dv);
  });
  return *out;
}

std::tuple<Tensor, Tensor> derivative_any(const char* name, const GaussianSizes& s, const Tensor& grad, const Tensor& x,
                                          const Tensor& u, const Tensor& v, const std::optional<Tensor>& du,
                                          const std::optional<Tensor>& dv) {
  std::tuple<Tensor, Tensor> out;
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "gaussian_project", [&] {
    out = du ? derivative<scalar_t, true>(name, s, grad, x, u, v, du, dv)
             : derivative<scalar_t, false>(name, s, grad, x, u, v, du, dv);
  });
  return out;
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) { GaussianOps<project_any, derivative_any>::implement(m); }

}  // namespace
}  // namespace ella

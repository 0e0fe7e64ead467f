// gaussian_project and its first and second derivatives. With d = u[x] - v[a], e = exp(-|d|^2 / 2), delta = du[x] - dv[a] and
// S[a,x] = sum_m grad[m,a] x[m,x]:
//   project   out[m,a] = sum_x x[m,x] e           tangent   the same with -(d . delta) e
//   gradient  of u[x]: sum_a -S e d               hvp       the same with S e ((d . delta) d - delta); of v[a]: the
//   negative sums
// Neither e nor S exists beyond a tile: project_kernel evaluates a slab of e into shared memory while the previous one is
// multiplied, derivative_kernel makes a tile of S in registers and reduces it there.
//
// Tiles. 256 threads hold 16 x 16 x (TM x 4) sums. Slabs of 16 are copied or evaluated into one of two stages, one barrier
// each.
//   project, float: 128 rows x 64 anchors, TM 8: 3 vector reads for 32 FMA; a slab's 4 exponentials a thread, about 30
//   instructions each, meet 512 FMA. double: 64 x 64, TM 4. derivative: 64 anchors x 64 points, TM 4.
// Differences of float coordinates are taken between pairs of floats (high and low part), as exact as in double and without its
// rate. Sums over slabs are shared out among blocks where tiles are few; the splits are added in order by a second kernel.
#include <algorithm>
#include <optional>
#include <tuple>

#include "basis/checks.h"
#include "cuda/reduce.cuh"

namespace ella {
namespace {

constexpr int kThreads = 256;
constexpr int kSide = 16;  // threads along either side of a tile
constexpr int kSlab = 16;  // terms of a sum in shared memory at once
constexpr int kTile = 64;  // anchors of a tile, and points of a tile of S

template <class T>
struct Shape {
  static constexpr int TM = sizeof(T) == 4 ? 8 : 4;
  static constexpr int kRows = kSide * TM;                // of x, in a tile of the product
  static constexpr int kPad = 16 / sizeof(T);             // keeps 16-byte alignment, spreads copies down a column over banks
  static constexpr int kBlocks = sizeof(T) == 4 ? 2 : 1;  // resident on a multiprocessor: at most 128 or 255 registers
  static constexpr int kTileStride = kTile + kPad, kRowStride = kRows + kPad;
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
      const double value = source.data[at % source.count * source.stride0 + at / source.count * source.stride1];
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

// Block: (split of the points, anchor tile, row tile), split fastest.
//   x (M, X) by strides, out (splits, M, A)
template <class T, bool Tangent>
__global__ void __launch_bounds__(kThreads, Shape<T>::kBlocks)
    project_kernel(const T* __restrict__ x, int64_t x_row, int64_t x_column, Points<T> u, Points<T> v, int64_t axes,
                   T* __restrict__ out, int64_t M, int64_t split_points, int64_t splits) {
  using S = Shape<T>;
  constexpr int TM = S::TM;
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<T> rows = memory.array<T>(2 * kSlab * S::kRowStride);     // [stage][point][row]
  const SharedArray<T> values = memory.array<T>(2 * kSlab * S::kTileStride);  // [stage][point][anchor]
  const int64_t A = v.count, X = u.count, tiles = ceil_div(A, int64_t{kTile});
  const int64_t split = blockIdx.x % splits, a0 = blockIdx.x / splits % tiles * kTile;
  const int64_t m0 = blockIdx.x / splits / tiles * S::kRows;
  const int64_t begin = split * split_points, end = min(begin + split_points, X);
  const int t = threadIdx.x;

  // A thread copies one point of every 16th row, and evaluates one anchor at every fourth point. Points beyond the end count
  // as zeros of x; anchors beyond the last are evaluated as the last and dropped.
  const auto fill = [&](int stage, int64_t k0) {
    const int k = t % kSlab, first = t / kSlab;
    const int count = k0 + k < end ? static_cast<int>(min(M - m0, int64_t{S::kRows})) : 0;
    const T* from = x + (m0 + first) * x_row + (k0 + k) * x_column;
    const int to = stage * kSlab * S::kRowStride + k * S::kRowStride;
#pragma unroll 2
    for (int m = first; m < S::kRows; m += kSide) {
      copy_async(rows + (to + m), from, m < count);
      from += kSide * x_row;
    }
    copy_async_commit();
    const int64_t a = min(a0 + t % kTile, A - 1);
    T square[4] = {}, along[4] = {};
#pragma unroll 1
    for (int64_t p = 0; p < axes; ++p) {
      const T high = v.high[p * A + a], low = v.low[p * A + a];
      const T direction_high = Tangent ? v.direction_high[p * A + a] : T(0);
      const T direction_low = Tangent ? v.direction_low[p * A + a] : T(0);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t at = p * X + min(k0 + t / kTile + 4 * i, X - 1);
        const T d = difference(u.high[at], u.low[at], high, low);
        square[i] = fma(d, d, square[i]);
        if constexpr (Tangent) {
          along[i] = fma(d, difference(u.direction_high[at], u.direction_low[at], direction_high, direction_low), along[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T value = exp(T(-0.5) * square[i]);
      values[stage * kSlab * S::kTileStride + (t / kTile + 4 * i) * S::kTileStride + t % kTile] =
          Tangent ? unless_zero(value, -along[i]) : value;
    }
  };

  const int tx = t % kSide, ty = t / kSide;
  T sum[TM][4] = {};
  const int64_t slabs = ceil_div(end - begin, int64_t{kSlab});
  fill(0, begin);
  copy_async_wait<0>();
  __syncthreads();
  for (int64_t slab = 0; slab < slabs; ++slab) {
    const int stage = slab & 1;
    if (slab + 1 < slabs) fill(stage ^ 1, begin + (slab + 1) * kSlab);
#pragma unroll
    for (int k = 0; k < kSlab; ++k) {
      T left[TM], right[4];
#pragma unroll
      for (int i = 0; i < TM; i += 4) {
        T four[4];
        load_vector(four, rows + (stage * kSlab * S::kRowStride + k * S::kRowStride + i * kSide + 4 * ty));
        left[i] = four[0], left[i + 1] = four[1], left[i + 2] = four[2], left[i + 3] = four[3];
      }
      load_vector(right, values + (stage * kSlab * S::kTileStride + k * S::kTileStride + 4 * tx));
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = fma(left[i], right[j], sum[i][j]);
      }
    }
    copy_async_wait<0>();
    __syncthreads();  // the next stage is filled, and this one may be overwritten
  }
#pragma unroll
  for (int i = 0; i < TM; ++i) {
    const int64_t m = m0 + i / 4 * (4 * kSide) + 4 * ty + i % 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t a = a0 + 4 * tx + j;
      if (m < M && a < A) out[(split * M + m) * A + a] = sum[i][j];
    }
  }
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

// The coordinates of a call as the kernels read them, in memory of their own.
template <class T>
class Coordinates {
 public:
  Coordinates(const Device& device, const char* name, const GaussianSizes& s, const Tensor& u, const Tensor& v,
              const std::optional<Tensor>& du, const std::optional<Tensor>& dv)
      : u_size_(s.P * s.X),
        v_size_(s.P * s.A),
        moving_(du.has_value()),
        values_(device_empty(u, {2 * (u_size_ + v_size_) * (moving_ ? 2 : 1)}, kScalarType<T>)) {
    const Source none{nullptr, 0, 0, 0};
    const Sources sources{{source(u), source(v), du ? source(*du) : none, dv ? source(*dv) : none}};
    launch(device, name, split_kernel<T>, ceil_div(values_.numel() / 2, int64_t{kThreads}), kThreads, 0, sources,
           values_.mutable_data_ptr<T>(), s.P);
    const T* at = values_.const_data_ptr<T>();
    const T *at_v = at + 2 * u_size_, *du_at = moving_ ? at_v + 2 * v_size_ : at, *dv_at = moving_ ? du_at + 2 * u_size_ : at;
    this->u = {at, at + u_size_, du_at, du_at + u_size_, s.X};
    this->v = {at_v, at_v + v_size_, dv_at, dv_at + v_size_, s.A};
  }

  Points<T> u, v;

 private:
  static Source source(const Tensor& t) { return {t.const_data_ptr<double>(), t.stride(0), t.stride(1), t.size(0)}; }

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
  const Coordinates<T> at(device, name, s, u, v, du, dv);
  const int64_t blocks = ceil_div(s.M, int64_t{Shape<T>::kRows}) * ceil_div(s.A, int64_t{kTile});
  const Splits splits(device, s.X, blocks);
  const Tensor out = device_empty(x, {s.M, s.A});
  const Tensor parts = splits.count > 1 ? device_empty(x, {splits.count, s.M, s.A}) : out;
  constexpr size_t shared =
      shared_size(2 * kSlab * Shape<T>::kRowStride * sizeof(T)) + shared_size(2 * kSlab * Shape<T>::kTileStride * sizeof(T));
  launch(device, name, project_kernel<T, Tangent>, blocks * splits.count, kThreads, shared, x.const_data_ptr<T>(), x.stride(0),
         x.stride(1), at.u, at.v, s.P, parts.mutable_data_ptr<T>(), s.M, splits.length, splits.count);
  if (splits.count > 1) sum_parts<T>(device, name, parts, out, splits.count);
  return out;
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

template <bool Tangent>
Tensor project_any(const char* name, const GaussianSizes& s, const Tensor& x, const Tensor& u, const Tensor& v,
                   const std::optional<Tensor>& du, const std::optional<Tensor>& dv) {
  std::optional<Tensor> out;
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "gaussian_project",
                         [&] { out = project<scalar_t, Tangent>(name, s, x, u, v, du, dv); });
  return *out;
}

template <bool Hessian>
std::tuple<Tensor, Tensor> derivative_any(const char* name, const GaussianSizes& s, const Tensor& grad, const Tensor& x,
                                          const Tensor& u, const Tensor& v, const std::optional<Tensor>& du,
                                          const std::optional<Tensor>& dv) {
  std::tuple<Tensor, Tensor> out;
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "gaussian_project",
                         [&] { out = derivative<scalar_t, Hessian>(name, s, grad, x, u, v, du, dv); });
  return out;
}

Tensor gaussian_project(const Tensor& x, const Tensor& u, const Tensor& v) {
  constexpr const char* op = "gaussian_project";
  return project_any<false>(op, check_gaussian_project(op, x, u, v), x, u, v, std::nullopt, std::nullopt);
}

Tensor gaussian_project_tangent(const Tensor& x, const Tensor& u, const Tensor& v, const Tensor& du, const Tensor& dv) {
  constexpr const char* op = "gaussian_project_tangent";
  const GaussianSizes s = check_gaussian_project(op, x, u, v);
  check_gaussian_directions(op, s, x, du, dv);
  return project_any<true>(op, s, x, u, v, du, dv);
}

std::tuple<Tensor, Tensor> gaussian_project_gradient(const Tensor& grad, const Tensor& x, const Tensor& u, const Tensor& v) {
  constexpr const char* op = "gaussian_project_gradient";
  return derivative_any<false>(op, check_gaussian_gradient(op, grad, x, u, v), grad, x, u, v, std::nullopt, std::nullopt);
}

std::tuple<Tensor, Tensor> gaussian_project_hvp(const Tensor& grad, const Tensor& x, const Tensor& u, const Tensor& v,
                                                const Tensor& du, const Tensor& dv) {
  constexpr const char* op = "gaussian_project_hvp";
  const GaussianSizes s = check_gaussian_gradient(op, grad, x, u, v);
  check_gaussian_directions(op, s, x, du, dv);
  return derivative_any<true>(op, s, grad, x, u, v, du, dv);
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) {
  m.impl("gaussian_project", TORCH_BOX(&gaussian_project));
  m.impl("gaussian_project_tangent", TORCH_BOX(&gaussian_project_tangent));
  m.impl("gaussian_project_gradient", TORCH_BOX(&gaussian_project_gradient));
  m.impl("gaussian_project_hvp", TORCH_BOX(&gaussian_project_hvp));
}

}  // namespace
}  // namespace ella

// affine_copies and its gradients. A kernel turns every map into coordinates in pixels, in double, and its inverse; the others
// read those. Neither a grid nor repeated images exist.
//
// Copies: a thread has a pixel of a copy and writes it for every channel.
// Gradient in maps: a block sums over some pixels of a copy and the channels; another kernel adds the blocks' sums in order.
// Gradient in x: a thread has a pixel of an image and, at a time, four channels. It walks all copies, and of each those pixels
// that the inverse says may look at it: it adds what is its own in a fixed order, without atomics. Of the walked pixels, 9 to
// 16 for a rotation, 4 count.
//
// Kernels whose bounds name one block have registers for all they keep; without, ptxas wants more blocks at once and spills.
#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

#include "affine/checks.h"
#include "affine/coordinates.h"
#include "cuda/elements.cuh"
#include "cuda/reduce.cuh"

namespace ella {
namespace {

constexpr int kThreads = kElementThreads;
constexpr int kChannels = 4;                    // of a thread's gradient in x at a time
constexpr int64_t kPartPlaces = 16 * kThreads;  // pixels of a copy whose gradient in the map one block sums

// Six numbers by strides, or none.
template <class T>
struct MapSource {
  const T* data;
  int64_t image, copy, row, column;
};

// A map in pixels: coordinates column u[0] j + u[1] i + u[2], row v[0] j + v[1] i + v[2]. NaN everywhere if not finite.
template <class T>
struct Map {
  T u[3], v[3];
  T moves_u[3], moves_v[3];       // the direction's
  T back_column[2], back_row[2];  // the inverse: the pixel that looks at (column, row) is back_column[0] (column - u[2]) + ...
  T reach_column, reach_row;      // pixels that are further from it do not see what is around (column, row)

  __device__ __forceinline__ bool broken() const { return u[2] != u[2]; }
};

//   maps (M, S, 2, 3) and direction by strides, out (M, S)
template <class T>
__global__ void __launch_bounds__(kThreads, 1) maps_kernel(MapSource<T> maps, MapSource<T> direction, Map<T>* __restrict__ out,
                                                           int64_t count, int64_t S, int64_t H, int64_t W) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  const AffineScales scales(H, W);
  const auto read = [&](const MapSource<T>& from, bool origin) {
    return affine_coordinates(from.data + at / S * from.image + at % S * from.copy, from.row, from.column, scales, origin);
  };
  const AffineCoordinates p = read(maps, true);
  Map<T> map;
  bool broken = false;
  for (int k = 0; k < 3; ++k) {
    map.u[k] = static_cast<T>(p.u[k]), map.v[k] = static_cast<T>(p.v[k]);
    map.moves_u[k] = map.moves_v[k] = T(0);
    broken = broken || map.u[k] - map.u[k] != T(0) || map.v[k] - map.v[k] != T(0);
  }
  if (direction.data != nullptr) {
    const AffineCoordinates d = read(direction, false);
    for (int k = 0; k < 3; ++k) map.moves_u[k] = static_cast<T>(d.u[k]), map.moves_v[k] = static_cast<T>(d.v[k]);
  }
  if (broken) map.u[2] = map.v[2] = static_cast<T>(NAN);
  // A side of one pixel has no coordinate of its own: the map's numbers for it do not count.
  const double a = W > 1 ? p.u[0] : 1, b = H > 1 ? p.u[1] : 0, c = W > 1 ? p.v[0] : 0, d = H > 1 ? p.v[1] : 1;
  const double determinant = a * d - b * c;
  const double back[4] = {d / determinant, -b / determinant, -c / determinant, a / determinant};
  // Rounding of the coordinates, of the inverse and of what is computed with it, generously.
  const double size = static_cast<double>(W + H), unit = sizeof(T) == 4 ? 6e-8 : 1.2e-16;
  const double rounding = 16 * unit * (size * (1 + fabs(a) + fabs(b) + fabs(c) + fabs(d)) + fabs(p.u[2]) + fabs(p.v[2]));
  const double around = 1 + rounding;
  double reach_column = (fabs(back[0]) + fabs(back[1])) * around + 16 * unit * size,
         reach_row = (fabs(back[2]) + fabs(back[3])) * around + 16 * unit * size;
  // Without an inverse, or with a useless one, every pixel may look everywhere.
  const bool known = !broken && reach_column < size && reach_row < size;
  map.back_column[0] = known ? static_cast<T>(back[0]) : T(0), map.back_column[1] = known ? static_cast<T>(back[1]) : T(0);
  map.back_row[0] = known ? static_cast<T>(back[2]) : T(0), map.back_row[1] = known ? static_cast<T>(back[3]) : T(0);
  map.reach_column = known ? static_cast<T>(reach_column) : static_cast<T>(2 * size);
  map.reach_row = known ? static_cast<T>(reach_row) : static_cast<T>(2 * size);
  out[at] = map;
}

// Where a pixel of a copy looks: the pixel up and to the left, -1 to W - 1 and -1 to H - 1, and how far beyond it.
template <class T>
struct Place {
  int left, up;
  T right, down;
  T moves_right, moves_down;
};

// False where it looks outside, or the map is broken.
template <class T, bool Moving>
__device__ __forceinline__ bool find_place(const Map<T>& map, int64_t i, int64_t j, int64_t H, int64_t W, Place<T>& place) {
  const T row = static_cast<T>(i), column = static_cast<T>(j);
  const T u = fma(map.u[0], column, fma(map.u[1], row, map.u[2])), v = fma(map.v[0], column, fma(map.v[1], row, map.v[2]));
  if (!(u >= T(-1) && u < static_cast<T>(W) && v >= T(-1) && v < static_cast<T>(H))) return false;
  const T left = floor(u), up = floor(v);
  place.left = static_cast<int>(left), place.up = static_cast<int>(up);
  place.right = u - left, place.down = v - up;
  place.moves_right = Moving ? fma(map.moves_u[0], column, fma(map.moves_u[1], row, map.moves_u[2])) : T(0);
  place.moves_down = Moving ? fma(map.moves_v[0], column, fma(map.moves_v[1], row, map.moves_v[2])) : T(0);
  return true;
}

// The four pixels around a place, zero outside.
template <class T>
struct Corners {
  T p, q, r, s;

  __device__ __forceinline__ Corners(const T* plane, int64_t stride_h, int64_t stride_w, const Place<T>& at, int64_t H,
                                     int64_t W) {
    const bool left = at.left >= 0, right = at.left + 1 < W, up = at.up >= 0, down = at.up + 1 < H;
    const T* const first = plane + at.up * stride_h + at.left * stride_w;
    p = up && left ? first[0] : T(0);
    q = up && right ? first[stride_w] : T(0);
    r = down && left ? first[stride_h] : T(0);
    s = down && right ? first[stride_h + stride_w] : T(0);
  }
  __device__ __forceinline__ T twist() const { return (s - r) - (q - p); }
  __device__ __forceinline__ T slope_right(const Place<T>& at) const { return fma(at.down, twist(), q - p); }
  __device__ __forceinline__ T slope_down(const Place<T>& at) const { return fma(at.right, twist(), r - p); }
  __device__ __forceinline__ T value(const Place<T>& at) const {
    return fma(at.down, fma(at.right, twist(), r - p), fma(at.right, q - p, p));
  }
};

//   x (N, C, H, W) by strides, maps (M, S), out (N, S, C, H, W), of which `axes` are (S, H, W) and `count` N S H W
template <class T, class Index, bool Moving>
__global__ void __launch_bounds__(kThreads) copies_kernel(Image<T> x, const Map<T>* __restrict__ maps, T* __restrict__ out,
                                                          Index count, Axes<Index> axes, int64_t C, bool shared) {
  const int64_t S = axes.C.value(), H = axes.H.value(), W = axes.W.value();
  for (int64_t linear = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; linear < static_cast<int64_t>(count);
       linear += static_cast<int64_t>(gridDim.x) * kThreads) {
    const auto at = axes(static_cast<Index>(linear));
    const int64_t n = at.n, s = at.c, i = at.h, j = at.w;
    const Map<T>& map = maps[(shared ? 0 : n * S) + s];
    Place<T> place;
    const bool inside = find_place<T, Moving>(map, i, j, H, W, place);
    const T* plane = x.data + n * x.n;
    T* to = out + ((n * S + s) * C * H + i) * W + j;
    for (int64_t c = 0; c < C; ++c, plane += x.c, to += H * W) {
      T value = map.broken() ? static_cast<T>(NAN) : T(0);
      if (inside) {
        const Corners<T> corners(plane, x.h, x.w, place, H, W);
        value = Moving ? place.moves_right * corners.slope_right(place) + place.moves_down * corners.slope_down(place)
                       : corners.value(place);
      }
      *to = value;
    }
  }
}

// Block: (part of the pixels, copy, image), part fastest.
//   grad (N, S, C, H, W) and x (N, C, H, W) by strides, maps (M, S), sums (M, images, parts, S, 6) with images those of one map
template <class T, bool Moving>
__global__ void __launch_bounds__(kThreads)
    map_gradient_kernel(Image<T> grad, int64_t grad_copy, Image<T> x, const Map<T>* __restrict__ maps,
                        double* __restrict__ sums, int64_t S, int64_t C, int64_t H, int64_t W, int64_t parts, bool shared) {
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<double> scratch = memory.array<double>(kThreads / kWarp);
  const int64_t part = blockIdx.x % parts, s = blockIdx.x / parts % S, n = blockIdx.x / parts / S;
  const Map<T>& map = maps[(shared ? 0 : n * S) + s];
  const int64_t end = min(H * W, (part + 1) * kPartPlaces);
  const T middle_row = static_cast<T>(H - 1) / 2, middle_column = static_cast<T>(W - 1) / 2;
  T total[6] = {};
  for (int64_t pixel = part * kPartPlaces + threadIdx.x; pixel < end; pixel += kThreads) {
    const int64_t i = pixel / W, j = pixel - i * W;
    Place<T> place;
    if (!find_place<T, Moving>(map, i, j, H, W, place)) continue;
    const T* incoming = grad.data + n * grad.n + s * grad_copy + i * grad.h + j * grad.w;
    const T* plane = x.data + n * x.n;
    T by_right = 0, by_down = 0;
    for (int64_t c = 0; c < C; ++c, incoming += grad.c, plane += x.c) {
      const Corners<T> corners(plane, x.h, x.w, place, H, W);
      by_right = fma(*incoming, Moving ? place.moves_down * corners.twist() : corners.slope_right(place), by_right);
      by_down = fma(*incoming, Moving ? place.moves_right * corners.twist() : corners.slope_down(place), by_down);
    }
    const T row = static_cast<T>(i) - middle_row, column = static_cast<T>(j) - middle_column;
    total[0] = fma(by_right, column, total[0]), total[1] = fma(by_right, row, total[1]), total[2] += by_right;
    total[3] = fma(by_down, column, total[3]), total[4] = fma(by_down, row, total[4]), total[5] += by_down;
  }
  double* const to = sums + ((n * parts + part) * S + s) * 6;
#pragma unroll
  for (int k = 0; k < 6; ++k) {
    const double value = block_reduce(map.broken() ? static_cast<double>(NAN) : static_cast<double>(total[k]), scratch, Sum{});
    if (threadIdx.x == 0) to[k] = value;
  }
}

// out[m,s,k] = scale[k] times the sum over parts of sums[m,part,s,k], in order
//   sums (M, parts, S, 6), out (M, S, 6), of which `count` are M S
template <class T>
__global__ void __launch_bounds__(kThreads, 1) add_maps_kernel(const double* __restrict__ sums, T* __restrict__ out,
                                                               int64_t count, int64_t parts, int64_t S, int64_t H, int64_t W) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  const double* from = sums + (at / S * parts * S + at % S) * 6;
  double total[6] = {};
  for (int64_t part = 0; part < parts; ++part, from += S * 6) {
#pragma unroll
    for (int k = 0; k < 6; ++k) total[k] += from[k];
  }
  const AffineScales scales(H, W);
  const double scale[6] = {1, scales.across(), scales.a, scales.down(), 1, scales.b};
#pragma unroll
  for (int k = 0; k < 6; ++k) out[at * 6 + k] = static_cast<T>(total[k] * scale[k]);
}

// The first and the last whole number of those from 0 to size - 1 that are not further from `middle` than `reach`.
template <class T>
__device__ __forceinline__ void reached(T middle, T reach, int64_t size, int& first, int& last) {
  const T end = static_cast<T>(size);
  first = static_cast<int>(min(max(ceil(middle - reach), T(0)), end));
  last = static_cast<int>(max(min(floor(middle + reach), end - 1), T(-1)));
}

//   grad (N, S, C, H, W) by strides, maps (M, S), out (N, C, H, W), of which `axes` are (groups of channels, H, W)
template <class T, class Index, bool Moving>
__global__ void __launch_bounds__(kThreads, 1)
    image_gradient_kernel(Image<T> grad, int64_t grad_copy, const Map<T>* __restrict__ maps, T* __restrict__ out, Index count,
                          Axes<Index> axes, int64_t S, int64_t C, bool shared) {
  const int64_t H = axes.H.value(), W = axes.W.value();
  for (int64_t linear = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; linear < static_cast<int64_t>(count);
       linear += static_cast<int64_t>(gridDim.x) * kThreads) {
    const auto at = axes(static_cast<Index>(linear));
    const int64_t n = at.n, c0 = static_cast<int64_t>(at.c) * kChannels;
    const int channels = static_cast<int>(min(C - c0, int64_t{kChannels}));
    const int row = static_cast<int>(at.h), column = static_cast<int>(at.w);
    T total[kChannels] = {};
    for (int64_t s = 0; s < S; ++s) {
      const Map<T>& map = maps[(shared ? 0 : n * S) + s];
      if (map.broken()) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) total[c] = static_cast<T>(NAN);
        break;
      }
      const T u = static_cast<T>(column) - map.u[2], v = static_cast<T>(row) - map.v[2];
      int first_i, last_i, first_j, last_j;
      reached(fma(map.back_column[0], u, map.back_column[1] * v), map.reach_column, W, first_j, last_j);
      reached(fma(map.back_row[0], u, map.back_row[1] * v), map.reach_row, H, first_i, last_i);
      for (int i = first_i; i <= last_i; ++i) {
        for (int j = first_j; j <= last_j; ++j) {
          Place<T> place;
          if (!find_place<T, Moving>(map, i, j, H, W, place)) continue;
          const int across = column - place.left, down = row - place.up;  // 0 or 1: this pixel is one of the four
          if (across < 0 || across > 1 || down < 0 || down > 1) continue;
          const T share_across = across ? place.right : T(1) - place.right, share_down = down ? place.down : T(1) - place.down;
          const T weight = Moving ? (across ? place.moves_right : -place.moves_right) * share_down +
                                        (down ? place.moves_down : -place.moves_down) * share_across
                                  : share_across * share_down;
          const T* incoming = grad.data + n * grad.n + s * grad_copy + c0 * grad.c + i * grad.h + j * grad.w;
#pragma unroll
          for (int c = 0; c < kChannels; ++c) {
            if (c < channels) total[c] = fma(weight, incoming[c * grad.c], total[c]);
          }
        }
      }
    }
    T* const to = out + ((n * C + c0) * H + row) * W + column;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      if (c < channels) to[c * H * W] = total[c];
    }
  }
}

template <class T>
MapSource<T> source(const AffineSizes& s, const std::optional<Tensor>& maps) {
  if (!maps) return {nullptr, 0, 0, 0, 0};
  return {maps->const_data_ptr<T>(), s.shared ? 0 : maps->stride(0), maps->stride(1), maps->stride(2), maps->stride(3)};
}

// Maps in pixels, in memory of their own.
template <class T>
class PixelMaps {
 public:
  PixelMaps(const Device& device, const char* name, const AffineSizes& s, const Tensor& maps,
            const std::optional<Tensor>& direction)
      : memory_(device_empty(maps, {s.maps() * s.S, int64_t{sizeof(Map<T>) / sizeof(T)}}, kScalarType<T>)) {
    const int64_t count = s.maps() * s.S;
    launch(device, name, maps_kernel<T>, ceil_div(count, int64_t{kThreads}), kThreads, 0, source<T>(s, maps),
           source<T>(s, direction), reinterpret_cast<Map<T>*>(memory_.mutable_data_ptr<T>()), count, s.S, s.H, s.W);
  }
  const Map<T>* data() const { return reinterpret_cast<const Map<T>*>(memory_.const_data_ptr<T>()); }

 private:
  const Tensor memory_;
};

// As many blocks as there are tiles of kThreads; more than are launched are walked in strides.
int64_t blocks_of(int64_t count) { return std::min(ceil_div(count, int64_t{kThreads}), kMaxElementBlocks); }

// The strides of (N, S, C, H, W) but for the copies'.
template <class T>
Image<T> image_of_copies(const Tensor& t) {
  return {t.const_data_ptr<T>(), t.stride(0), t.stride(2), t.stride(3), t.stride(4)};
}

template <class T, bool Moving>
void copies(const AffineSizes& s, const Tensor& x, const Tensor& maps, const std::optional<Tensor>& direction,
            const Tensor& out) {
  constexpr const char* name = "affine_copies";
  const Device device(x);
  const PixelMaps<T> pixels(device, name, s, maps, direction);
  const int64_t count = s.N * s.S * s.H * s.W;
  with_index_type(count, [&](auto zero) {
    using Index = decltype(zero);
    launch(device, name, copies_kernel<T, Index, Moving>, blocks_of(count), kThreads, 0, image<T>(x), pixels.data(),
           out.mutable_data_ptr<T>(), count, Axes<Index>(s.S, s.H, s.W), s.C, s.shared);
  });
}

template <class T, bool Moving>
void gradients(const AffineSizes& s, const Tensor& grad, const Tensor& x, const Tensor& maps,
               const std::optional<Tensor>& direction, const Tensor* grad_x, const Tensor* grad_maps) {
  constexpr const char* name = "affine_copies_backward";
  const Device device(x);
  const PixelMaps<T> pixels(device, name, s, maps, direction);
  const Image<T> incoming = image_of_copies<T>(grad);
  if (grad_x) {
    const int64_t groups = ceil_div(s.C, int64_t{kChannels}), count = s.N * groups * s.H * s.W;
    with_index_type(count, [&](auto zero) {
      using Index = decltype(zero);
      launch(device, name, image_gradient_kernel<T, Index, Moving>, blocks_of(count), kThreads, 0, incoming, grad.stride(1),
             pixels.data(), grad_x->mutable_data_ptr<T>(), count, Axes<Index>(groups, s.H, s.W), s.S, s.C, s.shared);
    });
  }
  if (grad_maps) {
    const int64_t parts = ceil_div(s.H * s.W, kPartPlaces), count = s.maps() * s.S;
    const Tensor sums = device_empty(x, {s.N, parts, s.S, 6}, ScalarType::Double);
    launch(device, name, map_gradient_kernel<T, Moving>, s.N * s.S * parts, kThreads,
           shared_size(kThreads / kWarp * sizeof(double)), incoming, grad.stride(1), image<T>(x), pixels.data(),
           sums.mutable_data_ptr<double>(), s.S, s.C, s.H, s.W, parts, s.shared);
    launch(device, name, add_maps_kernel<T>, ceil_div(count, int64_t{kThreads}), kThreads, 0, sums.const_data_ptr<double>(),
           grad_maps->mutable_data_ptr<T>(), count, (s.shared ? s.N : 1) * parts, s.S, s.H, s.W);
  }
}

Tensor affine_copies(const Tensor& x, const Tensor& maps, const std::optional<Tensor>& direction) {
  const AffineSizes s = check_affine_copies("affine_copies", x, maps, direction);
  const Tensor out = device_empty(x, {s.N, s.S, s.C, s.H, s.W});
  if (out.numel() == 0) return out;
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "affine_copies", [&] {
    const auto run = direction ? &copies<scalar_t, true> : &copies<scalar_t, false>;
    run(s, x, maps, direction, out);
  });
  return out;
}

std::tuple<Tensor, Tensor> affine_copies_backward(const Tensor& grad, const Tensor& x, const Tensor& maps,
                                                  const std::optional<Tensor>& direction, bool wants_x, bool wants_maps) {
  const AffineSizes s = check_affine_gradients("affine_copies_backward", grad, x, maps, direction);
  const bool empty = grad.numel() == 0;
  const auto like = [&](bool wanted, const Tensor& t, std::initializer_list<int64_t> shape) {
    return !wanted ? device_empty(t, {0}) : empty ? zeros_of(t, shape) : device_empty(t, shape);
  };
  const Tensor grad_x = like(wants_x, x, {s.N, s.C, s.H, s.W}), grad_maps = like(wants_maps, maps, {maps.size(0), s.S, 2, 3});
  if (empty || (!wants_x && !wants_maps)) return {grad_x, grad_maps};
  const Tensor *const to_x = wants_x ? &grad_x : nullptr, *const to_maps = wants_maps ? &grad_maps : nullptr;
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "affine_copies_backward", [&] {
    const auto run = direction ? &gradients<scalar_t, true> : &gradients<scalar_t, false>;
    run(s, grad, x, maps, direction, to_x, to_maps);
  });
  return {grad_x, grad_maps};
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) {
  m.impl("affine_copies", TORCH_BOX(&affine_copies));
  m.impl("affine_copies_backward", TORCH_BOX(&affine_copies_backward));
}

}  // namespace
}  // namespace ella

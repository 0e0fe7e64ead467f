// Images with a border, circular or of zeros.
#pragma once

#include <algorithm>
#include <array>

#include "conv/cuda/components.cuh"
#include "cuda/elements.cuh"

namespace ella {

// out[n,c,i,j] = x[n,c,i - pad_h,j - pad_w], with indices modulo the size, each image moved by its component first, or, unless
// CIRCULAR, zero outside of it
//   x (N, C, H, W), out (N, C, H + 2 pad_h, W + 2 pad_w) contiguous, of which `axes` are the last three;
//   before_h = -pad_h mod H; unless CIRCULAR, pad_h
template <class T, class Index, bool CIRCULAR>
__global__ void __launch_bounds__(kElementThreads)
    pad_kernel(Image<T> x, Components components, T* __restrict__ out, Index count, Axes<Index> axes, Divisor<Index> H,
               Divisor<Index> W, Index before_h, Index before_w) {
  write_elements(out, count, [&](Index linear) {
    const auto at = axes(linear);
    if constexpr (CIRCULAR) {
      const int64_t component = components.of(at.n);
      if (!is_component(component)) return static_cast<T>(NAN);
      const Index up = component & 1, left = component >> 1;
      return x.at(at.n, at.c, H.rest(at.h + before_h + up), W.rest(at.w + before_w + left));
    } else {
      const Index h = at.h - before_h, w = at.w - before_w;  // below 0 without sign: large
      const bool inside = at.h >= before_h && h < H.value() && at.w >= before_w && w < W.value();
      return inside ? x.at(at.n, at.c, h, w) : T(0);
    }
  });
}

// Kernels add places of an image, once or twice, to places of a padded one, which may be longer than the other has elements.
inline int64_t max_padded_index(const std::array<int64_t, 2>& size, const std::array<int64_t, 2>& padded, int64_t count) {
  return std::max({count, 2 * size[0] + padded[0], 2 * size[1] + padded[1]});
}

inline int64_t modulo(int64_t number, int64_t size) { return size ? (number % size + size) % size : 0; }

// x (N, C, H, W) = `sizes`, of any strides, with a border of pad_h rows and pad_w columns on each side, contiguous and of the
// dtype and device of `like`.
template <class T, bool CIRCULAR>
Tensor padded_images(const Device& device, const char* name, const Tensor& like, const Image<T>& x,
                     const std::array<int64_t, 4>& sizes, int64_t pad_h, int64_t pad_w, Components components) {
  const int64_t C = sizes[1], H = sizes[2], W = sizes[3], padded_h = H + 2 * pad_h, padded_w = W + 2 * pad_w;
  const Tensor out = device_empty(like, {sizes[0], C, padded_h, padded_w}, kScalarType<T>);
  const int64_t count = out.numel();
  with_index_type(max_padded_index({H, W}, {padded_h, padded_w}, count), [&](auto zero) {
    using Index = decltype(zero);
    launch(device, name, pad_kernel<T, Index, CIRCULAR>, element_blocks(count), kElementThreads, 0, x, components,
           out.mutable_data_ptr<T>(), count, Axes<Index>(C, padded_h, padded_w), Divisor<Index>(H), Divisor<Index>(W),
           CIRCULAR ? modulo(-pad_h, H) : pad_h, CIRCULAR ? modulo(-pad_w, W) : pad_w);
  });
  return out;
}

}  // namespace ella

// circular_pad2d and its transpose, circular_fold2d: one kernel each, where a copy of the middle, of each border and, on the
// way back, of as many whole images would be up to two dozen.
#include "../common/checks.h"
#include "elements.cuh"

namespace ella {
namespace {

// out[n,c,i,j] = x[n,c,i - pad_h mod H,j - pad_w mod W]
//   x (N, C, H, W), out (N, C, H + 2 pad_h, W + 2 pad_w) contiguous, of which `axes` are the last three;
//   before_h = -pad_h mod H
template <class T, class Place>
__global__ void __launch_bounds__(kElementThreads)
    pad_kernel(Image<T> x, T* __restrict__ out, Place count, Axes<Place> axes, Divisor<Place> H, Divisor<Place> W,
               Place before_h, Place before_w) {
  write_elements(out, count, [&](Place place) {
    const auto at = axes(place);
    const Place h = at.h + before_h, w = at.w + before_w;
    return x.at(at.n, at.c, h - H(h) * H.value(), w - W(w) * W.value());
  });
}

// out[n,c,h,w] = sum of grad[n,c,i,j] over all i = h + pad_h mod H and j = w + pad_w mod W, in their order
//   grad (N, C, H + 2 pad_h, W + 2 pad_w), out (N, C, H, W) contiguous, of which `axes` are the last three;
//   after_h = pad_h mod H
template <class T, class Place>
__global__ void __launch_bounds__(kElementThreads)
    fold_kernel(Image<T> grad, T* __restrict__ out, Place count, Axes<Place> axes, Place padded_h, Place padded_w,
                Place after_h, Place after_w) {
  write_elements(out, count, [&](Place place) {
    const auto at = axes(place);
    const Place H = axes.H.value(), W = axes.W.value();
    const Place h = at.h + after_h, w = at.w + after_w;
    T sum = 0;
    for (Place i = h < H ? h : h - H; i < padded_h; i += H) {
      for (Place j = w < W ? w : w - W; j < padded_w; j += W) sum += grad.at(at.n, at.c, i, j);
    }
    return sum;
  });
}

// Kernels add places of an image to places of a padded one, which may be longer than the other has numbers.
int64_t most_places(const CircularPadSizes& s, int64_t count) {
  return std::max({count, s.H + s.padded_h(), s.W + s.padded_w()});
}

int64_t modulo(int64_t number, int64_t size) { return size ? (number % size + size) % size : 0; }

Tensor circular_pad2d(const Tensor& x, int64_t pad_h, int64_t pad_w) {
  const CircularPadSizes s = check_circular_pad2d(x, pad_h, pad_w);
  const Device device(x);
  const Tensor out = device_empty(x, {s.N, s.C, s.padded_h(), s.padded_w()});
  const int64_t count = out.numel();
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "circular_pad2d", [&] {
    with_places(most_places(s, count), [&](auto zero) {
      using Place = decltype(zero);
      launch(device, "circular_pad2d", pad_kernel<scalar_t, Place>, element_blocks(count), kElementThreads, 0,
             image<scalar_t>(x), out.mutable_data_ptr<scalar_t>(), count, Axes<Place>(s.C, s.padded_h(), s.padded_w()),
             Divisor<Place>(s.H), Divisor<Place>(s.W), modulo(-pad_h, s.H), modulo(-pad_w, s.W));
    });
  });
  return out;
}

Tensor circular_fold2d(const Tensor& grad, int64_t pad_h, int64_t pad_w) {
  const CircularPadSizes s = check_circular_fold2d(grad, pad_h, pad_w);
  const Device device(grad);
  const Tensor out = device_empty(grad, {s.N, s.C, s.H, s.W});
  const int64_t count = out.numel();
  ELLA_DISPATCH_FLOATING(grad.scalar_type(), "circular_fold2d", [&] {
    with_places(most_places(s, count), [&](auto zero) {
      using Place = decltype(zero);
      launch(device, "circular_fold2d", fold_kernel<scalar_t, Place>, element_blocks(count), kElementThreads, 0,
             image<scalar_t>(grad), out.mutable_data_ptr<scalar_t>(), count, Axes<Place>(s.C, s.H, s.W), s.padded_h(),
             s.padded_w(), modulo(pad_h, s.H), modulo(pad_w, s.W));
    });
  });
  return out;
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) {
  m.impl("circular_pad2d", TORCH_BOX(&circular_pad2d));
  m.impl("circular_fold2d", TORCH_BOX(&circular_fold2d));
}

}  // namespace
}  // namespace ella

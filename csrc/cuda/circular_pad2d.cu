// circular_pad2d and its transpose, circular_fold2d: one kernel each, where a copy of the middle, of each border and, on the
// way back, of as many whole images would be up to two dozen.
#include "../common/checks.h"
#include "padded_images.cuh"

namespace ella {
namespace {

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

Tensor circular_pad2d(const Tensor& x, int64_t pad_h, int64_t pad_w) {
  check_circular_pad2d(x, pad_h, pad_w);
  return ELLA_DISPATCH_FLOATING(x.scalar_type(), "circular_pad2d", [&] {
    return padded_images<scalar_t, true>(Device(x), "circular_pad2d", x, 0, x.size(0), pad_h, pad_w);
  });
}

Tensor circular_fold2d(const Tensor& grad, int64_t pad_h, int64_t pad_w) {
  const CircularPadSizes s = check_circular_fold2d(grad, pad_h, pad_w);
  const Device device(grad);
  const Tensor out = device_empty(grad, {s.N, s.C, s.H, s.W});
  const int64_t count = out.numel();
  ELLA_DISPATCH_FLOATING(grad.scalar_type(), "circular_fold2d", [&] {
    with_places(most_padded_places({s.H, s.W}, {s.padded_h(), s.padded_w()}, count), [&](auto zero) {
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

// circular_pad2d and its transpose, circular_fold2d: one kernel each, where a copy of the interior, of each border and, on the
// way back, of as many whole images would be up to two dozen.
#include "conv/checks.h"
#include "conv/cuda/padded_images.cuh"

namespace ella {
namespace {

// What is left of a number below 3 times the size, for which the general way takes a division.
template <class Index>
__device__ __forceinline__ Index rest_of_three(Index number, Index size) {
  const Index once = number < size ? number : number - size;
  return once < size ? once : once - size;
}

// out[n,c,h,w] = sum of grad[n,c,i,j] over all i = h + pad_h - up mod H and j = w + pad_w - left mod W, in their order
//   grad (N, C, H + 2 pad_h, W + 2 pad_w), out (N, C, H, W) contiguous, of which `axes` are the last three;
//   after_h = pad_h mod H
template <class T, class Index>
__global__ void __launch_bounds__(kElementThreads)
    fold_kernel(Image<T> grad, Components components, T* __restrict__ out, Index count, Axes<Index> axes, Index padded_h,
                Index padded_w, Index after_h, Index after_w) {
  write_elements(out, count, [&](Index linear) {
    const auto at = axes(linear);
    const int64_t component = components.of(at.n);
    if (!is_component(component)) return static_cast<T>(NAN);
    const Index H = axes.H.value(), W = axes.W.value(), up = component & 1, left = component >> 1;
    // Below 3 H and 3 W: a move back by a pixel is one forward by H - 1 (W - 1).
    const Index h = at.h + after_h + up * (H - 1), w = at.w + after_w + left * (W - 1);
    T sum = 0;
    for (Index i = rest_of_three(h, H); i < padded_h; i += H) {
      for (Index j = rest_of_three(w, W); j < padded_w; j += W) sum += grad.at(at.n, at.c, i, j);
    }
    return sum;
  });
}

Tensor circular_pad2d(const Tensor& x, int64_t pad_h, int64_t pad_w, const std::optional<Tensor>& index) {
  check_circular_pad2d(x, pad_h, pad_w, index);
  return ELLA_DISPATCH_FLOATING(x.scalar_type(), "circular_pad2d", [&] {
    return padded_images<scalar_t, true>(Device(x), "circular_pad2d", x, image<scalar_t>(x),
                                         {x.size(0), x.size(1), x.size(2), x.size(3)}, pad_h, pad_w, Components(index));
  });
}

Tensor circular_fold2d(const Tensor& grad, int64_t pad_h, int64_t pad_w, const std::optional<Tensor>& index) {
  const CircularPadSizes s = check_circular_fold2d(grad, pad_h, pad_w, index);
  const Device device(grad);
  const Tensor out = device_empty(grad, {s.N, s.C, s.H, s.W});
  const int64_t count = out.numel();
  ELLA_DISPATCH_FLOATING(grad.scalar_type(), "circular_fold2d", [&] {
    with_index_type(max_padded_index({s.H, s.W}, {s.padded_h(), s.padded_w()}, count), [&](auto zero) {
      using Index = decltype(zero);
      launch(device, "circular_fold2d", fold_kernel<scalar_t, Index>, element_blocks(count), kElementThreads, 0,
             image<scalar_t>(grad), Components(index), out.mutable_data_ptr<scalar_t>(), count, Axes<Index>(s.C, s.H, s.W),
             s.padded_h(), s.padded_w(), modulo(pad_h, s.H), modulo(pad_w, s.W));
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

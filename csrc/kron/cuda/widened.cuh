// Rows of 16-bit numbers as the float32 that kernels multiply: some are copied at a time, so few that they stay in the
// second-level cache between the copy and the products. TF32 holds every 16-bit number, so that one product of tensor cores is
// exact where float32 takes three.
#pragma once

#include <algorithm>
#include <array>

#include "cuda/elements.cuh"

namespace ella {

#ifndef ELLA_MAX_WIDENED_ELEMENTS
#define ELLA_MAX_WIDENED_ELEMENTS (1 << 22)
#endif
constexpr int64_t kMaxWidened = ELLA_MAX_WIDENED_ELEMENTS;  // copied at a time: 16 MiB of an H100's 50, an A100's 40

__device__ __forceinline__ float widened(BFloat16 number) { return __uint_as_float(uint32_t{number.x} << 16); }

__device__ __forceinline__ float widened(Half number) { return number; }

// out[i] = x's element i, for the indices i of a contiguous tensor of x's axes
//   x of any strides, out contiguous, of which `axes` are the last three
template <class S, class Index>
__global__ void __launch_bounds__(kElementThreads)
    widen_kernel(Image<S> x, float* __restrict__ out, Index count, Axes<Index> axes) {
  write_elements(out, count, [&](Index linear) {
    const auto at = axes(linear);
    return widened(x.at(at.n, at.c, at.h, at.w));
  });
}

// The images of a copy and its memory, which is kept until the kernels that read it are queued.
struct WidenedCopy {
  Tensor memory;
  Image<float> images;
};

// A float32 copy whose axes follow each other in memory as x's do, for kernels to find what is adjacent there adjacent here; an
// axis along which x repeats its elements repeats those of the copy.
template <class S>
WidenedCopy widened_copy(const Device& device, const char* name, const Tensor& like, const Image<S>& x,
                         std::array<int64_t, 4> sizes) {
  const std::array<int64_t, 4> strides{x.n, x.c, x.h, x.w};
  std::array<int, 4> order{0, 1, 2, 3};  // by strides, the largest first
  for (int axis = 0; axis < 4; ++axis) {
    if (strides[axis] == 0) sizes[axis] = 1;
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return strides[a] > strides[b]; });
  std::array<int64_t, 4> copied{};
  int64_t count = 1;
  for (int i = 3; i >= 0; --i) {
    const int axis = order[i];
    copied[axis] = strides[axis] == 0 ? 0 : count;
    count *= sizes[axis];
  }
  const Tensor memory = device_empty(like, {count}, ScalarType::Float);
  const auto [n, c, h, w] = order;
  const Image<S> sorted{x.data, strides[n], strides[c], strides[h], strides[w]};
  const int64_t last[3] = {sizes[c], sizes[h], sizes[w]};
  with_index_type(count, [&](auto zero) {
    using Index = decltype(zero);
    launch(device, name, widen_kernel<S, Index>, element_blocks(count), kElementThreads, 0, sorted,
           memory.mutable_data_ptr<float>(), count, Axes<Index>(last[0], last[1], last[2]));
  });
  return {memory, {memory.const_data_ptr<float>(), copied[0], copied[1], copied[2], copied[3]}};
}

// Calls add(images, count) for all of the N images (sizes after x's strides) of an accumulation, one call after the other:
// those of 16 bits as float32 copies of at most kMaxWidened elements or, where these are fewer, `min_count` images; others
// once, as they are.
template <class S, class Add>
void for_widened(const Device& device, const char* name, const Tensor& like, const Image<S>& x,
                 const std::array<int64_t, 4>& sizes, int64_t min_count, const Add& add) {
  if constexpr (!kIsWidened<S>) {
    add(x, sizes[0]);
  } else {
    int64_t image = 1;  // the elements that a copy has of one
    const std::array<int64_t, 4> strides{x.n, x.c, x.h, x.w};
    for (int axis = 1; axis < 4; ++axis) image *= strides[axis] == 0 ? 1 : sizes[axis];
    const int64_t at_once = x.n == 0 ? sizes[0] : std::max({kMaxWidened / image, min_count, int64_t{1}});
    for (int64_t first = 0; first < sizes[0]; first += at_once) {
      const int64_t count = std::min(at_once, sizes[0] - first);
      Image<S> from = x;
      from.data += first * x.n;
      const WidenedCopy copy = widened_copy(device, name, like, from, {count, sizes[1], sizes[2], sizes[3]});
      add(copy.images, count);
    }
  }
}

}  // namespace ella

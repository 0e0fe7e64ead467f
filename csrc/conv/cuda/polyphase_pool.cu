// polyphase_pool, polyphase_select and its transpose. Component i of an image is x[:, 2h + (i & 1), 2w + (i >> 1)].
#include <cmath>
#include <tuple>

#include "conv/checks.h"
#include "conv/cuda/components.cuh"
#include "cuda/elements.cuh"
#include "cuda/reduce.cuh"

namespace ella {
namespace {

constexpr int kThreads = kElementThreads;
constexpr int64_t kPartPositions = 16 * kThreads;  // positions (c,h,w) of a component per block: 16 a thread

struct OneNorm {
  __device__ __forceinline__ double operator()(double sum, double value) const { return sum + fabs(value); }
  __device__ __forceinline__ double combine(double a, double b) const { return a + b; }
};

struct TwoNorm {  // squared: the largest is the same
  __device__ __forceinline__ double operator()(double sum, double value) const { return fma(value, value, sum); }
  __device__ __forceinline__ double combine(double a, double b) const { return a + b; }
};

struct MaximumNorm {
  __device__ __forceinline__ double operator()(double sum, double value) const { return Maximum{}(sum, fabs(value)); }
  __device__ __forceinline__ double combine(double a, double b) const { return Maximum{}(a, b); }
};

// partials[n,part,i] = the norm of component i over the part's positions. Block: (part, n), part fastest.
//   x (N, C, 2h, 2w), partials (N, parts, 4); `axes` and `count` are those of one image's component
template <class T, class Index, class Norm>
__global__ void __launch_bounds__(kThreads)
    norm_kernel(Image<T> x, double* __restrict__ partials, Index count, Axes<Index> axes, int64_t parts, Norm norm) {
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<double> scratch = memory.array<double>(kThreads / kWarp);
  const int64_t n = blockIdx.x / parts, begin = blockIdx.x % parts * kPartPositions;
  const Index end = min(begin + kPartPositions, static_cast<int64_t>(count));
  double sums[4] = {0, 0, 0, 0};
  for (Index linear = begin + threadIdx.x; linear < end; linear += kThreads) {
    const auto at = axes(linear);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] = norm(sums[i], static_cast<double>(x.at(n, at.c, 2 * int64_t{at.h} + (i & 1), 2 * int64_t{at.w} + (i >> 1))));
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const double total = block_reduce(sums[i], scratch, [&](double a, double b) { return norm.combine(a, b); });
    if (threadIdx.x == 0) partials[blockIdx.x * int64_t{4} + i] = total;
  }
}

// index[n] = the component with the largest norm, the first of equals; a NaN counts as larger than any number.
//   partials (N, parts, 4), index (N)
template <class Norm>
__global__ void __launch_bounds__(kThreads)
    choose_kernel(const double* __restrict__ partials, int64_t* __restrict__ index, int64_t N, int64_t parts, Norm norm) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (n >= N) return;
  double best = -1;
  int which = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    double total = 0;
    for (int64_t part = 0; part < parts; ++part) total = norm.combine(total, partials[(n * parts + part) * 4 + i]);
    if (total > best || (total != total && best == best)) {
      best = total;
      which = i;
    }
  }
  index[n] = which;
}

// out[n,c,h,w] = component index[n] of x.
//   x (N, C, 2h, 2w), index (N), out (N, C, h, w) contiguous, of which `axes` are the last three
template <class T, class Index>
__global__ void __launch_bounds__(kThreads)
    select_kernel(Image<T> x, Components components, T* __restrict__ out, Index count, Axes<Index> axes) {
  write_elements(out, count, [&](Index linear) {
    const auto at = axes(linear);
    const int64_t i = components.of(at.n), h = at.h, w = at.w;
    return is_component(i) ? x.at(at.n, at.c, 2 * h + (i & 1), 2 * w + (i >> 1)) : static_cast<T>(NAN);
  });
}

// out = grad at component index[n], zero at the other three.
//   grad (N, C, h, w), index (N), out (N, C, 2h, 2w) contiguous, of which `axes` are the last three
template <class T, class Index>
__global__ void __launch_bounds__(kThreads)
    scatter_kernel(Image<T> grad, Components components, T* __restrict__ out, Index count, Axes<Index> axes) {
  write_elements(out, count, [&](Index linear) {
    const auto at = axes(linear);
    const int64_t i = components.of(at.n);
    const bool chosen = (at.h & 1) == (i & 1) && (at.w & 1) == (i >> 1);
    return !is_component(i) ? static_cast<T>(NAN) : chosen ? grad.at(at.n, at.c, at.h / 2, at.w / 2) : T(0);
  });
}

template <class T>
void select(const Device& device, const char* name, const Tensor& x, const Tensor& index, const Tensor& out,
            const PolyphaseSizes& s) {
  const int64_t count = out.numel();
  with_index_type(count, [&](auto zero) {
    using Index = decltype(zero);
    launch(device, name, select_kernel<T, Index>, element_blocks(count), kThreads, 0, image<T>(x), Components(index),
           out.mutable_data_ptr<T>(), count, Axes<Index>(s.C, s.h, s.w));
  });
}

template <class T, class Norm>
void choose(const Device& device, const Tensor& x, const Tensor& index, const PolyphaseSizes& s, Norm norm) {
  const int64_t count = s.C * s.h * s.w, parts = ceil_div(count, kPartPositions);
  const Tensor partials = device_empty(x, {s.N, parts, 4}, ScalarType::Double);
  with_index_type(count, [&](auto zero) {
    using Index = decltype(zero);
    launch(device, "polyphase_pool", norm_kernel<T, Index, Norm>, s.N * parts, kThreads,
           shared_size(kThreads / kWarp * sizeof(double)), image<T>(x), partials.mutable_data_ptr<double>(), count,
           Axes<Index>(s.C, s.h, s.w), parts, norm);
  });
  launch(device, "polyphase_pool", choose_kernel<Norm>, ceil_div(s.N, int64_t{kThreads}), kThreads, 0,
         partials.const_data_ptr<double>(), index.mutable_data_ptr<int64_t>(), s.N, parts, norm);
}

std::tuple<Tensor, Tensor> polyphase_pool(const Tensor& x, double norm) {
  const PolyphaseSizes s = check_polyphase_pool(x, norm);
  const Device device(x);
  const Tensor out = device_empty(x, {s.N, s.C, s.h, s.w}), index = device_empty(x, {s.N}, ScalarType::Long);
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "polyphase_pool", [&] {
    if (norm == 1.0) {
      choose<scalar_t>(device, x, index, s, OneNorm{});
    } else if (norm == 2.0) {
      choose<scalar_t>(device, x, index, s, TwoNorm{});
    } else {
      choose<scalar_t>(device, x, index, s, MaximumNorm{});
    }
    select<scalar_t>(device, "polyphase_pool", x, index, out, s);
  });
  return {out, index};
}

Tensor polyphase_select(const Tensor& x, const Tensor& index) {
  const PolyphaseSizes s = check_polyphase_select(x, index);
  const Device device(x);
  const Tensor out = device_empty(x, {s.N, s.C, s.h, s.w});
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "polyphase_select",
                         [&] { select<scalar_t>(device, "polyphase_select", x, index, out, s); });
  return out;
}

Tensor polyphase_scatter(const Tensor& grad, const Tensor& index) {
  const PolyphaseSizes s = check_polyphase_scatter(grad, index);
  const Device device(grad);
  const Tensor out = device_empty(grad, {s.N, s.C, 2 * s.h, 2 * s.w});
  const int64_t count = out.numel();
  ELLA_DISPATCH_FLOATING(grad.scalar_type(), "polyphase_scatter", [&] {
    with_index_type(count, [&](auto zero) {
      using Index = decltype(zero);
      launch(device, "polyphase_scatter", scatter_kernel<scalar_t, Index>, element_blocks(count), kThreads, 0,
             image<scalar_t>(grad), Components(index), out.mutable_data_ptr<scalar_t>(), count,
             Axes<Index>(s.C, 2 * s.h, 2 * s.w));
    });
  });
  return out;
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) {
  m.impl("polyphase_pool", TORCH_BOX(&polyphase_pool));
  m.impl("polyphase_select", TORCH_BOX(&polyphase_select));
  m.impl("polyphase_scatter", TORCH_BOX(&polyphase_scatter));
}

}  // namespace
}  // namespace ella

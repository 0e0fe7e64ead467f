// F-FC in float64 by torch's batched products, which are cuBLAS's on CUDA. Formulas, names and parts: stored.cuh. The
// intermediate lies as (C, D, N) in the forward pass, as (D, C, N) in the backward pass.
#pragma once

#include "cuda/library.cuh"
#include "factored_linear/cuda/arguments.cuh"

namespace ella::library {

// The first axis of three as the last one.
inline Tensor first_last(const Tensor& a) { return swapped(swapped(a, 0, 1), 1, 2); }

// factor[d] of[d,y] as (D, 1, Y).
inline Tensor scaled(const Tensor& factor, const Tensor& of) {
  const Tensor out = device_empty(of, {of.size(0), 1, of.size(1)});
  multiply(torch::stable::unsqueeze(torch::stable::unsqueeze(factor, 1), 2), torch::stable::unsqueeze(of, 1), out);
  return out;
}

// b_in reaches y by the sums of V over c: b_in[d] sum_c V[d,c,y].
inline Tensor forward(const FactoredLinearArguments& args, const std::optional<Tensor>& bias_out) {
  const FactoredLinearSizes& s = args.size;
  const Tensor y = device_empty(args.x, {s.N, s.D, s.Y});
  by_channels(s.D, s.C * s.N, [&](int64_t d, int64_t count) {
    const Tensor z = device_empty(args.x, {s.C, count, s.N});
    multiply(swapped(part(args.weight_in, 0, d, count), 0, 1), first_last(args.x), z);
    multiply(first_last(z), part(args.weight_out, 0, d, count), swapped(part(y, 1, d, count), 0, 1));
  });
  std::optional<Tensor> shift = bias_out;
  if (args.bias_in) {
    const Tensor inner = torch::stable::squeeze(scaled(*args.bias_in, sum(args.weight_out, 1)), 1);
    shift = shift ? plus(inner, *shift) : inner;
  }
  return shift ? plus(y, *shift) : y;
}

inline void backward(const Tensor& grad, const FactoredLinearArguments& args, FactoredLinearGradients& to) {
  const FactoredLinearSizes& s = args.size;
  const Tensor g = swapped(grad, 0, 1);  // (D, N, Y)
  by_channels(s.C, s.D * s.N, [&](int64_t c, int64_t count) {
    const Tensor u = swapped(part(args.weight_in, 1, c, count), 0, 1), x = swapped(part(args.x, 1, c, count), 0, 1);
    const auto of_c = [&](const Tensor& out) { return swapped(part(out, 1, c, count), 0, 1); };
    if (to.wanted.x || to.wanted.weight_in) {
      const Tensor dz = device_empty(grad, {s.D, count, s.N});
      multiply(part(args.weight_out, 1, c, count), swapped(g, 1, 2), dz);
      const Tensor by_c = swapped(dz, 0, 1);  // (c, D, N)
      if (to.wanted.x) multiply(swapped(by_c, 1, 2), u, of_c(to.x));
      if (to.wanted.weight_in) multiply(by_c, x, of_c(to.weight_in));
    }
    if (to.wanted.weight_out) {
      const Tensor z = device_empty(grad, {s.D, count, s.N});
      multiply(u, swapped(x, 1, 2), swapped(z, 0, 1));
      multiply(z, g, part(to.weight_out, 1, c, count));
    }
  });
  const bool shifts = to.wanted.weight_out && args.bias_in;
  if (!to.wanted.bias_in && !to.wanted.bias_out && !shifts) return;
  const Tensor sums = sum(grad, 0);  // (D, Y)
  if (shifts) to.weight_out = plus(to.weight_out, scaled(*args.bias_in, sums));
  if (to.wanted.bias_out) to.bias_out = sum(sums, 0);
  if (to.wanted.bias_in) {
    const Tensor out = torch::stable::unsqueeze(torch::stable::unsqueeze(to.bias_in, 1), 2);
    multiply(torch::stable::unsqueeze(sum(args.weight_out, 1), 1), torch::stable::unsqueeze(sums, 2), out);
  }
}

}  // namespace ella::library

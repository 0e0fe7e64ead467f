// factored_linear and its five gradients.
#include <tuple>
#include <type_traits>

#include "factored_linear_fused.cuh"
#include "factored_linear_stored.cuh"

namespace ella {
namespace {

// The result, and z where `keep` and it is kept; else an empty tensor.
std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
                                   const std::optional<Tensor>& bias_in, const std::optional<Tensor>& bias_out, bool keep) {
  const FactoredLinearSizes s = check_factored_linear(x, weight_in, weight_out, bias_in, bias_out);
  const Device device(x);
  const FactoredLinearArguments args{x, weight_in, weight_out, bias_in, s};
  const Tensor y = device_empty(x, {s.N, s.D, s.Y});
  Tensor middle = device_empty(x, {0});
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "factored_linear", [&] {
    if constexpr (std::is_same_v<scalar_t, float>) {
      if (stored::fits(device, s, false)) {
        const Tensor z = stored::empty_middle(args);
        stored::forward(device, args, bias_out, y, z);
        if (keep && stored::keeps(device, s)) middle = z;
        return;
      }
    }
    fused::forward<scalar_t>(device, args, bias_out, y);
  });
  return {y, middle};
}

Tensor factored_linear(const Tensor& x, const Tensor& weight_in, const Tensor& weight_out, std::optional<Tensor> bias_in,
                       std::optional<Tensor> bias_out) {
  return std::get<0>(forward(x, weight_in, weight_out, bias_in, bias_out, false));
}

std::tuple<Tensor, Tensor> factored_linear_keeping(const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
                                                   std::optional<Tensor> bias_in, std::optional<Tensor> bias_out) {
  return forward(x, weight_in, weight_out, bias_in, bias_out, true);
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// `middle`: what factored_linear_keeping gave, or null.
Gradients backward(const Tensor& grad, const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
                   const std::optional<Tensor>& bias_in, const Tensor* middle, const FactoredLinearWanted& wanted) {
  const FactoredLinearSizes s = check_factored_linear_backward(grad, x, weight_in, weight_out, bias_in);
  const bool kept = middle != nullptr && middle->numel() > 0;
  if (kept) check_kept_middle(x, *middle, {s.D, s.C, s.N});
  const Device device(x);
  const FactoredLinearArguments args{x, weight_in, weight_out, bias_in, s};
  const auto make = [&](bool asked, std::initializer_list<int64_t> shape) {
    return asked ? device_empty(x, shape) : device_empty(x, {0});
  };
  const FactoredLinearGradients to{wanted,
                                   make(wanted.x, {s.N, s.C, s.X}),
                                   make(wanted.weight_in, {s.D, s.C, s.X}),
                                   make(wanted.weight_out, {s.D, s.C, s.Y}),
                                   make(wanted.bias_in, {s.D}),
                                   make(wanted.bias_out, {s.Y})};
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "factored_linear_backward", [&] {
    if constexpr (std::is_same_v<scalar_t, float>) {
      if (stored::fits(device, s, wanted.weight_in || wanted.weight_out)) {
        return stored::backward(device, grad, args, to, kept ? middle : nullptr);
      }
    }
    fused::backward<scalar_t>(device, grad, args, to);
  });
  return {to.x, to.weight_in, to.weight_out, to.bias_in, to.bias_out};
}

Gradients factored_linear_backward(const Tensor& grad, const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
                                   std::optional<Tensor> bias_in, bool grad_x, bool grad_weight_in, bool grad_weight_out,
                                   bool grad_bias_in, bool grad_bias_out) {
  return backward(grad, x, weight_in, weight_out, bias_in, nullptr,
                  {grad_x, grad_weight_in, grad_weight_out, grad_bias_in, grad_bias_out});
}

Gradients factored_linear_backward_keeping(const Tensor& grad, const Tensor& x, const Tensor& weight_in,
                                           const Tensor& weight_out, std::optional<Tensor> bias_in, const Tensor& middle,
                                           bool grad_x, bool grad_weight_in, bool grad_weight_out, bool grad_bias_in,
                                           bool grad_bias_out) {
  return backward(grad, x, weight_in, weight_out, bias_in, &middle,
                  {grad_x, grad_weight_in, grad_weight_out, grad_bias_in, grad_bias_out});
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) {
  m.impl("factored_linear", TORCH_BOX(&factored_linear));
  m.impl("factored_linear_keeping", TORCH_BOX(&factored_linear_keeping));
  m.impl("factored_linear_backward", TORCH_BOX(&factored_linear_backward));
  m.impl("factored_linear_backward_keeping", TORCH_BOX(&factored_linear_backward_keeping));
}

}  // namespace
}  // namespace ella

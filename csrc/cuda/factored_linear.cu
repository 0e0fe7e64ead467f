// factored_linear and its five gradients.
#include <tuple>
#include <type_traits>

#include "factored_linear_fused.cuh"
#include "factored_linear_stored.cuh"

namespace ella {
namespace {

Tensor factored_linear(const Tensor& x, const Tensor& weight_in, const Tensor& weight_out, const std::optional<Tensor>& bias_in,
                       const std::optional<Tensor>& bias_out) {
  const FactoredLinearSizes s = check_factored_linear(x, weight_in, weight_out, bias_in, bias_out);
  const Device device(x);
  const FactoredLinearArguments args{x, weight_in, weight_out, bias_in, s};
  const Tensor y = device_empty(x, {s.N, s.D, s.Y});
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "factored_linear", [&] {
    if constexpr (std::is_same_v<scalar_t, float>) {
      if (stored::fits(device, s, false)) return stored::forward(device, args, bias_out, y);
    }
    fused::forward<scalar_t>(device, args, bias_out, y);
  });
  return y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> factored_linear_backward(const Tensor& grad, const Tensor& x,
                                                                            const Tensor& weight_in, const Tensor& weight_out,
                                                                            const std::optional<Tensor>& bias_in, bool grad_x,
                                                                            bool grad_weight_in, bool grad_weight_out,
                                                                            bool grad_bias_in, bool grad_bias_out) {
  const FactoredLinearSizes s = check_factored_linear_backward(grad, x, weight_in, weight_out, bias_in);
  const Device device(x);
  const FactoredLinearArguments args{x, weight_in, weight_out, bias_in, s};
  const auto make = [&](bool wanted, std::initializer_list<int64_t> shape) {
    return wanted ? device_empty(x, shape) : device_empty(x, {0});
  };
  const FactoredLinearGradients to{{grad_x, grad_weight_in, grad_weight_out, grad_bias_in, grad_bias_out},
                                   make(grad_x, {s.N, s.C, s.X}),
                                   make(grad_weight_in, {s.D, s.C, s.X}),
                                   make(grad_weight_out, {s.D, s.C, s.Y}),
                                   make(grad_bias_in, {s.D}),
                                   make(grad_bias_out, {s.Y})};
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "factored_linear_backward", [&] {
    if constexpr (std::is_same_v<scalar_t, float>) {
      if (stored::fits(device, s, grad_weight_in || grad_weight_out)) return stored::backward(device, grad, args, to);
    }
    fused::backward<scalar_t>(device, grad, args, to);
  });
  return {to.x, to.weight_in, to.weight_out, to.bias_in, to.bias_out};
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) {
  m.impl("factored_linear", TORCH_BOX(&factored_linear));
  m.impl("factored_linear_backward", TORCH_BOX(&factored_linear_backward));
}

}  // namespace
}  // namespace ella

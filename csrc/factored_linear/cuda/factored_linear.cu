// factored_linear and its five gradients.
#include <tuple>

#include "factored_linear/cuda/library.cuh"
#include "factored_linear/cuda/one_output.cuh"
#include "factored_linear/cuda/stored.cuh"
#include "factored_linear/ops.h"
#include "factored_linear/plan.h"

namespace ella {
namespace {

FactoredLinearWay way_of(const FactoredLinearSizes& s, const Tensor& x) {
  return factored_linear_on_cuda(s, x.scalar_type(), stored::kLargestAxis);
}

std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
                                   const std::optional<Tensor>& bias_in, const std::optional<Tensor>& bias_out, bool keep,
                                   bool tf32) {
  const FactoredLinearSizes s = check_factored_linear(x, weight_in, weight_out, bias_in, bias_out);
  const Device device(x);
  const FactoredLinearArguments args{x, weight_in, weight_out, bias_in, s, tf32};
  const Tensor none = device_empty(x, {0});
  const FactoredLinearWay way = way_of(s, x);
  if (way == FactoredLinearWay::library) return {library::forward(args, bias_out), none};
  const Tensor y = device_empty(x, {s.N, s.D, s.Y});
  if (way == FactoredLinearWay::multiplied_out) {
    one_output::forward(device, args, bias_out, y);
    return {y, none};
  }
  const std::optional<Tensor> z = stored::forward(device, args, bias_out, y);
  return {y, keep && z && factored_linear_keeps(s, z->numel()) ? *z : none};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients backward(const Tensor& grad, const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
                   const std::optional<Tensor>& bias_in, const Tensor* intermediate, const FactoredLinearWanted& wanted,
                   bool tf32) {
  const FactoredLinearSizes s = check_factored_linear_backward(grad, x, weight_in, weight_out, bias_in);
  const bool kept = intermediate != nullptr && intermediate->numel() > 0;
  if (kept) check_kept_intermediate(x, *intermediate, {s.D, s.C, s.N});
  const Device device(x);
  const FactoredLinearArguments args{x, weight_in, weight_out, bias_in, s, tf32};
  const auto make = [&](bool asked, std::initializer_list<int64_t> shape) {
    return asked ? device_empty(x, shape) : device_empty(x, {0});
  };
  FactoredLinearGradients to{wanted,
                             make(wanted.x, {s.N, s.C, s.X}),
                             make(wanted.weight_in, {s.D, s.C, s.X}),
                             make(wanted.weight_out, {s.D, s.C, s.Y}),
                             make(wanted.bias_in, {s.D}),
                             make(wanted.bias_out, {s.Y})};
  switch (way_of(s, x)) {
    case FactoredLinearWay::library:
      library::backward(grad, args, to);
      break;
    case FactoredLinearWay::multiplied_out:
      one_output::backward(device, grad, args, to);
      break;
    default:
      stored::backward(device, grad, args, to, kept ? intermediate : nullptr);
  }
  return {to.x, to.weight_in, to.weight_out, to.bias_in, to.bias_out};
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) {
  FactoredLinearForward<forward>::implement(m);
  FactoredLinearBackward<backward>::implement(m);
}

}  // namespace
}  // namespace ella

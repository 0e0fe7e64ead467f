// Of the gradients of F-FC those that curvature takes: of x and of the intermediate.
#include <tuple>

#include "factored_linear/cpu/gradients.h"
#include "factored_linear/cpu/one_output.h"

namespace ella {
namespace {

std::tuple<Tensor, Tensor> factored_linear_vjp(const Tensor& grad, const Tensor& weight_in, const Tensor& weight_out,
                                               bool grad_x, bool grad_intermediate) {
  const FactoredLinearSizes s = check_factored_linear_vjp(grad, weight_in, weight_out);
  const bool empty = s.N == 0 || s.C == 0 || s.D == 0 || s.X == 0 || s.Y == 0;
  const auto make = [&](bool asked, std::initializer_list<int64_t> shape) {
    return !asked ? empty_of(grad, {0}) : empty ? zeros_of(grad, shape) : empty_of(grad, shape);
  };
  Tensor dx = make(grad_x, {s.N, s.C, s.X}), dz = make(grad_intermediate, {s.D, s.C, s.N});
  if (s.N == 0 || s.D == 0 || !(grad_x || grad_intermediate)) return {dx, dz};
  FactoredLinearWanted wanted{};
  wanted.x = grad_x, wanted.intermediate = grad_intermediate;
  const Tensor none = empty_of(grad, {0}), no_x = empty_of(grad, {1, 1, 1});  // x: these gradients do not read it
  ELLA_DISPATCH_FLOATING(grad.scalar_type(), "factored_linear_vjp", [&] {
    if (factored_linear_on_cpu(s) == FactoredLinearWay::multiplied_out && !grad_intermediate) {
      OneOutput<scalar_t>(s, no_x, weight_in, weight_out, std::nullopt).backward(wanted, grad, dx, none, none, none, none);
    } else {
      FactoredBackward<scalar_t>(s, wanted, grad, no_x, weight_in, weight_out, std::nullopt, nullptr)
          .run(dx, none, none, dz, none, none);
    }
  });
  return {dx, dz};
}

ELLA_REGISTER(CPU, m) { m.impl("factored_linear_vjp", TORCH_BOX(&factored_linear_vjp)); }

}  // namespace
}  // namespace ella

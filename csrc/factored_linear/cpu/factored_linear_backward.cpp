// The gradients of F-FC.
#include <tuple>

#include "factored_linear/cpu/gradients.h"
#include "factored_linear/cpu/one_output.h"
#include "factored_linear/ops.h"

namespace ella {
namespace {

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients backward(const Tensor& grad, const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
                   const std::optional<Tensor>& bias_in, const Tensor* intermediate, const FactoredLinearWanted& wanted,
                   bool /*allow_tf32*/) {
  const FactoredLinearSizes s = check_factored_linear_backward(grad, x, weight_in, weight_out, bias_in);
  const bool empty = s.N == 0 || s.C == 0 || s.D == 0 || s.X == 0 || s.Y == 0;
  const auto make = [&](bool asked, std::initializer_list<int64_t> shape) {
    return !asked ? empty_of(x, {0}) : empty ? zeros_of(x, shape) : empty_of(x, shape);
  };
  Tensor dx = make(wanted.x, {s.N, s.C, s.X}), du = make(wanted.weight_in, {s.D, s.C, s.X}),
         dv = make(wanted.weight_out, {s.D, s.C, s.Y}), dbias_in = make(wanted.bias_in, {s.D}),
         dbias_out = make(wanted.bias_out, {s.Y});
  // With no positions to read or no channels, the biases still have gradients: the general loops handle sizes of zero in any
  // axis but N and D, where all sums are empty.
  if (s.N > 0 && s.D > 0) {
    ELLA_DISPATCH_FLOATING(x.scalar_type(), "factored_linear_backward", [&] {
      if (factored_linear_on_cpu(s) == FactoredLinearWay::multiplied_out) {
        OneOutput<scalar_t>(s, x, weight_in, weight_out, bias_in).backward(wanted, grad, dx, du, dv, dbias_in, dbias_out);
        return;
      }
      const scalar_t* kept = nullptr;
      if (intermediate != nullptr && intermediate->numel() > 0) {
        check_kept_intermediate(x, *intermediate, {kept_intermediate(kernels<scalar_t>(), s)});
        kept = intermediate->const_data_ptr<scalar_t>();
      }
      FactoredBackward<scalar_t>(s, wanted, grad, x, weight_in, weight_out, bias_in, kept).run(dx, du, dv, dbias_in, dbias_out);
    });
  }
  return {dx, du, dv, dbias_in, dbias_out};
}

ELLA_REGISTER(CPU, m) { FactoredLinearBackward<backward>::implement(m); }

}  // namespace
}  // namespace ella

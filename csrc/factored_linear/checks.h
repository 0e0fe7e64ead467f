// Sizes and argument checks of F-FC, shared by the CPU and CUDA implementations.
#pragma once

#include "common/checks.h"

namespace ella {

struct FactoredLinearSizes {
  int64_t N, C, X, D, Y;
};

inline FactoredLinearSizes countable(const char* op, const FactoredLinearSizes& s) {
  check_countable(op, "x (N, C, X)", {s.N, s.C, s.X});
  check_countable(op, "the output (N, D, Y)", {s.N, s.D, s.Y});
  check_countable(op, "the sums over x (N, D, C)", {s.N, s.D, s.C});
  return s;
}

inline FactoredLinearSizes check_factored_weights(const ArgumentCheck& check, const Tensor& x, const Tensor& weight_in,
                                                  const Tensor& weight_out) {
  check.tensor("x", x, {-1, -1, -1}, "(N, C, X)");
  const int64_t C = x.size(1), X = x.size(2);
  check.tensor("weight_in", weight_in, {-1, C, X}, "(D, C, X)");
  const int64_t D = weight_in.size(0);
  check.tensor("weight_out", weight_out, {D, C, -1}, "(D, C, Y)");
  return countable("factored_linear", {x.size(0), C, X, D, weight_out.size(2)});
}

inline FactoredLinearSizes check_factored_linear(const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
                                                 const std::optional<Tensor>& bias_in, const std::optional<Tensor>& bias_out) {
  const ArgumentCheck check("factored_linear", "x", x);
  const FactoredLinearSizes s = check_factored_weights(check, x, weight_in, weight_out);
  if (bias_in) check.tensor("bias_in", *bias_in, {s.D}, "(D,)");
  if (bias_out) check.tensor("bias_out", *bias_out, {s.Y}, "(Y,)");
  return s;
}

inline FactoredLinearSizes check_factored_linear_backward(const Tensor& grad, const Tensor& x, const Tensor& weight_in,
                                                          const Tensor& weight_out, const std::optional<Tensor>& bias_in) {
  const ArgumentCheck check("factored_linear_backward", "x", x);
  const FactoredLinearSizes s = check_factored_weights(check, x, weight_in, weight_out);
  check.tensor("grad", grad, {s.N, s.D, s.Y}, "(N, D, Y)");
  if (bias_in) check.tensor("bias_in", *bias_in, {s.D}, "(D,)");
  return s;
}

// Which gradients are asked for.
struct FactoredLinearWanted {
  bool x, weight_in, weight_out, bias_in, bias_out;
};

// z as the forward pass kept it, in `shape`.
inline void check_kept_intermediate(const Tensor& x, const Tensor& intermediate, std::initializer_list<int64_t> shape) {
  ArgumentCheck("factored_linear_backward_keeping", "x", x)
      .tensor("intermediate", intermediate, shape, "(what the forward kept,)");
  ELLA_CHECK(intermediate.is_contiguous(), "factored_linear_backward_keeping: intermediate must be contiguous");
}

}  // namespace ella

// The ops of F-FC, of the function that computes each direction on a device.
#pragma once

#include <optional>
#include <tuple>

#include "factored_linear/checks.h"

namespace ella {

// Forward gives the result and, where its last argument but one says so and it is kept, z; else an empty tensor.
template <auto Forward>
struct FactoredLinearForward {
  static Tensor plain(const Tensor& x, const Tensor& weight_in, const Tensor& weight_out, std::optional<Tensor> bias_in,
                      std::optional<Tensor> bias_out, bool allow_tf32) {
    return std::get<0>(Forward(x, weight_in, weight_out, bias_in, bias_out, false, allow_tf32));
  }

  static std::tuple<Tensor, Tensor> keeping(const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
                                            std::optional<Tensor> bias_in, std::optional<Tensor> bias_out, bool allow_tf32) {
    return Forward(x, weight_in, weight_out, bias_in, bias_out, true, allow_tf32);
  }

  template <class Library>
  static void implement(Library& m) {
    m.impl("factored_linear", TORCH_BOX(&plain));
    m.impl("factored_linear_keeping", TORCH_BOX(&keeping));
  }
};

// Backward takes what factored_linear_keeping gave, or null.
template <auto Backward>
struct FactoredLinearBackward {
  using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

  static Gradients plain(const Tensor& grad, const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
                         std::optional<Tensor> bias_in, bool grad_x, bool grad_weight_in, bool grad_weight_out,
                         bool grad_bias_in, bool grad_bias_out, bool allow_tf32) {
    return Backward(grad, x, weight_in, weight_out, bias_in, nullptr,
                    {grad_x, grad_weight_in, grad_weight_out, grad_bias_in, grad_bias_out}, allow_tf32);
  }

  static Gradients keeping(const Tensor& grad, const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
                           std::optional<Tensor> bias_in, const Tensor& intermediate, bool grad_x, bool grad_weight_in,
                           bool grad_weight_out, bool grad_bias_in, bool grad_bias_out, bool allow_tf32) {
    return Backward(grad, x, weight_in, weight_out, bias_in, &intermediate,
                    {grad_x, grad_weight_in, grad_weight_out, grad_bias_in, grad_bias_out}, allow_tf32);
  }

  template <class Library>
  static void implement(Library& m) {
    m.impl("factored_linear_backward", TORCH_BOX(&plain));
    m.impl("factored_linear_backward_keeping", TORCH_BOX(&keeping));
  }
};

}  // namespace ella

// The ops of Gaussian bases, of the two functions that compute them on a device.
#pragma once

#include <optional>
#include <tuple>

#include "basis/checks.h"

namespace ella {

// Project and Derivative take an op's name, its sizes, its arguments and the directions, where it has any.
template <auto Project, auto Derivative>
struct GaussianOps {
  static Tensor project(const Tensor& x, const Tensor& u, const Tensor& v) {
    constexpr const char* op = "gaussian_project";
    return Project(op, check_gaussian_project(op, x, u, v), x, u, v, std::nullopt, std::nullopt);
  }

  static Tensor tangent(const Tensor& x, const Tensor& u, const Tensor& v, const Tensor& du, const Tensor& dv) {
    constexpr const char* op = "gaussian_project_tangent";
    const GaussianSizes s = check_gaussian_project(op, x, u, v);
    check_gaussian_directions(op, s, x, du, dv);
    return Project(op, s, x, u, v, du, dv);
  }

  static std::tuple<Tensor, Tensor> gradient(const Tensor& grad, const Tensor& x, const Tensor& u, const Tensor& v) {
    constexpr const char* op = "gaussian_project_gradient";
    return Derivative(op, check_gaussian_gradient(op, grad, x, u, v), grad, x, u, v, std::nullopt, std::nullopt);
  }

  static std::tuple<Tensor, Tensor> hvp(const Tensor& grad, const Tensor& x, const Tensor& u, const Tensor& v, const Tensor& du,
                                        const Tensor& dv) {
    constexpr const char* op = "gaussian_project_hvp";
    const GaussianSizes s = check_gaussian_gradient(op, grad, x, u, v);
    check_gaussian_directions(op, s, x, du, dv);
    return Derivative(op, s, grad, x, u, v, du, dv);
  }

  template <class Library>
  static void implement(Library& m) {
    m.impl("gaussian_project", TORCH_BOX(&project));
    m.impl("gaussian_project_tangent", TORCH_BOX(&tangent));
    m.impl("gaussian_project_gradient", TORCH_BOX(&gradient));
    m.impl("gaussian_project_hvp", TORCH_BOX(&hvp));
  }
};

}  // namespace ella

// Sizes and argument checks of Gaussian bases, shared by the CPU and CUDA implementations.
#pragma once

#include "common/checks.h"

namespace ella {

struct GaussianSizes {
  int64_t M, X, A, P;
};

inline GaussianSizes check_gaussian_project(const char* op, const Tensor& x, const Tensor& u, const Tensor& v) {
  const ArgumentCheck check(op, "x", x);
  check.tensor("x", x, {-1, -1}, "(M, X)");
  check.coordinates("u", u, {x.size(1), -1}, "(X, P)");
  check.coordinates("v", v, {-1, u.size(1)}, "(A, P)");
  check_countable(op, "the output (M, A)", {x.size(0), v.size(0)});
  check_countable(op, "the differences (A, X, P)", {v.size(0), x.size(1), u.size(1)});
  return {x.size(0), x.size(1), v.size(0), u.size(1)};
}

inline GaussianSizes check_gaussian_gradient(const char* op, const Tensor& grad, const Tensor& x, const Tensor& u,
                                             const Tensor& v) {
  const GaussianSizes s = check_gaussian_project(op, x, u, v);
  ArgumentCheck(op, "x", x).tensor("grad", grad, {s.M, s.A}, "(M, A)");
  return s;
}

inline void check_gaussian_directions(const char* op, const GaussianSizes& s, const Tensor& x, const Tensor& du,
                                      const Tensor& dv) {
  const ArgumentCheck check(op, "x", x);
  check.coordinates("du", du, {s.X, s.P}, "(X, P)");
  check.coordinates("dv", dv, {s.A, s.P}, "(A, P)");
}

}  // namespace ella

// Sizes and argument checks of images under affine maps, shared by the CPU and CUDA implementations.
#pragma once

#include "common/checks.h"

namespace ella {

struct AffineSizes {
  int64_t N, S, C, H, W;
  bool shared;  // one set of S maps for all images

  int64_t maps() const { return shared ? 1 : N; }
};

inline AffineSizes check_affine_copies(const char* op, const Tensor& x, const Tensor& maps,
                                       const std::optional<Tensor>& direction) {
  constexpr int64_t kMax = (int64_t{1} << 31) - 1;
  const ArgumentCheck check(op, "x", x);
  check.tensor("x", x, {-1, -1, -1, -1}, "(N, C, H, W)");
  check.tensor("maps", maps, {-1, -1, 2, 3}, "(M, S, 2, 3)");
  const int64_t N = x.size(0), C = x.size(1), H = x.size(2), W = x.size(3), M = maps.size(0), S = maps.size(1);
  ELLA_CHECK(M == N || M == 1, op, ": maps must have shape (M, S, 2, 3) with M = N = ", N, " or M = 1, got ",
             shape_string(maps));
  if (direction) check.tensor("direction", *direction, {M, S, 2, 3}, "(M, S, 2, 3)");
  ELLA_CHECK(H < kMax && W < kMax && (H + 1) * (W + 1) < kMax, op,
             ": x must have fewer than 2^31 pixels in a plane with a border, got ", shape_string(x));
  check_countable(op, "the copies (N, S, C, H, W)", {N, S, C, H, W});
  return {N, S, C, H, W, M == 1 && N != 1};
}

inline AffineSizes check_affine_gradients(const char* op, const Tensor& grad, const Tensor& x, const Tensor& maps,
                                          const std::optional<Tensor>& direction) {
  const AffineSizes s = check_affine_copies(op, x, maps, direction);
  ArgumentCheck(op, "x", x).tensor("grad", grad, {s.N, s.S, s.C, s.H, s.W}, "(N, S, C, H, W)");
  return s;
}

}  // namespace ella

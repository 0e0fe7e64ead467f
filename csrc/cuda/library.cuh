// Torch's own operations on tensors, by the stable ABI: batched products, which are cuBLAS's on CUDA, sums and views.
#pragma once

#include <array>

#include "common/device.h"

namespace ella::library {

inline Tensor swapped(const Tensor& a, int64_t first, int64_t second) { return torch::stable::transpose(a, first, second); }

inline Tensor part(Tensor a, int64_t axis, int64_t first, int64_t count) {
  return torch::stable::narrow(a, axis, first, count);
}

// out[p] = a[p] b[p], any strides.
inline void multiply(const Tensor& a, const Tensor& b, const Tensor& out) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(a), from(b), from(out)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::bmm", "out", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // the result is `out` again, under a handle to release
}

inline Tensor sum(const Tensor& a, int64_t axis) {
  return torch::stable::sum(a, torch::headeronly::IntHeaderOnlyArrayRef(&axis, 1));
}

inline Tensor plus(const Tensor& a, const Tensor& b) { return torch::stable::subtract(a, b, -1.0); }

}  // namespace ella::library

// What the ways to compute F-FC on CUDA are given: stored.cuh and one_output.cuh in float32, library.cuh in float64.
#pragma once

#include <algorithm>
#include <optional>

#include "common/device_memory.h"
#include "factored_linear/checks.h"

namespace ella {

// The arguments, checked. Names and axes as in docs/method.md: U = weight_in (D, C, X), V = weight_out (D, C, Y).
struct FactoredLinearArguments {
  const Tensor &x, &weight_in, &weight_out;
  const std::optional<Tensor>& bias_in;
  FactoredLinearSizes size;
  bool tf32;  // whether tensor cores may multiply float32 numbers that are rounded to TF32
};

// The gradients, empty where not wanted.
struct FactoredLinearGradients {
  FactoredLinearWanted wanted;
  Tensor x, weight_in, weight_out, bias_in, bias_out;
};

// Elements of the intermediate that are there at a time. Tests say fewer, so that small shapes take several parts.
#ifndef ELLA_MAX_INTERMEDIATE
#define ELLA_MAX_INTERMEDIATE (1 << 23)
#endif
constexpr int64_t kMaxIntermediate = ELLA_MAX_INTERMEDIATE;

// Calls run(first, count) for all of `channels`, so many at a time as fit, at least once; each takes `each` elements.
template <class Run>
void by_channels(int64_t channels, int64_t each, const Run& run) {
  const int64_t max_count = std::max<int64_t>(kMaxIntermediate / std::max<int64_t>(each, 1), 1);
  int64_t first = 0;
  do {
    run(first, std::min(max_count, channels - first));
    first += max_count;
  } while (first < channels);
}

// The axes of a tensor of three dimensions in the order that a kernel wants them.
inline View3<float> view(const Tensor& tensor, int first = 0, int second = 1, int third = 2) {
  return {tensor.const_data_ptr<float>(), tensor.stride(first), tensor.stride(second), tensor.stride(third)};
}

// A bias is small: it is made contiguous rather than strided. The holder keeps the copy alive until the kernels are queued.
class Bias {
 public:
  explicit Bias(const std::optional<Tensor>& bias) {
    if (bias) holder_ = torch::stable::contiguous(*bias);
  }
  const float* data() const { return holder_ ? holder_->const_data_ptr<float>() : nullptr; }

 private:
  std::optional<Tensor> holder_;
};

}  // namespace ella

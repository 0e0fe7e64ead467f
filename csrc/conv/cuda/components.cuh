// Which polyphase component each image of a batch is about; component i begins i & 1 rows down and i >> 1 columns to the right.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>

#include "common/device.h"

namespace ella {

// An index outside 0..3 cannot be refused without waiting for the device: that image becomes NaN.
__device__ __forceinline__ bool is_component(int64_t index) { return index >= 0 && index < 4; }

// A tensor (N,), or none, which is 0 for all images.
struct Components {
  const int64_t* index = nullptr;
  int64_t stride = 0;

  Components() = default;
  explicit Components(const Tensor& tensor) : index(tensor.const_data_ptr<int64_t>()), stride(tensor.stride(0)) {}
  explicit Components(const std::optional<Tensor>& tensor) : Components(tensor ? Components(*tensor) : Components()) {}

  __device__ __forceinline__ int64_t of(int64_t image) const { return index ? index[image * stride] : 0; }
};

}  // namespace ella

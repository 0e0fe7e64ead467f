// Activations of one number z.
#pragma once

#include <cstdint>

namespace ella {

enum class Activation : int64_t {
  identity,
  relu,
  tanh,
  gaussian,  // exp(-z^2 / 2)
};

constexpr int64_t kActivations = 4;

}  // namespace ella

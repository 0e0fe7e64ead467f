// Which algorithm computes F-FC: chosen here alone, for its forward and its backward pass, on the CPU and on CUDA, for the op
// and for the Python function that may call torch instead. The choice depends on sizes, dtype, device and ELLA_CUDA_PATH.
#pragma once

#include <algorithm>

#include "common/cuda_path.h"
#include "factored_linear/checks.h"

namespace ella {

enum class FactoredLinearWay {
  multiplied_out,  // one product with V[d,c] U[d,c,x], of one output position
  fused,           // the intermediate stays in the cache
  stored,          // the intermediate goes through device memory between two launches of products on tensor cores
  library,         // the intermediate goes through device memory between two of torch's batched products
};

// The weights multiplied out are no larger than apart where X or Y is 1, and take fewer operations. On the CPU they pay from
// this many elements of the intermediate on: below, a dozen calls of torch take as long as the op.
constexpr int64_t kMultipliedOutFrom = 1 << 19;
// On CUDA torch multiplies out from this many bytes of the intermediate on, an estimate from counts: forward and backward are 4
// launches of the op and move the intermediate 7 times (z written and read forward; z and dz written, z read once and dz twice
// backward). Multiplied out they are about 20 launches of torch and move nothing of its size. At 2.5 us for each of the 16
// launches more and 3 TB/s for the intermediate, both take as long at 40 us * 3 TB/s / 7 = 17 MB.
constexpr int64_t kMultipliedOutFromBytesOnCuda = 1 << 24;

// Whether the Python function multiplies the weights out by torch in eager mode, and calls no op. Where Y is 1 the op itself
// multiplies out, on CUDA in float32.
inline bool factored_linear_by_torch(const FactoredLinearSizes& s, int64_t element_size, bool cuda) {
  const bool by_op = s.Y == 1 && (!cuda || element_size == sizeof(float));
  if (by_op || (s.X != 1 && s.Y != 1)) return false;
  const int64_t intermediate = s.N * s.D * s.C;
  return cuda ? intermediate * element_size >= kMultipliedOutFromBytesOnCuda : intermediate >= kMultipliedOutFrom;
}

// What the CPU op does.
inline FactoredLinearWay factored_linear_on_cpu(const FactoredLinearSizes& s) {
  const bool one_output = s.Y == 1 && s.X > 0 && s.N * s.D * s.C >= kMultipliedOutFrom;
  return one_output ? FactoredLinearWay::multiplied_out : FactoredLinearWay::fused;
}

// What the CUDA op does. `largest_axis`: up to which products on tensor cores count in 32 bits.
inline FactoredLinearWay factored_linear_on_cuda(const FactoredLinearSizes& s, ScalarType type, int64_t largest_axis) {
  const bool ordinary = type == ScalarType::Double || cuda_path().product == CudaPath::Product::scalar;
  if (ordinary || std::max({s.N, s.C * s.X, s.D, s.Y}) > largest_axis) return FactoredLinearWay::library;
  return s.Y == 1 && s.C * s.X > 0 ? FactoredLinearWay::multiplied_out : FactoredLinearWay::stored;
}

// Whether the forward pass keeps z, of so many elements as stored, for the backward pass, which would otherwise compute z
// again: z is no larger than x, or than x and y where its sums are too long to be faster than reading z.
inline bool factored_linear_keeps(const FactoredLinearSizes& s, int64_t elements) {
  constexpr int64_t kLong = 32;
  return s.C > 0 && elements <= s.N * (s.C * s.X + (s.X >= kLong ? s.D * s.Y : 0));
}

}  // namespace ella

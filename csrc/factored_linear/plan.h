// Which algorithm computes F-FC: chosen here alone, for its forward and its backward pass, on the CPU and on CUDA, for the op
// and for the Python function that may call torch instead. The choice depends on sizes, dtype, device and ELLA_CUDA_PATH.
#pragma once

#include <algorithm>
#include <limits>

#include "common/cuda_path.h"
#include "factored_linear/checks.h"

namespace ella {

enum class FactoredLinearWay {
  multiplied_out,  // one product with V[d,c] U[d,c,x], of one output position
  fused,           // the intermediate stays in the cache or in shared memory
  stored,          // the intermediate goes through device memory between two launches of products on tensor cores
  library,         // the intermediate goes through device memory between two of torch's batched products
};

// The weights multiplied out are no larger than apart where X or Y is 1, and take fewer operations. On the CPU they pay from
// this many elements of the intermediate on: below, a dozen calls of torch take as long as the op.
constexpr int64_t kMultipliedOutFrom = 1 << 19;
// On CUDA from this many bytes of the intermediate on, an estimate from counts: forward and backward are 4 launches of the op
// and move the intermediate 7 times (z written and read forward; z and dz written, z read once and dz twice backward).
// Multiplied out they are about 20 launches of torch and move nothing of its size. At 2.5 us for each of the 16 launches more
// and 3 TB/s for the intermediate, both take as long at 40 us * 3 TB/s / 7 = 17 MB.
constexpr int64_t kMultipliedOutFromBytesOnCuda = 1 << 24;

// Elements of the intermediate for one of everything else, up to which CUDA stores it; a larger one is stored where the
// second-level cache could hold it. The first bounds the backward pass's workspace, z and dz: four times as much as it reads.
// Tests set 0, so that small shapes go both ways.
#ifndef ELLA_LARGEST_INTERMEDIATE
#define ELLA_LARGEST_INTERMEDIATE 2
#endif
constexpr int64_t kLargestIntermediate = ELLA_LARGEST_INTERMEDIATE;

// Whether the Python function multiplies the weights out by torch in eager mode, and calls no op. On the CPU the op itself
// multiplies out where Y is 1.
inline bool factored_linear_by_torch(const FactoredLinearSizes& s, int64_t element_size, bool cuda) {
  const int64_t intermediate = s.N * s.D * s.C;
  if (cuda) return (s.X == 1 || s.Y == 1) && intermediate * element_size >= kMultipliedOutFromBytesOnCuda;
  return s.X == 1 && s.Y != 1 && intermediate >= kMultipliedOutFrom;
}

// What the CPU op does.
inline FactoredLinearWay factored_linear_on_cpu(const FactoredLinearSizes& s) {
  const bool one_output = s.Y == 1 && s.X > 0 && s.N * s.D * s.C >= kMultipliedOutFrom;
  return one_output ? FactoredLinearWay::multiplied_out : FactoredLinearWay::fused;
}

// What the CUDA op does; throws where the path asks for what there is not. `largest_axis`: up to which products on tensor cores
// count in 32 bits.
inline FactoredLinearWay factored_linear_on_cuda(const FactoredLinearSizes& s, ScalarType type, int64_t cache_bytes,
                                                 int64_t largest_axis) {
  using Choice = CudaPath::Choice;
  using Product = CudaPath::Product;
  const CudaPath path = cuda_path();
  if (type == ScalarType::Double) {
    ELLA_CHECK(path.stored != Choice::no,
               "factored_linear: ELLA_CUDA_PATH: float64 has no intermediate=fused, its products are the library's");
    return FactoredLinearWay::library;
  }
  const bool stored = path.stored == Choice::yes || path.product == Product::mma;
  const bool fused = path.stored == Choice::no || path.product == Product::scalar;
  ELLA_CHECK(
      !(stored && fused),
      "factored_linear: ELLA_CUDA_PATH: product=mma goes with intermediate=stored, product=scalar with intermediate=fused");
  const bool countable = std::max({s.N, s.C, s.D, s.X, s.Y}) <= largest_axis;
  ELLA_CHECK(!stored || countable, "factored_linear: ELLA_CUDA_PATH: intermediate=stored is for axes up to ", largest_axis);
  const int64_t intermediate = s.N * s.D * s.C, others = s.N * (s.C * s.X + s.D * s.Y) + s.D * s.C * (s.X + s.Y);
  const bool fits =
      intermediate <= kLargestIntermediate * others || intermediate * static_cast<int64_t>(sizeof(float)) <= cache_bytes;
  return stored || (!fused && countable && fits) ? FactoredLinearWay::stored : FactoredLinearWay::fused;
}

// Whether the forward pass keeps z, of so many elements as stored, for the backward pass, which would otherwise compute z
// again: z is no larger than x, or than x and y where its sums are too long to be faster than reading z.
inline bool factored_linear_keeps(const FactoredLinearSizes& s, int64_t elements) {
  constexpr int64_t kLong = 32;
  return s.C > 0 && elements <= s.N * (s.C * s.X + (s.X >= kLong ? s.D * s.Y : 0));
}

}  // namespace ella

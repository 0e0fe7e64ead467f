// Kernels whose every thread writes elements of its own, each found by its index in a contiguous tensor of four axes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/device.h"

namespace ella {

constexpr int kElementThreads = 256;
constexpr int kElementsPerThread = 4;           // read before the first is written, so that their latencies overlap
constexpr int64_t kMaxElementBlocks = 1 << 20;  // the rest is walked in strides

// Images (N, C, H, W) of any strides.
template <class T>
struct Image {
  const T* data;
  int64_t n, c, h, w;  // strides

  __device__ __forceinline__ T at(int64_t in, int64_t ic, int64_t ih, int64_t iw) const {
    return data[in * n + ic * c + ih * h + iw * w];
  }
};

template <class T>
Image<T> image(const Tensor& tensor) {
  return {tensor.const_data_ptr<T>(), tensor.stride(0), tensor.stride(1), tensor.stride(2), tensor.stride(3)};
}

// Quotients by a number that is known at launch, and what they leave.
template <class Index>
class Divisor {
 public:
  explicit Divisor(int64_t divisor) : divisor_(divisor) {}
  __device__ __forceinline__ Index operator()(Index number) const { return number / divisor_; }
  __device__ __forceinline__ Index rest(Index number) const { return number % divisor_; }
  __device__ __forceinline__ Index value() const { return divisor_; }

 private:
  Index divisor_;
};

// Below 2^31 a quotient is the upper half of a product, a sum and a shift, for which the hardware needs 3 instructions against
// some 20 for its division of 32 bits and 70 for that of 64 (Granlund and Montgomery, "Division by invariant integers using
// multiplication", PLDI 1994, figure 4.1). The sum does not overflow, its summands being below 2^31.
template <>
class Divisor<uint32_t> {
 public:
  explicit Divisor(int64_t divisor) : divisor_(static_cast<uint32_t>(std::max(divisor, int64_t{1}))) {
    while ((uint64_t{1} << shift_) < divisor_) ++shift_;
    multiplier_ = static_cast<uint32_t>((((uint64_t{1} << shift_) - divisor_) << 32) / divisor_ + 1);
  }

  __device__ __forceinline__ uint32_t operator()(uint32_t number) const {
    return (static_cast<uint32_t>((static_cast<uint64_t>(number) * multiplier_) >> 32) + number) >> shift_;
  }

  __device__ __forceinline__ uint32_t rest(uint32_t number) const { return number - divisor_ * (*this)(number); }
  __device__ __forceinline__ uint32_t value() const { return divisor_; }

 private:
  uint32_t divisor_, multiplier_ = 0, shift_ = 0;
};

// The indices of an element of a contiguous tensor (*, C, H, W).
template <class Index>
struct Axes {
  Divisor<Index> C, H, W;

  Axes(int64_t c, int64_t h, int64_t w) : C(c), H(h), W(w) {}

  struct Indices {
    Index n, c, h, w;
  };

  __device__ __forceinline__ Indices operator()(Index linear) const {
    const Index row = W(linear), plane = H(row), n = C(plane);
    return {n, plane - n * C.value(), row - plane * H.value(), linear - row * W.value()};
  }
};

// Calls f with a value of the type that indexes `count` elements.
template <class F>
void with_index_type(int64_t count, const F& f) {
  if (count <= kMaxIndex32) {
    f(uint32_t{});
  } else {
    f(int64_t{});
  }
}

inline int64_t element_blocks(int64_t count) {
  return std::min(ceil_div(count, int64_t{kElementThreads} * kElementsPerThread), kMaxElementBlocks);
}

// out[place] = value(place) for all places; by blocks of kElementThreads.
template <class T, class Index, class Value>
__device__ __forceinline__ void write_elements(T* __restrict__ out, Index count, const Value& value) {
  constexpr Index kTile = kElementThreads * kElementsPerThread;
  // In 32 bits: below 2^31 + 2^20 * 2^10.
  for (Index tile = static_cast<Index>(blockIdx.x) * kTile; tile < count; tile += static_cast<Index>(gridDim.x) * kTile) {
    T values[kElementsPerThread];
#pragma unroll
    for (int i = 0; i < kElementsPerThread; ++i) {
      const Index linear = tile + i * kElementThreads + threadIdx.x;
      values[i] = linear < count ? value(linear) : T(0);
    }
#pragma unroll
    for (int i = 0; i < kElementsPerThread; ++i) {
      const Index linear = tile + i * kElementThreads + threadIdx.x;
      if (linear < count) out[linear] = values[i];
    }
  }
}

}  // namespace ella

// Numbers of 16 bits as the float that kernels compute in; others are read as they are.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/buffer.h"
#include "cpu/simd/kernels.h"

namespace ella {

template <class T>
inline T widened(T number) {
  return number;
}

inline float widened(BFloat16 number) { return number; }

// Without a branch or a call, so that loops of it become vectors: that of torch's header does not.
inline float widened(Half number) {
  constexpr uint32_t kExponents = 0x1fu << 23, kShift = (127 - 15) << 23;  // of 5 bits; from its bias to float's
  const auto as_float = [](uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  };
  const uint32_t size = (number.x & 0x7fffu) << 13, exponent = size & kExponents;
  const float subnormal = as_float(size + kShift + (1u << 23)) - as_float(kShift + (1u << 23));
  uint32_t bits;
  std::memcpy(&bits, &subnormal, sizeof bits);
  const uint32_t is_small = -uint32_t{exponent == 0}, is_largest = -uint32_t{exponent == kExponents};  // all bits or none
  const uint32_t normal = size + kShift + (is_largest & kShift);  // infinity and NaN keep the largest exponent
  return as_float((is_small & bits) | (~is_small & normal) | (number.x & 0x8000u) << 16);
}

template <class S, class T>
void copy_as(const S* source, int64_t count, T* target) {
  if constexpr (std::is_same_v<S, T>) {
    std::copy_n(source, count, target);
  } else {
    for (int64_t i = 0; i < count; ++i) target[i] = widened(source[i]);
  }
}

// target[j * target_row + i] = source[i * source_row + j], i < rows, j < columns.
template <class S, class T>
void transpose_as(const Kernels<T>& k, int64_t rows, int64_t columns, const S* source, int64_t source_row, T* target,
                  int64_t target_row) {
  if constexpr (std::is_same_v<S, T>) {
    k.transpose(rows, columns, source, source_row, target, target_row);
  } else {
    constexpr int64_t kRows = 16;  // of one line of the first-level cache
    for (int64_t i0 = 0; i0 < rows; i0 += kRows) {
      const int64_t end = std::min(i0 + kRows, rows);
      for (int64_t j = 0; j < columns; ++j) {
        for (int64_t i = i0; i < end; ++i) target[j * target_row + i] = widened(source[i * source_row + j]);
      }
    }
  }
}

// Kernels::pack, by way of some rows in T where S is another type.
template <class S, class T>
void pack_as(const Kernels<T>& k, int64_t n, int64_t count, const S* source, int64_t lane_stride, int64_t k_stride, T* panel) {
  if constexpr (std::is_same_v<S, T>) {
    k.pack(n, count, source, lane_stride, k_stride, panel);
  } else {
    constexpr int64_t kRows = 64;  // with 64 lanes 16 KiB, which stay in the first-level cache
    const Buffer<T> elements(n * kRows);
    for (int64_t k0 = 0; k0 < count; k0 += kRows, panel += kRows * k.width) {
      const int64_t rows = std::min(kRows, count - k0);
      const S* from = source + k0 * k_stride;
      T* to = elements.data();
      if (lane_stride == 1) {
        for (int64_t row = 0; row < rows; ++row, from += k_stride, to += n) copy_as(from, n, to);
        k.pack(n, rows, elements.data(), 1, n, panel);
      } else {
        for (int64_t lane = 0; lane < n; ++lane, from += lane_stride, to += kRows) {
          if (k_stride == 1) {
            copy_as(from, rows, to);
          } else {
            for (int64_t row = 0; row < rows; ++row) to[row] = widened(from[row * k_stride]);
          }
        }
        k.pack(n, rows, elements.data(), kRows, 1, panel);
      }
    }
  }
}

// x[first .. first + count], x (N, C, H, W) of any strides, contiguous.
template <class S>
Tensor widened_images(const Tensor& x, int64_t first, int64_t count) {
  const int64_t C = x.size(1), H = x.size(2), W = x.size(3);
  const int64_t image = x.stride(0), channel = x.stride(1), down = x.stride(2), right = x.stride(3);
  const Tensor out = empty_of(x, {count, C, H, W}, ScalarType::Float);
  const S* const data = x.const_data_ptr<S>() + first * image;
  float* const target = out.mutable_data_ptr<float>();
  constexpr int64_t kWorth = 1 << 14;  // elements, some microseconds
  torch::stable::parallel_for(0, count * C, std::max(kWorth / (H * W), int64_t(1)), [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; ++plane) {
      float* to = target + plane * H * W;
      for (int64_t h = 0; h < H; ++h, to += W) {
        const S* from = data + plane / C * image + plane % C * channel + h * down;
        if (right == 1) {
          copy_as(from, W, to);
        } else {
          for (int64_t w = 0; w < W; ++w) to[w] = widened(from[w * right]);
        }
      }
    }
  });
  return out;
}

}  // namespace ella

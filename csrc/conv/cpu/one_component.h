// Images that are zero but for one of their four polyphase components, as the gradient is that polyphase_pool sends back
// through a strided layer. A product with them takes a quarter of the multiplications. They are told by looking: whatever made
// the zeros, whatever they passed through, nothing needs to be said about them.
//
// Component i of an image has the rows of parity i % 2 and the columns of parity i / 2, as in polyphase_pool.
#pragma once

#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#include "conv/cpu/circular_images.h"
#include "conv/cpu/short_rows.h"

namespace ella {

// The bits of elements by their place in two rows, or as many as a loop wants: wherever two rows of an image begin, the same
// components follow in the same places.
template <class T>
class SeenBits {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

 public:
  explicit SeenBits(const CircularConvSizes& s)
      : height_(s.H),
        width_(s.W),
        period_(2 * s.W * std::max(int64_t(32) / s.W, int64_t(1))),
        bits_(period_),
        component_(period_) {
    for (int64_t i = 0; i < period_; ++i) component_[i] = i / width_ % 2 + 2 * (i % 2);
  }

  // The only component of an image that is not zero, or -1 where there are more. Dense images are known after a few rows.
  int64_t only_component(const Plane<T>& channels, int64_t count) {
    std::fill(bits_.begin(), bits_.end(), Bits(0));
    const int64_t size = height_ * width_;
    const bool rows = channels.right == 1 && channels.down == width_;
    if (rows && channels.image == size) return look(channels.data, count * size) ? component() : -1;
    for (int64_t c = 0; c < count; ++c) {
      const T* data = channels.data + c * channels.image;
      if (rows) {
        if (!look(data, size)) return -1;
        continue;
      }
      for (int64_t h = 0; h < height_; ++h) {
        for (int64_t w = 0; w < width_; ++w) seen(data[h * channels.down + w * channels.right], bits_[h % 2 * width_ + w]);
      }
      if (component() < 0) return -1;
    }
    return component();
  }

 private:
  static void seen(T value, Bits& bits) {
    Bits own;
    std::memcpy(&own, &value, sizeof own);
    bits |= own;
  }

  // False where there are more components than one; looked for after 1, 2, 4, ... periods.
  bool look(const T* data, int64_t count) {
    Bits* bits = bits_.data();
    int64_t i = 0;
    for (int64_t next = period_; i + period_ <= count; i += period_) {
      for (int64_t j = 0; j < period_; ++j) seen(data[i + j], bits[j]);
      if (i + period_ < next) continue;
      if (component() < 0) return false;
      next *= 2;
    }
    for (int64_t j = 0; i + j < count; ++j) seen(data[i + j], bits[j]);
    return true;
  }

  int64_t component() const {
    Bits any[4] = {};
    for (int64_t i = 0; i < period_; ++i) any[component_[i]] |= static_cast<Bits>(bits_[i] << 1);  // a zero may have a sign
    const int64_t found = (any[0] != 0) + (any[1] != 0) + (any[2] != 0) + (any[3] != 0);
    return found > 1 ? -1 : any[1] != 0 ? 1 : any[2] != 0 ? 2 : any[3] != 0 ? 3 : 0;
  }

  const int64_t height_, width_, period_;
  std::vector<Bits> bits_;
  std::vector<int64_t> component_;
};

// The component of every image if each has but one, and if a quarter of the products of a convolution from `channels` to
// `others` is worth what it takes: rows are looked at, taken apart and joined again, a few operations for each of their
// elements.
template <class T>
std::optional<std::vector<int64_t>> only_components(const Tensor& tensor, const CircularConvSizes& s, int64_t channels,
                                                    int64_t others) {
  const bool even = s.H % 2 == 0 && s.W % 2 == 0;
  const int64_t taps = s.kernel_h * s.kernel_w, work = taps * channels * others, overhead = 2 * channels + 3 * others;
  // Below three rows and columns, some outputs see nothing.
  if (!even || s.kernel_h < 3 || s.kernel_w < 3 || work < kernels<T>().vector * overhead) return std::nullopt;
  const Images<T> x(tensor);
  std::vector<int64_t> out(s.N);
  const auto look = [&](int64_t begin, int64_t end) {
    SeenBits<T> seen(s);
    for (int64_t n = begin; n < end; ++n) {
      out[n] = seen.only_component({x.data + n * x.image, x.channel, x.down, x.right}, channels);
      if (out[n] < 0) break;
    }
  };
  look(0, 1);
  if (out[0] >= 0) torch::stable::parallel_for(1, s.N, 1, look);
  for (const int64_t component : out) {
    if (component < 0) return std::nullopt;
  }
  return out;
}

// A component as an image of its own, with circular padding and half the sides. The kernel is one that reaches as far as the
// true one does there: half as far, rounded up.
inline CircularConvSizes quarter_of(const CircularConvSizes& s) {
  const auto reach = [](int64_t kernel) { return 2 * ((kernel / 2 + 1) / 2) + 1; };
  return {s.N, s.C, s.H / 2, s.W / 2, s.D, reach(s.kernel_h), reach(s.kernel_w)};
}

// Rows (2p + row) and columns (2q + column) of an image, both on the layout, one after the other.
template <class T>
void gather_component(const T* source, int64_t down, int64_t right, const CircularConvSizes& s, int64_t row, int64_t column,
                      T* target) {
  with_half_width(s.W / 2, [&](auto half) {
    const int64_t wrapped = column < 2 ? 0 : 2 * half;  // from the last column on
    for (int64_t h = row; h < s.H + row; h += 2, target += half) {
      const T* from = source + (h < s.H ? h : h - s.H) * down + column * right;
      if (right == 1) {
        for (int64_t q = 0; q + 1 < half; ++q) target[q] = from[2 * q];
      } else {
        for (int64_t q = 0; q + 1 < half; ++q) target[q] = from[2 * q * right];
      }
      target[half - 1] = from[(2 * half - 2 - wrapped) * right];
    }
  });
}

// One image from its four components, those at distance (i / 2, i % 2) from component `first` at part + i * part_size.
template <class T>
void join_components(const T* part, int64_t part_size, const CircularConvSizes& s, int64_t channels, int64_t first, T* target) {
  with_half_width(s.W / 2, [&](auto half) {
    for (int64_t below = 0; below < 2; ++below) {
      const T *left = part + 2 * below * part_size, *right = left + part_size;
      const int64_t top = first % 2 + below;
      for (int64_t d = 0; d < channels; ++d) {
        for (int64_t h = top; h < s.H + top; h += 2, left += half, right += half) {
          T* out = target + (d * s.H + (h < s.H ? h : h - s.H)) * 2 * half;
          if (first / 2 == 0) {
            for (int64_t q = 0; q < half; ++q) out[2 * q] = left[q], out[2 * q + 1] = right[q];
          } else {
            for (int64_t q = 0; q + 1 < half; ++q) out[2 * q + 1] = left[q], out[2 * q + 2] = right[q];
            out[2 * half - 1] = left[half - 1];
            out[0] = right[half - 1];
          }
        }
      }
    }
  });
}

}  // namespace ella

// The choice of one polyphase component of an image, and its elements. Component i has the rows of parity i % 2 and the columns
// of parity i / 2.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "conv/checks.h"
#include "conv/cpu/short_rows.h"
#include "cpu/simd/kernels.h"

namespace ella {

template <class T>
struct Image {
  T* data;
  int64_t n, c, h, w;  // strides
  T& operator()(int64_t in, int64_t ic, int64_t ih, int64_t iw) const { return data[in * n + ic * c + ih * h + iw * w]; }
};

template <class T>
Image<const T> image(const Tensor& t) {
  return {t.const_data_ptr<T>(), t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

// The component of an image with the largest norm; of equal ones the first, and NaN is larger than any number, so that it stays
// visible in the output.
template <class T>
class LargestComponent {
 public:
  // Sums are kept for two rows or for as many as fill a few vectors; a run of rows then begins anew at the first of them.
  LargestComponent(const PolyphaseSizes& s, Norm norm)
      : s_(s),
        norm_(norm),
        width_(2 * s.w),
        period_(2 * width_ * std::max(int64_t(32) / std::max(width_, int64_t(1)), int64_t(1))),
        sums_(period_) {}

  int64_t operator()(const Image<const T>& x, int64_t n) {
    const int64_t size = 2 * s_.h * width_;
    if (size == 0) return 0;
    std::fill(sums_.begin(), sums_.end(), 0.0);
    const bool rows = x.w == 1 && x.h == width_, channels = rows && x.c == size;
    if (channels) add_run(&x(n, 0, 0, 0), s_.C * size);
    for (int64_t c = 0; c < s_.C && !channels; ++c) {
      if (rows) {
        add_run(&x(n, c, 0, 0), size);
      } else {
        add_channel(x, n, c);
      }
    }
    double best = -1;
    int64_t which = 0;
    for (int64_t i = 0; i < 4; ++i) {
      const double size_of_i = of_component(i);
      if (std::isnan(size_of_i)) return i;
      if (size_of_i > best) best = size_of_i, which = i;
    }
    return which;
  }

 private:
  void add_run(const T* x, int64_t count) {
    const int64_t periods = count / period_, whole = periods * period_;
    constexpr int64_t kAtOnce = 16;  // few enough for the first-level cache: columns are summed a few vectors at a time
    for (int64_t i = 0; i < periods; i += kAtOnce) {
      k_.column_norms(norm_, std::min(kAtOnce, periods - i), period_, x + i * period_, period_, sums_.data());
    }
    k_.column_norms(norm_, 1, count - whole, x + whole, 0, sums_.data());
  }

  void add_channel(const Image<const T>& x, int64_t n, int64_t c) {
    for (int64_t parity = 0; parity < 2; ++parity) {
      double* sums = sums_.data() + parity * width_;
      if (x.w == 1) {
        k_.column_norms(norm_, s_.h, width_, &x(n, c, parity, 0), 2 * x.h, sums);
        continue;
      }
      for (int64_t w = 0; w < width_; ++w) k_.column_norms(norm_, s_.h, 1, &x(n, c, parity, w), 2 * x.h, sums + w);
    }
  }

  double of_component(int64_t i) const {
    double result = 0;
    for (int64_t row = i & 1; row * width_ < period_; row += 2) {
      for (int64_t w = i >> 1; w < width_; w += 2) {
        const double more = sums_[row * width_ + w];
        result = norm_ != Norm::max ? result + more : more > result || std::isnan(more) ? more : result;
      }
    }
    return result;
  }

  const Kernels<T>& k_ = kernels<T>();
  const PolyphaseSizes s_;
  const Norm norm_;
  const int64_t width_, period_;
  std::vector<double> sums_;
};

template <class T>
void select_component(const Image<const T>& x, const PolyphaseSizes& s, int64_t n, int64_t component, T* out) {
  with_half_width(s.w, [&](auto half) {
    for (int64_t c = 0; c < s.C; ++c) {
      for (int64_t h = 0; h < s.h; ++h, out += half) {
        const T* from = &x(n, c, 2 * h + (component & 1), component >> 1);
        if (x.w == 1) {
          for (int64_t w = 0; w < half; ++w) out[w] = from[2 * w];
        } else {
          for (int64_t w = 0; w < half; ++w) out[w] = from[2 * w * x.w];
        }
      }
    }
  });
}

// The Norm for p = 1, 2 or inf; see check_polyphase_norm.
inline Norm polyphase_norm(double norm) { return norm == 1.0 ? Norm::one : norm == 2.0 ? Norm::two : Norm::max; }

}  // namespace ella

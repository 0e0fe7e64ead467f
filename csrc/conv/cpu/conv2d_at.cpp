// A convolution at chosen positions, and its transpose. The columns k of an image are the lanes of a vector, since they share
// the positions: the image is laid out with them innermost, in its padding.
#include <algorithm>
#include <atomic>
#include <vector>

#include "conv/checks.h"
#include "cpu/buffer.h"
#include "cpu/simd/kernels.h"

namespace ella {
namespace {

template <class T>
class ConvAt {
 public:
  ConvAt(const char* op, const ConvAtSizes& s, const Tensor& weight, const Tensor& places)
      : op_(op),
        s_(s),
        k_(kernels<T>()),
        row_(ceil_divide(s.K, k_.vector) * k_.vector),
        weight_(weight.const_data_ptr<T>()),
        places_(places.const_data_ptr<int64_t>()),
        taps_(taps()) {
    int64_t* tap = taps_.data();
    for (int64_t c = 0; c < s.C; ++c) {
      for (int64_t i = 0; i < s.kernel_h; ++i) {
        for (int64_t j = 0; j < s.kernel_w; ++j) {
          *tap++ = ((c * s.padded_h() + i * s.dilation_h) * s.padded_w() + j * s.dilation_w) * row_;
        }
      }
    }
  }

  void forward(const T* x, T* out) const {
    each_image([&](int64_t n, const int64_t* at, T* image, T* values) {
      rows([&](int64_t from, int64_t to, int64_t count) {
        k_.transpose(s_.K, count, x + n * plane() + from, s_.N * plane(), image + to * row_, row_);
      });
      for (int64_t d = 0; d < s_.D; ++d) {
        k_.convolve_at(row_, s_.M, at + d * s_.M, taps(), taps_.data(), weight_ + d * taps(), image, values + d * s_.M * row_);
      }
      k_.transpose(s_.D * s_.M, s_.K, values, row_, out + n * s_.D * s_.M, s_.N * s_.D * s_.M);
    });
  }

  void transpose(const T* grad, T* out) const {
    each_image([&](int64_t n, const int64_t* at, T* image, T* values) {
      k_.transpose(s_.K, s_.D * s_.M, grad + n * s_.D * s_.M, s_.N * s_.D * s_.M, values, row_);
      std::fill_n(image, s_.C * s_.padded_h() * s_.padded_w() * row_, T(0));
      for (int64_t d = 0; d < s_.D; ++d) {
        k_.convolve_at_transpose(row_, s_.M, at + d * s_.M, taps(), taps_.data(), weight_ + d * taps(),
                                 values + d * s_.M * row_, image);
      }
      rows([&](int64_t to, int64_t from, int64_t count) {
        k_.transpose(count, s_.K, image + from * row_, row_, out + n * plane() + to, s_.N * plane());
      });
    });
  }

 private:
  int64_t taps() const { return s_.C * s_.kernel_h * s_.kernel_w; }
  int64_t plane() const { return s_.C * s_.H * s_.W; }

  // body(where they begin in an image, and in one with padding, how many) for pixels that are beside each other in both.
  template <class Body>
  void rows(const Body& body) const {
    if (s_.padding_h == 0 && s_.padding_w == 0) return body(0, 0, plane());
    for (int64_t r = 0; r < s_.C * s_.H; ++r) {
      const int64_t padded = (r / s_.H * s_.padded_h() + s_.padding_h + r % s_.H) * s_.padded_w() + s_.padding_w;
      body(r * s_.W, padded, s_.W);
    }
  }

  template <class Body>
  void each_image(const Body& body) const {
    const int64_t values = s_.D * s_.M, pixels = s_.C * s_.padded_h() * s_.padded_w();
    std::atomic<int64_t> wrong{-1};
    torch::stable::parallel_for(0, s_.N, 1, [&](int64_t begin, int64_t end) {
      const Buffer<T> image(pixels * row_), some(values * row_);
      const Buffer<int64_t> at(values);
      image.zero(0, pixels * row_), some.zero(0, values * row_);
      for (int64_t n = begin; n < end; ++n) {
        for (int64_t i = 0; i < values; ++i) {
          int64_t place = places_[n * values + i];
          if (place < 0 || place >= s_.out_h * s_.out_w) wrong = n, place = 0;
          at.data()[i] = (place / s_.out_w * s_.stride_h * s_.padded_w() + place % s_.out_w * s_.stride_w) * row_;
        }
        body(n, at.data(), image.data(), some.data());
      }
    });
    ELLA_CHECK(wrong < 0, op_, ": places must be in 0..", s_.out_h * s_.out_w - 1, ", those of image ", wrong.load(),
               " are not");
  }

  const char* const op_;
  const ConvAtSizes s_;
  const Kernels<T>& k_;
  const int64_t row_;  // of all columns, in whole vectors
  const T* const weight_;
  const int64_t* const places_;
  const Buffer<int64_t> taps_;  // where each tap lies behind the first, in the image with padding
};

Tensor conv2d_at(const Tensor& x, const Tensor& weight, const Tensor& places, const std::vector<int64_t>& stride,
                 const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation) {
  const ConvAtSizes s = check_conv2d_at(x, weight, places, stride, padding, dilation);
  Tensor out = empty_of(x, {s.K, s.N, s.D, s.M});
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "conv2d_at", [&] {
    const Tensor image = torch::stable::contiguous(x), kernel = torch::stable::contiguous(weight),
                 chosen = torch::stable::contiguous(places);
    ConvAt<scalar_t>("conv2d_at", s, kernel, chosen)
        .forward(image.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>());
  });
  return out;
}

Tensor conv2d_at_transpose(const Tensor& values, const Tensor& weight, const Tensor& places, const std::vector<int64_t>& size,
                           const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                           const std::vector<int64_t>& dilation) {
  const ConvAtSizes s = check_conv2d_at_transpose(values, weight, places, size, stride, padding, dilation);
  Tensor out = empty_of(values, {s.K, s.N, s.C, s.H, s.W});
  ELLA_DISPATCH_FLOATING(values.scalar_type(), "conv2d_at_transpose", [&] {
    const Tensor grad = torch::stable::contiguous(values), kernel = torch::stable::contiguous(weight),
                 chosen = torch::stable::contiguous(places);
    ConvAt<scalar_t>("conv2d_at_transpose", s, kernel, chosen)
        .transpose(grad.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>());
  });
  return out;
}

ELLA_REGISTER(CPU, m) {
  m.impl("conv2d_at", TORCH_BOX(&conv2d_at));
  m.impl("conv2d_at_transpose", TORCH_BOX(&conv2d_at_transpose));
}

}  // namespace
}  // namespace ella

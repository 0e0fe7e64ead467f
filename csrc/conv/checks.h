// Sizes and argument checks of circular convolutions, padding and adaptive polyphase sampling, shared by the CPU and CUDA
// implementations.
#pragma once

#include "common/checks.h"

namespace ella {

// ---- polyphase ----

struct PolyphaseSizes {
  int64_t N, C, h, w;  // of the pooled image; the full one is (2h, 2w)
};

// The index of a CPU op; read before its parallel loop, which must not throw.
inline std::vector<int64_t> polyphase_components(const char* op, const Tensor& index) {
  std::vector<int64_t> out;
  try {
    out.resize(index.numel());
  } catch (const std::bad_alloc&) {  // an index may be expanded, its copy has memory of its own
    fail(op, ": the system has no memory left for the index of ", index.numel(), " images; free some, or use smaller batches");
  }
  const int64_t* data = index.const_data_ptr<int64_t>();
  for (size_t n = 0; n < out.size(); ++n) {
    out[n] = data[static_cast<int64_t>(n) * index.stride(0)];
    ELLA_CHECK(out[n] >= 0 && out[n] < 4, op, ": index must be in 0..3, got ", out[n], " for image ", n);
  }
  return out;
}

inline PolyphaseSizes check_polyphase_image(const ArgumentCheck& check, const char* op, const Tensor& x) {
  check.tensor("x", x, {-1, -1, -1, -1}, "(N, C, H, W)");
  ELLA_CHECK(x.size(2) % 2 == 0 && x.size(3) % 2 == 0, op, ": x must have even height and width, got ", shape_string(x));
  return {x.size(0), x.size(1), x.size(2) / 2, x.size(3) / 2};
}

inline void check_polyphase_norm(const char* op, double norm) {
  ELLA_CHECK(norm == 1.0 || norm == 2.0 || (std::isinf(norm) && norm > 0), op, ": norm must be 1, 2 or inf, got ", norm);
}

inline PolyphaseSizes check_polyphase_pool(const Tensor& x, double norm) {
  const char* op = "polyphase_pool";
  check_polyphase_norm(op, norm);
  return check_polyphase_image(ArgumentCheck(op, "x", x), op, x);
}

inline PolyphaseSizes check_polyphase_select(const Tensor& x, const Tensor& index) {
  const char* op = "polyphase_select";
  const ArgumentCheck check(op, "x", x);
  const PolyphaseSizes s = check_polyphase_image(check, op, x);
  check.index("index", index, {s.N}, "(N,)");
  return s;
}

inline PolyphaseSizes check_polyphase_scatter(const Tensor& grad, const Tensor& index) {
  const char* op = "polyphase_scatter";
  const ArgumentCheck check(op, "grad", grad);
  check.tensor("grad", grad, {-1, -1, -1, -1}, "(N, C, h, w)");
  check.index("index", index, {grad.size(0)}, "(N,)");
  return {grad.size(0), grad.size(1), grad.size(2), grad.size(3)};
}

// ---- circular_pad2d ----

struct CircularPadSizes {
  int64_t N, C, H, W;  // without the padding
  int64_t pad_h, pad_w;

  int64_t padded_h() const { return H + 2 * pad_h; }
  int64_t padded_w() const { return W + 2 * pad_w; }
};

inline CircularPadSizes check_circular_pad(const char* op, const char* name, const Tensor& image, int64_t pad_h, int64_t pad_w,
                                           const std::optional<Tensor>& index, bool padded) {
  constexpr int64_t kMax = int64_t(1) << 30;
  const ArgumentCheck check(op, name, image);
  check.tensor(name, image, {-1, -1, -1, -1}, padded ? "(N, C, H + 2 pad_h, W + 2 pad_w)" : "(N, C, H, W)");
  ELLA_CHECK(pad_h >= 0 && pad_w >= 0 && pad_h <= kMax && pad_w <= kMax, op, ": pad_h and pad_w must be from 0 to 2^30, got ",
             pad_h, " and ", pad_w);
  const int64_t H = image.size(2) - (padded ? 2 * pad_h : 0), W = image.size(3) - (padded ? 2 * pad_w : 0);
  ELLA_CHECK((H > 0 || (H == 0 && pad_h == 0)) && (W > 0 || (W == 0 && pad_w == 0)), op, ": ", name,
             " must have a pixel in each direction that is padded, got ", shape_string(image), " with pad_h ", pad_h,
             " and pad_w ", pad_w);
  if (index) check.index("index", *index, {image.size(0)}, "(N,)");
  check_countable(op, "the padded images", {image.size(0), image.size(1), H + 2 * pad_h, W + 2 * pad_w});
  return {image.size(0), image.size(1), H, W, pad_h, pad_w};
}

inline CircularPadSizes check_circular_pad2d(const Tensor& x, int64_t pad_h, int64_t pad_w,
                                             const std::optional<Tensor>& index) {
  return check_circular_pad("circular_pad2d", "x", x, pad_h, pad_w, index, false);
}

inline CircularPadSizes check_circular_fold2d(const Tensor& grad, int64_t pad_h, int64_t pad_w,
                                              const std::optional<Tensor>& index) {
  return check_circular_pad("circular_fold2d", "grad", grad, pad_h, pad_w, index, true);
}

// ---- circular_conv2d ----

struct CircularConvSizes {
  int64_t N, C, H, W, D, kernel_h, kernel_w;
};

// Also of the images with what the kernel reads around them.
inline CircularConvSizes countable(const char* op, const CircularConvSizes& s) {
  for (const int64_t channels : {s.C, s.D}) {
    check_countable(op, "the images, with half a kernel on each side", {s.N, channels, s.H + s.kernel_h, s.W + s.kernel_w});
  }
  check_countable(op, "the weights (D, C, kh, kw)", {s.D, s.C, s.kernel_h, s.kernel_w});
  return s;
}

inline void check_circular_kernel(const char* op, const char* name, int64_t kernel_h, int64_t kernel_w) {
  ELLA_CHECK(kernel_h > 0 && kernel_w > 0 && kernel_h % 2 == 1 && kernel_w % 2 == 1, op, ": ", name,
             " must have odd height and width, got (", kernel_h, ", ", kernel_w, ")");
}

inline CircularConvSizes check_circular_conv2d(const char* op, const Tensor& x, const Tensor& weight,
                                               const std::optional<Tensor>& bias) {
  const ArgumentCheck check(op, "x", x);
  check.tensor("x", x, {-1, -1, -1, -1}, "(N, C, H, W)");
  check.tensor("weight", weight, {-1, x.size(1), -1, -1}, "(D, C, kh, kw)");
  check_circular_kernel(op, "weight", weight.size(2), weight.size(3));
  if (bias) check.tensor("bias", *bias, {weight.size(0)}, "(D,)");
  return countable(op, {x.size(0), x.size(1), x.size(2), x.size(3), weight.size(0), weight.size(2), weight.size(3)});
}

// Sizes of the convolution, before the choice.
inline CircularConvSizes check_circular_conv2d_pool(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                                    double norm) {
  const char* op = "circular_conv2d_pool";
  check_polyphase_norm(op, norm);
  const CircularConvSizes s = check_circular_conv2d(op, x, weight, bias);
  ELLA_CHECK(s.H % 2 == 0 && s.W % 2 == 0, op, ": x must have even height and width, got ", shape_string(x));
  return s;
}

// Sizes of the scattered images.
inline CircularConvSizes check_circular_conv2d_scattered(const Tensor& x, const Tensor& index, const Tensor& weight) {
  const char* op = "circular_conv2d_scattered";
  const ArgumentCheck check(op, "x", x);
  check.tensor("x", x, {-1, -1, -1, -1}, "(N, C, h, w)");
  check.index("index", index, {x.size(0)}, "(N,)");
  check.tensor("weight", weight, {-1, x.size(1), -1, -1}, "(D, C, kh, kw)");
  check_circular_kernel(op, "weight", weight.size(2), weight.size(3));
  ELLA_CHECK(weight.size(2) >= 3 && weight.size(3) >= 3, op, ": weight must have height and width of at least 3, got (",
             weight.size(2), ", ", weight.size(3), ")");
  return countable(op, {x.size(0), x.size(1), 2 * x.size(2), 2 * x.size(3), weight.size(0), weight.size(2), weight.size(3)});
}

inline CircularConvSizes check_circular_conv2d_weight_grad(const Tensor& grad, const Tensor& x, int64_t kernel_h,
                                                           int64_t kernel_w) {
  const char* op = "circular_conv2d_weight_grad";
  const ArgumentCheck check(op, "x", x);
  check.tensor("x", x, {-1, -1, -1, -1}, "(N, C, H, W)");
  check.tensor("grad", grad, {x.size(0), -1, x.size(2), x.size(3)}, "(N, D, H, W)");
  check_circular_kernel(op, "the kernel", kernel_h, kernel_w);
  return countable(op, {x.size(0), x.size(1), x.size(2), x.size(3), grad.size(1), kernel_h, kernel_w});
}

inline CircularConvSizes check_circular_conv2d_scattered_weight_grad(const Tensor& grad, const Tensor& index, const Tensor& x,
                                                                     int64_t kernel_h, int64_t kernel_w) {
  const char* op = "circular_conv2d_scattered_weight_grad";
  const ArgumentCheck check(op, "x", x);
  check.tensor("x", x, {-1, -1, -1, -1}, "(N, C, H, W)");
  ELLA_CHECK(x.size(2) % 2 == 0 && x.size(3) % 2 == 0, op, ": x must have even height and width, got ", shape_string(x));
  check.tensor("grad", grad, {x.size(0), -1, x.size(2) / 2, x.size(3) / 2}, "(N, D, H/2, W/2)");
  check.index("index", index, {x.size(0)}, "(N,)");
  check_circular_kernel(op, "the kernel", kernel_h, kernel_w);
  return countable(op, {x.size(0), x.size(1), x.size(2), x.size(3), grad.size(1), kernel_h, kernel_w});
}

}  // namespace ella

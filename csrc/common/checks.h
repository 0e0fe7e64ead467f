// Argument checks and sizes of every op, shared by its CPU and CUDA implementations, so that both refuse the same inputs with
// the same words. Each check_<op> throws (RuntimeError in Python) with the argument's name, what was expected and what came.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <sstream>
#include <string>
#include <tuple>

#include "stable.h"

namespace ella {

inline std::string shape_string(const Tensor& tensor) {
  std::ostringstream out;
  out << '(';
  for (int64_t i = 0; i < tensor.dim(); ++i) out << (i ? ", " : "") << tensor.size(i);
  out << (tensor.dim() == 1 ? ",)" : ")");
  return out.str();
}

// Numbers that an op may be asked to count: rounded up to whole vectors, and in bytes, they are far below 2^63. Tensors that
// are expanded reach more without any memory.
constexpr int64_t kMostCounted = int64_t(1) << 53;

// Refuses sizes whose product is more, an empty one counted as 1: others are multiplied without it.
inline void check_countable(const char* op, const char* what, std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) {
    const int64_t factor = std::max(size, int64_t(1));
    ELLA_CHECK(factor <= kMostCounted / product, op, ": ", what, " would have more than 2^53 numbers; use smaller sizes");
    product *= factor;
  }
}

// Knows the op's name and the tensor that sets dtype and device; every other argument is held against it.
class ArgumentCheck {
 public:
  ArgumentCheck(const char* op, const char* name, const Tensor& reference) : op_(op), name_(name), reference_(reference) {
    const ScalarType type = reference.scalar_type();
    ELLA_CHECK(type == ScalarType::Float || type == ScalarType::Double, op_, ": ", name, " must be float32 or float64, got ",
               dtype_name(type));
  }

  // As tensor(), where the reference is a sum of products of these numbers: they may also have a narrower type.
  void summand(const char* name, const Tensor& value, std::initializer_list<int64_t> shape, const char* meaning) const {
    dimensions(name, value, shape, meaning);
    const ScalarType type = value.scalar_type(), sum = reference_.scalar_type();
    const bool widens =
        type == ScalarType::BFloat16 || type == ScalarType::Half || (sum == ScalarType::Double && type == ScalarType::Float);
    ELLA_CHECK(type == sum || widens, op_, ": ", name, " must have the dtype of ", name_, " (", dtype_name(sum), ") or be ",
               sum == ScalarType::Double ? "float32, " : "", "bfloat16 or float16, got ", dtype_name(type));
    device(name, value);
  }

  // Shape, dtype and device; -1 in `shape` accepts any size. `meaning` names the axes in the message.
  void tensor(const char* name, const Tensor& value, std::initializer_list<int64_t> shape, const char* meaning) const {
    dimensions(name, value, shape, meaning);
    ELLA_CHECK(value.scalar_type() == reference_.scalar_type(), op_, ": ", name, " must have the dtype of ", name_, " (",
               dtype_name(reference_.scalar_type()), "), got ", dtype_name(value.scalar_type()));
    device(name, value);
  }

  void index(const char* name, const Tensor& value, std::initializer_list<int64_t> shape, const char* meaning) const {
    dimensions(name, value, shape, meaning);
    ELLA_CHECK(value.scalar_type() == ScalarType::Long, op_, ": ", name, " must be int64, got ",
               dtype_name(value.scalar_type()));
    device(name, value);
  }

  void coordinates(const char* name, const Tensor& value, std::initializer_list<int64_t> shape, const char* meaning) const {
    dimensions(name, value, shape, meaning);
    ELLA_CHECK(value.scalar_type() == ScalarType::Double, op_, ": ", name, " must be float64 whatever the dtype of ", name_,
               ", got ", dtype_name(value.scalar_type()));
    device(name, value);
  }

  void number(const char* name, double value) const {
    const bool single = reference_.scalar_type() == ScalarType::Float;
    const double most = single ? std::numeric_limits<float>::max() : std::numeric_limits<double>::max();
    ELLA_CHECK(std::abs(value) <= most, op_, ": ", name, " must be a finite number in the dtype of ", name_, " (",
               dtype_name(reference_.scalar_type()), "), got ", value);
  }

  void dimensions(const char* name, const Tensor& value, std::initializer_list<int64_t> shape, const char* meaning) const {
    bool matches = value.dim() == static_cast<int64_t>(shape.size());
    if (matches) {
      int64_t axis = 0;
      for (const int64_t size : shape) {
        matches = matches && (size < 0 || value.size(axis) == size);
        ++axis;
      }
    }
    ELLA_CHECK(matches, op_, ": ", name, " must have shape ", meaning, expected(shape), ", got ", shape_string(value));
    int64_t numbers = 1;
    for (int64_t axis = 0; axis < value.dim(); ++axis) {
      const int64_t size = std::max(value.size(axis), int64_t(1));
      ELLA_CHECK(size <= kMostCounted / numbers, op_, ": ", name, " must have at most 2^53 numbers, got shape ",
                 shape_string(value));
      numbers *= size;
    }
  }

  // That an operand lies outside the memory of the reference, which is contiguous and written.
  void apart(const char* name, const Tensor& value) const {
    if (value.numel() == 0 || reference_.numel() == 0) return;
    const auto begin = [](const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()); };
    int64_t last = 0;
    for (int64_t axis = 0; axis < value.dim(); ++axis) last += (value.size(axis) - 1) * value.stride(axis);
    const uintptr_t end = begin(value) + (last + 1) * value.element_size();
    const uintptr_t written_end = begin(reference_) + reference_.numel() * reference_.element_size();
    ELLA_CHECK(end <= begin(reference_) || written_end <= begin(value), op_, ": ", name, " must not share memory with ", name_,
               ", which is updated in place; pass a clone");
  }

 private:
  static std::string expected(std::initializer_list<int64_t> shape) {
    std::ostringstream out;
    bool known = false;
    out << " = (";
    for (const int64_t* size = shape.begin(); size != shape.end(); ++size) {
      if (size != shape.begin()) out << ", ";
      if (*size < 0) {
        out << '*';
      } else {
        out << *size;
        known = true;
      }
    }
    out << (shape.size() == 1 ? ",)" : ")");
    return known ? out.str() : std::string();
  }

  void device(const char* name, const Tensor& value) const {
    int32_t expected_type = 0, got_type = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(reference_.get(), &expected_type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(value.get(), &got_type));
    ELLA_CHECK(expected_type == got_type && reference_.get_device_index() == value.get_device_index(), op_, ": ", name,
               " must be on the device of ", name_, " (", device_string(expected_type, reference_), "), got ",
               device_string(got_type, value));
  }

  static std::string device_string(int32_t type, const Tensor& tensor) {
    if (type == aoti_torch_device_type_cpu()) return "cpu";
    const std::string kind = type == aoti_torch_device_type_cuda() ? "cuda" : "device type " + std::to_string(type);
    return kind + ":" + std::to_string(tensor.get_device_index());
  }

  const char* op_;
  const char* name_;
  const Tensor& reference_;
};

// ---- factored_linear ----

struct FactoredLinearSizes {
  int64_t N, C, X, D, Y;

  // Whether z, so many numbers as it is stored, is small enough for the forward pass to keep it for the backward pass, which
  // would otherwise compute it again: no larger than x, or than x and y where its sums are too long to be faster than reading
  // it.
  bool keeps_middle(int64_t numbers) const {
    constexpr int64_t kLong = 32;
    return C > 0 && numbers <= N * (C * X + (X >= kLong ? D * Y : 0));
  }
};

inline FactoredLinearSizes countable(const char* op, const FactoredLinearSizes& s) {
  check_countable(op, "x (N, C, X)", {s.N, s.C, s.X});
  check_countable(op, "the output (N, D, Y)", {s.N, s.D, s.Y});
  check_countable(op, "the sums over x (N, D, C)", {s.N, s.D, s.C});
  return s;
}

inline FactoredLinearSizes check_factored_weights(const ArgumentCheck& check, const Tensor& x, const Tensor& weight_in,
                                                  const Tensor& weight_out) {
  check.tensor("x", x, {-1, -1, -1}, "(N, C, X)");
  const int64_t C = x.size(1), X = x.size(2);
  check.tensor("weight_in", weight_in, {-1, C, X}, "(D, C, X)");
  const int64_t D = weight_in.size(0);
  check.tensor("weight_out", weight_out, {D, C, -1}, "(D, C, Y)");
  return countable("factored_linear", {x.size(0), C, X, D, weight_out.size(2)});
}

inline FactoredLinearSizes check_factored_linear(const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
                                                 const std::optional<Tensor>& bias_in, const std::optional<Tensor>& bias_out) {
  const ArgumentCheck check("factored_linear", "x", x);
  const FactoredLinearSizes s = check_factored_weights(check, x, weight_in, weight_out);
  if (bias_in) check.tensor("bias_in", *bias_in, {s.D}, "(D,)");
  if (bias_out) check.tensor("bias_out", *bias_out, {s.Y}, "(Y,)");
  return s;
}

inline FactoredLinearSizes check_factored_linear_backward(const Tensor& grad, const Tensor& x, const Tensor& weight_in,
                                                          const Tensor& weight_out, const std::optional<Tensor>& bias_in) {
  const ArgumentCheck check("factored_linear_backward", "x", x);
  const FactoredLinearSizes s = check_factored_weights(check, x, weight_in, weight_out);
  check.tensor("grad", grad, {s.N, s.D, s.Y}, "(N, D, Y)");
  if (bias_in) check.tensor("bias_in", *bias_in, {s.D}, "(D,)");
  return s;
}

inline FactoredLinearSizes check_factored_linear_pull_back(const Tensor& grad, const Tensor& weight_in,
                                                           const Tensor& weight_out) {
  const ArgumentCheck check("factored_linear_pull_back", "grad", grad);
  check.tensor("grad", grad, {-1, -1, -1}, "(N, D, Y)");
  const int64_t N = grad.size(0), D = grad.size(1), Y = grad.size(2);
  check.tensor("weight_out", weight_out, {D, -1, Y}, "(D, C, Y)");
  const int64_t C = weight_out.size(1);
  check.tensor("weight_in", weight_in, {D, C, -1}, "(D, C, X)");
  return countable("factored_linear_pull_back", {N, C, weight_in.size(2), D, Y});
}

// Which gradients are asked for.
struct FactoredLinearWanted {
  bool x, weight_in, weight_out, bias_in, bias_out;
  bool middle = false;  // and whether those of the sums over x
};

// z as the forward pass kept it, in `shape`.
inline void check_kept_middle(const Tensor& x, const Tensor& middle, std::initializer_list<int64_t> shape) {
  ArgumentCheck("factored_linear_backward_keeping", "x", x).tensor("middle", middle, shape, "(what the forward kept,)");
  ELLA_CHECK(middle.is_contiguous(), "factored_linear_backward_keeping: middle must be contiguous");
}

// ---- kron_accumulate_ ----

struct KronAccumulateSizes {
  int64_t N, G, d;
};

inline KronAccumulateSizes check_kron_accumulate(const Tensor& factor, const Tensor& rows, double alpha) {
  const ArgumentCheck check("kron_accumulate_", "factor", factor);
  check.tensor("factor", factor, {-1, -1, -1}, "(G, d, d)");
  const int64_t G = factor.size(0), d = factor.size(1);
  check.tensor("factor", factor, {G, d, d}, "(G, d, d)");
  check.summand("rows", rows, {-1, G, d}, "(N, G, d)");
  ELLA_CHECK(factor.is_contiguous(), "kron_accumulate_: factor must be contiguous, it is updated in place");
  check.apart("rows", rows);
  check.number("alpha", alpha);
  return {rows.size(0), G, d};
}

// ---- conv_kron_accumulate_ ----

struct ConvGeometry {
  int64_t N, C, H, W;          // x
  int64_t kernel_h, kernel_w;  // patch
  int64_t stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  int64_t out_h, out_w;  // positions of the patches
  bool circular;         // outside the image: wrap, else zeros

  int64_t patch() const { return C * kernel_h * kernel_w; }
  int64_t positions() const { return N * out_h * out_w; }
};

inline ConvGeometry check_conv_kron_accumulate(const Tensor& factor, const Tensor& x, const std::vector<int64_t>& kernel_size,
                                               const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                                               const std::vector<int64_t>& dilation, bool circular, double alpha) {
  const char* op = "conv_kron_accumulate_";
  const ArgumentCheck check(op, "factor", factor);
  check.summand("x", x, {-1, -1, -1, -1}, "(N, C, H, W)");
  check.number("alpha", alpha);
  const auto pair = [op](const char* name, const std::vector<int64_t>& value, int64_t least) {
    ELLA_CHECK(value.size() == 2, op, ": ", name, " must have 2 values (height, width), got ", value.size());
    constexpr int64_t kMost = 1 << 30;  // products and sums of these and of sizes do not overflow
    ELLA_CHECK(std::min(value[0], value[1]) >= least && std::max(value[0], value[1]) <= kMost, op, ": ", name,
               " must be at least ", least, " and at most ", kMost, ", got (", value[0], ", ", value[1], ")");
  };
  pair("kernel_size", kernel_size, 1);
  pair("stride", stride, 1);
  pair("padding", padding, 0);
  pair("dilation", dilation, 1);
  ConvGeometry g{};
  g.N = x.size(0), g.C = x.size(1), g.H = x.size(2), g.W = x.size(3);
  g.kernel_h = kernel_size[0], g.kernel_w = kernel_size[1];
  g.stride_h = stride[0], g.stride_w = stride[1];
  g.padding_h = padding[0], g.padding_w = padding[1];
  g.dilation_h = dilation[0], g.dilation_w = dilation[1];
  g.circular = circular;
  check_countable(op, "a patch (C, kh, kw)", {g.C, g.kernel_h, g.kernel_w});
  check.tensor("factor", factor, {g.patch(), g.patch()}, "(C*kh*kw, C*kh*kw)");
  ELLA_CHECK(factor.is_contiguous(), op, ": factor must be contiguous, it is updated in place");
  check.apart("x", x);
  ELLA_CHECK(!circular || (g.padding_h <= g.H && g.padding_w <= g.W), op, ": circular padding must not exceed the image (", g.H,
             ", ", g.W, "), got (", g.padding_h, ", ", g.padding_w, ")");
  const int64_t span_h = g.H + 2 * g.padding_h - g.dilation_h * (g.kernel_h - 1) - 1;
  const int64_t span_w = g.W + 2 * g.padding_w - g.dilation_w * (g.kernel_w - 1) - 1;
  ELLA_CHECK(span_h >= 0 && span_w >= 0, op, ": kernel_size (", g.kernel_h, ", ", g.kernel_w, ") with dilation (", g.dilation_h,
             ", ", g.dilation_w, ") does not fit the padded image (", g.H + 2 * g.padding_h, ", ", g.W + 2 * g.padding_w, ")");
  g.out_h = span_h / g.stride_h + 1;
  g.out_w = span_w / g.stride_w + 1;
  check_countable(op, "the patches' positions", {g.N, g.out_h, g.out_w});
  check_countable(op, "an image with its padding", {g.C, g.H + 2 * g.padding_h, g.W + 2 * g.padding_w});
  return g;
}

// ---- kron_logdet and its derivatives ----

struct KronLogdetSizes {
  int64_t G, a, b;
  bool shared;  // one row of eigenvalues_out for all groups
};

inline KronLogdetSizes check_kron_logdet(const char* op, const Tensor& eigenvalues_in, const Tensor& eigenvalues_out,
                                         const Tensor& precision) {
  const ArgumentCheck check(op, "eigenvalues_in", eigenvalues_in);
  check.tensor("eigenvalues_in", eigenvalues_in, {-1, -1}, "(G, a)");
  check.tensor("eigenvalues_out", eigenvalues_out, {-1, -1}, "(G, b) or (1, b)");
  check.tensor("precision", precision, {}, "()");
  const int64_t G = eigenvalues_in.size(0), rows = eigenvalues_out.size(0);
  ELLA_CHECK(rows == G || rows == 1, op, ": eigenvalues_out must have shape (G, b) or (1, b) with G = ", G, ", got ",
             shape_string(eigenvalues_out));
  check_countable(op, "the products (G, a, b)", {G, eigenvalues_in.size(1), eigenvalues_out.size(1)});
  return {G, eigenvalues_in.size(1), eigenvalues_out.size(1), rows == 1};
}

inline KronLogdetSizes check_kron_logdet_hvp(const Tensor& eigenvalues_in, const Tensor& eigenvalues_out,
                                             const Tensor& precision, const Tensor& v_in, const Tensor& v_out,
                                             const Tensor& v_precision) {
  const char* op = "kron_logdet_hvp";
  const KronLogdetSizes s = check_kron_logdet(op, eigenvalues_in, eigenvalues_out, precision);
  const ArgumentCheck check(op, "eigenvalues_in", eigenvalues_in);
  check.tensor("v_in", v_in, {s.G, s.a}, "(G, a)");
  check.tensor("v_out", v_out, {eigenvalues_out.size(0), s.b}, "that of eigenvalues_out");
  check.tensor("v_precision", v_precision, {}, "()");
  return s;
}

// ---- kron_evidence and its derivatives ----

struct KronEvidenceSizes {
  int64_t tensors, tiles;
};

inline KronEvidenceSizes check_kron_spectra(const char* op, const Tensor& eigenvalues, const Tensor& tiles,
                                            const Tensor& starts) {
  const ArgumentCheck check(op, "eigenvalues", eigenvalues);
  check.tensor("eigenvalues", eigenvalues, {-1}, "(E,)");
  check.index("tiles", tiles, {-1, 5}, "(T, 5)");
  check.index("starts", starts, {-1}, "(B + 1,)");
  ELLA_CHECK(tiles.is_contiguous() && starts.is_contiguous(), op, ": tiles and starts must be contiguous");
  ELLA_CHECK(starts.size(0) > 0, op, ": starts must have B + 1 entries, got none");
  return {starts.size(0) - 1, tiles.size(0)};
}

inline KronEvidenceSizes check_kron_evidence(const Tensor& eigenvalues, const Tensor& tiles, const Tensor& starts,
                                             const Tensor& square_norms, const Tensor& log_precision, const Tensor& log_scale) {
  const char* op = "kron_evidence";
  const KronEvidenceSizes s = check_kron_spectra(op, eigenvalues, tiles, starts);
  const ArgumentCheck check(op, "eigenvalues", eigenvalues);
  check.tensor("square_norms", square_norms, {s.tensors}, "(B,)");
  check.tensor("log_precision", log_precision, {s.tensors}, "(B,)");
  check.tensor("log_scale", log_scale, {}, "()");
  return s;
}

inline KronEvidenceSizes check_kron_evidence_derivative(const Tensor& eigenvalues, const Tensor& tiles, const Tensor& starts,
                                                        const Tensor& log_ratio, int64_t order, int64_t max_order) {
  const char* op = "kron_evidence_derivative";
  const KronEvidenceSizes s = check_kron_spectra(op, eigenvalues, tiles, starts);
  ArgumentCheck(op, "eigenvalues", eigenvalues).tensor("log_ratio", log_ratio, {s.tensors}, "(B,)");
  ELLA_CHECK(order >= 2 && order <= max_order, op, ": order must be from 2 to ", max_order, ", got ", order);
  return s;
}

// ---- gaussian_project ----

struct GaussianSizes {
  int64_t M, X, A, P;
};

inline GaussianSizes check_gaussian_project(const char* op, const Tensor& x, const Tensor& u, const Tensor& v) {
  const ArgumentCheck check(op, "x", x);
  check.tensor("x", x, {-1, -1}, "(M, X)");
  check.coordinates("u", u, {x.size(1), -1}, "(X, P)");
  check.coordinates("v", v, {-1, u.size(1)}, "(A, P)");
  check_countable(op, "the output (M, A)", {x.size(0), v.size(0)});
  check_countable(op, "the differences (A, X, P)", {v.size(0), x.size(1), u.size(1)});
  return {x.size(0), x.size(1), v.size(0), u.size(1)};
}

inline GaussianSizes check_gaussian_gradient(const char* op, const Tensor& grad, const Tensor& x, const Tensor& u,
                                             const Tensor& v) {
  const GaussianSizes s = check_gaussian_project(op, x, u, v);
  ArgumentCheck(op, "x", x).tensor("grad", grad, {s.M, s.A}, "(M, A)");
  return s;
}

inline void check_gaussian_directions(const char* op, const GaussianSizes& s, const Tensor& x, const Tensor& du,
                                      const Tensor& dv) {
  const ArgumentCheck check(op, "x", x);
  check.coordinates("du", du, {s.X, s.P}, "(X, P)");
  check.coordinates("dv", dv, {s.A, s.P}, "(A, P)");
}

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
  constexpr int64_t kMost = int64_t(1) << 30;
  const ArgumentCheck check(op, name, image);
  check.tensor(name, image, {-1, -1, -1, -1}, padded ? "(N, C, H + 2 pad_h, W + 2 pad_w)" : "(N, C, H, W)");
  ELLA_CHECK(pad_h >= 0 && pad_w >= 0 && pad_h <= kMost && pad_w <= kMost, op, ": pad_h and pad_w must be from 0 to 2^30, got ",
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

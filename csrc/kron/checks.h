// Sizes and argument checks of the Kronecker factors' sums and evidence, shared by the CPU and CUDA implementations.
#pragma once

#include "common/checks.h"

namespace ella {

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

// Several sums have as many of everything.
inline void check_many(const char* op, const std::vector<Tensor>& factors, size_t rows, size_t alphas) {
  ELLA_CHECK(factors.size() == rows && factors.size() == alphas, op, ": there must be as many factors (", factors.size(),
             ") as rows (", rows, ") and alphas (", alphas, ")");
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
  check_pair(op, "kernel_size", kernel_size, 1);
  check_pair(op, "stride", stride, 1);
  check_pair(op, "padding", padding, 0);
  check_pair(op, "dilation", dilation, 1);
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

// ---- kron_variance_ ----

struct KronVarianceSizes {
  int64_t N, K, T, G, a, b;
  bool diagonal;
  bool shared;  // one row of eigenvalues_out for all groups
};

inline KronVarianceSizes check_kron_variance(const Tensor& variance, const Tensor& outputs, const std::optional<Tensor>& inputs,
                                             const Tensor& eigenvalues_in, const Tensor& eigenvalues_out,
                                             const Tensor& precision) {
  const char* op = "kron_variance_";
  const ArgumentCheck check(op, "variance", variance);
  KronVarianceSizes s{};
  s.diagonal = variance.dim() == 2;
  if (s.diagonal) {
    check.tensor("variance", variance, {-1, -1}, "(N, K)");
  } else {
    check.tensor("variance", variance, {-1, -1, -1}, "(N, K, K)");
    check.tensor("variance", variance, {variance.size(0), variance.size(1), variance.size(1)}, "(N, K, K)");
  }
  s.N = variance.size(0), s.K = variance.size(1);
  const char* meaning = inputs ? "(K, N, T, G, b)" : "(K, N, G, a, b)";
  check.no_wider("outputs", outputs, {s.K, s.N, -1, -1, -1}, meaning);
  s.b = outputs.size(4);
  if (inputs) {
    s.T = outputs.size(2), s.G = outputs.size(3);
    ArgumentCheck(op, "outputs", outputs).tensor("inputs", *inputs, {s.N, s.T, s.G, -1}, "(N, T, G, a)");
    s.a = inputs->size(3);
    check.apart("inputs", *inputs);
  } else {
    s.T = 1, s.G = outputs.size(2), s.a = outputs.size(3);
  }
  check.coordinates("eigenvalues_in", eigenvalues_in, {s.G, s.a}, "(G, a)");
  s.shared = eigenvalues_out.dim() == 2 && eigenvalues_out.size(0) == 1;
  check.coordinates("eigenvalues_out", eigenvalues_out, {s.shared ? 1 : s.G, s.b}, s.shared ? "(1, b)" : "(G, b)");
  check.coordinates("precision", precision, {}, "()");
  ELLA_CHECK(variance.is_contiguous(), op, ": variance must be contiguous, it is updated in place");
  check.apart("outputs", outputs);
  check_countable(op, "the products (G, a, b)", {s.G, s.a, s.b});
  return s;
}

// ---- symmetric_eigenvalues ----

constexpr int kMostEigenvalueRows = 1024;  // ella_cuda/ops/symmetric_eigenvalues.py knows it too

inline void check_symmetric_eigenvalues(const std::vector<Tensor>& sets, const std::vector<int64_t>& ranks,
                                        const std::vector<double>& errors) {
  const char* op = "symmetric_eigenvalues";
  ELLA_CHECK(!sets.empty(), op, ": sets must have a tensor");
  const ArgumentCheck check(op, "sets", sets[0]);
  for (const Tensor& blocks : sets) {
    check.tensor("sets", blocks, {-1, -1, -1}, "(G, d, d)");
    check.tensor("sets", blocks, {-1, blocks.size(1), blocks.size(1)}, "(G, d, d)");
    ELLA_CHECK(blocks.scalar_type() == ScalarType::Double, op, ": sets must be float64, got ",
               dtype_name(blocks.scalar_type()));
    ELLA_CHECK(blocks.is_contiguous(), op, ": sets must be contiguous");
    ELLA_CHECK(blocks.size(1) <= kMostEigenvalueRows, op, ": sets must have at most ", kMostEigenvalueRows, " rows, got ",
               blocks.size(1));
  }
  ELLA_CHECK(ranks.size() == errors.size() && (ranks.empty() || ranks.size() == sets.size()), op,
             ": ranks and errors must have as many entries as sets (", sets.size(), "), or none, got ", ranks.size(), " and ",
             errors.size());
}

// ---- kron_evidence and its second derivative ----

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

inline KronEvidenceSizes check_kron_evidence_bend(const Tensor& eigenvalues, const Tensor& tiles, const Tensor& starts,
                                                  const Tensor& log_ratio) {
  const char* op = "kron_evidence_bend";
  const KronEvidenceSizes s = check_kron_spectra(op, eigenvalues, tiles, starts);
  ArgumentCheck(op, "eigenvalues", eigenvalues).tensor("log_ratio", log_ratio, {s.tensors}, "(B,)");
  return s;
}

}  // namespace ella

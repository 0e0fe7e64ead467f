// Sizes and argument checks of banks of filters whose activations are averaged, shared by the CPU and CUDA implementations.
#pragma once

#include "common/activation.h"
#include "common/checks.h"

namespace ella {

struct FilterSizes {
  int64_t N, S, H, D;
};

inline Activation checked_activation(const char* op, int64_t activation) {
  ELLA_CHECK(0 <= activation && activation < kActivations, op, ": activation must be from 0 to ", kActivations - 1, ", got ",
             activation);
  return static_cast<Activation>(activation);
}

inline FilterSizes check_filters(const char* op, const Tensor& x, const Tensor& bank, const std::optional<Tensor>& bias) {
  const ArgumentCheck check(op, "x", x);
  check.tensor("x", x, {-1, -1}, "(N, D)");
  const int64_t N = x.size(0), D = x.size(1);
  check.tensor("bank", bank, {-1, -1, D}, "(S, H, D)");
  const int64_t S = bank.size(0), H = bank.size(1);
  ELLA_CHECK(S > 0, op, ": bank must have at least one transform, got ", shape_string(bank));
  if (bias) check.tensor("bias", *bias, {H}, "(H,)");
  check_countable(op, "the activations (N, S, H)", {N, S, H});
  return {N, S, H, D};
}

inline FilterSizes check_filter_gradients(const char* op, const Tensor& grad, const Tensor& x, const Tensor& bank,
                                          const std::optional<Tensor>& bias) {
  const FilterSizes s = check_filters(op, x, bank, bias);
  ArgumentCheck(op, "x", x).tensor("grad", grad, {s.N, s.H}, "(N, H)");
  return s;
}

// Bits of ReLU's slopes, as the forward pass kept them.
inline void check_kept_bits(const char* op, const Tensor& kept, Activation activation, std::initializer_list<int64_t> shape) {
  ELLA_CHECK(activation == Activation::relu, op, ": kept must be empty, or bits of activation 1");
  bool fits = kept.scalar_type() == ScalarType::Byte && kept.is_contiguous() && kept.dim() == 3;
  int64_t axis = 0;
  for (const int64_t size : shape) fits = fits && kept.size(axis++) == size;
  ELLA_CHECK(fits, op, ": kept must be what the forward pass kept, got shape ", shape_string(kept));
}

}  // namespace ella

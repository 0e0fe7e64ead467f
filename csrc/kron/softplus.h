// Derivatives of log(1 + exp y). With s = e^y / (1 + e^y) the k-th is, from the second on, s (1 - s) Q_k(s) with
// Q_2 = 1, Q_(k+1) = (1 - 2 s) Q_k + s (1 - s) Q_k'.
#pragma once

#include <cstdint>

namespace ella {

// Coefficients are integers below 2^53 up to this order, hence exact.
constexpr int kMaxSoftplusOrder = 12;

struct SoftplusPolynomial {
  double coefficients[kMaxSoftplusOrder - 1];  // of s^0, s^1, ...
  int degree;
};

inline SoftplusPolynomial softplus_polynomial(int64_t order) {
  SoftplusPolynomial q = {{1.0}, 0};
  for (int64_t k = 2; k < order; ++k) {
    SoftplusPolynomial next = {{}, q.degree + 1};
    for (int i = 0; i <= q.degree; ++i) {
      next.coefficients[i] += (1 + i) * q.coefficients[i];
      next.coefficients[i + 1] -= (2 + i) * q.coefficients[i];
    }
    q = next;
  }
  return q;
}

}  // namespace ella

// Tensor-core products of a warp: every lane lays down its fragments, waits for the others and computes its own results.
//
// Arithmetic. Operands are cut to TF32 (the upper 19 bits). Four exact products and the sum so far are each cut to 24 bits
// relative to the largest of them, added, and the sum is cut to float32; twice for a depth of eight. Real tensor cores cut as
// well and keep some bits more (Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer
// Science 2021), so what is accurate enough here is so there.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>

#include "language.h"
#include "warp.h"

namespace cusim {

inline float cut_to_tf32(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits &= 0xffffe000u;
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

// As cvt.rna.tf32.f32: to nearest, ties away from zero.
inline float round_tf32(float value) {
  if (std::isnan(value)) return std::numeric_limits<float>::quiet_NaN();
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits += 0x1000u;  // half of the last place; from the largest numbers on to infinity
  std::memcpy(&value, &bits, sizeof bits);
  return cut_to_tf32(value);
}

// 2 to the power of `exponent`, one of a normal number.
inline double power_of_two(int exponent) { return __longlong_as_double(static_cast<long long>(exponent + 1023) << 52); }

// The exponent of a normal number; std::ilogb, where most of the simulator's time would go.
inline int exponent_of(double value) { return static_cast<int>(__double_as_longlong(value) >> 52 & 0x7ff) - 1023; }

// Towards zero, to multiples of 2 to the power of `exponent`, of which there are fewer than 2^63.
inline double cut_to(double value, int exponent) {
  return static_cast<double>(static_cast<long long>(value * power_of_two(-exponent))) * power_of_two(exponent);
}

// sum + x[0] y[0] + ... + x[3] y[3] of finite or other operands that are TF32 numbers.
inline float cut_dot4(float sum, const float (&x)[4], const float (&y)[4]) {
  double terms[5] = {sum}, largest = std::abs(double(sum));
  for (int i = 0; i < 4; ++i) {
    terms[i + 1] = double(x[i]) * double(y[i]);
    largest = std::max(largest, std::abs(terms[i + 1]));
  }
  double total = 0;
  for (const double term : terms) total += term;
  if (!std::isfinite(total) || largest == 0) return static_cast<float>(total);
  const int exponent = std::max(exponent_of(largest), -126) - 23;
  total = 0;
  for (const double term : terms) total += cut_to(term, exponent);  // at most 26 bits: exact
  if (total == 0) return 0;
  return static_cast<float>(cut_to(total, std::max(exponent_of(total), -126) - 23));
}

struct Fragment {
  float a[4], b[2];
};

// c += a b, laid out as for mma.m16n8k8 (csrc/common/tensor_core.h).
inline void mma_tf32(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
  Block& block_ = block();
  Fiber* const self = block_.current;
  const size_t buffer = self->exchange_parity * block_.fibers.size();
  self->exchange_parity ^= 1;
  Fragment own;
  for (int i = 0; i < 4; ++i) own.a[i] = cut_to_tf32(a[i]);
  for (int i = 0; i < 2; ++i) own.b[i] = cut_to_tf32(b[i]);
  static_assert(sizeof(Fragment) <= sizeof(Slot), "a slot holds a lane's fragments");
  std::memcpy(block_.exchange[buffer + self->thread].bytes, &own, sizeof own);
  wait_for_warp(~0u, false);
  const Slot* const lanes = &block_.exchange[buffer + self->warp * kWarp];
  const auto value_of = [&](unsigned lane, size_t place) {
    float value;
    std::memcpy(&value, lanes[lane].bytes + place, sizeof value);
    return value;
  };
  const unsigned g = self->lane / 4, t = self->lane % 4;
  for (int result = 0; result < 4; ++result) {
    const unsigned below = result / 2, column = 2 * t + result % 2;  // row g + 8 below
    for (int half = 0; half < 2; ++half) {                           // depths 4 half .. 4 half + 3
      float x[4], y[4];
      for (unsigned k = 0; k < 4; ++k) {
        x[k] = value_of(4 * g + k, offsetof(Fragment, a) + (2 * half + below) * sizeof(float));
        y[k] = value_of(4 * column + k, offsetof(Fragment, b) + half * sizeof(float));
      }
      c[result] = cut_dot4(c[result], x, y);
    }
  }
}

}  // namespace cusim

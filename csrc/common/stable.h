// The stable ABI of libtorch as this library uses it: includes, registration, dispatch over dtypes.
// Only headers below torch/csrc/stable and torch/headeronly may be included anywhere in csrc: that is what lets one binary
// load in every torch from 2.11 on.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/Dispatch.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <type_traits>
#include <vector>

#include "common/error.h"

// Headers before 2.13 know the check under its old name only.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

// The CUDA simulator of the test-suite compiles schemas.cpp and csrc/cuda into a library of its own name, for the CPU key.
#ifndef ELLA_LIBRARY
#define ELLA_LIBRARY ella_cuda
#endif
#ifndef ELLA_DISPATCH_KEY
#define ELLA_DISPATCH_KEY CUDA
#endif

// Opens the block that holds `m.impl(name, TORCH_BOX(&function))` lines: CPU sources say ELLA_REGISTER(CPU, m), CUDA sources
// ELLA_REGISTER(ELLA_DISPATCH_KEY, m).
#define ELLA_REGISTER(KEY, M) STABLE_TORCH_LIBRARY_IMPL(ELLA_LIBRARY, KEY, M)

// Runs the body with `scalar_t` float or double.
#define ELLA_DISPATCH_FLOATING(TYPE, NAME, ...)                                            \
  THO_DISPATCH_SWITCH(TYPE, NAME,                                                          \
                      THO_DISPATCH_CASE(torch::headeronly::ScalarType::Float, __VA_ARGS__) \
                          THO_DISPATCH_CASE(torch::headeronly::ScalarType::Double, __VA_ARGS__))

namespace ella {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The dtype of float or double.
template <class T>
constexpr ScalarType kScalarType = sizeof(T) == sizeof(float) ? ScalarType::Float : ScalarType::Double;

// The type in which rows of type S are multiplied and summed: products of two 16-bit numbers are exact in float.
template <class S>
using Widened = std::conditional_t<std::is_same_v<S, BFloat16> || std::is_same_v<S, Half>, float, S>;

template <class S>
constexpr bool kIsWidened = !std::is_same_v<S, Widened<S>>;

// Calls f with a value of the type of `rows`: double, float, BFloat16 or Half.
template <class F>
void with_row_type(const Tensor& rows, const F& f) {
  const ScalarType type = rows.scalar_type();
  if (type == ScalarType::Double) return f(double());
  if (type == ScalarType::BFloat16) return f(BFloat16());
  if (type == ScalarType::Half) return f(Half());
  return f(float());
}

// Calls f with a value of the type of `rows` and one of the type of the factor that their products are added to, which is
// Widened or double.
template <class F>
void with_factor_types(const Tensor& factor, const Tensor& rows, const F& f) {
  with_row_type(rows, [&](auto number) {
    using S = decltype(number);
    if (std::is_same_v<S, double> || factor.scalar_type() == ScalarType::Double) {
      f(S(), double());
    } else {
      f(S(), Widened<S>());
    }
  });
}

// Uninitialised, contiguous, on like's device and (unless told otherwise) of its dtype.
inline Tensor empty_of(const Tensor& like, std::initializer_list<int64_t> shape,
                       std::optional<ScalarType> dtype = std::nullopt) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(shape.begin(), shape.size()), dtype);
}

inline Tensor zeros_of(const Tensor& like, std::initializer_list<int64_t> shape,
                       std::optional<ScalarType> dtype = std::nullopt) {
  return torch::stable::new_zeros(like, torch::headeronly::IntHeaderOnlyArrayRef(shape.begin(), shape.size()), dtype);
}

}  // namespace ella

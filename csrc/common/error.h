// Errors as users read them: what was expected and what came, without the place in our sources.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace ella {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());  // RuntimeError in Python
}

// As torch prints it: float32, not Float.
inline std::string dtype_name(torch::headeronly::ScalarType type) {
  using torch::headeronly::ScalarType;
  constexpr std::pair<ScalarType, const char*> names[] = {{ScalarType::Float, "float32"},
                                                          {ScalarType::Double, "float64"},
                                                          {ScalarType::Half, "float16"},
                                                          {ScalarType::BFloat16, "bfloat16"},
                                                          {ScalarType::Byte, "uint8"},
                                                          {ScalarType::Char, "int8"},
                                                          {ScalarType::Short, "int16"},
                                                          {ScalarType::Int, "int32"},
                                                          {ScalarType::Long, "int64"},
                                                          {ScalarType::Bool, "bool"},
                                                          {ScalarType::ComplexFloat, "complex64"},
                                                          {ScalarType::ComplexDouble, "complex128"}};
  for (const auto& [known, name] : names) {
    if (known == type) return name;
  }
  return torch::headeronly::toString(type);
}

}  // namespace ella

// Throws std::runtime_error with the further arguments one after another where the condition does not hold.
#define ELLA_CHECK(CONDITION, ...)               \
  do {                                           \
    if (!(CONDITION)) ::ella::fail(__VA_ARGS__); \
  } while (false)

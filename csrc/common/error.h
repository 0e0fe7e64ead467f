// Errors as users read them: what was expected and what came, without the place in our sources.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <sstream>
#include <stdexcept>
#include <string>

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
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    default:
      return torch::headeronly::toString(type);
  }
}

}  // namespace ella

// Throws std::runtime_error with the further arguments one after another where the condition does not hold.
#define ELLA_CHECK(CONDITION, ...)               \
  do {                                           \
    if (!(CONDITION)) ::ella::fail(__VA_ARGS__); \
  } while (false)

// What the argument checks of all ops share. check_<op> is in csrc/<family>/checks.h and serves the CPU and the CUDA
// implementation, so that both refuse the same inputs with the same words. A check throws (RuntimeError in Python) with the
// argument's name, what was expected and what came.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <sstream>
#include <string>
#include <tuple>

#include "common/stable.h"

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
constexpr int64_t kMaxCounted = int64_t(1) << 53;

// Refuses sizes whose product is more, an empty one counted as 1: others are multiplied without it.
inline void check_countable(const char* op, const char* what, std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) {
    const int64_t factor = std::max(size, int64_t(1));
    ELLA_CHECK(factor <= kMaxCounted / product, op, ": ", what, " would have more than 2^53 numbers; use smaller sizes");
    product *= factor;
  }
}

// A height and a width of a convolution; products and sums of these and of sizes do not overflow.
inline void check_pair(const char* op, const char* name, const std::vector<int64_t>& value, int64_t minimum) {
  ELLA_CHECK(value.size() == 2, op, ": ", name, " must have 2 values (height, width), got ", value.size());
  constexpr int64_t kMax = 1 << 30;
  ELLA_CHECK(std::min(value[0], value[1]) >= minimum && std::max(value[0], value[1]) <= kMax, op, ": ", name,
             " must be at least ", minimum, " and at most ", kMax, ", got (", value[0], ", ", value[1], ")");
}

// Knows the op's name and the tensor that sets dtype and device; every other argument is held against it.
class ArgumentCheck {
 public:
  ArgumentCheck(const char* op, const char* name, const Tensor& reference) : op_(op), name_(name), reference_(reference) {
    const ScalarType type = reference.scalar_type();
    ELLA_CHECK(type == ScalarType::Float || type == ScalarType::Double, op_, ": ", name, " must be float32 or float64, got ",
               dtype_name(type));
  }

  // As tensor(), where the reference is a sum of products of these elements: they may also have a narrower type.
  void summand(const char* name, const Tensor& value, std::initializer_list<int64_t> shape, const char* meaning) const {
    const ScalarType type = value.scalar_type(), sum = reference_.scalar_type();
    const bool widens =
        type == ScalarType::BFloat16 || type == ScalarType::Half || (sum == ScalarType::Double && type == ScalarType::Float);
    argument(type == sum || widens, name, value, shape, meaning, "have the dtype of ", name_, " (", dtype_name(sum), ") or be ",
             sum == ScalarType::Double ? "float32, " : "", "bfloat16 or float16");
  }

  // Of the reference's dtype, or float32 beside a float64 reference, which takes sums of it.
  void no_wider(const char* name, const Tensor& value, std::initializer_list<int64_t> shape, const char* meaning) const {
    const ScalarType type = value.scalar_type(), sum = reference_.scalar_type();
    argument(type == sum || (sum == ScalarType::Double && type == ScalarType::Float), name, value, shape, meaning,
             "have the dtype of ", name_, " (", dtype_name(sum), ")", sum == ScalarType::Double ? " or be float32" : "");
  }

  // Shape, dtype and device; -1 in `shape` accepts any size. `meaning` names the axes in the message.
  void tensor(const char* name, const Tensor& value, std::initializer_list<int64_t> shape, const char* meaning) const {
    const ScalarType type = reference_.scalar_type();
    argument(value.scalar_type() == type, name, value, shape, meaning, "have the dtype of ", name_, " (", dtype_name(type),
             ")");
  }

  void index(const char* name, const Tensor& value, std::initializer_list<int64_t> shape, const char* meaning) const {
    argument(value.scalar_type() == ScalarType::Long, name, value, shape, meaning, "be int64");
  }

  void coordinates(const char* name, const Tensor& value, std::initializer_list<int64_t> shape, const char* meaning) const {
    argument(value.scalar_type() == ScalarType::Double, name, value, shape, meaning, "be float64 whatever the dtype of ",
             name_);
  }

  void number(const char* name, double value) const {
    const bool single = reference_.scalar_type() == ScalarType::Float;
    const double largest = single ? std::numeric_limits<float>::max() : std::numeric_limits<double>::max();
    ELLA_CHECK(std::abs(value) <= largest, op_, ": ", name, " must be a finite number in the dtype of ", name_, " (",
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
    int64_t elements = 1;
    for (int64_t axis = 0; axis < value.dim(); ++axis) {
      const int64_t size = std::max(value.size(axis), int64_t(1));
      ELLA_CHECK(size <= kMaxCounted / elements, op_, ": ", name, " must have at most 2^53 numbers, got shape ",
                 shape_string(value));
      elements *= size;
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
  template <class... Words>
  void argument(bool right_dtype, const char* name, const Tensor& value, std::initializer_list<int64_t> shape,
                const char* meaning, const Words&... words) const {
    dimensions(name, value, shape, meaning);
    ELLA_CHECK(right_dtype, op_, ": ", name, " must ", words..., ", got ", dtype_name(value.scalar_type()));
    device(name, value);
  }

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

}  // namespace ella

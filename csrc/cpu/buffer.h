// Scratch memory of a CPU op, from torch's allocator.
#pragma once

#include <type_traits>

#include "../common/stable.h"

namespace ella {

template <class T>
class Buffer {
 public:
  Buffer(const Tensor& like, int64_t count)
      : tensor_(empty_of(like, {count}, std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float)),
        data_(tensor_.template mutable_data_ptr<T>()) {}

  T* data() const { return data_; }
  void zero(int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; ++i) data_[i] = T(0);
  }

 private:
  Tensor tensor_;
  T* data_;
};

inline int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace ella

// Scratch memory of a CPU op.
#pragma once

#include <limits>
#include <memory>
#include <new>

#include "common/stable.h"

namespace ella {

// `count` elements, uninitialised, from the system: asking torch takes a call of its dispatcher, of a few microseconds.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : data_(static_cast<T*>(::operator new(bytes(count), kLine, std::nothrow))) {
    ELLA_CHECK(data_, "ella_cuda: the system has no ", bytes(count),
               " bytes of scratch memory left; free some, or use smaller batches");
  }

  T* data() const { return data_.get(); }
  void zero(int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; ++i) data_.get()[i] = T(0);
  }

 private:
  static constexpr std::align_val_t kLine{64};  // of the cache
  static size_t bytes(int64_t count) {
    constexpr int64_t kMax = std::numeric_limits<int64_t>::max() / static_cast<int64_t>(sizeof(T));
    ELLA_CHECK(count >= 0 && count <= kMax, "ella_cuda: sizes whose scratch memory cannot be counted; use smaller ones");
    return static_cast<size_t>(count) * sizeof(T);
  }
  struct Free {
    void operator()(T* data) const { ::operator delete(data, kLine); }
  };

  std::unique_ptr<T, Free> data_;
};

inline int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace ella

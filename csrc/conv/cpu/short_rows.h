// Loops over the rows of polyphase components, most of them short.
#pragma once

#include <cstdint>
#include <type_traits>

namespace ella {

// Calls f with half the width of the images, as a constant where it is a small power of two: rows are short then, and loops of
// unknown length cost more than what they do.
template <class F>
void with_half_width(int64_t half, const F& f) {
  switch (half) {
    case 1:
      return f(std::integral_constant<int64_t, 1>());
    case 2:
      return f(std::integral_constant<int64_t, 2>());
    case 4:
      return f(std::integral_constant<int64_t, 4>());
    case 8:
      return f(std::integral_constant<int64_t, 8>());
    case 16:
      return f(std::integral_constant<int64_t, 16>());
    default:
      return f(half);
  }
}

}  // namespace ella

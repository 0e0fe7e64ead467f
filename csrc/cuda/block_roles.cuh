// Launches whose blocks have different roles.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "common/device.h"

namespace ella {

// The blocks of a launch that have one role: `count` of them from `first` on, each with about `length` steps.
struct Blocks {
  int64_t first, count, length;

  __device__ __forceinline__ bool have(int64_t block) const { return block >= first && block - first < count; }
};

// Gives every role its blocks and returns how many there are. Blocks start in about this order: those with most to do come
// first, so that the multiprocessors become idle at the same time.
inline int64_t number_blocks(std::initializer_list<Blocks*> roles) {
  std::vector<Blocks*> order(roles);
  std::stable_sort(order.begin(), order.end(), [](const Blocks* a, const Blocks* b) { return a->length > b->length; });
  int64_t total = 0;
  for (Blocks* const blocks : order) blocks->first = total, total += blocks->count;
  return total;
}

}  // namespace ella

// Launches whose blocks do several works.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "../common/device.h"

namespace ella {

// The blocks of a launch that do one work: `count` of them from `first` on, each with about `length` steps.
struct Blocks {
  int64_t first, count, length;

  __device__ __forceinline__ bool have(int64_t block) const { return block >= first && block - first < count; }
};

// Gives every work its blocks and returns how many there are. Blocks start in about this order: those with most to do come
// first, so that the multiprocessors become idle together.
inline int64_t number_blocks(std::initializer_list<Blocks*> works) {
  std::vector<Blocks*> order(works);
  std::stable_sort(order.begin(), order.end(), [](const Blocks* a, const Blocks* b) { return a->length > b->length; });
  int64_t total = 0;
  for (Blocks* const blocks : order) blocks->first = total, total += blocks->count;
  return total;
}

}  // namespace ella

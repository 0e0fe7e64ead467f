// Which kernels were launched with how many threads and how much dynamic shared memory, how often any was, of how many blocks,
// and how often memory was cleared: what a compiler cannot know.
#pragma once

#include <cstddef>
#include <set>
#include <tuple>

namespace cusim {

using Launch = std::tuple<const void*, unsigned, size_t>;  // kernel, threads a block, bytes of shared memory

inline std::set<Launch>& launches() {
  static std::set<Launch> value;
  return value;
}

struct Counts {
  long long launches = 0, blocks = 0, clears = 0;
};

inline Counts& counts() {
  static Counts value;
  return value;
}

}  // namespace cusim

// Called through ctypes: what happened since the library was loaded, repeated launches counted too.
extern "C" __attribute__((used)) inline const cusim::Counts* cusim_counts() { return &cusim::counts(); }

// Called through ctypes: hands out one launch of those seen since the library was loaded and forgets it; false without any.
extern "C" __attribute__((used)) inline bool cusim_take_launch(const void** kernel, unsigned* threads, size_t* shared_bytes) {
  std::set<cusim::Launch>& all = cusim::launches();
  if (all.empty()) return false;
  std::tie(*kernel, *threads, *shared_bytes) = *all.begin();
  all.erase(all.begin());
  return true;
}

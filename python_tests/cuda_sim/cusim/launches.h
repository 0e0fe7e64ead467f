// Which kernels were launched with how many threads and how much dynamic shared memory, and how often any was: what a compiler
// cannot know.
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

inline long long& launch_count() {
  static long long value = 0;
  return value;
}

}  // namespace cusim

// Called through ctypes: launches since the library was loaded, repeated ones too.
extern "C" __attribute__((used)) inline long long cusim_launch_count() { return cusim::launch_count(); }

// Called through ctypes: hands out one launch of those seen since the library was loaded and forgets it; false without any.
extern "C" __attribute__((used)) inline bool cusim_take_launch(const void** kernel, unsigned* threads, size_t* shared_bytes) {
  std::set<cusim::Launch>& all = cusim::launches();
  if (all.empty()) return false;
  std::tie(*kernel, *threads, *shared_bytes) = *all.begin();
  all.erase(all.begin());
  return true;
}

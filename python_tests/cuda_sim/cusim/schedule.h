// In which order threads and blocks run, chosen while the program runs: one build serves all orders.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

namespace cusim {

enum class Order { forward = 0, reverse = 1, random = 2, none = 3 };  // none runs: launches are counted

struct Schedule {
  Order threads = Order::forward;
  Order blocks = Order::forward;
  int multiprocessors = 2;  // what a kernel's launcher is told about the device
  bool warpgroups = false;  // whether it is told that the device has Hopper's
  bool runs = true;         // whether blocks run; else launches are counted alone
  std::mt19937 random{1};
};

inline Schedule& schedule() {
  static Schedule value;
  return value;
}

inline void arrange(std::vector<unsigned>& indices, size_t count, Order order) {
  indices.resize(count);
  std::iota(indices.begin(), indices.end(), 0u);
  if (order == Order::reverse) std::reverse(indices.begin(), indices.end());
  if (order == Order::none) indices.clear();
  if (order == Order::random) std::shuffle(indices.begin(), indices.end(), schedule().random);
}

inline void poison(void* memory, size_t bytes) {
  if (bytes && schedule().blocks != Order::none) std::memset(memory, 0xFF, bytes);  // NaN in either precision, -1 in integers
}

}  // namespace cusim

// Called through ctypes by the tests.
extern "C" __attribute__((used)) inline void cusim_set_schedule(int threads, int blocks, int multiprocessors, unsigned seed,
                                                                bool warpgroups, bool runs) {
  cusim::schedule().threads = static_cast<cusim::Order>(threads);
  cusim::schedule().blocks = static_cast<cusim::Order>(blocks);
  cusim::schedule().multiprocessors = multiprocessors;
  cusim::schedule().warpgroups = warpgroups;
  cusim::schedule().runs = runs;
  cusim::schedule().random.seed(seed);
}

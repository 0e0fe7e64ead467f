// Asynchronous products of a warpgroup (csrc/common/warpgroup.h), with the arithmetic of tensor_core.h.
//
// A product reads its operand in shared memory twice, when it is issued and when it is waited for, both as checked reads: a
// value that is not there at the first or that somebody replaces before the second is an error. In between the accumulators
// are NaN. Its reads also need that the writer made its writes visible to it (writes_before_products), and the operand to start
// on a multiple of 1024 bytes; the registers it was given may not change before the wait. Not seen: registers that are changed
// after the fence and before the product, warps of a warpgroup that ask for different products, and whatever the instruction's
// own words say: its descriptor, its fragments as the hardware numbers them.
#pragma once

#include <array>
#include <limits>

#include "shared.h"
#include "tensor_core.h"

namespace cusim {

inline void store_vector_for_products(SharedArray<float> to, const float (&values)[4]) {
  to.check_aligned();
  for (int i = 0; i < 4; ++i) {
    to.write(i, values[i]);
    block().current->unfenced.push_back(to.place_of(i));
  }
}

inline void writes_before_products() {
  Block& b = block();
  for (const auto& [record, index] : b.current->unfenced) {
    Shadow& s = b.arrays[record].shadow[index];
    // Unless somebody else has written there since.
    if (s.writer == static_cast<int>(b.current->thread)) s.visible_to_products = true;
  }
  b.current->unfenced.clear();
}

class SwizzledOperand {
 public:
  explicit SwizzledOperand(const SharedArray<float>& begin) : memory_(begin) {
    const auto [record, index] = begin.place_of(0);
    if ((block().arrays[record].offset + index * sizeof(float)) % 1024) fail("an operand of products must be aligned to 1024");
  }

  // The hardware adds depth and column to the address and then exchanges its bits: 4 to 6 by 7 to 9.
  float read(int column, int depth) const {
    const unsigned linear = column * 128 + depth * 4, at = linear ^ (linear >> 7 & 7) << 4;
    const auto [record, index] = memory_.place_of(static_cast<int>(at / 4));
    const float value = memory_.read(static_cast<int>(at / 4));
    if (!block().arrays[record].shadow[index].visible_to_products) {
      fail("a product reads shared memory that was written without making it visible to products");
    }
    return cut_to_tf32(value);
  }

  int place() const { return static_cast<int>(memory_.place_of(0).second); }

 private:
  SharedArray<float> memory_;
};

inline void warpgroup_fence() { block().current->registers_fenced = true; }

inline void warpgroup_multiply(float (&c)[32], const float (&a)[4], const SwizzledOperand& b, int step, bool add) {
  struct Issued {
    float a[4];
    int operand, step, add;
  };
  static_assert(sizeof(Issued) <= sizeof(Slot), "a slot holds a lane's part");
  Block& block_ = block();
  Fiber* const self = block_.current;
  if (!self->registers_fenced) fail("a product without a fence before it");
  const size_t buffer = self->exchange_parity * block_.fibers.size();
  self->exchange_parity ^= 1;
  Issued own{{}, b.place(), step, add};
  for (int i = 0; i < 4; ++i) own.a[i] = cut_to_tf32(a[i]);
  std::memcpy(block_.exchange[buffer + self->thread].bytes, &own, sizeof own);
  wait_for_warp(~0u, false);
  const unsigned g = self->lane / 4, t = self->lane % 4;
  std::array<std::array<float, 8>, 2> rows;  // g and g + 8
  for (unsigned k = 0; k < 4; ++k) {
    Issued other;
    std::memcpy(&other, block_.exchange[buffer + self->warp * kWarp + 4 * g + k].bytes, sizeof other);
    if (other.operand != own.operand || other.step != step || other.add != own.add)
      fail("the lanes ask for different products");
    for (unsigned i = 0; i < 4; ++i) rows[i % 2][k + i / 2 * 4] = other.a[i];
  }
  const auto columns = [t](int j) { return 8 * (j / 2) + 2 * static_cast<int>(t) + j % 2; };
  for (int j = 0; j < 16; ++j) {
    for (int k = 0; k < 8; ++k) b.read(columns(j), 8 * step + k);
  }
  float* const results = c;
  const float (*const given)[4] = &a;
  std::array<float, 4> at_issue;
  std::copy(a, a + 4, at_issue.begin());
  self->accumulators.try_emplace(results, c, c + 32);
  std::fill(c, c + 32, std::numeric_limits<float>::quiet_NaN());
  self->products.push_back({[self, results, given, at_issue, rows, b, step, add, columns] {
                              if (std::memcmp(*given, at_issue.data(), sizeof *given)) {
                                fail("an operand of a product changed before the wait");
                              }
                              for (int j = 0; j < 16; ++j) {
                                float values[8];
                                for (int k = 0; k < 8; ++k) values[k] = b.read(columns(j), 8 * step + k);
                                for (int below = 0; below < 2; ++below) {
                                  float& result = self->accumulators[results][j / 2 * 4 + 2 * below + j % 2];
                                  if (!add) result = 0;
                                  for (int half = 0; half < 8; half += 4) {
                                    float x[4], y[4];
                                    for (int k = 0; k < 4; ++k) x[k] = rows[below][half + k], y[k] = values[half + k];
                                    result = cut_dot4(result, x, y);
                                  }
                                }
                              }
                            },
                            results, 0});
}

inline void warpgroup_commit() {
  for (Product& product : block().current->products) ++product.commits_since;
}

template <int Pending>
void warpgroup_wait(float (&c)[32]) {
  Fiber* const self = block().current;
  std::vector<Product> rest;
  for (Product& product : self->products) {
    if (product.commits_since > Pending) {
      product.finish();
    } else {
      rest.push_back(product);
    }
  }
  self->products.swap(rest);
  self->registers_fenced = false;
  for (auto at = self->accumulators.begin(); at != self->accumulators.end();) {
    float* const results = at->first;
    const bool under_way = std::any_of(self->products.begin(), self->products.end(),
                                       [results](const Product& product) { return product.results == results; });
    if (under_way) {
      ++at;
    } else {
      std::copy(at->second.begin(), at->second.end(), results);
      at = self->accumulators.erase(at);
    }
  }
}

}  // namespace cusim

// Operations among the 32 threads of a warp.
#pragma once

#include "block.h"

namespace cusim {

inline void wait_for_warp(unsigned mask, bool orders_memory) {
  Fiber* const self = block().current;
  if (!((mask >> self->lane) & 1)) fail("a thread calls a warp operation whose mask leaves it out");
  self->mask = mask;
  self->orders_memory = orders_memory;
  wait(State::at_warp_barrier);
}

// Every lane of the mask lays down its value and takes up that of lane `source`.
template <class T>
T exchange(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= sizeof(Slot), "shuffles move at most 16 bytes");
  Block& b = block();
  Fiber* const self = b.current;
  const size_t buffer = self->exchange_parity * b.fibers.size();
  self->exchange_parity ^= 1;
  std::memcpy(b.exchange[buffer + self->thread].bytes, &value, sizeof value);
  wait_for_warp(mask, false);
  if (source >= kWarp || !((mask >> source) & 1)) fail("a shuffle reads a lane outside its mask");
  T result;
  std::memcpy(&result, b.exchange[buffer + self->warp * kWarp + source].bytes, sizeof result);
  return result;
}

}  // namespace cusim

inline void __syncwarp(unsigned mask = ~0u) { cusim::wait_for_warp(mask, true); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const unsigned lane = cusim::block().current->lane;
  return cusim::exchange(mask, value, (lane & ~(width - 1)) | (source & (width - 1)));
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const unsigned lane = cusim::block().current->lane, other = lane ^ bits;
  return cusim::exchange(mask, value, (other & ~(width - 1)) > (lane & ~(width - 1)) ? lane : other);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  const unsigned lane = cusim::block().current->lane;
  return cusim::exchange(mask, value, (lane & (width - 1)) + distance < unsigned(width) ? lane + distance : lane);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  unsigned result = 0;
  for (unsigned lane = 0; lane < cusim::kWarp; ++lane) {
    if (!((mask >> lane) & 1)) continue;
    if (cusim::exchange(mask, predicate, lane)) result |= 1u << lane;
  }
  return result;
}

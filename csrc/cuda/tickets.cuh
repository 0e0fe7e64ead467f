// Tickets by which a kernel's blocks find out which of them is the last (last_block): zero when a kernel starts, zero again
// when it ends, so that no call clears them.
//
// They are memory of the module, zero from its load on. Kernels that may run at once have rows of their own: those of a stream
// share one, as they run one after another, and so do those that a stream records in a CUDA graph. A row is never given out
// again, since a graph may be replayed at any time. A call that needs more tickets than a row has, or finds no row left,
// allocates its own and clears them. A kernel that is aborted leaves its tickets anywhere, and takes the context with it,
// memory included.
#pragma once

#include <array>
#include <map>
#include <mutex>
#include <optional>

#include "common/device.h"

namespace ella {

// Tests say fewer, so that calls find no row.
#ifndef ELLA_MAX_TICKET_ROWS
#define ELLA_MAX_TICKET_ROWS 1024
#endif
constexpr int kTicketRows = ELLA_MAX_TICKET_ROWS;

template <int Width>
static __device__ unsigned ticket_memory[kTicketRows * Width];

template <int Width>
struct Tickets {
  unsigned* own = nullptr;  // of the call; null where they are the module's
  int first = 0;

  __device__ __forceinline__ unsigned* operator[](int i) const {
    return (own == nullptr ? ticket_memory<Width> : own) + first + i;
  }
};

// The row of the kernels that the device's stream runs, or records; none if all are given out.
inline std::optional<int> ticket_row(const Device& device) {
  static std::mutex mutex;
  static std::map<std::array<unsigned long long, 3>, int> rows;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto order = device.order();
  const auto found = rows.find(order);
  if (found != rows.end()) return found->second;
  const int row = static_cast<int>(rows.size());
  if (row == kTicketRows) return std::nullopt;
  rows.emplace(order, row);
  return row;
}

// The tickets of one launch, `count` of them; what a call allocates lies in `memory`, to be kept until the kernel is queued.
template <int Width>
Tickets<Width> take_tickets(const Device& device, const char* name, const Tensor& like, int64_t count,
                            std::optional<Tensor>& memory) {
  const std::optional<int> row = count <= Width ? ticket_row(device) : std::nullopt;
  if (row) return {nullptr, *row * Width};
  memory = device_empty(like, {count}, ScalarType::Int);
  clear(device, name, *memory);
  return {static_cast<unsigned*>(memory->data_ptr()), 0};
}

}  // namespace ella

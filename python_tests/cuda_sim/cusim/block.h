// A block of threads as fibers, its barriers, and the launch that runs block after block.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "language.h"
#include "launches.h"
#include "schedule.h"

namespace cusim {

constexpr size_t kStackBytes = 64 << 10;
constexpr unsigned kWarp = 32;

enum class State { ready, at_block_barrier, at_warp_barrier, exited };

// An asynchronous copy of one number, `from` (null: 0) to a place of a shared array: `finish` writes it, once enough groups
// were committed after it.
struct PendingCopy {
  void (*finish)(const PendingCopy&);
  void* data;  // of the array, which is number `record`
  size_t record;
  int place;
  const void* from;
  int commits_since;
};

// An asynchronous product of a warpgroup: this thread's results are computed once enough groups were committed after it.
struct Product {
  std::function<void()> finish;
  const float* results;
  int commits_since;
};

struct Fiber {
  jmp_buf resume_point;
  State state;
  bool started;
  unsigned thread, lane, warp;
  unsigned mask;             // of the warp barrier it waits at
  bool orders_memory;        // that barrier is a __syncwarp
  unsigned exchange_parity;  // which of the two exchange buffers its next shuffle uses
  int line;                  // of the block barrier it waits at
  size_t arrays;             // shared arrays it has asked for so far
  size_t shared_offset;
  std::vector<PendingCopy> copies;
  std::vector<Product> products;
  std::map<float*, std::vector<float>> accumulators;  // what the products under way add to
  bool registers_fenced;
  std::vector<std::pair<size_t, size_t>> unfenced;  // array and element written and not yet made visible to products
};

// What is known about one element of shared memory: who wrote and read it last, and in which epoch. Two accesses are ordered
// when a __syncthreads (epoch) or, within a warp, a __syncwarp (warp epoch) lies between them.
struct Shadow {
  static constexpr int kNobody = -1, kManyWarps = -2, kOneWarp = -3;  // kOneWarp - w: several threads of warp w
  int writer = kNobody, reader = kNobody;
  unsigned write_epoch = 0, write_warp_epoch = 0, read_epoch = 0, read_warp_epoch = 0;
  bool copy_pending = false, visible_to_products = false;
};

struct ArrayRecord {
  size_t offset, count, element_bytes;
  std::vector<Shadow> shadow;
};

struct Slot {
  alignas(16) unsigned char bytes[32];
};

// Where the threads that run on a stack begin, one after another: a jump there spares each the system calls of a new context.
struct Entry {
  jmp_buf point;
  bool there = false;
};

struct Block {
  const char* kernel = "";
  std::vector<Fiber> fibers;
  std::vector<Slot> exchange;  // [parity][thread]
  std::vector<ArrayRecord> arrays;
  std::vector<unsigned> warp_epochs;
  unsigned epoch = 0;
  std::vector<Slot> shared;
  size_t shared_bytes = 0;
  unsigned char* stacks = nullptr;
  size_t stack_count = 0;
  std::vector<Entry> entries;  // of each stack
  jmp_buf scheduler;
  Fiber* current = nullptr;
  const std::function<void()>* body = nullptr;
  std::string failure;
};

inline Block& block() {
  static Block value;
  return value;
}

inline std::string place() {
  std::string text = std::string(" in kernel ") + block().kernel + ", block " + std::to_string(blockIdx.x);
  if (block().current) text += ", thread " + std::to_string(block().current->thread);
  return text;
}

// Ends the launch. The calling fiber is left where it is and never resumed; the launcher throws.
[[noreturn]] inline void fail(const std::string& what) {
  Block& b = block();
  const std::string message = "cusim: " + what + place();
  if (!b.current) throw std::runtime_error(message);
  b.failure = message;
  _longjmp(b.scheduler, 1);
}

inline void wait(State state) {
  Block& b = block();
  Fiber* const self = b.current;
  self->state = state;
  if (!_setjmp(self->resume_point)) _longjmp(b.scheduler, 1);
}

// Is never left: whoever comes to run on this stack begins at the stack's entry.
inline void fiber_main() {
  Block& b = block();
  Entry& entry = b.entries[b.current->thread];
  entry.there = true;
  _setjmp(entry.point);
  (*b.body)();
  b.current->state = State::exited;
  _longjmp(b.scheduler, 1);
}

inline void resume(Fiber& fiber) {
  Block& b = block();
  b.current = &fiber;
  threadIdx = {fiber.thread, 0, 0};
  if (_setjmp(b.scheduler)) return;
  if (fiber.started) _longjmp(fiber.resume_point, 1);
  fiber.started = true;
  if (b.entries[fiber.thread].there) _longjmp(b.entries[fiber.thread].point, 1);
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = b.stacks + fiber.thread * kStackBytes;
  start.uc_stack.ss_size = kStackBytes;
  start.uc_link = nullptr;
  makecontext(&start, fiber_main, 0);
  setcontext(&start);
}

inline void prepare_block(unsigned threads, size_t shared_bytes) {
  Block& b = block();
  if (b.stack_count < threads) {
    if (b.stacks) munmap(b.stacks, b.stack_count * kStackBytes);
    void* const stacks =
        mmap(nullptr, threads * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) throw std::runtime_error("cusim: no memory for fiber stacks");
    b.stacks = static_cast<unsigned char*>(stacks);
    b.stack_count = threads;
    b.entries.assign(threads, {});
  }
  b.fibers.resize(threads);
  b.exchange.resize(2 * threads);
  b.warp_epochs.assign((threads + kWarp - 1) / kWarp, 0);
  b.epoch = 1;
  b.arrays.clear();
  b.shared_bytes = shared_bytes;
  b.shared.resize(shared_bytes / sizeof(Slot) + 1);
  poison(b.shared.data(), b.shared.size() * sizeof(Slot));
  b.failure.clear();
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& f = b.fibers[i];
    f.state = State::ready;
    f.started = false;
    f.thread = i;
    f.lane = i % kWarp;
    f.warp = i / kWarp;
    f.exchange_parity = 0;
    f.arrays = 0;
    f.shared_offset = 0;
    f.copies.clear();
    f.products.clear();
    f.unfenced.clear();
    f.accumulators.clear();
    f.registers_fenced = false;
  }
}

// Lets every warp barrier go whose mask is complete; true if there was one.
inline bool release_warps() {
  Block& b = block();
  bool released = false;
  for (size_t first = 0; first < b.fibers.size(); first += kWarp) {
    const size_t lanes = std::min<size_t>(kWarp, b.fibers.size() - first);
    for (size_t i = 0; i < lanes; ++i) {
      const Fiber& waiting = b.fibers[first + i];
      if (waiting.state != State::at_warp_barrier) continue;
      const unsigned mask = waiting.mask;
      bool complete = true;
      for (size_t j = 0; j < kWarp; ++j) {
        if (!((mask >> j) & 1)) continue;
        if (j >= lanes || b.fibers[first + j].state == State::exited) {
          b.current = const_cast<Fiber*>(&waiting);
          const std::string message = "cusim: the mask of a warp operation names lane " + std::to_string(j) +
                                      ", which has exited or does not exist," + place();
          b.current = nullptr;
          throw std::runtime_error(message);
        }
        complete = complete && b.fibers[first + j].state == State::at_warp_barrier && b.fibers[first + j].mask == mask;
      }
      if (!complete) continue;
      released = true;
      if (waiting.orders_memory && mask == ~0u) ++b.warp_epochs[waiting.warp];
      for (size_t j = 0; j < lanes; ++j) {
        if ((mask >> j) & 1) b.fibers[first + j].state = State::ready;
      }
    }
  }
  return released;
}

// Lets the block barrier go if every thread waits there; true if it did.
inline bool release_block() {
  Block& b = block();
  size_t waiting = 0, exited = 0;
  int line = -1;
  bool same_line = true;
  for (const Fiber& f : b.fibers) {
    exited += f.state == State::exited;
    if (f.state != State::at_block_barrier) continue;
    ++waiting;
    same_line = same_line && (line < 0 || f.line == line);
    line = f.line;
  }
  if (waiting == 0 || waiting + exited < b.fibers.size()) return false;
  if (exited)
    fail("divergent __syncthreads: " + std::to_string(exited) + " threads have exited, the others wait at line " +
         std::to_string(line));
  if (!same_line) fail("divergent __syncthreads: threads wait at different lines");
  ++b.epoch;
  for (Fiber& f : b.fibers) f.state = State::ready;
  return true;
}

inline void run_block(const std::function<void()>& body, unsigned threads, size_t shared_bytes) {
  Block& b = block();
  prepare_block(threads, shared_bytes);
  b.body = &body;
  std::vector<unsigned> order;
  arrange(order, threads, schedule().threads);
  for (;;) {
    if (schedule().threads == Order::random) arrange(order, threads, Order::random);
    bool ran = false;
    size_t exited = 0;
    for (const unsigned i : order) {
      if (b.fibers[i].state == State::ready) {
        resume(b.fibers[i]);
        b.current = nullptr;
        if (!b.failure.empty()) throw std::runtime_error(b.failure);
        ran = true;
      }
      exited += b.fibers[i].state == State::exited;
    }
    if (exited == threads) return;
    const bool released_warps = release_warps();
    const bool released_block = release_block();
    if (!ran && !released_warps && !released_block) {
      fail("deadlock: threads wait at a __syncthreads or a warp operation that the others never reach");
    }
  }
}

template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), unsigned blocks, unsigned threads, size_t shared_bytes, A... arguments) {
  static std::mutex one_launch;
  const std::lock_guard<std::mutex> lock(one_launch);
  if (threads == 0 || threads > 1024) throw std::runtime_error(std::string("cusim: bad block size for ") + name);
  if (shared_bytes > (227u << 10)) throw std::runtime_error(std::string("cusim: too much shared memory for ") + name);
  launches().emplace(reinterpret_cast<const void*>(kernel), threads, shared_bytes);
  ++counts().launches, counts().blocks += blocks;
  if (!schedule().runs) return;
  Block& b = block();
  b.kernel = name;
  b.current = nullptr;
  blockDim = {threads, 1, 1};
  gridDim = {blocks, 1, 1};
  const std::function<void()> body = [=] { kernel(static_cast<P>(arguments)...); };
  std::vector<unsigned> order;
  arrange(order, blocks, schedule().blocks);
  for (const unsigned i : order) {
    blockIdx = {i, 0, 0};
    run_block(body, threads, shared_bytes);
  }
}

}  // namespace cusim

#define __syncthreads() (::cusim::block().current->line = __LINE__, ::cusim::wait(::cusim::State::at_block_barrier))

// Dynamic shared memory as arrays that check every access, and asynchronous copies into them.
#pragma once

#include "block.h"

namespace cusim {

inline std::string other_name(int other) {
  return other >= 0 ? "thread " + std::to_string(other) : std::string("several threads");
}

inline void no_race(const Shadow& s, bool writing, const char* what) {
  const Block& b = block();
  const int self = static_cast<int>(b.current->thread), warp = static_cast<int>(b.current->warp);
  const unsigned warp_epoch = b.warp_epochs[warp];
  const auto clash = [&](const char* kind, int other) {
    fail(std::string("race on shared memory: ") + what + " after a " + kind + " by " + other_name(other) +
         " with no barrier between,");
  };
  if (s.writer >= 0 && s.writer != self && s.write_epoch == b.epoch) {
    const bool ordered = s.writer / int(kWarp) == warp && s.write_warp_epoch < warp_epoch;
    if (!ordered) clash("write", s.writer);
  }
  if (writing && s.reader != Shadow::kNobody && s.reader != self && s.read_epoch == b.epoch) {
    const int reader_warp = s.reader >= 0                  ? s.reader / int(kWarp)
                            : s.reader <= Shadow::kOneWarp ? Shadow::kOneWarp - s.reader
                                                           : Shadow::kNobody;
    if (reader_warp != warp || s.read_warp_epoch >= warp_epoch) clash("read", s.reader);
  }
}

template <class T>
class SharedArray {
 public:
  SharedArray(T* data, size_t record, int offset) : data_(data), record_(record), offset_(offset) {}

  SharedArray operator+(int distance) const { return {data_, record_, offset_ + distance}; }

  class Reference {
   public:
    Reference(const SharedArray& array, int index) : array_(array), index_(index) {}
    operator T() const { return array_.read(index_); }
    Reference& operator=(T value) {
      array_.write(index_, value);
      return *this;
    }
    Reference& operator=(const Reference& other) { return *this = static_cast<T>(other); }
    Reference& operator+=(T value) { return *this = array_.read(index_) + value; }

   private:
    const SharedArray& array_;
    int index_;
  };

  Reference operator[](int index) const { return Reference(*this, index); }

  T read(int index) const {
    Shadow& s = shadow(index);
    const Block& b = block();
    if (s.copy_pending) fail("read of an asynchronous copy that was not waited for: " + name(index));
    if (s.writer == Shadow::kNobody) fail("read of shared memory that nobody wrote: " + name(index));
    no_race(s, false, "read");
    const int self = static_cast<int>(b.current->thread), warp = static_cast<int>(b.current->warp);
    if (s.read_epoch != b.epoch || s.reader == Shadow::kNobody) {
      s.reader = self;
    } else if (s.reader != self) {
      const int reader_warp = s.reader >= 0 ? s.reader / int(kWarp) : Shadow::kOneWarp - s.reader;
      s.reader = s.reader != Shadow::kManyWarps && reader_warp == warp ? Shadow::kOneWarp - warp : Shadow::kManyWarps;
    }
    s.read_epoch = b.epoch;
    s.read_warp_epoch = b.warp_epochs[warp];
    return data_[offset_ + index];
  }

  void write(int index, T value) const {
    Shadow& s = claim(index, "write");
    s.copy_pending = false;
    data_[offset_ + index] = value;
  }

  void start_copy(int index, const T* from, bool valid) const {
    claim(index, "asynchronous copy").copy_pending = true;
    block().current->copies.push_back({finish_copy, data_, record_, offset_ + index, valid ? from : nullptr, 0});
  }

  // Array and element, of those of the block.
  std::pair<size_t, size_t> place_of(int index) const { return {record_, static_cast<size_t>(offset_ + index)}; }

  void check_aligned() const {
    if (reinterpret_cast<uintptr_t>(data_ + offset_) % 16) fail("misaligned vector read: " + name(0));
  }

 private:
  static void finish_copy(const PendingCopy& copy) {
    const SharedArray to(static_cast<T*>(copy.data), copy.record, copy.place);
    to.data_[copy.place] = copy.from ? *static_cast<const T*>(copy.from) : T(0);
    to.claim(0, "arrival of an asynchronous copy").copy_pending = false;
  }

  std::string name(int index) const {
    return "array " + std::to_string(record_) + ", element " + std::to_string(offset_ + index) + " of " +
           std::to_string(block().arrays[record_].count) + ",";
  }

  Shadow& shadow(int index) const {
    ArrayRecord& record = block().arrays[record_];
    const int64_t at = int64_t(offset_) + index;
    if (at < 0 || at >= int64_t(record.count)) fail("shared memory accessed out of bounds: " + name(index));
    return record.shadow[at];
  }

  // Records a write by the current thread.
  Shadow& claim(int index, const char* what) const {
    Shadow& s = shadow(index);
    const Block& b = block();
    no_race(s, true, what);
    s.writer = static_cast<int>(b.current->thread);
    s.write_epoch = b.epoch;
    s.write_warp_epoch = b.warp_epochs[b.current->warp];
    s.visible_to_products = false;
    return s;
  }

  T* data_;
  size_t record_;
  int offset_;
};

// Hands out the block's arrays; every thread must ask for the same ones in the same order, within what the launch granted.
class SharedMemory {
 public:
  template <class T>
  SharedArray<T> array(int count) {
    Block& b = block();
    Fiber& self = *b.current;
    const size_t record = self.arrays++, offset = self.shared_offset;
    self.shared_offset += (count * sizeof(T) + 15) / 16 * 16;
    if (self.shared_offset > b.shared_bytes) {
      fail("shared arrays need " + std::to_string(self.shared_offset) + " bytes, the launch grants " +
           std::to_string(b.shared_bytes));
    }
    if (record == b.arrays.size()) {
      b.arrays.push_back({offset, static_cast<size_t>(count), sizeof(T), std::vector<Shadow>(count)});
    }
    const ArrayRecord& known = b.arrays[record];
    if (known.offset != offset || known.count != static_cast<size_t>(count) || known.element_bytes != sizeof(T)) {
      fail("threads disagree about shared array " + std::to_string(record));
    }
    return {reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(b.shared.data()) + offset), record, 0};
  }
};

template <int N, class T>
void load_vector(T (&out)[N], SharedArray<T> from) {
  from.check_aligned();
  for (int i = 0; i < N; ++i) out[i] = from[i];
}

// From global memory.
template <int N, class T>
void load_vector(T (&out)[N], const T* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16) fail("misaligned vector read of global memory");
  for (int i = 0; i < N; ++i) out[i] = from[i];
}

// To global memory.
template <int N, class T>
void store_vector(T* to, const T (&values)[N]) {
  static_assert(N * sizeof(T) == 16, "a vector is 16 bytes");
  if (reinterpret_cast<uintptr_t>(to) % 16) fail("misaligned vector write of global memory");
  for (int i = 0; i < N; ++i) to[i] = values[i];
}

inline void store_pair(float* to, float first, float second) {
  if (reinterpret_cast<uintptr_t>(to) % 8) fail("misaligned write of a pair to global memory");
  to[0] = first, to[1] = second;
}

template <class T>
void copy_async(SharedArray<T> to, const T* from, bool valid) {
  to.start_copy(0, from, valid);
}

// Four neighbouring elements at once.
template <class T>
void copy_async_vector(SharedArray<T> to, const T* from, bool valid) {
  static_assert(sizeof(T) == 4, "a vector is 16 bytes");
  to.check_aligned();
  if (valid && reinterpret_cast<uintptr_t>(from) % 16) fail("misaligned asynchronous vector copy");
  for (int i = 0; i < 4; ++i) to.start_copy(i, from + i, valid);
}

inline void copy_async_commit() {
  for (PendingCopy& copy : block().current->copies) ++copy.commits_since;
}

template <int Pending>
void copy_async_wait() {
  std::vector<PendingCopy>& copies = block().current->copies;
  size_t left = 0;
  for (const PendingCopy& copy : copies) {
    if (copy.commits_since > Pending) {
      copy.finish(copy);
    } else {
      copies[left++] = copy;
    }
  }
  copies.erase(copies.begin() + left, copies.end());
}

}  // namespace cusim

// Small blocks of a Kronecker factor: their rows are not packed.
#pragma once

#include <algorithm>

#include "cpu/buffer.h"
#include "cpu/gram.h"
#include "cpu/simd/kernels.h"
#include "kron/cpu/widen.h"

namespace ella {

// Rows are summed by kSum, those sums until they are of kSums rows, and these join the factor: short sums, to bound rounding. A
// wider factor adds them up without any: as few then as are worth the way through the factor.
constexpr int64_t kSum = 64;
template <class T, class Total>
constexpr int64_t kSums = (sizeof(Total) > sizeof(T) ? 4 : 64) * kSum;

// factor[g] += alpha sum_n rows[n, g] rows[n, g]^T, N rows of G blocks of d elements of type S
template <class S, class Total>
struct KronRows {
  const S* data;
  int64_t N, G, d, row, block, value;  // sizes and strides
  Total* factor;
  double alpha;
};

// A block whose elements lie side by side is read where it lies, any other is gathered, as is one at the end of a row that a
// whole vector would reach beyond. Blocks no longer than a vector share one where they lie side by side too, and so they are
// gathered. So are elements of 16 bits, which are widened on the way.
template <class S, class Total>
class SmallBlocks {
  using T = Widened<S>;

 public:
  // The largest block for which this is as fast as packed panels. Vectors of 16 bytes make too few multiply-adds a load.
  static int64_t largest() { return kernels<T>().vector * static_cast<int64_t>(sizeof(T)) >= 32 ? 256 : 40; }

  explicit SmallBlocks(const KronRows<S, Total>& rows)
      : r_(rows),
        k_(kernels<T>()),
        lanes_(ceil_divide(r_.d, k_.vector) * k_.vector),
        turned_(r_.d <= k_.vector),
        gathered_(kIsWidened<S> || (r_.value != 1 && r_.d > 1)),
        group_(turned_ && (gathered_ || r_.block == r_.d) ? k_.vector / r_.d : 1),
        group_sums_((turned_ ? r_.d / 2 + 1 : r_.d) * lanes_) {}

  void add() const {
    parallel_tasks(r_.G, [&](int64_t begin, int64_t end) { add(begin, end); });
  }

 private:
  // Elements of a row whose sums are held at once: in float they are 512 KiB at most, and stay in the second-level cache.
  static constexpr int64_t kAtOnce = 512;
  static constexpr int64_t kLong = kSums<T, Total>;

  void add(int64_t begin, int64_t end) const {
    const int64_t L = k_.vector, d = r_.d, max_count = std::max(kAtOnce / d / group_, int64_t(1)) * group_;
    const int64_t blocks = std::min(end - begin, max_count), sums_size = ceil_divide(blocks, group_) * group_sums_;
    // Rows that are read again and again lie an odd number of vectors apart: a power of two, which their own distance often
    // contains, would leave them a few lines of the first-level cache.
    const int64_t copy_row = (lanes_ / L | 1) * L;
    const Buffer<T> sums(sums_size), copy(kSum * copy_row);
    for (int64_t g0 = begin; g0 < end; g0 += blocks) {
      const int64_t here = std::min(blocks, end - g0), direct = in_place(g0, here), rest = here - direct;
      const int64_t room_row = (ceil_divide(rest * d + lanes_, L) | 1) * L;
      const Buffer<T> room(rest > 0 ? kSum * room_row : 0);
      if (rest > 0) room.zero(0, kSum * room_row);  // also the lanes beyond blocks, whose products no one reads
      for (int64_t n0 = 0; n0 < r_.N; n0 += kSum) {
        const int64_t count = std::min(kSum, r_.N - n0);
        const S* source = r_.data + n0 * r_.row + g0 * r_.block;
        if (n0 % kLong == 0) sums.zero(0, sums_size);
        if constexpr (!kIsWidened<S>) {
          const T* after = n0 + 2 * kSum <= r_.N ? source + kSum * r_.row : source;
          products(direct, count, source, r_.row, r_.block, after, copy.data(), copy_row, sums.data());
        }
        if (rest > 0) {
          gather(rest, count, source + direct * r_.block, room.data(), room_row);
          products(rest, count, room.data(), room_row, d, nullptr, nullptr, 0, sums.data() + direct / group_ * group_sums_);
        }
        if ((n0 + count) % kLong == 0 || n0 + count == r_.N) add_sums(g0, here, sums.data());
      }
    }
  }

  // How many of the blocks from g0 on can be read where they lie, in whole groups: nothing beyond a row's last element may be
  // read, which may be the last of the memory.
  int64_t in_place(int64_t g0, int64_t blocks) const {
    if (gathered_) return 0;
    const int64_t extent = (r_.G - 1) * r_.block + r_.d;
    int64_t count = blocks / group_ * group_;
    while (count > 0 && (g0 + count - group_) * r_.block + lanes_ > extent) count -= group_;
    return count;
  }

  void gather(int64_t blocks, int64_t count, const S* source, T* target, int64_t target_row) const {
    const int64_t d = r_.d;
    if (r_.row == 1 && r_.value != 1) {
      for (int64_t g = 0; g < blocks; ++g) {
        transpose_as(k_, d, count, source + g * r_.block, r_.value, target + g * d, target_row);
      }
      return;
    }
    for (int64_t n = 0; n < count; ++n, source += r_.row, target += target_row) {
      if (r_.value == 1 && r_.block == d) {
        copy_as(source, blocks * d, target);
      } else if (r_.value == 1) {
        for (int64_t g = 0; g < blocks; ++g) copy_as(source + g * r_.block, d, target + g * d);
      } else if (r_.block == 1) {
        transpose_as(k_, d, blocks, source, r_.value, target, d);
      } else {
        for (int64_t g = 0; g < blocks; ++g) {
          for (int64_t i = 0; i < d; ++i) target[g * d + i] = widened(source[g * r_.block + i * r_.value]);
        }
      }
    }
  }

  void products(int64_t blocks, int64_t count, const T* x, int64_t x_row, int64_t x_block, const T* after, T* copy,
                int64_t copy_row, T* sums) const {
    if (turned_ && x_block == r_.d && group_ == k_.vector / r_.d) {  // side by side as the kernel wants them
      k_.block_products(r_.d, ceil_divide(blocks, group_), count, x, x_row, sums);
      return;
    }
    for (int64_t g = 0; g < blocks; ++g, sums += group_sums_) {
      const T* own = x + g * x_block;
      if (turned_) {
        k_.block_products(r_.d, 1, count, own, x_row, sums);
      } else {
        const T* next = g + 1 < blocks ? own + x_block : after;
        k_.self_products(r_.d, count, own, x_row, next, copy, copy_row, sums, lanes_);
      }
    }
  }

  void add_sums(int64_t g0, int64_t blocks, const T* sums) const {
    const int64_t d = r_.d;
    for (int64_t g = 0; g < blocks; ++g) {
      const T* own = sums + g / group_ * group_sums_;
      Total* target = r_.factor + (g0 + g) * d * d;
      if (turned_) {
        add_turned(own + g % group_ * d, target);
      } else {
        adders<T, Total>().mirrored(d, static_cast<Total>(r_.alpha), own, lanes_, target, d);
      }
    }
  }

  // The product of elements i and j >= i is in the sums for rotations by j - i in lane i, or by d - (j - i) in lane j.
  void add_turned(const T* sums, Total* target) const {
    const int64_t d = r_.d;
    const Total alpha = static_cast<Total>(r_.alpha);
    for (int64_t i = 0; i < d; ++i) target[i * d + i] += alpha * sums[i];
    for (int64_t rotation = 1; 2 * rotation <= d; ++rotation) {
      const T* sum = sums + rotation * lanes_;
      const int64_t count = 2 * rotation == d ? rotation : d;  // half of d leads to every pair twice
      for (int64_t i = 0; i < count; ++i) {
        const int64_t j = i + rotation < d ? i + rotation : i + rotation - d;
        const Total part = alpha * sum[i];
        target[i * d + j] += part;
        target[j * d + i] += part;
      }
    }
  }

  const KronRows<S, Total> r_;
  const Kernels<T>& k_;
  const int64_t lanes_;
  const bool turned_, gathered_;
  const int64_t group_, group_sums_;
};

}  // namespace ella

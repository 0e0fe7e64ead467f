// target += alpha sum_k row_k row_k^T for rows that are packed block by block: the core of both factor ops. Only the upper
// triangle is computed; every tile of the sum is added to the target and, transposed, to its mirror image.
#pragma once

#include <algorithm>

#include "buffer.h"
#include "kernels.h"

namespace ella {

// torch's parallel_for costs about as much as a small block here, even where there is nothing to share out.
template <class F>
void parallel_tasks(int64_t tasks, const F& f) {
  if (tasks == 1) {
    f(0, 1);
  } else {
    torch::stable::parallel_for(0, tasks, 1, f);
  }
}

template <class T>
class Gram {
 public:
  Gram(const Tensor& like, int64_t d, int64_t count)
      : like_(like),
        k_(kernels<T>()),
        d_(d),
        panels_(ceil_divide(d, k_.width)),
        block_(std::min(count,
                        std::max(kBlockBytes / static_cast<int64_t>(sizeof(T)) / (panels_ * k_.width) / kSum * kSum, kSum))),
        packed_(like, panels_ * k_.width * block_),
        single_(like, panels_ == 1 ? 2 * k_.width * k_.width : 0) {}

  // `pack(first, n, k0, count, panel)` writes columns first..first+n of rows k0..k0+count. Called from several threads.
  template <class Pack>
  void accumulate(T* target, int64_t count, T alpha, const Pack& pack) const {
    const int64_t W = k_.width, pairs = panels_ * (panels_ + 1) / 2;
    for (int64_t k0 = 0; k0 < count; k0 += block_) {
      const int64_t rows = std::min(block_, count - k0);
      parallel_tasks(panels_, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) pack(p * W, columns(p), k0, rows, panel(p));
      });
      parallel_tasks(pairs, [&](int64_t begin, int64_t end) {
        const Buffer<T> own(like_, panels_ == 1 ? 0 : 2 * W * W);
        T* sum = panels_ == 1 ? single_.data() : own.data();
        for (int64_t pair = begin; pair < end; ++pair) {
          int64_t right = 0, before = 0;  // pairs are counted column by column: (0,0), (0,1), (1,1), (0,2), ...
          while (before + right + 1 <= pair) before += ++right;
          tile(pair - before, right, rows, sum);
          add(pair - before, right, alpha, sum, sum + W * W, target);
        }
      });
    }
  }

 private:
  // Rows packed at once: every block reads and writes the whole target, 2 d^2 numbers, against d^2 multiply-adds a row.
  static constexpr int64_t kBlockBytes = 8 * 1024 * 1024;
  static constexpr int64_t kSum = 256;  // rows that one pass over a tile adds

  int64_t columns(int64_t panel) const { return std::min(k_.width, d_ - panel * k_.width); }
  T* panel(int64_t p) const { return packed_.data() + p * k_.width * block_; }

  // sum[i, j], i of panel `left`, j of panel `right`, for i <= j.
  void tile(int64_t left, int64_t right, int64_t rows, T* sum) const {
    const int64_t W = k_.width, m = columns(left), n = columns(right);
    for (int64_t k0 = 0; k0 < rows; k0 += kSum) {
      const int64_t count = std::min(kSum, rows - k0);
      const T *a = panel(left) + k0 * W, *b = panel(right) + k0 * W;
      if (left != right) {
        k_.product(m, n, count, a, 1, W, b, W, nullptr, 0, 0, sum, W, k0 > 0, false);
        continue;
      }
      for (int64_t i = 0; i < m; i += k_.rows) {  // vectors left of the diagonal are skipped
        const int64_t first = i / k_.vector * k_.vector;
        k_.product(std::min(k_.rows, m - i), n - first, count, a + i, 1, W, b + first, W, nullptr, 0, 0, sum + i * W + first, W,
                   k0 > 0, false);
      }
    }
  }

  void add(int64_t left, int64_t right, T alpha, const T* sum, T* mirror, T* target) const {
    const int64_t W = k_.width, m = columns(left), n = columns(right);
    T* upper = target + left * W * d_ + right * W;
    T* lower = target + right * W * d_ + left * W;
    k_.unpack(n, m, sum, mirror, W);  // mirror[j, i] = sum[i, j]
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = left == right ? i : 0; j < n; ++j) upper[i * d_ + j] += alpha * sum[i * W + j];
    }
    for (int64_t j = 0; j < n; ++j) {
      const int64_t end = left == right ? j : m;
      for (int64_t i = 0; i < end; ++i) lower[j * d_ + i] += alpha * mirror[j * W + i];
    }
  }

  const Tensor& like_;
  const Kernels<T>& k_;
  const int64_t d_, panels_, block_;
  const Buffer<T> packed_;
  const Buffer<T> single_;  // of the only tile there is: many small factors are not worth an allocation each
};

}  // namespace ella

// target += alpha sum_k row_k row_k^T for rows that are packed block by block: the core of both factor ops. Only the upper
// triangle is computed; the sum is mirrored when it is added.
#pragma once

#include <algorithm>

#include "buffer.h"
#include "kernels.h"

namespace ella {

template <class T>
class Gram {
 public:
  Gram(const Tensor& like, int64_t d)
      : k_(kernels<T>()),
        d_(d),
        panels_(ceil_divide(d, k_.width)),
        padded_(panels_ * k_.width),
        packed_(like, padded_ * kBlock),
        sum_(like, padded_ * padded_) {}

  // Rows packed at once; the partial sums of blocks are added in their order.
  static constexpr int64_t kBlock = 256;

  // `pack(panel, first, n, k0, count, target)` writes lanes first..first+n of rows k0..k0+count. Called from several threads.
  template <class Pack>
  void accumulate(T* target, int64_t count, T alpha, const Pack& pack) const {
    if (count == 0) return;
    const int64_t W = k_.width, size = W * kBlock;
    const int64_t pairs = panels_ * (panels_ + 1) / 2;
    for (int64_t k0 = 0; k0 < count; k0 += kBlock) {
      const int64_t rows = std::min(kBlock, count - k0);
      torch::stable::parallel_for(0, panels_, 1, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) pack(p * W, std::min(W, d_ - p * W), k0, rows, packed_.data() + p * size);
      });
      torch::stable::parallel_for(0, pairs, 1, [&](int64_t begin, int64_t end) {
        for (int64_t pair = begin; pair < end; ++pair) {
          // pairs are counted column by column: (0,0), (0,1), (1,1), (0,2), ...
          int64_t column = 0, before = 0;
          while (before + column + 1 <= pair) before += ++column;
          multiply(pair - before, column, rows, k0 > 0);
        }
      });
    }
    add(target, alpha);
  }

 private:
  void multiply(int64_t row, int64_t column, int64_t rows, bool add) const {
    const int64_t W = k_.width, size = W * kBlock;
    const T *a = packed_.data() + row * size, *b = packed_.data() + column * size;
    const int64_t m = std::min(W, d_ - row * W), n = std::min(W, d_ - column * W);
    T* c = sum_.data() + row * W * padded_ + column * W;
    if (row != column) {
      k_.product(m, n, rows, a, 1, W, b, W, nullptr, 0, c, padded_, add, false);
      return;
    }
    for (int64_t i = 0; i < m; i += k_.rows) {  // vectors left of the diagonal are skipped
      const int64_t first = i / k_.vector * k_.vector;
      k_.product(std::min(k_.rows, m - i), n - first, rows, a + i, 1, W, b + first, W, nullptr, 0, c + i * padded_ + first,
                 padded_, add, false);
    }
  }

  void add(T* target, T alpha) const {
    constexpr int64_t kSquare = 32;
    torch::stable::parallel_for(0, ceil_divide(d_, kSquare), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i0 = begin * kSquare; i0 < std::min(end * kSquare, d_); i0 += kSquare) {
        const int64_t i1 = std::min(i0 + kSquare, d_);
        for (int64_t j0 = i0; j0 < d_; j0 += kSquare) {
          const int64_t j1 = std::min(j0 + kSquare, d_);
          for (int64_t i = i0; i < i1; ++i) {
            const T* sum = sum_.data() + i * padded_;
            for (int64_t j = std::max(i, j0); j < j1; ++j) target[i * d_ + j] += alpha * sum[j];
          }
          for (int64_t j = j0; j < j1; ++j) {
            for (int64_t i = i0; i < std::min(i1, j); ++i) target[j * d_ + i] += alpha * sum_.data()[i * padded_ + j];
          }
        }
      }
    });
  }

  const Kernels<T>& k_;
  const int64_t d_, panels_, padded_;
  const Buffer<T> packed_, sum_;
};

}  // namespace ella

// The lags of images so small that the kernel meets every pair of their positions: sums of the products of two positions,
//   sum_n x[n, c, q] x[n, c', q'],
// which are no more than what the lags themselves take, and end in no sum across a vector. There is one for each pair of
// positions that lies at the lag.
#pragma once

#include <algorithm>
#include <vector>

#include "conv/cpu/circular_images.h"
#include "cpu/gram.h"

namespace ella {

template <class T>
class SmallImages {
 public:
  // Images (N, C, H, W), of which the last three lie as one row.
  SmallImages(const Images<T>& x, int64_t N, int64_t C, int64_t H, int64_t W) : x_(x), N_(N), C_(C), H_(H), W_(W), P_(H * W) {
    for (int64_t w = 0; w < W; ++w) {
      for (int64_t p = 0; p < P_; ++p) lag_.push_back(p / W * W + (p % W - w + W) % W);
    }
  }

  // Whether lags of a kernel of lags (kernel_h, kernel_w) are wanted here, and images lie so.
  static bool suits(const Images<T>& x, int64_t H, int64_t W, int64_t kernel_h, int64_t kernel_w) {
    const bool all = kernel_h >= H && kernel_w >= W, whole = kernels<T>().width % (H * W) == 0;
    return all && whole && x.right == 1 && x.down == W && x.channel == H * W;
  }

  // lags()[(c * C + other) * P + h * W + w], c <= other, is what x[n, c, i, j] x[n, other, (i + h) mod H, (j + w) mod W] add up
  // to.
  Buffer<double> lags() const {
    Buffer<double> out(C_ * C_ * P_);
    torch::stable::parallel_for(0, C_, std::max(kWorth / (C_ * P_), int64_t(1)),
                                [&](int64_t begin, int64_t end) { out.zero(begin * C_ * P_, end * C_ * P_); });
    const Kernels<T>& k = kernels<T>();
    const Gram<T> gram(C_ * P_, N_);
    gram.template for_sums<double>(
        1, N_,
        [&](int64_t, int64_t first, int64_t n, int64_t k0, int64_t count, T* panel) {
          k.pack(n, count, x_.data + k0 * x_.image + first, 1, x_.image, panel);
        },
        [](int64_t, int64_t) {},
        [&](int64_t, int64_t begin, int64_t end, const auto* sums) {
          for (int64_t tile = begin; tile < end; ++tile, sums += gram.tiles().tile_size()) {
            const auto [row, column] = gram.tiles().corner(tile);
            fold(row / P_, column / P_, k.width, sums, out.data());
          }
        });
    return out;
  }

  // Where among a pair's are those of (i - half_h, j - half_w), i <= 2 half_h, j <= 2 half_w.
  std::vector<int64_t> places(int64_t half_h, int64_t half_w) const {
    const auto wrapped = [](int64_t at, int64_t size) { return (at % size + size) % size; };
    std::vector<int64_t> out;
    for (int64_t i = -half_h; i <= half_h; ++i) {
      for (int64_t j = -half_w; j <= half_w; ++j) out.push_back(wrapped(i, H_) * W_ + wrapped(j, W_));
    }
    return out;
  }

 private:
  static constexpr int64_t kWorth = 1 << 16;  // elements, some microseconds

  // Adds what a tile of `width` rows has to the lags of its pairs of channels.
  template <class Sum>
  void fold(int64_t first, int64_t second, int64_t width, const Sum* sums, double* lags) const {
    const int64_t channels = width / P_;
    std::vector<Sum> turned(W_ * P_), square(P_ * P_);
    for (int64_t c = first; c < std::min(first + channels, C_); ++c) {
      for (int64_t other = std::max(second, c); other < std::min(second + channels, C_); ++other) {
        const Sum* pair = sums + (c - first) * P_ * width + (other - second) * P_;
        double* to = lags + (c * C_ + other) * P_;
        if (c == other) {  // the products of two positions are there once, above the diagonal
          for (int64_t q = 0; q < P_; ++q) {
            for (int64_t p = 0; p < P_; ++p) square[q * P_ + p] = pair[std::min(q, p) * width + std::max(q, p)];
          }
          fold_pair(square.data(), P_, turned.data(), to);
        } else {
          fold_pair(pair, width, turned.data(), to);
        }
      }
    }
  }

  // Rows of positions (h, w) are turned by h lines, which keeps them whole, and added up by w; the columns' turn is for the
  // sums.
  template <class Sum>
  void fold_pair(const Sum* pair, int64_t row, Sum* turned, double* lags) const {
    std::fill_n(turned, W_ * P_, Sum(0));
    for (int64_t q = 0; q < P_; ++q, pair += row) {
      Sum* to = turned + q % W_ * P_;
      const int64_t before = q / W_ * W_, after = P_ - before;
      for (int64_t p = 0; p < after; ++p) to[p] += pair[before + p];
      for (int64_t p = 0; p < before; ++p) to[after + p] += pair[p];
    }
    for (int64_t i = 0; i < W_ * P_; ++i) lags[lag_[i]] += turned[i];
  }

  const Images<T> x_;
  const int64_t N_, C_, H_, W_, P_;
  std::vector<int64_t> lag_;  // of an element of `turned`
};

}  // namespace ella

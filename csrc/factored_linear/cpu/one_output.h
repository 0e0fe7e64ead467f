// F-FC with one output position, where it is large: the weights multiplied out, V[d,c] U[d,c,x], are no larger than U, and one
// product with them takes fewer operations than the two with U and V. They are made block by block.
#pragma once

#include <algorithm>

#include "factored_linear/cpu/arguments.h"

namespace ella {

// x or weight_in with a row of all channels lying together: itself, or a copy.
inline Tensor rows_together(const FactoredLinearSizes& s, const Tensor& t) {
  const bool together = (s.X == 1 || t.stride(2) == 1) && (s.C == 1 || t.stride(1) == s.X);
  return together ? t : torch::stable::contiguous(t);
}

template <class T>
class OneOutput {
 public:
  OneOutput(const FactoredLinearSizes& s, const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
            const std::optional<Tensor>& bias_in)
      : k_(kernels<T>()),
        s_(s),
        columns_(s.C * s.X),
        x_rows_(rows_together(s, x)),
        u_rows_(rows_together(s, weight_in)),
        x_(x_rows_),
        u_(u_rows_),
        v_(weight_out),
        bias_in_(bias_in) {}

  // out (N, D, 1) is contiguous.
  void forward(const std::optional<Tensor>& bias_out, const Tensor& out) const {
    // Every task makes the weights of its output channels, and packs its images: few of either would be most of its work.
    // Output channels are shared out first, then images.
    const int64_t W = k_.width, tasks = 2 * torch::stable::get_num_threads(), max_groups = ceil_divide(s_.D, 2 * kRows);
    const int64_t at_once = W * std::clamp(ceil_divide(s_.N, W) / ceil_divide(tasks, max_groups), int64_t(1), kImageBlocks);
    const int64_t parts = ceil_divide(s_.N, at_once), groups = std::min(ceil_divide(tasks, parts), max_groups);
    const int64_t channels = std::clamp(kColumns / s_.X, int64_t(1), s_.C), panel = channels * s_.X * W;
    const Array1<T> last(bias_out);
    torch::stable::parallel_for(0, parts * groups, 1, [&](int64_t begin, int64_t end) {
      const int64_t max_count = ceil_divide(s_.D, groups), max_blocks = ceil_divide(std::min(at_once, s_.N), W);
      const Buffer<T> panels(max_blocks * panel), weights(kRows * channels * s_.X), shift(max_count),
          sums(max_blocks * max_count * W);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t n0 = task / groups * at_once, images = std::min(at_once, s_.N - n0), blocks = ceil_divide(images, W);
        const int64_t first = s_.D * (task % groups) / groups, rows = s_.D * (task % groups + 1) / groups - first;
        for (int64_t d = 0; d < rows; ++d) {
          const double inner = bias_in_.data ? sum_of_weights(first + d) * static_cast<double>(*bias_in_.from(first + d)) : 0.0;
          shift.data()[d] = static_cast<T>(inner + (last.data ? static_cast<double>(*last.data) : 0.0));
        }
        for (int64_t c0 = 0; c0 < s_.C; c0 += channels) {
          const int64_t here = std::min(channels, s_.C - c0), count = here * s_.X;
          for (int64_t b = 0; b < blocks; ++b) {
            k_.pack(std::min(W, images - b * W), count, x_.at(n0 + b * W, c0), x_.s0, 1, panels.data() + b * panel);
          }
          for (int64_t d = 0; d < rows; d += kRows) {
            const int64_t m = std::min(kRows, rows - d);
            k_.multiply_out(m, here, s_.X, u_.at(first + d, c0), u_.s0, v_.at(first + d, c0), v_.s0, v_.s1, weights.data(),
                            count);
            for (int64_t b = 0; b < blocks; ++b) {
              k_.product(m, std::min(W, images - b * W), count, weights.data(), count, 1, panels.data() + b * panel, W,
                         c0 == 0 ? shift.data() + d : nullptr, 1, 0, sums.data() + (b * max_count + d) * W, W, c0 > 0, false);
            }
          }
        }
        for (int64_t b = 0; b < blocks; ++b) {
          k_.unpack(std::min(W, images - b * W), rows, sums.data() + b * max_count * W,
                    out.mutable_data_ptr<T>() + (n0 + b * W) * s_.D + first, s_.D);
        }
      }
    });
  }

  // Gradients that are not wanted are empty tensors; the others contiguous.
  void backward(const FactoredLinearWanted& wanted, const Tensor& grad, const Tensor& dx, const Tensor& du, const Tensor& dv,
                const Tensor& dbias_in, const Tensor& dbias_out) const {
    const Array3<T> g(grad);
    const bool shifted = wanted.weight_out && bias_in_.data;
    const Buffer<double> sums(s_.D);            // over images
    const Buffer<T> shift(shifted ? s_.D : 0);  // of the gradient of weight_out, by bias_in
    if (wanted.bias_in || wanted.bias_out || shifted) {
      T* const inner = wanted.bias_in ? dbias_in.mutable_data_ptr<T>() : nullptr;
      torch::stable::parallel_for(0, s_.D, kRows, [&](int64_t begin, int64_t end) {
        sum_images(g, begin, end, sums.data());
        for (int64_t d = begin; d < end; ++d) {
          if (inner) inner[d] = static_cast<T>(sum_of_weights(d) * sums.data()[d]);
          if (shifted) shift.data()[d] = static_cast<T>(static_cast<double>(*bias_in_.from(d)) * sums.data()[d]);
        }
      });
    }
    if (wanted.bias_out) {
      double total = 0;
      for (int64_t d = 0; d < s_.D; ++d) total += sums.data()[d];
      *dbias_out.mutable_data_ptr<T>() = static_cast<T>(total);
    }
    if (!wanted.x && !wanted.weight_in && !wanted.weight_out) return;
    // Channels that fill a panel, or one of them whose panels come one after the other.
    const int64_t W = k_.width, channels = std::clamp(W / s_.X, int64_t(1), s_.C), groups = ceil_divide(s_.C, channels);
    torch::stable::parallel_for(0, kHalves * groups, 1, [&](int64_t begin, int64_t end) {
      const int64_t max_count = ceil_divide(s_.D, kHalves);
      const Buffer<T> panel(std::max(wanted.x ? s_.D : 0, kImages) * W), sum(max_count * W);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t half = task % kHalves, c0 = channels * (task / kHalves), here = std::min(channels, s_.C - c0);
        for (int64_t x0 = 0; x0 < s_.X; x0 += W) {
          const int64_t positions = std::min(W, s_.X - x0), lanes = here * positions;  // several channels, or some positions
          if (wanted.x) input_gradient(g, half, c0, here, x0, positions, lanes, panel.data(), dx);
          if (wanted.weight_in || wanted.weight_out) {
            const int64_t first = s_.D * half / kHalves, rows = s_.D * (half + 1) / kHalves - first;
            multiplied_gradient(g, first, rows, x_.at(0, c0) + x0, lanes, panel.data(), sum.data());
            k_.multiplied_gradients(rows, here, positions, sum.data(), W, u_.at(first, c0) + x0, u_.s0, v_.at(first, c0), v_.s0,
                                    v_.s1,
                                    wanted.weight_in ? du.mutable_data_ptr<T>() + (first * s_.C + c0) * s_.X + x0 : nullptr,
                                    columns_, wanted.weight_out ? dv.mutable_data_ptr<T>() + first * s_.C + c0 : nullptr, s_.C,
                                    shifted && x0 == 0 ? shift.data() + first : nullptr, x0 > 0);
          }
        }
      }
    });
  }

 private:
  static constexpr int64_t kColumns = 1024;   // of x, packed at once: 256 KiB of floats for a block of images
  static constexpr int64_t kImageBlocks = 4;  // at most, for which weights are made once
  static constexpr int64_t kRows = 24;        // output channels whose weights are there at a time
  static constexpr int64_t kImages = 512;     // summed at once: 128 KiB of floats
  static constexpr int64_t kHalves = 2;       // of the images, or of the output channels: for few groups of channels

  double sum_of_weights(int64_t d) const {
    const int64_t W = k_.width, whole = v_.s1 == 1 ? s_.C / k_.vector * k_.vector : 0;
    double sum = 0;
    for (int64_t c = 0; c < whole; c += W) k_.lane_sums(1, std::min(W, whole - c), v_.at(d, c), 0, &sum, 0);
    for (int64_t c = whole; c < s_.C; ++c) sum += static_cast<double>(*v_.at(d, c));
    return sum;
  }

  // Of output channels from begin to end.
  void sum_images(const Array3<T>& g, int64_t begin, int64_t end, double* sums) const {
    std::fill(sums + begin, sums + end, 0.0);
    for (int64_t n = 0; n < s_.N; ++n) {
      for (int64_t d = begin; d < end; ++d) sums[d] += static_cast<double>(*g.at(n, d));
    }
  }

  // dx of one half of the images for the `lanes` columns of the panel.
  void input_gradient(const Array3<T>& g, int64_t half, int64_t c0, int64_t channels, int64_t x0, int64_t positions,
                      int64_t lanes, T* panel, const Tensor& dx) const {
    const int64_t W = k_.width, n0 = s_.N * half / kHalves, images = s_.N * (half + 1) / kHalves - n0;
    k_.multiply_out(s_.D, channels, positions, u_.at(0, c0) + x0, u_.s0, v_.at(0, c0), v_.s0, v_.s1, panel, W);
    clear_lanes(k_, s_.D, lanes, panel, W);
    k_.product(images, lanes, s_.D, g.at(n0, 0), g.s0, g.s1, panel, W, nullptr, 0, 0,
               dx.mutable_data_ptr<T>() + n0 * columns_ + c0 * s_.X + x0, columns_, false, true);
  }

  // sum[d][lane] = sum_n g[n, first + d] source[n * x_.s0 + lane], d < rows
  void multiplied_gradient(const Array3<T>& g, int64_t first, int64_t rows, const T* source, int64_t lanes, T* panel,
                           T* sum) const {
    for (int64_t n0 = 0; n0 < s_.N; n0 += kImages) {
      const int64_t images = std::min(kImages, s_.N - n0);
      k_.pack(lanes, images, source + n0 * x_.s0, 1, x_.s0, panel);
      k_.product(rows, lanes, images, g.at(n0, first), g.s1, g.s0, panel, k_.width, nullptr, 0, 0, sum, k_.width, n0 > 0,
                 false);
    }
  }

  const Kernels<T>& k_;
  const FactoredLinearSizes s_;
  const int64_t columns_;  // of x and weight_in, those of all channels
  const Tensor x_rows_, u_rows_;
  const Array3<T> x_, u_, v_;
  const Array1<T> bias_in_;
};

}  // namespace ella

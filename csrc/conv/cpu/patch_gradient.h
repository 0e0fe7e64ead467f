// The gradient of a convolution's weights as one product of matrices, in the layout of the weights:
//   target[d, (c, e)] = sum_p grad[d, p] patch[p, (c, e)],
// p the positions of all images, e the entries of the kernel. Nothing is summed across a vector, which would take longer than
// the products where positions are few, and no task has sums of its own: it is the results that are shared out. Patches are
// made a panel at a time, D products for each of their elements.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "conv/cpu/circular_images.h"
#include "cpu/gram.h"

namespace ella {

// Where it is the faster way. Making patches takes as long as the products with a few output channels; to sum across vectors
// takes a time that many positions make up for, which was about the same at the limits below, for 10 to 512 channels, 2 x 2 to
// 32 x 32 positions and 1 to 128 images. With many output channels partial sums are too large besides for every task to have
// its own.
template <class T>
bool by_patches(const CircularConvSizes& s, bool component) {
  const int64_t positions = s.N * s.H * s.W / (component ? 4 : 1), row = s.C * s.kernel_h * s.kernel_w;
  const int64_t many = component ? 40 : 64;
  return s.D >= 16 && (positions <= 16 * s.D || (s.D >= many && row >= 4 * kernels<T>().lanes));
}

template <class T>
class PatchGradient {
 public:
  // `components`: of every image's gradient, the only one that is not zero (one_component.h), or, if `gathered`, all there is;
  // empty where all are read.
  PatchGradient(const CircularConvSizes& s, const std::vector<int64_t>& components, bool gathered, const Images<T>& grad,
                const Images<T>& x)
      : s_(s),
        rows_(s.H, s.kernel_h),
        columns_(s.W, s.kernel_w),
        components_(components),
        step_(components.empty() ? 1 : 2),
        grad_step_(gathered ? 1 : step_),
        grad_(grad),
        x_(x),
        height_(s.H / step_),
        width_(s.W / step_),
        entries_(rows_.kernel * columns_.kernel),
        results_(s.C * entries_),
        row_(columns_.padded()) {
    const int64_t positions = height_ * width_;
    images_ = std::clamp(kPositions / positions, int64_t(1), s.N);
    lines_ = positions <= kPositions ? height_ : std::max(kPositions / width_, int64_t(1));
    plane_ = padded_lines(lines_) * row_;
    block_ = images_ * lines_ * width_;
    grad_row_ = ceil_divide(block_, kLine) * kLine + kLine;
    const int64_t bytes = s.D * grad_row_ * static_cast<int64_t>(sizeof(T));
    blocks_at_once_ = std::max(kBytes / bytes, int64_t(1));
  }

  // target (D, C, kernel_h, kernel_w), contiguous.
  void run(T* target) const {
    const int64_t taps = s_.kernel_h * s_.kernel_w;
    const bool whole = entries_ == taps;
    const Buffer<T> folded(whole ? 0 : s_.D * results_);
    T* sums = whole ? target : folded.data();
    const int64_t by_image = ceil_divide(height_, lines_), blocks = ceil_divide(s_.N, images_) * by_image;
    const int64_t at_once = std::min(blocks_at_once_, blocks);
    const Buffer<T> grad(at_once * s_.D * grad_row_);
    for (int64_t first = 0; first < blocks; first += at_once) {
      const int64_t count = std::min(at_once, blocks - first);
      parallel_tasks(count * s_.D, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) copy_gradient(first + i / s_.D, i % s_.D, grad.data() + i * grad_row_);
      });
      const int64_t few = 2 * torch::stable::get_num_threads();  // panels, which are made narrower then
      const int64_t width = std::min(ceil_divide(ceil_divide(results_, few), k_.vector) * k_.vector, k_.width);
      const int64_t panels = ceil_divide(results_, width);
      parallel_tasks(panels, [&](int64_t begin, int64_t end) {
        const int64_t channels = ceil_divide(width, entries_) + 1;
        const Buffer<T> planes(channels * images_ * plane_ + kLine), panel(block_ * k_.width + kLine);
        for (int64_t i = begin; i < end; ++i) {
          const int64_t at = i * width, lanes = std::min(width, results_ - at);
          for (int64_t b = 0; b < count; ++b) {
            const int64_t positions = pack_patches(first + b, at, lanes, planes.data(), panel.data());
            k_.product(s_.D, lanes, positions, grad.data() + b * s_.D * grad_row_, grad_row_, 1, panel.data(), k_.width,
                       nullptr, 0, 0, sums + at, results_, first + b > 0, true);
          }
        }
      });
    }
    if (whole) return;
    const std::vector<int64_t> entries = folded_entries(rows_, columns_, s_.kernel_h, s_.kernel_w);
    parallel_tasks(s_.D, [&](int64_t begin, int64_t end) {
      unfold(entries, entries_, sums + begin * results_, (end - begin) * s_.C, target + begin * s_.C * taps);
    });
  }

 private:
  static constexpr int64_t kPositions = 512;  // of a block: a panel takes 128 KiB
  static constexpr int64_t kBytes = 4 << 20;  // of gradients copied at once
  static constexpr int64_t kLine = 64 / sizeof(T);

  // Some lines of the gradients of some images.
  struct Block {
    int64_t n, images, line, lines;
  };
  Block block(int64_t index) const {
    const int64_t by_image = ceil_divide(height_, lines_), n = index / by_image * images_, line = index % by_image * lines_;
    return {n, std::min(images_, s_.N - n), line, std::min(lines_, height_ - line)};
  }
  int64_t padded_lines(int64_t lines) const { return (lines - 1) * step_ + step_ - 1 + rows_.kernel; }
  int64_t component(int64_t n) const { return components_.empty() ? 0 : components_[n]; }

  void copy_gradient(int64_t index, int64_t d, T* to) const {
    const Block b = block(index);
    for (int64_t n = b.n; n < b.n + b.images; ++n) {
      const int64_t shift = grad_step_ == 1 ? 0 : component(n);
      const T* from = grad_.data + n * grad_.image + d * grad_.channel + shift % 2 * grad_.down + shift / 2 * grad_.right;
      const int64_t right = grad_step_ * grad_.right;
      for (int64_t h = b.line; h < b.line + b.lines; ++h) {
        const T* line = from + h * grad_step_ * grad_.down;
        if (right == 1) {
          for (int64_t w = 0; w < width_; ++w) *to++ = line[w];
        } else {
          for (int64_t w = 0; w < width_; ++w) *to++ = line[w * right];
        }
      }
    }
  }

  // The lines of channel c of image n that a block sees, with their border wrapped around.
  void pad(const Block& b, int64_t n, int64_t c, T* to) const {
    const T* from = x_.data + n * x_.image + c * x_.channel;
    const int64_t right = x_.right;
    for (int64_t i = 0; i < padded_lines(b.lines); ++i) {
      const T* line = from + rows_.source(b.line * step_ + i) * x_.down;
      for (int64_t w = s_.W - columns_.before; w < s_.W; ++w) *to++ = line[w * right];
      if (right == 1) {
        for (int64_t w = 0; w < s_.W; ++w) *to++ = line[w];
      } else {
        for (int64_t w = 0; w < s_.W; ++w) *to++ = line[w * right];
      }
      for (int64_t w = 0; w < columns_.after(); ++w) *to++ = line[w * right];
    }
  }

  // Entries of the kernel side by side, in a patch and in the padded planes.
  struct Run {
    int64_t from, lane, length;
  };

  // panel[p][lane] = patch[p, first + lane] for the positions p of a block, whose number is returned.
  int64_t pack_patches(int64_t index, int64_t first, int64_t lanes, T* planes, T* panel) const {
    const Block b = block(index);
    const int64_t c0 = first / entries_, channel = images_ * plane_;
    for (int64_t c = c0; c * entries_ < first + lanes; ++c) {
      for (int64_t n = 0; n < b.images; ++n) pad(b, b.n + n, c, planes + (c - c0) * channel + n * plane_);
    }
    std::vector<Run> runs;
    for (int64_t lane = 0; lane < lanes;) {
      const int64_t c = (first + lane) / entries_, e = (first + lane) % entries_, j = e % columns_.kernel;
      const int64_t length = std::min(columns_.kernel - j, lanes - lane);
      runs.push_back({(c - c0) * channel + e / columns_.kernel * row_ + j, lane, length});
      lane += length;
    }
    // Of no use to the sums, but what memory held before may be slow to multiply.
    const int64_t last = lanes / k_.vector * k_.vector;
    if (last < lanes) {
      for (int64_t p = 0; p < b.images * b.lines * width_; ++p) std::fill_n(panel + p * k_.width + last, k_.vector, T(0));
    }
    const int64_t bytes = columns_.kernel * static_cast<int64_t>(sizeof(T));
    if (bytes <= 16) {
      copy_runs<16>(b, runs, planes, panel);
    } else if (bytes <= 32) {
      copy_runs<32>(b, runs, planes, panel);
    } else {
      copy_runs<0>(b, runs, planes, panel);
    }
    return b.images * b.lines * width_;
  }

  // Runs are too short for a loop of their length: kBytes are copied of each, and what is too much overwritten by the next, or
  // at the end of a row by the next row.
  template <int kBytes>
  void copy_runs(const Block& b, const std::vector<Run>& runs, const T* planes, T* panel) const {
    for (int64_t n = 0; n < b.images; ++n) {
      const int64_t shift = component(b.n + n);
      const T* image = planes + n * plane_ + shift % 2 * row_ + shift / 2;
      for (int64_t h = 0; h < b.lines; ++h) {
        for (int64_t w = 0; w < width_; ++w, panel += k_.width) {
          const T* from = image + h * step_ * row_ + w * step_;
          for (const Run& run : runs) {
            if constexpr (kBytes > 0) {
              std::memcpy(panel + run.lane, from + run.from, kBytes);
            } else {
              std::copy_n(from + run.from, run.length, panel + run.lane);
            }
          }
        }
      }
    }
  }

  const Kernels<T>& k_ = kernels<T>();
  const CircularConvSizes s_;
  const Axis rows_, columns_;
  const std::vector<int64_t>& components_;
  const int64_t step_, grad_step_;  // of positions, in x and in the gradients
  const Images<T> grad_, x_;
  const int64_t height_, width_;     // lines of positions of an image, and positions in one
  const int64_t entries_, results_;  // of the folded kernel; of an output
  const int64_t row_;                // of a padded plane
  int64_t images_, lines_, block_;   // of a block; its positions
  int64_t plane_, grad_row_, blocks_at_once_;
};

}  // namespace ella

// Sums of the outer products of patches, with zeros around images, by pairs of pixels. An entry of the factor sums
//   x[n, c, p] x[n, c', q]
// over the images n and the pixels p and q that two entries of the kernel meet at one position. Other entries meet the same
// pixels at other positions: among patches every product of two pixels is there again and again, which is computed once here.
// Pairs of pixels that the same pairs of entries meet are a class, whose sums are those of one product of matrices. Rows of an
// image and its columns have classes of their own; those of an image are all pairs of the two.
#pragma once

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "cpu/gram.h"
#include "kron/checks.h"
#include "kron/cpu/widen.h"

namespace ella {

// The classes of one axis. The pair of the kernel's entries i and j has the number i * kernel + j.
class AxisPairs {
 public:
  struct Class {
    std::vector<int64_t> first;  // pixels, ascending, of which each has a second one
    int64_t lag;                 // from the first to the second
  };

  AxisPairs(int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation, int64_t out)
      : met_by_(kernel * kernel) {
    std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> meeting;  // a pair of pixels
    for (int64_t entries = 0; entries < kernel * kernel; ++entries) {
      for (int64_t position = 0; position < out; ++position) {
        const int64_t corner = position * stride - padding;
        const int64_t p = corner + entries / kernel * dilation, q = corner + entries % kernel * dilation;
        if (std::min(p, q) >= 0 && std::max(p, q) < size) meeting[{p, q}].push_back(entries);
      }
    }
    std::map<std::vector<int64_t>, size_t> numbers;
    for (const auto& [pixels, all] : meeting) {
      const auto [found, is_new] = numbers.emplace(all, classes_.size());
      if (is_new) {
        classes_.push_back({{}, pixels.second - pixels.first});
        for (const int64_t entries : all) met_by_[entries].push_back(found->second);
      }
      classes_[found->second].first.push_back(pixels.first);
    }
    pairs_ = static_cast<int64_t>(meeting.size());
  }

  const std::vector<Class>& classes() const { return classes_; }
  const std::vector<size_t>& met_by(int64_t entries) const { return met_by_[entries]; }  // numbers of classes
  int64_t pairs() const { return pairs_; }                                               // of pixels

 private:
  std::vector<Class> classes_;
  std::vector<std::vector<size_t>> met_by_;
  int64_t pairs_;
};

template <class S>
class PixelPairs {
  using T = Widened<S>;

 public:
  PixelPairs(const Tensor& x, const ConvGeometry& g)
      : g_(g),
        k_(kernels<T>()),
        rows_(g.H, g.kernel_h, g.stride_h, g.padding_h, g.dilation_h, g.out_h),
        columns_(g.W, g.kernel_w, g.stride_w, g.padding_w, g.dilation_w, g.out_w),
        kernel_(g.kernel_h * g.kernel_w),
        panels_(ceil_divide(g.C, k_.width)),
        pixels_(g.H * g.W),
        images_(std::clamp(std::min(kShared, kPacked / panels_) / (pixels_ * k_.width), int64_t(1), std::min(kRows, g.N))),
        groups_(std::clamp(kPacked / (panels_ * pixels_ * images_ * k_.width), int64_t(1), ceil_divide(g.N, images_))),
        data_(x.const_data_ptr<S>()),
        image_(x.stride(0)),
        channel_(x.stride(1)),
        down_(x.stride(2)),
        right_(x.stride(3)) {
    for (int64_t first = 0; first < g.C; first += kStrip) {
      for (int64_t right = first / k_.width; right < panels_; ++right) strips_.push_back({first, right});
    }
    std::stable_sort(strips_.begin(), strips_.end(), [](const Strip& a, const Strip& b) { return a.right < b.right; });
  }

  // Whether that may be worth it: channels fill vectors, positions outweigh the time in which the factor is written, and its
  // blocks are not large. `has_lags`: sums by lags are the other way, which is faster with large images and few channels; else
  // products of whole patches are. Classes are found pair by pair: long axes have too many.
  static bool suits(const ConvGeometry& g, bool has_lags) {
    constexpr int64_t kFewestPositions = 128, kLargestKernel = 25, kMostMet = 1 << 15;  // some ms and MiB
    return !g.circular && g.C >= kFewest && g.H * g.W > 0 && g.positions() >= kFewestPositions &&
           g.kernel_h * g.kernel_w <= kLargestKernel && (!has_lags || (g.C >= 2 * kFewest && g.H * g.W <= 4 * g.C)) &&
           g.kernel_h * g.kernel_h * g.out_h + g.kernel_w * g.kernel_w * g.out_w <= kMostMet;
  }

  // Whether products are fewer than those of patches and sums long, and what is kept is not large.
  bool pays() const {
    constexpr int64_t kMostClasses = 400;  // of 8 KiB each
    const int64_t products = kernel_ * kernel_ * g_.out_h * g_.out_w, run = g_.stride_w == 1 ? g_.W : 1;
    return 3 * rows_.pairs() * columns_.pairs() <= 2 * products && images_ * run >= kFewest && classes() <= kMostClasses &&
           panels_ * panel() <= kPacked;
  }

  template <class Total>
  void accumulate(double alpha, Total* factor) const {
    const Buffer<T> packed(groups_ * panels_ * panel());
    for (int64_t n0 = 0; n0 < g_.N; n0 += groups_ * images_) {
      const int64_t count = std::min(groups_ * images_, g_.N - n0), groups = ceil_divide(count, images_);
      parallel_tasks(groups * panels_, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
          const int64_t first = task / panels_ * images_;
          pack(n0 + first, std::min(images_, count - first), task % panels_, packed.data() + task * panel());
        }
      });
      parallel_tasks(static_cast<int64_t>(strips_.size()), [&](int64_t begin, int64_t end) {
        const Buffer<T> once(kStrip * k_.width);
        const Buffer<double> sums(classes() * kStrip * k_.width);
        const Buffer<Total> block(kAtOnce * kernel_ * k_.width * kernel_);
        for (int64_t task = begin; task < end; ++task) {
          sums_of(strips_[task], count, packed.data(), once.data(), sums.data());
          add(strips_[task], static_cast<Total>(alpha), sums.data(), block.data(), factor);
        }
      });
    }
  }

 private:
  static constexpr int64_t kFewest = 16;  // channels, or products of a sum
  static constexpr int64_t kStrip = 16;   // channels whose sums with those of a panel are computed at once
  static constexpr int64_t kAtOnce = 8;   // channels whose rows of the factor are written at once
  static constexpr int64_t kRows = 256;   // products that are added up in T
  static constexpr int64_t kShared = 512 * 1024 / static_cast<int64_t>(sizeof(T));  // elements of a panel, which strips share
  static constexpr int64_t kPacked = 8 * 1024 * 1024 / static_cast<int64_t>(sizeof(T));

  struct Strip {
    int64_t first, right;  // channel, panel

    // The first channel of the columns that are wanted.
    int64_t begin(int64_t width) const { return std::max(first, right * width); }
  };

  int64_t classes() const { return static_cast<int64_t>(rows_.classes().size() * columns_.classes().size()); }
  int64_t panel() const { return pixels_ * images_ * k_.width; }
  int64_t lanes(int64_t panel) const { return std::min(k_.width, g_.C - panel * k_.width); }

  // Channels of a panel, for `count` images from n on: a row for each image, pixel by pixel.
  void pack(int64_t n, int64_t count, int64_t panel, T* to) const {
    const int64_t W = k_.width, lanes = this->lanes(panel);
    const S* const from = data_ + n * image_ + panel * W * channel_;
    if (right_ != 1 || (down_ != g_.W && g_.H > 1)) {
      for (int64_t pixel = 0; pixel < pixels_; ++pixel) {
        pack_as(k_, lanes, count, from + pixel / g_.W * down_ + pixel % g_.W * right_, channel_, image_,
                to + pixel * count * W);
      }
      return;
    }
    if (lanes % k_.vector != 0) {
      for (int64_t row = 0; row < pixels_ * count; ++row) std::fill(to + row * W + lanes, to + (row + 1) * W, T(0));
    }
    for (int64_t i = 0; i < count; ++i) {
      transpose_as(k_, lanes, pixels_, from + i * image_, channel_, to + i * W, count * W);
    }
  }

  // Of every class, the products of the strip's channels and those of its panel, added up over `count` images.
  void sums_of(const Strip& strip, int64_t count, const T* packed, T* once, double* sums) const {
    const int64_t W = k_.width, rows = std::min(kStrip, g_.C - strip.first), begin = strip.begin(W);
    const int64_t columns = strip.right * W + lanes(strip.right) - begin;
    const Adders<T, double>& adder = adders<T, double>();
    std::fill_n(sums, classes() * kStrip * W, 0.0);
    for (int64_t first = 0; first < count; first += images_) {
      const int64_t images = std::min(images_, count - first);
      const T* const group = packed + first / images_ * panels_ * panel();
      const T* const left = group + strip.first / W * panel() + strip.first % W;
      const T* const right = group + strip.right * panel() + begin % W;
      double* to = sums;
      for (const AxisPairs::Class& above : rows_.classes()) {
        for (const AxisPairs::Class& beside : columns_.classes()) {
          int64_t in_once = 0;  // products
          const auto flush = [&] {
            if (in_once > 0) adder.rows(rows, columns, 1, once, W, to, W);
            in_once = 0;
          };
          for (const int64_t h : above.first) {
            for (size_t at = 0; at < beside.first.size();) {
              // Pixels that lie one behind the other.
              int64_t length = 1;
              while (at + length < beside.first.size() && beside.first[at + length] == beside.first[at] + length &&
                     (length + 1) * images <= kRows) {
                ++length;
              }
              if (in_once + length * images > kRows) flush();
              const int64_t p = h * g_.W + beside.first[at], q = p + above.lag * g_.W + beside.lag;
              k_.product(rows, columns, length * images, left + p * images * W, 1, W, right + q * images * W, W, nullptr, 0, 0,
                         once, W, in_once > 0, false);
              in_once += length * images;
              at += length;
            }
          }
          flush();
          to += kStrip * W;
        }
      }
    }
  }

  // Adds sums to the factor's entries, and to those across the diagonal.
  template <class Total>
  void add(const Strip& strip, Total alpha, const double* sums, Total* block, Total* factor) const {
    const int64_t W = k_.width, P = g_.patch(), end = strip.right * W + lanes(strip.right);
    const Adders<Total, Total>& adder = adders<Total, Total>();
    for (int64_t c = strip.first; c < std::min(strip.first + kStrip, g_.C); c += kAtOnce) {
      const int64_t channels = std::min(kAtOnce, std::min(strip.first + kStrip, g_.C) - c);
      const int64_t begin = std::max(c, strip.begin(W)), row = (end - begin) * kernel_;
      for (int64_t i = 0; i < channels; ++i) {
        const double* from = sums + (c + i - strip.first) * W + begin - strip.begin(W);
        for (int64_t entry = 0; entry < kernel_; ++entry) {
          for (int64_t other = 0; other < kernel_; ++other) {
            gather(entry, other, end - begin, from, block + (i * kernel_ + entry) * row + other);
          }
        }
      }
      Total* upper = factor + c * kernel_ * P + begin * kernel_;
      Total* lower = factor + begin * kernel_ * P + c * kernel_;
      const int64_t own = begin == c ? channels * kernel_ : 0;  // columns, whose rows these are
      if (own > 0) adder.mirrored(own, alpha, block, row, upper, P);
      // Few columns at once: rows of the factor that lie below each other share the sets of a cache.
      const int64_t step = std::max(kernels<Total>().vector, int64_t(8));
      for (int64_t j = own; j < row; j += step) {
        adder.both(channels * kernel_, std::min(step, row - j), alpha, block + j, row, upper + j, lower + j * P, P);
      }
    }
  }

  // The sums of a pair of the kernel's entries, to every kernel_-th element.
  template <class Total>
  void gather(int64_t entry, int64_t other, int64_t count, const double* from, Total* to) const {
    const auto& above = rows_.met_by(entry / g_.kernel_w * g_.kernel_h + other / g_.kernel_w);
    const auto& beside = columns_.met_by(entry % g_.kernel_w * g_.kernel_w + other % g_.kernel_w);
    double total[kPanelBytes / sizeof(float)] = {};
    for (const size_t h : above) {
      for (const size_t w : beside) {
        const double* part = from + (h * columns_.classes().size() + w) * kStrip * k_.width;
        for (int64_t j = 0; j < count; ++j) total[j] += part[j];
      }
    }
    for (int64_t j = 0; j < count; ++j) to[j * kernel_] = static_cast<Total>(total[j]);
  }

  const ConvGeometry& g_;
  const Kernels<T>& k_;
  const AxisPairs rows_, columns_;
  const int64_t kernel_, panels_, pixels_;
  const int64_t images_, groups_;  // images in a group, whose rows lie together, and groups that are packed at once
  const S* const data_;
  const int64_t image_, channel_, down_, right_;
  std::vector<Strip> strips_;
};

}  // namespace ella

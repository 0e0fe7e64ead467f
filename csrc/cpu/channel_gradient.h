// The gradient of a convolution's weights with channels of the result in the lanes of a vector: for each position of the
// gradient and each entry of the kernel one product over images,
//   sums[(c, e), d] += sum_n x[c, source(position, e), n] grad[position, n, d].
// Nothing is summed across a vector, which would take longer than the products where images are small, and no task has sums of
// its own: it is the results that are shared out, by the sizes alone. x and grad are copied, every number once.
#pragma once

#include <algorithm>
#include <vector>

#include "gram.h"
#include "torus.h"

namespace ella {

// Where it is the faster way. Every position passes over all results, and sums no more than the images at each: that is little
// where positions are few, and much beside few images. Tasks have sums of their own, for which there is memory up to some
// number of results: of more than kHuge a single task is left, of more than kMany few. The limits are where the two ways took
// about the same time, on two threads, for 80 to 400 channels, 2 x 2 to 64 x 64 positions and 1 to 128 images. `component`:
// only one of the gradient's four polyphase components is not zero.
inline bool by_channels(const CircularConvSizes& s, bool component) {
  constexpr int64_t kSome = 48 * 1024, kMany = 128 * 1024, kHuge = 300 * 1024;
  const int64_t results = s.D * s.C * s.kernel_h * s.kernel_w, positions = s.H * s.W / (component ? 4 : 1);
  if (component && positions <= 4) return true;
  if (s.D < 16) return false;  // lanes would be left empty
  if (positions <= 16) return results > kSome;
  if (positions <= 64) return results > (s.N <= 8 ? kSome : s.N <= 16 ? kMany : kHuge);
  return results > kHuge && s.N >= (component ? 64 : positions <= 256 ? 4 : 8);
}

template <class T>
class ChannelGradient {
 public:
  // `components`: of every image's gradient, the only one that is not zero (one_component.h), or, if `gathered`, all there is;
  // empty where all are read.
  ChannelGradient(const CircularConvSizes& s, const std::vector<int64_t>& components, bool gathered, const Images<T>& grad,
                  const Images<T>& x)
      : s_(s),
        step_(components.empty() ? 1 : 2),
        components_(components),
        grad_(grad, gathered ? places(s.H / 2, s.W / 2, grad, 1, false) : places(s.H, s.W, grad, step_, true)),
        x_(x, places(s.H, s.W, x, 1, true)) {
    const int64_t down = s.W / step_, positions = s.H / step_ * down, taps = s.kernel_h * s.kernel_w;
    const auto from = [&](int64_t tap, int64_t p) {
      const int64_t h = p / down * step_ + tap / s.kernel_w - s.kernel_h / 2;
      const int64_t w = p % down * step_ + tap % s.kernel_w - s.kernel_w / 2;
      return wrapped(h, s.H) * s.W + wrapped(w, s.W);
    };
    // Taps that meet the same number at one position do so at all, for they move with it: on images smaller than the kernel.
    std::vector<int64_t> first, tap_of_entry;
    for (int64_t tap = 0; tap < taps; ++tap) {
      const auto found = std::find(first.begin(), first.end(), from(tap, 0));
      entry_.push_back(found - first.begin());
      if (found != first.end()) continue;
      first.push_back(from(tap, 0));
      tap_of_entry.push_back(tap);
    }
    for (int64_t p = 0; p < positions; ++p) {
      for (const int64_t tap : tap_of_entry) source_.push_back(from(tap, p));
    }
    entries_ = static_cast<int64_t>(tap_of_entry.size());
    positions_ = positions;
    group_ = balanced_group(ceil_divide(s.D, k_.vector), k_.width / k_.vector) * k_.vector;
    groups_ = ceil_divide(s.D, group_);
    lanes_ = ceil_divide(s.D, k_.vector) * k_.vector;
    images_ = std::min(s.N, images_at_once());
    row_ = ceil_divide(images_, kLine) * kLine + kLine;
    channel_ = s.H * s.W * row_ + kLine;
    panel_ = positions * images_ * k_.width;
  }

  // target (D, C, kernel_h, kernel_w), contiguous.
  void run(T* target) const {
    const Buffer<T> x(s_.C * channel_), grad(groups_ * panel_), sums(s_.C * entries_ * lanes_);
    for (int64_t first = 0; first < s_.N; first += images_) {
      const int64_t count = std::min(images_, s_.N - first);
      pack(first, count, x.data(), grad.data());
      multiply(count, first > 0, x.data(), grad.data(), sums.data());
    }
    write(sums.data(), target);
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(T);  // rows are an odd number of lines, for they must not share a cache's sets
  static constexpr int64_t kAtOnce = 16;            // images that are packed together

  // Where the numbers of a channel lie, every `step`-th row and column of the torus, for each component; from its first ones on
  // if they are `shifted`.
  using Places = std::vector<std::vector<int64_t>>;
  static Places places(int64_t H, int64_t W, const Images<T>& images, int64_t step, bool shifted) {
    Places out(4);
    for (int64_t component = 0; component < 4; ++component) {
      const int64_t down = shifted ? component % 2 : 0, right = shifted ? component / 2 : 0;
      for (int64_t h = 0; h < H; h += step) {
        for (int64_t w = 0; w < W; w += step) {
          const int64_t row = (h + down) % H, column = (w + right) % W;
          out[component].push_back(row * images.down + column * images.right);
        }
      }
    }
    return out;
  }
  struct Source {
    Source(const Images<T>& images, Places places) : images(images), places(std::move(places)) {}
    void read(int64_t n, int64_t channel, int64_t component, T* to) const {
      const T* from = images.data + n * images.image + channel * images.channel;
      for (const int64_t place : places[component]) *to++ = from[place];
    }
    const Images<T> images;
    const Places places;
  };

  static int64_t wrapped(int64_t at, int64_t size) { return (at % size + size) % size; }

  // Images that are copied at once: megabytes, whatever the batch.
  int64_t images_at_once() const {
    constexpr int64_t kBytes = 8 << 20, kLeast = 64;
    const int64_t image = (s_.C * s_.H * s_.W + groups_ * positions_ * k_.width) * static_cast<int64_t>(sizeof(T));
    return std::max(kBytes / image / kAtOnce * kAtOnce, kLeast);
  }

  // x [channel][number][image], grad [group of outputs][position][image][output]
  void pack(int64_t first, int64_t count, T* x, T* grad) const {
    const int64_t size = s_.H * s_.W, P = positions_, at_position = images_ * k_.width;
    parallel_tasks(ceil_divide(count, kAtOnce), [&](int64_t begin, int64_t end) {
      const Buffer<T> room(std::max(kAtOnce * size, group_ * P));
      for (int64_t task = begin; task < end; ++task) {
        const int64_t n0 = task * kAtOnce, here = std::min(kAtOnce, count - n0);
        const auto component = [&](int64_t n) { return components_.empty() ? 0 : components_[first + n]; };
        for (int64_t c = 0; c < s_.C; ++c) {
          for (int64_t i = 0; i < here; ++i) x_.read(first + n0 + i, c, component(n0 + i), room.data() + i * size);
          k_.transpose(here, size, room.data(), size, x + c * channel_ + n0, row_);
        }
        for (int64_t n = n0; n < n0 + here; ++n) {
          for (int64_t group = 0; group < groups_; ++group) {
            const int64_t d0 = group * group_, width = std::min(group_, s_.D - d0);
            for (int64_t d = 0; d < width; ++d) grad_.read(first + n, d0 + d, component(n), room.data() + d * P);
            T* to = grad + group * panel_ + n * k_.width;
            k_.transpose(width, P, room.data(), P, to, at_position);
            if (d0 + width < s_.D) continue;
            for (int64_t p = 0; p < P; ++p) std::fill(to + p * at_position + width, to + p * at_position + lanes_ - d0, T(0));
          }
        }
      }
    });
  }

  // sums [channel][entry][output]
  void multiply(int64_t count, bool add, const T* x, const T* grad, T* sums) const {
    constexpr int64_t kTasks = 64;
    const int64_t step = std::max(ceil_divide(s_.C * groups_, kTasks * k_.rows), int64_t(1)) * k_.rows;
    const int64_t steps = ceil_divide(s_.C, step);
    parallel_tasks(groups_ * steps, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t group = task / steps, c0 = task % steps * step, d0 = group * group_;
        for (int64_t p = 0; p < positions_; ++p) {
          const T* panel = grad + group * panel_ + p * images_ * k_.width;
          for (int64_t e = 0; e < entries_; ++e) {
            k_.product(std::min(step, s_.C - c0), std::min(group_, s_.D - d0), count,
                       x + c0 * channel_ + source_[p * entries_ + e] * row_, channel_, 1, panel, k_.width, nullptr, 0, 0,
                       sums + (c0 * entries_ + e) * lanes_ + d0, entries_ * lanes_, add || p > 0, false);
          }
        }
      }
    });
  }

  void write(const T* sums, T* target) const {
    const int64_t taps = static_cast<int64_t>(entry_.size()), row = s_.C * entries_;
    const bool all = entries_ == taps;
    parallel_tasks(ceil_divide(s_.D, k_.vector), [&](int64_t begin, int64_t end) {
      const Buffer<T> room(all ? 0 : k_.vector * row);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t d0 = task * k_.vector, count = std::min(k_.vector, s_.D - d0);
        T* to = target + d0 * s_.C * taps;
        k_.transpose(row, count, sums + d0, lanes_, all ? to : room.data(), row);
        for (int64_t i = 0; i < count * s_.C && !all; ++i) {
          for (const int64_t e : entry_) *to++ = room.data()[i * entries_ + e];
        }
      }
    });
  }

  const Kernels<T>& k_ = kernels<T>();
  const CircularConvSizes s_;
  const int64_t step_;  // of positions
  const std::vector<int64_t>& components_;
  const Source grad_, x_;
  int64_t positions_;
  std::vector<int64_t> source_;  // [position][entry]: the number of x, in its order of reading
  std::vector<int64_t> entry_;   // of every tap of the kernel
  int64_t entries_;
  int64_t group_, groups_, lanes_;          // outputs: in a group, groups, all in whole vectors
  int64_t images_, row_, channel_, panel_;  // images copied at once; sizes of their copies
};

}  // namespace ella

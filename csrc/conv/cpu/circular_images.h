// Images with circular padding, laid out for convolutions with few channels. A block of images, a "unit", is copied once with
// its border wrapped around, after which every entry of the kernel is one fixed shift of the block (a "tap") and the arithmetic
// of kernels.h runs on whole vectors:
// - wide images: one image a unit, a vector is a piece of a row;
// - narrow ones: a vector is one position of as many images as it has lanes;
// - too few for that: the positions of one image after the other fill the vectors, and every tap is a copy of them.
// A kernel larger than the image meets the same pixel more than once; the entries that do are added up beforehand, so that
// kernel and border never exceed the image. Sums by lags may ask for a border of zeros instead.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "conv/checks.h"
#include "cpu/buffer.h"
#include "cpu/simd/kernels.h"

namespace ella {

// One axis of kernel and image. Entry i of the kernel is entry `fold(i)` of the folded one, which reads the padded axis at the
// position of the output plus fold(i).
struct Axis {
  Axis(int64_t size, int64_t kernel)
      : size(size), kernel(std::min(kernel, size)), before(kernel <= size ? kernel / 2 : 0), half_(kernel / 2) {}

  int64_t padded() const { return size + kernel - 1; }
  int64_t after() const { return kernel - 1 - before; }
  int64_t fold(int64_t i) const {
    if (before > 0 || half_ == 0) return i;
    const int64_t shift = (i - half_) % size;
    return shift < 0 ? shift + size : shift;
  }
  // Where the padded position comes from; the border is shorter than the image.
  int64_t source(int64_t at) const {
    const int64_t inside = at - before;
    return inside < 0 ? inside + size : inside >= size ? inside - size : inside;
  }

  const int64_t size, kernel, before;

 private:
  const int64_t half_;
};

// The entry of the folded kernel that every entry of the kernel is part of.
inline std::vector<int64_t> folded_entries(const Axis& rows, const Axis& columns, int64_t kernel_h, int64_t kernel_w) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < kernel_h; ++i) {
    for (int64_t j = 0; j < kernel_w; ++j) out.push_back(rows.fold(i) * columns.kernel + columns.fold(j));
  }
  return out;
}

// `kernels` kernels from the sums of their folded entries, `entries` each: one larger than the image repeats them.
template <class T, class U>
void unfold(const std::vector<int64_t>& folded, int64_t entries, const T* sums, int64_t kernels, U* target) {
  for (int64_t i = 0; i < kernels; ++i, sums += entries) {
    for (const int64_t entry : folded) *target++ = static_cast<U>(sums[entry]);
  }
}

// Data and strides of x or grad; asking torch for a stride is too slow for a loop.
template <class T>
struct Images {
  explicit Images(const Tensor& t)
      : data(t.const_data_ptr<T>()), image(t.stride(0)), channel(t.stride(1)), down(t.stride(2)), right(t.stride(3)) {}
  Images from(int64_t n) const {
    Images out = *this;
    out.data += n * image;
    return out;
  }
  const T* data;
  int64_t image, channel, down, right;
};

// One channel of some images.
template <class T>
struct Plane {
  const T* data;
  int64_t image, down, right;
};

// Full vectors of images that are narrower than one, and those that are left: too few for a vector of their own, or none.
template <class T>
int64_t images_in_vectors(const CircularConvSizes& s) {
  const int64_t vector = kernels<T>().vector, rest = s.N % vector;
  return s.W >= vector || 4 * rest > 3 * vector ? s.N : s.N - rest;
}

template <class T>
class CircularLayout {
 public:
  enum class Layout { rows, images, patches };

  // `zeros`: a border of zeros in place of what lies around; the kernel is no larger than the image then.
  explicit CircularLayout(const CircularConvSizes& s, bool zeros = false)
      : k(kernels<T>()),
        zeros(zeros),
        rows(s.H, s.kernel_h),
        columns(s.W, s.kernel_w),
        images(s.N),
        layout(s.W >= k.vector               ? Layout::rows
               : images_in_vectors<T>(s) > 0 ? Layout::images
                                             : Layout::patches),
        lanes(layout == Layout::images ? k.vector : 1),
        at_once(layout == Layout::patches ? patches_at_once(s) : lanes),
        units(ceil_divide(s.N, at_once)),
        channel(layout == Layout::patches ? ceil_divide(at_once * positions(), k.vector) * k.vector : positions() * lanes),
        plane(layout == Layout::patches ? tap_total() * (channel + kCopied) : padded() * lanes),
        folded(folded_entries(rows, columns, s.kernel_h, s.kernel_w)) {
    for (int64_t i = 0; i < rows.kernel; ++i) {
      for (int64_t j = 0; j < columns.kernel; ++j) {
        taps.push_back(layout == Layout::patches ? (i * columns.kernel + j) * (channel + kCopied)
                                                 : (i * columns.padded() + j) * lanes);
      }
    }
    if (layout == Layout::patches) {
      for (int64_t at = 0; at < channel; at += k.vector) in.push_back(at);
      place = in;
      return;
    }
    for (int64_t h = 0; h < s.H; ++h) {
      for (int64_t w = 0; w < s.W; w += lanes == 1 ? k.vector : 1) {
        const int64_t at = lanes == 1 ? std::min(w, s.W - k.vector) : w;  // the last piece of a row overlaps the one before
        in.push_back((h * columns.padded() + at) * lanes);
        place.push_back((h * s.W + at) * lanes);
      }
    }
  }

  // How far the elements that entry (i, j) of the kernel reads lie from those of the output.
  int64_t tap(int64_t i, int64_t j) const { return taps[rows.fold(i) * columns.kernel + columns.fold(j)]; }

  int64_t vectors() const { return static_cast<int64_t>(in.size()); }
  int64_t tap_count() const { return static_cast<int64_t>(taps.size()); }
  int64_t positions() const { return rows.size * columns.size; }
  int64_t images_of(int64_t unit) const { return std::min(at_once, images - unit * at_once); }

  // The vectors that `count` images of a unit fill.
  int64_t vectors_of(int64_t count) const {
    return layout == Layout::patches ? ceil_divide(count * positions(), k.vector) : vectors();
  }

  // Elements that `pack` needs room for; as many as one channel of the images of a unit has.
  int64_t room_size() const { return std::max(positions() * at_once, layout == Layout::patches ? padded() + kCopied : 0); }

  // The first image of a unit in channel c.
  Plane<T> plane_of(const Images<T>& x, int64_t unit, int64_t c) const {
    return {x.data + unit * at_once * x.image + c * x.channel, x.image, x.down, x.right};
  }

  // One channel of a unit of `count` images, plane elements.
  void pack(const Plane<T>& x, int64_t count, T* target, T* room) const {
    if (in_rows()) {
      pack_rows(x, target);
    } else if (layout == Layout::images) {
      pack_images(x, count, target, room);
    } else {
      pack_patches(x, count, target, room);
    }
  }

  // Whether vectors are pieces of rows.
  bool in_rows() const { return layout == Layout::rows; }

  // Whether the vectors of pack_gradient lie in the tensor as they are, one after the other.
  bool reads_in_place(const Images<T>& grad) const {
    return in_rows() && grad.right == 1 && grad.down == columns.size && columns.size % k.vector == 0;
  }

  // One channel of a unit of `count` images as vectors(); lanes that repeat a position, or have no image, are zero.
  void pack_gradient(const Plane<T>& grad, int64_t count, T* target) const {
    if (layout == Layout::images) {
      interleave(grad, count, target);
      return;
    }
    if (layout == Layout::patches) {
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t h = 0; h < rows.size; ++h) {
          const T* row = grad.data + i * grad.image + h * grad.down;
          for (int64_t w = 0; w < columns.size; ++w) *target++ = row[w * grad.right];
        }
      }
      std::fill_n(target, channel - count * positions(), T(0));
      return;
    }
    for (int64_t h = 0; h < rows.size; ++h) {
      const T* row = grad.data + h * grad.down;
      for (int64_t w = 0; w < columns.size; w += k.vector, target += k.vector) {
        const int64_t at = std::min(w, columns.size - k.vector);
        for (int64_t i = 0; i < k.vector; ++i) target[i] = at + i < w ? T(0) : row[(at + i) * grad.right];
      }
    }
  }

  // Whether the channels of a unit's result, `channel` elements each, are already those of its images.
  bool unpacked() const { return at_once == 1 && channel == positions(); }

  // The images of a unit, (channels, H, W) each, from its result.
  void unpack(int64_t count, int64_t channels, const T* source, T* target) const {
    const int64_t P = positions();
    if (layout == Layout::images) {
      k.transpose(channels * P, count, source, lanes, target, channels * P);
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t d = 0; d < channels; ++d, target += P) std::copy_n(source + d * channel + i * P, P, target);
    }
  }

  const Kernels<T>& k;
  const bool zeros;
  const Axis rows, columns;
  const int64_t images;
  const Layout layout;
  const int64_t lanes;                // of a vector that are images
  const int64_t at_once, units;       // images in a unit
  const int64_t channel, plane;       // elements that a channel of a unit takes, of the result and packed
  const std::vector<int64_t> folded;  // the tap of every entry of the kernel
  std::vector<int64_t> taps, in, place;

 private:
  static constexpr int64_t kCopied =
      64 / sizeof(T);  // elements, at most, that are copied for a row of a patch, which has fewer

  int64_t padded() const { return rows.padded() * columns.padded(); }
  int64_t tap_total() const { return rows.kernel * columns.kernel; }

  // Images whose patches take megabytes at most, or one.
  int64_t patches_at_once(const CircularConvSizes& s) const {
    constexpr int64_t kBytes = 4 << 20;
    const int64_t image = s.C * tap_total() * positions() * static_cast<int64_t>(sizeof(T));
    return balanced_group(s.N, std::max(kBytes / std::max(image, int64_t(1)), int64_t(1)));
  }

  void pack_rows(const Plane<T>& x, T* target) const {
    const int64_t row = columns.padded();
    T* const inside = target + rows.before * row;
    if (x.right == 1) {
      k.wrap_rows(rows.size, x.data, x.down, columns.size, columns.before, columns.after(), inside);
    } else {
      for (int64_t h = 0; h < rows.size; ++h) {
        for (int64_t w = 0; w < row; ++w) inside[h * row + w] = x.data[h * x.down + columns.source(w) * x.right];
      }
    }
    if (zeros) {
      for (int64_t h = 0; h < rows.size; ++h) {
        std::fill_n(inside + h * row, columns.before, T(0));
        std::fill_n(inside + h * row + columns.before + columns.size, columns.after(), T(0));
      }
      std::fill_n(target, rows.before * row, T(0));
      std::fill_n(inside + rows.size * row, rows.after() * row, T(0));
      return;
    }
    std::copy_n(inside + (rows.size - rows.before) * row, rows.before * row, target);
    std::copy_n(inside, rows.after() * row, inside + rows.size * row);
  }

  // Whether a padded position is a zero.
  bool is_zero(const Axis& axis, int64_t at) const { return zeros && (at < axis.before || at >= axis.before + axis.size); }

  void pack_images(const Plane<T>& x, int64_t count, T* target, T* room) const {
    interleave(x, count, room);
    for (int64_t h = 0; h < rows.padded(); ++h) {
      const T* row = room + rows.source(h) * columns.size * lanes;
      for (int64_t w = 0; w < columns.padded(); ++w, target += lanes) {
        const T* from = row + columns.source(w) * lanes;
        const bool zero = is_zero(rows, h) || is_zero(columns, w);
        for (int64_t i = 0; i < lanes; ++i) target[i] = zero ? T(0) : from[i];
      }
    }
  }

  void pack_patches(const Plane<T>& x, int64_t count, T* target, T* room) const {
    const int64_t P = positions();
    for (int64_t n = 0; n < count; ++n) {
      T* to = room;
      for (int64_t h = 0; h < rows.padded(); ++h) {
        const T* from = x.data + n * x.image + rows.source(h) * x.down;
        for (int64_t w = 0; w < columns.padded(); ++w) {
          *to++ = is_zero(rows, h) || is_zero(columns, w) ? T(0) : from[columns.source(w) * x.right];
        }
      }
      const int64_t bytes = columns.size * static_cast<int64_t>(sizeof(T));
      if (bytes <= 16) {
        copy_taps<16>(room, target + n * P);
      } else if (bytes <= 32) {
        copy_taps<32>(room, target + n * P);
      } else {
        copy_taps<64>(room, target + n * P);
      }
    }
    for (const int64_t tap : taps) std::fill_n(target + tap + count * P, channel - count * P, T(0));
  }

  // Rows are too short for a loop of their length: kBytes are copied of each, and what is too much overwritten by the next.
  template <int kBytes>
  void copy_taps(const T* image, T* target) const {
    for (int64_t t = 0; t < tap_count(); ++t) {
      const T* from = image + t / columns.kernel * columns.padded() + t % columns.kernel;
      T* to = target + taps[t];
      for (int64_t h = 0; h < rows.size; ++h, to += columns.size, from += columns.padded()) std::memcpy(to, from, kBytes);
    }
  }

  // target[position * lanes + i] = image i at that position; zeros for images there are none of.
  void interleave(const Plane<T>& x, int64_t count, T* target) const {
    if (x.right == 1 && x.down == columns.size) {
      k.transpose(count, positions(), x.data, x.image, target, lanes);
    } else {
      for (int64_t h = 0; h < rows.size; ++h) {
        for (int64_t w = 0; w < columns.size; ++w) {
          const T* from = x.data + h * x.down + w * x.right;
          T* to = target + (h * columns.size + w) * lanes;
          for (int64_t i = 0; i < count; ++i) to[i] = from[i * x.image];
        }
      }
    }
    if (count == lanes) return;
    for (int64_t p = 0; p < positions(); ++p) std::fill(target + p * lanes + count, target + (p + 1) * lanes, T(0));
  }
};

}  // namespace ella

// Images on a torus, laid out for convolutions with few channels. A block of images is copied once with its border wrapped
// around, after which every entry of the kernel is one fixed shift of the block (a "tap") and the arithmetic of kernels.h runs
// on whole vectors:
// - wide images: one image a block, a vector is a piece of a row;
// - narrow ones: a vector is one position of as many images as it has lanes.
// A kernel larger than the image meets the same pixel more than once; the entries that do are added up beforehand, so that
// kernel and border never exceed the image.
#pragma once

#include <algorithm>
#include <vector>

#include "../common/checks.h"
#include "buffer.h"
#include "kernels.h"

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

// Data and strides of x or grad; asking torch for a stride is too slow for a loop.
template <class T>
struct Images {
  explicit Images(const Tensor& t)
      : data(t.const_data_ptr<T>()), image(t.stride(0)), channel(t.stride(1)), down(t.stride(2)), right(t.stride(3)) {}
  const T* data;
  int64_t image, channel, down, right;
};

// One channel of some images.
template <class T>
struct Plane {
  const T* data;
  int64_t image, down, right;
};

template <class T>
class Torus {
 public:
  explicit Torus(const CircularConvSizes& s)
      : k(kernels<T>()),
        rows(s.H, s.kernel_h),
        columns(s.W, s.kernel_w),
        images(s.N),
        lanes(s.W >= k.vector ? 1 : k.vector),
        units(ceil_divide(s.N, lanes)),
        plane(rows.padded() * columns.padded() * lanes) {
    for (int64_t i = 0; i < rows.kernel; ++i) {
      for (int64_t j = 0; j < columns.kernel; ++j) taps.push_back((i * columns.padded() + j) * lanes);
    }
    for (int64_t i = 0; i < s.kernel_h; ++i) {
      for (int64_t j = 0; j < s.kernel_w; ++j) folded.push_back(rows.fold(i) * columns.kernel + columns.fold(j));
    }
    for (int64_t h = 0; h < s.H; ++h) {
      for (int64_t w = 0; w < s.W; w += lanes == 1 ? k.vector : 1) {
        const int64_t at = lanes == 1 ? std::min(w, s.W - k.vector) : w;  // the last piece of a row overlaps the one before
        in.push_back((h * columns.padded() + at) * lanes);
        place.push_back((h * s.W + at) * lanes);
      }
    }
  }

  // How far padded positions that entry (i, j) of the kernel reads lie from those of the output.
  int64_t tap(int64_t i, int64_t j) const { return (rows.fold(i) * columns.padded() + columns.fold(j)) * lanes; }

  int64_t vectors() const { return static_cast<int64_t>(in.size()); }
  int64_t tap_count() const { return static_cast<int64_t>(taps.size()); }
  int64_t positions() const { return rows.size * columns.size; }
  int64_t images_of(int64_t unit) const { return std::min(lanes, images - unit * lanes); }

  // The first image of a unit in channel c.
  Plane<T> plane_of(const Images<T>& x, int64_t unit, int64_t c) const {
    return {x.data + unit * lanes * x.image + c * x.channel, x.image, x.down, x.right};
  }

  // One channel of a unit of `count` images with its border; `room` holds positions() vectors.
  void pack(const Plane<T>& x, int64_t count, T* target, T* room) const {
    if (lanes == 1) {
      const int64_t row = columns.padded();
      T* const inside = target + rows.before * row;
      if (x.right == 1) {
        k.wrap_rows(rows.size, x.data, x.down, columns.size, columns.before, columns.after(), inside);
      } else {
        for (int64_t h = 0; h < rows.size; ++h) {
          for (int64_t w = 0; w < row; ++w) inside[h * row + w] = x.data[h * x.down + columns.source(w) * x.right];
        }
      }
      std::copy_n(inside + (rows.size - rows.before) * row, rows.before * row, target);
      std::copy_n(inside, rows.after() * row, inside + rows.size * row);
      return;
    }
    interleave(x, count, room);
    for (int64_t h = 0; h < rows.padded(); ++h) {
      const T* row = room + rows.source(h) * columns.size * lanes;
      for (int64_t w = 0; w < columns.padded(); ++w, target += lanes) {
        const T* from = row + columns.source(w) * lanes;
        for (int64_t i = 0; i < lanes; ++i) target[i] = from[i];
      }
    }
  }

  // Whether the vectors of pack_gradient lie in the tensor as they are, one after the other.
  bool reads_in_place(const Images<T>& grad) const {
    return lanes == 1 && grad.right == 1 && grad.down == columns.size && columns.size % k.vector == 0;
  }

  // One channel of a unit of `count` images as vectors(); lanes that repeat a position, or have no image, are zero.
  void pack_gradient(const Plane<T>& grad, int64_t count, T* target) const {
    if (lanes > 1) {
      interleave(grad, count, target);
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

  const Kernels<T>& k;
  const Axis rows, columns;
  const int64_t images, lanes;  // images in a unit
  const int64_t units, plane;   // elements of one padded channel of a unit
  std::vector<int64_t> taps, in, place;
  std::vector<int64_t> folded;  // the tap of every entry of the kernel

 private:
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

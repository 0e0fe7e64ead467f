// Convolution on a torus for few channels. A block of images is copied once with its border wrapped around, after which every
// entry of the kernel is one fixed shift of the block (a "tap") and the arithmetic of kernels.h runs on whole vectors:
// - wide images: one image a block, a vector is a piece of a row;
// - narrow ones: a vector is one position of as many images as it has lanes.
// A kernel larger than the image meets the same pixel more than once; the entries that do are added up beforehand, so that
// kernel and border never exceed the image.
#include "circular_conv2d.h"

#include <algorithm>

#include "../common/checks.h"
#include "gram.h"

namespace ella {
namespace {

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
  const int64_t image, channel, down, right;
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

  int64_t vectors() const { return static_cast<int64_t>(in.size()); }
  int64_t tap_count() const { return static_cast<int64_t>(taps.size()); }
  int64_t positions() const { return rows.size * columns.size; }
  int64_t images_of(int64_t unit) const { return std::min(lanes, images - unit * lanes); }

  // Channel c of one unit with its border; `room` holds positions() vectors.
  void pack(const Images<T>& x, int64_t unit, int64_t c, T* target, T* room) const {
    const T* source = x.data + unit * lanes * x.image + c * x.channel;
    if (lanes == 1) {
      const int64_t row = columns.padded();
      T* const inside = target + rows.before * row;
      if (x.right == 1) {
        k.wrap_rows(rows.size, source, x.down, columns.size, columns.before, columns.after(), inside);
      } else {
        for (int64_t h = 0; h < rows.size; ++h) {
          for (int64_t w = 0; w < row; ++w) inside[h * row + w] = source[h * x.down + columns.source(w) * x.right];
        }
      }
      std::copy_n(inside + (rows.size - rows.before) * row, rows.before * row, target);
      std::copy_n(inside, rows.after() * row, inside + rows.size * row);
      return;
    }
    interleave(x, source, images_of(unit), room);
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

  // Channel d of one unit as vectors(); lanes that repeat a position, or have no image, are zero.
  void pack_gradient(const Images<T>& grad, int64_t unit, int64_t d, T* target) const {
    const T* source = grad.data + unit * lanes * grad.image + d * grad.channel;
    if (lanes > 1) {
      interleave(grad, source, images_of(unit), target);
      return;
    }
    for (int64_t h = 0; h < rows.size; ++h) {
      const T* row = source + h * grad.down;
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
  void interleave(const Images<T>& x, const T* source, int64_t count, T* target) const {
    if (x.right == 1 && x.down == columns.size) {
      k.transpose(count, positions(), source, x.image, target, lanes);
    } else {
      for (int64_t h = 0; h < rows.size; ++h) {
        for (int64_t w = 0; w < columns.size; ++w) {
          const T* from = source + h * x.down + w * x.right;
          T* to = target + (h * columns.size + w) * lanes;
          for (int64_t i = 0; i < count; ++i) to[i] = from[i * x.image];
        }
      }
    }
    if (count == lanes) return;
    for (int64_t p = 0; p < positions(); ++p) std::fill(target + p * lanes + count, target + (p + 1) * lanes, T(0));
  }
};

// The folded kernel in the order that Convolution::weight wants, D * C * tap_count() numbers.
template <class T>
void pack_weight(const Torus<T>& torus, const CircularConvSizes& s, const Tensor& weight, T* packed) {
  const int64_t K = s.C * torus.tap_count(), group = balanced_group(s.D, torus.k.rows);
  const Images<T> w(weight);
  std::fill_n(packed, s.D * K, T(0));
  for (int64_t d = 0; d < s.D; ++d) {
    const int64_t first = d / group * group, width = std::min(group, s.D - first);
    T* column = packed + first * K + (d - first);
    for (int64_t c = 0; c < s.C; ++c, column += torus.tap_count() * width) {
      const T* kernel = w.data + d * w.image + c * w.channel;
      const int64_t* tap = torus.folded.data();
      for (int64_t i = 0; i < s.kernel_h; ++i) {
        for (int64_t j = 0; j < s.kernel_w; ++j, ++tap) column[*tap * width] += kernel[i * w.down + j * w.right];
      }
    }
  }
}

template <class T>
void convolve(const CircularConvSizes& s, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, Tensor& y) {
  const Torus<T> torus(s);
  const int64_t weights = s.D * s.C * torus.tap_count();
  const Buffer<T> packed(x, weights + s.D);
  T* const offset = bias ? packed.data() + weights : nullptr;
  pack_weight(torus, s, weight, packed.data());
  if (bias) {
    const T* values = bias->const_data_ptr<T>();
    const int64_t step = bias->stride(0);
    for (int64_t d = 0; d < s.D; ++d) offset[d] = values[d * step];
  }
  const Images<T> source(x);
  T* result = y.mutable_data_ptr<T>();
  const int64_t lanes = torus.lanes, positions = torus.positions();
  parallel_tasks(torus.units, [&](int64_t begin, int64_t end) {
    const Buffer<T> scratch(x, s.C * torus.plane + (lanes == 1 ? 0 : s.D * positions * lanes));
    T *const image = scratch.data(), *const room = image + s.C * torus.plane;
    for (int64_t unit = begin; unit < end; ++unit) {
      for (int64_t c = 0; c < s.C; ++c) torus.pack(source, unit, c, image + c * torus.plane, room);
      T* out = result + unit * lanes * s.D * positions;
      torus.k.convolve({image, s.C, torus.plane, torus.taps.data(), torus.tap_count(), torus.in.data(), torus.place.data(),
                        torus.vectors(), packed.data(), offset, lanes == 1 ? out : room, s.D, positions * lanes});
      if (lanes > 1) torus.k.transpose(s.D * positions, torus.images_of(unit), room, lanes, out, s.D * positions);
    }
  });
}

// Units that are summed together, and the tasks they are shared out in: from the sizes alone, for the same numbers with any
// number of threads.
template <class T>
struct GradientPlan {
  GradientPlan(const Torus<T>& torus, const CircularConvSizes& s) {
    constexpr int64_t kVectors = 128;               // enough work between two sums over the lanes of a vector
    constexpr int64_t kBlockBytes = 512 * 1024;     // of packed images and gradients
    constexpr int64_t kSumBytes = 8 * 1024 * 1024;  // of partial sums
    const int64_t unit_bytes = (s.C * torus.plane + s.D * torus.vectors() * torus.k.vector) * static_cast<int64_t>(sizeof(T));
    block = std::min(ceil_divide(kVectors, torus.vectors()), std::max(kBlockBytes / unit_bytes, int64_t(1)));
    block = std::min(block, torus.units);
    const int64_t blocks = ceil_divide(torus.units, block);
    sums = s.D * s.C * torus.tap_count();
    const int64_t most = std::max(kSumBytes / (sums * static_cast<int64_t>(sizeof(double))), int64_t(1));
    chunk = ceil_divide(blocks, std::min({blocks, most, int64_t(16)})) * block;
    chunks = ceil_divide(torus.units, chunk);
  }
  int64_t block, chunk, chunks, sums;
};

// Calls done(sums, torus) with the gradient by folded taps, sums[(d * C + c) * torus.tap_count() + tap]. With `upper`, sums for
// c < d are not wanted.
template <class T, class Done>
void weight_gradient(const CircularConvSizes& s, const Tensor& grad, const Tensor& x, bool upper, const Done& done) {
  const Torus<T> torus(s);
  const GradientPlan<T> plan(torus, s);
  const int64_t L = torus.k.vector, K = s.C * torus.tap_count(), vectors = torus.vectors();
  const Buffer<double> partial(x, plan.chunks * plan.sums);
  const Images<T> source(x), gradients(grad);
  const bool in_place = torus.reads_in_place(gradients);
  std::vector<int64_t> in, at;
  for (int64_t unit = 0; unit < plan.block; ++unit) {
    for (int64_t v = 0; v < vectors; ++v) {
      in.push_back(unit * torus.plane + torus.in[v]);
      at.push_back(in_place ? unit * gradients.image + v * L : (unit * vectors + v) * L);
    }
  }
  const int64_t channel = plan.block * torus.plane;
  const int64_t packed_channel = (plan.block * vectors + 1) * L;  // odd, for channels must not share the sets of a cache
  const int64_t grad_channel = in_place ? gradients.channel : packed_channel;
  parallel_tasks(plan.chunks, [&](int64_t begin, int64_t end) {
    const int64_t packed = in_place ? 0 : s.D * packed_channel;
    const Buffer<T> scratch(x, s.C * channel + packed + torus.positions() * torus.lanes);
    T *const image = scratch.data(), *const gradient = image + s.C * channel, *const room = gradient + packed;
    std::vector<const T*> columns;
    for (int64_t c = 0; c < s.C; ++c) {
      for (const int64_t tap : torus.taps) columns.push_back(image + c * channel + tap);
    }
    for (int64_t task = begin; task < end; ++task) {
      double* sums = partial.data() + task * plan.sums;
      std::fill_n(sums, plan.sums, 0.0);
      const int64_t last = std::min((task + 1) * plan.chunk, torus.units);
      for (int64_t first = task * plan.chunk; first < last; first += plan.block) {
        const int64_t count = std::min(plan.block, last - first);
        for (int64_t i = 0; i < count; ++i) {
          for (int64_t c = 0; c < s.C; ++c) {
            torus.pack(source, first + i, c, image + c * channel + i * torus.plane, room);
          }
          for (int64_t d = 0; d < s.D && !in_place; ++d) {
            torus.pack_gradient(gradients, first + i, d, gradient + d * packed_channel + i * vectors * L);
          }
        }
        const T* g = in_place ? gradients.data + first * gradients.image : gradient;
        torus.k.convolve_gradient({g, at.data(), s.D, grad_channel, columns.data(), K, upper ? torus.tap_count() : 0, in.data(),
                                   count * vectors, sums, K});
      }
    }
  });
  double* total = partial.data();
  for (int64_t task = 1; task < plan.chunks; ++task) {
    for (int64_t i = 0; i < plan.sums; ++i) total[i] += total[task * plan.sums + i];
  }
  done(total, torus);
}

// `rows` kernels from their folded taps: one larger than the image repeats them.
template <class T, class U>
void unfold(const Torus<T>& torus, const double* sums, int64_t rows, U* target) {
  for (int64_t i = 0; i < rows; ++i, sums += torus.tap_count()) {
    for (const int64_t tap : torus.folded) *target++ = static_cast<U>(sums[tap]);
  }
}

Tensor circular_conv2d(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const CircularConvSizes s = check_circular_conv2d(x, weight, bias);
  Tensor y = empty_of(x, {s.N, s.D, s.H, s.W});
  if (y.numel() == 0) return y;
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "circular_conv2d", [&] { convolve<scalar_t>(s, x, weight, bias, y); });
  return y;
}

Tensor circular_conv2d_weight_grad(const Tensor& grad, const Tensor& x, int64_t kernel_h, int64_t kernel_w) {
  const CircularConvSizes s = check_circular_conv2d_weight_grad(grad, x, kernel_h, kernel_w);
  if (grad.numel() == 0 || x.numel() == 0) return zeros_of(x, {s.D, s.C, s.kernel_h, s.kernel_w});
  Tensor out = empty_of(x, {s.D, s.C, s.kernel_h, s.kernel_w});
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "circular_conv2d_weight_grad", [&] {
    weight_gradient<scalar_t>(s, grad, x, false, [&](const double* sums, const Torus<scalar_t>& torus) {
      unfold(torus, sums, s.D * s.C, out.mutable_data_ptr<scalar_t>());
    });
  });
  return out;
}

ELLA_REGISTER(CPU, m) {
  m.impl("circular_conv2d", TORCH_BOX(&circular_conv2d));
  m.impl("circular_conv2d_weight_grad", TORCH_BOX(&circular_conv2d_weight_grad));
}

}  // namespace

std::vector<double> circular_autocorrelation(const Tensor& x, int64_t half_h, int64_t half_w) {
  const int64_t C = x.size(1), kernel_h = 2 * half_h + 1, kernel_w = 2 * half_w + 1;
  std::vector<double> lags(C * C * kernel_h * kernel_w);
  const CircularConvSizes s{x.size(0), C, x.size(2), x.size(3), C, kernel_h, kernel_w};
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "circular_autocorrelation", [&] {
    weight_gradient<scalar_t>(
        s, x, x, true, [&](const double* sums, const Torus<scalar_t>& torus) { unfold(torus, sums, C * C, lags.data()); });
  });
  return lags;
}

}  // namespace ella

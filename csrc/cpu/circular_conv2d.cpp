// Convolution on a torus for few channels. A block of images is copied once with its border wrapped around, after which every
// entry of the kernel is one fixed shift of the block (a "tap") and the arithmetic of kernels.h runs on whole vectors:
// - wide images: one image a block, a vector is a piece of a row;
// - narrow ones: a vector is one position of as many images as it has lanes.
// A kernel larger than the image meets the same pixel more than once; the entries that do are added up beforehand, so that
// kernel and border never exceed the image.
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
  void pack(const Tensor& x, const T* data, int64_t unit, int64_t c, T* target, T* room) const {
    const T* source = data + unit * lanes * x.stride(0) + c * x.stride(1);
    if (lanes == 1) {
      for (int64_t h = 0; h < rows.padded(); ++h, target += columns.padded()) {
        pack_row(source + rows.source(h) * x.stride(2), x.stride(3), target);
      }
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

  // Channel d of one unit as vectors(); lanes that repeat a position, or have no image, are zero.
  void pack_gradient(const Tensor& grad, const T* data, int64_t unit, int64_t d, T* target) const {
    const T* source = data + unit * lanes * grad.stride(0) + d * grad.stride(1);
    if (lanes > 1) {
      interleave(grad, source, images_of(unit), target);
      return;
    }
    const int64_t step = grad.stride(3);
    if (step == 1 && grad.stride(2) == columns.size && columns.size % k.vector == 0) {
      std::copy_n(source, positions(), target);
      return;
    }
    for (int64_t h = 0; h < rows.size; ++h) {
      const T* row = source + h * grad.stride(2);
      for (int64_t w = 0; w < columns.size; w += k.vector, target += k.vector) {
        const int64_t at = std::min(w, columns.size - k.vector);
        if (step == 1) {
          std::copy_n(row + at, k.vector, target);
        } else {
          for (int64_t i = 0; i < k.vector; ++i) target[i] = row[(at + i) * step];
        }
        std::fill_n(target, w - at, T(0));
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
  void pack_row(const T* source, int64_t step, T* target) const {
    const int64_t before = columns.before, size = columns.size, after = columns.kernel - 1 - before;
    if (step == 1) {
      std::copy_n(source, size, target + before);
    } else {
      for (int64_t w = 0; w < size; ++w) target[before + w] = source[w * step];
    }
    for (int64_t i = 0; i < before; ++i) target[i] = target[size + i];
    for (int64_t i = 0; i < after; ++i) target[before + size + i] = target[before + i];
  }

  // target[position * lanes + i] = image i at that position; zeros for images there are none of.
  void interleave(const Tensor& x, const T* source, int64_t count, T* target) const {
    const int64_t image = x.stride(0), down = x.stride(2), right = x.stride(3);
    if (right == 1 && down == columns.size) {
      k.transpose(count, positions(), source, image, target, lanes);
    } else {
      for (int64_t h = 0; h < rows.size; ++h) {
        for (int64_t w = 0; w < columns.size; ++w) {
          const T* from = source + h * down + w * right;
          T* to = target + (h * columns.size + w) * lanes;
          for (int64_t i = 0; i < count; ++i) to[i] = from[i * image];
        }
      }
    }
    if (count == lanes) return;
    for (int64_t p = 0; p < positions(); ++p) std::fill(target + p * lanes + count, target + (p + 1) * lanes, T(0));
  }
};

// The folded kernel in the order that Convolution::weight wants.
template <class T>
Buffer<T> pack_weight(const Torus<T>& torus, const CircularConvSizes& s, const Tensor& weight) {
  const int64_t K = s.C * torus.tap_count(), group = balanced_group(s.D, torus.k.rows);
  const Buffer<T> packed(weight, s.D * K);
  packed.zero(0, s.D * K);
  const T* data = weight.const_data_ptr<T>();
  for (int64_t d = 0; d < s.D; ++d) {
    const int64_t first = d / group * group, width = std::min(group, s.D - first);
    T* column = packed.data() + first * K + (d - first);
    for (int64_t c = 0; c < s.C; ++c, column += torus.tap_count() * width) {
      const T* kernel = data + d * weight.stride(0) + c * weight.stride(1);
      const int64_t* tap = torus.folded.data();
      for (int64_t i = 0; i < s.kernel_h; ++i) {
        for (int64_t j = 0; j < s.kernel_w; ++j, ++tap) {
          column[*tap * width] += kernel[i * weight.stride(2) + j * weight.stride(3)];
        }
      }
    }
  }
  return packed;
}

template <class T>
void convolve(const CircularConvSizes& s, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, Tensor& y) {
  const Torus<T> torus(s);
  const Buffer<T> packed = pack_weight(torus, s, weight), offset(x, s.D);
  for (int64_t d = 0; bias && d < s.D; ++d) offset.data()[d] = bias->const_data_ptr<T>()[d * bias->stride(0)];
  const T* data = x.const_data_ptr<T>();
  T* result = y.mutable_data_ptr<T>();
  const int64_t lanes = torus.lanes, positions = torus.positions();
  parallel_tasks(torus.units, [&](int64_t begin, int64_t end) {
    const Buffer<T> image(x, s.C * torus.plane), room(x, lanes == 1 ? 0 : std::max(s.D, int64_t(1)) * positions * lanes);
    for (int64_t unit = begin; unit < end; ++unit) {
      for (int64_t c = 0; c < s.C; ++c) torus.pack(x, data, unit, c, image.data() + c * torus.plane, room.data());
      T* out = result + unit * lanes * s.D * positions;
      torus.k.convolve({image.data(), s.C, torus.plane, torus.taps.data(), torus.tap_count(), torus.in.data(),
                        torus.place.data(), torus.vectors(), packed.data(), bias ? offset.data() : nullptr,
                        lanes == 1 ? out : room.data(), s.D, positions * lanes});
      if (lanes > 1) torus.k.transpose(s.D * positions, torus.images_of(unit), room.data(), lanes, out, s.D * positions);
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

template <class T>
void weight_gradient(const CircularConvSizes& s, const Tensor& grad, const Tensor& x, Tensor& out) {
  const Torus<T> torus(s);
  const GradientPlan<T> plan(torus, s);
  const int64_t L = torus.k.vector, K = s.C * torus.tap_count(), vectors = torus.vectors();
  const Buffer<double> partial(x, plan.chunks * plan.sums);
  const T *grad_data = grad.const_data_ptr<T>(), *data = x.const_data_ptr<T>();
  std::vector<int64_t> in;
  for (int64_t unit = 0; unit < plan.block; ++unit) {
    for (const int64_t at : torus.in) in.push_back(unit * torus.plane + at);
  }
  const int64_t channel = plan.block * torus.plane;
  const int64_t grad_channel = (plan.block * vectors + 1) * L;  // odd, for channels must not share the sets of a cache
  parallel_tasks(plan.chunks, [&](int64_t begin, int64_t end) {
    const Buffer<T> image(x, s.C * channel), gradient(x, s.D * grad_channel), room(x, torus.positions() * torus.lanes);
    std::vector<const T*> columns;
    for (int64_t c = 0; c < s.C; ++c) {
      for (const int64_t tap : torus.taps) columns.push_back(image.data() + c * channel + tap);
    }
    for (int64_t task = begin; task < end; ++task) {
      double* sums = partial.data() + task * plan.sums;
      std::fill_n(sums, plan.sums, 0.0);
      const int64_t last = std::min((task + 1) * plan.chunk, torus.units);
      for (int64_t first = task * plan.chunk; first < last; first += plan.block) {
        const int64_t count = std::min(plan.block, last - first);
        for (int64_t i = 0; i < count; ++i) {
          for (int64_t c = 0; c < s.C; ++c) {
            torus.pack(x, data, first + i, c, image.data() + c * channel + i * torus.plane, room.data());
          }
          for (int64_t d = 0; d < s.D; ++d) {
            torus.pack_gradient(grad, grad_data, first + i, d, gradient.data() + d * grad_channel + i * vectors * L);
          }
        }
        torus.k.convolve_gradient({gradient.data(), s.D, grad_channel, columns.data(), K, in.data(), count * vectors, sums, K});
      }
    }
  });
  T* result = out.mutable_data_ptr<T>();
  double* total = partial.data();
  for (int64_t task = 1; task < plan.chunks; ++task) {
    for (int64_t i = 0; i < plan.sums; ++i) total[i] += total[task * plan.sums + i];
  }
  for (int64_t row = 0; row < s.D * s.C; ++row, total += torus.tap_count()) {
    for (const int64_t tap : torus.folded) *result++ = static_cast<T>(total[tap]);
  }
}

Tensor circular_conv2d(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const CircularConvSizes s = check_circular_conv2d(x, weight, bias);
  Tensor y = empty_of(x, {s.N, s.D, s.H, s.W});
  if (y.numel() == 0) return y;
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "circular_conv2d", [&] { convolve<scalar_t>(s, x, weight, bias, y); });
  return y;
}

Tensor circular_conv2d_weight_grad(const Tensor& grad, const Tensor& x, std::vector<int64_t> kernel_size) {
  const CircularConvSizes s = check_circular_conv2d_weight_grad(grad, x, kernel_size);
  if (grad.numel() == 0 || x.numel() == 0) return zeros_of(x, {s.D, s.C, s.kernel_h, s.kernel_w});
  Tensor out = empty_of(x, {s.D, s.C, s.kernel_h, s.kernel_w});
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "circular_conv2d_weight_grad", [&] { weight_gradient<scalar_t>(s, grad, x, out); });
  return out;
}

ELLA_REGISTER(CPU, m) {
  m.impl("circular_conv2d", TORCH_BOX(&circular_conv2d));
  m.impl("circular_conv2d_weight_grad", TORCH_BOX(&circular_conv2d_weight_grad));
}

}  // namespace
}  // namespace ella

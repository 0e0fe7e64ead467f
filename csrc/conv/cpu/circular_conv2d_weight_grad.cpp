// The gradient of a circular convolution in its weights; circular_images.h says how images are laid out.
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "conv/cpu/circular_conv2d.h"
#include "conv/cpu/circular_images.h"
#include "conv/cpu/one_component.h"
#include "conv/cpu/patch_gradient.h"
#include "conv/cpu/small_images.h"
#include "cpu/gram.h"

namespace ella {
namespace {

// Units that are summed together, and the tasks they are shared out in: from the sizes alone, for the same numbers with any
// number of threads.
template <class T>
struct GradientPlan {
  GradientPlan(const CircularLayout<T>& layout, const CircularConvSizes& s, int64_t planes, int64_t entries) {
    constexpr int64_t kVectors = 128;               // enough work between two sums over the lanes of a vector
    constexpr int64_t kBlockBytes = 512 * 1024;     // of packed images and gradients
    constexpr int64_t kSumBytes = 8 * 1024 * 1024;  // of partial sums
    const int64_t unit_bytes =
        (s.C * planes * layout.plane + s.D * layout.vectors() * layout.k.vector) * static_cast<int64_t>(sizeof(T));
    block = std::min(ceil_divide(kVectors, layout.vectors()), std::max(kBlockBytes / unit_bytes, int64_t(1)));
    block = std::min(block, layout.units);
    const int64_t blocks = ceil_divide(layout.units, block);
    sums = s.D * s.C * entries;
    const int64_t max_count = std::max(kSumBytes / (sums * static_cast<int64_t>(sizeof(double))), int64_t(1));
    chunk = ceil_divide(blocks, std::min({blocks, max_count, int64_t(16)})) * block;
    chunks = ceil_divide(layout.units, chunk);
  }
  int64_t block, chunk, chunks, sums;
};

// Tensors whose vectors need no packing, or null.
template <class T>
struct InPlace {
  const Images<T>*x = nullptr, *grad = nullptr;
};

// Where an entry of the kernel reads x: a plane of its channel and a tap.
struct Entry {
  int64_t plane, tap;
};

// sums[(d * C + c) * entries + e], the sum over images and positions of grad[d] times what entry e reads of channel c; with
// `upper`, those for c < d are not wanted. `pack_image(unit, c, plane, target, room)` writes one plane of a unit,
// `pack_gradient(unit, d, target, room)` its gradient, each with room for two; what is given as `lies.x` or `lies.grad` is read
// where it lies instead. `done(begin, end, sums)` gets those of kernels begin..end, d * C + c, from several threads.
template <class T, class PackImage, class PackGradient, class Done>
void weight_gradient(const CircularConvSizes& s, const CircularLayout<T>& layout, const InPlace<T>& lies, int64_t planes,
                     const std::vector<Entry>& entries, bool upper, const PackImage& pack_image,
                     const PackGradient& pack_gradient, const Done& done) {
  const int64_t count = static_cast<int64_t>(entries.size());
  const GradientPlan<T> plan(layout, s, planes, count);
  const int64_t L = layout.k.vector, vectors = layout.vectors(), room_size = layout.room_size();
  const Buffer<double> partial(plan.chunks * plan.sums);
  std::vector<int64_t> in, at;
  for (int64_t unit = 0; unit < plan.block; ++unit) {
    for (int64_t v = 0; v < vectors; ++v) {
      in.push_back(lies.x ? unit * lies.x->image + layout.place[v] : unit * layout.plane + layout.in[v]);
      at.push_back(lies.grad ? unit * lies.grad->image + v * L : (unit * vectors + v) * L);
    }
  }
  const int64_t plane = plan.block * layout.plane;
  const int64_t packed_channel = (plan.block * vectors + 1) * L;  // odd, for channels must not share the sets of a cache
  parallel_tasks(plan.chunks, [&](int64_t begin, int64_t end) {
    const int64_t packed_image = lies.x ? 0 : s.C * planes * plane, packed = lies.grad ? 0 : s.D * packed_channel;
    const Buffer<T> scratch(packed_image + packed + 2 * room_size);
    T *const image = scratch.data(), *const gradient = image + packed_image, *const room = gradient + packed;
    std::vector<const T*> columns;
    for (int64_t c = 0; c < s.C; ++c) {
      for (const Entry& e : entries) columns.push_back(image + (c * planes + e.plane) * plane + e.tap);
    }
    for (int64_t task = begin; task < end; ++task) {
      double* sums = partial.data() + task * plan.sums;
      std::fill_n(sums, plan.sums, 0.0);
      const int64_t last = std::min((task + 1) * plan.chunk, layout.units);
      for (int64_t first = task * plan.chunk; first < last; first += plan.block) {
        const int64_t units = std::min(plan.block, last - first);
        for (int64_t i = 0; i < units; ++i) {
          for (int64_t c = 0; c < s.C * planes && !lies.x; ++c) {
            pack_image(first + i, c / planes, c % planes, image + c * plane + i * layout.plane, room);
          }
          for (int64_t d = 0; d < s.D && !lies.grad; ++d) {
            pack_gradient(first + i, d, gradient + d * packed_channel + i * vectors * L, room);
          }
        }
        for (int64_t c = 0; c < s.C && lies.x; ++c) columns[c] = lies.x->data + first * lies.x->image + c * lies.x->channel;
        const T* g = lies.grad ? lies.grad->data + first * lies.grad->image : gradient;
        layout.k.convolve_gradient({g, at.data(), s.D, lies.grad ? lies.grad->channel : packed_channel, columns.data(),
                                    s.C * count, upper ? count : 0, in.data(), units * vectors, sums, s.C * count});
      }
    }
  });
  const int64_t kernels = s.D * s.C;
  constexpr int64_t kWorth = 1 << 14;  // elements, some microseconds
  torch::stable::parallel_for(0, kernels, std::max(kWorth / (plan.chunks * count), int64_t(1)),
                              [&](int64_t begin, int64_t end) {
                                double* total = partial.data();
                                for (int64_t task = 1; task < plan.chunks; ++task) {
                                  const double* part = total + task * plan.sums;
                                  for (int64_t i = begin * count; i < end * count; ++i) total[i] += part[i];
                                }
                                done(begin, end, total + begin * count);
                              });
}

// Every entry of the folded kernel, tap by tap.
template <class T, class Done>
void dense_gradient(const CircularConvSizes& s, const CircularLayout<T>& layout, const Images<T>& gradients,
                    const Images<T>& source, bool upper, const Done& done) {
  std::vector<Entry> entries;
  for (const int64_t tap : layout.taps) entries.push_back({0, tap});
  const bool x_in_place = layout.tap_count() == 1 && layout.reads_in_place(source);
  weight_gradient(
      s, layout, InPlace<T>{x_in_place ? &source : nullptr, layout.reads_in_place(gradients) ? &gradients : nullptr}, 1,
      entries, upper,
      [&](int64_t unit, int64_t c, int64_t, T* to, T* room) {
        layout.pack(layout.plane_of(source, unit, c), layout.images_of(unit), to, room);
      },
      [&](int64_t unit, int64_t d, T* to, T*) {
        layout.pack_gradient(layout.plane_of(gradients, unit, d), layout.images_of(unit), to);
      },
      done);
}

// Every entry of the kernel meets the gradient's only component with one of x's four: that at distance (below, beside) from it.
// `gathered`: the gradients are the components alone.
template <class T>
void component_gradient(const CircularConvSizes& s, const std::vector<int64_t>& component, bool gathered,
                        const Images<T>& gradients, const Images<T>& source, T* target) {
  const CircularConvSizes quarter = quarter_of(s);
  const CircularLayout<T> layout(quarter);
  std::vector<Entry> entries;
  for (int64_t i = 0; i < s.kernel_h; ++i) {
    for (int64_t j = 0; j < s.kernel_w; ++j) {
      // Position 2p is met with 2p + i - kernel_h / 2 = 2 (p + down) + below.
      const int64_t down = i - s.kernel_h / 2, right = j - s.kernel_w / 2, below = down & 1, beside = right & 1;
      entries.push_back({2 * below + beside,
                         layout.tap((down - below) / 2 + quarter.kernel_h / 2, (right - beside) / 2 + quarter.kernel_w / 2)});
    }
  }
  const auto gather = [&](const Images<T>& from, int64_t unit, int64_t channel, int64_t below, int64_t beside, T* to) {
    for (int64_t i = 0; i < layout.images_of(unit); ++i) {
      const int64_t n = unit * layout.at_once + i;
      gather_component(from.data + n * from.image + channel * from.channel, from.down, from.right, s, component[n] % 2 + below,
                       component[n] / 2 + beside, to + i * layout.positions());
    }
    return Plane<T>{to, layout.positions(), quarter.W, 1};
  };
  const int64_t room_size = layout.room_size();
  weight_gradient(
      s, layout, InPlace<T>{nullptr, gathered && layout.reads_in_place(gradients) ? &gradients : nullptr}, 4, entries, false,
      [&](int64_t unit, int64_t c, int64_t plane, T* to, T* room) {
        layout.pack(gather(source, unit, c, plane / 2, plane % 2, room + room_size), layout.images_of(unit), to, room);
      },
      [&](int64_t unit, int64_t d, T* to, T* room) {
        const Plane<T> plane = gathered ? layout.plane_of(gradients, unit, d) : gather(gradients, unit, d, 0, 0, room);
        layout.pack_gradient(plane, layout.images_of(unit), to);
      },
      [&](int64_t begin, int64_t end, const double* sums) {
        const int64_t taps = s.kernel_h * s.kernel_w;
        for (int64_t i = begin * taps; i < end * taps; ++i) target[i] = static_cast<T>(*sums++);
      });
}

Tensor circular_conv2d_weight_grad(const Tensor& grad, const Tensor& x, int64_t kernel_h, int64_t kernel_w) {
  const CircularConvSizes s = check_circular_conv2d_weight_grad(grad, x, kernel_h, kernel_w);
  if (grad.numel() == 0 || x.numel() == 0) return zeros_of(x, {s.D, s.C, s.kernel_h, s.kernel_w});
  Tensor out = empty_of(x, {s.D, s.C, s.kernel_h, s.kernel_w});
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "circular_conv2d_weight_grad", [&] {
    scalar_t* target = out.mutable_data_ptr<scalar_t>();
    const Images<scalar_t> gradients(grad), source(x);
    const auto components = only_components<scalar_t>(grad, s, s.D, s.C);
    const std::vector<int64_t> all;
    if (by_patches<scalar_t>(s, components.has_value())) {
      PatchGradient<scalar_t>(s, components ? *components : all, false, gradients, source).run(target);
    } else if (components) {
      component_gradient(s, *components, false, gradients, source, target);
    } else {
      const CircularLayout<scalar_t> layout(s);
      dense_gradient(s, layout, gradients, source, false, [&](int64_t begin, int64_t end, const double* sums) {
        unfold(layout.folded, layout.tap_count(), sums, end - begin, target + begin * s.kernel_h * s.kernel_w);
      });
    }
  });
  return out;
}

Tensor circular_conv2d_scattered_weight_grad(const Tensor& grad, const Tensor& index, const Tensor& x, int64_t kernel_h,
                                             int64_t kernel_w) {
  const CircularConvSizes s = check_circular_conv2d_scattered_weight_grad(grad, index, x, kernel_h, kernel_w);
  const std::vector<int64_t> component = polyphase_components("circular_conv2d_scattered_weight_grad", index);
  if (grad.numel() == 0 || x.numel() == 0) return zeros_of(x, {s.D, s.C, s.kernel_h, s.kernel_w});
  Tensor out = empty_of(x, {s.D, s.C, s.kernel_h, s.kernel_w});
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "circular_conv2d_scattered_weight_grad", [&] {
    scalar_t* target = out.mutable_data_ptr<scalar_t>();
    const Images<scalar_t> gradients(grad), source(x);
    if (by_patches<scalar_t>(s, true)) {
      PatchGradient<scalar_t>(s, component, true, gradients, source).run(target);
    } else {
      component_gradient(s, component, true, gradients, source, target);
    }
  });
  return out;
}

ELLA_REGISTER(CPU, m) {
  m.impl("circular_conv2d_weight_grad", TORCH_BOX(&circular_conv2d_weight_grad));
  m.impl("circular_conv2d_scattered_weight_grad", TORCH_BOX(&circular_conv2d_scattered_weight_grad));
}

}  // namespace

template <class T>
Lags lags_by_layout(const CircularConvSizes& s, const CircularLayout<T>& layout, const Images<T>& images) {
  const int64_t count = layout.tap_count();
  Lags lags{Buffer<double>(s.C * s.C * count), count, layout.folded};
  dense_gradient(s, layout, images, images, true, [&](int64_t begin, int64_t end, const double* sums) {
    std::copy_n(sums, (end - begin) * count, lags.sums.data() + begin * count);
  });
  return lags;
}

Lags circular_autocorrelation(const Tensor& x, int64_t half_h, int64_t half_w) {
  const int64_t C = x.size(1), kernel_h = 2 * half_h + 1, kernel_w = 2 * half_w + 1;
  CircularConvSizes s{x.size(0), C, x.size(2), x.size(3), C, kernel_h, kernel_w};
  std::optional<Lags> lags;
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "circular_autocorrelation", [&] {
    Images<scalar_t> images(x);
    if (SmallImages<scalar_t>::suits(images, s.H, s.W, kernel_h, kernel_w)) {
      const SmallImages<scalar_t> layout(images, s.N, C, s.H, s.W);
      lags = Lags{layout.lags(), s.H * s.W, layout.places(half_h, half_w)};
      return;
    }
    if (kernel_h * kernel_w == 1 && images.right == 1 && images.down == s.W) {  // pixels have no neighbours: one long row
      s.W *= s.H;
      s.H = 1;
      images.down = s.W;
    }
    lags = lags_by_layout(s, CircularLayout<scalar_t>(s), images);
  });
  return std::move(*lags);
}

template <class T>
Lags zero_autocorrelation(const Images<T>& x, int64_t N, int64_t C, int64_t H, int64_t W, int64_t half_h, int64_t half_w) {
  const CircularConvSizes s{N, C, H, W, C, 2 * half_h + 1, 2 * half_w + 1};
  return lags_by_layout(s, CircularLayout<T>(s, true), x);
}
template Lags zero_autocorrelation(const Images<float>&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
template Lags zero_autocorrelation(const Images<double>&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

}  // namespace ella

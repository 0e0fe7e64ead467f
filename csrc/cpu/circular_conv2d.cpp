// Convolution on a torus for few channels; torus.h says how images are laid out.
#include <algorithm>
#include <array>
#include <vector>

#include "dense_convolution.h"
#include "one_component.h"

namespace ella {
namespace {

// Images where they are to stay.
template <class T>
struct InResult {
  T* place(int64_t n) const { return result + n * size; }
  void done(int64_t, int64_t) const {}
  T* result;
  int64_t size;
};

// The entries of a kernel by which outputs see the only component there is, from a distance of (below, beside) in rows and
// columns: those that bring them back to it.
template <class T>
struct Seen {
  Seen(const Torus<T>& torus, const CircularConvSizes& s, const CircularConvSizes& quarter, int64_t below, int64_t beside) {
    const int64_t half_h = s.kernel_h / 2, half_w = s.kernel_w / 2;
    for (int64_t i = (half_h + below) % 2; i < s.kernel_h; i += 2) {
      for (int64_t j = (half_w + beside) % 2; j < s.kernel_w; j += 2) {
        // Output 2p + below reads 2p + below + i - half_h, which is position p + (below + i - half_h) / 2 of the component.
        const int64_t down = (below + i - half_h) / 2, right = (beside + j - half_w) / 2;
        taps.push_back(torus.tap(down + quarter.kernel_h / 2, right + quarter.kernel_w / 2));
        entries.push_back({i, j});
      }
    }
  }
  int64_t count() const { return static_cast<int64_t>(taps.size()); }

  std::vector<int64_t> taps;
  std::vector<std::array<int64_t, 2>> entries;
};

// x are the images or, if `gathered`, their components.
template <class T>
void convolve_component(const CircularConvSizes& s, const std::vector<int64_t>& component, const Tensor& x, bool gathered,
                        const Tensor& weight, const T* bias, T* result) {
  const CircularConvSizes quarter = quarter_of(s);
  const Torus<T> torus(quarter);
  std::vector<Seen<T>> seen;
  for (int64_t i = 0; i < 4; ++i) seen.emplace_back(torus, s, quarter, i / 2, i % 2);
  const Buffer<T> packed(s.D * s.C * s.kernel_h * s.kernel_w);
  const Images<T> w(weight), source(x);
  const int64_t group = balanced_group(s.D, torus.k.rows);
  std::vector<const T*> weights;
  T* next = packed.data();
  for (const Seen<T>& part : seen) {
    weights.push_back(next);
    for (int64_t first = 0; first < s.D; first += group) {
      const int64_t width = std::min(group, s.D - first);
      for (int64_t c = 0; c < s.C; ++c) {
        for (const auto& [i, j] : part.entries) {
          const T* entry = w.data + first * w.image + c * w.channel + i * w.down + j * w.right;
          for (int64_t d = 0; d < width; ++d) *next++ = entry[d * w.image];
        }
      }
    }
  }
  const int64_t lanes = torus.lanes, positions = torus.positions(), part = s.D * positions;
  parallel_tasks(torus.units, [&](int64_t begin, int64_t end) {
    const int64_t room_size = positions * lanes;
    const Buffer<T> scratch(s.C * torus.plane + 2 * room_size + (lanes == 1 ? 1 : 2) * 4 * part * lanes);
    T *const image = scratch.data(), *const room = image + s.C * torus.plane, *const own = room + room_size;
    T *const out = own + room_size, *const by_image = lanes == 1 ? out : out + 4 * part * lanes;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t count = torus.images_of(unit), n0 = unit * lanes;
      for (int64_t c = 0; c < s.C; ++c) {
        Plane<T> plane = torus.plane_of(source, unit, c);
        if (!gathered) {
          for (int64_t i = 0; i < count; ++i) {
            const int64_t only = component[n0 + i];
            gather_component(plane.data + i * plane.image, plane.down, plane.right, s, only % 2, only / 2, own + i * positions);
          }
          plane = {own, positions, quarter.W, 1};
        }
        torus.pack(plane, count, image + c * torus.plane, room);
      }
      for (size_t i = 0; i < seen.size(); ++i) {
        torus.k.convolve({image, s.C, torus.plane, seen[i].taps.data(), seen[i].count(), torus.in.data(), torus.place.data(),
                          torus.vectors(), weights[i], bias, out + static_cast<int64_t>(i) * part * lanes, s.D,
                          positions * lanes});
      }
      if (lanes > 1) torus.k.transpose(4 * part, count, out, lanes, by_image, 4 * part);
      for (int64_t i = 0; i < count; ++i) {
        join_components(by_image + i * 4 * part, part, s, s.D, component[n0 + i], result + (n0 + i) * 4 * part);
      }
    }
  });
}

Tensor circular_conv2d(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const CircularConvSizes s = check_circular_conv2d("circular_conv2d", x, weight, bias);
  Tensor y = empty_of(x, {s.N, s.D, s.H, s.W});
  if (y.numel() == 0) return y;
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "circular_conv2d", [&] {
    const std::vector<scalar_t> numbers = bias_numbers<scalar_t>(bias);
    const scalar_t* offsets = bias ? numbers.data() : nullptr;
    scalar_t* result = y.mutable_data_ptr<scalar_t>();
    if (const auto component = only_components<scalar_t>(x, s, s.C, s.D)) {
      convolve_component(s, *component, x, false, weight, offsets, result);
    } else {
      convolve(s, x, weight, offsets, [&](int64_t) { return InResult<scalar_t>{result, s.D * s.H * s.W}; });
    }
  });
  return y;
}

Tensor circular_conv2d_scattered(const Tensor& x, const Tensor& index, const Tensor& weight) {
  const CircularConvSizes s = check_circular_conv2d_scattered(x, index, weight);
  const std::vector<int64_t> component = polyphase_components("circular_conv2d_scattered", index);
  Tensor y = empty_of(x, {s.N, s.D, s.H, s.W});
  if (y.numel() == 0) return y;
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "circular_conv2d_scattered", [&] {
    convolve_component(s, component, x, true, weight, static_cast<const scalar_t*>(nullptr), y.mutable_data_ptr<scalar_t>());
  });
  return y;
}

ELLA_REGISTER(CPU, m) {
  m.impl("circular_conv2d", TORCH_BOX(&circular_conv2d));
  m.impl("circular_conv2d_scattered", TORCH_BOX(&circular_conv2d_scattered));
}

}  // namespace
}  // namespace ella

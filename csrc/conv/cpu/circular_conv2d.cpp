// Circular convolution for few channels; circular_images.h says how images are laid out.
#include <algorithm>
#include <array>
#include <vector>

#include "conv/cpu/dense_convolution.h"
#include "conv/cpu/one_component.h"

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
  Seen(const CircularLayout<T>& layout, const CircularConvSizes& s, const CircularConvSizes& quarter, int64_t below,
       int64_t beside) {
    const int64_t half_h = s.kernel_h / 2, half_w = s.kernel_w / 2;
    for (int64_t i = (half_h + below) % 2; i < s.kernel_h; i += 2) {
      for (int64_t j = (half_w + beside) % 2; j < s.kernel_w; j += 2) {
        // Output 2p + below reads 2p + below + i - half_h, which is position p + (below + i - half_h) / 2 of the component.
        const int64_t down = (below + i - half_h) / 2, right = (beside + j - half_w) / 2;
        taps.push_back(layout.tap(down + quarter.kernel_h / 2, right + quarter.kernel_w / 2));
        entries.push_back({i, j});
      }
    }
  }
  int64_t count() const { return static_cast<int64_t>(taps.size()); }

  std::vector<int64_t> taps;
  std::vector<std::array<int64_t, 2>> entries;
};

// The weights by which outputs at each of the four distances from the only component see it, one set after the other.
template <class T>
void pack_seen(const std::vector<Seen<T>>& seen, const CircularConvSizes& s, int64_t group, const Tensor& weight, T* packed) {
  const Images<T> w(weight);
  torch::stable::parallel_for(0, ceil_divide(s.D, group), 1, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * group; first < std::min(end * group, s.D); first += group) {
      const int64_t width = std::min(group, s.D - first);
      T* set = packed;
      for (const Seen<T>& part : seen) {
        T* to = set + first * s.C * part.count();
        for (int64_t c = 0; c < s.C; ++c) {
          for (const auto& [i, j] : part.entries) {
            const T* entry = w.data + first * w.image + c * w.channel + i * w.down + j * w.right;
            for (int64_t d = 0; d < width; ++d) *to++ = entry[d * w.image];
          }
        }
        set += s.D * s.C * part.count();
      }
    }
  });
}

// The work of run_units for images of which one component is not zero. x are the images or, if `gathered`, their components.
template <class T>
class ComponentConvolution {
 public:
  ComponentConvolution(const CircularLayout<T>& layout, const CircularConvSizes& s, int64_t tasks, const int64_t* component,
                       const Images<T>& x, bool gathered, const std::vector<Seen<T>>& seen, const T* weights, const T* bias,
                       T* result)
      : layout_(layout),
        s_(s),
        products_(layout, s, ceil_divide(tasks, kParts)),
        component_(component),
        x_(x),
        gathered_(gathered),
        seen_(seen),
        weights_(weights),
        bias_(bias),
        result_(result) {}

  int64_t image_size() const { return s_.C * layout_.plane; }
  int64_t room_size() const { return layout_.room_size() + images_size(); }
  int64_t result_size() const { return kParts * s_.D * (layout_.channel + (layout_.unpacked() ? 0 : images_size())); }
  int64_t pieces() const { return kParts * products_.pieces(); }
  char sink() const { return 0; }
  T* place(int64_t, T* result, char) const { return result; }

  void pack(int64_t unit, int64_t c, T* image, T* room) const {
    const int64_t count = layout_.images_of(unit), n0 = unit * layout_.at_once, positions = layout_.positions();
    Plane<T> plane = layout_.plane_of(x_, unit, c);
    if (!gathered_) {
      T* own = room + layout_.room_size();
      for (int64_t i = 0; i < count; ++i) {
        const int64_t only = component_[n0 + i];
        gather_component(plane.data + i * plane.image, plane.down, plane.right, s_, only % 2, only / 2, own + i * positions);
      }
      plane = {own, positions, s_.W / 2, 1};
    }
    layout_.pack(plane, count, image + c * layout_.plane, room);
  }

  void multiply(int64_t unit, int64_t begin, int64_t end, const T* image, T* out) const {
    const int64_t pieces = products_.pieces();
    const T* weights = weights_;
    for (int64_t i = 0; i < kParts; ++i, begin -= pieces, end -= pieces) {
      products_.run(std::max(begin, int64_t(0)), std::min(end, pieces), layout_.images_of(unit), image, seen_[i].taps,
                    {weights, 0, 0}, bias_, out + i * s_.D * layout_.channel);
      weights += s_.D * s_.C * seen_[i].count();
    }
  }

  void finish(int64_t unit, T* out, char) const {
    const int64_t part = s_.D * layout_.positions(), count = layout_.images_of(unit);
    T* by_image = out;
    if (!layout_.unpacked()) {
      by_image += kParts * s_.D * layout_.channel;
      layout_.unpack(count, kParts * s_.D, out, by_image);
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t n = unit * layout_.at_once + i;
      join_components(by_image + i * kParts * part, part, s_, s_.D, component_[n], result_ + n * kParts * part);
    }
  }

 private:
  static constexpr int64_t kParts = 4;  // of an image
  int64_t images_size() const { return layout_.at_once * layout_.positions(); }

  const CircularLayout<T>& layout_;
  const CircularConvSizes& s_;
  const Products<T> products_;
  const int64_t* const component_;
  const Images<T>& x_;
  const bool gathered_;
  const std::vector<Seen<T>>& seen_;
  const T *const weights_, *const bias_;
  T* const result_;
};

// x are the images or, if `gathered`, their components.
template <class T>
void convolve_component(const CircularConvSizes& s, const std::vector<int64_t>& component, const Tensor& x, bool gathered,
                        const Tensor& weight, const T* bias, T* result) {
  const Buffer<T> packed(s.D * s.C * s.kernel_h * s.kernel_w);
  const Images<T> images(x);
  whole_and_rest(s, images_in_vectors<T>(quarter_of(s)), [&](int64_t first, const CircularConvSizes& part) {
    const CircularConvSizes quarter = quarter_of(part);
    const CircularLayout<T> layout(quarter);
    const Images<T> source = images.from(first);
    std::vector<Seen<T>> seen;
    for (int64_t i = 0; i < 4; ++i) seen.emplace_back(layout, s, quarter, i / 2, i % 2);
    if (first == 0) pack_seen(seen, s, balanced_group(s.D, layout.k.rows), weight, packed.data());
    const Sharing sharing =
        sharing_of<T>(layout.units, s.D * s.C * s.kernel_h * s.kernel_w * layout.vectors() * layout.k.vector,
                      s.C * layout.plane + 8 * s.D * layout.channel);
    run_units<T>(ComponentConvolution<T>(layout, part, sharing.tasks, component.data() + first, source, gathered, seen,
                                         packed.data(), bias, result + first * s.D * s.H * s.W),
                 layout.units, s.C, sharing);
  });
}

Tensor circular_conv2d(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const CircularConvSizes s = check_circular_conv2d("circular_conv2d", x, weight, bias);
  Tensor y = empty_of(x, {s.N, s.D, s.H, s.W});
  if (y.numel() == 0) return y;
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "circular_conv2d", [&] {
    const std::vector<scalar_t> elements = bias_elements<scalar_t>(bias);
    const scalar_t* offsets = bias ? elements.data() : nullptr;
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

// Circular convolution of images all of whose elements count; circular_images.h says how they are laid out.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "conv/cpu/convolve_units.h"

namespace ella {

// Whether the entries of the kernel are the taps, one after the other.
template <class T>
bool taps_in_order(const CircularLayout<T>& layout, const CircularConvSizes& s, const Images<T>& w) {
  return layout.tap_count() == s.kernel_h * s.kernel_w && (s.kernel_w == 1 || w.right == 1) &&
         (s.kernel_h == 1 || w.down == s.kernel_w);
}

// The folded kernel as packed Weights, D * C * tap_count() elements.
template <class T>
void pack_weight(const CircularLayout<T>& layout, const CircularConvSizes& s, const Images<T>& w, T* packed) {
  constexpr int64_t kWorth = 1 << 15;  // elements for which threads are called
  const int64_t taps = layout.tap_count(), kernel = s.kernel_h * s.kernel_w, K = s.C * taps;
  const int64_t group = balanced_group(s.D, layout.k.rows), groups = ceil_divide(s.D, group);
  const bool whole = taps_in_order(layout, s, w);
  const auto pack_groups = [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * group; first < std::min(end * group, s.D); first += group) {
      const int64_t width = std::min(group, s.D - first);
      const T* from = w.data + first * w.image;
      T* to = packed + first * K;
      if (whole && (s.C == 1 || w.channel == kernel)) {
        layout.k.transpose(width, K, from, w.image, to, width);
        continue;
      }
      for (int64_t c = 0; c < s.C; ++c, from += w.channel, to += taps * width) {
        if (whole) {
          layout.k.transpose(width, kernel, from, w.image, to, width);
          continue;
        }
        std::fill_n(to, taps * width, T(0));
        const int64_t* tap = layout.folded.data();
        for (int64_t i = 0; i < s.kernel_h; ++i) {
          for (int64_t j = 0; j < s.kernel_w; ++j, ++tap) {
            for (int64_t d = 0; d < width; ++d) to[*tap * width + d] += from[d * w.image + i * w.down + j * w.right];
          }
        }
      }
    }
  };
  if (s.D * K < kWorth) {
    pack_groups(0, groups);
  } else {
    torch::stable::parallel_for(0, groups, 1, pack_groups);
  }
}

// A bias one number after the other; empty without one.
template <class T>
std::vector<T> bias_elements(const std::optional<Tensor>& bias) {
  std::vector<T> out(bias ? bias->size(0) : 0);
  for (size_t d = 0; d < out.size(); ++d) out[d] = bias->const_data_ptr<T>()[static_cast<int64_t>(d) * bias->stride(0)];
  return out;
}

// The work of run_units.
template <class T, class MakeSink>
class DenseConvolution {
 public:
  DenseConvolution(const CircularLayout<T>& layout, const CircularConvSizes& s, int64_t tasks, const Images<T>& x,
                   const Weights<T>& weights, const T* bias, const MakeSink& make_sink, int64_t first)
      : layout_(layout),
        s_(s),
        products_(layout, s, tasks),
        x_(x),
        weights_(weights),
        bias_(bias),
        make_sink_(make_sink),
        first_(first) {}

  int64_t image_size() const { return s_.C * layout_.plane; }
  int64_t room_size() const { return layout_.room_size(); }
  int64_t result_size() const { return layout_.unpacked() ? 0 : s_.D * layout_.channel; }
  int64_t pieces() const { return products_.pieces(); }
  auto sink() const { return make_sink_(layout_.at_once); }

  void pack(int64_t unit, int64_t c, T* image, T* room) const {
    layout_.pack(layout_.plane_of(x_, unit, c), layout_.images_of(unit), image + c * layout_.plane, room);
  }
  template <class Sink>
  T* place(int64_t unit, T* result, Sink& sink) const {
    return layout_.unpacked() ? sink.place(first_ + unit * layout_.at_once) : result;
  }
  void multiply(int64_t unit, int64_t begin, int64_t end, const T* image, T* out) const {
    products_.run(begin, end, layout_.images_of(unit), image, layout_.taps, weights_, bias_, out);
  }
  template <class Sink>
  void finish(int64_t unit, const T* out, Sink& sink) const {
    const int64_t n = first_ + unit * layout_.at_once, count = layout_.images_of(unit);
    if (!layout_.unpacked()) layout_.unpack(count, s_.D, out, sink.place(n));
    sink.done(n, count);
  }

 private:
  const CircularLayout<T>& layout_;
  const CircularConvSizes& s_;
  const Products<T> products_;
  const Images<T>& x_;
  const Weights<T> weights_;
  const T* const bias_;
  const MakeSink& make_sink_;
  const int64_t first_;  // image of the sink
};

// Sends every image's convolution to a sink: `make_sink(max_count)` is called for every thread or unit that needs one,
// `sink.place(n)` says where image n and those behind it, at most `max_count` of them, (D, H, W) each, are to be, and
// `sink.done(n, count)` that so many are there.
template <class T, class MakeSink>
void convolve(const CircularConvSizes& s, const Tensor& x, const Tensor& weight, const T* bias, const MakeSink& make_sink) {
  constexpr int64_t kFew = 4;  // vectors for which packing weights takes too much of the time
  const Images<T> w(weight);
  std::optional<Buffer<T>> packed;
  const Images<T> images(x);
  whole_and_rest(s, images_in_vectors<T>(s), [&](int64_t first, const CircularConvSizes& part) {
    const CircularLayout<T> layout(part);
    const Images<T> source = images.from(first);
    Weights<T> weights{w.data, w.image, w.channel};
    if (packed || layout.units * layout.vectors() > kFew || !taps_in_order(layout, s, w) || w.image == 0) {
      if (!packed) pack_weight(layout, s, w, packed.emplace(s.D * s.C * layout.tap_count()).data());
      weights = {packed->data(), 0, 0};
    }
    const Sharing sharing = sharing_of<T>(layout.units, s.D * s.C * layout.tap_count() * layout.vectors() * layout.k.vector,
                                          s.C * layout.plane + 2 * s.D * layout.channel);
    run_units<T>(DenseConvolution<T, MakeSink>(layout, part, sharing.tasks, source, weights, bias, make_sink, first),
                 layout.units, s.C, sharing);
  });
}

}  // namespace ella

// Convolution on a torus of images all of whose numbers count; torus.h says how they are laid out.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "gram.h"
#include "torus.h"

namespace ella {

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

// A bias one number after the other; empty without one.
template <class T>
std::vector<T> bias_numbers(const std::optional<Tensor>& bias) {
  std::vector<T> out(bias ? bias->size(0) : 0);
  for (size_t d = 0; d < out.size(); ++d) out[d] = bias->const_data_ptr<T>()[static_cast<int64_t>(d) * bias->stride(0)];
  return out;
}

// Sends every image's convolution to a sink: `make_sink(most)` is called once by every thread, `sink.place(n)` says where image
// n and those behind it, at most `most` of them, (D, H, W) each, are to be, and `sink.done(n, count)` that so many are there.
template <class T, class MakeSink>
void convolve(const CircularConvSizes& s, const Tensor& x, const Tensor& weight, const T* bias, const MakeSink& make_sink) {
  const Torus<T> torus(s);
  const Buffer<T> packed(s.D * s.C * torus.tap_count());
  pack_weight(torus, s, weight, packed.data());
  const Images<T> source(x);
  const int64_t lanes = torus.lanes, positions = torus.positions();
  parallel_tasks(torus.units, [&](int64_t begin, int64_t end) {
    const Buffer<T> scratch(s.C * torus.plane + (lanes == 1 ? 0 : s.D * positions * lanes));
    T *const image = scratch.data(), *const room = image + s.C * torus.plane;
    auto sink = make_sink(lanes);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t count = torus.images_of(unit);
      for (int64_t c = 0; c < s.C; ++c) torus.pack(torus.plane_of(source, unit, c), count, image + c * torus.plane, room);
      T* out = sink.place(unit * lanes);
      torus.k.convolve({image, s.C, torus.plane, torus.taps.data(), torus.tap_count(), torus.in.data(), torus.place.data(),
                        torus.vectors(), packed.data(), bias, lanes == 1 ? out : room, s.D, positions * lanes});
      if (lanes > 1) torus.k.transpose(s.D * positions, count, room, lanes, out, s.D * positions);
      sink.done(unit * lanes, count);
    }
  });
}

}  // namespace ella

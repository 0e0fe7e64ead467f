// Convolution on a torus of images all of whose numbers count; torus.h says how they are laid out.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "convolve_units.h"

namespace ella {

// Whether the entries of the kernel are the taps, one after the other.
template <class T>
bool taps_in_order(const Torus<T>& torus, const CircularConvSizes& s, const Images<T>& w) {
  return torus.tap_count() == s.kernel_h * s.kernel_w && (s.kernel_w == 1 || w.right == 1) &&
         (s.kernel_h == 1 || w.down == s.kernel_w);
}

// The folded kernel as packed Weights, D * C * tap_count() numbers.
template <class T>
void pack_weight(const Torus<T>& torus, const CircularConvSizes& s, const Images<T>& w, T* packed) {
  constexpr int64_t kWorth = 1 << 15;  // numbers for which threads are called
  const int64_t taps = torus.tap_count(), kernel = s.kernel_h * s.kernel_w, K = s.C * taps;
  const int64_t group = balanced_group(s.D, torus.k.rows), groups = ceil_divide(s.D, group);
  const bool whole = taps_in_order(torus, s, w);
  const auto pack_groups = [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * group; first < std::min(end * group, s.D); first += group) {
      const int64_t width = std::min(group, s.D - first);
      const T* from = w.data + first * w.image;
      T* to = packed + first * K;
      if (whole && (s.C == 1 || w.channel == kernel)) {
        torus.k.transpose(width, K, from, w.image, to, width);
        continue;
      }
      for (int64_t c = 0; c < s.C; ++c, from += w.channel, to += taps * width) {
        if (whole) {
          torus.k.transpose(width, kernel, from, w.image, to, width);
          continue;
        }
        std::fill_n(to, taps * width, T(0));
        const int64_t* tap = torus.folded.data();
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
std::vector<T> bias_numbers(const std::optional<Tensor>& bias) {
  std::vector<T> out(bias ? bias->size(0) : 0);
  for (size_t d = 0; d < out.size(); ++d) out[d] = bias->const_data_ptr<T>()[static_cast<int64_t>(d) * bias->stride(0)];
  return out;
}

// The work of run_units.
template <class T, class MakeSink>
class DenseConvolution {
 public:
  DenseConvolution(const Torus<T>& torus, const CircularConvSizes& s, int64_t tasks, const Images<T>& x,
                   const Weights<T>& weights, const T* bias, const MakeSink& make_sink, int64_t first)
      : torus_(torus),
        s_(s),
        products_(torus, s, tasks),
        x_(x),
        weights_(weights),
        bias_(bias),
        make_sink_(make_sink),
        first_(first) {}

  int64_t image_size() const { return s_.C * torus_.plane; }
  int64_t room_size() const { return torus_.room_size(); }
  int64_t result_size() const { return torus_.unpacked() ? 0 : s_.D * torus_.channel; }
  int64_t pieces() const { return products_.pieces(); }
  auto sink() const { return make_sink_(torus_.at_once); }

  void pack(int64_t unit, int64_t c, T* image, T* room) const {
    torus_.pack(torus_.plane_of(x_, unit, c), torus_.images_of(unit), image + c * torus_.plane, room);
  }
  template <class Sink>
  T* place(int64_t unit, T* result, Sink& sink) const {
    return torus_.unpacked() ? sink.place(first_ + unit * torus_.at_once) : result;
  }
  void multiply(int64_t unit, int64_t begin, int64_t end, const T* image, T* out) const {
    products_.run(begin, end, torus_.images_of(unit), image, torus_.taps, weights_, bias_, out);
  }
  template <class Sink>
  void finish(int64_t unit, const T* out, Sink& sink) const {
    const int64_t n = first_ + unit * torus_.at_once, count = torus_.images_of(unit);
    if (!torus_.unpacked()) torus_.unpack(count, s_.D, out, sink.place(n));
    sink.done(n, count);
  }

 private:
  const Torus<T>& torus_;
  const CircularConvSizes& s_;
  const Products<T> products_;
  const Images<T>& x_;
  const Weights<T> weights_;
  const T* const bias_;
  const MakeSink& make_sink_;
  const int64_t first_;  // image of the sink
};

// Sends every image's convolution to a sink: `make_sink(most)` is called for every thread or unit that needs one,
// `sink.place(n)` says where image n and those behind it, at most `most` of them, (D, H, W) each, are to be, and `sink.done(n,
// count)` that so many are there.
template <class T, class MakeSink>
void convolve(const CircularConvSizes& s, const Tensor& x, const Tensor& weight, const T* bias, const MakeSink& make_sink) {
  constexpr int64_t kFew = 4;  // vectors for which packing weights takes too much of the time
  const Images<T> w(weight);
  std::optional<Buffer<T>> packed;
  const Images<T> images(x);
  whole_and_rest(s, images_in_vectors<T>(s), [&](int64_t first, const CircularConvSizes& part) {
    const Torus<T> torus(part);
    const Images<T> source = images.from(first);
    Weights<T> weights{w.data, w.image, w.channel};
    if (packed || torus.units * torus.vectors() > kFew || !taps_in_order(torus, s, w) || w.image == 0) {
      if (!packed) pack_weight(torus, s, w, packed.emplace(s.D * s.C * torus.tap_count()).data());
      weights = {packed->data(), 0, 0};
    }
    const Sharing sharing = sharing_of<T>(torus.units, s.D * s.C * torus.tap_count() * torus.vectors() * torus.k.vector,
                                          s.C * torus.plane + 2 * s.D * torus.channel);
    run_units<T>(DenseConvolution<T, MakeSink>(torus, part, sharing.tasks, source, weights, bias, make_sink, first),
                 torus.units, s.C, sharing);
  });
}

}  // namespace ella

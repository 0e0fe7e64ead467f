// How a convolution shares out its units (torus.h), and the products of one of them, among threads.
#pragma once

#include <algorithm>
#include <vector>

#include "gram.h"
#include "torus.h"

namespace ella {

// The products of a unit with the weights, in pieces: groups of outputs for a part of the vectors.
template <class T>
class Products {
 public:
  // As many pieces as `tasks` if there are. Those of one row of an image, which may overlap, are not parted.
  Products(const Torus<T>& torus, const CircularConvSizes& s, int64_t tasks)
      : torus_(torus), C_(s.C), D_(s.D), group_(balanced_group(s.D, torus.k.rows)), groups_(ceil_divide(s.D, group_)) {
    constexpr int64_t kTile = 4;  // vectors of a register tile
    const int64_t vectors = torus.vectors(), parts = std::clamp(vectors / kTile, int64_t(1), ceil_divide(tasks, groups_));
    const int64_t together = torus.in_rows() ? ceil_divide(s.W, torus.k.vector) : kTile;
    step_ = ceil_divide(ceil_divide(vectors, parts), together) * together;
    parts_ = ceil_divide(vectors, step_);
  }

  int64_t pieces() const { return groups_ * parts_; }

  // Pieces begin..end for the `count` images of a unit, packed at `image`; `weights` of all outputs, `out` D
  // channels.
  void run(int64_t begin, int64_t end, int64_t count, const T* image, const std::vector<int64_t>& taps,
           const Weights<T>& weights, const T* bias, T* out) const {
    const int64_t tap_count = static_cast<int64_t>(taps.size()), vectors = torus_.vectors_of(count);
    while (begin < end) {
      const int64_t first = begin % groups_ * group_, here = std::min(groups_ - begin % groups_, end - begin);
      const int64_t at = begin / groups_ * step_;
      if (at < vectors) {
        torus_.k.convolve({image, C_, torus_.plane, taps.data(), tap_count, torus_.in.data() + at, torus_.place.data() + at,
                           std::min(step_, vectors - at), from(first, tap_count, weights), bias ? bias + first : nullptr,
                           out + first * torus_.channel, std::min(here * group_, D_ - first), group_, torus_.channel});
      }
      begin += here;
    }
  }

 private:
  // The weights from output channel `first` on.
  Weights<T> from(int64_t first, int64_t tap_count, const Weights<T>& weights) const {
    const int64_t row = weights.out_channel == 0 ? C_ * tap_count : weights.out_channel;
    return {weights.data + first * row, weights.out_channel, weights.channel};
  }

  const Torus<T>& torus_;
  const int64_t C_, D_, group_, groups_;
  int64_t step_, parts_;
};

// Does a Work's steps for every unit: `pack(unit, c, image, room)` for all channels, `multiply(unit, begin, end, image, out)`
// for all its pieces(), `finish(unit, out, sink)`, with image_size(), room_size() and result_size() numbers of scratch; out is
// what `place(unit, result, sink)` says, and sink() makes a sink, one for each thread that has units. `tasks` as said by
// tasks_of_unit.
template <class T, class Work>
void run_units(const Work& work, int64_t units, int64_t channels, int64_t tasks) {
  if (tasks == 1) {
    parallel_tasks(units, [&](int64_t begin, int64_t end) {
      const Buffer<T> image(work.image_size()), room(work.room_size()), result(work.result_size());
      auto sink = work.sink();
      for (int64_t unit = begin; unit < end; ++unit) {
        for (int64_t c = 0; c < channels; ++c) work.pack(unit, c, image.data(), room.data());
        T* out = work.place(unit, result.data(), sink);
        work.multiply(unit, 0, work.pieces(), image.data(), out);
        work.finish(unit, out, sink);
      }
    });
    return;
  }
  const Buffer<T> image(work.image_size()), result(work.result_size());
  auto sink = work.sink();
  for (int64_t unit = 0; unit < units; ++unit) {
    constexpr int64_t kAtOnce = 8;  // channels, for little is done to one
    parallel_tasks(ceil_divide(channels, kAtOnce), [&](int64_t begin, int64_t end) {
      const Buffer<T> room(work.room_size());
      for (int64_t c = begin * kAtOnce; c < std::min(end * kAtOnce, channels); ++c)
        work.pack(unit, c, image.data(), room.data());
    });
    T* out = work.place(unit, result.data(), sink);
    parallel_tasks(work.pieces(), [&](int64_t begin, int64_t end) { work.multiply(unit, begin, end, image.data(), out); });
    work.finish(unit, out, sink);
  }
}

// Tasks that a unit is shared out in, one where units are better done side by side. They are done one after the other, each by
// all threads, where a fifth of the threads' time would else be lost at the end, and where there are so many products in each
// that calling threads for a part of them is worth it.
inline int64_t tasks_of_unit(int64_t units, int64_t products) {
  constexpr int64_t kWorth = 1 << 20;
  const int64_t threads = torch::stable::get_num_threads(), rounds = ceil_divide(units, threads);
  return 5 * units < 4 * threads * rounds && products > kWorth ? 4 * threads : 1;
}

// Calls f(first image, sizes) for the `whole` images that fill vectors and for those that are left.
template <class F>
void whole_and_rest(const CircularConvSizes& s, int64_t whole, const F& f) {
  CircularConvSizes part = s;
  part.N = whole;
  if (whole > 0) f(int64_t(0), part);
  part.N = s.N - whole;
  if (part.N > 0) f(whole, part);
}

}  // namespace ella

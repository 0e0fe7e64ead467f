// How a convolution shares out its units (circular_images.h), and the products of one of them, among threads.
#pragma once

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "conv/cpu/circular_images.h"
#include "cpu/gram.h"

namespace ella {

// The products of a unit with the weights, in pieces: groups of outputs for a part of the vectors.
template <class T>
class Products {
 public:
  // As many pieces as `tasks` if there are. Those of one row of an image, which may overlap, are not parted.
  Products(const CircularLayout<T>& layout, const CircularConvSizes& s, int64_t tasks)
      : layout_(layout), C_(s.C), D_(s.D), group_(balanced_group(s.D, layout.k.rows)), groups_(ceil_divide(s.D, group_)) {
    constexpr int64_t kTile = 4;  // vectors of a register tile
    const int64_t vectors = layout.vectors(), parts = std::clamp(vectors / kTile, int64_t(1), ceil_divide(tasks, groups_));
    const int64_t together = layout.in_rows() ? ceil_divide(s.W, layout.k.vector) : kTile;
    step_ = ceil_divide(ceil_divide(vectors, parts), together) * together;
    parts_ = ceil_divide(vectors, step_);
  }

  int64_t pieces() const { return groups_ * parts_; }

  // Pieces begin..end for the `count` images of a unit, packed at `image`; `weights` of all outputs, `out` D
  // channels.
  void run(int64_t begin, int64_t end, int64_t count, const T* image, const std::vector<int64_t>& taps,
           const Weights<T>& weights, const T* bias, T* out) const {
    const int64_t tap_count = static_cast<int64_t>(taps.size()), vectors = layout_.vectors_of(count);
    while (begin < end) {
      const int64_t first = begin % groups_ * group_, here = std::min(groups_ - begin % groups_, end - begin);
      const int64_t at = begin / groups_ * step_;
      if (at < vectors) {
        layout_.k.convolve({image, C_, layout_.plane, taps.data(), tap_count, layout_.in.data() + at, layout_.place.data() + at,
                            std::min(step_, vectors - at), from(first, tap_count, weights), bias ? bias + first : nullptr,
                            out + first * layout_.channel, std::min(here * group_, D_ - first), group_, layout_.channel});
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

  const CircularLayout<T>& layout_;
  const int64_t C_, D_, group_, groups_;
  int64_t step_, parts_;
};

// How units are shared out: side by side, each a thread's, where `together` is 0; or so many at a time, every step of them by
// all threads, their products in `tasks` tasks a unit.
struct Sharing {
  int64_t together, tasks;
};

// All threads do a step of some units together where a fifth of the threads' time would else be lost at the end, and where
// there are so many products in a unit that calling threads for a part of them is worth it. `elements` is the scratch of one.
template <class T>
Sharing sharing_of(int64_t units, int64_t products, int64_t elements) {
  constexpr int64_t kWorth = 1 << 20, kBytes = 32 << 20;
  const int64_t threads = torch::stable::get_num_threads(), rounds = ceil_divide(units, threads);
  if (5 * units >= 4 * threads * rounds || products <= kWorth) return {0, 1};
  const int64_t bytes = std::max(elements, int64_t(1)) * static_cast<int64_t>(sizeof(T));
  const int64_t together = balanced_group(units, std::clamp(kBytes / bytes, int64_t(1), threads));
  return {together, ceil_divide(4 * threads, together)};
}

// Does a Work's steps for every unit: `pack(unit, c, image, room)` for all channels, `multiply(unit, begin, end, image, out)`
// for all its pieces(), `finish(unit, out, sink)`, with image_size(), room_size() and result_size() elements of scratch; out is
// what `place(unit, result, sink)` says, and sink() makes a sink, for the units of a thread or for one.
template <class T, class Work>
void run_units(const Work& work, int64_t units, int64_t channels, const Sharing& sharing) {
  if (sharing.together == 0) {
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
  constexpr int64_t kAtOnce = 8;  // channels, for little is done to one
  const int64_t max_count = std::min(sharing.together, units), parts = ceil_divide(channels, kAtOnce), pieces = work.pieces();
  const Buffer<T> images(max_count * work.image_size()), results(max_count * work.result_size());
  struct Own {
    explicit Own(const Work& work) : sink(work.sink()) {}
    decltype(std::declval<const Work&>().sink()) sink;
  };
  std::deque<Own> units_own;  // which need not be movable
  for (int64_t i = 0; i < max_count; ++i) units_own.emplace_back(work);
  std::vector<T*> out(max_count);
  for (int64_t first = 0; first < units; first += max_count) {
    const int64_t count = std::min(max_count, units - first);
    for (int64_t i = 0; i < count; ++i)
      out[i] = work.place(first + i, results.data() + i * work.result_size(), units_own[i].sink);
    parallel_tasks(count * parts, [&](int64_t begin, int64_t end) {
      const Buffer<T> room(work.room_size());
      for (int64_t task = begin; task < end; ++task) {
        const int64_t i = task / parts, c0 = task % parts * kAtOnce;
        for (int64_t c = c0; c < std::min(c0 + kAtOnce, channels); ++c) {
          work.pack(first + i, c, images.data() + i * work.image_size(), room.data());
        }
      }
    });
    parallel_tasks(count * pieces, [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const int64_t i = begin / pieces, last = std::min(end, (i + 1) * pieces);
        work.multiply(first + i, begin - i * pieces, last - i * pieces, images.data() + i * work.image_size(), out[i]);
        begin = last;
      }
    });
    parallel_tasks(count, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) work.finish(first + i, out[i], units_own[i].sink);
    });
  }
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

// affine_copies and its gradients. An image is cut into cells of four numbers once for all of its copies; places of some rows
// of a copy are computed once for all channels. Neither a grid nor repeated images exist. Work is cut by sizes alone, one
// thread owns the gradient of an image's channels, and sums over images are added in order: no result depends on threads.
#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

#include "affine/checks.h"
#include "affine/coordinates.h"
#include "cpu/gram.h"

namespace ella {
namespace {

constexpr int64_t kPlaces = 1024;           // at once, in the first-level cache with what is computed for them
constexpr int64_t kCellBytes = 512 * 1024;  // of cells at once: half of a second-level cache
constexpr int64_t kTasks = 32;              // wanted at least

template <class T>
struct Maps {
  const T* data = nullptr;
  int64_t image = 0, copy = 0, row = 0, column = 0;  // strides

  Maps(const AffineSizes& s, const std::optional<Tensor>& maps) {
    if (!maps) return;
    data = maps->const_data_ptr<T>();
    image = s.shared ? 0 : maps->stride(0), copy = maps->stride(1), row = maps->stride(2), column = maps->stride(3);
  }
  AffineCoordinates at(int64_t n, int64_t s, const AffineScales& scales, bool origin) const {
    return affine_coordinates(data + n * image + s * copy, row, column, scales, origin);
  }
};

template <class T>
bool finite(const AffineCoordinates& p) {
  bool all = true;
  for (int k = 0; k < 3; ++k) all = all && std::isfinite(static_cast<T>(p.u[k])) && std::isfinite(static_cast<T>(p.v[k]));
  return all;
}

// What both ops share: the cells of some channels of an image, and the places of some rows of a copy.
template <class T>
class Walk {
 public:
  Walk(const AffineSizes& s, const Tensor& x, const Tensor& maps, const std::optional<Tensor>& direction)
      : s_(s),
        k_(kernels<T>()),
        x_(x),
        scales_(s.H, s.W),
        maps_(s, maps),
        directions_(s, direction),
        cells_channel_(4 * ((s.H + 1) * (s.W + 1) + 1)),
        channels_(balanced_group(s.C, std::max(kCellBytes / (cells_channel_ * int64_t(sizeof(T))), int64_t{1}))),
        rows_(std::clamp(kPlaces / s.W, int64_t{1}, s.H)) {}

 protected:
  // Of one thread.
  struct Scratch {
    explicit Scratch(const Walk& w)
        : cell(w.rows_ * w.s_.W + kAffineSlack), numbers(4 * w.places()), edges(2 * (w.s_.W + 2)), cells(w.cells()) {}
    const Buffer<int32_t> cell;
    const Buffer<T> numbers, edges, cells;
  };

  int64_t places() const { return rows_ * s_.W + kAffineSlack; }
  int64_t cells() const { return channels_ * cells_channel_; }

  // The coefficients of the cells of `count` channels of image n.
  void cut(int64_t n, int64_t first, int64_t count, const Scratch& scratch) const {
    const int64_t W = s_.W, sh = x_.stride(2), sw = x_.stride(3);
    for (int64_t c = 0; c < count; ++c) {
      const T* plane = x_.const_data_ptr<T>() + n * x_.stride(0) + (first + c) * x_.stride(1);
      T *above = scratch.edges.data(), *below = above + W + 2, *cell = scratch.cells.data() + c * cells_channel_;
      std::fill_n(above, 2 * (W + 2), T(0));
      for (int64_t i = 0; i <= s_.H; ++i) {
        for (int64_t j = 0; j < W; ++j) below[j + 1] = i < s_.H ? plane[i * sh + j * sw] : T(0);
        for (int64_t j = 0; j <= W; ++j, cell += 4) {
          const T right = above[j + 1] - above[j];
          cell[0] = above[j];
          cell[1] = right;
          cell[2] = below[j] - above[j];
          cell[3] = (below[j + 1] - below[j]) - right;
        }
        std::swap(above, below);
      }
      std::fill_n(cell, 4, T(0));
    }
  }

  // Calls f(first row, places) for some rows at a time of copy s of image n; f(0, null) once where its map is not finite.
  template <class F>
  void each_block(int64_t n, int64_t s, const Scratch& scratch, const F& f) const {
    const AffineCoordinates map = maps_.at(n, s, scales_, true);
    if (!finite<T>(map)) return f(int64_t{0}, int64_t{0}, static_cast<const AffinePlaces<T>*>(nullptr));
    T *right = scratch.numbers.data(), *down = right + places(), *right_moves = nullptr, *down_moves = nullptr;
    AffineCoordinates direction{};
    if (directions_.data) {
      direction = directions_.at(n, s, scales_, false);
      right_moves = down + places(), down_moves = right_moves + places();
    }
    const AffinePlaces<T> places{scratch.cell.data(), right, down, right_moves, down_moves};
    for (int64_t row = 0; row < s_.H; row += rows_) {
      const int64_t rows = std::min(rows_, s_.H - row);
      k_.affine_places(map, s_.H, s_.W, row, rows, scratch.cell.data(), right, down);
      if (right_moves) k_.affine_moves(direction, s_.W, row, rows, right_moves, down_moves);
      f(row, rows, &places);
    }
  }

  const AffineSizes s_;
  const Kernels<T>& k_;
  const Tensor& x_;
  const AffineScales scales_;
  const Maps<T> maps_, directions_;
  const int64_t cells_channel_;    // numbers of a channel's cells
  const int64_t channels_, rows_;  // at once
};

template <class T>
class Copies : private Walk<T> {
  using Walk<T>::s_, Walk<T>::k_, Walk<T>::channels_, Walk<T>::cells_channel_;

 public:
  using Walk<T>::Walk;

  void run(const Tensor& result) const {
    const int64_t plane = s_.H * s_.W, copies = balanced_group(s_.S, ceil_divide(s_.S, ceil_divide(kTasks, s_.N)));
    const int64_t groups = ceil_divide(s_.S, copies);
    T* const out = result.mutable_data_ptr<T>();
    parallel_tasks(s_.N * groups, [&](int64_t begin, int64_t end) {
      const typename Walk<T>::Scratch scratch(*this);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t n = task / groups, first = task % groups * copies;
        for (int64_t c0 = 0; c0 < s_.C; c0 += channels_) {
          const int64_t count = std::min(channels_, s_.C - c0);
          this->cut(n, c0, count, scratch);
          for (int64_t s = first; s < std::min(first + copies, s_.S); ++s) {
            T* const to = out + ((n * s_.S + s) * s_.C + c0) * plane;
            this->each_block(n, s, scratch, [&](int64_t row, int64_t rows, const AffinePlaces<T>* places) {
              if (!places) return void(std::fill_n(to, count * plane, static_cast<T>(NAN)));
              for (int64_t c = 0; c < count; ++c) {
                k_.affine_sample(rows * s_.W, *places, scratch.cells.data() + c * cells_channel_, to + c * plane + row * s_.W);
              }
            });
          }
        }
      }
    });
  }
};

template <class T>
class Gradients : private Walk<T> {
  using Walk<T>::s_, Walk<T>::k_, Walk<T>::scales_, Walk<T>::channels_, Walk<T>::cells_channel_, Walk<T>::rows_;

 public:
  Gradients(const AffineSizes& s, const Tensor& grad, const Tensor& x, const Tensor& maps,
            const std::optional<Tensor>& direction)
      : Walk<T>(s, x, maps, direction),
        grad_(grad),
        column_(this->places()),
        row_(this->places()),
        planes_(grad.stride(4) == 1 && grad.stride(3) == s.W) {
    for (int64_t p = 0; p < this->places(); ++p) {
      const bool there = p < rows_ * s.W;
      column_.data()[p] = there ? static_cast<T>(static_cast<double>(p % s.W) - scales_.a) : T(0);
      row_.data()[p] = there ? static_cast<T>(p / s.W) : T(0);
    }
  }

  // Null for a gradient that is not wanted.
  void run(const Tensor* grad_x, const Tensor* grad_maps) const {
    // A task has an image, channels and, where their gradient is no one task's, copies.
    const int64_t share = balanced_group(s_.C, ceil_divide(s_.C, ceil_divide(kTasks, s_.N)));
    const int64_t shares = ceil_divide(s_.C, share);
    const int64_t copies = grad_x ? s_.S : balanced_group(s_.S, ceil_divide(s_.S, ceil_divide(kTasks, s_.N * shares)));
    const int64_t groups = ceil_divide(s_.S, copies);
    const Buffer<double> sums(grad_maps ? s_.N * s_.S * shares * 6 : 0);
    parallel_tasks(s_.N * shares * groups, [&](int64_t begin, int64_t end) {
      const Own own(*this, grad_x != nullptr);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t n = task / groups / shares, part = task / groups % shares, s0 = task % groups * copies;
        const int64_t s1 = std::min(s0 + copies, s_.S), c0 = part * share, c1 = std::min(c0 + share, s_.C);
        double* const to = grad_maps ? sums.data() + (n * shares + part) * s_.S * 6 : nullptr;
        if (to) std::fill(to + s0 * 6, to + s1 * 6, 0.0);
        for (int64_t c = c0; c < c1; c += channels_) {
          channels(n, c, std::min(channels_, c1 - c), s0, s1, own, grad_x, to);
        }
      }
    });
    if (grad_maps) add(sums, shares, *grad_maps);
  }

 private:
  struct Own : Walk<T>::Scratch {
    Own(const Gradients& g, bool image)
        : Walk<T>::Scratch(g), pixels(image ? g.cells() : 0), packed(g.planes_ ? 0 : g.channels_ * g.places()) {}
    const Buffer<T> pixels, packed;
  };

  // The gradients of `count` channels of image n through copies s0 .. s1; to: (S, 6).
  void channels(int64_t n, int64_t first, int64_t count, int64_t s0, int64_t s1, const Own& own, const Tensor* grad_x,
                double* to) const {
    if (to) this->cut(n, first, count, own);
    if (grad_x) std::fill_n(own.pixels.data(), count * cells_channel_, T(0));
    bool broken = false;
    for (int64_t s = s0; s < s1; ++s) {
      this->each_block(n, s, own, [&](int64_t row, int64_t rows, const AffinePlaces<T>* places) {
        double total[6] = {};
        if (!places) {
          broken = true;
          std::fill_n(total, 6, static_cast<double>(NAN));
        } else {
          AffineGradients<T> g{rows * s_.W, count,          *places, nullptr, 0,      own.cells.data(),
                               nullptr,     cells_channel_, nullptr, nullptr, nullptr};
          g.grad = incoming(n, s, first, count, row, rows, own, g.grad_channel);
          g.pixels = grad_x ? own.pixels.data() : nullptr;
          g.column = column_.data(), g.row = row_.data();
          g.sums = to ? total : nullptr;
          k_.affine_gradients(g);
        }
        if (!to) return;
        // The rows of the block begin at `row`, the coordinate in the middle of the image.
        const double shift = static_cast<double>(row) - scales_.b;
        total[1] += shift * total[2], total[4] += shift * total[5];
        for (int k = 0; k < 6; ++k) to[s * 6 + k] += total[k];
      });
    }
    if (grad_x) fold(n, first, count, broken, own, *grad_x);
  }

  // What comes in for some rows of some channels, one row after the other.
  const T* incoming(int64_t n, int64_t s, int64_t first, int64_t count, int64_t row, int64_t rows, const Own& own,
                    int64_t& channel) const {
    const int64_t sc = grad_.stride(2), sh = grad_.stride(3), sw = grad_.stride(4);
    const T* from = grad_.const_data_ptr<T>() + n * grad_.stride(0) + s * grad_.stride(1) + first * sc + row * sh;
    channel = planes_ ? sc : this->places();
    if (planes_) return from;
    for (int64_t c = 0; c < count; ++c) {
      T* to = own.packed.data() + c * channel;
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < s_.W; ++j) *to++ = from[c * sc + i * sh + j * sw];
      }
    }
    return own.packed.data();
  }

  // What the four cells around a pixel have for it.
  void fold(int64_t n, int64_t first, int64_t count, bool broken, const Own& own, const Tensor& grad_x) const {
    const int64_t H = s_.H, W = s_.W, below = 4 * (W + 1);
    for (int64_t c = 0; c < count; ++c) {
      T* out = grad_x.mutable_data_ptr<T>() + (n * s_.C + first + c) * H * W;
      if (broken) {
        std::fill_n(out, H * W, static_cast<T>(NAN));
        continue;
      }
      for (int64_t i = 0; i < H; ++i) {
        const T* cell = own.pixels.data() + c * cells_channel_ + i * below;
        for (int64_t j = 0; j < W; ++j, cell += 4) *out++ = (cell[3] + cell[4 + 2]) + (cell[below + 1] + cell[below + 4]);
      }
    }
  }

  // grad_maps (M, S, 2, 3) = sums (N, shares, S, 6), those of images with the same maps together, in normalised coordinates.
  void add(const Buffer<double>& sums, int64_t shares, const Tensor& grad_maps) const {
    const double scales[6] = {1, scales_.across(), scales_.a, scales_.down(), 1, scales_.b};
    T* const out = grad_maps.mutable_data_ptr<T>();
    const int64_t together = (s_.shared ? s_.N : 1) * shares, size = s_.S * 6;
    for (int64_t m = 0; m < s_.maps(); ++m) {
      for (int64_t i = 0; i < size; ++i) {
        double total = 0;
        for (int64_t part = 0; part < together; ++part) total += sums.data()[(m * together + part) * size + i];
        out[m * size + i] = static_cast<T>(total * scales[i % 6]);
      }
    }
  }

  const Tensor& grad_;
  const Buffer<T> column_, row_;
  const bool planes_;  // whether rows of what comes in follow each other
};

Tensor affine_copies(const Tensor& x, const Tensor& maps, const std::optional<Tensor>& direction) {
  const AffineSizes s = check_affine_copies("affine_copies", x, maps, direction);
  const Tensor out = empty_of(x, {s.N, s.S, s.C, s.H, s.W});
  if (out.numel() == 0) return out;
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "affine_copies", [&] { Copies<scalar_t>(s, x, maps, direction).run(out); });
  return out;
}

std::tuple<Tensor, Tensor> affine_copies_backward(const Tensor& grad, const Tensor& x, const Tensor& maps,
                                                  const std::optional<Tensor>& direction, bool wants_x, bool wants_maps) {
  const AffineSizes s = check_affine_gradients("affine_copies_backward", grad, x, maps, direction);
  const bool empty = grad.numel() == 0;
  const auto like = [&](bool wanted, const Tensor& t, std::initializer_list<int64_t> shape) {
    return !wanted ? empty_of(t, {0}) : empty ? zeros_of(t, shape) : empty_of(t, shape);
  };
  const Tensor grad_x = like(wants_x, x, {s.N, s.C, s.H, s.W}), grad_maps = like(wants_maps, maps, {maps.size(0), s.S, 2, 3});
  if (empty || (!wants_x && !wants_maps)) return {grad_x, grad_maps};
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "affine_copies_backward", [&] {
    Gradients<scalar_t>(s, grad, x, maps, direction).run(wants_x ? &grad_x : nullptr, wants_maps ? &grad_maps : nullptr);
  });
  return {grad_x, grad_maps};
}

ELLA_REGISTER(CPU, m) {
  m.impl("affine_copies", TORCH_BOX(&affine_copies));
  m.impl("affine_copies_backward", TORCH_BOX(&affine_copies_backward));
}

}  // namespace
}  // namespace ella

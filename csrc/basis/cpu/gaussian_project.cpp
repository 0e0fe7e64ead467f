// gaussian_project and its first and second derivatives. Tiles of E are evaluated a few at a time, into a buffer that stays in
// a second-level cache, and multiplied at once; for the derivatives in the coordinates tiles of S[a,x] = sum_m grad[m,a] x[m,x]
// take their place and are reduced at once. Neither E nor S is ever there as a whole. Tasks are cut by the sizes alone and what
// they leave is added in order: no result depends on threads.
#include <algorithm>
#include <optional>
#include <tuple>

#include "basis/ops.h"
#include "cpu/gram.h"

namespace ella {
namespace {

// Reduction lengths that are multiplied at once; one panel of this many rows fills 64 KB.
constexpr int64_t kDepth = 256;
constexpr int64_t kTileBytes = 128 * 1024;  // of E or S at once: half of the smallest second-level caches, x takes the rest

// Coordinates and directions of points as the kernels read them, padded with zeros to whole panels.
template <class T>
class Coordinates {
 public:
  Coordinates(const Tensor& points, const std::optional<Tensor>& directions)
      : row_(ceil_divide(points.size(0), kernels<T>().width) * kernels<T>().width),
        axes_(points.size(1)),
        values_((directions ? 4 : 2) * axes_ * row_),
        moving_(directions.has_value()) {
    split(points, 0);
    if (directions) split(*directions, 2);
  }

  Points<T> from(int64_t first) const {
    const int64_t size = axes_ * row_;
    const T* data = values_.data() + first;
    return {data, data + size, moving_ ? data + 2 * size : nullptr, moving_ ? data + 3 * size : nullptr, row_};
  }

 private:
  void split(const Tensor& source, int64_t part) {
    const double* data = source.const_data_ptr<double>();
    const int64_t s0 = source.stride(0), s1 = source.stride(1), count = source.size(0);
    T *high = values_.data() + part * axes_ * row_, *low = high + axes_ * row_;
    for (int64_t p = 0; p < axes_; ++p) {
      for (int64_t i = 0; i < row_; ++i) {
        const double value = i < count ? data[i * s0 + p * s1] : 0.0;
        high[p * row_ + i] = static_cast<T>(value);
        low[p * row_ + i] = static_cast<T>(value - static_cast<double>(static_cast<T>(value)));
      }
    }
  }

  const int64_t row_, axes_;
  const Buffer<T> values_;
  const bool moving_;
};

// sum_x x[m,x] E[a,x], or of the derivative of E along the directions.
template <class T>
class Project {
 public:
  Project(const GaussianSizes& s, const Tensor& x, const Tensor& u, const Tensor& v, const std::optional<Tensor>& du,
          const std::optional<Tensor>& dv)
      : s_(s), k_(kernels<T>()), x_(x), u_(u, du), v_(v, dv), tangent_(du.has_value()), out_(empty_of(x, {s.M, s.A})) {}

  Tensor run() const {
    const int64_t W = k_.width, panels = ceil_divide(s_.A, W);
    if (2 * s_.A <= k_.vector && s_.X <= kDepth) {
      run_few();
      return out_;
    }
    // A task evaluates its part of E once, about 4 cycles an element with AVX2, and meets it with up to 1024 rows, 64 cycles.
    const int64_t group = balanced_group(panels, std::max<int64_t>(kTileBytes / (kDepth * W * int64_t(sizeof(T))), 1));
    const int64_t rows = balanced_group(s_.M, 1024), groups = ceil_divide(panels, group);
    parallel_tasks(groups * ceil_divide(s_.M, rows), [&](int64_t begin, int64_t end) {
      const Buffer<T> tiles(group * kDepth * W);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t panel = task % groups * group, row = task / groups * rows;
        block(panel, std::min(panel + group, panels), row, std::min(row + rows, s_.M), tiles.data());
      }
    });
    return out_;
  }

 private:
  // Anchors that would fill half a vector at most: the lanes are rows of x instead.
  void run_few() const {
    const int64_t W = k_.width, s0 = x_.stride(0), s1 = x_.stride(1);
    const Buffer<T> tile(kDepth * W);
    k_.gaussian_panel(s_.A, s_.X, s_.P, v_.from(0), u_.from(0), tangent_, tile.data());
    const int64_t rows = balanced_group(s_.M, 4096);
    parallel_tasks(ceil_divide(s_.M, rows), [&](int64_t begin, int64_t end) {
      const Buffer<T> scratch((s_.X + s_.A) * W);
      T *in = scratch.data(), *out = in + s_.X * W;
      for (int64_t i = begin * rows; i < std::min(end * rows, s_.M); i += W) {
        const int64_t n = std::min(W, s_.M - i);
        k_.pack(n, s_.X, x_.const_data_ptr<T>() + i * s0, s0, s1, in);
        k_.product(s_.A, n, s_.X, tile.data(), 1, W, in, W, nullptr, 0, 0, out, W, false, false);
        k_.unpack(n, s_.A, out, out_.mutable_data_ptr<T>() + i * s_.A, s_.A);
      }
    });
  }

  void block(int64_t panel_begin, int64_t panel_end, int64_t row_begin, int64_t row_end, T* tiles) const {
    const int64_t W = k_.width, s0 = x_.stride(0), s1 = x_.stride(1);
    const int64_t strip = 128 / k_.rows * k_.rows;  // rows of x, 128 KB, that every panel of the group meets in the cache
    const T* x = x_.const_data_ptr<T>();
    T* out = out_.mutable_data_ptr<T>();
    for (int64_t k0 = 0; k0 == 0 || k0 < s_.X; k0 += kDepth) {
      const int64_t depth = std::min(kDepth, s_.X - k0);
      for (int64_t p = panel_begin; p < panel_end; ++p) {
        k_.gaussian_panel(std::min(W, s_.A - p * W), depth, s_.P, v_.from(p * W), u_.from(k0), tangent_,
                          tiles + (p - panel_begin) * kDepth * W);
      }
      for (int64_t i = row_begin; i < row_end; i += strip) {
        for (int64_t p = panel_begin; p < panel_end; ++p) {
          k_.product(std::min(strip, row_end - i), std::min(W, s_.A - p * W), depth, x + i * s0 + k0 * s1, s0, s1,
                     tiles + (p - panel_begin) * kDepth * W, W, nullptr, 0, 0, out + i * s_.A + p * W, s_.A, k0 > 0, true);
        }
      }
    }
  }

  const GaussianSizes s_;
  const Kernels<T>& k_;
  const Tensor& x_;
  const Coordinates<T> u_, v_;
  const bool tangent_;
  const Tensor out_;
};

// The gradient in (u, v) of sum_{a,x} S[a,x] E[a,x], or the Hessian times the directions.
template <class T>
class Derivative {
 public:
  Derivative(const GaussianSizes& s, const Tensor& grad, const Tensor& x, const Tensor& u, const Tensor& v,
             const std::optional<Tensor>& du, const std::optional<Tensor>& dv)
      : s_(s),
        k_(kernels<T>()),
        grad_(grad),
        x_(x),
        u_(u, du),
        v_(v, dv),
        hessian_(du.has_value()),
        columns_(std::min(s.A, kAnchors)),
        panels_(std::min(ceil_divide(s.X, k_.width),
                         std::max<int64_t>(kTileBytes / (kAnchors * k_.width * int64_t(sizeof(T))), 1))) {}

  std::tuple<Tensor, Tensor> run(const Tensor& u, const Tensor& v) const {
    const Tensor gu = zeros_of(u, {s_.X, s_.P}), gv = zeros_of(v, {s_.A, s_.P});
    if (s_.M == 0 || s_.X == 0 || s_.A == 0 || s_.P == 0) return {gu, gv};
    // S costs 2048 / 16 cycles an element with AVX2, what is made of it about 20.
    const int64_t rows = balanced_group(s_.M, 2048), shares = ceil_divide(s_.M, rows);
    const int64_t wide = panels_ * k_.width, across = ceil_divide(s_.X, wide), down = ceil_divide(s_.A, columns_);
    const int64_t tasks = shares * down * across, size = s_.P * (wide + columns_);
    const Buffer<double> sums(tasks * size);
    parallel_tasks(tasks, [&](int64_t begin, int64_t end) {
      const Scratch scratch(*this);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t row = task / across / down * rows;
        block(task % across * panels_, task / across % down * columns_, row, std::min(row + rows, s_.M), scratch,
              sums.data() + task * size);
      }
    });
    double *to_u = gu.mutable_data_ptr<double>(), *to_v = gv.mutable_data_ptr<double>();
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t x0 = task % across * wide, a0 = task / across % down * columns_;
      const double* part = sums.data() + task * size;
      add(part, wide, x0, s_.X, to_u);
      add(part + s_.P * wide, columns_, a0, s_.A, to_v);
    }
    return {gu, gv};
  }

 private:
  static constexpr int64_t kAnchors = 128;  // of a tile of S
  static constexpr int64_t kShort = 32;     // rows of S that are summed in T before the sum joins the others in double

  struct Scratch {
    explicit Scratch(const Derivative& d)
        : tile(d.panels_ * d.columns_ * d.k_.width),
          x(kDepth * d.k_.width),
          grad(kDepth * d.columns_),
          lanes(d.s_.P * d.k_.width) {}
    const Buffer<T> tile, x, grad, lanes;
  };

  void add(const double* part, int64_t row, int64_t first, int64_t count, double* target) const {
    for (int64_t i = 0; i < std::min(row, count - first); ++i) {
      for (int64_t p = 0; p < s_.P; ++p) target[(first + i) * s_.P + p] += part[p * row + i];
    }
  }

  // sums: (P, lanes of the panels), then (P, columns).
  void block(int64_t panel0, int64_t a0, int64_t row_begin, int64_t row_end, const Scratch& scratch, double* sums) const {
    const int64_t W = k_.width, count = std::min(columns_, s_.A - a0), wide = panels_ * W;
    const int64_t panels = std::min(panels_, ceil_divide(s_.X, W) - panel0);
    const T *x = x_.const_data_ptr<T>() + panel0 * W * x_.stride(1), *grad = grad_.const_data_ptr<T>() + a0 * grad_.stride(1);
    for (int64_t r = row_begin; r < row_end; r += kDepth) {
      const int64_t depth = std::min(kDepth, row_end - r);
      const T* left = grad + r * grad_.stride(0);
      int64_t left_row = grad_.stride(1), left_k = grad_.stride(0);
      if (left_row == 1) {  // its columns lie a power of two apart in a cache: read along them once
        k_.transpose(depth, count, left, left_k, scratch.grad.data(), kDepth);
        left = scratch.grad.data(), left_row = kDepth, left_k = 1;
      }
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t n = std::min(W, s_.X - (panel0 + p) * W);
        k_.pack(n, depth, x + r * x_.stride(0) + p * W * x_.stride(1), x_.stride(1), x_.stride(0), scratch.x.data());
        k_.product(count, n, depth, left, left_row, left_k, scratch.x.data(), W, nullptr, 0, 0,
                   scratch.tile.data() + p * columns_ * W, W, r > row_begin, false);
      }
    }
    for (int64_t i = 0; i < s_.P * (wide + columns_); ++i) sums[i] = 0;
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t first = (panel0 + p) * W, n = std::min(W, s_.X - first);
      for (int64_t i = 0; i < count; i += kShort) {
        scratch.lanes.zero(0, s_.P * W);
        k_.gaussian_terms(n, std::min(kShort, count - i), s_.P, u_.from(first), v_.from(a0 + i), hessian_,
                          scratch.tile.data() + (p * columns_ + i) * W, scratch.lanes.data(), sums + s_.P * wide + i, columns_);
        for (int64_t axis = 0; axis < s_.P; ++axis) {
          for (int64_t lane = 0; lane < n; ++lane) {
            sums[axis * wide + p * W + lane] += static_cast<double>(scratch.lanes.data()[axis * W + lane]);
          }
        }
      }
    }
  }

  const GaussianSizes s_;
  const Kernels<T>& k_;
  const Tensor &grad_, &x_;
  const Coordinates<T> u_, v_;
  const bool hessian_;
  const int64_t columns_, panels_;
};

Tensor project(const char* /*op*/, const GaussianSizes& s, const Tensor& x, const Tensor& u, const Tensor& v,
               const std::optional<Tensor>& du, const std::optional<Tensor>& dv) {
  std::optional<Tensor> out;
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "gaussian_project", [&] { out = Project<scalar_t>(s, x, u, v, du, dv).run(); });
  return *out;
}

std::tuple<Tensor, Tensor> derivative(const char* /*op*/, const GaussianSizes& s, const Tensor& grad, const Tensor& x,
                                      const Tensor& u, const Tensor& v, const std::optional<Tensor>& du,
                                      const std::optional<Tensor>& dv) {
  std::tuple<Tensor, Tensor> out;
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "gaussian_project",
                         [&] { out = Derivative<scalar_t>(s, grad, x, u, v, du, dv).run(u, v); });
  return out;
}

ELLA_REGISTER(CPU, m) { GaussianOps<project, derivative>::implement(m); }

}  // namespace
}  // namespace ella

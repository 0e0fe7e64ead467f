// F-FC, forward and backward. Lanes are images: z[d][c][image] and dz[d][c][image] exist for one block of images and some
// output channels at a time, small enough for the cache, and every sum over a position or a channel is a product with a panel.
#include <algorithm>
#include <tuple>

#include "../common/checks.h"
#include "buffer.h"
#include "kernels.h"

namespace ella {
namespace {

constexpr int64_t kTileBytes = 256 * 1024;  // of z, and as much of dz: together half of a second-level cache of 1 MiB
constexpr int64_t kMaxChunks = 8;           // parts of the batch whose weight gradients are summed apart

template <class T>
struct Array3 {
  explicit Array3(const Tensor& t) : data(t.const_data_ptr<T>()), s0(t.stride(0)), s1(t.stride(1)), s2(t.stride(2)) {}
  const T* at(int64_t i, int64_t j) const { return data + i * s0 + j * s1; }
  const T* data;
  int64_t s0, s1, s2;
};

template <class T>
struct Array1 {
  explicit Array1(const std::optional<Tensor>& t)
      : data(t ? t->const_data_ptr<T>() : nullptr), stride(t && t->size(0) > 1 ? t->stride(0) : 0) {}
  const T* from(int64_t i) const { return data ? data + i * stride : nullptr; }
  const T* data;
  int64_t stride;
};

// Output channels whose tile fits, a multiple of the register tile's rows if there are several blocks.
template <class T>
int64_t channel_block(const Kernels<T>& k, const FactoredLinearSizes& s, int64_t channels) {
  const int64_t fit = kTileBytes / static_cast<int64_t>(sizeof(T)) / std::max<int64_t>(s.C * k.width, 1);
  return std::min(channels, std::max(fit / k.rows, int64_t(1)) * k.rows);
}

// ---- forward ----

template <class T>
class Forward {
 public:
  Forward(const FactoredLinearSizes& s, const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
          const std::optional<Tensor>& bias_in, const std::optional<Tensor>& bias_out, const Tensor& out)
      : k_(kernels<T>()),
        s_(s),
        like_(x),
        x_(x),
        u_(weight_in),
        v_(weight_out),
        bias_in_(bias_in),
        bias_out_(bias_out),
        out_(out.mutable_data_ptr<T>()) {}

  void run() const {
    const int64_t blocks = ceil_divide(s_.N, k_.width);
    // Few images and many threads: the output channels are shared out too. No sum is cut, so no result depends on it.
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t groups = std::min(ceil_divide(threads, blocks), ceil_divide(s_.D, k_.rows));
    const int64_t group = ceil_divide(s_.D, groups);
    torch::stable::parallel_for(0, blocks * groups, 1, [&](int64_t begin, int64_t end) {
      const int64_t block = channel_block(k_, s_, group);
      const bool once = block >= group;  // then a panel of x is used by all channels right after it was packed
      Buffer<T> panels(like_, (once ? 1 : s_.C) * s_.X * k_.width), z(like_, block * s_.C * k_.width),
          y(like_, s_.Y * k_.width);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t n0 = task / groups * k_.width, n = std::min(k_.width, s_.N - n0);
        const int64_t first = task % groups * group, last = std::min(first + group, s_.D);
        for (int64_t d0 = first; d0 < last; d0 += block) {
          const int64_t rows = std::min(block, last - d0);
          inner(n0, n, d0, rows, d0 == first, once, panels.data(), z.data());
          outer(n0, n, d0, rows, z.data(), y.data());
        }
      }
    });
  }

 private:
  // z[d][c][:] of a block
  void inner(int64_t n0, int64_t n, int64_t d0, int64_t rows, bool fresh, bool once, T* panels, T* z) const {
    for (int64_t c = 0; c < s_.C; ++c) {
      T* panel = panels + (once ? 0 : c * s_.X * k_.width);
      if (fresh) k_.pack(n, s_.X, x_.at(n0, c), x_.s0, x_.s2, panel);
      k_.product(rows, n, s_.X, u_.at(d0, c), u_.s0, u_.s2, panel, k_.width, bias_in_.from(d0), bias_in_.stride,
                 z + c * k_.width, s_.C * k_.width, false, false);
    }
  }

  // y[n, d, :] from z[d]
  void outer(int64_t n0, int64_t n, int64_t d0, int64_t rows, const T* z, T* y) const {
    for (int64_t d = d0; d < d0 + rows; ++d) {
      k_.product(s_.Y, n, s_.C, v_.at(d, 0), v_.s2, v_.s1, z + (d - d0) * s_.C * k_.width, k_.width, bias_out_.data,
                 bias_out_.stride, y, k_.width, false, false);
      k_.unpack(n, s_.Y, y, out_ + (n0 * s_.D + d) * s_.Y, s_.D * s_.Y);
    }
  }

  const Kernels<T>& k_;
  const FactoredLinearSizes s_;
  const Tensor& like_;
  const Array3<T> x_, u_, v_;
  const Array1<T> bias_in_, bias_out_;
  T* out_;
};

Tensor factored_linear(const Tensor& x, const Tensor& weight_in, const Tensor& weight_out, std::optional<Tensor> bias_in,
                       std::optional<Tensor> bias_out) {
  const FactoredLinearSizes s = check_factored_linear(x, weight_in, weight_out, bias_in, bias_out);
  Tensor out = empty_of(x, {s.N, s.D, s.Y});
  if (out.numel() == 0) return out;
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "factored_linear",
                         [&] { Forward<scalar_t>(s, x, weight_in, weight_out, bias_in, bias_out, out).run(); });
  return out;
}

// ---- backward ----

struct Wanted {
  bool x, weight_in, weight_out, bias_in, bias_out;
};

// The batch is cut into chunks by its size alone. Each chunk writes its images' part of the gradient of x and sums the other
// gradients by itself; those sums are added in the order of the chunks, so that no result depends on the number of threads.
template <class T>
class Backward {
 public:
  Backward(const FactoredLinearSizes& s, const Wanted& wanted, const Tensor& grad, const Tensor& x, const Tensor& weight_in,
           const Tensor& weight_out, const std::optional<Tensor>& bias_in)
      : k_(kernels<T>()), s_(s), wanted_(wanted), like_(x), g_(grad), x_(x), u_(weight_in), v_(weight_out), bias_in_(bias_in) {}

  void run(const Tensor& dx, const Tensor& du, const Tensor& dv, const Tensor& dbias_in, const Tensor& dbias_out) const {
    const int64_t blocks = ceil_divide(s_.N, k_.width), chunks = std::min(blocks, kMaxChunks);
    const int64_t size_u = wanted_.weight_in ? s_.D * s_.C * s_.X : 0, size_v = wanted_.weight_out ? s_.D * s_.C * s_.Y : 0;
    const Buffer<T> partial(like_, (chunks - 1) * (size_u + size_v));
    const Buffer<double> bias(like_, chunks * (s_.D + s_.Y));
    bias.zero(0, chunks * (s_.D + s_.Y));
    const auto chunk_u = [&](int64_t i) { return i == 0 ? du.mutable_data_ptr<T>() : partial.data() + (i - 1) * size_u; };
    const auto chunk_v = [&](int64_t i) {
      return i == 0 ? dv.mutable_data_ptr<T>() : partial.data() + (chunks - 1) * size_u + (i - 1) * size_v;
    };
    torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
      Scratch scratch(*this);
      for (int64_t i = begin; i < end; ++i) {
        Target target{dx.mutable_data_ptr<T>(), chunk_u(i), chunk_v(i), bias.data() + i * (s_.D + s_.Y),
                      bias.data() + i * (s_.D + s_.Y) + s_.D};
        std::fill_n(target.du, size_u, T(0));
        std::fill_n(target.dv, size_v, T(0));
        for (int64_t b = blocks * i / chunks; b < blocks * (i + 1) / chunks; ++b) {
          image_block(b * k_.width, std::min(k_.width, s_.N - b * k_.width), scratch, target);
        }
      }
    });
    add_chunks(chunks, size_u, chunk_u);
    add_chunks(chunks, size_v, chunk_v);
    const auto add_bias = [&](bool asked, int64_t offset, int64_t count, const Tensor& out) {
      if (!asked) return;
      T* target = out.mutable_data_ptr<T>();
      for (int64_t j = 0; j < count; ++j) {
        double sum = 0;
        for (int64_t i = 0; i < chunks; ++i) sum += bias.data()[i * (s_.D + s_.Y) + offset + j];
        target[j] = static_cast<T>(sum);
      }
    };
    add_bias(wanted_.bias_in, 0, s_.D, dbias_in);
    add_bias(wanted_.bias_out, s_.D, s_.Y, dbias_out);
  }

 private:
  struct Target {
    T *dx, *du, *dv;
    double *dbias_in, *dbias_out;
  };

  struct Scratch {
    explicit Scratch(const Backward& op)
        : block(channel_block(op.k_, op.s_, op.s_.D)),
          once(block >= op.s_.D),
          x_panels(op.like_, op.wanted_.weight_out ? (once ? 1 : op.s_.C) * op.s_.X * op.k_.width : 0),
          g_panel(op.like_, op.s_.Y * op.k_.width),
          z(op.like_, block * op.s_.C * op.k_.width),
          dz(op.like_, block * op.s_.C * op.k_.width),
          dx_panels(op.like_, op.wanted_.x ? (once ? 1 : op.s_.C) * op.s_.X * op.k_.width : 0),
          rows(op.like_, op.k_.width * op.k_.width) {}
    int64_t block;
    bool once;  // one block holds all output channels: a channel's panels are done with after its turn
    Buffer<T> x_panels, g_panel, z, dz, dx_panels, rows;
  };

  template <class F>
  void add_chunks(int64_t chunks, int64_t size, const F& chunk) const {
    if (chunks < 2 || size == 0) return;
    torch::stable::parallel_for(0, size, 16384, [&](int64_t begin, int64_t end) {
      T* total = chunk(0);
      for (int64_t i = 1; i < chunks; ++i) {
        const T* part = chunk(i);
        for (int64_t j = begin; j < end; ++j) total[j] += part[j];
      }
    });
  }

  void image_block(int64_t n0, int64_t n, Scratch& scratch, const Target& target) const {
    const int64_t W = k_.width;
    const bool need_dz = wanted_.x || wanted_.weight_in || wanted_.bias_in;
    for (int64_t d0 = 0; d0 < s_.D; d0 += scratch.block) {
      const int64_t rows = std::min(scratch.block, s_.D - d0);
      if (need_dz || wanted_.bias_out) {
        for (int64_t d = d0; d < d0 + rows; ++d)
          outer_gradient(n0, n, d, need_dz, scratch.dz.data() + (d - d0) * s_.C * W, scratch, target);
      }
      for (int64_t c = 0; c < s_.C; ++c) {
        const int64_t slot = scratch.once ? 0 : c * s_.X * W;
        const T* dz = scratch.dz.data() + c * W;
        if (wanted_.weight_out) {
          T* panel = scratch.x_panels.data() + slot;
          if (d0 == 0) k_.pack(n, s_.X, x_.at(n0, c), x_.s0, x_.s2, panel);
          k_.product(rows, n, s_.X, u_.at(d0, c), u_.s0, u_.s2, panel, W, bias_in_.from(d0), bias_in_.stride,
                     scratch.z.data() + c * W, s_.C * W, false, false);
        }
        if (wanted_.weight_in) {
          weight_gradient(rows, n, s_.X, dz, s_.C * W, x_.at(n0, c), x_.s0, x_.s2, target.du + (d0 * s_.C + c) * s_.X,
                          s_.C * s_.X, nullptr, scratch);
        }
        if (wanted_.x) {
          T* panel = scratch.dx_panels.data() + slot;
          k_.product(s_.X, n, rows, u_.at(d0, c), u_.s2, u_.s0, dz, s_.C * W, nullptr, 0, panel, W, d0 > 0, false);
          if (d0 + rows == s_.D) k_.unpack(n, s_.X, panel, target.dx + (n0 * s_.C + c) * s_.X, s_.C * s_.X);
        }
      }
      if (wanted_.weight_out) {
        for (int64_t d = d0; d < d0 + rows; ++d) {
          weight_gradient(s_.C, n, s_.Y, scratch.z.data() + (d - d0) * s_.C * W, W, g_.at(n0, d), g_.s0, g_.s2,
                          target.dv + d * s_.C * s_.Y, s_.Y, &scratch.g_panel, scratch);
        }
      }
    }
  }

  // dz[d][:][:] and the biases' sums
  void outer_gradient(int64_t n0, int64_t n, int64_t d, bool need_dz, T* dz, Scratch& scratch, const Target& target) const {
    const int64_t W = k_.width;
    T* panel = scratch.g_panel.data();
    k_.pack(n, s_.Y, g_.at(n0, d), g_.s0, g_.s2, panel);
    if (wanted_.bias_out) k_.lane_sums(s_.Y, n, panel, W, target.dbias_out, 1);
    if (!need_dz) return;
    k_.product(s_.C, n, s_.Y, v_.at(d, 0), v_.s1, v_.s2, panel, W, nullptr, 0, dz, W, false, false);
    if (wanted_.bias_in) k_.lane_sums(s_.C, n, dz, W, target.dbias_in + d, 0);
  }

  // out[i, j] += sum_image a[i][image] source[image, j], j < columns. Few columns are dot products over the images, which need
  // them packed (`panel` is room for that); many are a product over the images with the columns in the lanes.
  void weight_gradient(int64_t rows, int64_t n, int64_t columns, const T* a, int64_t a_row, const T* source,
                       int64_t image_stride, int64_t column_stride, T* out, int64_t out_row, const Buffer<T>* panel,
                       Scratch& scratch) const {
    const int64_t W = k_.width;
    if (columns * 4 <= k_.vector) {
      T* packed = panel ? panel->data() : scratch.rows.data();
      k_.pack(n, columns, source, image_stride, column_stride, packed);
      k_.dots(rows, columns, n, a, a_row, packed, W, out, out_row);
      return;
    }
    for (int64_t j = 0; j < columns; j += W) {
      const int64_t lanes = std::min(W, columns - j);
      const T* b = source + j * column_stride;
      int64_t b_row = image_stride;
      if (column_stride != 1 || lanes % k_.vector != 0) {
        k_.pack(lanes, n, b, column_stride, image_stride, scratch.rows.data());
        b = scratch.rows.data();
        b_row = W;
      }
      k_.product(rows, lanes, n, a, a_row, 1, b, b_row, nullptr, 0, out + j, out_row, true, true);
    }
  }

  const Kernels<T>& k_;
  const FactoredLinearSizes s_;
  const Wanted wanted_;
  const Tensor& like_;
  const Array3<T> g_, x_, u_, v_;
  const Array1<T> bias_in_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> factored_linear_backward(const Tensor& grad, const Tensor& x,
                                                                            const Tensor& weight_in, const Tensor& weight_out,
                                                                            std::optional<Tensor> bias_in, bool grad_x,
                                                                            bool grad_weight_in, bool grad_weight_out,
                                                                            bool grad_bias_in, bool grad_bias_out) {
  const FactoredLinearSizes s = check_factored_linear_backward(grad, x, weight_in, weight_out, bias_in);
  const bool empty = s.N == 0 || s.C == 0 || s.D == 0 || s.X == 0 || s.Y == 0;
  const auto make = [&](bool asked, std::initializer_list<int64_t> shape) {
    return !asked ? empty_of(x, {0}) : empty ? zeros_of(x, shape) : empty_of(x, shape);
  };
  Tensor dx = make(grad_x, {s.N, s.C, s.X}), du = make(grad_weight_in, {s.D, s.C, s.X}),
         dv = make(grad_weight_out, {s.D, s.C, s.Y}), dbias_in = make(grad_bias_in, {s.D}),
         dbias_out = make(grad_bias_out, {s.Y});
  // With no positions to read or no channels, the biases still have gradients: the general loops handle sizes of zero in any
  // axis but N and D, where all sums are empty.
  if (s.N > 0 && s.D > 0) {
    ELLA_DISPATCH_FLOATING(x.scalar_type(), "factored_linear_backward", [&] {
      const Wanted wanted{grad_x, grad_weight_in, grad_weight_out, grad_bias_in, grad_bias_out};
      Backward<scalar_t>(s, wanted, grad, x, weight_in, weight_out, bias_in).run(dx, du, dv, dbias_in, dbias_out);
    });
  }
  return {dx, du, dv, dbias_in, dbias_out};
}

ELLA_REGISTER(CPU, m) {
  m.impl("factored_linear", TORCH_BOX(&factored_linear));
  m.impl("factored_linear_backward", TORCH_BOX(&factored_linear_backward));
}

}  // namespace
}  // namespace ella

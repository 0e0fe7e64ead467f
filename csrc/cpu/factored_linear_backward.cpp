// F-FC, backward: all five gradients, z and dz recomputed block by block.
#include <algorithm>
#include <tuple>

#include "factored_linear.h"

namespace ella {
namespace {

constexpr int64_t kMaxChunks = 8;  // parts of the batch whose weight gradients are summed apart

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
      : k_(kernels<T>()),
        s_(s),
        wanted_(wanted),
        like_(x),
        middle_(s, x, weight_in, bias_in),
        g_(grad),
        x_(x),
        u_(weight_in),
        v_(weight_out),
        along_g_(along_rows(k_, s.Y, s.C, v_, g_)),
        dx_lanes_(in_lanes(k_, s.X, u_)) {}

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
          x_panels(op.like_, op.wanted_.weight_out ? op.middle_.panel_size(block, op.s_.D) : 0),
          g_panel(op.like_, op.s_.Y * op.k_.width),
          z(op.like_, block * op.z_row_),
          dz(op.like_, block * op.z_row_),
          dx_panels(op.like_, !op.wanted_.x  ? 0
                              : op.dx_lanes_ ? block * op.k_.width
                                             : (once ? 1 : op.s_.C) * op.s_.X * op.k_.width),
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
          outer_gradient(n0, n, d, need_dz, scratch.dz.data() + (d - d0) * z_row_, scratch, target);
      }
      for (int64_t c = 0; c < s_.C; ++c) {
        const T* dz = scratch.dz.data() + c * W;
        if (wanted_.weight_out) {
          middle_.compute(n0, n, d0, rows, c, scratch.once, d0 == 0, scratch.x_panels.data(), scratch.z.data() + c * W, z_row_);
        }
        if (wanted_.weight_in) {
          weight_gradient(rows, n, s_.X, dz, z_row_, x_.at(n0, c), x_.s0, x_.s2, target.du + (d0 * s_.C + c) * s_.X,
                          s_.C * s_.X, nullptr, scratch);
        }
        if (wanted_.x) input_gradient(n0, n, d0, rows, c, dz, scratch, target);
      }
      if (wanted_.weight_out) {
        for (int64_t d = d0; d < d0 + rows; ++d) {
          weight_gradient(s_.C, n, s_.Y, scratch.z.data() + (d - d0) * z_row_, W, g_.at(n0, d), g_.s0, g_.s2,
                          target.dv + d * s_.C * s_.Y, s_.Y, &scratch.g_panel, scratch);
        }
      }
    }
  }

  // dz[d][:][:] and the biases' sums
  void outer_gradient(int64_t n0, int64_t n, int64_t d, bool need_dz, T* dz, Scratch& scratch, const Target& target) const {
    const int64_t W = k_.width;
    T* panel = scratch.g_panel.data();
    if (along_g_) {
      if (wanted_.bias_out) image_sums(n, g_.at(n0, d), panel, target.dbias_out);
      if (!need_dz) return;
      fill_rows(k_, s_.C, n, static_cast<const T*>(nullptr), 0, dz, W);
      k_.row_products(s_.C, n, s_.Y, v_.at(d, 0), v_.s1, g_.at(n0, d), g_.s0, dz, W);
    } else {
      k_.pack(n, s_.Y, g_.at(n0, d), g_.s0, g_.s2, panel);
      if (wanted_.bias_out) k_.lane_sums(s_.Y, n, panel, W, target.dbias_out, 1);
      if (!need_dz) return;
      k_.product(s_.C, n, s_.Y, v_.at(d, 0), v_.s1, v_.s2, panel, W, nullptr, 0, 0, dz, W, false, false);
      clear_lanes(k_, s_.C, n, dz, W);
    }
    if (wanted_.bias_in) k_.lane_sums(s_.C, n, dz, W, target.dbias_in + d, 0);
  }

  // sums[y] += sum_image g[image, y]
  void image_sums(int64_t n, const T* g, T* part, double* sums) const {
    const T one = 1;
    for (int64_t j = 0; j < s_.Y; j += k_.width) {
      const int64_t lanes = std::min(k_.width, s_.Y - j);
      k_.product(1, lanes, n, &one, 0, 0, g + j, g_.s0, nullptr, 0, 0, part, k_.width, false, false);
      for (int64_t lane = 0; lane < lanes; ++lane) sums[j + lane] += static_cast<double>(part[lane]);
    }
  }

  // dx[n, c, :], of which output channels from d0 on are a part
  void input_gradient(int64_t n0, int64_t n, int64_t d0, int64_t rows, int64_t c, const T* dz, Scratch& scratch,
                      const Target& target) const {
    const int64_t W = k_.width;
    T *dx = target.dx + (n0 * s_.C + c) * s_.X, *panel = scratch.dx_panels.data();
    if (dx_lanes_) {
      positions_in_lanes(k_, n, s_.X, rows, dz, z_row_, u_.at(d0, c), u_.s0, static_cast<const T*>(nullptr), dx, s_.C * s_.X,
                         d0 > 0, panel);
      return;
    }
    panel += scratch.once ? 0 : c * s_.X * W;
    k_.product(s_.X, n, rows, u_.at(d0, c), u_.s2, u_.s0, dz, z_row_, nullptr, 0, 0, panel, W, d0 > 0, false);
    if (d0 + rows == s_.D) k_.unpack(n, s_.X, panel, dx, s_.C * s_.X);
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
      const int64_t count = ceil_divide(n, k_.vector) * k_.vector;
      if (columns == 1 && out_row == 1) {
        k_.row_products(1, rows, count, packed, W, a, a_row, out, 0);
      } else {
        k_.row_products(rows, columns, count, a, a_row, packed, W, out, out_row);
      }
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
      k_.product(rows, lanes, n, a, a_row, 1, b, b_row, nullptr, 0, 0, out + j, out_row, true, true);
    }
  }

  const Kernels<T>& k_;
  const FactoredLinearSizes s_;
  const Wanted wanted_;
  const int64_t z_row_ = s_.C * k_.width;  // from one output channel's z to the next one's
  const Tensor& like_;
  const Middle<T> middle_;
  const Array3<T> g_, x_, u_, v_;
  const bool along_g_;   // the sums over positions of g are taken along its rows
  const bool dx_lanes_;  // lanes of dx are positions
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

ELLA_REGISTER(CPU, m) { m.impl("factored_linear_backward", TORCH_BOX(&factored_linear_backward)); }

}  // namespace
}  // namespace ella

// F-FC, backward: all five gradients, dz and, unless the forward kept it, z computed block by block.
#include <algorithm>
#include <tuple>

#include "factored_linear.h"
#include "factored_linear_one_output.h"

namespace ella {
namespace {

// How the work is cut, by the sizes alone, so that no result depends on the number of threads. Input channels are shared out
// first: the gradients of x and of the weights that belong to one are nobody else's. Where they are few, the images are cut
// into chunks too, each of which sums the gradients of the weights by itself; those sums are added in the order of the chunks.
// Where images are many, they are cut whatever the number of channels, to bound rounding.
struct Shares {
  static constexpr int64_t kLeast = 5;  // channels of a group: fewer leave too much of a register tile empty
  static constexpr int64_t kTasks = 8;
  static constexpr int64_t kBlocks = 16;  // of images, whose sums are added one after the other

  Shares(int64_t C, int64_t image_blocks) {
    while (groups < kTasks && C / (2 * groups) >= kLeast) groups *= 2;
    chunks = std::min(image_blocks, image_blocks > kBlocks ? kTasks : kTasks / groups);
    if (groups == kTasks) groups *= ceil_divide(C, kTasks * kTileChannels);
    channels = ceil_divide(C, groups);
  }

  int64_t groups = 1, channels, chunks;
};

template <class T>
class Backward {
 public:
  Backward(const FactoredLinearSizes& s, const FactoredLinearWanted& wanted, const Tensor& grad, const Tensor& x,
           const Tensor& weight_in, const Tensor& weight_out, const std::optional<Tensor>& bias_in, const T* kept)
      : k_(kernels<T>()),
        s_(s),
        wanted_(wanted),
        blocks_(ceil_divide(s.N, k_.width)),
        shares_(s.C, blocks_),
        z_row_(shares_.channels * k_.width),
        rows_(channel_block(k_, shares_.channels, s.D)),
        like_(x),
        middle_(s, x, weight_in, bias_in),
        g_(grad),
        x_(x),
        u_(weight_in),
        v_(weight_out),
        along_g_(along_rows(k_, s.Y, shares_.channels, v_, g_)),
        shared_(middle_gradient() && !along_g_ && shares_.groups > 1 && 2 * s.N >= k_.width),
        dx_lanes_(in_lanes(k_, s.X, u_)),
        kept_(kept),
        g_panels_(x, shared_ ? blocks_ * s.D * s.Y * k_.width : 0) {}

  void run(const Tensor& dx, const Tensor& du, const Tensor& dv, const Tensor& dbias_in, const Tensor& dbias_out) const {
    if (shared_) pack_gradient();
    const int64_t tasks = shares_.groups * shares_.chunks;
    const int64_t size_u = wanted_.weight_in ? s_.D * s_.C * s_.X : 0, size_v = wanted_.weight_out ? s_.D * s_.C * s_.Y : 0;
    const Buffer<T> partial(like_, (shares_.chunks - 1) * (size_u + size_v));
    const Buffer<double> bias(like_, tasks * s_.D + shares_.chunks * s_.Y);
    bias.zero(0, tasks * s_.D + shares_.chunks * s_.Y);
    double* const bias_out = bias.data() + tasks * s_.D;
    const auto chunk_u = [&](int64_t i) { return i == 0 ? du.mutable_data_ptr<T>() : partial.data() + (i - 1) * size_u; };
    const auto chunk_v = [&](int64_t i) {
      return i == 0 ? dv.mutable_data_ptr<T>() : partial.data() + (shares_.chunks - 1) * size_u + (i - 1) * size_v;
    };
    torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
      Scratch scratch(*this);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t chunk = i % shares_.chunks, group = i / shares_.chunks, c0 = s_.C * group / shares_.groups;
        Target target{c0,
                      s_.C * (group + 1) / shares_.groups - c0,
                      dx.mutable_data_ptr<T>(),
                      chunk_u(chunk),
                      chunk_v(chunk),
                      bias.data() + i * s_.D,
                      wanted_.bias_out && group == 0 ? bias_out + chunk * s_.Y : nullptr};
        const int64_t first = blocks_ * chunk / shares_.chunks;
        for (int64_t b = first; b < blocks_ * (chunk + 1) / shares_.chunks; ++b) image_block(b, b > first, scratch, target);
      }
    });
    add_chunks(size_u, chunk_u);
    add_chunks(size_v, chunk_v);
    if (wanted_.bias_in) add_sums(tasks, s_.D, bias.data(), dbias_in);
    if (wanted_.bias_out) add_sums(shares_.chunks, s_.Y, bias_out, dbias_out);
  }

 private:
  struct Target {
    int64_t c0, channels;
    T *dx, *du, *dv;
    double *dbias_in, *dbias_out;  // the second for one group of channels only, since it belongs to none
  };

  struct Scratch {
    explicit Scratch(const Backward& op)
        : once(op.rows_ >= op.s_.D),
          x_panel(op.middle_.panel_size()),
          x_panels(op.like_, op.computes_z() ? (once ? 1 : op.shares_.channels) * x_panel : 0),
          g_panel(op.like_, op.shared_ ? 0 : (op.along_g_ ? 1 : op.s_.Y) * op.k_.width),
          z(op.like_, op.computes_z() ? op.rows_ * op.z_row_ : 0),
          dz(op.like_, op.middle_gradient() ? op.rows_ * op.z_row_ : 0),
          dx_panels(op.like_, !op.wanted_.x  ? 0
                              : op.dx_lanes_ ? op.rows_ * op.k_.width
                                             : (once ? 1 : op.shares_.channels) * op.s_.X * op.k_.width),
          rows(op.like_, op.k_.width * op.k_.width) {}
    bool once;  // one block holds all output channels: a channel's panels are done with after its turn
    int64_t x_panel;
    Buffer<T> x_panels, g_panel, z, dz, dx_panels, rows;
  };

  void pack_gradient() const {
    torch::stable::parallel_for(0, blocks_ * s_.D, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t block = i / s_.D, d = i % s_.D;
        k_.pack(images(block), s_.Y, g_.at(block * k_.width, d), g_.s0, g_.s2, shared_panel(block, d));
      }
    });
  }

  template <class F>
  void add_chunks(int64_t size, const F& chunk) const {
    if (shares_.chunks < 2 || size == 0) return;
    torch::stable::parallel_for(0, size, 16384, [&](int64_t begin, int64_t end) {
      T* total = chunk(0);
      for (int64_t i = 1; i < shares_.chunks; ++i) {
        const T* part = chunk(i);
        for (int64_t j = begin; j < end; ++j) total[j] += part[j];
      }
    });
  }

  static void add_sums(int64_t parts, int64_t count, const double* sums, const Tensor& out) {
    T* target = out.mutable_data_ptr<T>();
    for (int64_t j = 0; j < count; ++j) {
      double sum = 0;
      for (int64_t i = 0; i < parts; ++i) sum += sums[i * count + j];
      target[j] = static_cast<T>(sum);
    }
  }

  bool middle_gradient() const { return wanted_.x || wanted_.weight_in || wanted_.bias_in; }
  bool computes_z() const { return wanted_.weight_out && kept_ == nullptr; }
  int64_t images(int64_t block) const { return std::min(k_.width, s_.N - block * k_.width); }
  T* shared_panel(int64_t block, int64_t d) const { return g_panels_.data() + (block * s_.D + d) * s_.Y * k_.width; }

  void image_block(int64_t block, bool add, Scratch& scratch, const Target& target) const {
    const int64_t W = k_.width, n0 = block * W, n = images(block);
    for (int64_t d0 = 0; d0 < s_.D; d0 += rows_) {
      const int64_t rows = std::min(rows_, s_.D - d0);
      const T* const z = kept_ ? kept_ + ((block * s_.D + d0) * s_.C + target.c0) * W : scratch.z.data();
      const int64_t z_row = kept_ ? s_.C * W : z_row_;
      for (int64_t i = 0; i < target.channels && computes_z(); ++i) {
        middle_.compute(n0, n, d0, rows, target.c0 + i, d0 == 0,
                        scratch.x_panels.data() + (scratch.once ? 0 : i * scratch.x_panel), scratch.z.data() + i * W, z_row_);
      }
      // What reads g of one output channel stands together: all of g is read for every group of channels.
      for (int64_t d = d0; d < d0 + rows; ++d) {
        const T* panel = outer_gradient(block, d, scratch.dz.data() + (d - d0) * z_row_, scratch, target);
        if (wanted_.weight_out) {
          weight_gradient(target.channels, n, s_.Y, z + (d - d0) * z_row, W, g_.at(n0, d), g_.s0, g_.s2, panel,
                          target.dv + (d * s_.C + target.c0) * s_.Y, s_.Y, add, scratch);
        }
      }
      for (int64_t i = 0; i < target.channels; ++i) {
        const int64_t c = target.c0 + i;
        const T* dz = scratch.dz.data() + i * W;
        if (wanted_.weight_in) {
          weight_gradient(rows, n, s_.X, dz, z_row_, x_.at(n0, c), x_.s0, x_.s2, nullptr, target.du + (d0 * s_.C + c) * s_.X,
                          s_.C * s_.X, add, scratch);
        }
        if (wanted_.x) input_gradient(n0, n, d0, rows, c, i, dz, scratch, target);
      }
    }
  }

  // dz[d] of the target's channels and the biases' sums; gives the panel of g[d], if there is one.
  const T* outer_gradient(int64_t block, int64_t d, T* dz, Scratch& scratch, const Target& target) const {
    const int64_t W = k_.width, n0 = block * W, n = images(block);
    T* panel = nullptr;
    if (along_g_) {
      if (target.dbias_out) image_sums(n, g_.at(n0, d), scratch.g_panel.data(), target.dbias_out);
    } else if (middle_gradient() || target.dbias_out) {
      panel = shared_ ? shared_panel(block, d) : scratch.g_panel.data();
      if (!shared_) k_.pack(n, s_.Y, g_.at(n0, d), g_.s0, g_.s2, panel);
      if (target.dbias_out) k_.lane_sums(s_.Y, n, panel, W, target.dbias_out, 1);
    }
    if (!middle_gradient()) return panel;
    if (along_g_) {
      fill_rows(k_, target.channels, n, static_cast<const T*>(nullptr), 0, dz, W);
      k_.row_products(target.channels, n, s_.Y, v_.at(d, target.c0), v_.s1, g_.at(n0, d), g_.s0, dz, W);
    } else {
      k_.product(target.channels, n, s_.Y, v_.at(d, target.c0), v_.s1, v_.s2, panel, W, nullptr, 0, 0, dz, W, false, false);
      clear_lanes(k_, target.channels, n, dz, W);
    }
    if (wanted_.bias_in) k_.lane_sums(target.channels, n, dz, W, target.dbias_in + d, 0);
    return panel;
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

  // dx[n, c, :], of which output channels from d0 on are a part; c is the i-th channel of its group
  void input_gradient(int64_t n0, int64_t n, int64_t d0, int64_t rows, int64_t c, int64_t i, const T* dz, Scratch& scratch,
                      const Target& target) const {
    const int64_t W = k_.width;
    T *dx = target.dx + (n0 * s_.C + c) * s_.X, *panel = scratch.dx_panels.data();
    if (dx_lanes_) {
      positions_in_lanes(k_, n, s_.X, rows, dz, z_row_, u_.at(d0, c), u_.s0, static_cast<const T*>(nullptr), dx, s_.C * s_.X,
                         d0 > 0, panel);
      return;
    }
    panel += scratch.once ? 0 : i * s_.X * W;
    k_.product(s_.X, n, rows, u_.at(d0, c), u_.s2, u_.s0, dz, z_row_, nullptr, 0, 0, panel, W, d0 > 0, false);
    if (d0 + rows == s_.D) k_.unpack(n, s_.X, panel, dx, s_.C * s_.X);
  }

  // out[i, j] = sum_image a[i][image] source[image, j], j < columns, or added to out. Few columns are dot products over the
  // images, which need them as a panel (`packed`, if there is one already); many are a product over the images with the columns
  // in the lanes.
  void weight_gradient(int64_t rows, int64_t n, int64_t columns, const T* a, int64_t a_row, const T* source,
                       int64_t image_stride, int64_t column_stride, const T* packed, T* out, int64_t out_row, bool add,
                       Scratch& scratch) const {
    const int64_t W = k_.width;
    if (columns * 4 <= k_.vector) {
      if (packed == nullptr) {
        k_.pack(n, columns, source, image_stride, column_stride, scratch.rows.data());
        packed = scratch.rows.data();
      }
      for (int64_t i = 0; i < rows && !add; ++i) std::fill_n(out + i * out_row, columns, T(0));
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
      // Rows of many register tiles share the panel; as they lie in memory, its rows often share a few lines of the cache.
      if (column_stride != 1 || lanes % k_.vector != 0 || rows >= kPacking * k_.rows) {
        k_.pack(lanes, n, b, column_stride, image_stride, scratch.rows.data());
        b = scratch.rows.data();
        b_row = W;
      }
      k_.product(rows, lanes, n, a, a_row, 1, b, b_row, nullptr, 0, 0, out + j, out_row, add, true);
    }
  }

  static constexpr int64_t kPacking = 8;

  const Kernels<T>& k_;
  const FactoredLinearSizes s_;
  const FactoredLinearWanted wanted_;
  const int64_t blocks_;  // of images
  const Shares shares_;
  const int64_t z_row_;  // from one output channel's dz, and z, to the next one's
  const int64_t rows_;   // output channels whose dz, and z, is there at a time
  const Tensor& like_;
  const Middle<T> middle_;
  const Array3<T> g_, x_, u_, v_;
  const bool along_g_;        // the sums over positions of g are taken along its rows
  const bool shared_;         // g is packed once for all groups of channels, images being enough to fill half of a panel
  const bool dx_lanes_;       // lanes of dx are positions
  const T* const kept_;       // z of all images, or null
  const Buffer<T> g_panels_;  // of all images and output channels, if shared: at most twice as large as g
};

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// `middle`: what factored_linear_keeping gave, or null.
Gradients backward(const Tensor& grad, const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
                   const std::optional<Tensor>& bias_in, const Tensor* middle, const FactoredLinearWanted& wanted) {
  const FactoredLinearSizes s = check_factored_linear_backward(grad, x, weight_in, weight_out, bias_in);
  const bool empty = s.N == 0 || s.C == 0 || s.D == 0 || s.X == 0 || s.Y == 0;
  const auto make = [&](bool asked, std::initializer_list<int64_t> shape) {
    return !asked ? empty_of(x, {0}) : empty ? zeros_of(x, shape) : empty_of(x, shape);
  };
  Tensor dx = make(wanted.x, {s.N, s.C, s.X}), du = make(wanted.weight_in, {s.D, s.C, s.X}),
         dv = make(wanted.weight_out, {s.D, s.C, s.Y}), dbias_in = make(wanted.bias_in, {s.D}),
         dbias_out = make(wanted.bias_out, {s.Y});
  // With no positions to read or no channels, the biases still have gradients: the general loops handle sizes of zero in any
  // axis but N and D, where all sums are empty.
  if (s.N > 0 && s.D > 0) {
    ELLA_DISPATCH_FLOATING(x.scalar_type(), "factored_linear_backward", [&] {
      if (one_large_output(s, x, weight_in)) {
        OneOutput<scalar_t>(s, x, weight_in, weight_out, bias_in).backward(wanted, grad, dx, du, dv, dbias_in, dbias_out);
        return;
      }
      const scalar_t* kept = nullptr;
      if (middle != nullptr && middle->numel() > 0) {
        check_kept_middle(x, *middle, {kept_middle(kernels<scalar_t>(), s)});
        kept = middle->const_data_ptr<scalar_t>();
      }
      Backward<scalar_t>(s, wanted, grad, x, weight_in, weight_out, bias_in, kept).run(dx, du, dv, dbias_in, dbias_out);
    });
  }
  return {dx, du, dv, dbias_in, dbias_out};
}

Gradients factored_linear_backward(const Tensor& grad, const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
                                   std::optional<Tensor> bias_in, bool grad_x, bool grad_weight_in, bool grad_weight_out,
                                   bool grad_bias_in, bool grad_bias_out) {
  return backward(grad, x, weight_in, weight_out, bias_in, nullptr,
                  {grad_x, grad_weight_in, grad_weight_out, grad_bias_in, grad_bias_out});
}

Gradients factored_linear_backward_keeping(const Tensor& grad, const Tensor& x, const Tensor& weight_in,
                                           const Tensor& weight_out, std::optional<Tensor> bias_in, const Tensor& middle,
                                           bool grad_x, bool grad_weight_in, bool grad_weight_out, bool grad_bias_in,
                                           bool grad_bias_out) {
  return backward(grad, x, weight_in, weight_out, bias_in, &middle,
                  {grad_x, grad_weight_in, grad_weight_out, grad_bias_in, grad_bias_out});
}

ELLA_REGISTER(CPU, m) {
  m.impl("factored_linear_backward", TORCH_BOX(&factored_linear_backward));
  m.impl("factored_linear_backward_keeping", TORCH_BOX(&factored_linear_backward_keeping));
}

}  // namespace
}  // namespace ella

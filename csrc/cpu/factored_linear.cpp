// F-FC, forward.
#include "factored_linear.h"

namespace ella {
namespace {

template <class T>
class Forward {
 public:
  Forward(const FactoredLinearSizes& s, const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
          const std::optional<Tensor>& bias_in, const std::optional<Tensor>& bias_out, const Tensor& out)
      : k_(kernels<T>()),
        s_(s),
        like_(x),
        middle_(s, x, weight_in, bias_in),
        v_(weight_out),
        bias_out_(bias_out),
        lanes_(in_lanes(k_, s.Y, v_) && (bias_out_.data == nullptr || bias_out_.stride == 1)),
        out_(out.mutable_data_ptr<T>()) {}

  void run() const {
    const int64_t blocks = ceil_divide(s_.N, k_.width);
    // Few images and many threads: the output channels are shared out too. No sum is cut, so no result depends on it.
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t groups = std::min(ceil_divide(threads, blocks), ceil_divide(s_.D, k_.rows));
    const int64_t group = ceil_divide(s_.D, groups);
    torch::stable::parallel_for(0, blocks * groups, 1, [&](int64_t begin, int64_t end) {
      const int64_t block = channel_block(k_, s_.C, group);
      const bool once = block >= group;  // then a panel of x is used by all channels right after it was packed
      const int64_t x_panel = middle_.panel_size();
      Buffer<T> panels(like_, (once ? 1 : s_.C) * x_panel), z(like_, block * z_row_),
          panel(like_, (lanes_ ? s_.C : s_.Y) * k_.width);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t n0 = task / groups * k_.width, n = std::min(k_.width, s_.N - n0);
        const int64_t first = task % groups * group, last = std::min(first + group, s_.D);
        for (int64_t d0 = first; d0 < last; d0 += block) {
          const int64_t rows = std::min(block, last - d0);
          for (int64_t c = 0; c < s_.C; ++c) {
            middle_.compute(n0, n, d0, rows, c, d0 == first, panels.data() + (once ? 0 : c * x_panel), z.data() + c * k_.width,
                            z_row_);
          }
          for (int64_t d = d0; d < d0 + rows; ++d) outer(n0, n, d, z.data() + (d - d0) * z_row_, panel.data());
        }
      }
    });
  }

 private:
  // y[n, d, :] from z[d]
  void outer(int64_t n0, int64_t n, int64_t d, const T* z, T* panel) const {
    T* out = out_ + (n0 * s_.D + d) * s_.Y;
    if (lanes_) {
      positions_in_lanes(k_, n, s_.Y, s_.C, z, k_.width, v_.at(d, 0), v_.s1, bias_out_.data, out, s_.D * s_.Y, false, panel);
      return;
    }
    k_.product(s_.Y, n, s_.C, v_.at(d, 0), v_.s2, v_.s1, z, k_.width, bias_out_.data, bias_out_.stride, 0, panel, k_.width,
               false, false);
    k_.unpack(n, s_.Y, panel, out, s_.D * s_.Y);
  }

  const Kernels<T>& k_;
  const FactoredLinearSizes s_;
  const int64_t z_row_ = s_.C * k_.width;  // from one output channel's z to the next one's
  const Tensor& like_;
  const Middle<T> middle_;
  const Array3<T> v_;
  const Array1<T> bias_out_;
  const bool lanes_;  // of the output's vectors are positions
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

ELLA_REGISTER(CPU, m) { m.impl("factored_linear", TORCH_BOX(&factored_linear)); }

}  // namespace
}  // namespace ella

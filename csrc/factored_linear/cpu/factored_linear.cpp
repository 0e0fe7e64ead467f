// F-FC, forward. z[d][c][image] exists for one block of images at a time: for some channels, small enough for the cache, or for
// all where there is so little of it that it may be kept for the backward.
#include <numeric>
#include <tuple>

#include "factored_linear/cpu/arguments.h"
#include "factored_linear/cpu/one_output.h"
#include "factored_linear/ops.h"

namespace ella {
namespace {

// Output channels whose tile of z fits, a multiple of the register tile's rows if there are several blocks.
template <class T>
int64_t channel_block(const Kernels<T>& k, int64_t in_channels, int64_t channels) {
  constexpr int64_t kTileBytes = 512 * 1024;  // half of a second-level cache of 1 MiB
  const int64_t fit = kTileBytes / static_cast<int64_t>(sizeof(T)) / std::max<int64_t>(in_channels * k.width, 1);
  return std::min(channels, std::max(fit / k.rows, int64_t(1)) * k.rows);
}

// out[image * out_row + position] = init[position] + sum_k a[k * a_k + image] weight[k * weight_row + position] for n images
// and whole vectors of positions; `add` adds to out instead. `panel` is room for k rows of the weight.
template <class T>
void positions_in_lanes(const Kernels<T>& k, int64_t n, int64_t positions, int64_t count, const T* a, int64_t a_k,
                        const T* weight, int64_t weight_row, const T* init, T* out, int64_t out_row, bool add, T* panel) {
  for (int64_t j = 0; j < positions; j += k.width) {
    const int64_t lanes = std::min(k.width, positions - j);
    k.pack(lanes, count, weight + j, 1, weight_row, panel);
    k.product(n, lanes, count, a, 1, a_k, panel, k.width, init ? init + j : nullptr, 0, 1, out + j, out_row, add, false);
  }
}

template <class T>
class Forward {
 public:
  Forward(const FactoredLinearSizes& s, const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
          const std::optional<Tensor>& bias_in, const std::optional<Tensor>& bias_out, const Tensor& out, T* kept)
      : k_(kernels<T>()),
        s_(s),
        whole_(kept_intermediate(k_, s) > 0),
        channels_(whole_ ? s.C : channels_at_once(k_, s.C, s.D)),
        z_row_(intermediate_row(k_, channels_)),
        intermediate_(s, x, weight_in, bias_in),
        v_(weight_out),
        bias_out_(bias_out),
        lanes_(in_lanes(k_, s.Y, v_) && (bias_out_.data == nullptr || bias_out_.stride == 1)),
        out_(out.mutable_data_ptr<T>()),
        kept_(kept) {}

  void run() const {
    const int64_t blocks = ceil_divide(s_.N, k_.width);
    // Few images and many threads, or blocks that the threads cannot share evenly: the output channels are shared out too. No
    // sum is cut, so no result depends on it.
    constexpr int64_t kMany = 4;  // blocks for a thread, from which on the last ones are little of the work
    const int64_t threads = torch::stable::get_num_threads(), even = threads / std::gcd(blocks, threads);
    const int64_t wanted = blocks < threads           ? ceil_divide(threads, blocks)
                           : blocks < kMany * threads ? std::min(even, kMany)
                                                      : 1;
    const int64_t groups = std::min(wanted, ceil_divide(s_.D, k_.rows));
    const int64_t group = ceil_divide(s_.D, groups);
    torch::stable::parallel_for(0, blocks * groups, 1, [&](int64_t begin, int64_t end) {
      const int64_t block = kept_ ? group : channel_block(k_, channels_, group);
      const bool once = block >= group;  // then a panel of x is used by all channels right after it was packed
      const int64_t x_panel = intermediate_.panel_size(), y_panel = s_.Y * k_.width;
      Buffer<T> panels((once ? 1 : s_.C) * x_panel), tile(kept_ ? 0 : block * z_row_),
          out(lanes_ ? channels_ * k_.width : (channels_ < s_.C ? block : 1) * y_panel);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t n0 = task / groups * k_.width, n = std::min(k_.width, s_.N - n0);
        const int64_t first = task % groups * group, last = std::min(first + group, s_.D);
        for (int64_t d0 = first; d0 < last; d0 += block) {
          const int64_t rows = std::min(block, last - d0);
          for (int64_t c0 = 0; c0 < std::max(s_.C, int64_t(1)); c0 += channels_) {
            const int64_t count = std::min(channels_, s_.C - c0);
            T* const z = kept_ ? kept_ + (task / groups * s_.D + d0) * z_row_ : tile.data();
            for (int64_t c = c0; c < c0 + count; ++c) {
              intermediate_.compute(n0, n, d0, rows, c, d0 == first, panels.data() + (once ? 0 : c * x_panel),
                                    z + (c - c0) * k_.width, z_row_);
            }
            for (int64_t d = d0; d < d0 + rows; ++d) {
              T* panel = out.data() + (lanes_ || channels_ >= s_.C ? 0 : (d - d0) * y_panel);
              outer(n0, n, d, c0, count, z + (d - d0) * z_row_, panel);
            }
          }
        }
      }
    });
  }

 private:
  // Input channels whose z is there at a time: all, unless that leaves too few output channels for a panel of x. Every group of
  // them reads and writes y, or the panels that become y, again.
  static int64_t channels_at_once(const Kernels<T>& k, int64_t C, int64_t D) {
    constexpr int64_t kEnough = 24, kMax = 80;
    const int64_t max_count = channel_block(k, C, D) >= std::min(kEnough, D) ? C : std::min(C, kMax);
    return std::max(balanced_group(C, std::max(max_count, int64_t(1))), int64_t(1));
  }

  // What `count` channels from c0 on, of which z[d] is there, are of y[n, d, :]; sums begin with c0 = 0.
  void outer(int64_t n0, int64_t n, int64_t d, int64_t c0, int64_t count, const T* z, T* panel) const {
    T* out = out_ + (n0 * s_.D + d) * s_.Y;
    const T* bias = c0 == 0 ? bias_out_.data : nullptr;
    if (lanes_) {
      positions_in_lanes(k_, n, s_.Y, count, z, k_.width, v_.at(d, c0), v_.s1, bias, out, s_.D * s_.Y, c0 > 0, panel);
      return;
    }
    k_.product(s_.Y, n, count, v_.at(d, c0), v_.s2, v_.s1, z, k_.width, bias, bias_out_.stride, 0, panel, k_.width, c0 > 0,
               false);
    if (c0 + count == s_.C) k_.unpack(n, s_.Y, panel, out, s_.D * s_.Y);
  }

  const Kernels<T>& k_;
  const FactoredLinearSizes s_;
  const bool whole_;        // z of all channels of a block is there at a time, so that y is the same whether z is kept or not
  const int64_t channels_;  // input channels whose z is there at a time
  const int64_t z_row_;     // from one output channel's z to the next one's
  const Intermediate<T> intermediate_;
  const Array3<T> v_;
  const Array1<T> bias_out_;
  const bool lanes_;  // of the output's vectors are positions
  T* const out_;
  T* const kept_;  // where z of all images goes, or null
};

std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& weight_in, const Tensor& weight_out,
                                   const std::optional<Tensor>& bias_in, const std::optional<Tensor>& bias_out, bool keep,
                                   bool /*allow_tf32*/) {
  const FactoredLinearSizes s = check_factored_linear(x, weight_in, weight_out, bias_in, bias_out);
  const Tensor out = empty_of(x, {s.N, s.D, s.Y});
  Tensor intermediate = empty_of(x, {0});
  if (out.numel() == 0) return {out, intermediate};
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "factored_linear", [&] {
    if (factored_linear_on_cpu(s) == FactoredLinearWay::multiplied_out) {
      OneOutput<scalar_t>(s, x, weight_in, weight_out, bias_in).forward(bias_out, out);
      return;
    }
    const int64_t size = keep ? kept_intermediate(kernels<scalar_t>(), s) : 0;
    if (size > 0) intermediate = empty_of(x, {size});
    Forward<scalar_t>(s, x, weight_in, weight_out, bias_in, bias_out, out,
                      size > 0 ? intermediate.mutable_data_ptr<scalar_t>() : nullptr)
        .run();
  });
  return {out, intermediate};
}

ELLA_REGISTER(CPU, m) { FactoredLinearForward<forward>::implement(m); }

}  // namespace
}  // namespace ella

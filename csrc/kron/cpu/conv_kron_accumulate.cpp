#include "conv/cpu/circular_conv2d.h"
#include "cpu/gram.h"
#include "kron/checks.h"
#include "kron/cpu/widen.h"

namespace ella {
namespace {

// Writes pieces of the matrix of patches, a row for every output position of every image, a column for every (c, i, j).
template <class S>
class Patches {
  using T = Widened<S>;

 public:
  Patches(const Tensor& x, const ConvGeometry& g)
      : data_(x.const_data_ptr<S>()), s0_(x.stride(0)), s1_(x.stride(1)), s2_(x.stride(2)), s3_(x.stride(3)), g_(g) {}

  // Columns first..first+n of rows k0..k0+count as a panel: some rows of it column by column, which reads along the image, then
  // transposed.
  void pack(int64_t first, int64_t n, int64_t k0, int64_t count, T* panel) const {
    constexpr int64_t kRows = 256;
    const Buffer<T> columns(n * kRows);
    const Kernels<T>& k = kernels<T>();
    for (int64_t done = 0; done < count; done += kRows) {
      const int64_t rows = std::min(kRows, count - done);
      for (int64_t lane = 0; lane < n; ++lane) column(first + lane, k0 + done, rows, columns.data() + lane * kRows);
      k.pack(n, rows, columns.data(), kRows, 1, panel + done * k.width);
    }
  }

 private:
  void column(int64_t p, int64_t k0, int64_t count, T* out) const {
    const int64_t kernel = g_.kernel_h * g_.kernel_w;
    const int64_t c = p / kernel, i = p % kernel / g_.kernel_w, j = p % g_.kernel_w;
    const int64_t shift_h = i * g_.dilation_h - g_.padding_h, shift_w = j * g_.dilation_w - g_.padding_w;
    int64_t row = k0 / g_.out_w, from = k0 % g_.out_w;
    while (count > 0) {
      const int64_t length = std::min(count, g_.out_w - from);
      const int64_t n = row / g_.out_h;
      int64_t h = row % g_.out_h * g_.stride_h + shift_h;
      if (g_.circular) h = wrapped(h, g_.H);
      if (h < 0 || h >= g_.H) {
        std::fill_n(out, length, T(0));
      } else {
        image_row(data_ + n * s0_ + c * s1_ + h * s2_, from * g_.stride_w + shift_w, length, out);
      }
      out += length;
      count -= length;
      from = 0;
      ++row;
    }
  }

  // Pixels w, w + stride, ... of one row: outside on the left, inside, outside on the right.
  void image_row(const S* line, int64_t w, int64_t length, T* out) const {
    int64_t done = 0;
    while (done < length) {
      const int64_t at = w + done * g_.stride_w;
      if (at < 0 || at >= g_.W) {
        out[done++] = g_.circular ? widened(line[wrapped(at, g_.W) * s3_]) : T(0);
        continue;
      }
      const int64_t inside = std::min(length - done, (g_.W - 1 - at) / g_.stride_w + 1);
      const int64_t step = g_.stride_w * s3_;
      const S* source = line + at * s3_;
      if (step == 1) {
        copy_as(source, inside, out + done);
      } else {
        for (int64_t i = 0; i < inside; ++i) out[done + i] = widened(source[i * step]);
      }
      done += inside;
    }
  }

  // Padding is at most the image, so one turn is enough.
  static int64_t wrapped(int64_t at, int64_t size) { return at < 0 ? at + size : at >= size ? at - size : at; }

  const S* data_;
  const int64_t s0_, s1_, s2_, s3_;
  const ConvGeometry& g_;
};

// Rows of the elements that the channels have at one position each: patches of a kernel of one pixel.
template <class S, class Total>
void accumulate_pixels(const Tensor& x, double alpha, Total* factor) {
  using T = Widened<S>;
  const int64_t C = x.size(1), width = x.size(3), positions = x.size(2) * width, count = x.size(0) * positions;
  const S* data = x.const_data_ptr<S>();
  const int64_t image = x.stride(0), channel = x.stride(1), down = x.stride(2), right = x.stride(3);
  const Kernels<T>& k = kernels<T>();
  const bool lines = down == width * right;
  Gram<T>(C, count).accumulate(
      factor, 1, count, alpha, [&](int64_t, int64_t first, int64_t n, int64_t k0, int64_t rows, T* panel) {
        while (rows > 0) {
          // As many positions as lie at one distance.
          const int64_t at = k0 % positions, h = at / width, w = at % width;
          const int64_t length = positions == 1 ? rows : std::min(rows, lines ? positions - at : width - w);
          pack_as(k, n, length, data + k0 / positions * image + first * channel + h * down + w * right, channel,
                  positions == 1 ? image : right, panel);
          panel += length * k.width;
          k0 += length;
          rows -= length;
        }
      });
}

// Whether patches are those of a 'same' convolution with circular padding. Then
//   sum_p x[c, p + r] x[c', p + r'] = sum_q x[c, q] x[c', q + r' - r]
// depends on the lag r' - r alone: (2 kh - 1) (2 kw - 1) sums for each pair of channels in place of (kh kw)^2.
bool same_circular(const ConvGeometry& g) {
  const bool wraps = g.circular || (g.kernel_h == 1 && g.kernel_w == 1);
  return wraps && g.stride_h == 1 && g.stride_w == 1 && g.dilation_h == 1 && g.dilation_w == 1 && g.kernel_h % 2 == 1 &&
         g.kernel_w % 2 == 1 && g.padding_h == g.kernel_h / 2 && g.padding_w == g.kernel_w / 2;
}

// circular_autocorrelation of images of any type; those of 16 bits are widened some at a time, whose sums are added in order.
template <class S>
Lags lags_of(const Tensor& x, const ConvGeometry& g) {
  const int64_t half_h = g.kernel_h - 1, half_w = g.kernel_w - 1;
  if constexpr (!kIsWidened<S>) {
    return circular_autocorrelation(x, half_h, half_w);
  } else {
    constexpr int64_t kElements = 1 << 21;  // 8 MiB
    const int64_t max_count = std::clamp(kElements / (g.C * g.H * g.W), int64_t(1), g.N);
    Lags lags = circular_autocorrelation(widened_images<S>(x, 0, max_count), half_h, half_w);
    for (int64_t first = max_count; first < g.N; first += max_count) {
      const Tensor some = widened_images<S>(x, first, std::min(max_count, g.N - first));
      const Lags more = circular_autocorrelation(some, half_h, half_w);
      for (int64_t c = 0; c < g.C; ++c) {
        for (int64_t i = (c * g.C + c) * lags.count; i < (c + 1) * g.C * lags.count; ++i) {
          lags.sums.data()[i] += more.sums.data()[i];
        }
      }
    }
    return lags;
  }
}

// The block of two channels, whose sums `near` are by the lag r' - r. A known width of the kernel needs no loop.
template <int64_t kWidth, class T>
void add_near(const ConvGeometry& g, const T* near, T* block) {
  const int64_t width = kWidth > 0 ? kWidth : g.kernel_w, row = 2 * width - 1, centre = (g.kernel_h - 1) * row + width - 1;
  for (int64_t i = 0; i < g.kernel_h; ++i) {
    for (int64_t j = 0; j < width; ++j, block += g.patch()) {
      T* to = block;
      const T* from = near + centre - i * row - j;  // that of the kernel's first entry
      for (int64_t down = 0; down < g.kernel_h; ++down, to += width, from += row) {
        for (int64_t right = 0; right < width; ++right) to[right] += from[right];
      }
    }
  }
}

// Every thread has rows of its own, those of some channels.
template <class T>
void add_lags(const ConvGeometry& g, const Lags& lags, double alpha, T* factor) {
  const int64_t kernel = g.kernel_h * g.kernel_w, row = 2 * g.kernel_w - 1, count = (2 * g.kernel_h - 1) * row, P = g.patch();
  constexpr int64_t kWorth = 1 << 14;  // elements, some microseconds
  torch::stable::parallel_for(0, g.C, std::max(kWorth / (kernel * P), int64_t(1)), [&](int64_t begin, int64_t end) {
    std::vector<T> near(count);
    for (int64_t c = begin; c < end; ++c) {
      for (int64_t other = 0; other < g.C; ++other) {
        const double* lag = lags.sums.data() + (std::min(c, other) * g.C + std::max(c, other)) * lags.count;
        for (int64_t i = 0; i < count; ++i) {
          // x[c, q] x[c', q + r] are what x[c', q] x[c, q - r] are, of which one channel with itself has both: the factor is
          // symmetric to the last bit.
          const int64_t opposite = count - 1 - i;
          near[i] = static_cast<T>(alpha * lag[lags.at[c < other ? i : c > other ? opposite : std::max(i, opposite)]]);
        }
        T* to = factor + c * kernel * P + other * kernel;
        if (g.kernel_w == 3) {
          add_near<3>(g, near.data(), to);
        } else {
          add_near<0>(g, near.data(), to);
        }
      }
    }
  });
}

void conv_kron_accumulate_(Tensor factor, const Tensor& x, std::vector<int64_t> kernel_size, std::vector<int64_t> stride,
                           std::vector<int64_t> padding, std::vector<int64_t> dilation, bool circular, double alpha,
                           bool /*allow_tf32*/) {
  const ConvGeometry g = check_conv_kron_accumulate(factor, x, kernel_size, stride, padding, dilation, circular, alpha);
  if (g.patch() == 0 || g.positions() == 0) return;
  with_factor_types(factor, x, [&](auto number, auto total) {
    using S = decltype(number);
    using T = Widened<S>;
    auto* const target = factor.mutable_data_ptr<decltype(total)>();
    if (same_circular(g)) {
      if (g.patch() == g.C && g.H * g.W < kernels<T>().vector) {  // too few to fill a vector with positions
        accumulate_pixels<S>(x, alpha, target);
        return;
      }
      add_lags(g, lags_of<S>(x, g), alpha, target);
      return;
    }
    const Patches<S> patches(x, g);
    Gram<T>(g.patch(), g.positions())
        .accumulate(target, 1, g.positions(), alpha,
                    [&](int64_t, int64_t first, int64_t n, int64_t k0, int64_t count, T* panel) {
                      patches.pack(first, n, k0, count, panel);
                    });
  });
}

ELLA_REGISTER(CPU, m) { m.impl("conv_kron_accumulate_", TORCH_BOX(&conv_kron_accumulate_)); }

}  // namespace
}  // namespace ella

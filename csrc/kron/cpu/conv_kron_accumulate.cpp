#include "conv/cpu/circular_conv2d.h"
#include "cpu/gram.h"
#include "kron/checks.h"
#include "kron/cpu/pixel_pairs.h"
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
  const bool lines = down == width * right, one_line = lines && image == positions * right;
  Gram<T>(C, count).accumulate(
      factor, 1, count, alpha, [&](int64_t, int64_t first, int64_t n, int64_t k0, int64_t rows, T* panel) {
        while (rows > 0) {
          // As many positions as lie at one distance.
          const int64_t at = k0 % positions, h = at / width, w = at % width;
          const int64_t length = positions == 1 || one_line ? rows : std::min(rows, lines ? positions - at : width - w);
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

// Sums of several batches' lags.
void add_sums(const Lags& more, int64_t C, Lags& lags) {
  for (int64_t c = 0; c < C; ++c) {
    for (int64_t i = (c * C + c) * lags.count; i < (c + 1) * C * lags.count; ++i) lags.sums.data()[i] += more.sums.data()[i];
  }
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
      add_sums(circular_autocorrelation(some, half_h, half_w), g.C, lags);
    }
    return lags;
  }
}

// The lag's sum of two channels, of which the one of the smaller number has them: x[c, q] x[c', q + r] are what x[c', q] x[c, q
// - r] are. Of one channel with itself a lag and its opposite have both, and the greater index is taken: the factor is
// symmetric to the last bit. `index` counts the lags row by row, `count` of them.
double lag_sum(const Lags& lags, int64_t C, int64_t c, int64_t other, int64_t index, int64_t count) {
  const int64_t opposite = count - 1 - index;
  const double* const sums = lags.sums.data() + (std::min(c, other) * C + std::max(c, other)) * lags.count;
  return sums[lags.at[c < other ? index : c > other ? opposite : std::max(index, opposite)]];
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
        for (int64_t i = 0; i < count; ++i) near[i] = static_cast<T>(alpha * lag_sum(lags, g.C, c, other, i, count));
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

// ---- 3x3 kernels with a border of zeros ----

// Whether patches are those of a 'same' convolution with zeros around images that are not small beside their border.
bool same_with_zeros(const ConvGeometry& g) {
  constexpr int64_t kSmallest = 6;
  return !g.circular && g.kernel_h == 3 && g.kernel_w == 3 && g.stride_h == 1 && g.stride_w == 1 && g.dilation_h == 1 &&
         g.dilation_w == 1 && g.padding_h == 1 && g.padding_w == 1 && std::min(g.H, g.W) >= kSmallest;
}

// Of positions p in the image, sum_p x[c, p + r] x[c', p + r'] is that of all p, which depends on the lag r' - r alone, less
// that of the p just outside. Above the image, r and r' both lead to its first row, or x is zero for one of them; there the sum
// is one of that row alone, and depends on the horizontal lag. Below, left and right of the image likewise; a corner's p are
// among those of two sides. Of the kernel's rows 0 and 2 the image has the last and the first row, which comes in this order,
// as columns do.
struct BorderedLags {
  template <class T>
  BorderedLags(const Images<T>& x, int64_t N, const ConvGeometry& g)
      : whole(zero_autocorrelation(x, N, g.C, g.H, g.W, 2, 2)),
        rows{line(x, N, g, g.H - 1, 0, g.W, x.right), line(x, N, g, 0, 0, g.W, x.right)},
        columns{line(x, N, g, 0, g.W - 1, g.H, x.down), line(x, N, g, 0, 0, g.H, x.down)},
        corners{{line(x, N, g, g.H - 1, g.W - 1, 1, 1), line(x, N, g, g.H - 1, 0, 1, 1)},
                {line(x, N, g, 0, g.W - 1, 1, 1), line(x, N, g, 0, 0, 1, 1)}} {}

  void add(const BorderedLags& more, int64_t C) {
    add_sums(more.whole, C, whole);
    for (int64_t i = 0; i < 2; ++i) {
      add_sums(more.rows[i], C, rows[i]);
      add_sums(more.columns[i], C, columns[i]);
      for (int64_t j = 0; j < 2; ++j) add_sums(more.corners[i][j], C, corners[i][j]);
    }
  }

  // The pixels of a row or column from (h, w) on.
  template <class T>
  static Lags line(const Images<T>& x, int64_t N, const ConvGeometry& g, int64_t h, int64_t w, int64_t size, int64_t step) {
    Images<T> pixels = x;
    pixels.data += h * x.down + w * x.right;
    pixels.down = 0, pixels.right = step;
    return zero_autocorrelation(pixels, N, g.C, 1, size, 0, size == 1 ? 0 : 2);
  }

  Lags whole, rows[2], columns[2], corners[2][2];
};

template <class S>
BorderedLags bordered_lags(const Tensor& x, const ConvGeometry& g) {
  if constexpr (!kIsWidened<S>) {
    return BorderedLags(Images<S>(x), g.N, g);
  } else {
    constexpr int64_t kElements = 1 << 21;  // 8 MiB
    const int64_t max_count = std::clamp(kElements / (g.C * g.H * g.W), int64_t(1), g.N);
    const auto of = [&](int64_t first) {
      const int64_t count = std::min(max_count, g.N - first);
      const Tensor some = widened_images<S>(x, first, count);
      return BorderedLags(Images<float>(some), count, g);
    };
    BorderedLags lags = of(0);
    for (int64_t first = max_count; first < g.N; first += max_count) lags.add(of(first), g.C);
    return lags;
  }
}

template <class S, class Total>
void add_with_zeros(const Tensor& x, const ConvGeometry& g, double alpha, Total* factor) {
  const BorderedLags lags = bordered_lags<S>(x, g);
  const int64_t P = g.patch();
  constexpr int64_t kWorth = 1 << 14;
  torch::stable::parallel_for(0, g.C, std::max(kWorth / (9 * P), int64_t(1)), [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      for (int64_t other = 0; other < g.C; ++other) {
        double near[25], beside[2][5], below[2][5], both[2][2];
        for (int64_t i = 0; i < 25; ++i) near[i] = lag_sum(lags.whole, g.C, c, other, i, 25);
        for (int64_t side = 0; side < 2; ++side) {
          for (int64_t i = 0; i < 5; ++i) {
            beside[side][i] = lag_sum(lags.rows[side], g.C, c, other, i, 5);
            below[side][i] = lag_sum(lags.columns[side], g.C, c, other, i, 5);
          }
          for (int64_t i = 0; i < 2; ++i) both[side][i] = lag_sum(lags.corners[side][i], g.C, c, other, 0, 1);
        }
        for (int64_t i = 0; i < 3; ++i) {
          for (int64_t j = 0; j < 3; ++j) {
            Total* const to = factor + (c * 9 + i * 3 + j) * P + other * 9;
            for (int64_t k = 0; k < 3; ++k) {
              for (int64_t l = 0; l < 3; ++l) {
                double sum = near[(2 + k - i) * 5 + 2 + l - j];
                const bool same_row = i == k && i != 1, same_column = j == l && j != 1;
                if (same_row) sum -= beside[i / 2][2 + l - j];
                if (same_column) sum -= below[j / 2][2 + k - i];
                if (same_row && same_column) sum += both[i / 2][j / 2];
                to[k * 3 + l] += static_cast<Total>(alpha * sum);
              }
            }
          }
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
      // Too few positions to fill a vector with, or channels that lie beside each other.
      if (g.patch() == g.C && (g.H * g.W < kernels<T>().vector || x.stride(1) == 1)) {
        accumulate_pixels<S>(x, alpha, target);
        return;
      }
      add_lags(g, lags_of<S>(x, g), alpha, target);
      return;
    }
    const bool has_lags = same_with_zeros(g);
    if (PixelPairs<S>::suits(g, has_lags)) {
      const PixelPairs<S> pairs(x, g);
      if (pairs.pays()) {
        pairs.accumulate(alpha, target);
        return;
      }
    }
    if (has_lags) {
      add_with_zeros<S>(x, g, alpha, target);
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

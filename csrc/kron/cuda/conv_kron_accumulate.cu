// conv_kron_accumulate_: factor += alpha * sum a a^T over the patches a of a convolution, gathered from the images into the
// tiles of the product, or by lags (lags.cuh). Images with a border are copied with it first: an element's address is then its
// row's and its column's sum; asking each whether it lies beyond a border would take a third of all instructions.
#include <algorithm>
#include <optional>

#include "conv/cuda/padded_images.cuh"
#include "kron/checks.h"
#include "kron/cuda/lags.cuh"
#include "kron/cuda/syrk.cuh"
#include "kron/cuda/widened.cuh"

namespace ella {
namespace {

#ifndef ELLA_MAX_ELEMENTS
#define ELLA_MAX_ELEMENTS (1 << 30)
#endif
constexpr int64_t kMaxElements = ELLA_MAX_ELEMENTS;  // of a padded image, and positions at a time: counted in 32 bits
#ifndef ELLA_MAX_PADDED_ELEMENTS
#define ELLA_MAX_PADDED_ELEMENTS (1 << 26)
#endif
constexpr int64_t kMaxPadded = ELLA_MAX_PADDED_ELEMENTS;  // copied at a time: 256 MiB of floats

// Row r = (n, oh, ow), column i = (c, kernel row, kernel column) as in torch.nn.functional.unfold; images (N, C, H, W) with
// their border, read through their strides. Neighbouring rows are neighbouring output positions.
template <class T>
struct Patches {
  static constexpr bool kRowsAdjacent = true;

  using Row = uint32_t;     // a patch's first element, by its distance from the first of all
  using Column = uint32_t;  // an element's distance from there

  const T* data;
  uint32_t stride_n, stride_c, stride_h, stride_w;  // of an axis of one it may wrap, where it is not used
  uint32_t step_h, step_w;                          // from patch to patch, in memory; likewise
  Divisor<uint32_t> positions, out_w;
  int kernel_h, kernel_w, dilation_h, dilation_w;

  Patches(const Image<T>& x, const ConvGeometry& shape)
      : data(x.data),
        stride_n(static_cast<uint32_t>(x.n)),
        stride_c(static_cast<uint32_t>(x.c)),
        stride_h(static_cast<uint32_t>(x.h)),
        stride_w(static_cast<uint32_t>(x.w)),
        step_h(static_cast<uint32_t>(shape.stride_h * x.h)),
        step_w(static_cast<uint32_t>(shape.stride_w * x.w)),
        positions(shape.out_h * shape.out_w),
        out_w(shape.out_w),
        kernel_h(static_cast<int>(shape.kernel_h)),
        kernel_w(static_cast<int>(shape.kernel_w)),
        dilation_h(static_cast<int>(shape.dilation_h)),
        dilation_w(static_cast<int>(shape.dilation_w)) {}

  __device__ __forceinline__ Row row(int64_t r) const {
    const uint32_t row = static_cast<uint32_t>(r), n = positions(row), p = row - n * positions.value();
    const uint32_t oh = out_w(p), ow = p - oh * out_w.value();
    return n * stride_n + oh * step_h + ow * step_w;
  }

  __device__ __forceinline__ Column column(int64_t, int64_t i) const {
    const int at = static_cast<int>(i), area = kernel_h * kernel_w, c = at / area, k = at - c * area;
    const int u = k / kernel_w, v = k - u * kernel_w;
    return c * stride_c + u * dilation_h * stride_h + v * dilation_w * stride_w;
  }

  __device__ __forceinline__ bool rows_adjacent() const { return true; }

  __device__ __forceinline__ const T* address(Row row, Column column) const { return data + (row + column); }
};

// From an image's first element to its last.
template <class T>
int64_t span(const Image<T>& x, const ConvGeometry& g) {
  return (g.C - 1) * x.c + (g.H - 1) * x.h + (g.W - 1) * x.w;
}

// Whether patches are those of a 'same' convolution with circular padding.
bool same_circular(const ConvGeometry& g) {
  return g.circular && g.stride_h == 1 && g.stride_w == 1 && g.dilation_h == 1 && g.dilation_w == 1 && g.kernel_h % 2 == 1 &&
         g.kernel_w % 2 == 1 && g.padding_h == g.kernel_h / 2 && g.padding_w == g.kernel_w / 2;
}

// Adds by lags where the kernel is 3 or 5 wide, the images fit and the count says so; false where it did not.
template <class T, int KW>
bool tried_lags(const Device& device, const char* name, const Tensor& factor, const Image<T>& x, const ConvGeometry& g,
                double alpha, bool tf32) {
  const CudaPath path = cuda_path();
  const std::optional<LagShape> shape = lag_shape<T, KW>(g);
  if (!shape || path.lags == CudaPath::Choice::no) return false;
  if (path.lags == CudaPath::Choice::automatic) {
    // A path that fixes product or tile means patches: lags have neither choice.
    if (path.product != CudaPath::Product::automatic || path.tile != 0) return false;
    // In multiply-adds by ordinary instructions. Five products of tensor cores are taken to last as long as one of those; a
    // split operand takes three.
    const int64_t d = g.patch(), results = int64_t{shape->tasks} * LagTile<KW>::kResults;
    const int64_t tile = sizeof(T) == 4 && d >= 32 ? 128 : d <= 16 ? 16 : d <= 32 ? 32 : 64;
    const double patches = static_cast<double>(syrk_products(d, tile)) * (tile < 128 ? 1.0 : tf32 ? 0.2 : 0.6);
    // A wider factor has the sums of every unit, others those of as many splits as there are blocks.
    const bool widens = factor.scalar_type() != kScalarType<T>;
    const int64_t splits = widens ? shape->units : std::min(shape->units, 2 * device.multiprocessors());
    const double moved = static_cast<double>(kLagElementCost) * static_cast<double>(results) * static_cast<double>(splits);
    const double positions = static_cast<double>(g.positions());
    if (positions * static_cast<double>(results) + moved > positions * patches) return false;
  }
  add_lags<T, KW>(device, name, factor, x, *shape, alpha, path.split);
  return true;
}

// Of images of float or double, as for syrk.
template <class T>
void accumulate(const Device& device, const char* name, const Tensor& factor, const Image<T>& x, const ConvGeometry& geometry,
                double alpha, bool tf32) {
  if (same_circular(geometry)) {
    if (geometry.kernel_w == 3 && tried_lags<T, 3>(device, name, factor, x, geometry, alpha, tf32)) return;
    if (geometry.kernel_w == 5 && tried_lags<T, 5>(device, name, factor, x, geometry, alpha, tf32)) return;
  }
  ELLA_CHECK(
      cuda_path().lags != CudaPath::Choice::yes, name,
      ": ELLA_CUDA_PATH: lags=yes is for stride 1, dilation 1 and the circular padding that keeps the size, for kernels 3 or "
      "5 wide and images of at most 512 columns whose rows fit in shared memory");
  const bool copies = geometry.padding_h > 0 || geometry.padding_w > 0 || span(x, geometry) > kMaxElements;
  const int64_t padded = geometry.C * (geometry.H + 2 * geometry.padding_h) * (geometry.W + 2 * geometry.padding_w);
  // Positions, and elements from the first to the last.
  int64_t at_once = kMaxElements / std::max(geometry.out_h * geometry.out_w, copies ? int64_t{1} : x.n);
  at_once = std::max(at_once, int64_t{1});
  if (copies) at_once = std::min(at_once, std::max(kMaxPadded / padded, int64_t{1}));
  for (int64_t first = 0; first < geometry.N; first += at_once) {
    const int64_t count = std::min(at_once, geometry.N - first);
    std::optional<Tensor> copy;  // kept until the kernels are queued
    Image<T> from = x;
    from.data += first * from.n;
    if (copies) {
      const auto pad = geometry.circular ? padded_images<T, true> : padded_images<T, false>;
      copy = pad(device, name, factor, from, {count, geometry.C, geometry.H, geometry.W}, geometry.padding_h,
                 geometry.padding_w, Components());
      from = image<T>(*copy);
    }
    syrk<T>(device, name, Patches<T>(from, geometry), factor, 1, geometry.patch(), count * geometry.out_h * geometry.out_w,
            alpha, tf32);
  }
}

void conv_kron_accumulate_(Tensor factor, const Tensor& x, const std::vector<int64_t>& kernel_size,
                           const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                           const std::vector<int64_t>& dilation, bool circular, double alpha, bool allow_tf32) {
  constexpr const char* name = "conv_kron_accumulate_";
  const ConvGeometry all = check_conv_kron_accumulate(factor, x, kernel_size, stride, padding, dilation, circular, alpha);
  if (all.positions() == 0 || factor.numel() == 0 || x.numel() == 0) return;  // of a border alone, patches are zero
  const int64_t padded_h = all.H + 2 * all.padding_h, padded_w = all.W + 2 * all.padding_w;
  ELLA_CHECK(std::max(padded_h, padded_w) <= kMaxElements && padded_h * padded_w <= kMaxElements / all.C, name,
             ": an image with its padding may have at most ", kMaxElements, " numbers, got ", all.C, " x ", padded_h, " x ",
             padded_w);
  const Device device(factor);
  with_row_type(x, [&](auto number) {
    using S = decltype(number);
    using T = Widened<S>;
    // Of as many positions as a patch has elements the products are most of the work, not the factor's way through memory; but
    // no more elements than the factor has.
    const int64_t min_count = std::min(ceil_div(all.patch(), all.out_h * all.out_w), factor.numel() / (all.C * all.H * all.W));
    for_widened(device, name, x, image<S>(x), {all.N, all.C, all.H, all.W}, min_count,
                [&](const Image<T>& some, int64_t count) {
                  ConvGeometry geometry = all;
                  geometry.N = count;
                  accumulate(device, name, factor, some, geometry, alpha, allow_tf32 || kIsWidened<S>);
                });
  });
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) { m.impl("conv_kron_accumulate_", TORCH_BOX(&conv_kron_accumulate_)); }

}  // namespace
}  // namespace ella

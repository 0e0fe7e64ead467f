// conv_kron_accumulate_: factor += alpha * sum a a^T over the patches a of a convolution, gathered from the images into the
// tiles of the product, or by lags (lags.cuh). An element's address is its row's and its column's sum, and so is its place,
// which says whether it lies in a border of zeros: that takes four instructions beside some ten that copy it. Images with a
// circular border are copied with it first.
#include <algorithm>
#include <optional>

#include "conv/cuda/padded_images.cuh"
#include "kron/checks.h"
#include "kron/cuda/lags.cuh"
#include "kron/cuda/syrk.cuh"

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

// Row r = (n, oh, ow), column i = (c, kernel row, kernel column) as in torch.nn.functional.unfold; images (N, C, H, W) read
// through their strides, with zeros around them. Neighbouring rows are neighbouring output positions.
template <class T>
struct Patches {
  static constexpr bool kRowsAdjacent = true;

  // An element's place has two fields of 16 bits, rows of the image above columns. Where a row's and a column's sum says that
  // it is at or behind the first pixel of both, and the other sum not that it is behind the last, it lies in the image.
  static constexpr uint32_t kInside = 0x80008000u;

  struct Row {
    const T* from;
    uint32_t place, beyond;
  };

  struct Column {
    uint32_t at, place;
  };

  const T* data;
  Column image, channel, tap_h, tap_w, step_h, step_w;  // to the next, for patches by steps; of an axis of one they may wrap
  Column first, size;                                   // patch; image
  Divisor<uint32_t> positions{1}, out_w{1};
  int kernel_w, area;

  Patches() = default;

  Patches(const Image<T>& x, const ConvGeometry& g)
      : data(x.data),
        positions(g.out_h * g.out_w),
        out_w(g.out_w),
        kernel_w(static_cast<int>(g.kernel_w)),
        area(static_cast<int>(g.kernel_h * g.kernel_w)) {
    const bool borders = g.padding_h > 0 || g.padding_w > 0;
    const auto distance = [&](int64_t h, int64_t w) {
      return Column{static_cast<uint32_t>(h * x.h + w * x.w), static_cast<uint32_t>(borders ? h * (1 << 16) + w : 0)};
    };
    image = {static_cast<uint32_t>(x.n), 0}, channel = {static_cast<uint32_t>(x.c), 0};
    tap_h = distance(g.dilation_h, 0), tap_w = distance(0, g.dilation_w);
    step_h = distance(g.stride_h, 0), step_w = distance(0, g.stride_w);
    first = distance(-g.padding_h, -g.padding_w), size = distance(g.H, g.W);
    first.place += kInside;
    if (!borders) size.place = kInside;
  }

  // Whether places of images with that border have enough bits.
  static bool has_places(const ConvGeometry& g) { return std::max(g.H + g.padding_h, g.W + g.padding_w) <= 1 << 15; }

  __device__ __forceinline__ Row row(int64_t r) const {
    const uint32_t row = static_cast<uint32_t>(r), n = positions(row), p = row - n * positions.value();
    const uint32_t oh = out_w(p), ow = p - oh * out_w.value();
    const uint32_t at = first.at + n * image.at + oh * step_h.at + ow * step_w.at;
    const uint32_t place = first.place + oh * step_h.place + ow * step_w.place;
    return {data + static_cast<int32_t>(at), place, place - size.place};
  }

  __device__ __forceinline__ Column column(int64_t, int64_t i) const {
    const uint32_t at = static_cast<uint32_t>(i), c = at / area, k = at - c * area, u = k / kernel_w, v = k - u * kernel_w;
    return {c * channel.at + u * tap_h.at + v * tap_w.at, u * tap_h.place + v * tap_w.place};
  }

  __device__ __forceinline__ bool inside(const Row& row, const Column& column) const {
    return ((row.place + column.place) & ~(row.beyond + column.place) & kInside) == kInside;
  }

  __device__ __forceinline__ bool rows_adjacent() const { return true; }

  __device__ __forceinline__ const T* address(const Row& row, const Column& column) const { return row.from + column.at; }
};

template <class T>
using PatchQueue = SyrkQueue<T, Patches<T>>;

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

// Of images x of float or double; sums by patches wait in the queue, unless they need copies.
template <class T>
void accumulate(const Device& device, const char* name, PatchQueue<T>& queue, const Tensor& factor, const Image<T>& x,
                const ConvGeometry& geometry, double alpha, bool tf32) {
  if (same_circular(geometry)) {
    queue.settle(factor);
    if (geometry.kernel_w == 3 && tried_lags<T, 3>(device, name, factor, x, geometry, alpha, tf32)) return;
    if (geometry.kernel_w == 5 && tried_lags<T, 5>(device, name, factor, x, geometry, alpha, tf32)) return;
  }
  ELLA_CHECK(
      cuda_path().lags != CudaPath::Choice::yes, name,
      ": ELLA_CUDA_PATH: lags=yes is for stride 1, dilation 1 and the circular padding that keeps the size, for kernels 3 or "
      "5 wide and images of at most 512 columns whose rows fit in shared memory");
  const bool borders = geometry.padding_h > 0 || geometry.padding_w > 0;
  const bool copies = (borders && (geometry.circular || !Patches<T>::has_places(geometry))) || span(x, geometry) > kMaxElements;
  const int64_t padded = geometry.C * (geometry.H + 2 * geometry.padding_h) * (geometry.W + 2 * geometry.padding_w);
  // Positions, and elements from the first to the last.
  int64_t at_once = kMaxElements / std::max(geometry.out_h * geometry.out_w, copies ? int64_t{1} : x.n);
  at_once = std::max(at_once, int64_t{1});
  if (copies) at_once = std::min(at_once, std::max(kMaxPadded / padded, int64_t{1}));
  for (int64_t first = 0; first < geometry.N; first += at_once) {
    ConvGeometry some = geometry;
    some.N = std::min(at_once, geometry.N - first);
    std::optional<Tensor> copy;  // kept until the kernels are queued
    Image<T> from = x;
    from.data += first * from.n;
    if (copies) {
      const auto pad = geometry.circular ? padded_images<T, true> : padded_images<T, false>;
      copy = pad(device, name, factor, from, {some.N, some.C, some.H, some.W}, some.padding_h, some.padding_w, Components());
      from = image<T>(*copy);
      some.padding_h = some.padding_w = 0;
    }
    queue.add({Patches<T>(from, some), factor, 1, some.patch(), some.positions(), alpha, tf32});
    if (copies) queue.run();
  }
}

constexpr size_t kGeometry = 9;  // numbers that say which patches: kernel size, stride, padding, dilation, circular

// Every factors[i] += alphas[i] * sum over the patches of its images, which kGeometry numbers of `geometries` describe.
void conv_kron_accumulate_many_(const std::vector<Tensor>& factors, const std::vector<Tensor>& images,
                                const std::vector<int64_t>& geometries, const std::vector<double>& alphas, bool allow_tf32) {
  constexpr const char* name = "conv_kron_accumulate_";
  check_many("conv_kron_accumulate_many_", factors, images.size(), alphas.size());
  ELLA_CHECK(geometries.size() == kGeometry * factors.size(), "conv_kron_accumulate_many_: geometries must have ", kGeometry,
             " numbers for each factor, got ", geometries.size());
  if (factors.empty()) return;
  const Device device(factors.front());
  PatchQueue<float> single(device, name);
  PatchQueue<double> wide(device, name);
  for (size_t i = 0; i < factors.size(); ++i) {
    const Tensor &factor = factors[i], &x = images[i];
    const auto pair = [&](size_t at) {
      const auto begin = geometries.begin() + static_cast<std::ptrdiff_t>(kGeometry * i + 2 * at);
      return std::vector<int64_t>(begin, begin + 2);
    };
    const ConvGeometry all = check_conv_kron_accumulate(factor, x, pair(0), pair(1), pair(2), pair(3),
                                                        geometries[kGeometry * i + 8] != 0, alphas[i]);
    if (all.positions() == 0 || factor.numel() == 0 || x.numel() == 0) continue;  // of a border alone, patches are zero
    const int64_t padded_h = all.H + 2 * all.padding_h, padded_w = all.W + 2 * all.padding_w;
    ELLA_CHECK(std::max(padded_h, padded_w) <= kMaxElements && padded_h * padded_w <= kMaxElements / all.C, name,
               ": an image with its padding may have at most ", kMaxElements, " numbers, got ", all.C, " x ", padded_h, " x ",
               padded_w);
    if (x.scalar_type() == ScalarType::Double) {
      single.settle(factor);
      accumulate(device, name, wide, factor, image<double>(x), all, alphas[i], false);
      continue;
    }
    wide.settle(factor);
    // Of as many positions as a patch has elements the products are most of the work, not the factor's way through memory; but
    // no more elements than the factor has.
    const int64_t min_count = std::min(ceil_div(all.patch(), all.out_h * all.out_w), factor.numel() / (all.C * all.H * all.W));
    for_widened(x, min_count, [&](const Tensor& some, bool copied) {
      ConvGeometry geometry = all;
      geometry.N = some.size(0);
      accumulate(device, name, single, factor, image<float>(some), geometry, alphas[i], allow_tf32 || copied);
      if (copied) single.run();  // the copy's memory is for the next
    });
  }
  single.run(), wide.run();
}

void conv_kron_accumulate_(const Tensor& factor, const Tensor& x, const std::vector<int64_t>& kernel_size,
                           const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                           const std::vector<int64_t>& dilation, bool circular, double alpha, bool allow_tf32) {
  std::vector<int64_t> geometry;
  for (const auto* pair : {&kernel_size, &stride, &padding, &dilation}) {
    geometry.insert(geometry.end(), pair->begin(), pair->end());
  }
  geometry.push_back(circular);
  conv_kron_accumulate_many_({factor}, {x}, geometry, {alpha}, allow_tf32);
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) {
  m.impl("conv_kron_accumulate_", TORCH_BOX(&conv_kron_accumulate_));
  m.impl("conv_kron_accumulate_many_", TORCH_BOX(&conv_kron_accumulate_many_));
}

}  // namespace
}  // namespace ella

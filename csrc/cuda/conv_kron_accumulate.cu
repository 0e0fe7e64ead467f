// conv_kron_accumulate_: factor += alpha * sum a a^T over the patches a of a convolution, gathered straight from the image into
// the tiles of the product.
#include "../common/checks.h"
#include "syrk.cuh"

namespace ella {
namespace {

constexpr int64_t kMaxSide = 1 << 30;  // places in an image are counted in 32 bits

// Row r = (n, oh, ow), column i = (c, kernel row, kernel column) as in torch.nn.functional.unfold; x (N, C, H, W) read through
// its strides. Neighbouring rows are neighbouring output positions.
template <class T>
struct Patches {
  static constexpr bool kRowsAdjacent = true;

  // Of a patch's first element, or relative to it: the distance in memory as if there were no border, and the place in the
  // unpadded image (a row's may be negative), by which the border is known.
  struct Row {
    int64_t offset;
    int h, w;
  };
  using Column = Row;

  const T* data;
  int64_t stride_n, stride_c, stride_h, stride_w;
  ConvGeometry geometry;
  int H, W;
  int64_t turn_h, turn_w;  // once around the image, in memory
  bool circular;

  Patches(const Tensor& x, const ConvGeometry& shape)
      : data(x.const_data_ptr<T>()),
        stride_n(x.stride(0)),
        stride_c(x.stride(1)),
        stride_h(x.stride(2)),
        stride_w(x.stride(3)),
        geometry(shape),
        H(static_cast<int>(shape.H)),
        W(static_cast<int>(shape.W)),
        turn_h(shape.H * stride_h),
        turn_w(shape.W * stride_w),
        circular(shape.circular) {}

  __device__ __forceinline__ Row row(int64_t r) const {
    const int64_t positions = geometry.out_h * geometry.out_w, n = r / positions, p = r - n * positions;
    const int64_t oh = p / geometry.out_w, ow = p - oh * geometry.out_w;
    const int64_t h = oh * geometry.stride_h - geometry.padding_h, w = ow * geometry.stride_w - geometry.padding_w;
    return {n * stride_n + h * stride_h + w * stride_w, static_cast<int>(h), static_cast<int>(w)};
  }

  __device__ __forceinline__ Column column(int64_t, int64_t i) const {
    const int64_t area = geometry.kernel_h * geometry.kernel_w, c = i / area, k = i - c * area;
    const int64_t u = k / geometry.kernel_w, h = u * geometry.dilation_h;
    const int64_t w = (k - u * geometry.kernel_w) * geometry.dilation_w;
    return {c * stride_c + h * stride_h + w * stride_w, static_cast<int>(h), static_cast<int>(w)};
  }

  __device__ __forceinline__ bool rows_adjacent() const { return true; }

  // Circular padding is at most the image, so one turn is enough. Without branches: a thread asks for element after element.
  __device__ __forceinline__ const T* address(Row row, Column column, bool& inside) const {
    const int h = row.h + column.h, w = row.w + column.w;
    const bool above = h < 0, below = h >= H, left = w < 0, right = w >= W;
    int64_t offset = row.offset + column.offset;
    offset += above ? turn_h : int64_t{0};
    offset -= below ? turn_h : int64_t{0};
    offset += left ? turn_w : int64_t{0};
    offset -= right ? turn_w : int64_t{0};
    inside = inside & (circular | !(above | below | left | right));
    return data + offset;
  }
};

void conv_kron_accumulate_(Tensor factor, const Tensor& x, const std::vector<int64_t>& kernel_size,
                           const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                           const std::vector<int64_t>& dilation, bool circular, double alpha) {
  const ConvGeometry geometry = check_conv_kron_accumulate(factor, x, kernel_size, stride, padding, dilation, circular, alpha);
  if (geometry.positions() == 0 || factor.numel() == 0) return;
  ELLA_CHECK(std::max(geometry.H + 2 * geometry.padding_h, geometry.W + 2 * geometry.padding_w) <= kMaxSide,
             "conv_kron_accumulate_: a padded image may have at most ", kMaxSide, " rows and columns, got (", geometry.H, ", ",
             geometry.W, ") with padding (", geometry.padding_h, ", ", geometry.padding_w, ")");
  const Device device(factor);
  ELLA_DISPATCH_FLOATING(factor.scalar_type(), "conv_kron_accumulate_", [&] {
    const Patches<scalar_t> policy(x, geometry);
    syrk<scalar_t>(device, "conv_kron_accumulate_", policy, factor, 1, geometry.patch(), geometry.positions(), alpha);
  });
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) { m.impl("conv_kron_accumulate_", TORCH_BOX(&conv_kron_accumulate_)); }

}  // namespace
}  // namespace ella

// conv_kron_accumulate_: factor += alpha * sum a a^T over the patches a of a convolution, gathered straight from the image into
// the tiles of the product.
#include "../common/checks.h"
#include "syrk.cuh"

namespace ella {
namespace {

// Row r = (n, oh, ow), column i = (c, kernel row, kernel column) as in torch.nn.functional.unfold; x (N, C, H, W) read through
// its strides. Neighbouring rows are neighbouring output positions.
template <class T>
struct Patches {
  struct Row {
    int64_t image;  // offset of image n
    int64_t h, w;   // of the patch's first element, in the unpadded image (may be negative)
  };
  struct Column {
    int64_t channel;  // offset of channel c
    int64_t h, w;     // within the patch, dilation included
  };

  const T* data;
  int64_t stride_n, stride_c, stride_h, stride_w;
  ConvGeometry geometry;

  __device__ __forceinline__ Row row(int64_t r) const {
    const int64_t positions = geometry.out_h * geometry.out_w, n = r / positions, p = r - n * positions;
    const int64_t oh = p / geometry.out_w, ow = p - oh * geometry.out_w;
    return {n * stride_n, oh * geometry.stride_h - geometry.padding_h, ow * geometry.stride_w - geometry.padding_w};
  }

  __device__ __forceinline__ Column column(int64_t, int64_t i) const {
    const int64_t area = geometry.kernel_h * geometry.kernel_w, c = i / area, k = i - c * area;
    const int64_t u = k / geometry.kernel_w, v = k - u * geometry.kernel_w;
    return {c * stride_c, u * geometry.dilation_h, v * geometry.dilation_w};
  }

  __device__ __forceinline__ bool rows_adjacent() const { return true; }

  __device__ __forceinline__ const T* address(Row row, Column column, bool& inside) const {
    int64_t h = row.h + column.h, w = row.w + column.w;
    if (geometry.circular) {  // padding is at most the image, so one turn is enough
      h += h < 0 ? geometry.H : h >= geometry.H ? -geometry.H : 0;
      w += w < 0 ? geometry.W : w >= geometry.W ? -geometry.W : 0;
    } else {
      inside = inside && h >= 0 && h < geometry.H && w >= 0 && w < geometry.W;
    }
    return data + row.image + column.channel + h * stride_h + w * stride_w;
  }
};

void conv_kron_accumulate_(Tensor factor, const Tensor& x, const std::vector<int64_t>& kernel_size,
                           const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                           const std::vector<int64_t>& dilation, bool circular, double alpha) {
  const ConvGeometry geometry = check_conv_kron_accumulate(factor, x, kernel_size, stride, padding, dilation, circular);
  if (geometry.positions() == 0 || factor.numel() == 0) return;
  const Device device(factor);
  ELLA_DISPATCH_FLOATING(factor.scalar_type(), "conv_kron_accumulate_", [&] {
    const Patches<scalar_t> policy{x.const_data_ptr<scalar_t>(), x.stride(0), x.stride(1), x.stride(2), x.stride(3), geometry};
    syrk<scalar_t>(device, "conv_kron_accumulate_", policy, factor, 1, geometry.patch(), geometry.positions(), alpha);
  });
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) { m.impl("conv_kron_accumulate_", TORCH_BOX(&conv_kron_accumulate_)); }

}  // namespace
}  // namespace ella

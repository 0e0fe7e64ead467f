#include "../common/checks.h"

namespace ella {
namespace {

void conv_kron_accumulate_(Tensor factor, const Tensor& x, std::vector<int64_t> kernel_size, std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation, bool circular, double alpha) {
  const auto g = check_conv_kron_accumulate(factor, x, kernel_size, stride, padding, dilation, circular);
  ELLA_DISPATCH_FLOATING(factor.scalar_type(), "conv_kron_accumulate_", [&] {
    scalar_t* f = factor.mutable_data_ptr<scalar_t>();
    const scalar_t* p = x.const_data_ptr<scalar_t>();
    const int64_t P = g.patch();
    std::vector<scalar_t> a(P), sum(P * P);
    for (int64_t n = 0; n < g.N; ++n) for (int64_t oh = 0; oh < g.out_h; ++oh) for (int64_t ow = 0; ow < g.out_w; ++ow) {
      for (int64_t c = 0, k = 0; c < g.C; ++c) for (int64_t i = 0; i < g.kernel_h; ++i) for (int64_t j = 0; j < g.kernel_w; ++j, ++k) {
        int64_t h = oh * g.stride_h + i * g.dilation_h - g.padding_h, w = ow * g.stride_w + j * g.dilation_w - g.padding_w;
        if (g.circular) h = (h + g.H) % g.H, w = (w + g.W) % g.W;
        a[k] = h >= 0 && h < g.H && w >= 0 && w < g.W ? p[n * x.stride(0) + c * x.stride(1) + h * x.stride(2) + w * x.stride(3)] : scalar_t(0);
      }
      for (int64_t i = 0; i < P; ++i) for (int64_t j = 0; j < P; ++j) sum[i * P + j] += a[i] * a[j];
    }
    for (int64_t i = 0; i < P * P; ++i) f[i] += scalar_t(alpha) * sum[i];
  });
}

ELLA_REGISTER(CPU, m) { m.impl("conv_kron_accumulate_", TORCH_BOX(&conv_kron_accumulate_)); }

}  // namespace
}  // namespace ella

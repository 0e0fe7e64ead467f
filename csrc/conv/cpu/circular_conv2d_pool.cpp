// Circular convolution and the choice of a polyphase component of each image, while the image is in the cache.
#include <tuple>

#include "conv/cpu/dense_convolution.h"
#include "conv/cpu/polyphase.h"

namespace ella {
namespace {

template <class T>
class Chosen {
 public:
  Chosen(const CircularConvSizes& s, int64_t max_count, Norm norm, T* out, int64_t* index)
      : pooled_{s.N, s.D, s.H / 2, s.W / 2},
        size_(s.D * s.H * s.W),
        room_(max_count * size_),
        largest_(pooled_, norm),
        out_(out),
        index_(index) {}

  T* place(int64_t) const { return room_.data(); }

  void done(int64_t n, int64_t count) {
    const int64_t plane = 4 * pooled_.h * pooled_.w;
    const Image<const T> images{room_.data(), size_, plane, 2 * pooled_.w, 1};
    for (int64_t i = 0; i < count; ++i) {
      index_[n + i] = largest_(images, i);
      select_component(images, pooled_, i, index_[n + i], out_ + (n + i) * size_ / 4);
    }
  }

 private:
  const PolyphaseSizes pooled_;
  const int64_t size_;
  const Buffer<T> room_;
  LargestComponent<T> largest_;
  T* const out_;
  int64_t* const index_;
};

std::tuple<Tensor, Tensor> circular_conv2d_pool(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                                double norm) {
  const CircularConvSizes s = check_circular_conv2d_pool(x, weight, bias, norm);
  Tensor out = empty_of(x, {s.N, s.D, s.H / 2, s.W / 2});
  if (out.numel() == 0) return {out, zeros_of(x, {s.N}, ScalarType::Long)};
  Tensor index = empty_of(x, {s.N}, ScalarType::Long);
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "circular_conv2d_pool", [&] {
    const std::vector<scalar_t> elements = bias_elements<scalar_t>(bias);
    scalar_t* pooled = out.mutable_data_ptr<scalar_t>();
    int64_t* chosen = index.mutable_data_ptr<int64_t>();
    convolve(s, x, weight, bias ? elements.data() : nullptr,
             [&](int64_t max_count) { return Chosen<scalar_t>(s, max_count, polyphase_norm(norm), pooled, chosen); });
  });
  return {out, index};
}

ELLA_REGISTER(CPU, m) { m.impl("circular_conv2d_pool", TORCH_BOX(&circular_conv2d_pool)); }

}  // namespace
}  // namespace ella

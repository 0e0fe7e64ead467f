// averaged_filters and its gradients. Activations of one transform, some filters and a panel of images are there at a time: a
// tile, which joins the sums over transforms at once, or becomes what the gradients are products with. Tasks are cut by sizes
// alone, and each owns its results: no result depends on threads.
#include <algorithm>
#include <optional>
#include <tuple>

#include "cpu/gram.h"
#include "filters/checks.h"

namespace ella {
namespace {

constexpr int64_t kFilters = 64;     // of a tile
constexpr int64_t kPanels = 4;       // of images that a task's filters meet, one after the other, while they are in the cache
constexpr int64_t kTransforms = 32;  // summed before the sum joins that of all, to bound rounding

// Columns of rows that lie anywhere, as panels one behind the other: panel p is [k][lane], k < count.
template <class T>
class Panels {
 public:
  Panels(const Kernels<T>& k, int64_t lanes, int64_t count, const T* data, int64_t lane_stride, int64_t k_stride)
      : size_(count * k.width), values_(ceil_divide(lanes, k.width) * size_) {
    parallel_tasks(ceil_divide(lanes, k.width), [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const int64_t first = p * k.width;
        k.pack(std::min(k.width, lanes - first), count, data + first * lane_stride, lane_stride, k_stride, at(p));
      }
    });
  }
  T* at(int64_t panel) const { return values_.data() + panel * size_; }
  int64_t size() const { return size_; }

 private:
  const int64_t size_;
  const Buffer<T> values_;
};

// What forward and backward share: the images' panels, and a tile of sums over them.
template <class T>
class FilterTiles {
 public:
  FilterTiles(const FilterSizes& s, Activation activation, const Tensor& x, const Tensor& bank,
              const std::optional<Tensor>& bias)
      : s_(s),
        k_(kernels<T>()),
        activation_(activation),
        bank_(bank.const_data_ptr<T>()),
        bank_s_(bank.stride(0)),
        bank_h_(bank.stride(1)),
        bank_d_(bank.stride(2)),
        bias_(bias ? bias->const_data_ptr<T>() : nullptr),
        bias_h_(bias ? bias->stride(0) : 0),
        filters_(balanced_group(s.H, kFilters)),
        panels_(ceil_divide(s.N, k_.width)),
        images_(k_, s.N, s.D, x.const_data_ptr<T>(), x.stride(0), x.stride(1)) {}

 protected:
  int64_t bits_row() const { return panels_ * k_.width / 8; }
  int64_t images_of(int64_t panel) const { return std::min(k_.width, s_.N - panel * k_.width); }
  int64_t filters_from(int64_t h0) const { return std::min(filters_, s_.H - h0); }
  const T* bank_at(int64_t s, int64_t h) const { return bank_ + s * bank_s_ + h * bank_h_; }

  // z[h][image] of some filters and the images of a panel.
  void sums(int64_t s, int64_t h0, int64_t panel, T* z) const {
    k_.product(filters_from(h0), images_of(panel), s_.D, bank_at(s, h0), bank_h_, bank_d_, images_.at(panel), k_.width,
               bias_ ? bias_ + h0 * bias_h_ : nullptr, bias_h_, 0, z, k_.width, false, false);
  }

  const FilterSizes s_;
  const Kernels<T>& k_;
  const Activation activation_;
  const T* const bank_;
  const int64_t bank_s_, bank_h_, bank_d_;
  const T* const bias_;
  const int64_t bias_h_;
  const int64_t filters_, panels_;  // filters of a tile, panels of images
  const Panels<T> images_;
};

template <class T>
class Forward : private FilterTiles<T> {
  using FilterTiles<T>::s_, FilterTiles<T>::k_, FilterTiles<T>::filters_, FilterTiles<T>::panels_, FilterTiles<T>::activation_;

 public:
  using FilterTiles<T>::FilterTiles;

  // bits: null, or (S, H, bits_row).
  void run(T* out, uint8_t* bits) const {
    const int64_t W = k_.width, tile = filters_ * W, group = balanced_group(panels_, kPanels);
    const int64_t groups = ceil_divide(panels_, group), blocks = ceil_divide(s_.H, filters_);
    const T share = static_cast<T>(1.0 / static_cast<double>(s_.S));
    parallel_tasks(groups * blocks, [&](int64_t begin, int64_t end) {
      const Buffer<T> z(tile), some(group * tile), all(group * tile);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t p0 = task / blocks * group, p1 = std::min(p0 + group, panels_), h0 = task % blocks * filters_;
        const int64_t count = this->filters_from(h0);
        std::fill_n(all.data(), group * tile, T(0));
        for (int64_t s0 = 0; s0 < s_.S; s0 += kTransforms) {
          std::fill_n(some.data(), group * tile, T(0));
          for (int64_t s = s0; s < std::min(s0 + kTransforms, s_.S); ++s) {
            for (int64_t p = p0; p < p1; ++p) {
              this->sums(s, h0, p, z.data());
              k_.activations(activation_, count, this->images_of(p), z.data(), some.data() + (p - p0) * tile);
              if (bits) {
                uint8_t* const to = bits + (s * s_.H + h0) * this->bits_row() + p * W / 8;
                k_.positive_bits(count, this->images_of(p), z.data(), to, this->bits_row());
              }
            }
          }
          for (int64_t p = p0; p < p1; ++p) {
            const int64_t at = (p - p0) * tile;
            adders<T, T>().rows(count, this->images_of(p), share, some.data() + at, W, all.data() + at, W);
          }
        }
        for (int64_t p = p0; p < p1; ++p) {
          k_.unpack(this->images_of(p), count, all.data() + (p - p0) * tile, out + p * W * s_.H + h0, s_.H);
        }
      }
    });
  }
};

template <class T>
class Backward : private FilterTiles<T> {
  using FilterTiles<T>::s_, FilterTiles<T>::k_, FilterTiles<T>::filters_, FilterTiles<T>::panels_, FilterTiles<T>::activation_;

 public:
  Backward(const FilterSizes& s, Activation activation, const Tensor& grad, const Tensor& x, const Tensor& bank,
           const std::optional<Tensor>& bias, const uint8_t* bits)
      : FilterTiles<T>(s, activation, x, bank, bias),
        x_(x),
        bits_(bits),
        grad_(k_, s.N, s.H, grad.const_data_ptr<T>(), grad.stride(0), grad.stride(1)) {
    const T share = static_cast<T>(1.0 / static_cast<double>(s.S));
    for (int64_t i = 0; i < panels_ * grad_.size(); ++i) grad_.at(0)[i] *= share;
  }

  // Each null where it is not wanted.
  void weights(T* grad_bank, T* grad_bias) const {
    const int64_t W = k_.width, tile = filters_ * W, blocks = ceil_divide(s_.H, filters_);
    const Panels<T> pixels(k_, grad_bank ? s_.D : 0, s_.N, x_.const_data_ptr<T>(), x_.stride(1), x_.stride(0));
    const Buffer<double> of_bias(s_.S * s_.H);
    of_bias.zero(0, s_.S * s_.H);
    parallel_tasks(s_.S * blocks, [&](int64_t begin, int64_t end) {
      const Buffer<T> z(tile);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t s = task / blocks, h0 = task % blocks * filters_, count = this->filters_from(h0);
        for (int64_t p = 0; p < panels_; ++p) {
          const int64_t n = this->images_of(p);
          slopes(s, h0, p, z.data());
          if (grad_bias) k_.lane_sums(count, n, z.data(), W, of_bias.data() + s * s_.H + h0, 1);
          for (int64_t d = 0; grad_bank && d < s_.D; d += W) {
            k_.product(count, std::min(W, s_.D - d), n, z.data(), W, 1, pixels.at(d / W) + p * W * W, W, nullptr, 0, 0,
                       grad_bank + (s * s_.H + h0) * s_.D + d, s_.D, p > 0, true);
          }
        }
      }
    });
    for (int64_t h = 0; grad_bias && h < s_.H; ++h) {
      double total = 0;
      for (int64_t s = 0; s < s_.S; ++s) total += of_bias.data()[s * s_.H + h];
      grad_bias[h] = static_cast<T>(total);
    }
  }

  void images(T* grad_x) const {
    const int64_t W = k_.width, group = balanced_group(panels_, kPanels), across = ceil_divide(s_.D, W);
    parallel_tasks(ceil_divide(panels_, group), [&](int64_t begin, int64_t end) {
      const Buffer<T> z(filters_ * W), bank(across * filters_ * W);
      for (int64_t task = begin; task < end; ++task) {
        for (int64_t s = 0; s < s_.S; ++s) {
          for (int64_t h0 = 0; h0 < s_.H; h0 += filters_) {
            const int64_t count = this->filters_from(h0);
            for (int64_t d = 0; d < s_.D; d += W) {
              k_.pack(std::min(W, s_.D - d), count, this->bank_at(s, h0) + d * this->bank_d_, this->bank_d_, this->bank_h_,
                      bank.data() + d * filters_);
            }
            for (int64_t p = task * group; p < std::min((task + 1) * group, panels_); ++p) {
              slopes(s, h0, p, z.data());
              for (int64_t d = 0; d < s_.D; d += W) {
                k_.product(this->images_of(p), std::min(W, s_.D - d), count, z.data(), 1, W, bank.data() + d * filters_, W,
                           nullptr, 0, 0, grad_x + p * W * s_.D + d, s_.D, s > 0 || h0 > 0, true);
              }
            }
          }
        }
      }
    });
  }

 private:
  // The gradient of z: what comes in, divided by the transforms, times the activation's slope.
  void slopes(int64_t s, int64_t h0, int64_t panel, T* z) const {
    const T* const grad = grad_.at(panel) + h0 * k_.width;
    const int64_t count = this->filters_from(h0), n = this->images_of(panel);
    if (bits_) {
      const uint8_t* const bits = bits_ + (s * s_.H + h0) * this->bits_row() + panel * k_.width / 8;
      k_.where_bits(count, n, bits, this->bits_row(), grad, z);
    } else {
      this->sums(s, h0, panel, z);
      k_.activation_slopes(activation_, count, n, grad, z);
    }
  }

  const Tensor& x_;
  const uint8_t* const bits_;
  const Panels<T> grad_;  // divided by the transforms
};

std::tuple<Tensor, Tensor> averaged_filters(const Tensor& x, const Tensor& bank, const std::optional<Tensor>& bias,
                                            int64_t activation, bool keep, bool) {
  const FilterSizes s = check_filters("averaged_filters", x, bank, bias);
  const Activation kind = checked_activation("averaged_filters", activation);
  const Tensor out = empty_of(x, {s.N, s.H});
  const int64_t width = kPanelBytes / x.element_size(), row = ceil_divide(s.N, width) * width / 8;
  const bool keeps = keep && kind == Activation::relu;
  const Tensor bits = keeps ? empty_of(x, {s.S, s.H, row}, ScalarType::Byte) : empty_of(x, {0}, ScalarType::Byte);
  if (out.numel() > 0) {
    ELLA_DISPATCH_FLOATING(x.scalar_type(), "averaged_filters", [&] {
      Forward<scalar_t>(s, kind, x, bank, bias)
          .run(out.mutable_data_ptr<scalar_t>(), keeps ? static_cast<uint8_t*>(bits.mutable_data_ptr()) : nullptr);
    });
  }
  return {out, bits};
}

std::tuple<Tensor, Tensor, Tensor> averaged_filters_backward(const Tensor& grad, const Tensor& x, const Tensor& bank,
                                                             const std::optional<Tensor>& bias,
                                                             const std::optional<Tensor>& kept, int64_t activation,
                                                             bool wants_x, bool wants_bank, bool wants_bias, bool) {
  constexpr const char* op = "averaged_filters_backward";
  const FilterSizes s = check_filter_gradients(op, grad, x, bank, bias);
  const Activation kind = checked_activation(op, activation);
  const int64_t width = kPanelBytes / x.element_size(), row = ceil_divide(s.N, width) * width / 8;
  const bool keeps = kept && kept->numel() > 0;
  if (keeps) check_kept_bits(op, *kept, kind, {s.S, s.H, row});
  const bool empty = s.N == 0 || s.H == 0;
  const auto make = [&](bool wanted, std::initializer_list<int64_t> shape) {
    return !wanted ? empty_of(x, {0}) : empty ? zeros_of(x, shape) : empty_of(x, shape);
  };
  const Tensor grad_x = make(wants_x, {s.N, s.D}), grad_bank = make(wants_bank, {s.S, s.H, s.D});
  const Tensor grad_bias = make(wants_bias, {s.H});
  if (!empty && (wants_x || wants_bank || wants_bias)) {
    ELLA_DISPATCH_FLOATING(x.scalar_type(), "averaged_filters_backward", [&] {
      const auto* bits = keeps ? static_cast<const uint8_t*>(kept->const_data_ptr()) : nullptr;
      const Backward<scalar_t> backward(s, kind, grad, x, bank, bias, bits);
      if (wants_bank || wants_bias) {
        backward.weights(wants_bank ? grad_bank.mutable_data_ptr<scalar_t>() : nullptr,
                         wants_bias ? grad_bias.mutable_data_ptr<scalar_t>() : nullptr);
      }
      if (wants_x) backward.images(grad_x.mutable_data_ptr<scalar_t>());
    });
  }
  return {grad_x, grad_bank, grad_bias};
}

ELLA_REGISTER(CPU, m) {
  m.impl("averaged_filters", TORCH_BOX(&averaged_filters));
  m.impl("averaged_filters_backward", TORCH_BOX(&averaged_filters_backward));
}

}  // namespace
}  // namespace ella

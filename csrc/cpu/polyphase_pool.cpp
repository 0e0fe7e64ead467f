#include <cmath>
#include <tuple>

#include "../common/checks.h"

namespace ella {
namespace {

template <class T>
struct Image {
  T* data;
  int64_t n, c, h, w;  // strides
  T& operator()(int64_t in, int64_t ic, int64_t ih, int64_t iw) const { return data[in * n + ic * c + ih * h + iw * w]; }
};

template <class T>
Image<const T> image(const Tensor& t) {
  return {t.const_data_ptr<T>(), t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

// The component with the largest norm; NaN counts as larger than any number, so that it stays visible in the output.
template <class T>
int64_t largest(const Image<const T>& x, const PolyphaseSizes& s, int64_t n, double norm) {
  double best = -1;
  int64_t which = 0;
  for (int64_t i = 0; i < 4; ++i) {
    double sum = 0;
    for (int64_t c = 0; c < s.C; ++c) {
      for (int64_t h = 0; h < s.h; ++h) {
        for (int64_t w = 0; w < s.w; ++w) {
          const double value = std::abs(static_cast<double>(x(n, c, 2 * h + (i & 1), 2 * w + (i >> 1))));
          if (norm == 1.0) {
            sum += value;
          } else if (norm == 2.0) {
            sum += value * value;
          } else if (value > sum || std::isnan(value)) {
            sum = value;
          }
        }
      }
    }
    if (std::isnan(sum)) return i;
    if (sum > best) best = sum, which = i;
  }
  return which;
}

template <class T>
void select(const Image<const T>& x, const PolyphaseSizes& s, int64_t n, int64_t component, T* out) {
  for (int64_t c = 0; c < s.C; ++c) {
    for (int64_t h = 0; h < s.h; ++h) {
      for (int64_t w = 0; w < s.w; ++w) {
        out[((n * s.C + c) * s.h + h) * s.w + w] = x(n, c, 2 * h + (component & 1), 2 * w + (component >> 1));
      }
    }
  }
}

// Read before the parallel loop, which must not throw.
std::vector<int64_t> components(const char* op, const Tensor& index) {
  std::vector<int64_t> out(index.numel());
  const int64_t* data = index.const_data_ptr<int64_t>();
  for (size_t n = 0; n < out.size(); ++n) {
    out[n] = data[static_cast<int64_t>(n) * index.stride(0)];
    STD_TORCH_CHECK(out[n] >= 0 && out[n] < 4, op, ": index must be in 0..3, got ", out[n], " for image ", n);
  }
  return out;
}

std::tuple<Tensor, Tensor> polyphase_pool(const Tensor& x, double norm) {
  const PolyphaseSizes s = check_polyphase_pool(x, norm);
  Tensor out = empty_of(x, {s.N, s.C, s.h, s.w});
  Tensor index = empty_of(x, {s.N}, ScalarType::Long);
  int64_t* chosen = index.mutable_data_ptr<int64_t>();
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "polyphase_pool", [&] {
    const auto view = image<scalar_t>(x);
    scalar_t* pooled = out.mutable_data_ptr<scalar_t>();
    torch::stable::parallel_for(0, s.N, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        chosen[n] = largest(view, s, n, norm);
        select(view, s, n, chosen[n], pooled);
      }
    });
  });
  return {out, index};
}

Tensor polyphase_select(const Tensor& x, const Tensor& index) {
  const PolyphaseSizes s = check_polyphase_select(x, index);
  const std::vector<int64_t> chosen = components("polyphase_select", index);
  Tensor out = empty_of(x, {s.N, s.C, s.h, s.w});
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "polyphase_select", [&] {
    const auto view = image<scalar_t>(x);
    scalar_t* pooled = out.mutable_data_ptr<scalar_t>();
    torch::stable::parallel_for(0, s.N, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) select(view, s, n, chosen[n], pooled);
    });
  });
  return out;
}

Tensor polyphase_scatter(const Tensor& grad, const Tensor& index) {
  const PolyphaseSizes s = check_polyphase_scatter(grad, index);
  const std::vector<int64_t> chosen = components("polyphase_scatter", index);
  Tensor out = zeros_of(grad, {s.N, s.C, 2 * s.h, 2 * s.w});
  ELLA_DISPATCH_FLOATING(grad.scalar_type(), "polyphase_scatter", [&] {
    const auto view = image<scalar_t>(grad);
    scalar_t* full = out.mutable_data_ptr<scalar_t>();
    torch::stable::parallel_for(0, s.N, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        for (int64_t c = 0; c < s.C; ++c) {
          for (int64_t h = 0; h < s.h; ++h) {
            scalar_t* row = full + ((n * s.C + c) * 2 * s.h + 2 * h + (chosen[n] & 1)) * 2 * s.w + (chosen[n] >> 1);
            for (int64_t w = 0; w < s.w; ++w) row[2 * w] = view(n, c, h, w);
          }
        }
      }
    });
  });
  return out;
}

ELLA_REGISTER(CPU, m) {
  m.impl("polyphase_pool", TORCH_BOX(&polyphase_pool));
  m.impl("polyphase_select", TORCH_BOX(&polyphase_select));
  m.impl("polyphase_scatter", TORCH_BOX(&polyphase_scatter));
}

}  // namespace
}  // namespace ella

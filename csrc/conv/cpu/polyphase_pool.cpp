#include <algorithm>
#include <tuple>
#include <vector>

#include "conv/cpu/polyphase.h"

namespace ella {
namespace {

// The way back: zeros but in the component. `out` is one image after the other.
template <class T>
void scatter(const Image<const T>& x, const PolyphaseSizes& s, int64_t n, int64_t component, T* out) {
  with_half_width(s.w, [&](auto half) {
    const auto write_row = [&](const T* from, int64_t step, T* row) __attribute__((always_inline)) {
      if (component >> 1) {
        for (int64_t w = 0; w < half; ++w) row[2 * w] = T(0), row[2 * w + 1] = from[w * step];
      } else {
        for (int64_t w = 0; w < half; ++w) row[2 * w] = from[w * step], row[2 * w + 1] = T(0);
      }
    };
    for (int64_t c = 0; c < s.C; ++c) {
      for (int64_t h = 0; h < s.h; ++h, out += 4 * half) {
        T *const row = out + (component & 1) * 2 * half, *const zeros = out + (1 - (component & 1)) * 2 * half;
        if (x.w == 1) {
          write_row(&x(n, c, h, 0), 1, row);
        } else {
          write_row(&x(n, c, h, 0), x.w, row);
        }
        std::fill_n(zeros, 2 * half, T(0));
      }
    }
  });
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
      LargestComponent<scalar_t> largest(s, polyphase_norm(norm));
      for (int64_t n = begin; n < end; ++n) {
        chosen[n] = largest(view, n);
        select_component(view, s, n, chosen[n], pooled + n * s.C * s.h * s.w);
      }
    });
  });
  return {out, index};
}

Tensor polyphase_select(const Tensor& x, const Tensor& index) {
  const PolyphaseSizes s = check_polyphase_select(x, index);
  const std::vector<int64_t> chosen = polyphase_components("polyphase_select", index);
  Tensor out = empty_of(x, {s.N, s.C, s.h, s.w});
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "polyphase_select", [&] {
    const auto view = image<scalar_t>(x);
    scalar_t* pooled = out.mutable_data_ptr<scalar_t>();
    torch::stable::parallel_for(0, s.N, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) select_component(view, s, n, chosen[n], pooled + n * s.C * s.h * s.w);
    });
  });
  return out;
}

Tensor polyphase_scatter(const Tensor& grad, const Tensor& index) {
  const PolyphaseSizes s = check_polyphase_scatter(grad, index);
  const std::vector<int64_t> chosen = polyphase_components("polyphase_scatter", index);
  Tensor out = empty_of(grad, {s.N, s.C, 2 * s.h, 2 * s.w});
  ELLA_DISPATCH_FLOATING(grad.scalar_type(), "polyphase_scatter", [&] {
    const auto view = image<scalar_t>(grad);
    scalar_t* full = out.mutable_data_ptr<scalar_t>();
    torch::stable::parallel_for(0, s.N, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) scatter(view, s, n, chosen[n], full + n * 4 * s.C * s.h * s.w);
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

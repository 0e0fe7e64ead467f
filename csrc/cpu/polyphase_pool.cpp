#include <algorithm>
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

// Adds a row to partial results, entry w to number w mod kLanes: enough of them that additions need not wait for one another.
constexpr int64_t kLanes = 16;  // even: a lane is all of one column parity

template <class T, class Add>
void add_row(const T* row, int64_t size, int64_t step, const Add& add, double* lanes) {
  int64_t w = 0;
  if (step == 1 && size >= kLanes) {
    double own[kLanes];  // in registers, which memory that others may see cannot be
    std::copy_n(lanes, kLanes, own);
    for (; w + kLanes <= size; w += kLanes) {
      for (int64_t i = 0; i < kLanes; ++i) own[i] = add(own[i], static_cast<double>(row[w + i]));
    }
    std::copy_n(own, kLanes, lanes);
  }
  for (; w < size; ++w) lanes[w % kLanes] = add(lanes[w % kLanes], static_cast<double>(row[w * step]));
}

// The component with the largest result; NaN counts as larger than any number, so that it stays visible in the output.
template <class T, class Add, class Join>
int64_t largest(const Image<const T>& x, const PolyphaseSizes& s, int64_t n, const Add& add, const Join& join) {
  double lanes[2][kLanes] = {};  // by the parity of the row
  for (int64_t c = 0; c < s.C; ++c) {
    for (int64_t h = 0; h < 2 * s.h; ++h) add_row(&x(n, c, h, 0), 2 * s.w, x.w, add, lanes[h & 1]);
  }
  double best = -1;
  int64_t which = 0;
  for (int64_t i = 0; i < 4; ++i) {
    double result = 0;
    for (int64_t lane = i >> 1; lane < kLanes; lane += 2) result = join(result, lanes[i & 1][lane]);
    if (std::isnan(result)) return i;
    if (result > best) best = result, which = i;
  }
  return which;
}

template <class T>
int64_t largest(const Image<const T>& x, const PolyphaseSizes& s, int64_t n, double norm) {
  const auto sum = [](double a, double b) { return a + b; };
  const auto max = [](double a, double b) { return b > a || std::isnan(b) ? b : a; };
  if (norm == 1.0) return largest(x, s, n, [](double a, double v) { return a + std::abs(v); }, sum);
  if (norm == 2.0) return largest(x, s, n, [](double a, double v) { return a + v * v; }, sum);
  return largest(x, s, n, [&](double a, double v) { return max(a, std::abs(v)); }, max);
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
  const std::vector<int64_t> chosen = polyphase_components("polyphase_select", index);
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
  const std::vector<int64_t> chosen = polyphase_components("polyphase_scatter", index);
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

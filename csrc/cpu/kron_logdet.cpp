#include <cmath>
#include <tuple>

#include "../common/checks.h"

namespace ella {
namespace {

template <class T, class F>
void each(const KronLogdetSizes& s, const Tensor& l, const Tensor& m, const Tensor& precision, F f) {
  const T *pl = l.const_data_ptr<T>(), *pm = m.const_data_ptr<T>();
  const double p = *precision.const_data_ptr<T>();
  for (int64_t g = 0; g < s.G; ++g) for (int64_t i = 0; i < s.a; ++i) for (int64_t j = 0; j < s.b; ++j) {
    const int64_t q = s.shared ? 0 : g;
    f(g, q, i, j, double(pl[g * l.stride(0) + i * l.stride(1)]), double(pm[q * m.stride(0) + j * m.stride(1)]), p);
  }
}

Tensor kron_logdet(const Tensor& l, const Tensor& m, const Tensor& precision) {
  const auto s = check_kron_logdet("kron_logdet", l, m, precision);
  Tensor out = empty_of(l, {});
  ELLA_DISPATCH_FLOATING(l.scalar_type(), "kron_logdet", [&] {
    double sum = 0;
    each<scalar_t>(s, l, m, precision, [&](auto, auto, auto, auto, double a, double b, double p) { sum += std::log(a * b + p); });
    *out.mutable_data_ptr<scalar_t>() = scalar_t(sum);
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> store(const KronLogdetSizes& s, const Tensor& l, const std::vector<double>& x, const std::vector<double>& y, double z) {
  Tensor ox = empty_of(l, {s.G, s.a}), oy = empty_of(l, {s.shared ? 1 : s.G, s.b}), oz = empty_of(l, {});
  ELLA_DISPATCH_FLOATING(l.scalar_type(), "kron_logdet", [&] {
    for (size_t i = 0; i < x.size(); ++i) ox.mutable_data_ptr<scalar_t>()[i] = scalar_t(x[i]);
    for (size_t i = 0; i < y.size(); ++i) oy.mutable_data_ptr<scalar_t>()[i] = scalar_t(y[i]);
    *oz.mutable_data_ptr<scalar_t>() = scalar_t(z);
  });
  return {ox, oy, oz};
}

std::tuple<Tensor, Tensor, Tensor> kron_logdet_gradient(const Tensor& l, const Tensor& m, const Tensor& precision) {
  const auto s = check_kron_logdet("kron_logdet_gradient", l, m, precision);
  std::vector<double> dl(s.G * s.a), dm((s.shared ? 1 : s.G) * s.b);
  double dp = 0;
  ELLA_DISPATCH_FLOATING(l.scalar_type(), "kron_logdet_gradient", [&] {
    each<scalar_t>(s, l, m, precision, [&](int64_t g, int64_t q, int64_t i, int64_t j, double a, double b, double p) {
      const double r = 1 / (a * b + p);
      dl[g * s.a + i] += b * r, dm[q * s.b + j] += a * r, dp += r;
    });
  });
  return store(s, l, dl, dm, dp);
}

std::tuple<Tensor, Tensor, Tensor> kron_logdet_hvp(const Tensor& l, const Tensor& m, const Tensor& precision, const Tensor& vl, const Tensor& vm, const Tensor& vp) {
  const auto s = check_kron_logdet_hvp(l, m, precision, vl, vm, vp);
  std::vector<double> hl(s.G * s.a), hm((s.shared ? 1 : s.G) * s.b);
  double hp = 0;
  ELLA_DISPATCH_FLOATING(l.scalar_type(), "kron_logdet_hvp", [&] {
    const scalar_t *pl = vl.const_data_ptr<scalar_t>(), *pm = vm.const_data_ptr<scalar_t>();
    const double w = *vp.const_data_ptr<scalar_t>();
    each<scalar_t>(s, l, m, precision, [&](int64_t g, int64_t q, int64_t i, int64_t j, double a, double b, double p) {
      const double r = 1 / (a * b + p), u = pl[g * vl.stride(0) + i * vl.stride(1)], v = pm[q * vm.stride(0) + j * vm.stride(1)];
      const double t = -r * r * (u * b + v * a + w);
      hl[g * s.a + i] += b * t + v * r, hm[q * s.b + j] += a * t + u * r, hp += t;
    });
  });
  return store(s, l, hl, hm, hp);
}

ELLA_REGISTER(CPU, m) {
  m.impl("kron_logdet", TORCH_BOX(&kron_logdet));
  m.impl("kron_logdet_gradient", TORCH_BOX(&kron_logdet_gradient));
  m.impl("kron_logdet_hvp", TORCH_BOX(&kron_logdet_hvp));
}

}  // namespace
}  // namespace ella

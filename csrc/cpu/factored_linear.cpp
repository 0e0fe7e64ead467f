#include <tuple>

#include "../common/checks.h"

namespace ella {
namespace {

template <class T>
struct View {
  T* p; int64_t s0, s1, s2;
  T& operator()(int64_t i, int64_t j, int64_t k) const { return p[i * s0 + j * s1 + k * s2]; }
};
template <class T> View<const T> view(const Tensor& t) { return {t.const_data_ptr<T>(), t.stride(0), t.stride(1), t.stride(2)}; }

template <class T>
void forward(const Tensor& out_, const FactoredLinearSizes& s, const Tensor& x_, const Tensor& u_, const Tensor& v_, const std::optional<Tensor>& bi, const std::optional<Tensor>& bo) {
  auto x = view<T>(x_), u = view<T>(u_), v = view<T>(v_);
  T* out = out_.mutable_data_ptr<T>();
  for (int64_t n = 0; n < s.N; ++n) for (int64_t d = 0; d < s.D; ++d) {
    T* o = out + (n * s.D + d) * s.Y;
    for (int64_t y = 0; y < s.Y; ++y) o[y] = bo ? bo->const_data_ptr<T>()[y * bo->stride(0)] : T(0);
    for (int64_t c = 0; c < s.C; ++c) {
      T z = bi ? bi->const_data_ptr<T>()[d * bi->stride(0)] : T(0);
      for (int64_t k = 0; k < s.X; ++k) z += u(d, c, k) * x(n, c, k);
      for (int64_t y = 0; y < s.Y; ++y) o[y] += v(d, c, y) * z;
    }
  }
}

Tensor factored_linear(const Tensor& x, const Tensor& weight_in, const Tensor& weight_out, std::optional<Tensor> bias_in, std::optional<Tensor> bias_out) {
  const auto s = check_factored_linear(x, weight_in, weight_out, bias_in, bias_out);
  Tensor out = empty_of(x, {s.N, s.D, s.Y});
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "factored_linear", [&] { forward<scalar_t>(out, s, x, weight_in, weight_out, bias_in, bias_out); });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> factored_linear_backward(const Tensor& grad, const Tensor& x, const Tensor& weight_in, const Tensor& weight_out, std::optional<Tensor> bias_in, bool gx, bool gu, bool gv, bool gbi, bool gbo) {
  const auto s = check_factored_linear_backward(grad, x, weight_in, weight_out, bias_in);
  Tensor dx = gx ? zeros_of(x, {s.N, s.C, s.X}) : empty_of(x, {0}), du = gu ? zeros_of(x, {s.D, s.C, s.X}) : empty_of(x, {0}),
         dv = gv ? zeros_of(x, {s.D, s.C, s.Y}) : empty_of(x, {0}), dbi = gbi ? zeros_of(x, {s.D}) : empty_of(x, {0}), dbo = gbo ? zeros_of(x, {s.Y}) : empty_of(x, {0});
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "factored_linear_backward", [&] {
    using T = scalar_t;
    auto g = view<T>(grad), xv = view<T>(x), u = view<T>(weight_in), v = view<T>(weight_out);
    T *px = dx.mutable_data_ptr<T>(), *pu = du.mutable_data_ptr<T>(), *pv = dv.mutable_data_ptr<T>(), *pi = dbi.mutable_data_ptr<T>(), *po = dbo.mutable_data_ptr<T>();
    for (int64_t n = 0; n < s.N; ++n) for (int64_t d = 0; d < s.D; ++d) {
      if (gbo) for (int64_t y = 0; y < s.Y; ++y) po[y] += g(n, d, y);
      for (int64_t c = 0; c < s.C; ++c) {
        T z = bias_in ? bias_in->const_data_ptr<T>()[d * bias_in->stride(0)] : T(0), dz = 0;
        for (int64_t k = 0; k < s.X; ++k) z += u(d, c, k) * xv(n, c, k);
        for (int64_t y = 0; y < s.Y; ++y) { dz += g(n, d, y) * v(d, c, y); if (gv) pv[(d * s.C + c) * s.Y + y] += z * g(n, d, y); }
        for (int64_t k = 0; k < s.X; ++k) { if (gx) px[(n * s.C + c) * s.X + k] += dz * u(d, c, k); if (gu) pu[(d * s.C + c) * s.X + k] += dz * xv(n, c, k); }
        if (gbi) pi[d] += dz;
      }
    }
  });
  return {dx, du, dv, dbi, dbo};
}

ELLA_REGISTER(CPU, m) {
  m.impl("factored_linear", TORCH_BOX(&factored_linear));
  m.impl("factored_linear_backward", TORCH_BOX(&factored_linear_backward));
}

}  // namespace
}  // namespace ella

#include "../common/checks.h"

namespace ella {
namespace {

void kron_accumulate_(Tensor factor, const Tensor& rows, double alpha) {
  const auto s = check_kron_accumulate(factor, rows);
  ELLA_DISPATCH_FLOATING(factor.scalar_type(), "kron_accumulate_", [&] {
    scalar_t* f = factor.mutable_data_ptr<scalar_t>();
    const scalar_t* r = rows.const_data_ptr<scalar_t>();
    for (int64_t g = 0; g < s.G; ++g) for (int64_t i = 0; i < s.d; ++i) for (int64_t j = i; j < s.d; ++j) {
      scalar_t sum = 0;
      for (int64_t n = 0; n < s.N; ++n) sum += r[n * rows.stride(0) + g * rows.stride(1) + i * rows.stride(2)] * r[n * rows.stride(0) + g * rows.stride(1) + j * rows.stride(2)];
      f[(g * s.d + i) * s.d + j] += scalar_t(alpha) * sum;
      if (i != j) f[(g * s.d + j) * s.d + i] += scalar_t(alpha) * sum;
    }
  });
}

ELLA_REGISTER(CPU, m) { m.impl("kron_accumulate_", TORCH_BOX(&kron_accumulate_)); }

}  // namespace
}  // namespace ella

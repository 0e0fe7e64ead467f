#include "../common/checks.h"
#include "gram.h"

namespace ella {
namespace {

void kron_accumulate_(Tensor factor, const Tensor& rows, double alpha) {
  const KronAccumulateSizes s = check_kron_accumulate(factor, rows);
  if (factor.numel() == 0 || s.N == 0) return;
  ELLA_DISPATCH_FLOATING(factor.scalar_type(), "kron_accumulate_", [&] {
    scalar_t* target = factor.mutable_data_ptr<scalar_t>();
    const scalar_t* data = rows.const_data_ptr<scalar_t>();
    const int64_t row_stride = rows.stride(0), block_stride = rows.stride(1), value_stride = rows.stride(2);
    // One block a task; a single block is shared out inside Gram (loops within a parallel loop run serially).
    parallel_tasks(s.G, [&](int64_t begin, int64_t end) {
      const Gram<scalar_t> gram(factor, s.d, s.N);
      const Kernels<scalar_t>& k = kernels<scalar_t>();
      for (int64_t g = begin; g < end; ++g) {
        const scalar_t* source = data + g * block_stride;
        gram.accumulate(target + g * s.d * s.d, s.N, static_cast<scalar_t>(alpha),
                        [&](int64_t first, int64_t n, int64_t k0, int64_t count, scalar_t* panel) {
                          k.pack(n, count, source + k0 * row_stride + first * value_stride, value_stride, row_stride, panel);
                        });
      }
    });
  });
}

ELLA_REGISTER(CPU, m) { m.impl("kron_accumulate_", TORCH_BOX(&kron_accumulate_)); }

}  // namespace
}  // namespace ella

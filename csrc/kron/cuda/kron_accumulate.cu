// kron_accumulate_: factor[g] += alpha * rows[:,g]^T rows[:,g].
#include "kron/checks.h"
#include "kron/cuda/syrk.cuh"
#include "kron/cuda/widened.cuh"

namespace ella {
namespace {

// rows (N, G, d) read through their strides.
template <class T>
struct StridedRows {
  using Row = int64_t;
  using Column = int64_t;
  static constexpr bool kRowsAdjacent = false;  // not always

  const T* data;
  int64_t stride_n, stride_g, stride_d;

  __device__ __forceinline__ Row row(int64_t n) const { return n * stride_n; }
  __device__ __forceinline__ Column column(int64_t g, int64_t i) const { return g * stride_g + i * stride_d; }
  __host__ __device__ __forceinline__ bool rows_adjacent() const { return stride_n == 1 && stride_d != 1; }
  __device__ __forceinline__ const T* address(Row row, Column column) const { return data + row + column; }

  bool vectors(int64_t groups, int64_t d) const {
    const bool aligned = stride_n % 4 == 0 && (groups == 1 || stride_g % 4 == 0) && reinterpret_cast<uintptr_t>(data) % 16 == 0;
    return stride_d == 1 && d % 4 == 0 && aligned;
  }
};

void kron_accumulate_(Tensor factor, const Tensor& rows, double alpha, bool allow_tf32) {
  constexpr const char* name = "kron_accumulate_";
  const KronAccumulateSizes s = check_kron_accumulate(factor, rows, alpha);
  if (s.N == 0 || factor.numel() == 0) return;
  const Device device(factor);
  with_row_type(rows, [&](auto number) {
    using S = decltype(number);
    using T = Widened<S>;
    const Image<S> all{rows.const_data_ptr<S>(), rows.stride(0), rows.stride(1), 0, rows.stride(2)};
    // Of d rows or more the products, d^3, are most of the work, not the factor's way through memory.
    for_widened(device, name, rows, all, {s.N, s.G, 1, s.d}, s.d, [&](const Image<T>& some, int64_t count) {
      syrk<T>(device, name, StridedRows<T>{some.data, some.n, some.c, some.w}, factor, s.G, s.d, count, alpha,
              allow_tf32 || kIsWidened<S>);
    });
  });
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) { m.impl("kron_accumulate_", TORCH_BOX(&kron_accumulate_)); }

}  // namespace
}  // namespace ella

// kron_accumulate_: factor[g] += alpha * rows[:,g]^T rows[:,g].
#include "kron/checks.h"
#include "kron/cuda/syrk.cuh"

namespace ella {
namespace {

// rows (N, G, d) read through their strides.
template <class T>
struct StridedRows {
  using Row = const T*;
  using Column = int64_t;
  static constexpr bool kRowsAdjacent = false;  // not always

  const T* data;
  int64_t stride_n, stride_g, stride_d;

  __device__ __forceinline__ bool inside(Row, Column) const { return true; }

  __device__ __forceinline__ Row row(int64_t n) const { return data + n * stride_n; }
  __device__ __forceinline__ Column column(int64_t g, int64_t i) const { return g * stride_g + i * stride_d; }
  __host__ __device__ __forceinline__ bool rows_adjacent() const { return stride_n == 1 && stride_d != 1; }
  __device__ __forceinline__ const T* address(Row row, Column column) const { return row + column; }

  bool vectors(int64_t groups, int64_t d) const {
    const bool aligned = stride_n % 4 == 0 && (groups == 1 || stride_g % 4 == 0) && reinterpret_cast<uintptr_t>(data) % 16 == 0;
    return stride_d == 1 && d % 4 == 0 && aligned;
  }
};

// Every factors[i] += alphas[i] * sum of its rows' outer products.
void kron_accumulate_many_(const std::vector<Tensor>& factors, const std::vector<Tensor>& all_rows,
                           const std::vector<double>& alphas, bool allow_tf32) {
  constexpr const char* name = "kron_accumulate_";
  check_many("kron_accumulate_many_", factors, all_rows.size(), alphas.size());
  if (factors.empty()) return;
  const Device device(factors.front());
  SyrkQueue<float, StridedRows<float>> single(device, name);
  SyrkQueue<double, StridedRows<double>> wide(device, name);
  for (size_t i = 0; i < factors.size(); ++i) {
    const Tensor& factor = factors[i];
    const KronAccumulateSizes s = check_kron_accumulate(factor, all_rows[i], alphas[i]);
    if (s.N == 0 || factor.numel() == 0) continue;
    const auto add = [&](auto& queue, auto& other, const Tensor& rows, bool tf32) {
      using T = typename std::decay_t<decltype(queue)>::Number;
      other.settle(factor);
      const StridedRows<T> strided{rows.const_data_ptr<T>(), rows.stride(0), rows.stride(1), rows.stride(2)};
      queue.add({strided, factor, s.G, s.d, rows.size(0), alphas[i], tf32});
    };
    if (all_rows[i].scalar_type() == ScalarType::Double) {
      add(wide, single, all_rows[i], false);
      continue;
    }
    // Of d rows or more the products, d^3, are most of the work, not the factor's way through memory.
    for_widened(all_rows[i], s.d, [&](const Tensor& rows, bool copied) {
      add(single, wide, rows, allow_tf32 || copied);
      if (copied) single.run();  // the copy's memory is for the next
    });
  }
  single.run(), wide.run();
}

void kron_accumulate_(const Tensor& factor, const Tensor& rows, double alpha, bool allow_tf32) {
  kron_accumulate_many_({factor}, {rows}, {alpha}, allow_tf32);
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) {
  m.impl("kron_accumulate_", TORCH_BOX(&kron_accumulate_));
  m.impl("kron_accumulate_many_", TORCH_BOX(&kron_accumulate_many_));
}

}  // namespace
}  // namespace ella

#include <algorithm>

#include "../common/checks.h"
#include "gram.h"

namespace ella {
namespace {

constexpr int64_t kSum = 256;  // rows that are summed before they join the total, which is kept in double, to bound rounding

// factor[g] += alpha sum_n rows[n, g] rows[n, g]^T
template <class T>
struct Rows {
  const T* data;
  int64_t N, G, d, row, block, value;  // sizes and strides
  T* factor;
  double alpha;

  void add(int64_t g, int64_t i, int64_t j, double sum) const {
    T* target = factor + g * d * d;
    const T part = static_cast<T>(alpha * sum);
    target[i * d + j] += part;
    if (i != j) target[j * d + i] += part;
  }
};

// Blocks of at most half a vector, side by side: a row is one string of numbers, and its products with itself shifted by less
// than d contain those of all blocks, many blocks in one vector. Nothing is packed.
template <class T>
void add_small_blocks(const Rows<T>& r, const Tensor& like) {
  const Kernels<T>& k = kernels<T>();
  const int64_t columns = r.G * r.d, vectors = ceil_divide(columns, k.vector), lanes = vectors * k.vector;
  const int64_t reach = lanes + r.d - 1;  // numbers read of a row; of the last rows, more than there are
  const int64_t copied = std::min(ceil_divide(std::max(reach - columns, int64_t(0)), r.row), r.N), in_place = r.N - copied;
  const Buffer<T> last(like, copied * reach);
  const Buffer<double> total(like, r.d * lanes);
  last.zero(0, copied * reach);
  total.zero(0, r.d * lanes);
  for (int64_t n = 0; n < copied; ++n) std::copy_n(r.data + (in_place + n) * r.row, columns, last.data() + n * reach);
  parallel_tasks(vectors, [&](int64_t begin, int64_t end) {
    const int64_t at = begin * k.vector;
    for (int64_t n = 0; n < in_place; n += kSum) {
      const int64_t count = std::min(kSum, in_place - n);
      k.lag_products(r.d, end - begin, count, r.data + n * r.row + at, r.row, total.data() + at, lanes);
    }
    k.lag_products(r.d, end - begin, copied, last.data() + at, reach, total.data() + at, lanes);
  });
  for (int64_t g = 0; g < r.G; ++g) {
    for (int64_t i = 0; i < r.d; ++i) {
      for (int64_t j = i; j < r.d; ++j) r.add(g, i, j, total.data()[(j - i) * lanes + g * r.d + i]);
    }
  }
}

template <class T>
void add_packed(const Rows<T>& r, const Tensor& like) {
  // One block a task; a single block is shared out inside Gram (loops within a parallel loop run serially).
  parallel_tasks(r.G, [&](int64_t begin, int64_t end) {
    const Gram<T> gram(like, r.d, r.N);
    const Kernels<T>& k = kernels<T>();
    for (int64_t g = begin; g < end; ++g) {
      const T* source = r.data + g * r.block;
      gram.accumulate(r.factor + g * r.d * r.d, r.N, static_cast<T>(r.alpha),
                      [&](int64_t first, int64_t n, int64_t k0, int64_t count, T* panel) {
                        k.pack(n, count, source + k0 * r.row + first * r.value, r.value, r.row, panel);
                      });
    }
  });
}

void kron_accumulate_(Tensor factor, const Tensor& rows, double alpha) {
  const KronAccumulateSizes s = check_kron_accumulate(factor, rows);
  if (factor.numel() == 0 || s.N == 0) return;
  ELLA_DISPATCH_FLOATING(factor.scalar_type(), "kron_accumulate_", [&] {
    const Rows<scalar_t> r{rows.const_data_ptr<scalar_t>(),     s.N,  s.G, s.d, rows.stride(0), rows.stride(1), rows.stride(2),
                           factor.mutable_data_ptr<scalar_t>(), alpha};
    const bool side_by_side = r.value == 1 && (r.block == r.d || r.G == 1) && r.row >= r.G * r.d;
    if (side_by_side && 2 * r.d <= kernels<scalar_t>().vector) {
      add_small_blocks(r, factor);
    } else {
      add_packed(r, factor);
    }
  });
}

ELLA_REGISTER(CPU, m) { m.impl("kron_accumulate_", TORCH_BOX(&kron_accumulate_)); }

}  // namespace
}  // namespace ella

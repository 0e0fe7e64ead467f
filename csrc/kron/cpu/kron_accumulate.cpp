#include <algorithm>

#include "cpu/gram.h"
#include "kron/checks.h"
#include "kron/cpu/small_blocks.h"
#include "kron/cpu/widen.h"

namespace ella {
namespace {

template <class S, class Total>
void add_large_blocks(const KronRows<S, Total>& r) {
  using T = Widened<S>;
  const Kernels<T>& k = kernels<T>();
  Gram<T>(r.d, r.N, r.G)
      .accumulate(r.factor, r.G, r.N, r.alpha, [&](int64_t g, int64_t first, int64_t n, int64_t k0, int64_t count, T* panel) {
        pack_as(k, n, count, r.data + k0 * r.row + g * r.block + first * r.value, r.value, r.row, panel);
      });
}

template <class S, class Total>
void add_blocks(const KronRows<S, Total>& r) {
  constexpr int64_t kAlone = 64;  // the largest block that is one thread's where it is the only one: a single tile
  if (r.d <= (r.G > 1 ? SmallBlocks<S, Total>::largest() : kAlone)) {
    SmallBlocks<S, Total>(r).add();
  } else {
    add_large_blocks(r);
  }
}

// Parts of the rows of one block, which has too few tiles to share out: by the sizes alone, so that no result depends on the
// number of threads.
int64_t row_parts(const KronAccumulateSizes& s) {
  constexpr int64_t kParts = 8, kSide = 192;  // 192: six tiles of 64 columns
  constexpr int64_t kMin = 1 << 21;           // multiply-adds of a part, as if both triangles were computed: some 30 us
  return s.G == 1 && s.d <= kSide ? std::clamp(std::min(s.N, kParts * kMin) * s.d * s.d / kMin, int64_t(1), kParts) : 1;
}

template <class S, class Total>
void accumulate(const KronAccumulateSizes& s, const Tensor& rows, double alpha, Total* total) {
  const S* data = rows.const_data_ptr<S>();
  const int64_t row = rows.stride(0), block = rows.stride(1), value = rows.stride(2), parts = row_parts(s), each = s.N / parts;
  int64_t rest = s.N;
  if (parts > 1) {
    // Every `parts`-th row, so that rows side by side become blocks side by side; but not of rows that are transposed.
    const bool whole = value != 1;
    const int64_t size = s.d * s.d;
    const Buffer<Total> sums(parts * size);
    sums.zero(0, parts * size);
    add_blocks(KronRows<S, Total>{data, each, parts, s.d, whole ? row : parts * row, whole ? each * row : row, value,
                                  sums.data(), alpha});
    for (int64_t i = 0; i < parts; ++i) adders<Total, Total>().rows(1, size, 1, sums.data() + i * size, size, total, size);
    data += parts * each * row;
    rest -= parts * each;
  }
  if (rest > 0) add_blocks(KronRows<S, Total>{data, rest, s.G, s.d, row, block, value, total, alpha});
}

void kron_accumulate_(Tensor factor, const Tensor& rows, double alpha, bool /*allow_tf32*/) {
  const KronAccumulateSizes s = check_kron_accumulate(factor, rows, alpha);
  if (factor.numel() == 0 || s.N == 0) return;
  with_factor_types(factor, rows, [&](auto number, auto total) {
    using Total = decltype(total);
    accumulate<decltype(number)>(s, rows, alpha, factor.mutable_data_ptr<Total>());
  });
}

ELLA_REGISTER(CPU, m) { m.impl("kron_accumulate_", TORCH_BOX(&kron_accumulate_)); }

}  // namespace
}  // namespace ella

#include <algorithm>

#include "../common/checks.h"
#include "gram.h"

namespace ella {
namespace {

// Rows are summed by 64, those sums by 64, and these sums join the factor: three short sums, to bound rounding.
constexpr int64_t kSum = 64, kSums = 64 * kSum;

// factor[g] += alpha sum_n rows[n, g] rows[n, g]^T
template <class T>
struct Rows {
  const T* data;
  int64_t N, G, d, row, block, value;  // sizes and strides
  T* factor;
  double alpha;

  void add(int64_t g, int64_t i, int64_t j, T sum) const {
    T* target = factor + g * d * d;
    const T part = static_cast<T>(alpha * sum);
    target[i * d + j] += part;
    if (i != j) target[j * d + i] += part;
  }
};

// Numbers of a row in which small blocks are gathered: kSum rows of them, at most 512 KiB, stay in the second-level cache.
constexpr int64_t kGathered = 1024;
constexpr int64_t kMedium = 512;  // numbers of a row of medium blocks that are packed at once: 256 rows of floats are 512 KiB
constexpr int64_t kSmall = 40;    // the largest block of which rows are gathered: larger ones fill a panel's vectors well

// Small blocks. Rows are gathered a few at a time, as they lie in memory, at a distance of an odd number of vectors: that of
// the rows themselves is often a power of two, and then the rows of a block share a few lines of the first-level cache.
template <class T>
void add_small_blocks(const Rows<T>& r) {
  const Kernels<T>& k = kernels<T>();
  const bool lags = 2 * r.d <= k.vector;
  parallel_tasks(r.G, [&](int64_t begin, int64_t end) {
    const int64_t blocks = std::min(end - begin, std::max(kGathered / r.d, int64_t(1))), columns = blocks * r.d;
    const int64_t vectors = ceil_divide(columns, k.vector), row = ((vectors + 1) | 1) * k.vector;
    const int64_t lanes = (lags ? vectors : ceil_divide(r.d, k.vector)) * k.vector,
                  sums = lags ? r.d * lanes : blocks * r.d * lanes;
    const Buffer<T> gathered(kSum * row);
    const Buffer<T> total(sums);
    gathered.zero(0, kSum * row);
    for (int64_t g0 = begin; g0 < end; g0 += blocks) {
      const int64_t here = std::min(blocks, end - g0);
      for (int64_t n0 = 0; n0 < r.N; n0 += kSum) {
        const int64_t count = std::min(kSum, r.N - n0);
        for (int64_t n = 0; n < count; ++n) {
          const T* source = r.data + (n0 + n) * r.row + g0 * r.block;
          T* target = gathered.data() + n * row;
          if (r.block == r.d) {
            std::copy_n(source, here * r.d, target);
          } else {
            for (int64_t g = 0; g < here; ++g) std::copy_n(source + g * r.block, r.d, target + g * r.d);
          }
        }
        if (n0 % kSums == 0) total.zero(0, sums);
        if (lags) {
          // The blocks side by side are one string of numbers, and its products with itself shifted by less than d contain
          // those of all blocks, several blocks in one vector.
          k.lag_products(r.d, vectors, count, gathered.data(), row, total.data(), lanes);
        } else {
          for (int64_t g = 0; g < here; ++g) {
            k.self_products(r.d, count, gathered.data() + g * r.d, row, total.data() + g * r.d * lanes, lanes);
          }
        }
        if ((n0 + count) % kSums != 0 && n0 + count < r.N) continue;
        for (int64_t g = 0; g < here; ++g) {
          for (int64_t i = 0; i < r.d; ++i) {
            for (int64_t j = i; j < r.d; ++j) {
              r.add(g0 + g, i, j, total.data()[lags ? (j - i) * lanes + g * r.d + i : (g * r.d + i) * lanes + j]);
            }
          }
        }
      }
    }
  });
}

// Blocks of a few panels, several at a time: their rows are packed as they lie in memory, a few rows of all of them, and their
// sums stay in the second-level cache until the end.
template <class T>
void add_medium_blocks(const Rows<T>& r) {
  constexpr int64_t kChunk = Tiles<T>::kRows, kAtOnce = 16;
  static_assert(kSums % kChunk == 0, "sums join the factor at the end of a chunk");
  const Kernels<T>& k = kernels<T>();
  const Tiles<T> tiles(r.d);
  const int64_t W = k.width, panel = W * kChunk, packed_size = tiles.panels() * panel,
                sums_size = tiles.count() * tiles.tile_size();
  parallel_tasks(r.G, [&](int64_t begin, int64_t end) {
    const int64_t blocks = std::min(end - begin, std::max(kMedium / (tiles.panels() * W), int64_t(1)));
    const Buffer<T> packed(blocks * packed_size);
    const Buffer<T> sums(blocks * sums_size + tiles.tile_size());
    for (int64_t g0 = begin; g0 < end; g0 += blocks) {
      const int64_t here = std::min(blocks, end - g0);
      for (int64_t n0 = 0; n0 < r.N; n0 += kChunk) {
        const int64_t count = std::min(kChunk, r.N - n0), step = r.value == 1 ? kAtOnce : count;
        for (int64_t n = 0; n < count; n += step) {
          for (int64_t g = 0; g < here; ++g) {
            for (int64_t p = 0; p < tiles.panels(); ++p) {
              k.pack(tiles.columns(p), std::min(step, count - n),
                     r.data + (n0 + n) * r.row + (g0 + g) * r.block + p * W * r.value, r.value, r.row,
                     packed.data() + g * packed_size + p * panel + n * W);
            }
          }
        }
        const bool last = (n0 + count) % kSums == 0 || n0 + count == r.N;
        for (int64_t g = 0; g < here; ++g) {
          T* sum = sums.data() + g * sums_size;
          tiles.products(0, tiles.count(), count, packed.data() + g * packed_size, panel, sum, n0 % kSums != 0);
          if (last) {
            tiles.add(0, tiles.count(), static_cast<T>(r.alpha), sum, sums.data() + blocks * sums_size,
                      r.factor + (g0 + g) * r.d * r.d);
          }
        }
      }
    }
  });
}

template <class T>
void add_large_blocks(const Rows<T>& r) {
  const Kernels<T>& k = kernels<T>();
  Gram<T>(r.d, r.N, r.G)
      .accumulate(r.factor, r.G, r.N, static_cast<T>(r.alpha),
                  [&](int64_t g, int64_t first, int64_t n, int64_t k0, int64_t count, T* panel) {
                    k.pack(n, count, r.data + k0 * r.row + g * r.block + first * r.value, r.value, r.row, panel);
                  });
}

template <class T>
void add_blocks(const Rows<T>& r) {
  if (r.value == 1 && r.d <= kSmall) {
    add_small_blocks(r);
  } else if (r.d <= kMedium / 2 && r.G > 1) {
    add_medium_blocks(r);
  } else {
    add_large_blocks(r);
  }
}

// Parts of the rows of one block, which has too few tiles to share out: by the sizes alone, so that no result depends on the
// number of threads.
int64_t row_parts(const KronAccumulateSizes& s) {
  constexpr int64_t kParts = 8, kSide = 192;  // 192: six tiles of 64 columns
  constexpr int64_t kLeast = 1 << 21;         // multiply-adds of a part, as if both triangles were computed: some 30 us
  return s.G == 1 && s.d <= kSide ? std::clamp(s.N * s.d * s.d / kLeast, int64_t(1), kParts) : 1;
}

void kron_accumulate_(Tensor factor, const Tensor& rows, double alpha) {
  const KronAccumulateSizes s = check_kron_accumulate(factor, rows);
  if (factor.numel() == 0 || s.N == 0) return;
  ELLA_DISPATCH_FLOATING(factor.scalar_type(), "kron_accumulate_", [&] {
    const scalar_t* data = rows.const_data_ptr<scalar_t>();
    scalar_t* const total = factor.mutable_data_ptr<scalar_t>();
    const int64_t row = rows.stride(0), block = rows.stride(1), value = rows.stride(2), parts = row_parts(s),
                  each = s.N / parts;
    int64_t rest = s.N;
    if (parts > 1) {
      const int64_t size = s.d * s.d;
      const Buffer<scalar_t> sums(parts * size);
      sums.zero(0, parts * size);
      add_blocks(Rows<scalar_t>{data, each, parts, s.d, row, each * row, value, sums.data(), alpha});
      for (int64_t i = 0; i < parts; ++i) kernels<scalar_t>().add_rows(1, size, 1, sums.data() + i * size, size, total, size);
      data += parts * each * row;
      rest -= parts * each;
    }
    if (rest > 0) add_blocks(Rows<scalar_t>{data, rest, s.G, s.d, row, block, value, total, alpha});
  });
}

ELLA_REGISTER(CPU, m) { m.impl("kron_accumulate_", TORCH_BOX(&kron_accumulate_)); }

}  // namespace
}  // namespace ella

// symmetric_eigenvalues of many matrices of different sizes in few launches: tridiagonal matrices by Householder's reflections,
// one block of threads a matrix, then their eigenvalues by bisection, one thread an eigenvalue.
//
// A reflection H = I - tau v v^T takes a column's part below the diagonal to its first element, and the rest A to
// H A H = A - v w^T - w v^T with w = tau (A v - tau/2 (v^T A v) v). The v and w of a panel of columns are kept in shared memory
// and subtracted from A together; until then A v, and the panel's own columns, are corrected by them:
//   A v -> A v - V (W^T v) - W (V^T v)
// Per column A is read once, from the second-level cache where it fits, in rows: it is symmetric, and both triangles are kept.
// A matrix is scaled by a power of two such that its largest number lies in [1, 4).
//
// Bisection counts the eigenvalues below x by the signs of the leading principal minors of T - x I,
//   p[i] = (diagonal[i] - x) p[i-1] - off_diagonal[i-1]^2 p[i-2],
// which takes no divisions: each waits for the one before. Squares are raised to kLeastSquare, which is nothing beside the
// rounding of the scaled matrix: then two neighbouring p are never both zero, whichever sign a single zero has the number of
// changes is the same, and the larger of two neighbours shrinks by no more than that factor a row, so that p is brought back to
// [1, 2) every few rows.
//
// Sources: Dongarra, Sorensen and Hammarling, "Block reduction of matrices to condensed forms for eigenvalue computations",
// J. Comput. Appl. Math. 1989; Barth, Martin and Wilkinson, "Calculation of the eigenvalues of a symmetric tridiagonal matrix
// by the method of bisection", Numer. Math. 1967.
#include <algorithm>
#include <limits>
#include <vector>

#include "cuda/reduce.cuh"
#include "kron/checks.h"

namespace ella {
namespace {

// Threads a matrix: of up to kSmallRows rows many matrices share a multiprocessor.
constexpr int kThreads = 512, kSmallThreads = 64, kSmallRows = 64;
constexpr int kPanel = 8;                   // columns that are subtracted together
constexpr int kInFlight = 8, kUpdated = 4;  // rows that a thread reads at once
constexpr double kNegligible = 1e-280;      // a sum of squares, of a matrix whose largest number is about 1
constexpr int kBisectThreads = 128, kBisectWarps = kBisectThreads / kWarp;
constexpr int kHalvings = 58;           // of an interval at most six times as long as the matrix's norm
constexpr int kUnscaled = 4;            // rows of the recurrence
constexpr double kLeastSquare = 1e-60;  // four of them are no less than 1e-308, with what a step loses beside
constexpr double kBehind = 1e6;         // a diagonal above all eigenvalues of a scaled matrix
constexpr int kSets = 96;               // of a launch, whose arguments are at most 4 KB

// Matrices of one size, of which the first is number `first` of the launch: their numbers, and where their copies with rows of
// an even length and their eigenvalues begin.
struct Set {
  int64_t first, copies, values;
  const double* numbers;
  int rows;

  __host__ __device__ int stride() const { return rows + rows % 2; }
};

struct Sets {
  Set set[kSets];  // those that are not there have the highest `first`
};

// The set of matrix number `matrix`, with its offsets moved to that matrix.
__device__ __forceinline__ Set find(const Sets& sets, int64_t matrix) {
  Set own = sets.set[0];
#pragma unroll
  for (int s = 1; s < kSets; ++s) {  // unrolled, as parameters have no address
    if (sets.set[s].first <= matrix) own = sets.set[s];
  }
  const int64_t place = matrix - own.first;
  own.numbers += place * own.rows * own.rows;
  own.copies += place * own.rows * own.stride();
  own.values += place * own.rows;
  return own;
}

// As block_reduce, but every thread gets the result. One barrier, behind which `scratch` is read: another has to come before it
// is used again.
template <int Warps, class Operation>
__device__ __forceinline__ double reduce_for_all(double value, SharedArray<double> scratch, Operation operation) {
  value = warp_reduce(value, operation);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  return warp_reduce(static_cast<double>(scratch[threadIdx.x % Warps]), operation, Warps);
}

// How the columns from `first` on are shared out, in pairs that lie on 16 bytes: `groups` groups of threads have every pair
// once, and each has every groups-th row. Where `first` is odd, the first pair begins one column before it: what is made of
// that column is not used.
template <int Threads>
struct Share {
  __device__ __forceinline__ Share(int first, int end, int most_groups)
      : base(first & ~1), pairs((end - base + 1) / 2), groups(min(Threads / pairs, most_groups)) {
    group = threadIdx.x / pairs, column = base + 2 * (threadIdx.x - group * pairs);
  }

  int base, pairs, groups, group, column;
};

// sum += a[u step] v[u groups] of as many rows as are in flight, or of those that begin before `left`.
template <bool Whole>
__device__ __forceinline__ void add_rows(double (&sum)[2], const double* a, int step, SharedArray<double> v, int groups,
                                         int left) {
  double numbers[kInFlight][2];
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) {
    numbers[u][0] = numbers[u][1] = 0;
    if (Whole || u * groups < left) load_vector(numbers[u], a);
    a += step;
  }
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) {
    const double x = Whole || u * groups < left ? static_cast<double>(v[u * groups]) : 0;
    sum[0] = fma(numbers[u][0], x, sum[0]);
    sum[1] = fma(numbers[u][1], x, sum[1]);
  }
}

// partials[g * 2 pairs + c - base] = group g's rows of sum_i a[i][c] v[i], i from first on.
template <int Threads>
__device__ __forceinline__ void multiply(const double* a, int stride, int first, int end, SharedArray<double> v,
                                         const Share<Threads>& share, SharedArray<double> partials) {
  if (share.group >= share.groups) return;
  const int groups = share.groups, step = groups * stride;
  double sum[2] = {0, 0};
  int i = first + share.group;
  const double* from = a + i * stride + share.column;
  for (; i + (kInFlight - 1) * groups < end; i += kInFlight * groups) {
    add_rows<true>(sum, from, step, v + i, groups, 0);
    from += kInFlight * step;
  }
  if (i < end) add_rows<false>(sum, from, step, v + i, groups, end - i);
  partials[2 * threadIdx.x] = sum[0];
  partials[2 * threadIdx.x + 1] = sum[1];
}

// a[i][c] -= sum_l v[l][i] w[l][c] + w[l][i] v[l][c] over the panel, rows and columns from first on.
template <int Threads>
__device__ __forceinline__ void update(double* a, int stride, int first, int end, SharedArray<double> v,
                                       SharedArray<double> w) {
  const Share<Threads> share(first, end, end - first);
  if (share.group >= share.groups) return;
  double own_v[kPanel][2], own_w[kPanel][2];
#pragma unroll
  for (int l = 0; l < kPanel; ++l) {
    load_vector(own_v[l], v + (l * stride + share.column));
    load_vector(own_w[l], w + (l * stride + share.column));
  }
  for (int i = first + share.group; i < end; i += kUpdated * share.groups) {
    double numbers[kUpdated][2];
#pragma unroll
    for (int u = 0; u < kUpdated; ++u) {
      const int row = i + u * share.groups;
      if (row < end) load_vector(numbers[u], a + row * stride + share.column);
    }
#pragma unroll
    for (int u = 0; u < kUpdated; ++u) {
      const int row = i + u * share.groups;
      if (row >= end) break;
#pragma unroll
      for (int l = 0; l < kPanel; ++l) {
        const double row_v = v[l * stride + row], row_w = w[l * stride + row];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          numbers[u][c] = fma(-row_v, own_w[l][c], numbers[u][c]);
          numbers[u][c] = fma(-row_w, own_v[l][c], numbers[u][c]);
        }
      }
      store_vector(a + row * stride + share.column, numbers[u]);
    }
  }
}

// Copies the lower triangle of a matrix to both triangles of `a`, scaled by a power of two, and returns the power's inverse: 0
// for zeros, NaN where a number is not finite, and then nothing is copied.
template <int Threads>
__device__ __forceinline__ double copy_scaled(const double* numbers, double* a, int rows, int stride,
                                              SharedArray<double> sums) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  double largest = 0;
  for (int i = warp; i < rows; i += Threads / kWarp) {
    for (int j = lane; j <= i; j += kWarp) largest = Maximum{}(largest, fabs(numbers[i * rows + j]));
  }
  largest = reduce_for_all<Threads / kWarp>(largest, sums, Maximum{});
  if (!(largest <= std::numeric_limits<double>::max())) return std::numeric_limits<double>::quiet_NaN();
  const int exponent = min(max(static_cast<int>(__double_as_longlong(largest) >> 52) - 1023, -1022), 1022);
  const double factor = __longlong_as_double(static_cast<long long>(1023 - exponent) << 52);
  for (int i = warp; i < rows; i += Threads / kWarp) {
    for (int j = lane; j <= i; j += kWarp) {
      const double x = factor * numbers[i * rows + j];
      a[i * stride + j] = x;
      a[j * stride + i] = x;
    }
    if (lane == 0 && stride > rows) a[i * stride + rows] = 0;
  }
  return largest == 0 ? 0 : __longlong_as_double(static_cast<long long>(1023 + exponent) << 52);
}

//   copies: of all matrices; diagonal, off_diagonal (values), of the scaled matrices; units (matrices): what their
//   eigenvalues are to be multiplied by. No matrix has more than Rows rows.
template <int Threads, int Rows>
__global__ void __launch_bounds__(Threads)
    tridiagonalise_kernel(Sets sets, double* copies, double* __restrict__ diagonal, double* __restrict__ off_diagonal,
                          double* __restrict__ units) {
  constexpr int owned = Rows / Threads;  // numbers of a column a thread
  static_assert(owned * Threads == Rows, "the threads own the longest column");
  const Set own = find(sets, blockIdx.x);
  const int rows = own.rows, stride = own.stride(), lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<double> v = memory.array<double>(kPanel * stride), w = memory.array<double>(kPanel * stride);
  const SharedArray<double> partials = memory.array<double>(2 * Threads), dots = memory.array<double>(2 * kPanel);
  const SharedArray<double> sums = memory.array<double>(Threads / kWarp), products = memory.array<double>(Threads / kWarp);
  const SharedArray<double> head = memory.array<double>(1);
  double* const a = copies + own.copies;
  for (int i = threadIdx.x; i < kPanel * stride; i += Threads) v[i] = 0, w[i] = 0;
  const double unit = copy_scaled<Threads>(own.numbers, a, rows, stride, sums);
  if (threadIdx.x == 0) units[blockIdx.x] = unit;
  if (unit != unit) return;
  __syncthreads();  // the copy is there for all
  for (int panel = 0; panel < rows; panel += kPanel) {
    for (int j = 0; j < min(kPanel, rows - panel); ++j) {
      const int k = panel + j;
      double column[owned], squares = 0;
#pragma unroll
      for (int o = 0; o < owned; ++o) {
        const int i = k + threadIdx.x + o * Threads;
        column[o] = 0;
        if (i < rows) {
          double x = a[k * stride + i];
          for (int l = 0; l < j; ++l) {
            x = fma(-v[l * stride + i], static_cast<double>(w[l * stride + k]), x);
            x = fma(-w[l * stride + i], static_cast<double>(v[l * stride + k]), x);
          }
          column[o] = x;
          if (i == k) diagonal[own.values + k] = x;
          if (i == k + 1) head[0] = x;
          if (i > k + 1) squares = fma(x, x, squares);
        }
      }
      if (k == rows - 1) break;
      squares = reduce_for_all<Threads / kWarp>(squares, sums, Sum{});
      const double first = head[0];
      const bool reflects = squares > kNegligible;
      const double norm = reflects ? sqrt(fma(first, first, squares)) : 0;
      const double target = !reflects ? first : first < 0 ? norm : -norm;
      const double tau = reflects ? (target - first) / target : 0, scale = reflects ? 1 / (first - target) : 0;
      if (threadIdx.x == 0) off_diagonal[own.values + k] = target;
#pragma unroll
      for (int o = 0; o < owned; ++o) {
        const int i = k + threadIdx.x + o * Threads;
        if (k < i && i < rows) {
          column[o] = !reflects ? 0 : i == k + 1 ? 1 : column[o] * scale;
          v[j * stride + i] = column[o];
          if (!reflects) w[j * stride + i] = 0;
        }
      }
      __syncthreads();  // the reflection is there for all
      if (!reflects) continue;

      const Share<Threads> share(k + 1, rows, ceil_div(rows - k - 1, 4));
      multiply(a, stride, k + 1, rows, v + j * stride, share, partials);
      for (int q = warp; q < 2 * j; q += Threads / kWarp) {  // W^T v, then V^T v
        const SharedArray<double> other = (q < j ? w : v) + (q < j ? q : q - j) * stride;
        double dot = 0;
        for (int i = k + 1 + lane; i < rows; i += kWarp) {
          dot = fma(static_cast<double>(other[i]), static_cast<double>(v[j * stride + i]), dot);
        }
        dot = warp_reduce(dot, Sum{});
        if (lane == 0) dots[q] = dot;
      }
      __syncthreads();  // the groups' sums and the dot products are there for all
      double image[owned], product = 0;
#pragma unroll
      for (int o = 0; o < owned; ++o) {
        const int i = k + threadIdx.x + o * Threads;
        image[o] = 0;
        if (k < i && i < rows) {
          double x = 0;
          for (int g = 0; g < share.groups; ++g) x += partials[g * 2 * share.pairs + i - share.base];
          for (int l = 0; l < j; ++l) {
            x = fma(-v[l * stride + i], static_cast<double>(dots[l]), x);
            x = fma(-w[l * stride + i], static_cast<double>(dots[j + l]), x);
          }
          image[o] = tau * x;
          product = fma(image[o], column[o], product);
        }
      }
      const double half = -0.5 * tau * reduce_for_all<Threads / kWarp>(product, products, Sum{});
#pragma unroll
      for (int o = 0; o < owned; ++o) {
        const int i = k + threadIdx.x + o * Threads;
        if (k < i && i < rows) w[j * stride + i] = fma(half, column[o], image[o]);
      }
      __syncthreads();  // the panel's next column is there for all
    }
    const int next = panel + kPanel;
    if (next < rows) update<Threads>(a, stride, next, rows, v, w);
    __syncthreads();  // the matrix is there for all
  }
}

size_t tridiagonalise_bytes(int threads, int stride) {
  return 2 * shared_size(kPanel * stride * sizeof(double)) + shared_size(2 * threads * sizeof(double)) +
         shared_size(2 * kPanel * sizeof(double)) + 2 * shared_size(threads / kWarp * sizeof(double)) +
         shared_size(sizeof(double));
}

__host__ __device__ constexpr int padded(int rows) { return ceil_div(rows, kUnscaled) * kUnscaled; }

// How many eigenvalues lie below x: table[2 i], table[2 i + 1] are a diagonal element and the square of the one beside it, to
// the left; `rows` is a multiple of kUnscaled.
__device__ __forceinline__ int count_below(SharedArray<double> table, int rows, double x) {
  double before = 0, last = 1;
  int changes = 0;
  for (int i = 0; i < rows; i += kUnscaled) {
#pragma unroll
    for (int u = 0; u < kUnscaled; ++u) {
      double row[2];
      load_vector(row, table + 2 * (i + u));
      const double next = fma(row[0] - x, last, -(row[1] * before));
      changes +=
          static_cast<int>(static_cast<unsigned long long>(__double_as_longlong(next) ^ __double_as_longlong(last)) >> 63);
      before = last, last = next;
    }
    const int exponent = static_cast<int>(__double_as_longlong(max(fabs(before), fabs(last))) >> 52);
    const double factor = __longlong_as_double(static_cast<long long>(2046 - exponent) << 52);
    before *= factor, last *= factor;
  }
  return changes;
}

//   the arguments of tridiagonalise_kernel; out (values). Block b has the eigenvalues from kBisectThreads (b / matrices) on of
//   matrix b % matrices.
__global__ void __launch_bounds__(kBisectThreads)
    bisect_kernel(Sets sets, int64_t matrices, const double* __restrict__ diagonal, const double* __restrict__ off_diagonal,
                  const double* __restrict__ units, double* __restrict__ out) {
  const int64_t matrix = blockIdx.x % matrices;
  const Set own = find(sets, matrix);
  const int rows = own.rows, first = static_cast<int>(blockIdx.x / matrices) * kBisectThreads, k = first + threadIdx.x;
  if (first >= rows) return;
  const double unit = units[matrix];
  if (unit != unit) {
    if (k < rows) out[own.values + k] = unit;
    return;
  }
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<double> table = memory.array<double>(2 * padded(rows));
  const SharedArray<double> lows = memory.array<double>(kBisectWarps), highs = memory.array<double>(kBisectWarps);
  const double infinity = std::numeric_limits<double>::infinity();
  double low = infinity, high = -infinity;  // by Gershgorin's circles
  for (int i = threadIdx.x; i < padded(rows); i += kBisectThreads) {
    const double center = i < rows ? diagonal[own.values + i] : kBehind;
    const double left = 0 < i && i < rows ? fabs(off_diagonal[own.values + i - 1]) : 0;
    const double right = i < rows - 1 ? fabs(off_diagonal[own.values + i]) : 0;
    table[2 * i] = center;
    table[2 * i + 1] = max(left * left, kLeastSquare);
    if (i < rows) low = min(low, center - left - right), high = max(high, center + left + right);
  }
  low = -reduce_for_all<kBisectWarps>(-low, lows, Maximum{});
  high = reduce_for_all<kBisectWarps>(high, highs, Maximum{});
  if (k >= rows) return;
  const double slack = 4 * rows * std::numeric_limits<double>::epsilon() * max(fabs(low), fabs(high));
  low -= slack, high += slack;
  for (int i = 0; i < kHalvings; ++i) {
    const double middle = 0.5 * (low + high);
    if (count_below(table, padded(rows), middle) > k) {
      high = middle;
    } else {
      low = middle;
    }
  }
  out[own.values + k] = 0.5 * (low + high) * unit;
}

size_t bisect_bytes(int rows) {
  return shared_size(2 * padded(rows) * sizeof(double)) + 2 * shared_size(kBisectWarps * sizeof(double));
}

Tensor symmetric_eigenvalues(const std::vector<Tensor>& sets, const std::vector<int64_t>& ranks,
                             const std::vector<double>& errors) {
  constexpr const char* name = "symmetric_eigenvalues";
  check_symmetric_eigenvalues(sets, ranks, errors);
  const Device device(sets[0]);
  std::vector<Set> large, small;
  Set next{};
  int64_t all = 0;
  for (const Tensor& blocks : sets) {
    const int64_t groups = blocks.size(0);
    next.rows = static_cast<int>(blocks.size(1));
    if (groups == 0 || next.rows == 0) continue;
    next.first = groups;  // until it is known which come before
    next.numbers = blocks.const_data_ptr<double>();
    (next.rows <= kSmallRows ? small : large).push_back(next);
    next.copies += groups * next.rows * next.stride(), next.values += groups * next.rows, all += groups;
  }
  // The largest take longest.
  const auto longer = [](const Set& one, const Set& other) { return one.rows > other.rows; };
  std::stable_sort(large.begin(), large.end(), longer), std::stable_sort(small.begin(), small.end(), longer);
  const Tensor out = device_empty(sets[0], {next.values}), diagonal = device_empty(sets[0], {next.values}),
               off_diagonal = device_empty(sets[0], {next.values}), units = device_empty(sets[0], {all}),
               copies = device_empty(sets[0], {next.copies});
  const auto run = [&](const std::vector<Set>& chosen, auto kernel, int threads) {
    for (size_t begin = 0; begin < chosen.size(); begin += kSets) {
      Sets launched;
      int64_t matrices = 0;
      int most = 0;
      for (size_t i = 0; i < kSets; ++i) {
        Set& set = launched.set[i];
        set = {std::numeric_limits<int64_t>::max(), 0, 0, nullptr, 0};
        if (begin + i >= chosen.size()) continue;
        set = chosen[begin + i];
        const int64_t own = set.first;
        set.first = matrices, matrices += own, most = std::max(most, set.rows);
      }
      launch(device, name, kernel, matrices, threads, tridiagonalise_bytes(threads, most + most % 2), launched,
             copies.mutable_data_ptr<double>(), diagonal.mutable_data_ptr<double>(), off_diagonal.mutable_data_ptr<double>(),
             units.mutable_data_ptr<double>());
      launch(device, name, bisect_kernel, matrices * ceil_div(most, kBisectThreads), kBisectThreads, bisect_bytes(most),
             launched, matrices, diagonal.const_data_ptr<double>(), off_diagonal.const_data_ptr<double>(),
             units.const_data_ptr<double>(), out.mutable_data_ptr<double>());
    }
  };
  run(large, tridiagonalise_kernel<kThreads, kMostEigenvalueRows>, kThreads);
  run(small, tridiagonalise_kernel<kSmallThreads, kSmallRows>, kSmallThreads);
  return out;
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) { m.impl("symmetric_eigenvalues", TORCH_BOX(&symmetric_eigenvalues)); }

}  // namespace
}  // namespace ella

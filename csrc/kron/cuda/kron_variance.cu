// kron_variance_: variance[n,k,l] += sum_{g,i,j} M[n,k,g,i,j] M[n,l,g,i,j] / (l[g,i] m[g,j] + p).
//
// One position (M of rank one): a block takes 16 data points and, in turn, its share of the tiles (g, 64 rows, 64 columns). Of
// each it sums the weights w[n,j] = sum_i inputs[n,i]^2 / (l_i m_j + p) over the rows by slabs of 16, whose inverses it
// computes once for all its points; then each thread sums outputs[k,n,j] w[n,j] outputs[l,n,j] over the columns for a pair (k,
// l) of 16 x 16 outputs. Else: a block takes a data point, two groups of at most five outputs, and its share of the tiles (g,
// 16 rows, 16 columns). A thread has one element of the tile for each of these outputs in registers, and the sums of their
// products in doubles, until the block adds those of its threads up. Blocks leave partial sums in double; a second kernel adds
// them to the variance in a fixed order. The shares depend on the sizes alone. Squares, weights, M and sums over a tile of rank
// one have the rows' type, the inverses are divided in double.
#include <algorithm>
#include <optional>

#include "cuda/reduce.cuh"
#include "cuda/slab_pipeline.cuh"
#include "kron/checks.h"

namespace ella {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kPoints = 16, kColumns = 64, kRows = 64, kSlab = 16;  // of a rank-one tile
constexpr int kOwnPoints = kPoints / (kThreads / kColumns);         // of a thread
constexpr int kPairSide = 16, kPairStride = kColumns + 1;  // outputs of a block's pairs; odd: rows begin in other banks
constexpr int kSide = 16, kOutputs = 5;                    // of a tile of M, and how many at a time
constexpr int kStages = 3, kStage = (1 + 2 * kOutputs) * kThreads;  // of 16 positions' rows
constexpr int64_t kBlocks = 1024, kMaxPartials = int64_t(1) << 22;  // 32 MiB

struct Spectra {
  const double *in, *out, *precision;
  int64_t in0, in1, out0, out1;  // strides

  __device__ __forceinline__ double inverse(int64_t g, int64_t i, int64_t j) const {
    return 1.0 / fma(in[g * in0 + i * in1], out[g * out0 + j * out1], *precision);
  }
};

// inputs (N, T, G, a); outputs (K, N, T, G, b), or (K, N, G, a, b) where the Jacobian is given: there `t` is not used, and `i`
// is the stride of the rows.
template <class T>
struct Rows {
  const T *inputs, *outputs;
  int64_t in_n, in_t, in_g, in_i;
  int64_t out_k, out_n, out_t, out_g, out_i, out_j;
};

struct Sizes {
  int64_t N, K, T, G, a, b, pairs, parts;
  bool diagonal;
};

// Place of the pair (k, l), l <= k, among the partial sums.
__device__ __forceinline__ int64_t place(const Sizes& s, int64_t k, int64_t l) { return s.diagonal ? k : k * (k + 1) / 2 + l; }

//   partials (parts, N, pairs): pairs (k, l) row by row, of the diagonal k alone
template <class T>
__global__ void __launch_bounds__(kThreads, 1)  // else the compiler wants more blocks at once, and spills around the divisions
    rank_one_kernel(Rows<T> rows, Spectra spectra, Sizes s, double* __restrict__ partials) {
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<T> inverses = memory.array<T>(kSlab * kColumns), squares = memory.array<T>(kPoints * kSlab),
                       weights = memory.array<T>(kPoints * kColumns), left = memory.array<T>(kPairSide * kPairStride),
                       right = memory.array<T>(kPairSide * kPairStride);
  const int64_t part = blockIdx.x % s.parts, first = blockIdx.x / s.parts * kPoints;
  const int64_t column_tiles = ceil_div(s.b, static_cast<int64_t>(kColumns)),
                row_tiles = ceil_div(s.a, static_cast<int64_t>(kRows)), tiles = s.G * row_tiles * column_tiles;
  const int column = threadIdx.x % kColumns, point = threadIdx.x / kColumns * kOwnPoints;
  const int points = static_cast<int>(min(s.N - first, static_cast<int64_t>(kPoints)));
  bool begun = false;
  for (int64_t tile = part; tile < tiles; tile += s.parts, begun = true) {
    const int64_t g = tile / (row_tiles * column_tiles), j0 = tile % column_tiles * kColumns;
    const int64_t begin = tile / column_tiles % row_tiles * kRows, end = min(begin + kRows, s.a);
    T sums[kOwnPoints] = {};
    for (int64_t i0 = begin; i0 < end; i0 += kSlab) {
      __syncthreads();
#pragma unroll 1  // a double division is a call: unrolled, its operands spill
      for (int e = threadIdx.x; e < kSlab * kColumns; e += kThreads) {
        const int64_t i = i0 + e / kColumns, j = j0 + e % kColumns;
        inverses[e] = i < end && j < s.b ? static_cast<T>(spectra.inverse(g, i, j)) : T(0);
      }
      const int64_t i = i0 + threadIdx.x % kSlab;
      const int own = threadIdx.x / kSlab;
      const T value = own < points && i < end ? rows.inputs[(first + own) * rows.in_n + g * rows.in_g + i * rows.in_i] : T(0);
      squares[threadIdx.x] = value * value;
      __syncthreads();
      for (int k = 0; k < kSlab; ++k) {
        const T inverse = inverses[k * kColumns + column];
#pragma unroll
        for (int q = 0; q < kOwnPoints; ++q) sums[q] += static_cast<T>(squares[(point + q) * kSlab + k]) * inverse;
      }
    }
#pragma unroll
    for (int q = 0; q < kOwnPoints; ++q) weights[(point + q) * kColumns + column] = sums[q];
    const auto stage = [&](SharedArray<T> to, int q, int64_t output) {  // zeros beyond the last output and column
      for (int e = threadIdx.x; e < kPairSide * kColumns; e += kThreads) {
        const int64_t k = output + e / kColumns, j = j0 + e % kColumns;
        const T* const from = rows.outputs + k * rows.out_k + (first + q) * rows.out_n + g * rows.out_g + j * rows.out_j;
        to[e / kColumns * kPairStride + e % kColumns] = k < s.K && j < s.b ? *from : T(0);
      }
    };
    for (int q = 0; q < points; ++q) {
      for (int64_t k0 = 0; k0 < s.K; k0 += kPairSide) {
        for (int64_t l0 = s.diagonal ? k0 : 0; l0 <= k0; l0 += kPairSide) {
          __syncthreads();
          if (l0 == (s.diagonal ? k0 : 0)) stage(left, q, k0);
          if (l0 < k0) stage(right, q, l0);
          __syncthreads();
          const int a = threadIdx.x / kPairSide, b = s.diagonal ? a : threadIdx.x % kPairSide;
          const int64_t k = k0 + a, l = l0 + b;
          if (k >= s.K || l > k || (s.diagonal && threadIdx.x % kPairSide > 0)) continue;
          const SharedArray<T> one = left + a * kPairStride, other = (l0 < k0 ? right : left) + b * kPairStride;
          T sum = 0;
#pragma unroll 8
          for (int c = 0; c < kColumns; ++c) {
            sum += static_cast<T>(one[c]) * static_cast<T>(weights[q * kColumns + c]) * static_cast<T>(other[c]);
          }
          double& target = partials[(part * s.N + first + q) * s.pairs + place(s, k, l)];
          target = begun ? target + static_cast<double>(sum) : static_cast<double>(sum);
        }
      }
    }
  }
}

//   partials (parts, N, pairs)
template <class T, bool Given>
__global__ void __launch_bounds__(kThreads)
    tile_kernel(Rows<T> rows, Spectra spectra, Sizes s, int64_t output_pairs, double* __restrict__ partials) {
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<double> scratch = memory.array<double>(kWarps);
  const SharedArray<T> staging = memory.array<T>(Given ? 0 : kStages * kStage);  // [stage][rows, or gradients of an output][]
  const int64_t part = blockIdx.x % s.parts, output_pair = blockIdx.x / s.parts % output_pairs;
  const int64_t n = blockIdx.x / s.parts / output_pairs;
  int64_t first_k = output_pair, first_l = output_pair;  // groups of outputs
  if (!s.diagonal) {
    first_k = 0;
    while ((first_k + 1) * (first_k + 2) / 2 <= output_pair) ++first_k;
    first_l = output_pair - first_k * (first_k + 1) / 2;
  }
  const bool same = first_k == first_l;
  first_k *= kOutputs, first_l *= kOutputs;
  const int held = same ? kOutputs : 2 * kOutputs;
  const int64_t row_tiles = ceil_div(s.a, static_cast<int64_t>(kSide)),
                column_tiles = ceil_div(s.b, static_cast<int64_t>(kSide));
  const int64_t tiles = s.G * row_tiles * column_tiles;
  const int row = threadIdx.x / kSide, column = threadIdx.x % kSide;
  double sums[kOutputs][kOutputs] = {};
  const auto output = [&](int o) { return o < kOutputs ? first_k + o : first_l + o - kOutputs; };
  for (int64_t tile = part; tile < tiles; tile += s.parts) {
    const int64_t g = tile / (row_tiles * column_tiles), i0 = tile / column_tiles % row_tiles * kSide;
    const int64_t j0 = tile % column_tiles * kSide, i = i0 + row, j = j0 + column;
    const bool inside = i < s.a && j < s.b;
    T values[2 * kOutputs] = {};
    if constexpr (Given) {
#pragma unroll
      for (int o = 0; o < 2 * kOutputs; ++o) {
        if (o < held && inside && output(o) < s.K) {
          values[o] = rows.outputs[output(o) * rows.out_k + n * rows.out_n + g * rows.out_g + i * rows.out_i + j * rows.out_j];
        }
      }
    } else {
      int64_t next = row;  // this thread's position in the slab to copy next
      const T* left = rows.inputs + n * rows.in_n + next * rows.in_t + g * rows.in_g + (i0 + column) * rows.in_i;
      const T* right = rows.outputs + n * rows.out_n + next * rows.out_t + g * rows.out_g + j * rows.out_j;
      const auto start = [&](int stage) {
        const SharedArray<T> to = staging + (stage * kStage + static_cast<int>(threadIdx.x));
        copy_async(to, left, next < s.T && i0 + column < s.a);
#pragma unroll
        for (int o = 0; o < 2 * kOutputs; ++o) {
          if (o < held)
            copy_async(to + (1 + o) * kThreads, right + output(o) * rows.out_k, next < s.T && j < s.b && output(o) < s.K);
        }
        next += kSide, left += kSide * rows.in_t, right += kSide * rows.out_t;
      };
      __syncthreads();  // before the last tile's slabs are overwritten
      multiply_slabs<kStages>(ceil_div(s.T, static_cast<int64_t>(kSide)), start, [&](int stage) {
        const SharedArray<T> slab = staging + stage * kStage;
#pragma unroll 4
        for (int u = 0; u < kSide; ++u) {
          const T factor = slab[u * kSide + row];
#pragma unroll
          for (int o = 0; o < 2 * kOutputs; ++o) {
            if (o < held) values[o] += factor * static_cast<T>(slab[(1 + o) * kThreads + u * kSide + column]);
          }
        }
      });
    }
    const double inverse = inside ? spectra.inverse(g, i, j) : 0;
#pragma unroll
    for (int k = 0; k < kOutputs; ++k) {
      const double weighted = static_cast<double>(values[k]) * inverse;
#pragma unroll
      for (int l = 0; l < kOutputs; ++l) sums[k][l] += weighted * static_cast<double>(same ? values[l] : values[kOutputs + l]);
    }
  }
#pragma unroll
  for (int k = 0; k < kOutputs; ++k) {
#pragma unroll
    for (int l = 0; l < kOutputs; ++l) {
      const int64_t own_k = first_k + k, own_l = first_l + l;
      // The same for all threads, which meet in the reduction.
      if (own_k < s.K && own_l <= own_k && (!s.diagonal || k == l)) {
        const double sum = block_reduce(sums[k][l], scratch, Sum{});
        if (threadIdx.x == 0) partials[(part * s.N + n) * s.pairs + place(s, own_k, own_l)] = sum;
      }
    }
  }
}

// variance[n,k,l] and [n,l,k] += sum_part partials[part][n][pair], parts ascending.
//   partials (parts, N, pairs), variance (N, K, K) or (N, K)
template <class T>
__global__ void __launch_bounds__(kThreads) add_kernel(const double* __restrict__ partials, T* __restrict__ variance, Sizes s) {
  const int64_t entries = s.diagonal ? s.K : s.K * s.K;
  const int64_t element = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (element >= s.N * entries) return;
  const int64_t n = element / entries, k = s.diagonal ? element % entries : element % entries / s.K;
  const int64_t l = s.diagonal ? k : element % s.K, pair = place(s, max(k, l), min(k, l));
  double sum = 0;
  for (int64_t part = 0; part < s.parts; ++part) sum += partials[(part * s.N + n) * s.pairs + pair];
  variance[element] = static_cast<T>(static_cast<double>(variance[element]) + sum);
}

template <class T>
constexpr size_t kRankOneShared =
    shared_size(kSlab * kColumns * sizeof(T)) + shared_size(kPoints * kSlab * sizeof(T)) +
    shared_size(kPoints * kColumns * sizeof(T)) + 2 * shared_size(kPairSide * kPairStride * sizeof(T));
template <class T, bool Given>
constexpr size_t kTileShared = shared_size(kWarps * sizeof(double)) + (Given ? 0 : shared_size(kStages * kStage * sizeof(T)));

void kron_variance_(Tensor variance, const Tensor& outputs, const std::optional<Tensor>& inputs, const Tensor& eigenvalues_in,
                    const Tensor& eigenvalues_out, const Tensor& precision) {
  constexpr const char* name = "kron_variance_";
  const KronVarianceSizes c = check_kron_variance(variance, outputs, inputs, eigenvalues_in, eigenvalues_out, precision);
  if (variance.numel() == 0 || outputs.numel() == 0 || c.a == 0) return;
  const Device device(variance);
  const bool rank_one = inputs && c.T == 1;
  Sizes s{c.N, c.K, c.T, c.G, c.a, c.b, c.diagonal ? c.K : c.K * (c.K + 1) / 2, 1, c.diagonal};
  const int64_t output_groups = ceil_div(s.K, static_cast<int64_t>(kOutputs));
  const int64_t output_pairs = s.diagonal ? output_groups : output_groups * (output_groups + 1) / 2;
  const int64_t apart = rank_one ? ceil_div(s.N, static_cast<int64_t>(kPoints)) : s.N * output_pairs;
  const int64_t tiles = s.G * ceil_div(s.b, static_cast<int64_t>(rank_one ? kColumns : kSide)) *
                        ceil_div(s.a, static_cast<int64_t>(rank_one ? kRows : kSide));
  s.parts = std::max(std::min({tiles, ceil_div(kBlocks, apart), kMaxPartials / (s.N * s.pairs)}), int64_t(1));
  const Spectra spectra{eigenvalues_in.const_data_ptr<double>(),
                        eigenvalues_out.const_data_ptr<double>(),
                        precision.const_data_ptr<double>(),
                        eigenvalues_in.stride(0),
                        eigenvalues_in.stride(1),
                        c.shared ? 0 : eigenvalues_out.stride(0),
                        eigenvalues_out.stride(1)};
  const Tensor partials = device_empty(variance, {s.parts, s.N, s.pairs}, ScalarType::Double);
  double* const sums = partials.mutable_data_ptr<double>();
  ELLA_DISPATCH_FLOATING(outputs.scalar_type(), name, [&] {
    Rows<scalar_t> rows{};
    rows.outputs = outputs.const_data_ptr<scalar_t>();
    rows.out_k = outputs.stride(0), rows.out_n = outputs.stride(1), rows.out_j = outputs.stride(4);
    if (inputs) {
      rows.inputs = inputs->const_data_ptr<scalar_t>();
      rows.in_n = inputs->stride(0), rows.in_t = inputs->stride(1), rows.in_g = inputs->stride(2),
      rows.in_i = inputs->stride(3);
      rows.out_t = outputs.stride(2), rows.out_g = outputs.stride(3);
    } else {
      rows.out_g = outputs.stride(2), rows.out_i = outputs.stride(3);
    }
    const int64_t blocks = apart * s.parts;
    if (rank_one) {
      launch(device, name, rank_one_kernel<scalar_t>, blocks, kThreads, kRankOneShared<scalar_t>, rows, spectra, s, sums);
    } else if (inputs) {
      launch(device, name, tile_kernel<scalar_t, false>, blocks, kThreads, kTileShared<scalar_t, false>, rows, spectra, s,
             output_pairs, sums);
    } else {
      launch(device, name, tile_kernel<scalar_t, true>, blocks, kThreads, kTileShared<scalar_t, true>, rows, spectra, s,
             output_pairs, sums);
    }
  });
  ELLA_DISPATCH_FLOATING(variance.scalar_type(), name, [&] {
    launch(device, name, add_kernel<scalar_t>, ceil_div(variance.numel(), static_cast<int64_t>(kThreads)), kThreads, 0, sums,
           variance.mutable_data_ptr<scalar_t>(), s);
  });
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) { m.impl("kron_variance_", TORCH_BOX(&kron_variance_)); }

}  // namespace
}  // namespace ella

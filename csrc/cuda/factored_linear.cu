// factored_linear and its five gradients.
//
// All large results have one of two forms over the same inner products, which are computed tile by tile in shared memory and
// never written out:
//   inner[b,r,q] = sum_k left[r,b,k] right[q,b,k] (+ bias[...])
//   apply   out[r,q,y] = sum_b inner[b,r,q] outer[q,b,y] (+ bias_out[y])    y itself, and dx
//   weight  out[b,q,y] = sum_r inner[b,r,q] outer[r,q,y]                   dU, dV
// with r = n throughout (method: z and dz of an F-FC layer, U = weight_in, V = weight_out, g = grad):
//   y   inner z    b = c, q = d, k = x    left x, right U, outer V
//   dx  inner dz   b = d, q = c, k = y    left g, right V, outer U       (the forward map with U and V exchanged)
//   dU  inner dz   b = d, q = c, k = y    left g, right V, outer x
//   dV  inner z    b = c, q = d, k = x    left x, right U, outer g
// so two kernels and strided views serve all four. The bias gradients need no inner products.
//
// Tiles. A block of 256 threads owns TR rows x TQ columns and walks over slabs of 64 (b,k) pairs: 64 k's of one b where K is
// large, 16 b's of 4 k's where K is 4, so that layers with many channels and few positions fill the slab as well as those
// with few channels and many positions. The 16 groups of 16 threads each take 4 neighbouring slab columns (one 16-byte read of
// shared memory per row in float) and an outer product of TM x 4 per thread; the groups of one b are then added in fixed order.
//   float:  TR 32, TM 4: 8 vector reads for 64 FMA; double: TR 16, TM 2: 12 for 32.
// The outer stage holds 8 x TY results per thread; a step reads 8 inner values (two broadcast vector reads) and TY outer
// values (coalesced, through L1) for 8 TY FMA.
// inner_tile and outer_tile are what a tensor-core version replaces; the kernels around them stay.
#include <algorithm>
#include <tuple>

#include "../common/checks.h"
#include "../common/device_memory.h"
#include "reduce.cuh"

namespace ella {
namespace {

constexpr int kThreads = 256;
constexpr int kSlab = 64;         // (b,k) pairs in shared memory at once
constexpr int kGroupColumns = 4;  // of them, per group of 16 threads
constexpr int kBatches = 16;      // b's whose inner products are held: kSlab / kGroupColumns
constexpr int kColumns = 8;       // TQ
constexpr int kOuterRows = 8;     // results per thread along the contiguous axis of the inner tile

template <class T>
struct Tile {
  static constexpr int TM = sizeof(T) == 4 ? 4 : 2;
  static constexpr int kRows = 8 * TM;                    // TR
  static constexpr int kBlocks = sizeof(T) == 4 ? 2 : 1;  // resident on a multiprocessor: at most 128 or 255 registers
  // 64 values and 16 bytes: the 8 rows that a quarter warp reads at once start 4 banks apart and cover all 32.
  static constexpr int kSlabStride = kSlab + 16 / sizeof(T);
  static constexpr int kLeft = kRows * kSlabStride, kRight = kColumns * kSlabStride;
  static constexpr int kPair = kRows * kColumns;
  // One q's inner products, and a pad that keeps 16-byte alignment and shifts the next q by 8 (float) or 16 banks.
  static constexpr int kInnerStride = kBatches * kRows + 8;
  static constexpr int kInner = kColumns * kInnerStride;
  static constexpr int kPartial = kBatches / 2 * kPair;  // per pair of groups; the pair itself is added by a shuffle
  static constexpr size_t shared_bytes() {
    return shared_size(2 * kLeft * sizeof(T)) + shared_size(2 * kRight * sizeof(T)) + shared_size(kInner * sizeof(T)) +
           shared_size(kPartial * sizeof(T));
  }
};

// Where the inner product (b, r, q) of a tile lies: what the outer stage reads eight at a time must be contiguous.
template <class T, bool RowsContiguous>
__device__ __forceinline__ int inner_at(int b, int r, int q) {
  return q * Tile<T>::kInnerStride + (RowsContiguous ? b * Tile<T>::kRows + r : r * kBatches + b);
}

struct Sizes {
  int64_t rows, batches, columns, reduce, outputs;  // r, b, q, k, y
};

template <class T>
struct InnerStorage {
  SharedArray<T> left, right;  // [stage][kRows or kColumns][kSlabStride]
  SharedArray<T> inner;        // [q][b][r] or [q][r][b]
  SharedArray<T> partial;      // [pair of groups][kPair]

  __device__ __forceinline__ explicit InnerStorage(SharedMemory memory)
      : left(memory.array<T>(2 * Tile<T>::kLeft)),
        right(memory.array<T>(2 * Tile<T>::kRight)),
        inner(memory.array<T>(Tile<T>::kInner)),
        partial(memory.array<T>(Tile<T>::kPartial)) {}
};

// storage.inner = inner products of rows r0.., batches b0.. (at most kBatches), columns q0..; zero (or the bias) outside.
// Begins (before it writes inner) and ends with a barrier, so that callers need none of their own.
//   left (rows, batches, reduce), right (columns, batches, reduce), bias (columns) or null
template <class T, bool RowsContiguous>
__device__ __forceinline__ void inner_tile(const InnerStorage<T>& storage, View3<T> left, View3<T> right, const T* bias,
                                           const Sizes& size, int64_t r0, int64_t b0, int64_t q0) {
  using Shape = Tile<T>;
  const int t = threadIdx.x;
  // k's per slab: the power of two that holds all of them, from 4 to 64; the rest of the slab is filled with more b's.
  int shift = 2;
  while (shift < 6 && (int64_t{1} << shift) < size.reduce) ++shift;
  const int slab_reduce = 1 << shift, slab_batches = kSlab >> shift;
  const int64_t batches = min(size.batches - b0, static_cast<int64_t>(kBatches));
  const int64_t steps_per_batch = max(ceil_div(size.reduce, static_cast<int64_t>(slab_reduce)), int64_t{1});
  const int64_t steps = ceil_div(batches, static_cast<int64_t>(slab_batches)) * steps_per_batch;

  // Loading: thread t always fills slab column t % 64, rows t / 64, t / 64 + 4, ...
  const int load_column = t % kSlab, load_row = t / kSlab;
  const int load_batch = load_column >> shift, load_reduce = load_column & (slab_reduce - 1);
  int64_t next_first = 0, next_k = 0;  // first b (from b0) and k of the slab to load next
  const auto load = [&](int stage) {
    const int64_t b = b0 + next_first + load_batch, k = next_k + load_reduce;
    const bool inside = next_first + load_batch < batches && k < size.reduce;
    const int to = load_row * Shape::kSlabStride + load_column;
    const T* from = left.at(r0 + load_row, b, k);
    const int rows = inside ? static_cast<int>(min(size.rows - r0, int64_t{Shape::kRows})) - load_row : 0;
#pragma unroll 1
    for (int i = 0; i < Shape::kRows; i += kThreads / kSlab) {
      copy_async(storage.left + (stage * Shape::kLeft + to + i * Shape::kSlabStride), from, i < rows);
      from += kThreads / kSlab * left.stride0;
    }
    from = right.at(q0 + load_row, b, k);
    const int columns = inside ? static_cast<int>(min(size.columns - q0, int64_t{kColumns})) - load_row : 0;
#pragma unroll
    for (int i = 0; i < kColumns; i += kThreads / kSlab) {
      copy_async(storage.right + (stage * Shape::kRight + to + i * Shape::kSlabStride), from, i < columns);
      from += kThreads / kSlab * right.stride0;
    }
    copy_async_commit();
    next_k += slab_reduce;
    if (next_k >= size.reduce) {
      next_k = 0;
      next_first += slab_batches;
    }
  };

  // Multiplying: group t / 16 takes slab columns 4 (t / 16) .. + 3, for rows r + 8 i and columns 4 c + j.
  const int group = t / 16, r = t % 8, c = (t / 8) % 2;
  T sum[Shape::TM][4] = {};
  int64_t step_in_batch = 0, first = 0;
  if (steps > 0) load(0);
  for (int64_t step = 0; step < steps; ++step) {
    const int stage = step & 1;
    if (step + 1 < steps) {
      load(stage ^ 1);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();
    T a[Shape::TM][kGroupColumns];
#pragma unroll
    for (int i = 0; i < Shape::TM; ++i) {
      load_vector(a[i], storage.left + (stage * Shape::kLeft + (r + 8 * i) * Shape::kSlabStride + group * kGroupColumns));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      T w[kGroupColumns];
      load_vector(w, storage.right + (stage * Shape::kRight + (4 * c + j) * Shape::kSlabStride + group * kGroupColumns));
#pragma unroll
      for (int i = 0; i < Shape::TM; ++i) {
#pragma unroll
        for (int k = 0; k < kGroupColumns; ++k) sum[i][j] = fma(a[i][k], w[k], sum[i][j]);
      }
    }
    if (++step_in_batch == steps_per_batch) {
      if (shift == 2) {  // a group has its b to itself
#pragma unroll
        for (int i = 0; i < Shape::TM; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int q = 4 * c + j;
            const T shift_by = bias != nullptr && q0 + q < size.columns ? bias[q0 + q] : T(0);
            storage.inner[inner_at<T, RowsContiguous>(static_cast<int>(first) + group, r + 8 * i, q)] = sum[i][j] + shift_by;
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < Shape::TM; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const T pair = sum[i][j] + __shfl_xor_sync(kFullWarp, sum[i][j], 16);
            if (t % 32 < 16) storage.partial[(group / 2) * Shape::kPair + (4 * c + j) * Shape::kRows + r + 8 * i] = pair;
          }
        }
        __syncthreads();
        const int pairs = slab_reduce / (2 * kGroupColumns);  // pairs of groups that share a b
        for (int o = t; o < slab_batches * Shape::kPair; o += kThreads) {
          const int b = o / Shape::kPair, at = o % Shape::kPair, q = at / Shape::kRows;
          T total = bias != nullptr && q0 + q < size.columns ? bias[q0 + q] : T(0);
          for (int p = 0; p < pairs; ++p) total += storage.partial[(b * pairs + p) * Shape::kPair + at];
          storage.inner[inner_at<T, RowsContiguous>(static_cast<int>(first) + b, at % Shape::kRows, q)] = total;
        }
      }
#pragma unroll
      for (int i = 0; i < Shape::TM; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = T(0);
      }
      step_in_batch = 0;
      first += slab_batches;
    }
    __syncthreads();  // before the next step overwrites this stage, or the partial sums
  }
}

// One tile's share of a result: element (m, q, y) lies at data + m * stride_m + q * stride_q + y, for m < count_m, q < count_q,
// y < width; m runs along the contiguous axis of the inner tile.
template <class T>
struct ResultTile {
  T* data;
  int64_t stride_m, stride_q;
  int count_m, count_q, width;
};

// Adds the terms of one inner tile: result(m, q, y) += sum_s inner[s, m, q] outer(s, q, y), s < terms being the summed axis.
// A thread meets the same results in every call, so they may live in global memory between calls. The first tile starts from
// initial (outputs), or zero where that is null.
template <class T, int TY, int Contiguous>
__device__ __forceinline__ void outer_tile(SharedArray<T> inner, View3<T> outer, int terms, const ResultTile<T>& tile,
                                           bool first, const T* initial) {
  // Lanes run over y, and over q where y is short; a thread's TY results lie 32 apart to keep every access coalesced.
  const int per_column = TY == 1 ? tile.width : ceil_div(tile.width, 32 * TY) * 32;
  const int across = tile.count_q * per_column;
  const int items = across * (Contiguous / kOuterRows);
  for (int item = threadIdx.x; item < items; item += kThreads) {
    const int position = item % across, q = position / per_column, in_column = position % per_column;
    const int m0 = item / across * kOuterRows;
    const int y = TY == 1 ? in_column : in_column / 32 * (32 * TY) + in_column % 32;  // and y + 32, ...
    const int inside = tile.width - y;                                                // y + i is there for i < inside
    const int rows = tile.count_m - m0;
    T* const result = tile.data + m0 * tile.stride_m + q * tile.stride_q + y;
    // Where this tile's sums start: (m, y) at start + m * start_stride + y, or zero.
    const T* start = first ? (initial == nullptr ? nullptr : initial + y) : result;
    const int64_t start_stride = first ? 0 : tile.stride_m;
    T sum[kOuterRows][TY];
#pragma unroll
    for (int m = 0; m < kOuterRows; ++m) {
#pragma unroll
      for (int k = 0; k < TY; ++k) sum[m][k] = start != nullptr && m < rows && 32 * k < inside ? start[32 * k] : T(0);
      if (start != nullptr) start += start_stride;
    }
    const T* from[TY];  // reads beyond the end are moved to the last y, their results dropped
#pragma unroll
    for (int k = 0; k < TY; ++k) from[k] = outer.at(0, q, min(y + 32 * k, tile.width - 1));
    const SharedArray<T> values = inner + (q * Tile<T>::kInnerStride + m0);
#pragma unroll 2
    for (int s = 0; s < terms; ++s) {
      T a[kOuterRows], w[TY];
      load_vector(a, values + s * Contiguous);
#pragma unroll
      for (int k = 0; k < TY; ++k) {
        w[k] = *from[k];
        from[k] += outer.stride0;
      }
#pragma unroll
      for (int m = 0; m < kOuterRows; ++m) {
#pragma unroll
        for (int k = 0; k < TY; ++k) sum[m][k] = fma(a[m], w[k], sum[m][k]);
      }
    }
    T* to = result;
#pragma unroll
    for (int m = 0; m < kOuterRows; ++m) {
#pragma unroll
      for (int k = 0; k < TY; ++k) {
        if (m < rows && 32 * k < inside) to[32 * k] = sum[m][k];
      }
      to += tile.stride_m;
    }
  }
}

// out[r,q,y] = sum_b inner[b,r,q] outer[q,b,y] + bias_out[y].
// Block: (y part, q tile, r tile), y part fastest; it recomputes the inner products for its part of y.
//   left (rows, batches, reduce), right (columns, batches, reduce), outer (columns, batches, outputs),
//   bias_in (columns) or null, bias_out (outputs) or null, out (rows, columns, outputs) contiguous
template <class T, int TY>
__global__ void __launch_bounds__(kThreads, Tile<T>::kBlocks)
    apply_kernel(View3<T> left, View3<T> right, View3<T> outer, const T* __restrict__ bias_in, const T* __restrict__ bias_out,
                 T* out, Sizes size, int64_t part_width, int64_t parts) {
  using Shape = Tile<T>;
  ELLA_SHARED_MEMORY(memory);
  const InnerStorage<T> storage(memory);
  const int64_t q_tiles = ceil_div(size.columns, int64_t{kColumns});
  const int64_t part = blockIdx.x % parts, tile = blockIdx.x / parts;
  const int64_t q0 = tile % q_tiles * kColumns, r0 = tile / q_tiles * Shape::kRows;
  const int64_t y_begin = part * part_width;
  const int width = static_cast<int>(min(part_width, size.outputs - y_begin));
  int64_t b0 = 0;
  do {  // at least once: without any b the result is the bias
    inner_tile<T, true>(storage, left, right, bias_in, size, r0, b0, q0);
    const ResultTile<T> tile_out{out + (r0 * size.columns + q0) * size.outputs + y_begin,
                                 size.columns * size.outputs,
                                 size.outputs,
                                 static_cast<int>(min(size.rows - r0, int64_t{Shape::kRows})),
                                 static_cast<int>(min(size.columns - q0, int64_t{kColumns})),
                                 width};
    const View3<T> tile_outer{outer.at(q0, b0, y_begin), outer.stride1, outer.stride0, outer.stride2};  // (b, q, y)
    outer_tile<T, TY, Shape::kRows>(storage.inner, tile_outer, static_cast<int>(min(size.batches - b0, int64_t{kBatches})),
                                    tile_out, b0 == 0, bias_out == nullptr ? nullptr : bias_out + y_begin);
    b0 += kBatches;
  } while (b0 < size.batches);
}

// out[b,q,y] = sum_r inner[b,r,q] outer[r,q,y], r in this block's share of the rows.
// Block: (share, y part, q tile, b tile), share fastest; with more than one share, out is a workspace with one copy of the
// result for each, added up in order afterwards.
//   left (rows, batches, reduce), right (columns, batches, reduce), outer (rows, columns, outputs), bias_in (columns) or null
//   out (shares, ...) whose element (b, q, y) lies at b * out_batch + q * out_column + y
template <class T, int TY>
__global__ void __launch_bounds__(kThreads, Tile<T>::kBlocks)
    weight_kernel(View3<T> left, View3<T> right, View3<T> outer, const T* __restrict__ bias_in, T* out, Sizes size,
                  int64_t out_batch, int64_t out_column, int64_t part_width, int64_t parts, int64_t share_rows,
                  int64_t shares) {
  using Shape = Tile<T>;
  ELLA_SHARED_MEMORY(memory);
  const InnerStorage<T> storage(memory);
  const int64_t q_tiles = ceil_div(size.columns, int64_t{kColumns});
  const int64_t share = blockIdx.x % shares, part = blockIdx.x / shares % parts, tile = blockIdx.x / shares / parts;
  const int64_t q0 = tile % q_tiles * kColumns, b0 = tile / q_tiles * kBatches;
  const int64_t y_begin = part * part_width;
  const int width = static_cast<int>(min(part_width, size.outputs - y_begin));
  const int64_t r_begin = share * share_rows, r_end = min(r_begin + share_rows, size.rows);
  T* const result = out + share * (size.batches * size.columns * size.outputs);
  // The outer stage reads b's eight at a time, also those beyond the last, which no slab fills.
#pragma unroll 1
  for (int i = threadIdx.x; i < Shape::kInner; i += kThreads) storage.inner[i] = T(0);
  for (int64_t r0 = r_begin; r0 < r_end; r0 += Shape::kRows) {
    inner_tile<T, false>(storage, left, right, bias_in, size, r0, b0, q0);
    const ResultTile<T> tile_out{result + b0 * out_batch + q0 * out_column + y_begin,
                                 out_batch,
                                 out_column,
                                 static_cast<int>(min(size.batches - b0, int64_t{kBatches})),
                                 static_cast<int>(min(size.columns - q0, int64_t{kColumns})),
                                 width};
    const View3<T> tile_outer{outer.at(r0, q0, y_begin), outer.stride0, outer.stride1, outer.stride2};  // (r, q, y)
    outer_tile<T, TY, kBatches>(storage.inner, tile_outer, static_cast<int>(min(r_end - r0, int64_t{Shape::kRows})), tile_out,
                                r0 == r_begin, static_cast<const T*>(nullptr));
  }
}

// sums[d,y] = sum_n grad[n,d,y] in double. Block: 32 columns (d,y) x 8 interleaved shares of n.
//   grad (N, D, Y), sums (D, Y)
template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_images_kernel(View3<T> grad, double* __restrict__ sums, int64_t N, int64_t D, int64_t Y) {
  constexpr int kShares = kThreads / kWarp;
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<double> partial = memory.array<double>(kThreads);  // [share][column]
  const int column = threadIdx.x % kWarp, share = threadIdx.x / kWarp;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kWarp + column;
  double total = 0;
  if (at < D * Y) {
    for (int64_t n = share; n < N; n += kShares) total += static_cast<double>(*grad.at(n, at / Y, at % Y));
  }
  partial[threadIdx.x] = total;
  __syncthreads();
  if (share == 0 && at < D * Y) {
    for (int s = 1; s < kShares; ++s) total += partial[s * kWarp + column];
    sums[at] = total;
  }
}

// grad_bias_out[y] = sum_d sums[d,y].
//   sums (D, Y), grad_bias_out (Y)
template <class T>
__global__ void __launch_bounds__(kThreads)
    grad_bias_out_kernel(const double* __restrict__ sums, T* __restrict__ grad_bias_out, int64_t D, int64_t Y) {
  const int64_t y = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (y >= Y) return;
  double total = 0;
  for (int64_t d = 0; d < D; ++d) total += sums[d * Y + y];
  grad_bias_out[y] = static_cast<T>(total);
}

// grad_bias_in[d] = sum_{c,y} weight_out[d,c,y] sums[d,y], which is sum_{n,c} dz[n,d,c] with the sum over n taken first.
// Block: d.
//   weight_out (D, C, Y), sums (D, Y), grad_bias_in (D)
template <class T>
__global__ void __launch_bounds__(kThreads) grad_bias_in_kernel(View3<T> weight_out, const double* __restrict__ sums,
                                                                T* __restrict__ grad_bias_in, int64_t C, int64_t Y) {
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<double> scratch = memory.array<double>(kThreads / kWarp);
  const int64_t d = blockIdx.x;
  double total = 0;
  for (int64_t i = threadIdx.x; i < C * Y; i += kThreads) {
    total += static_cast<double>(*weight_out.at(d, i / Y, i % Y)) * sums[d * Y + i % Y];
  }
  total = block_reduce(total, scratch, Sum{});
  if (threadIdx.x == 0) grad_bias_in[d] = static_cast<T>(total);
}

constexpr int64_t kMaxPart = 1 << 20;

// The axes of a tensor of three dimensions in the order that a kernel wants them.
template <class T>
View3<T> view(const Tensor& tensor, int first = 0, int second = 1, int third = 2) {
  return {tensor.const_data_ptr<T>(), tensor.stride(first), tensor.stride(second), tensor.stride(third)};
}

// y is cut into parts until every multiprocessor has a block: below that, recomputing the inner products is free. A part is
// short enough to be counted in 32 bits.
struct Parts {
  int64_t width, count;

  Parts(int64_t outputs, int64_t tiles, int64_t granule, int64_t multiprocessors) {
    const int64_t granules = ceil_div(outputs, granule);
    const int64_t wanted = std::clamp(ceil_div(multiprocessors, tiles), ceil_div(outputs, kMaxPart), granules);
    width = ceil_div(granules, wanted) * granule;
    count = ceil_div(outputs, width);
  }
};

// Calls launch(std::integral_constant<int, TY>) with the widest TY that does not leave most lanes without a result.
template <class Launch>
void with_results_per_thread(int64_t outputs, const Launch& launch) {
  if (outputs >= 128) {
    launch(std::integral_constant<int, 4>{});
  } else if (outputs >= 64) {
    launch(std::integral_constant<int, 2>{});
  } else {
    launch(std::integral_constant<int, 1>{});
  }
}

template <class T>
void apply(const Device& device, const char* name, View3<T> left, View3<T> right, View3<T> outer, const T* bias_in,
           const T* bias_out, T* out, const Sizes& size) {
  if (size.rows * size.columns * size.outputs == 0) return;
  with_results_per_thread(size.outputs, [&](auto results) {
    constexpr int TY = decltype(results)::value;
    const int64_t tiles = ceil_div(size.rows, static_cast<int64_t>(Tile<T>::kRows)) * ceil_div(size.columns, int64_t{kColumns});
    const Parts parts(size.outputs, tiles, 32 * TY, device.multiprocessors());
    launch(device, name, apply_kernel<T, TY>, tiles * parts.count, kThreads, Tile<T>::shared_bytes(), left, right, outer,
           bias_in, bias_out, out, size, parts.width, parts.count);
  });
}

// `out` is contiguous; out_batch and out_column say which of its first two axes is b and which q.
template <class T>
void weight(const Device& device, const char* name, View3<T> left, View3<T> right, View3<T> outer, const T* bias_in,
            const Tensor& out, const Sizes& size, int64_t out_batch, int64_t out_column) {
  if (out.numel() == 0) return;
  if (size.rows == 0) {
    torch::stable::fill_(out, 0.0);
    return;
  }
  with_results_per_thread(size.outputs, [&](auto results) {
    constexpr int TY = decltype(results)::value;
    const int64_t tiles = ceil_div(size.batches, int64_t{kBatches}) * ceil_div(size.columns, int64_t{kColumns});
    const int64_t wanted = device.multiprocessors();
    const Parts parts(size.outputs, tiles, 32 * TY, wanted);
    // What still lacks blocks is split over the rows, which costs no recomputation but a workspace: at most 32 copies of out.
    const int64_t row_tiles = ceil_div(size.rows, static_cast<int64_t>(Tile<T>::kRows));
    const int64_t most = std::min<int64_t>({ceil_div(wanted, tiles * parts.count), row_tiles, 32});
    const int64_t share_rows = ceil_div(row_tiles, most) * Tile<T>::kRows;
    const int64_t shares = ceil_div(size.rows, share_rows);
    const Tensor target = shares == 1 ? out : device_empty(out, {shares, out.numel()});
    launch(device, name, weight_kernel<T, TY>, tiles * parts.count * shares, kThreads, Tile<T>::shared_bytes(), left, right,
           outer, bias_in, target.mutable_data_ptr<T>(), size, out_batch, out_column, parts.width, parts.count, share_rows,
           shares);
    if (shares > 1) {
      launch(device, name, sum_parts_kernel<T>, ceil_div(out.numel(), int64_t{256}), 256, 0, target.const_data_ptr<T>(),
             out.mutable_data_ptr<T>(), shares, out.numel());
    }
  });
}

// A bias is small: it is made contiguous rather than strided. The holder keeps the copy alive until the kernels are queued.
template <class T>
class Bias {
 public:
  explicit Bias(const std::optional<Tensor>& bias) {
    if (bias) holder_ = torch::stable::contiguous(*bias);
  }
  const T* data() const { return holder_ ? holder_->const_data_ptr<T>() : nullptr; }

 private:
  std::optional<Tensor> holder_;
};

Tensor factored_linear(const Tensor& x, const Tensor& weight_in, const Tensor& weight_out, const std::optional<Tensor>& bias_in,
                       const std::optional<Tensor>& bias_out) {
  const FactoredLinearSizes s = check_factored_linear(x, weight_in, weight_out, bias_in, bias_out);
  const Device device(x);
  const Tensor y = device_empty(x, {s.N, s.D, s.Y});
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "factored_linear", [&] {
    const Bias<scalar_t> in(bias_in), out(bias_out);
    apply<scalar_t>(device, "factored_linear", view<scalar_t>(x), view<scalar_t>(weight_in), view<scalar_t>(weight_out),
                    in.data(), out.data(), y.mutable_data_ptr<scalar_t>(), {s.N, s.C, s.D, s.X, s.Y});
  });
  return y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> factored_linear_backward(const Tensor& grad, const Tensor& x,
                                                                            const Tensor& weight_in, const Tensor& weight_out,
                                                                            const std::optional<Tensor>& bias_in, bool grad_x,
                                                                            bool grad_weight_in, bool grad_weight_out,
                                                                            bool grad_bias_in, bool grad_bias_out) {
  const FactoredLinearSizes s = check_factored_linear_backward(grad, x, weight_in, weight_out, bias_in);
  const Device device(x);
  const auto wanted = [&](bool asked, std::initializer_list<int64_t> shape) {
    return asked ? device_empty(x, shape) : device_empty(x, {0});
  };
  const Tensor dx = wanted(grad_x, {s.N, s.C, s.X});
  const Tensor d_weight_in = wanted(grad_weight_in, {s.D, s.C, s.X});
  const Tensor d_weight_out = wanted(grad_weight_out, {s.D, s.C, s.Y});
  const Tensor d_bias_in = wanted(grad_bias_in, {s.D});
  const Tensor d_bias_out = wanted(grad_bias_out, {s.Y});
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "factored_linear_backward", [&] {
    const View3<scalar_t> g = view<scalar_t>(grad);
    const Sizes dz_by_x{s.N, s.D, s.C, s.Y, s.X};  // r = n, b = d, q = c, k = y, outputs x
    const Sizes z_by_y{s.N, s.C, s.D, s.X, s.Y};   // r = n, b = c, q = d, k = x, outputs y
    if (grad_x) {
      apply<scalar_t>(device, "factored_linear_backward (x)", g, view<scalar_t>(weight_out, 1, 0, 2),
                      view<scalar_t>(weight_in, 1, 0, 2), nullptr, nullptr, dx.mutable_data_ptr<scalar_t>(), dz_by_x);
    }
    if (grad_weight_in) {
      weight<scalar_t>(device, "factored_linear_backward (weight_in)", g, view<scalar_t>(weight_out, 1, 0, 2),
                       view<scalar_t>(x), nullptr, d_weight_in, dz_by_x, s.C * s.X, s.X);
    }
    if (grad_weight_out) {
      const Bias<scalar_t> in(bias_in);
      weight<scalar_t>(device, "factored_linear_backward (weight_out)", view<scalar_t>(x), view<scalar_t>(weight_in), g,
                       in.data(), d_weight_out, z_by_y, s.Y, s.C * s.Y);
    }
    if (grad_bias_in || grad_bias_out) {
      const Tensor sums = device_empty(x, {s.D, s.Y}, ScalarType::Double);
      double* const data = sums.mutable_data_ptr<double>();
      launch(device, "factored_linear_backward (sum over images)", sum_images_kernel<scalar_t>,
             ceil_div(s.D * s.Y, int64_t{kWarp}), kThreads, shared_size(kThreads * sizeof(double)), g, data, s.N, s.D, s.Y);
      if (grad_bias_out) {
        launch(device, "factored_linear_backward (bias_out)", grad_bias_out_kernel<scalar_t>, ceil_div(s.Y, int64_t{kThreads}),
               kThreads, 0, data, d_bias_out.mutable_data_ptr<scalar_t>(), s.D, s.Y);
      }
      if (grad_bias_in) {
        launch(device, "factored_linear_backward (bias_in)", grad_bias_in_kernel<scalar_t>, s.D, kThreads,
               shared_size(kThreads / kWarp * sizeof(double)), view<scalar_t>(weight_out), data,
               d_bias_in.mutable_data_ptr<scalar_t>(), s.C, s.Y);
      }
    }
  });
  return {dx, d_weight_in, d_weight_out, d_bias_in, d_bias_out};
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) {
  m.impl("factored_linear", TORCH_BOX(&factored_linear));
  m.impl("factored_linear_backward", TORCH_BOX(&factored_linear_backward));
}

}  // namespace
}  // namespace ella

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
// so two kinds of block and strided views serve all four. The bias gradients need no inner products. The forward map is one
// launch, the backward pass two: one for all that reads images, one that adds what several blocks left.
//
// Tiles. A block of 256 threads owns TR rows x TQ columns and walks over slabs of 64 (b,k) pairs: 64 k's of one b where K is
// large, 16 b's of 4 k's where K is 4, so that layers with many channels and few positions fill the slab as well as those
// with few channels and many positions. The 16 groups of 16 threads each take 4 neighbouring slab columns (one 16-byte read of
// shared memory per row in float) and an outer product of TM x 4 per thread; the groups of one b are then added in fixed order.
//   float:  TR 32, TM 4: 8 vector reads for 64 FMA; double: TR 16, TM 2: 12 for 32.
// The outer stage holds 8 x TY results per thread; a step reads 8 inner values (two broadcast vector reads) and TY outer
// values (coalesced, through L1) for 8 TY FMA. TY is the widest of 1, 2 and 4 that does not leave most lanes without a result;
// a kernel holds the outer stage once for each and the inner stage once, so that dx and the weights may differ in TY without
// a kernel for each pair.
// inner_tile and outer_tile are what a tensor-core version replaces; the blocks around them stay.
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
  const int batches = static_cast<int>(min(size.batches - b0, int64_t{kBatches}));

  // Loading: thread t always fills slab column t % 64, rows t / 64, t / 64 + 4, ...
  const int load_column = t % kSlab, load_row = t / kSlab;
  const int load_batch = load_column >> shift, load_reduce = load_column & (slab_reduce - 1);
  int next_first = 0;  // first b (from b0) and k of the slab to load next
  int64_t next_k = 0;
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
  int stage = 0, first = 0;  // first b (from b0) and k of this slab
  int64_t k = 0;
  if (batches > 0) load(stage);
  while (first < batches) {
    if (next_first < batches) {
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
        for (int e = 0; e < kGroupColumns; ++e) sum[i][j] = fma(a[i][e], w[e], sum[i][j]);
      }
    }
    k += slab_reduce;
    if (k >= size.reduce) {
      if (shift == 2) {  // a group has its b to itself
#pragma unroll
        for (int i = 0; i < Shape::TM; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int q = 4 * c + j;
            const T shift_by = bias != nullptr && q0 + q < size.columns ? bias[q0 + q] : T(0);
            storage.inner[inner_at<T, RowsContiguous>(first + group, r + 8 * i, q)] = sum[i][j] + shift_by;
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
          storage.inner[inner_at<T, RowsContiguous>(first + b, at % Shape::kRows, q)] = total;
        }
      }
#pragma unroll
      for (int i = 0; i < Shape::TM; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = T(0);
      }
      k = 0;
      first += slab_batches;
    }
    stage ^= 1;
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
__device__ __forceinline__ void outer_columns(SharedArray<T> inner, View3<T> outer, int terms, const ResultTile<T>& tile,
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

// The same with TY = results, for all threads of a block.
template <class T, int Contiguous>
__device__ __forceinline__ void outer_tile(int results, SharedArray<T> inner, View3<T> outer, int terms,
                                           const ResultTile<T>& tile, bool first, const T* initial) {
  if (results == 4) {
    outer_columns<T, 4, Contiguous>(inner, outer, terms, tile, first, initial);
  } else if (results == 2) {
    outer_columns<T, 2, Contiguous>(inner, outer, terms, tile, first, initial);
  } else {
    outer_columns<T, 1, Contiguous>(inner, outer, terms, tile, first, initial);
  }
}

// The blocks of a launch that do one work: `count` of them from `first` on, each with about `length` steps.
struct Blocks {
  int64_t first, count, length;
};

// out[r,q,y] = sum_b inner[b,r,q] outer[q,b,y] + bias_out[y].
// Block: (y part, q tile, r tile), y part fastest; it recomputes the inner products for its part of y.
//   left (rows, batches, reduce), right (columns, batches, reduce), outer (columns, batches, outputs),
//   bias_in (columns) or null, bias_out (outputs) or null, out (rows, columns, outputs) contiguous
template <class T>
struct ApplyWork {
  View3<T> left, right, outer;
  const T *bias_in, *bias_out;
  T* out;
  Sizes size;
  int results;  // TY
  int64_t part_width, parts;
  Blocks blocks;
};

template <class T>
__device__ __forceinline__ void apply_block(const ApplyWork<T>& work, int64_t block, const InnerStorage<T>& storage) {
  using Shape = Tile<T>;
  const Sizes& size = work.size;
  const int64_t q_tiles = ceil_div(size.columns, int64_t{kColumns});
  const int64_t part = block % work.parts, tile = block / work.parts;
  const int64_t q0 = tile % q_tiles * kColumns, r0 = tile / q_tiles * Shape::kRows;
  const int64_t y_begin = part * work.part_width;
  int64_t b0 = 0;
  do {  // at least once: without any b the result is the bias
    inner_tile<T, true>(storage, work.left, work.right, work.bias_in, size, r0, b0, q0);
    const ResultTile<T> tile_out{work.out + (r0 * size.columns + q0) * size.outputs + y_begin,
                                 size.columns * size.outputs,
                                 size.outputs,
                                 static_cast<int>(min(size.rows - r0, int64_t{Shape::kRows})),
                                 static_cast<int>(min(size.columns - q0, int64_t{kColumns})),
                                 static_cast<int>(min(work.part_width, size.outputs - y_begin))};
    const View3<T> outer{work.outer.at(q0, b0, y_begin), work.outer.stride1, work.outer.stride0,
                         work.outer.stride2};  // (b,q,y)
    outer_tile<T, Shape::kRows>(work.results, storage.inner, outer, static_cast<int>(min(size.batches - b0, int64_t{kBatches})),
                                tile_out, b0 == 0, work.bias_out == nullptr ? nullptr : work.bias_out + y_begin);
    b0 += kBatches;
  } while (b0 < size.batches);
}

// out[b,q,y] = sum_r inner[b,r,q] outer[r,q,y], r in this block's share of the rows.
// Block: (share, y part, q tile, b tile), share fastest; with more than one share, out is a workspace with one copy of the
// result for each, added up in order afterwards.
//   left (rows, batches, reduce), right (columns, batches, reduce), outer (rows, columns, outputs), bias_in (columns) or null
//   out (shares, ...) whose element (b, q, y) lies at b * out_batch + q * out_column + y
template <class T>
struct WeightWork {
  View3<T> left, right, outer;
  const T* bias_in;
  T* out;
  Sizes size;
  int results;  // TY
  int64_t out_batch, out_column;
  int64_t part_width, parts, share_rows, shares;
  Blocks blocks;
};

template <class T>
__device__ __forceinline__ void weight_block(const WeightWork<T>& work, int64_t block, const InnerStorage<T>& storage) {
  using Shape = Tile<T>;
  const Sizes& size = work.size;
  const int64_t q_tiles = ceil_div(size.columns, int64_t{kColumns});
  const int64_t share = block % work.shares, part = block / work.shares % work.parts, tile = block / work.shares / work.parts;
  const int64_t q0 = tile % q_tiles * kColumns, b0 = tile / q_tiles * kBatches;
  const int64_t y_begin = part * work.part_width;
  const int64_t r_begin = share * work.share_rows, r_end = min(r_begin + work.share_rows, size.rows);
  T* const result =
      work.out + share * (size.batches * size.columns * size.outputs) + b0 * work.out_batch + q0 * work.out_column + y_begin;
  // The outer stage reads b's eight at a time, also those beyond the last, which no slab fills.
#pragma unroll 1
  for (int i = threadIdx.x; i < Shape::kInner; i += kThreads) storage.inner[i] = T(0);
  for (int64_t r0 = r_begin; r0 < r_end; r0 += Shape::kRows) {
    inner_tile<T, false>(storage, work.left, work.right, work.bias_in, size, r0, b0, q0);
    const ResultTile<T> tile_out{result,
                                 work.out_batch,
                                 work.out_column,
                                 static_cast<int>(min(size.batches - b0, int64_t{kBatches})),
                                 static_cast<int>(min(size.columns - q0, int64_t{kColumns})),
                                 static_cast<int>(min(work.part_width, size.outputs - y_begin))};
    const View3<T> outer{work.outer.at(r0, q0, y_begin), work.outer.stride0, work.outer.stride1,
                         work.outer.stride2};  // (r,q,y)
    outer_tile<T, kBatches>(work.results, storage.inner, outer, static_cast<int>(min(r_end - r0, int64_t{Shape::kRows})),
                            tile_out, r0 == r_begin, static_cast<const T*>(nullptr));
  }
}

// sums[d,y] = sum_n grad[n,d,y] in double. Block: 32 columns (d,y) x 8 interleaved shares of n.
//   grad (N, D, Y), sums (D, Y)
template <class T>
struct SumImagesWork {
  View3<T> grad;
  double* sums;
  int64_t N, D, Y;
  Blocks blocks;
};

template <class T>
__device__ __forceinline__ void sum_images_block(const SumImagesWork<T>& work, int64_t block, SharedArray<double> partial) {
  constexpr int kShares = kThreads / kWarp;
  const int column = threadIdx.x % kWarp, share = threadIdx.x / kWarp;
  const int64_t at = block * kWarp + column;
  double total = 0;
  if (at < work.D * work.Y) {
    for (int64_t n = share; n < work.N; n += kShares) total += static_cast<double>(*work.grad.at(n, at / work.Y, at % work.Y));
  }
  partial[threadIdx.x] = total;  // [share][column]
  __syncthreads();
  if (share == 0 && at < work.D * work.Y) {
    for (int s = 1; s < kShares; ++s) total += partial[s * kWarp + column];
    work.sums[at] = total;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, Tile<T>::kBlocks) apply_kernel(ApplyWork<T> work) {
  ELLA_SHARED_MEMORY(memory);
  apply_block<T>(work, blockIdx.x, InnerStorage<T>(memory));
}

// Everything of the backward pass that reads images, one launch. What it leaves in several shares, and the bias gradients,
// are finished by gather_kernel.
template <class T>
struct BackwardWork {
  ApplyWork<T> dx;
  WeightWork<T> d_weight_in, d_weight_out;
  SumImagesWork<T> sum_images;

  // Gives every work its blocks and returns how many there are. Blocks start in about this order: those with most to do come
  // first, so that the multiprocessors become idle together. The sums, N / 8 additions a thread, come last.
  int64_t number_blocks() {
    Blocks* order[] = {&dx.blocks, &d_weight_in.blocks, &d_weight_out.blocks, &sum_images.blocks};
    std::stable_sort(order, order + 3, [](const Blocks* a, const Blocks* b) { return a->length > b->length; });
    int64_t total = 0;
    for (Blocks* const blocks : order) blocks->first = total, total += blocks->count;
    return total;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, Tile<T>::kBlocks) backward_kernel(BackwardWork<T> work) {
  ELLA_SHARED_MEMORY(memory);
  const int64_t block = blockIdx.x;
  // A work has this block if the block's place in it is not negative and below its count.
  const auto has = [block](const Blocks& blocks) { return block >= blocks.first && block - blocks.first < blocks.count; };
  if (has(work.dx.blocks)) {
    apply_block<T>(work.dx, block - work.dx.blocks.first, InnerStorage<T>(memory));
  } else if (has(work.d_weight_in.blocks)) {
    weight_block<T>(work.d_weight_in, block - work.d_weight_in.blocks.first, InnerStorage<T>(memory));
  } else if (has(work.d_weight_out.blocks)) {
    weight_block<T>(work.d_weight_out, block - work.d_weight_out.blocks.first, InnerStorage<T>(memory));
  } else {
    sum_images_block<T>(work.sum_images, block - work.sum_images.blocks.first, memory.array<double>(kThreads));
  }
}

// What the second launch of the backward pass adds up, a block's worth after the other in this order:
//   out[i] = sum_s parts[s][i], s ascending; zero without shares     parts (shares, count), out (count), for both weights
//   grad_bias_out[y] = sum_d sums[d,y]                               sums (D, Y), grad_bias_out (Y)
//   grad_bias_in[d] = sum_{c,y} weight_out[d,c,y] sums[d,y]          weight_out (D, C, Y), grad_bias_in (D), a block for each d
// The last is sum_{n,c} dz[n,d,c] with the sum over n taken first.
template <class T>
struct GatherWork {
  struct Shares {
    const T* parts;
    T* out;
    int64_t shares, count, blocks;
  };
  Shares weight_in, weight_out;
  View3<T> v;  // weight_out itself
  const double* sums;
  T *grad_bias_out, *grad_bias_in;
  int64_t C, D, Y;
  int64_t bias_out_blocks, bias_in_blocks;

  int64_t blocks() const { return weight_in.blocks + weight_out.blocks + bias_out_blocks + bias_in_blocks; }
};

template <class T>
__device__ __forceinline__ void sum_shares_block(const typename GatherWork<T>::Shares& work, int64_t block) {
  const int64_t i = block * kThreads + threadIdx.x;
  if (i >= work.count) return;
  T total = work.shares == 0 ? T(0) : work.parts[i];
  for (int64_t s = 1; s < work.shares; ++s) total += work.parts[s * work.count + i];
  work.out[i] = total;
}

template <class T>
__global__ void __launch_bounds__(kThreads) gather_kernel(GatherWork<T> work) {
  ELLA_SHARED_MEMORY(memory);
  int64_t block = blockIdx.x;
  if (block < work.weight_in.blocks) return sum_shares_block<T>(work.weight_in, block);
  block -= work.weight_in.blocks;
  if (block < work.weight_out.blocks) return sum_shares_block<T>(work.weight_out, block);
  block -= work.weight_out.blocks;
  double total = 0;
  if (block < work.bias_out_blocks) {
    const int64_t y = block * kThreads + threadIdx.x;
    if (y >= work.Y) return;
    for (int64_t d = 0; d < work.D; ++d) total += work.sums[d * work.Y + y];
    work.grad_bias_out[y] = static_cast<T>(total);
    return;
  }
  const int64_t d = block - work.bias_out_blocks;
  for (int64_t i = threadIdx.x; i < work.C * work.Y; i += kThreads) {
    total += static_cast<double>(*work.v.at(d, i / work.Y, i % work.Y)) * work.sums[d * work.Y + i % work.Y];
  }
  total = block_reduce(total, memory.array<double>(kThreads / kWarp), Sum{});
  if (threadIdx.x == 0) work.grad_bias_in[d] = static_cast<T>(total);
}

// Kernels get their work as parameters, of which every architecture takes 4 KB.
static_assert(sizeof(BackwardWork<double>) <= 4096 && sizeof(GatherWork<double>) <= 4096, "too large for kernel parameters");

constexpr int64_t kMaxPart = 1 << 20;

// The axes of a tensor of three dimensions in the order that a kernel wants them.
template <class T>
View3<T> view(const Tensor& tensor, int first = 0, int second = 1, int third = 2) {
  return {tensor.const_data_ptr<T>(), tensor.stride(first), tensor.stride(second), tensor.stride(third)};
}

// y is cut into parts until every multiprocessor has a block of this work: below that, recomputing the inner products costs no
// time where the work is alone in its launch; those of the backward pass are cut as if they were. A part is short enough to be
// counted in 32 bits.
struct Parts {
  int64_t width, count;

  Parts(int64_t outputs, int64_t tiles, int64_t granule, int64_t multiprocessors) {
    const int64_t granules = ceil_div(outputs, granule);
    const int64_t wanted = std::clamp(ceil_div(multiprocessors, tiles), ceil_div(outputs, kMaxPart), granules);
    width = ceil_div(granules, wanted) * granule;
    count = ceil_div(outputs, width);
  }
};

// TY: the widest that does not leave most lanes without a result.
constexpr int results_per_thread(int64_t outputs) { return outputs >= 128 ? 4 : outputs >= 64 ? 2 : 1; }

template <class T>
ApplyWork<T> plan_apply(const Device& device, View3<T> left, View3<T> right, View3<T> outer, const T* bias_in,
                        const T* bias_out, const Tensor& out, const Sizes& size) {
  ApplyWork<T> work{left, right, outer, bias_in, bias_out, out.mutable_data_ptr<T>(), size};
  if (out.numel() == 0) return work;
  work.results = results_per_thread(size.outputs);
  const int64_t tiles = ceil_div(size.rows, int64_t{Tile<T>::kRows}) * ceil_div(size.columns, int64_t{kColumns});
  const Parts parts(size.outputs, tiles, 32 * work.results, device.multiprocessors());
  work.part_width = parts.width, work.parts = parts.count;
  work.blocks.count = tiles * parts.count;
  work.blocks.length = ceil_div(size.batches, int64_t{kBatches}) * (size.reduce + parts.width);
  return work;
}

// A weight's gradient: `out` is contiguous; out_batch and out_column say which of its first two axes is b and which q. Where
// the rows are shared out over blocks, `workspace` keeps their results and `gather` says how to add them.
template <class T>
WeightWork<T> plan_weight(const Device& device, View3<T> left, View3<T> right, View3<T> outer, const T* bias_in,
                          const Tensor& out, const Sizes& size, int64_t out_batch, int64_t out_column,
                          std::optional<Tensor>& workspace, typename GatherWork<T>::Shares& gather) {
  WeightWork<T> work{left, right, outer, bias_in, out.mutable_data_ptr<T>(), size};
  if (out.numel() == 0) return work;
  work.results = results_per_thread(size.outputs);
  work.out_batch = out_batch, work.out_column = out_column;
  const int64_t tiles = ceil_div(size.batches, int64_t{kBatches}) * ceil_div(size.columns, int64_t{kColumns});
  const int64_t wanted = device.multiprocessors();
  const Parts parts(size.outputs, tiles, 32 * work.results, wanted);
  work.part_width = parts.width, work.parts = parts.count;
  // What still lacks blocks is split over the rows, which costs no recomputation but a workspace: at most 32 copies of out.
  const int64_t row_tiles = ceil_div(size.rows, int64_t{Tile<T>::kRows});
  const int64_t most = std::clamp<int64_t>(std::min(ceil_div(wanted, tiles * parts.count), row_tiles), 1, 32);
  work.share_rows = ceil_div(row_tiles, most) * Tile<T>::kRows;
  work.shares = row_tiles == 0 ? 0 : ceil_div(size.rows, work.share_rows);
  work.blocks.count = tiles * parts.count * work.shares;
  work.blocks.length = ceil_div(row_tiles, most) * (size.reduce + parts.width);
  if (work.shares != 1) {  // also without rows: the result is zero, and nobody else writes it
    gather = {nullptr, work.out, work.shares, out.numel(), ceil_div(out.numel(), int64_t{kThreads})};
    if (work.shares > 0) {
      workspace = device_empty(out, {work.shares, out.numel()});
      work.out = workspace->mutable_data_ptr<T>();
      gather.parts = work.out;
    }
  }
  return work;
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
    using T = scalar_t;
    const Bias<T> in(bias_in), out(bias_out);
    const ApplyWork<T> work = plan_apply<T>(device, view<T>(x), view<T>(weight_in), view<T>(weight_out), in.data(), out.data(),
                                            y, {s.N, s.C, s.D, s.X, s.Y});
    launch(device, "factored_linear", apply_kernel<T>, work.blocks.count, kThreads, Tile<T>::shared_bytes(), work);
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
    using T = scalar_t;
    const View3<T> g = view<T>(grad), v = view<T>(weight_out, 1, 0, 2);
    const Sizes dz_by_x{s.N, s.D, s.C, s.Y, s.X};  // r = n, b = d, q = c, k = y, outputs x
    const Sizes z_by_y{s.N, s.C, s.D, s.X, s.Y};   // r = n, b = c, q = d, k = x, outputs y
    const Bias<T> in(bias_in);
    BackwardWork<T> work{};
    GatherWork<T> gather{};
    std::optional<Tensor> shares_in, shares_out, sums;  // kept until the kernels are queued
    if (grad_x) work.dx = plan_apply<T>(device, g, v, view<T>(weight_in, 1, 0, 2), nullptr, nullptr, dx, dz_by_x);
    if (grad_weight_in) {
      work.d_weight_in =
          plan_weight<T>(device, g, v, view<T>(x), nullptr, d_weight_in, dz_by_x, s.C * s.X, s.X, shares_in, gather.weight_in);
    }
    if (grad_weight_out) {
      work.d_weight_out = plan_weight<T>(device, view<T>(x), view<T>(weight_in), g, in.data(), d_weight_out, z_by_y, s.Y,
                                         s.C * s.Y, shares_out, gather.weight_out);
    }
    if (grad_bias_in || grad_bias_out) {
      sums = device_empty(x, {s.D, s.Y}, ScalarType::Double);
      work.sum_images = {g, sums->mutable_data_ptr<double>(), s.N, s.D, s.Y, {}};
      work.sum_images.blocks.count = ceil_div(s.D * s.Y, int64_t{kWarp});
      gather.v = view<T>(weight_out);
      gather.sums = work.sum_images.sums;
      gather.C = s.C, gather.D = s.D, gather.Y = s.Y;
    }
    if (grad_bias_out) {
      gather.grad_bias_out = d_bias_out.mutable_data_ptr<T>();
      gather.bias_out_blocks = ceil_div(s.Y, int64_t{kThreads});
    }
    if (grad_bias_in) {
      gather.grad_bias_in = d_bias_in.mutable_data_ptr<T>();
      gather.bias_in_blocks = s.D;
    }
    const int64_t blocks = work.number_blocks();
    launch(device, "factored_linear_backward", backward_kernel<T>, blocks, kThreads, Tile<T>::shared_bytes(), work);
    launch(device, "factored_linear_backward (gather)", gather_kernel<T>, gather.blocks(), kThreads,
           shared_size(kThreads / kWarp * sizeof(double)), gather);
  });
  return {dx, d_weight_in, d_weight_out, d_bias_in, d_bias_out};
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) {
  m.impl("factored_linear", TORCH_BOX(&factored_linear));
  m.impl("factored_linear_backward", TORCH_BOX(&factored_linear_backward));
}

}  // namespace
}  // namespace ella

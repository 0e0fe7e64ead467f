// The tiles of the fused maps (fused.cuh): inner products in shared memory, and what is made of them.
//
// Tiles. A block of 256 threads owns TR rows x TQ columns and walks over slabs of 64 (b,k) pairs: 64 k's of one b where K is
// large, 16 b's of 4 k's where K is 4, so that layers with many channels and few positions fill the slab as well as those
// with few channels and many positions. The 16 groups of 16 threads each take 4 neighbouring slab columns (one 16-byte read of
// shared memory per row) and an outer product of TM x 4 per thread; the groups of one b are then added in fixed order.
// TR is 32 and TM 4: 8 vector reads for 64 FMA.
// The outer stage holds 8 x TY results per thread; a step reads 8 inner values (two broadcast vector reads) and TY outer
// values (coalesced, through L1) for 8 TY FMA. TY is the widest of 1, 2 and 4 that does not leave most lanes without a result;
// a kernel holds the outer stage once for each and the inner stage once, so that dx and the weights may differ in TY without
// a kernel for each pair.
#pragma once

#include "common/device_memory.h"
#include "cuda/reduce.cuh"
#include "cuda/slab_pipeline.cuh"

namespace ella::fused {

constexpr int kThreads = 256;
constexpr int kSlab = 64;         // (b,k) pairs in shared memory at once
constexpr int kGroupColumns = 4;  // of them, per group of 16 threads
constexpr int kBatches = 16;      // b's whose inner products are held: kSlab / kGroupColumns
constexpr int kColumns = 8;       // TQ
constexpr int kOuterRows = 8;     // results per thread along the contiguous axis of the inner tile

struct Tile {
  static constexpr int TM = 4;
  static constexpr int kRows = 8 * TM;  // TR
  static constexpr int kBlocks = 2;     // resident on a multiprocessor: at most 128 registers
  // 64 values and 16 bytes: the 8 rows that a quarter warp reads at once start 4 banks apart and cover all 32.
  static constexpr int kSlabStride = kSlab + 4;
  static constexpr int kLeft = kRows * kSlabStride, kRight = kColumns * kSlabStride;
  static constexpr int kPair = kRows * kColumns;
  // One q's inner products, and a pad that keeps 16-byte alignment and shifts the next q by 8 banks.
  static constexpr int kInnerStride = kBatches * kRows + 8;
  static constexpr int kInner = kColumns * kInnerStride;
  static constexpr int kPartial = kBatches / 2 * kPair;  // per pair of groups; the pair itself is added by a shuffle
  static constexpr size_t shared_bytes() {
    return shared_size(2 * kLeft * sizeof(float)) + shared_size(2 * kRight * sizeof(float)) +
           shared_size(kInner * sizeof(float)) + shared_size(kPartial * sizeof(float));
  }
};

// Where the inner product (b, r, q) of a tile lies: what the outer stage reads eight at a time must be contiguous.
template <bool RowsContiguous>
__device__ __forceinline__ int inner_at(int b, int r, int q) {
  return q * Tile::kInnerStride + (RowsContiguous ? b * Tile::kRows + r : r * kBatches + b);
}

struct Sizes {
  int64_t rows, batches, columns, reduce, outputs;  // r, b, q, k, y
};

struct InnerStorage {
  SharedArray<float> left, right;  // [stage][kRows or kColumns][kSlabStride]
  SharedArray<float> inner;        // [q][b][r] or [q][r][b]
  SharedArray<float> partial;      // [pair of groups][kPair]

  __device__ __forceinline__ explicit InnerStorage(SharedMemory memory)
      : left(memory.array<float>(2 * Tile::kLeft)),
        right(memory.array<float>(2 * Tile::kRight)),
        inner(memory.array<float>(Tile::kInner)),
        partial(memory.array<float>(Tile::kPartial)) {}
};

// storage.inner = inner products of rows r0.., batches b0.. (at most kBatches), columns q0..; zero (or the bias) outside.
// Begins (before it writes inner) and ends with a barrier, so that callers need none of their own.
//   left (rows, batches, reduce), right (columns, batches, reduce), bias (columns) or null
template <bool RowsContiguous>
__device__ __forceinline__ void inner_tile(const InnerStorage& storage, View3<float> left, View3<float> right,
                                           const float* bias, const Sizes& size, int64_t r0, int64_t b0, int64_t q0) {
  using Shape = Tile;
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
  const auto start = [&](int stage) {
    const int64_t b = b0 + next_first + load_batch, k = next_k + load_reduce;
    const bool inside = next_first + load_batch < batches && k < size.reduce;
    const int to = load_row * Shape::kSlabStride + load_column;
    const float* from = left.at(r0 + load_row, b, k);
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
    next_k += slab_reduce;
    if (next_k >= size.reduce) {
      next_k = 0;
      next_first += slab_batches;
    }
  };

  // Multiplying: group t / 16 takes slab columns 4 (t / 16) .. + 3, for rows r + 8 i and columns 4 c + j.
  const int group = t / 16, r = t % 8, c = (t / 8) % 2;
  float sum[Shape::TM][4] = {};
  int stage = 0, first = 0;  // first b (from b0) and k of this slab
  int64_t k = 0;
  start_slabs<2>(batches, start);
  while (first < batches) {
    copy_async_wait<0>();
    __syncthreads();  // this slab is there for all, and all are done with the last one and its partial sums
    start_slab_ahead<2>(stage, next_first < batches, start);
    float a[Shape::TM][kGroupColumns];
#pragma unroll
    for (int i = 0; i < Shape::TM; ++i) {
      load_vector(a[i], storage.left + (stage * Shape::kLeft + (r + 8 * i) * Shape::kSlabStride + group * kGroupColumns));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float w[kGroupColumns];
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
            const float shift_by = bias != nullptr && q0 + q < size.columns ? bias[q0 + q] : 0.0f;
            storage.inner[inner_at<RowsContiguous>(first + group, r + 8 * i, q)] = sum[i][j] + shift_by;
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < Shape::TM; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float pair = sum[i][j] + __shfl_xor_sync(kFullWarp, sum[i][j], 16);
            if (t % 32 < 16) storage.partial[(group / 2) * Shape::kPair + (4 * c + j) * Shape::kRows + r + 8 * i] = pair;
          }
        }
        __syncthreads();
        const int pairs = slab_reduce / (2 * kGroupColumns);  // pairs of groups that share a b
        for (int o = t; o < slab_batches * Shape::kPair; o += kThreads) {
          const int b = o / Shape::kPair, at = o % Shape::kPair, q = at / Shape::kRows;
          float total = bias != nullptr && q0 + q < size.columns ? bias[q0 + q] : 0.0f;
          for (int p = 0; p < pairs; ++p) total += storage.partial[(b * pairs + p) * Shape::kPair + at];
          storage.inner[inner_at<RowsContiguous>(first + b, at % Shape::kRows, q)] = total;
        }
      }
#pragma unroll
      for (int i = 0; i < Shape::TM; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = 0.0f;
      }
      k = 0;
      first += slab_batches;
    }
    stage ^= 1;
  }
  __syncthreads();  // the inner products are there for all
}

// One tile's part of a result: element (m, q, y) lies at data + m * stride_m + q * stride_q + y, for m < count_m, q < count_q,
// y < width; m runs along the contiguous axis of the inner tile.
struct ResultTile {
  float* data;
  int64_t stride_m, stride_q;
  int count_m, count_q, width;
};

// Adds the terms of one inner tile: result(m, q, y) += sum_s inner[s, m, q] outer(s, q, y), s < terms being the summed axis.
// A thread meets the same results in every call, so they may live in global memory between calls. The first tile starts from
// initial (outputs), or zero where that is null.
template <int TY, int Contiguous>
__device__ __forceinline__ void outer_columns(SharedArray<float> inner, View3<float> outer, int terms, const ResultTile& tile,
                                              bool first, const float* initial) {
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
    float* const result = tile.data + m0 * tile.stride_m + q * tile.stride_q + y;
    // Where this tile's sums start: (m, y) at start + m * start_stride + y, or zero.
    const float* start = first ? (initial == nullptr ? nullptr : initial + y) : result;
    const int64_t start_stride = first ? 0 : tile.stride_m;
    float sum[kOuterRows][TY];
#pragma unroll
    for (int m = 0; m < kOuterRows; ++m) {
#pragma unroll
      for (int k = 0; k < TY; ++k) sum[m][k] = start != nullptr && m < rows && 32 * k < inside ? start[32 * k] : 0.0f;
      if (start != nullptr) start += start_stride;
    }
    const float* from[TY];  // reads beyond the end are moved to the last y, their results dropped
#pragma unroll
    for (int k = 0; k < TY; ++k) from[k] = outer.at(0, q, min(y + 32 * k, tile.width - 1));
    const SharedArray<float> values = inner + (q * Tile::kInnerStride + m0);
#pragma unroll 2
    for (int s = 0; s < terms; ++s) {
      float a[kOuterRows], w[TY];
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
    float* to = result;
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
template <int Contiguous>
__device__ __forceinline__ void outer_tile(int results, SharedArray<float> inner, View3<float> outer, int terms,
                                           const ResultTile& tile, bool first, const float* initial) {
  if (results == 4) {
    outer_columns<4, Contiguous>(inner, outer, terms, tile, first, initial);
  } else if (results == 2) {
    outer_columns<2, Contiguous>(inner, outer, terms, tile, first, initial);
  } else {
    outer_columns<1, Contiguous>(inner, outer, terms, tile, first, initial);
  }
}

}  // namespace ella::fused

// Batched products of float32 numbers on tensor cores: out[p,i,j] = sum_k a[p,i,k] b[p,j,k] (+ row_bias[i] + column_bias[j]),
// for matrices that lie anywhere. Accuracy and layout: tensor_fragments.cuh.
//
// Tiles. A block of four warps owns 64 x 64 results, a warp 32 x 32; a warp all of whose results lie outside copies but does
// not multiply. For 16 k's it reads 8 vectors a lane, splits 32 values (3 instructions each), multiplies 48 times and adds 32
// times: 136 instructions beside products that keep the tensor cores of an A100 busy for 384 cycles of its quarter, of an H100
// for about 240. At the latter's rate a block reads 8 KB in that time, 34 bytes a cycle, more than a multiprocessor's share of
// the second-level cache (about 24, were all of it to miss the first): wider tiles would read less, but the products of a layer
// have few tiles, and multiprocessors would be left without one.
//
// Where tiles are few, several blocks split one's depth (split-K). Each leaves its sums in a workspace; the last to do so adds
// them in the order of the slabs, so that the result does not depend on which one that is.
//
// A slab is 16 k's of both operands, five stages of 9 KB, filled by asynchronous copies four slabs ahead, so that one barrier a
// slab suffices.
//
// An operand whose k's are neighbours in memory lies so in shared memory too (K-major), the others with neighbouring lines
// (MN-major; a line is a row of a or a column of b). Where the two differ, the k's of the MN-major one change places, so that a
// lane gets the same k's of both.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "common/cuda_path.h"
#include "cuda/block_roles.cuh"
#include "cuda/slab_pipeline.cuh"
#include "cuda/tensor_fragments.cuh"
#include "cuda/tickets.cuh"

namespace ella {

struct ProductTile {
  static constexpr int kThreads = 128;
  // That a multiprocessor has: by shared memory (8.0; half as much of it, as 8.6 and 12.0 have, is for two), which leaves 168
  // registers a thread; or by registers, 128 a thread.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kBlocks = 3;
#else
  static constexpr int kBlocks = 4;
#endif
  static constexpr int kSide = 64, kWarpSide = 32;
  static constexpr int kDepth = 16, kStages = 5;
  static constexpr int kStride = kSide + 8;     // of k's, MN-major: 2 x 4 vectors cover all banks
  static constexpr int kColumnStride = kDepth;  // of lines, K-major
  static constexpr int kGroupStride = 0;        // there is but one group of 16 k's
  static constexpr int kOperand = kDepth * kStride, kStage = 2 * kOperand;
  static constexpr size_t kSharedBytes = shared_size(kStages * kStage * sizeof(float)) + shared_size(sizeof(unsigned));
  static constexpr int kPart = kSide * kSide;  // sums that a split leaves in the workspace
  static_assert(kSide * kColumnStride <= kOperand, "both layouts must fit");
};

// Which values of an operand are neighbours in shared memory.
enum class Major { k, mn };

// Element (p, line, k) lies at data + p * batch + line * stride + k * depth. `vectors`: four at a time may be read along
// the axis of neighbours.
struct ProductOperand {
  const float* data;
  int64_t batch, stride, depth;
  bool vectors;
};

// Copies an operand's slabs; what does not change from slab to slab are its members. `Swapped`: this operand is MN-major, the
// other K-major.
template <Major MAJOR, bool Swapped>
class ProductSlabs {
  using Shape = ProductTile;
  static constexpr bool kKMajor = MAJOR == Major::k;

 public:
  // Lines from `line` on, of which there are `lines`, of batch p; the k's from `begin` to `end`.
  __device__ __forceinline__ ProductSlabs(const ProductOperand& operand, int p, int line, int lines, int begin, int end,
                                          SharedArray<float> staging)
      : operand_(operand), staging_(staging) {
    const int t = threadIdx.x, wide = operand.vectors ? 4 : 1;
    const int across = (kKMajor ? Shape::kDepth : Shape::kSide) / wide;
    const int first = t % across * wide, other = t / across;
    const int k = kKMajor ? first : other, from_k = begin + k, in_tile = kKMajor ? column_of_slot(other) : first;
    lines_ = lines - line - in_tile;
    left_ = kKMajor || lines_ > 0 ? end - from_k : 0;
    from_ = operand.data + p * operand.batch + static_cast<int64_t>(line + in_tile) * operand.stride + from_k * operand.depth;
    to_ = kKMajor ? other * Shape::kColumnStride + k : depth_place(k) * Shape::kStride + in_tile;
  }

  // Starts the copy of the next slab to `stage`; zeros where there are no more lines or k's.
  __device__ __forceinline__ void start(int stage) {
    if (operand_.vectors) {
      copy<4>(to_ + stage * Shape::kStage);
    } else {
      copy<1>(to_ + stage * Shape::kStage);
    }
    from_ += Shape::kDepth * operand_.depth;
    left_ -= Shape::kDepth;
  }

 private:
  // Where the other operand is K-major, lane t's q-th is k = 4 t + q; here it reads its q-th at place 4 q + t. A sum
  // over the bits of k, and so a sum over k's that share no bits.
  __device__ __forceinline__ static constexpr int depth_place(int k) { return Swapped ? k % 4 * 4 + k / 4 : k; }

  template <int Wide>
  __device__ __forceinline__ void copy(int to) const {
    constexpr int kAtOnce = Shape::kThreads * Wide / (kKMajor ? Shape::kDepth : Shape::kSide);  // slots, or k's
    constexpr int kCopies = (kKMajor ? Shape::kSide : Shape::kDepth) / kAtOnce;
#pragma unroll
    for (int e = 0; e < kCopies; ++e) {
      const int slot_or_k = e * kAtOnce;  // from this thread's first one on
      const int line_or_k = kKMajor ? column_of_slot(slot_or_k) : slot_or_k;
      const bool inside = kKMajor ? 0 < left_ && line_or_k < lines_ : line_or_k < left_;
      const float* const from = from_ + line_or_k * (kKMajor ? operand_.stride : operand_.depth);
      const SharedArray<float> target =
          staging_ + (to + (kKMajor ? slot_or_k * Shape::kColumnStride : depth_place(slot_or_k) * Shape::kStride));
      if constexpr (Wide == 4) {
        copy_async_vector(target, from, inside);
      } else {
        copy_async(target, from, inside);
      }
    }
  }

  const ProductOperand& operand_;
  const SharedArray<float> staging_;
  int lines_, left_;  // lines, and k's not copied yet, from this thread's first one on
  int to_;
  const float* from_;
};

constexpr int kProductTickets = 512;  // in a row, for all products of a launch

// Block: (split of the depth, column tile, row tile, p), split fastest.
//   a (batches, rows, depth), b (batches, columns, depth), row_bias (rows) or null, column_bias (columns) or null
//   out: element (p, i, j) at out + p * out_batch + i * out_row + j; `vectors`: four j's at a time may be written
//   parts (tiles, splits, 8, threads, 4) and tickets (tiles), where there is more than one split
struct ProductWork {
  ProductOperand a, b;
  const float *row_bias, *column_bias;
  float* out;
  int64_t out_batch, out_row;
  int batches, rows, columns, depth;
  bool vectors;
  Blocks blocks;
  int splits = 1;  // at most one for each slab
  float* parts = nullptr;
  Tickets<kProductTickets> tickets{};
};

// What a block computes: a split of a tile, which begins at row i0 and column j0 of batch p.
struct ProductPlace {
  int split, tile, i0, j0, p;

  __device__ __forceinline__ ProductPlace(const ProductWork& work, int block) {
    const int across = ceil_div(work.columns, ProductTile::kSide), down = ceil_div(work.rows, ProductTile::kSide);
    split = block % work.splits, tile = block / work.splits;
    j0 = tile % across * ProductTile::kSide, i0 = tile / across % down * ProductTile::kSide, p = tile / across / down;
  }
};

// Leaves a split's sums in the workspace. The last of the tile's blocks to do so gets the sum of all of them, in their order;
// false in the others. `inside`: whether the thread has results.
__device__ __forceinline__ bool add_splits(const ProductWork& work, const ProductPlace& place, bool inside, Results& sum,
                                           SharedArray<unsigned> flag) {
  using Shape = ProductTile;
  constexpr int kVector = 4 * Shape::kThreads;
  float (&flat)[8][4] = reinterpret_cast<float (&)[8][4]>(sum);
  float* const parts = work.parts + static_cast<int64_t>(place.tile) * work.splits * Shape::kPart + 4 * threadIdx.x;
  if (inside) {
    float* const own = parts + static_cast<int64_t>(place.split) * Shape::kPart;
#pragma unroll
    for (int v = 0; v < 8; ++v) store_vector(own + v * kVector, flat[v]);
  }
  __syncthreads();  // thread 0 tells of what all threads have left
  if (!last_block(work.tickets[place.tile], flag, work.splits)) return false;
  if (!inside) return true;
  const float* from = parts;
#pragma unroll
  for (int v = 0; v < 8; ++v) load_vector(flat[v], from + v * kVector);
#pragma unroll 1
  for (int other = 1; other < work.splits; ++other) {
    from += Shape::kPart;
    float part[8][4];
#pragma unroll
    for (int v = 0; v < 8; ++v) load_vector(part[v], from + v * kVector);  // all on their way before the first is added
#pragma unroll
    for (int v = 0; v < 8; ++v) {
#pragma unroll
      for (int c = 0; c < 4; ++c) flat[v][c] += part[v][c];
    }
  }
  return true;
}

// Where a warp's results of a tile begin.
struct WarpPlace {
  int in_a, in_b;

  __device__ __forceinline__ WarpPlace() {
    const int warp = __shfl_sync(kFullWarp, threadIdx.x / kWarp, 0);  // the compiler sees that it is one number for all lanes
    in_a = warp / 2 * ProductTile::kWarpSide, in_b = warp % 2 * ProductTile::kWarpSide;
  }
};

// What changes a fragment of b before it is multiplied, given the depth and line of its first value: nothing here.
struct Unchanged {
  __device__ __forceinline__ void operator()(Fragment&, int, int) const {}
};

// sum += the products of batch p of both operands over depths begin .. end, of the warp's part of the tile from row i0 and
// column j0 on; for all threads of a block, of which those without results (not `wanted`) copy alone. The threads may still
// read `staging`, of kStages stages, when it returns.
template <Major A, Major B, Tf32 TF32, class Change = Unchanged>
__device__ __forceinline__ void add_tile(const ProductOperand& a, const ProductOperand& b, int p, int i0, int j0, int rows,
                                         int columns, int begin, int end, const WarpPlace& warp, bool wanted,
                                         SharedArray<float> staging, Results& sum, const Change& change = {}) {
  using Shape = ProductTile;
  ProductSlabs<A, A != B && A == Major::mn> a_slabs(a, p, i0, rows, begin, end, staging);
  ProductSlabs<B, A != B && B == Major::mn> b_slabs(b, p, j0, columns, begin, end, staging + Shape::kOperand);
  const auto start = [&](int stage) { a_slabs.start(stage), b_slabs.start(stage); };
  int depth = begin;
  multiply_slabs<Shape::kStages>(ceil_div(end - begin, Shape::kDepth), start, [&](int stage) {
    if (!wanted) return;
    const SharedArray<float> operands = staging + stage * Shape::kStage;
    Fragment b_values = read_fragment<Shape, B == Major::k>(operands + Shape::kOperand, 0, warp.in_b);
    change(b_values, depth, j0 + warp.in_b);
    depth += Shape::kDepth;
    const Tf32Fragment<TF32> right(b_values);
    const Tf32Fragment<TF32> left(read_fragment<Shape, A == Major::k>(operands, 0, warp.in_a));
    add_product(sum, left, right);
  });
}

template <Major A, Major B, Tf32 TF32, class Change = Unchanged>
__device__ __forceinline__ void product_block(const ProductWork& work, int block, SharedMemory memory,
                                              const Change& change = {}) {
  using Shape = ProductTile;
  const SharedArray<float> staging = memory.array<float>(Shape::kStages * Shape::kStage);
  const SharedArray<unsigned> flag = memory.array<unsigned>(1);
  const ProductPlace at(work, block);
  // This split's slabs; the first splits have one more where they do not come out even.
  const int slabs = ceil_div(work.depth, Shape::kDepth), each = slabs / work.splits, more = slabs % work.splits;
  const int begin = (at.split * each + min(at.split, more)) * Shape::kDepth;
  const int end = min(begin + (each + (at.split < more ? 1 : 0)) * Shape::kDepth, work.depth);
  const WarpPlace warp;
  const int in_a = warp.in_a, in_b = warp.in_b;
  const bool wanted = at.i0 + in_a < work.rows && at.j0 + in_b < work.columns;  // the same for all lanes
  Results sum = {};
  add_tile<A, B, TF32>(work.a, work.b, at.p, at.i0, at.j0, work.rows, work.columns, begin, end, warp, wanted, staging, sum,
                       change);

  // From a copy of the number that the compiler does not know to be one: to keep the place takes registers that the loop needs.
  const ProductPlace place(work, __shfl_sync(kFullWarp, block, 0));
  const int i = place.i0 + in_a + result_row();
  const bool inside = i < work.rows && place.j0 + in_b + result_column() < work.columns;
  if (work.splits > 1 && !add_splits(work, place, inside, sum, flag)) return;
  if (!inside) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int j = place.j0 + in_b + result_column() + 4 * half;
    float values[4][4];
    result_block(sum, half, values);
    float* to = work.out + place.p * work.out_batch + i * work.out_row + j;
#pragma unroll
    for (int r = 0; r < 4; ++r, to += work.out_row) {
      if (i + r >= work.rows) break;
      const float row_bias = work.row_bias == nullptr ? 0.0f : work.row_bias[i + r];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (j + c < work.columns) values[r][c] += row_bias + (work.column_bias == nullptr ? 0.0f : work.column_bias[j + c]);
      }
      if (work.vectors && j < work.columns) {
        store_vector(to, values[r]);
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (j + c < work.columns) to[c] = values[r][c];
        }
      }
    }
  }
}

// ---- on the host ----

// Element (p, line, k) lies at data + p * batch + line * stride + k * step.
struct ProductSource {
  const float* data;
  int64_t batch, stride, step;
};

// Element (p, i, j) lies at data + p * batch + i * row + j.
struct ProductTarget {
  float* data;
  int64_t batch, row;
};

// Whether four at a time may be read, or written, along one axis: every such vector lies inside and on a 16-byte boundary.
inline bool product_vectors(const float* data, int64_t count, int64_t stride, std::initializer_list<int64_t> others) {
  bool whole = stride == 1 && count % 4 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  for (const int64_t other : others) whole = whole && other % 4 == 0;
  return whole;
}

template <Major MAJOR>
ProductOperand product_operand(const ProductSource& a, int64_t lines, int64_t depth) {
  const bool vectors = MAJOR == Major::k ? product_vectors(a.data, depth, a.step, {a.batch, a.stride})
                                         : product_vectors(a.data, lines, a.stride, {a.batch, a.step});
  return {a.data, a.batch, a.stride, a.step, vectors};
}

struct ProductSizes {
  int64_t batches, rows, columns, depth;  // a tile less than 2^31 at most
};

// A work with its blocks, none where there is no result; the depth is not split yet.
template <Major A, Major B>
ProductWork product_work(const ProductSizes& s, const ProductSource& a, const ProductSource& b, const ProductTarget& out,
                         const float* row_bias = nullptr, const float* column_bias = nullptr) {
  constexpr int64_t kSide = ProductTile::kSide;
  return {product_operand<A>(a, s.rows, s.depth),
          product_operand<B>(b, s.columns, s.depth),
          row_bias,
          column_bias,
          out.data,
          out.batch,
          out.row,
          static_cast<int>(s.batches),
          static_cast<int>(s.rows),
          static_cast<int>(s.columns),
          static_cast<int>(s.depth),
          product_vectors(out.data, s.columns, 1, {out.batch, out.row}),
          {0, s.batches * ceil_div(s.rows, kSide) * ceil_div(s.columns, kSide), s.depth}};
}

// The k's that a block adds up by itself: 256 sums of 16.
constexpr int64_t kLongestSum = 4096;

// How many blocks split the slabs of each of `tiles` tiles, in units of the time of a slab that waits for its predecessor. Two
// blocks of a multiprocessor fit beside each other without waiting longer. The workspace and the tickets take as long as seven
// slabs, and each split as 0.8: fitted to times of layers with 64 slabs on an H200. A larger number has to save a tenth.
inline int64_t product_splits(int64_t tiles, int64_t slabs, int64_t multiprocessors) {
  const auto time = [&](int64_t splits) {
    const double all = static_cast<double>(tiles * slabs) / static_cast<double>(2 * multiprocessors);
    const double adding = splits == 1 ? 0 : 7 + 0.8 * static_cast<double>(splits);
    return std::max(static_cast<double>(ceil_div(slabs, splits)), all) + adding;
  };
  const int64_t min_count = std::max<int64_t>(ceil_div(slabs * ProductTile::kDepth, kLongestSum), 1);
  int64_t best = min_count;
  for (int64_t splits = min_count + 1; splits <= std::min<int64_t>(slabs, 64); ++splits) {
    if (time(splits) < 0.9 * time(best)) best = splits;
  }
  return best;
}

// Splits the depths of products over blocks, as many as the path says or as the device has room for. What a product gets
// does not depend on the others: its result is the same to the bit in whatever company. The workspace is one for all of them;
// it must be kept until the kernels are queued.
class ProductSplits {
 public:
  ProductSplits(const Device& device, const char* name, const Tensor& like, std::initializer_list<ProductWork*> products) {
    const int64_t asked = cuda_path().split, multiprocessors = device.multiprocessors();
    int64_t tiles = 0, splits = 0;
    for (ProductWork* const work : products) {
      const int64_t slabs = ceil_div<int64_t>(work->depth, ProductTile::kDepth);
      if (work->blocks.count == 0 || slabs < 2) continue;
      work->splits =
          static_cast<int>(asked > 0 ? std::min(asked, slabs) : product_splits(work->blocks.count, slabs, multiprocessors));
      if (work->splits == 1) continue;
      tiles += work->blocks.count;
      work->blocks.count *= work->splits;
      work->blocks.length = ceil_div<int64_t>(slabs, work->splits) * ProductTile::kDepth;
      splits += work->blocks.count;
    }
    if (tiles == 0) return;
    parts_ = device_empty(like, {splits, ProductTile::kPart});
    Tickets<kProductTickets> tickets = take_tickets<kProductTickets>(device, name, like, tiles, own_tickets_);
    float* parts = parts_->mutable_data_ptr<float>();
    for (ProductWork* const work : products) {
      if (work->splits == 1) continue;
      work->parts = parts, work->tickets = tickets;
      parts += work->blocks.count * ProductTile::kPart;
      tickets.first += static_cast<int>(work->blocks.count / work->splits);
    }
  }

 private:
  std::optional<Tensor> parts_, own_tickets_;
};

}  // namespace ella

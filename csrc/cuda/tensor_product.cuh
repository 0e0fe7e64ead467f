// Batched products in float32 on tensor cores: out[p,i,j] = sum_k a[p,i,k] b[p,j,k] (+ row_bias[i] + column_bias[j]), for
// matrices that lie anywhere. Accuracy and layout: tensor_fragments.cuh.
//
// Tiles. A block of four warps owns 64 x 64 results, a warp 32 x 32; a warp all of whose results lie outside copies but does
// not multiply. For 16 k's it reads 8 vectors a lane, splits 32 values (3 instructions each), multiplies 48 times and adds 32
// times: 136 instructions beside products that keep the tensor cores of an A100 busy for 384 cycles of its quarter, of an H100
// for about 240. At the latter's rate a block reads 8 KB in that time, 34 bytes a cycle, more than a multiprocessor's share of
// the second-level cache (about 24, were all of it to miss the first): wider tiles would read less, but the products of a layer
// have few tiles, and multiprocessors would be left without one.
//
// A slab is 16 k's of both operands, five stages of 9 KB, filled by asynchronous copies four slabs ahead, so that one barrier a
// slab suffices.
//
// An operand whose k's are neighbours in memory lies so in shared memory too, the others with neighbouring lines (a line is a
// row of a or a column of b). Where the two differ, the second kind's k's change places, so that a lane gets the same k's of
// both.
#pragma once

#include <initializer_list>

#include "tensor_fragments.cuh"
#include "works.cuh"

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
  static constexpr int kStride = kSide + 8;     // of k's, where lines lie together: 2 x 4 vectors cover all banks
  static constexpr int kColumnStride = kDepth;  // of lines, where k's lie together
  static constexpr int kGroupStride = 0;        // there is but one group of 16 k's
  static constexpr int kOperand = kDepth * kStride, kStage = 2 * kOperand;
  static constexpr size_t kSharedBytes = shared_size(kStages * kStage * sizeof(float));
  static_assert(kSide * kColumnStride <= kOperand, "both layouts must fit");
};

// Which values of an operand are neighbours in shared memory.
enum class Together { depth, lines };

// Element (p, line, k) lies at data + p * batch + line * stride + k * depth. `vectors`: four at a time may be read along
// the axis that lies together.
struct ProductOperand {
  const float* data;
  int64_t batch, stride, depth;
  bool vectors;
};

// Copies an operand's slabs; what does not change from slab to slab are its members. `Swapped`: the other operand has its k's
// together, this one its lines.
template <Together TOGETHER, bool Swapped>
class ProductSlabs {
  using Shape = ProductTile;
  static constexpr bool kDeep = TOGETHER == Together::depth;

 public:
  // Lines from `line` on, of which there are `lines`, of batch p; `depth` k's in all.
  __device__ __forceinline__ ProductSlabs(const ProductOperand& operand, int p, int line, int lines, int depth,
                                          SharedArray<float> staging)
      : operand_(operand), staging_(staging) {
    const int t = threadIdx.x, wide = operand.vectors ? 4 : 1;
    const int across = (kDeep ? Shape::kDepth : Shape::kSide) / wide;
    const int first = t % across * wide, other = t / across;
    const int k = kDeep ? first : other, in_tile = kDeep ? column_of_slot(other) : first;
    lines_ = lines - line - in_tile;
    left_ = kDeep || lines_ > 0 ? depth - k : 0;
    from_ = operand.data + p * operand.batch + static_cast<int64_t>(line + in_tile) * operand.stride + k * operand.depth;
    to_ = kDeep ? other * Shape::kColumnStride + k : depth_place(k) * Shape::kStride + in_tile;
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
  // Where the other operand's k's lie together, lane t's q-th is k = 4 t + q; here it reads its q-th at place 4 q + t. A sum
  // over the bits of k, and so a sum over k's that share no bits.
  __device__ __forceinline__ static constexpr int depth_place(int k) { return Swapped ? k % 4 * 4 + k / 4 : k; }

  template <int Wide>
  __device__ __forceinline__ void copy(int to) const {
    constexpr int kAtOnce = Shape::kThreads * Wide / (kDeep ? Shape::kDepth : Shape::kSide);  // slots, or k's
    constexpr int kCopies = (kDeep ? Shape::kSide : Shape::kDepth) / kAtOnce;
#pragma unroll
    for (int e = 0; e < kCopies; ++e) {
      const int slot_or_k = e * kAtOnce;  // from this thread's first one on
      const int line_or_k = kDeep ? column_of_slot(slot_or_k) : slot_or_k;
      const bool inside = kDeep ? 0 < left_ && line_or_k < lines_ : line_or_k < left_;
      const float* const from = from_ + line_or_k * (kDeep ? operand_.stride : operand_.depth);
      const SharedArray<float> target =
          staging_ + (to + (kDeep ? slot_or_k * Shape::kColumnStride : depth_place(slot_or_k) * Shape::kStride));
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

// Block: (column tile, row tile, p), column tile fastest.
//   a (batches, rows, depth), b (batches, columns, depth), row_bias (rows) or null, column_bias (columns) or null
//   out: element (p, i, j) at out + p * out_batch + i * out_row + j; `vectors`: four j's at a time may be written
struct ProductWork {
  ProductOperand a, b;
  const float *row_bias, *column_bias;
  float* out;
  int64_t out_batch, out_row;
  int batches, rows, columns, depth;
  bool vectors;
  Blocks blocks;
};

// The shared memory of a block, all of what a launch asks for.
__device__ __forceinline__ SharedArray<float> product_staging(SharedMemory memory) {
  return memory.array<float>(ProductTile::kStages * ProductTile::kStage);
}

template <Together A, Together B>
__device__ __forceinline__ void product_block(const ProductWork& work, int block, SharedArray<float> staging) {
  using Shape = ProductTile;
  const int across = ceil_div(work.columns, Shape::kSide), down = ceil_div(work.rows, Shape::kSide);
  const int j0 = block % across * Shape::kSide, i0 = block / across % down * Shape::kSide, p = block / across / down;
  ProductSlabs<A, A != B && A == Together::lines> a_slabs(work.a, p, i0, work.rows, work.depth, staging);
  ProductSlabs<B, A != B && B == Together::lines> b_slabs(work.b, p, j0, work.columns, work.depth, staging + Shape::kOperand);

  const int warp = __shfl_sync(kFullWarp, threadIdx.x / kWarp, 0);  // the compiler sees that it is one number for all lanes
  const int in_a = warp / 2 * Shape::kWarpSide, in_b = warp % 2 * Shape::kWarpSide;
  const bool wanted = i0 + in_a < work.rows && j0 + in_b < work.columns;  // the same for all lanes
  Results sum = {};

#pragma unroll 1
  for (int s = 0; s < Shape::kStages - 1; ++s) {
    if (s * Shape::kDepth < work.depth) a_slabs.start(s), b_slabs.start(s);
    copy_async_commit();
  }
  int stage = 0;
  for (int left = work.depth; left > 0; left -= Shape::kDepth) {
    copy_async_wait<Shape::kStages - 2>();
    __syncthreads();  // this slab is there for all, and all are done with the one whose stage is filled next
    if (left > (Shape::kStages - 1) * Shape::kDepth) {
      const int free_stage = stage == 0 ? Shape::kStages - 1 : stage - 1;
      a_slabs.start(free_stage), b_slabs.start(free_stage);
    }
    copy_async_commit();
    if (wanted) {
      const SharedArray<float> operands = staging + stage * Shape::kStage;
      const SplitFragment a(read_fragment<Shape, A == Together::depth>(operands, 0, in_a));
      const SplitFragment b(read_fragment<Shape, B == Together::depth>(operands + Shape::kOperand, 0, in_b));
      add_product(sum, a, b);
    }
    stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
  }

  if (!wanted) return;
  const int i = i0 + in_a + result_row();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int j = j0 + in_b + result_column() + 4 * half;
    float values[4][4];
    result_block(sum, half, values);
    float* to = work.out + p * work.out_batch + i * work.out_row + j;
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

template <Together TOGETHER>
ProductOperand product_operand(const ProductSource& a, int64_t lines, int64_t depth) {
  const bool vectors = TOGETHER == Together::depth ? product_vectors(a.data, depth, a.step, {a.batch, a.stride})
                                                   : product_vectors(a.data, lines, a.stride, {a.batch, a.step});
  return {a.data, a.batch, a.stride, a.step, vectors};
}

struct ProductSizes {
  int64_t batches, rows, columns, depth;  // a tile less than 2^31 at most
};

// A work with its blocks, none where there is no result.
template <Together A, Together B>
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

}  // namespace ella

// F-FC in float32 whose intermediate is never written out, where it is large.
//
// All large results have one of two forms over the same inner products, which are computed tile by tile in shared memory and
// never written out:
//   inner[b,r,q] = sum_k left[r,b,k] right[q,b,k] (+ bias[...])
//   apply   out[r,q,y] = sum_b inner[b,r,q] outer[q,b,y] (+ bias_out[y])    y itself, and dx
//   weight  out[b,q,y] = sum_r inner[b,r,q] outer[r,q,y]                   dU, dV
// with r = n throughout (z the intermediate of F-FC, dz its gradient, U = weight_in, V = weight_out, g = grad):
//   y   inner z    b = c, q = d, k = x    left x, right U, outer V
//   dx  inner dz   b = d, q = c, k = y    left g, right V, outer U       (the forward map with U and V exchanged)
//   dU  inner dz   b = d, q = c, k = y    left g, right V, outer x
//   dV  inner z    b = c, q = d, k = x    left x, right U, outer g
// so two kinds of block and strided views serve all four. The bias gradients need no inner products. The forward map is one
// launch, the backward pass two: one for all that reads images, one that adds what several blocks left.
#pragma once

#include <algorithm>

#include "cuda/block_roles.cuh"
#include "factored_linear/cuda/biases.cuh"
#include "factored_linear/cuda/tiles.cuh"

namespace ella::fused {

// out[r,q,y] = sum_b inner[b,r,q] outer[q,b,y] + bias_out[y].
// Block: (y part, q tile, r tile), y part fastest; it recomputes the inner products for its part of y.
//   left (rows, batches, reduce), right (columns, batches, reduce), outer (columns, batches, outputs),
//   bias_in (columns) or null, bias_out (outputs) or null, out (rows, columns, outputs) contiguous
struct ApplyWork {
  View3<float> left, right, outer;
  const float *bias_in, *bias_out;
  float* out;
  Sizes size;
  int results;  // TY
  int64_t part_width, parts;
  Blocks blocks;
};

__device__ __forceinline__ void apply_block(const ApplyWork& work, int64_t block, const InnerStorage& storage) {
  using Shape = Tile;
  const Sizes& size = work.size;
  const int64_t q_tiles = ceil_div(size.columns, int64_t{kColumns});
  const int64_t part = block % work.parts, tile = block / work.parts;
  const int64_t q0 = tile % q_tiles * kColumns, r0 = tile / q_tiles * Shape::kRows;
  const int64_t y_begin = part * work.part_width;
  int64_t b0 = 0;
  do {  // at least once: without any b the result is the bias
    inner_tile<true>(storage, work.left, work.right, work.bias_in, size, r0, b0, q0);
    const ResultTile tile_out{work.out + (r0 * size.columns + q0) * size.outputs + y_begin,
                              size.columns * size.outputs,
                              size.outputs,
                              static_cast<int>(min(size.rows - r0, int64_t{Shape::kRows})),
                              static_cast<int>(min(size.columns - q0, int64_t{kColumns})),
                              static_cast<int>(min(work.part_width, size.outputs - y_begin))};
    const View3<float> outer{work.outer.at(q0, b0, y_begin), work.outer.stride1, work.outer.stride0,
                             work.outer.stride2};  // (b,q,y)
    outer_tile<Shape::kRows>(work.results, storage.inner, outer, static_cast<int>(min(size.batches - b0, int64_t{kBatches})),
                             tile_out, b0 == 0, work.bias_out == nullptr ? nullptr : work.bias_out + y_begin);
    b0 += kBatches;
  } while (b0 < size.batches);
}

// out[b,q,y] = sum_r inner[b,r,q] outer[r,q,y], r in this block's split of the rows.
// Block: (split, y part, q tile, b tile), split fastest; with more than one split, out is a workspace with one copy of the
// result for each, added up in order afterwards.
//   left (rows, batches, reduce), right (columns, batches, reduce), outer (rows, columns, outputs), bias_in (columns) or null
//   out (splits, ...) whose element (b, q, y) lies at b * out_batch + q * out_column + y
struct WeightWork {
  View3<float> left, right, outer;
  const float* bias_in;
  float* out;
  Sizes size;
  int results;  // TY
  int64_t out_batch, out_column;
  int64_t part_width, parts, split_rows, splits;
  Blocks blocks;
};

__device__ __forceinline__ void weight_block(const WeightWork& work, int64_t block, const InnerStorage& storage) {
  using Shape = Tile;
  const Sizes& size = work.size;
  const int64_t q_tiles = ceil_div(size.columns, int64_t{kColumns});
  const int64_t split = block % work.splits, part = block / work.splits % work.parts, tile = block / work.splits / work.parts;
  const int64_t q0 = tile % q_tiles * kColumns, b0 = tile / q_tiles * kBatches;
  const int64_t y_begin = part * work.part_width;
  const int64_t r_begin = split * work.split_rows, r_end = min(r_begin + work.split_rows, size.rows);
  float* const result =
      work.out + split * (size.batches * size.columns * size.outputs) + b0 * work.out_batch + q0 * work.out_column + y_begin;
  // The outer stage reads b's eight at a time, also those beyond the last, which no slab fills.
#pragma unroll 1
  for (int i = threadIdx.x; i < Shape::kInner; i += kThreads) storage.inner[i] = 0.0f;
  for (int64_t r0 = r_begin; r0 < r_end; r0 += Shape::kRows) {
    inner_tile<false>(storage, work.left, work.right, work.bias_in, size, r0, b0, q0);
    const ResultTile tile_out{result,
                              work.out_batch,
                              work.out_column,
                              static_cast<int>(min(size.batches - b0, int64_t{kBatches})),
                              static_cast<int>(min(size.columns - q0, int64_t{kColumns})),
                              static_cast<int>(min(work.part_width, size.outputs - y_begin))};
    const View3<float> outer{work.outer.at(r0, q0, y_begin), work.outer.stride0, work.outer.stride1,
                             work.outer.stride2};  // (r,q,y)
    outer_tile<kBatches>(work.results, storage.inner, outer, static_cast<int>(min(r_end - r0, int64_t{Shape::kRows})), tile_out,
                         r0 == r_begin, static_cast<const float*>(nullptr));
  }
}

__global__ void __launch_bounds__(kThreads, Tile::kBlocks) apply_kernel(ApplyWork work) {
  ELLA_SHARED_MEMORY(memory);
  apply_block(work, blockIdx.x, InnerStorage(memory));
}

// Everything of the backward pass that reads images, one launch. What it leaves in several splits, and the bias gradients,
// are finished by gather_kernel.
struct BackwardWork {
  ApplyWork dx;
  WeightWork d_weight_in, d_weight_out;
  SumImagesWork sum_images;
};

__global__ void __launch_bounds__(kThreads, Tile::kBlocks) backward_kernel(BackwardWork work) {
  ELLA_SHARED_MEMORY(memory);
  const int64_t block = blockIdx.x;
  if (work.dx.blocks.have(block)) {
    apply_block(work.dx, block - work.dx.blocks.first, InnerStorage(memory));
  } else if (work.d_weight_in.blocks.have(block)) {
    weight_block(work.d_weight_in, block - work.d_weight_in.blocks.first, InnerStorage(memory));
  } else if (work.d_weight_out.blocks.have(block)) {
    weight_block(work.d_weight_out, block - work.d_weight_out.blocks.first, InnerStorage(memory));
  } else {
    sum_images_block<kThreads>(work.sum_images, block - work.sum_images.blocks.first, memory.array<double>(kThreads));
  }
}

// What the second launch of the backward pass adds up: the splits of both weights, and the biases.
//   out[i] = sum_s parts[s][i], s ascending; zero without splits     parts (splits, count), out (count)
struct GatherWork {
  struct Splits {
    const float* parts;
    float* out;
    int64_t splits, count;
    Blocks blocks;
  };
  Splits weight_in, weight_out;
  BiasWork biases;
};

__device__ __forceinline__ void sum_splits_block(const GatherWork::Splits& work, int64_t block) {
  const int64_t i = block * kThreads + threadIdx.x;
  if (i >= work.count) return;
  float total = work.splits == 0 ? 0.0f : work.parts[i];
  for (int64_t s = 1; s < work.splits; ++s) total += work.parts[s * work.count + i];
  work.out[i] = total;
}

__global__ void __launch_bounds__(kThreads) gather_kernel(GatherWork work) {
  ELLA_SHARED_MEMORY(memory);
  const int64_t block = blockIdx.x;
  if (work.weight_in.blocks.have(block)) {
    sum_splits_block(work.weight_in, block - work.weight_in.blocks.first);
  } else if (work.weight_out.blocks.have(block)) {
    sum_splits_block(work.weight_out, block - work.weight_out.blocks.first);
  } else {
    bias_block<kThreads>(work.biases, block - work.biases.blocks.first, memory.array<double>(kThreads));
  }
}

// Kernels get their work as parameters, of which every architecture takes 4 KB.
static_assert(sizeof(BackwardWork) <= 4096 && sizeof(GatherWork) <= 4096, "too large for kernel parameters");

constexpr int64_t kMaxPart = 1 << 20;

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

inline ApplyWork plan_apply(const Device& device, View3<float> left, View3<float> right, View3<float> outer,
                            const float* bias_in, const float* bias_out, const Tensor& out, const Sizes& size) {
  ApplyWork work{left, right, outer, bias_in, bias_out, out.mutable_data_ptr<float>(), size};
  if (out.numel() == 0) return work;
  work.results = results_per_thread(size.outputs);
  const int64_t tiles = ceil_div(size.rows, int64_t{Tile::kRows}) * ceil_div(size.columns, int64_t{kColumns});
  const Parts parts(size.outputs, tiles, 32 * work.results, device.multiprocessors());
  work.part_width = parts.width, work.parts = parts.count;
  work.blocks.count = tiles * parts.count;
  work.blocks.length = ceil_div(size.batches, int64_t{kBatches}) * (size.reduce + parts.width);
  return work;
}

// A weight's gradient: `out` is contiguous; out_batch and out_column say which of its first two axes is b and which q. Where
// the rows are shared out over blocks, `workspace` keeps their results and `gather` says how to add them.
inline WeightWork plan_weight(const Device& device, View3<float> left, View3<float> right, View3<float> outer,
                              const float* bias_in, const Tensor& out, const Sizes& size, int64_t out_batch, int64_t out_column,
                              std::optional<Tensor>& workspace, GatherWork::Splits& gather) {
  WeightWork work{left, right, outer, bias_in, out.mutable_data_ptr<float>(), size};
  if (out.numel() == 0) return work;
  work.results = results_per_thread(size.outputs);
  work.out_batch = out_batch, work.out_column = out_column;
  const int64_t tiles = ceil_div(size.batches, int64_t{kBatches}) * ceil_div(size.columns, int64_t{kColumns});
  const int64_t wanted = device.multiprocessors();
  const Parts parts(size.outputs, tiles, 32 * work.results, wanted);
  work.part_width = parts.width, work.parts = parts.count;
  // What still lacks blocks is split over the rows, which costs no recomputation but a workspace: at most 32 copies of out.
  const int64_t row_tiles = ceil_div(size.rows, int64_t{Tile::kRows});
  const int64_t max_count = std::clamp<int64_t>(std::min(ceil_div(wanted, tiles * parts.count), row_tiles), 1, 32);
  work.split_rows = ceil_div(row_tiles, max_count) * Tile::kRows;
  work.splits = row_tiles == 0 ? 0 : ceil_div(size.rows, work.split_rows);
  work.blocks.count = tiles * parts.count * work.splits;
  work.blocks.length = ceil_div(row_tiles, max_count) * (size.reduce + parts.width);
  if (work.splits != 1) {  // also without rows: the result is zero, and nobody else writes it
    gather = {nullptr, work.out, work.splits, out.numel(), {0, ceil_div(out.numel(), int64_t{kThreads}), work.splits}};
    if (work.splits > 0) {
      workspace = device_empty(out, {work.splits, out.numel()});
      work.out = workspace->mutable_data_ptr<float>();
      gather.parts = work.out;
    }
  }
  return work;
}

inline void forward(const Device& device, const FactoredLinearArguments& args, const std::optional<Tensor>& bias_out,
                    const Tensor& y) {
  const FactoredLinearSizes& s = args.size;
  const Bias in(args.bias_in), out(bias_out);
  const ApplyWork work = plan_apply(device, view(args.x), view(args.weight_in), view(args.weight_out), in.data(), out.data(), y,
                                    {s.N, s.C, s.D, s.X, s.Y});
  launch(device, "factored_linear", apply_kernel, work.blocks.count, kThreads, Tile::shared_bytes(), work);
}

inline void backward(const Device& device, const Tensor& grad, const FactoredLinearArguments& args,
                     const FactoredLinearGradients& to) {
  const FactoredLinearSizes& s = args.size;
  const View3<float> g = view(grad), v = view(args.weight_out, 1, 0, 2);
  const Sizes dz_by_x{s.N, s.D, s.C, s.Y, s.X};  // r = n, b = d, q = c, k = y, outputs x
  const Sizes z_by_y{s.N, s.C, s.D, s.X, s.Y};   // r = n, b = c, q = d, k = x, outputs y
  const Bias in(args.bias_in);
  BackwardWork work{};
  GatherWork gather{};
  std::optional<Tensor> shares_in, shares_out;  // kept until the kernels are queued
  if (to.wanted.x) work.dx = plan_apply(device, g, v, view(args.weight_in, 1, 0, 2), nullptr, nullptr, to.x, dz_by_x);
  if (to.wanted.weight_in) {
    work.d_weight_in =
        plan_weight(device, g, v, view(args.x), nullptr, to.weight_in, dz_by_x, s.C * s.X, s.X, shares_in, gather.weight_in);
  }
  if (to.wanted.weight_out) {
    work.d_weight_out = plan_weight(device, view(args.x), view(args.weight_in), g, in.data(), to.weight_out, z_by_y, s.Y,
                                    s.C * s.Y, shares_out, gather.weight_out);
  }
  const std::optional<Tensor> sums = plan_biases(grad, args.weight_out, to, work.sum_images, gather.biases);
  const int64_t blocks =
      number_blocks({&work.dx.blocks, &work.d_weight_in.blocks, &work.d_weight_out.blocks, &work.sum_images.blocks});
  launch(device, "factored_linear_backward", backward_kernel, blocks, kThreads, Tile::shared_bytes(), work);
  const int64_t gather_blocks = number_blocks({&gather.weight_in.blocks, &gather.weight_out.blocks, &gather.biases.blocks});
  launch(device, "factored_linear_backward (gather)", gather_kernel, gather_blocks, kThreads,
         shared_size(kThreads * sizeof(double)), gather);
}

}  // namespace ella::fused

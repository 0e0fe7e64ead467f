// The gradients of F-FC's biases, which need no inner products: sums over images in one launch, the rest in the next.
//   grad_bias_out[y] = sum_d sums[d,y]
//   grad_bias_in[d] = sum_{c,y} weight_out[d,c,y] sums[d,y]    that is sum_{n,c} dz[n,d,c] with the sum over n taken first
#pragma once

#include <limits>

#include "cuda/block_roles.cuh"
#include "cuda/reduce.cuh"
#include "factored_linear/cuda/arguments.cuh"

namespace ella {

// sums[d,y] = sum_n grad[n,d,y] in double. Block: 32 columns (d,y) x interleaved splits of n, one a warp.
//   grad (N, D, Y), sums (D, Y)
struct SumImagesWork {
  View3<float> grad;
  double* sums;
  int64_t N, D, Y;
  Blocks blocks;
};

template <int Threads>
__device__ __forceinline__ void sum_images_block(const SumImagesWork& work, int64_t block, SharedArray<double> partial) {
  constexpr int kSplits = Threads / kWarp;
  const int column = threadIdx.x % kWarp, split = threadIdx.x / kWarp;
  const int64_t at = block * kWarp + column;
  double total = 0;
  if (at < work.D * work.Y) {
    const float* from = work.grad.at(split, at / work.Y, at % work.Y);
    const int64_t step = kSplits * work.grad.stride0;
#pragma unroll 8  // numbers on their way before the first is added
    for (int64_t n = split; n < work.N; n += kSplits, from += step) total += static_cast<double>(*from);
  }
  partial[threadIdx.x] = total;  // [split][column]
  __syncthreads();
  if (split == 0 && at < work.D * work.Y) {
    for (int s = 1; s < kSplits; ++s) total += partial[s * kWarp + column];
    work.sums[at] = total;
  }
}

// Blocks: some for grad_bias_out, 32 y x interleaved splits of d, one a warp; then one for each d of grad_bias_in.
//   v = weight_out (D, C, Y), sums (D, Y), grad_bias_out (Y), grad_bias_in (D)
struct BiasWork {
  View3<float> v;
  const double* sums;
  float *grad_bias_out, *grad_bias_in;
  int64_t C, D, Y;
  int64_t out_blocks;
  Blocks blocks;
};

template <int Threads>
__device__ __forceinline__ void bias_block(const BiasWork& work, int64_t block, SharedArray<double> scratch) {
  constexpr int kSplits = Threads / kWarp;
  const int thread = threadIdx.x;
  double total = 0;
  if (block < work.out_blocks) {
    const int split = thread / kWarp;
    const int64_t y = block * kWarp + thread % kWarp;
    if (y < work.Y) {
      const double* from = work.sums + split * work.Y + y;
#pragma unroll 8
      for (int64_t d = split; d < work.D; d += kSplits, from += kSplits * work.Y) total += *from;
    }
    scratch[thread] = total;  // [split][y]
    __syncthreads();
    if (split == 0 && y < work.Y) {
      for (int s = 1; s < kSplits; ++s) total += scratch[s * kWarp + thread];
      work.grad_bias_out[y] = static_cast<float>(total);
    }
    return;
  }
  const int64_t d = block - work.out_blocks;
  if (work.Y > 0) {
    // Elements (c, y) in steps of all threads. No step divides, which takes longer than what it is for.
    const int64_t steps_c = Threads / work.Y, steps_y = Threads % work.Y;
    const float* const weights = work.v.at(d, 0, 0);
    const double* const sums = work.sums + d * work.Y;
    int64_t c = thread / work.Y, y = thread % work.Y;
#pragma unroll 4
    while (c < work.C) {
      total += static_cast<double>(weights[c * work.v.stride1 + y * work.v.stride2]) * sums[y];
      y += steps_y;
      const bool over = y >= work.Y;
      y -= over ? work.Y : 0, c += steps_c + (over ? 1 : 0);
    }
  }
  total = block_reduce(total, scratch, Sum{});
  if (threadIdx.x == 0) work.grad_bias_in[d] = static_cast<float>(total);
}

// The length of blocks that start before all others: they wait for memory most of their time.
constexpr int64_t kFirst = std::numeric_limits<int64_t>::max();

// Both roles for the gradients that are wanted; none for neither, unless somebody else reads the sums too. Gives the sums, to
// be kept until the kernels are queued.
inline std::optional<Tensor> plan_biases(const Tensor& grad, const Tensor& weight_out, const FactoredLinearGradients& to,
                                         bool read, SumImagesWork& sum_images, BiasWork& biases) {
  if (!to.wanted.bias_in && !to.wanted.bias_out && !read) return std::nullopt;
  const int64_t N = grad.size(0), D = grad.size(1), Y = grad.size(2);
  const Tensor sums = device_empty(grad, {D, Y}, ScalarType::Double);
  sum_images = {view(grad), sums.mutable_data_ptr<double>(), N, D, Y, {0, ceil_div(D * Y, int64_t{kWarp}), kFirst}};
  biases = {view(weight_out), sum_images.sums, nullptr, nullptr, weight_out.size(1), D, Y, 0, {0, 0, kFirst}};
  if (to.wanted.bias_out) {
    biases.grad_bias_out = to.bias_out.mutable_data_ptr<float>();
    biases.out_blocks = biases.blocks.count = ceil_div(Y, int64_t{kWarp});
  }
  if (to.wanted.bias_in) {
    biases.grad_bias_in = to.bias_in.mutable_data_ptr<float>();
    biases.blocks.count += D;
  }
  return sums;
}

}  // namespace ella

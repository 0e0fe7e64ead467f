// The gradients of F-FC's biases, which need no inner products: sums over images in one launch, the rest in the next.
//   grad_bias_out[y] = sum_d sums[d,y]
//   grad_bias_in[d] = sum_{c,y} weight_out[d,c,y] sums[d,y]    that is sum_{n,c} dz[n,d,c] with the sum over n taken first
#pragma once

#include "cuda/reduce.cuh"
#include "factored_linear/cuda/arguments.cuh"
#include "factored_linear/cuda/block_roles.cuh"

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
    for (int64_t n = split; n < work.N; n += kSplits) total += static_cast<double>(*work.grad.at(n, at / work.Y, at % work.Y));
  }
  partial[threadIdx.x] = total;  // [split][column]
  __syncthreads();
  if (split == 0 && at < work.D * work.Y) {
    for (int s = 1; s < kSplits; ++s) total += partial[s * kWarp + column];
    work.sums[at] = total;
  }
}

// Blocks: some for grad_bias_out, a thread for each y; then one for each d of grad_bias_in.
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
  double total = 0;
  if (block < work.out_blocks) {
    const int64_t y = block * Threads + threadIdx.x;
    if (y >= work.Y) return;
    for (int64_t d = 0; d < work.D; ++d) total += work.sums[d * work.Y + y];
    work.grad_bias_out[y] = static_cast<float>(total);
    return;
  }
  const int64_t d = block - work.out_blocks;
  for (int64_t i = threadIdx.x; i < work.C * work.Y; i += Threads) {
    total += static_cast<double>(*work.v.at(d, i / work.Y, i % work.Y)) * work.sums[d * work.Y + i % work.Y];
  }
  total = block_reduce(total, scratch, Sum{});
  if (threadIdx.x == 0) work.grad_bias_in[d] = static_cast<float>(total);
}

// Both roles, by blocks of `threads`, for the gradients that are wanted; none for neither. Gives the sums, to be kept until the
// kernels are queued.
inline std::optional<Tensor> plan_biases(const Tensor& grad, const Tensor& weight_out, const FactoredLinearGradients& to,
                                         int threads, SumImagesWork& sum_images, BiasWork& biases) {
  if (!to.wanted.bias_in && !to.wanted.bias_out) return std::nullopt;
  const int64_t N = grad.size(0), D = grad.size(1), Y = grad.size(2);
  const Tensor sums = device_empty(grad, {D, Y}, ScalarType::Double);
  sum_images = {view(grad), sums.mutable_data_ptr<double>(), N, D, Y, {0, ceil_div(D * Y, int64_t{kWarp}), 0}};
  biases = {view(weight_out), sum_images.sums, nullptr, nullptr, weight_out.size(1), D, Y, 0, {}};
  if (to.wanted.bias_out) {
    biases.grad_bias_out = to.bias_out.mutable_data_ptr<float>();
    biases.out_blocks = biases.blocks.count = ceil_div(Y, static_cast<int64_t>(threads));
  }
  if (to.wanted.bias_in) {
    biases.grad_bias_in = to.bias_in.mutable_data_ptr<float>();
    biases.blocks.count += D;
  }
  return sums;
}

}  // namespace ella

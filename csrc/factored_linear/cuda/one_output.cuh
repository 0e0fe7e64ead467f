// F-FC in float32 with one output position, by the weights multiplied out, M[d,(c,x)] = V[d,c] U[d,c,x]: fewer operations than
// by the intermediate, which has a value for each of M. Products on tensor cores multiply U's values as they come from shared
// memory:
//   y[n,d] = sum_k x[n,k] M[d,k] + b_in[d] sum_c V[d,c] + b_out      dx[n,k] = sum_d g[n,d] M[d,k]      with k = (c,x)
//   P[d,k] = sum_n g[n,d] x[n,k]: dU[d,k] = V[d,c] P[d,k],  dV[d,c] = sum_x U[d,k] P[d,k] + b_in[d] sum_n g[n,d]
// The forward pass is one launch, the backward pass two, of which the second finishes the weights' gradients and the biases'.
#pragma once

#include "cuda/elements.cuh"
#include "cuda/tensor_product.cuh"
#include "factored_linear/cuda/biases.cuh"

namespace ella::one_output {

constexpr int kThreads = ProductTile::kThreads, kWarps = kThreads / kWarp;
constexpr int kBlocks = 3;  // that a multiprocessor has: 168 registers a thread, for V's places too

// Multiplies U's values by V. `ByLine`: an operand's line is d, its depth (c,x); else its depth is d, its line (c,x).
//   v (D, C) contiguous
template <bool ByLine>
struct TimesV {
  const float* v;
  int C, D;
  Divisor<uint32_t> X;

  __device__ __forceinline__ void operator()(Fragment& u, int depth, int line) const {
    depth += 4 * (threadIdx.x % 4), line += 4 * (threadIdx.x % kWarp / 4);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int d = ByLine ? line + j : depth + q, c = static_cast<int>(X(ByLine ? depth + q : line + j));
        u.value[q][j] *= d < D && c < C ? v[static_cast<int64_t>(d) * C + c] : 0.0f;
      }
    }
  }
};

struct ForwardWork {
  ProductWork y;
  TimesV<true> times_v;
  const float* bias_in;   // (D) or null
  const float* bias_out;  // (1) or null
  float* shift;           // (D)
};

// shift[d] = b_in[d] sum_c V[d,c] + b_out for the block's columns d. Blocks that share columns write the same.
__device__ __forceinline__ void shift_columns(const ForwardWork& work, int first) {
  const int lane = threadIdx.x % kWarp, end = min(first + ProductTile::kSide, work.times_v.D), C = work.times_v.C;
  for (int d = first + threadIdx.x / kWarp; d < end; d += kWarps) {
    float sum = 0;
    for (int c = lane; work.bias_in != nullptr && c < C; c += kWarp) sum += work.times_v.v[static_cast<int64_t>(d) * C + c];
    sum = warp_reduce(sum, Sum{});
    if (work.bias_in != nullptr) sum *= work.bias_in[d];
    if (lane == 0) work.shift[d] = work.bias_out == nullptr ? sum : sum + *work.bias_out;
  }
}

template <Tf32 TF32>
__global__ void __launch_bounds__(kThreads, kBlocks) factored_linear_one_output_kernel(ForwardWork work) {
  ELLA_SHARED_MEMORY(memory);
  const int block = static_cast<int>(blockIdx.x);
  if (work.shift != nullptr) shift_columns(work, ProductPlace(work.y, block).j0);  // read behind the product's barriers
  product_block<Major::k, Major::k, TF32>(work.y, block, memory, work.times_v);
}

struct BackwardWork {
  ProductWork dx, p;
  TimesV<false> times_v;
  SumImagesWork sum_images;
};

template <Tf32 TF32>
__global__ void __launch_bounds__(kThreads, ProductTile::kBlocks)
    factored_linear_one_output_backward_kernel(BackwardWork work) {
  ELLA_SHARED_MEMORY(memory);
  const int64_t block = blockIdx.x;
  if (work.sum_images.blocks.have(block)) {
    sum_images_block<kThreads>(work.sum_images, block - work.sum_images.blocks.first, memory.array<double>(kThreads));
  } else if (work.dx.blocks.have(block)) {
    product_block<Major::k, Major::mn, TF32>(work.dx, static_cast<int>(block - work.dx.blocks.first), memory, work.times_v);
  } else {
    product_block<Major::mn, Major::mn, TF32>(work.p, static_cast<int>(block - work.p.blocks.first), memory);
  }
}

// The gradients of the weights from P. A power of two of lanes, up to a warp, share a pair (d, c).
//   p, u, d_u (D, C, X), v, d_v (D, C), bias_in (D) or null, sums (D) or null; d_u, which may be p, or d_v may be null
struct WeightsWork {
  const float *p, *u, *v, *bias_in;
  const double* sums;
  float *d_u, *d_v;
  int64_t pairs, C, X;
  int lanes;
  Blocks blocks;
};

__device__ __forceinline__ void weights_block(const WeightsWork& work, int64_t block) {
  const int64_t pair = block * (kThreads / work.lanes) + threadIdx.x / work.lanes;
  const bool inside = pair < work.pairs;
  const float v = inside ? work.v[pair] : 0.0f;
  float sum = 0;
  for (int64_t x = threadIdx.x % work.lanes; inside && x < work.X; x += work.lanes) {
    const float p = work.p[pair * work.X + x];
    sum = fma(work.u[pair * work.X + x], p, sum);
    if (work.d_u != nullptr) work.d_u[pair * work.X + x] = v * p;
  }
  sum = warp_reduce(sum, Sum{}, work.lanes);
  if (!inside || work.d_v == nullptr || threadIdx.x % work.lanes > 0) return;
  const int64_t d = pair / work.C;
  work.d_v[pair] = work.bias_in == nullptr ? sum : fma(work.bias_in[d], static_cast<float>(work.sums[d]), sum);
}

struct FinishWork {
  WeightsWork weights;
  BiasWork biases;
};

__global__ void __launch_bounds__(kThreads) factored_linear_one_output_finish_kernel(FinishWork work) {
  ELLA_SHARED_MEMORY(memory);
  const int64_t block = blockIdx.x;
  if (work.biases.blocks.have(block)) {
    bias_block<kThreads>(work.biases, block - work.biases.blocks.first, memory.array<double>(kThreads));
  } else {
    weights_block(work.weights, block - work.weights.blocks.first);
  }
}

// The arguments as matrices, x (N, K), U (D, K) and V (D, C), in memory of their own where they are not contiguous.
struct Matrices {
  explicit Matrices(const FactoredLinearArguments& args)
      : x_(torch::stable::contiguous(args.x)),
        u_(torch::stable::contiguous(args.weight_in)),
        v_(torch::stable::contiguous(args.weight_out)),
        N(args.size.N),
        C(args.size.C),
        D(args.size.D),
        X(args.size.X),
        K(C * X),
        x(x_.const_data_ptr<float>()),
        u(u_.const_data_ptr<float>()),
        v(v_.const_data_ptr<float>()) {}

  template <bool ByLine>
  TimesV<ByLine> times_v() const {
    return {v, static_cast<int>(C), static_cast<int>(D), Divisor<uint32_t>(X)};
  }

 private:
  const Tensor x_, u_, v_;

 public:
  const int64_t N, C, D, X, K;
  const float *x, *u, *v;
};

inline void forward(const Device& device, const FactoredLinearArguments& args, const std::optional<Tensor>& bias_out,
                    const Tensor& y) {
  const Matrices m(args);
  const Bias in(args.bias_in), out(bias_out);
  std::optional<Tensor> shift;
  if (args.bias_in || bias_out) shift = device_empty(y, {m.D});
  float* const to = shift ? shift->mutable_data_ptr<float>() : nullptr;
  ForwardWork work{product_work<Major::k, Major::k>({1, m.N, m.D, m.K}, {m.x, 0, m.K, 1}, {m.u, 0, m.K, 1},
                                                    {y.mutable_data_ptr<float>(), 0, m.D}, nullptr, to),
                   m.times_v<true>(), in.data(), out.data(), to};
  const ProductSplits splits(device, "factored_linear (splits)", y, {&work.y});
  with_tf32(args.tf32, [&](auto kind) {
    launch(device, "factored_linear (one output)", factored_linear_one_output_kernel<decltype(kind)::value>,
           work.y.blocks.count, kThreads, ProductTile::kSharedBytes, work);
  });
}

inline void backward(const Device& device, const Tensor& grad, const FactoredLinearArguments& args,
                     const FactoredLinearGradients& to) {
  const Matrices m(args);
  const Bias in(args.bias_in);
  const View3<float> g = view(grad);
  const bool weights = to.wanted.weight_in || to.wanted.weight_out;
  BackwardWork first{{}, {}, m.times_v<false>(), {}};
  FinishWork second{};
  std::optional<Tensor> p;  // kept until the kernels are queued
  if (to.wanted.x) {
    first.dx = product_work<Major::k, Major::mn>({1, m.N, m.K, m.D}, {g.data, 0, g.stride0, g.stride1}, {m.u, 0, 1, m.K},
                                                 {to.x.mutable_data_ptr<float>(), 0, m.K});
  }
  const std::optional<Tensor> sums =
      plan_biases(grad, args.weight_out, to, to.wanted.weight_out && args.bias_in, first.sum_images, second.biases);
  if (weights) {
    p = to.wanted.weight_in ? to.weight_in : device_empty(grad, {m.D, m.K});
    float* const own = p->mutable_data_ptr<float>();
    first.p = product_work<Major::mn, Major::mn>({1, m.D, m.K, m.N}, {g.data, 0, g.stride1, g.stride0}, {m.x, 0, 1, m.K},
                                                 {own, 0, m.K});
    int lanes = 1;
    while (lanes < m.X && lanes < kWarp) lanes *= 2;
    second.weights = {own,
                      m.u,
                      m.v,
                      in.data(),
                      first.sum_images.sums,
                      to.wanted.weight_in ? own : nullptr,
                      to.wanted.weight_out ? to.weight_out.mutable_data_ptr<float>() : nullptr,
                      m.D * m.C,
                      m.C,
                      m.X,
                      lanes,
                      {0, ceil_div(m.D * m.C, int64_t{kThreads / lanes}), 1}};
  }
  const ProductSplits splits(device, "factored_linear (splits)", grad, {&first.dx, &first.p});
  const int64_t blocks = number_blocks({&first.dx.blocks, &first.p.blocks, &first.sum_images.blocks});
  with_tf32(args.tf32, [&](auto kind) {
    launch(device, "factored_linear_backward (one output)", factored_linear_one_output_backward_kernel<decltype(kind)::value>,
           blocks, kThreads, ProductTile::kSharedBytes, first);
  });
  launch(device, "factored_linear_backward (finish)", factored_linear_one_output_finish_kernel,
         number_blocks({&second.weights.blocks, &second.biases.blocks}), kThreads, shared_size(kThreads * sizeof(double)),
         second);
}

}  // namespace ella::one_output

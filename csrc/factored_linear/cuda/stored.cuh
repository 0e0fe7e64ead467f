// F-FC in float32, whose intermediate is stored between two launches. It is computed for some output channels d in the forward
// pass, for some input channels c in the backward pass at a time: no result is a sum over that axis, so that nothing is added
// up afterwards. All are batched products on tensor cores (U = weight_in, V = weight_out, g = grad, z the intermediate, dz its
// gradient, both (D, C, N)):
//   first    z[d,c,n] = sum_x U[d,c,x] x[n,c,x] + b_in[d]  for each c      dz[d,c,n] = sum_y V[d,c,y] g[n,d,y]  for each d
//   second   y[n,d,y] = sum_c z[d,c,n] V[d,c,y] + b_out[y]  for each d     dx[n,c,x] = sum_d dz[d,c,n] U[d,c,x]  for each c
//            dU[d,c,x] = sum_n dz[d,c,n] x[n,c,x]  for each c              dV[d,c,y] = sum_n z[d,c,n] g[n,d,y]  for each d
// Both operands of the first launch are K-major, both of y and dx MN-major; of dU and dV the first is K-major and the second
// MN-major. The gradients of the biases go along.
#pragma once

#include <algorithm>
#include <limits>

#include "cuda/library.cuh"
#include "cuda/tensor_product.cuh"
#include "factored_linear/cuda/biases.cuh"

namespace ella::stored {

// Up to which the products' axes are counted in 32 bits.
constexpr int64_t kLargestAxis = std::numeric_limits<int>::max() - ProductTile::kSide;

constexpr int kThreads = ProductTile::kThreads;

struct IntermediatesWork {
  ProductWork z, dz;
  SumImagesWork sum_images;
};

struct ResultsWork {
  ProductWork apply, d_weight_in, d_weight_out;  // apply: y or dx
  BiasWork biases;
};

// Kernels get their work as parameters, of which every architecture takes 4 KB.
static_assert(sizeof(IntermediatesWork) <= 4096 && sizeof(ResultsWork) <= 4096, "too large for kernel parameters");

template <Tf32 TF32>
__global__ void __launch_bounds__(kThreads, ProductTile::kBlocks) factored_linear_intermediates_kernel(IntermediatesWork work) {
  ELLA_SHARED_MEMORY(memory);
  const int64_t block = blockIdx.x;
  if (work.sum_images.blocks.have(block)) {
    sum_images_block<kThreads>(work.sum_images, block - work.sum_images.blocks.first, memory.array<double>(kThreads));
    return;
  }
  const ProductWork& product = work.z.blocks.have(block) ? work.z : work.dz;
  product_block<Major::k, Major::k, TF32>(product, static_cast<int>(block - product.blocks.first), memory);
}

template <Tf32 TF32>
__global__ void __launch_bounds__(kThreads, ProductTile::kBlocks) factored_linear_results_kernel(ResultsWork work) {
  ELLA_SHARED_MEMORY(memory);
  const int64_t block = blockIdx.x;
  if (work.biases.blocks.have(block)) {
    bias_block<kThreads>(work.biases, block - work.biases.blocks.first, memory.array<double>(kThreads));
  } else if (work.apply.blocks.have(block)) {
    product_block<Major::mn, Major::mn, TF32>(work.apply, static_cast<int>(block - work.apply.blocks.first), memory);
  } else {
    const ProductWork& product = work.d_weight_in.blocks.have(block) ? work.d_weight_in : work.d_weight_out;
    product_block<Major::k, Major::mn, TF32>(product, static_cast<int>(block - product.blocks.first), memory);
  }
}

inline void launch_intermediates(const Device& device, IntermediatesWork& work, bool tf32) {
  const int64_t blocks = number_blocks({&work.z.blocks, &work.dz.blocks, &work.sum_images.blocks});
  with_tf32(tf32, [&](auto kind) {
    launch(device, "factored_linear (intermediates)", factored_linear_intermediates_kernel<decltype(kind)::value>, blocks,
           kThreads, ProductTile::kSharedBytes, work);
  });
}

inline void launch_results(const Device& device, ResultsWork& work, bool tf32) {
  const int64_t blocks =
      number_blocks({&work.apply.blocks, &work.d_weight_in.blocks, &work.d_weight_out.blocks, &work.biases.blocks});
  with_tf32(tf32, [&](auto kind) {
    launch(device, "factored_linear (results)", factored_linear_results_kernel<decltype(kind)::value>, blocks, kThreads,
           ProductTile::kSharedBytes, work);
  });
}

// Where a product's results go: batch p and row i of a tensor whose last axis is contiguous.
inline ProductTarget target(const Tensor& to, int batch, int row) {
  return {to.mutable_data_ptr<float>(), to.stride(batch), to.stride(row)};
}

// The products of the channels that the tensors have; z and dz are (D, C, N).
struct Arrays {
  Arrays(const Tensor& x_, const Tensor& weight_in, const Tensor& weight_out)
      : s{x_.size(0), x_.size(1), x_.size(2), weight_out.size(0), weight_out.size(2)},
        x(view(x_)),
        u(view(weight_in)),
        v(view(weight_out)) {}

  Tensor intermediate(const Tensor& like) const { return device_empty(like, {s.D, s.C, s.N}); }

  ProductWork z(const float* bias_in, const Tensor& to) const {  // for each c: d, n from x
    return product_work<Major::k, Major::k>({s.C, s.D, s.N, s.X}, {u.data, u.stride1, u.stride0, u.stride2},
                                            {x.data, x.stride1, x.stride0, x.stride2}, target(to, 1, 0), bias_in);
  }
  ProductWork dz(const View3<float>& g, const Tensor& to) const {  // for each d: c, n from y
    return product_work<Major::k, Major::k>({s.D, s.C, s.N, s.Y}, {v.data, v.stride0, v.stride1, v.stride2},
                                            {g.data, g.stride1, g.stride0, g.stride2}, target(to, 0, 1));
  }
  ProductWork y(const Tensor& z, const float* bias_out, const Tensor& to) const {  // for each d: n, y from c
    return product_work<Major::mn, Major::mn>({s.D, s.N, s.Y, s.C}, {z.const_data_ptr<float>(), s.C * s.N, 1, s.N},
                                              {v.data, v.stride0, v.stride2, v.stride1}, target(to, 1, 0), nullptr, bias_out);
  }
  ProductWork dx(const Tensor& dz, const Tensor& to) const {  // for each c: n, x from d
    return product_work<Major::mn, Major::mn>({s.C, s.N, s.X, s.D}, {dz.const_data_ptr<float>(), s.N, 1, s.C * s.N},
                                              {u.data, u.stride1, u.stride2, u.stride0}, target(to, 1, 0));
  }
  ProductWork d_weight_in(const Tensor& dz, const Tensor& to) const {  // for each c: d, x from n
    return product_work<Major::k, Major::mn>({s.C, s.D, s.X, s.N}, {dz.const_data_ptr<float>(), s.N, s.C * s.N, 1},
                                             {x.data, x.stride1, x.stride2, x.stride0}, target(to, 1, 0));
  }
  ProductWork d_weight_out(const Tensor& z, const View3<float>& g, const Tensor& to) const {  // for each d: c, y from n
    return product_work<Major::k, Major::mn>({s.D, s.C, s.Y, s.N}, {z.const_data_ptr<float>(), s.C * s.N, s.N, 1},
                                             {g.data, g.stride1, g.stride2, g.stride0}, target(to, 0, 1));
  }

  const FactoredLinearSizes s;
  const View3<float> x, u, v;
};

// Gives z, where the backward pass would have all of it at once too.
inline std::optional<Tensor> forward(const Device& device, const FactoredLinearArguments& args,
                                     const std::optional<Tensor>& bias_out, const Tensor& y) {
  const Bias in(args.bias_in), out(bias_out);
  std::optional<Tensor> whole;
  by_channels(args.size.D, args.size.C * args.size.N, [&](int64_t d, int64_t count) {
    const auto own = [&](const Tensor& of, int64_t axis) { return library::part(of, axis, d, count); };
    const Arrays arrays(args.x, own(args.weight_in, 0), own(args.weight_out, 0));
    const Tensor z = arrays.intermediate(y);
    IntermediatesWork first{};
    ResultsWork second{};
    first.z = arrays.z(in.data() == nullptr ? nullptr : in.data() + d, z);
    second.apply = arrays.y(z, out.data(), own(y, 1));
    const ProductSplits splits(device, "factored_linear (splits)", y, {&first.z, &second.apply});
    launch_intermediates(device, first, args.tf32);
    launch_results(device, second, args.tf32);
    if (count == args.size.D && z.numel() <= kMaxIntermediate) whole = z;
  });
  return whole;
}

// `kept`: z, as the forward pass kept it, or null.
inline void backward(const Device& device, const Tensor& grad, const FactoredLinearArguments& args,
                     const FactoredLinearGradients& to, const Tensor* kept) {
  const View3<float> g = view(grad);
  const Bias in(args.bias_in);
  by_channels(args.size.C, args.size.D * args.size.N, [&](int64_t c, int64_t count) {
    const auto own = [&](const Tensor& of) { return library::part(of, 1, c, count); };
    const Arrays arrays(own(args.x), own(args.weight_in), own(args.weight_out));
    std::optional<Tensor> z, dz, sums;  // kept until the kernels are queued
    IntermediatesWork first{};
    ResultsWork second{};
    if (to.wanted.weight_out) {
      z = kept != nullptr ? *kept : arrays.intermediate(grad);
      if (kept == nullptr) first.z = arrays.z(in.data(), *z);
      second.d_weight_out = arrays.d_weight_out(*z, g, own(to.weight_out));
    }
    if (to.wanted.x || to.wanted.weight_in) {
      dz = arrays.intermediate(grad);
      first.dz = arrays.dz(g, *dz);
    }
    if (to.wanted.x) second.apply = arrays.dx(*dz, own(to.x));
    if (to.wanted.weight_in) second.d_weight_in = arrays.d_weight_in(*dz, own(to.weight_in));
    if (c == 0) sums = plan_biases(grad, args.weight_out, to, false, first.sum_images, second.biases);
    const ProductSplits splits(device, "factored_linear (splits)", grad,
                               {&first.z, &first.dz, &second.apply, &second.d_weight_in, &second.d_weight_out});
    launch_intermediates(device, first, args.tf32);
    launch_results(device, second, args.tf32);
  });
}

}  // namespace ella::stored

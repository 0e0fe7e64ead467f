// averaged_filters and its gradients. With z[s,n,h] = sum_d bank[s,h,d] x[n,d] + bias[h] and S transforms:
//   out[n,h] = sum_s act(z[s,n,h]) / S        slopes[s,n,h] = grad[n,h] act'(z[s,n,h]) / S
//   grad_bank[s,h,d] = sum_n slopes[s,n,h] x[n,d]    grad_x[n,d] = sum_{s,h} slopes[s,n,h] bank[s,h,d]
//   grad_bias[h] = sum_{s,n} slopes[s,n,h]
// In float32 a block has a tile of out, on tensor cores (cuda/tensor_product.cuh). It multiplies for one transform after the
// other; the activations of each join the tile's sums in registers, and z is never written. Where tiles are few, blocks share
// out the transforms, and their sums are added in order. In float64 the products are torch's, of z for some transforms at a
// time. So they are, by tensor cores in float32, in the backward pass: z becomes the slopes where it lies, and the gradients
// are products of these.
#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "cuda/library.cuh"
#include "cuda/tensor_product.cuh"
#include "filters/checks.h"

namespace ella {
namespace {

// Numbers of z, or slopes, that are written at a time, or those of one transform. Tests say fewer, so that small shapes take
// several.
#ifndef ELLA_MAX_ACTIVATIONS
#define ELLA_MAX_ACTIVATIONS (1 << 22)
#endif
constexpr int64_t kMaxActivations = ELLA_MAX_ACTIVATIONS;
constexpr int kElementThreads = 256;

// ---- of one number ----

template <Activation ACTIVATION, class T>
__device__ __forceinline__ T activated(T z) {
  if constexpr (ACTIVATION == Activation::relu) return z <= T(0) ? T(0) : z;
  if constexpr (ACTIVATION == Activation::tanh) return tanh(z);
  if constexpr (ACTIVATION == Activation::gaussian) return exp(T(-0.5) * z * z);
  return z;
}

// grad times the slope at z.
template <Activation ACTIVATION, class T>
__device__ __forceinline__ T through(T z, T grad) {
  if constexpr (ACTIVATION == Activation::relu) return z <= T(0) ? T(0) : grad;
  if constexpr (ACTIVATION == Activation::tanh) {
    const T t = tanh(z);
    return grad * (T(1) - t * t);
  }
  if constexpr (ACTIVATION == Activation::gaussian) {
    const T value = exp(T(-0.5) * z * z);
    return value == T(0) ? T(0) : grad * -z * value;
  }
  return grad;
}

// Calls f with the activation as a type.
template <class F>
__device__ __forceinline__ void with_activation(Activation activation, const F& f) {
  if (activation == Activation::relu) {
    f(std::integral_constant<Activation, Activation::relu>{});
  } else if (activation == Activation::tanh) {
    f(std::integral_constant<Activation, Activation::tanh>{});
  } else if (activation == Activation::gaussian) {
    f(std::integral_constant<Activation, Activation::gaussian>{});
  } else {
    f(std::integral_constant<Activation, Activation::identity>{});
  }
}

// ---- float32 ----

// Block: (split of the transforms, column tile, row tile), split fastest.
//   x (1, N, D) with stride 0 along the transforms, bank (S, H, D), bias (H,) or null
//   out (splits, N, H) contiguous: a split's sums of act(z), times share
struct FiltersWork {
  ProductOperand x, bank;
  const float* bias;
  float* out;
  float share;
  Activation activation;
  int splits, S, N, H, D;
};

template <Tf32 TF32>
__global__ void __launch_bounds__(ProductTile::kThreads, 2) averaged_filters_kernel(FiltersWork work) {
  using Shape = ProductTile;
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<float> staging = memory.array<float>(Shape::kStages * Shape::kStage);
  const int across = ceil_div(work.H, Shape::kSide), split = blockIdx.x % work.splits, tile = blockIdx.x / work.splits;
  const int n0 = tile / across * Shape::kSide, h0 = tile % across * Shape::kSide;
  const int each = work.S / work.splits, more = work.S % work.splits;
  const int begin = split * each + min(split, more), end = begin + each + (split < more ? 1 : 0);
  const WarpPlace warp;
  const bool wanted = n0 + warp.in_a < work.N && h0 + warp.in_b < work.H;  // the same for all lanes
  const int n = n0 + warp.in_a + result_row(), h = h0 + warp.in_b + result_column();
  float total[2][4][4] = {};
#pragma unroll 1
  for (int s = begin; s < end; ++s) {
    Results sum = {};
    add_tile<Major::k, Major::k, TF32>(work.x, work.bank, s, n0, h0, work.N, work.H, 0, work.D, warp, wanted, staging, sum);
    __syncthreads();  // nobody reads the last slabs any more
    with_activation(work.activation, [&](auto kind) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float values[4][4];
        result_block(sum, half, values);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int column = h + 4 * half + c;
          const float shift = work.bias != nullptr && column < work.H ? work.bias[column] : 0.0f;
#pragma unroll
          for (int r = 0; r < 4; ++r) total[half][r][c] += activated<decltype(kind)::value>(values[r][c] + shift);
        }
      }
    });
  }
  float* const out = work.out + static_cast<int64_t>(split) * work.N * work.H;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = n + r, column = h + 4 * half + c;
        if (row < work.N && column < work.H) {
          out[static_cast<int64_t>(row) * work.H + column] = total[half][r][c] * work.share;
        }
      }
    }
  }
}

template <Major A, Major B, Tf32 TF32>
__global__ void __launch_bounds__(ProductTile::kThreads, ProductTile::kBlocks) filters_product_kernel(ProductWork work) {
  ELLA_SHARED_MEMORY(memory);
  product_block<A, B, TF32>(work, static_cast<int>(blockIdx.x), memory);
}

// ---- of z that is written ----

// out[n,h] = (sum_s act(z[s,h,n] + bias[h]) + out[n,h]) * factor, without out where this is the first part; s < transforms.
//   z (transforms, H, N) contiguous, bias (H,) contiguous or null, out (N, H) contiguous
__global__ void __launch_bounds__(kElementThreads)
    average_kernel(const double* __restrict__ z, const double* __restrict__ bias, double* __restrict__ out, int64_t transforms,
                   int64_t N, int64_t H, Activation activation, bool first, double factor) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kElementThreads + threadIdx.x;
  if (at >= N * H) return;
  const int64_t h = at / N, to = at % N * H + h;
  const double shift = bias == nullptr ? 0.0 : bias[h];
  double total = first ? 0.0 : out[to];
  with_activation(activation, [&](auto kind) {
    for (int64_t s = 0; s < transforms; ++s) total += activated<decltype(kind)::value>(z[s * N * H + at] + shift);
  });
  out[to] = total * factor;
}

// z[s,h,n] becomes grad[n,h] act'(z[s,h,n] + bias[h]) share.
//   z (transforms, H, N) contiguous, of `count` numbers, grad (N, H) by strides, bias (H,) contiguous or null
template <class T>
__global__ void __launch_bounds__(kElementThreads)
    slopes_kernel(T* __restrict__ z, const T* __restrict__ bias, const T* __restrict__ grad, int64_t grad_n, int64_t grad_h,
                  int64_t count, int64_t N, int64_t H, Activation activation, T share) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kElementThreads + threadIdx.x;
  if (at >= count) return;
  const int64_t n = at % N, h = at / N % H;
  const T value = z[at] + (bias == nullptr ? T(0) : bias[h]), incoming = grad[n * grad_n + h * grad_h] * share;
  with_activation(activation, [&](auto kind) { z[at] = through<decltype(kind)::value>(value, incoming); });
}

// ---- on the host ----

struct FilterArguments {
  const Tensor &x, &bank;
  std::optional<Tensor> bias;  // contiguous
  FilterSizes size;
  Activation activation;
  bool tf32;

  template <class T>
  const T* bias_data() const {
    return bias ? bias->const_data_ptr<T>() : nullptr;
  }
  double share() const { return 1.0 / static_cast<double>(size.S); }
};

struct FilterGradients {
  std::optional<Tensor> x, bank, bias;  // what is wanted
};

// Calls run(first, count) for all transforms, so many at a time as are written.
template <class Run>
void by_transforms(const FilterSizes& s, const Run& run) {
  const int64_t max_count = std::clamp<int64_t>(kMaxActivations / (s.N * s.H), 1, s.S);
  for (int64_t first = 0; first < s.S; first += max_count) run(first, std::min(max_count, s.S - first));
}

inline void add_to(std::optional<Tensor>& total, bool first, const Tensor& part) {
  total = first ? part : library::plus(*total, part);
}

inline Tensor sum_of(const Tensor& a, std::initializer_list<int64_t> axes) {
  return torch::stable::sum(a, torch::headeronly::IntHeaderOnlyArrayRef(axes.begin(), axes.size()));
}

// What z is made into, in its place.
template <class T>
void make_slopes(const Device& device, const FilterArguments& args, const Tensor& grad, const Tensor& z) {
  const FilterSizes& s = args.size;
  launch(device, "averaged_filters (slopes)", slopes_kernel<T>, ceil_div(z.numel(), int64_t{kElementThreads}), kElementThreads,
         0, z.mutable_data_ptr<T>(), args.bias_data<T>(), grad.const_data_ptr<T>(), grad.stride(0), grad.stride(1), z.numel(),
         s.N, s.H, args.activation, static_cast<T>(args.share()));
}

namespace tensor_cores {

// x and the bank as operands of products: batches are transforms.
ProductSource images(const FilterArguments& args) {
  return {args.x.const_data_ptr<float>(), 0, args.x.stride(0), args.x.stride(1)};
}

ProductSource filters(const FilterArguments& args, int64_t first) {
  const Tensor& bank = args.bank;
  return {bank.const_data_ptr<float>() + first * bank.stride(0), bank.stride(0), bank.stride(1), bank.stride(2)};
}

void forward(const Device& device, const FilterArguments& args, const Tensor& out) {
  constexpr size_t kShared = shared_size(ProductTile::kStages * ProductTile::kStage * sizeof(float));
  constexpr int64_t kSide = ProductTile::kSide;
  const FilterSizes& s = args.size;
  const int64_t tiles = ceil_div(s.N, kSide) * ceil_div(s.H, kSide);
  const int64_t splits = std::clamp<int64_t>(2 * device.multiprocessors() / tiles, 1, s.S);
  const Tensor parts = splits > 1 ? device_empty(out, {splits, s.N, s.H}) : out;
  const FiltersWork work{product_operand<Major::k>(images(args), s.N, s.D),
                         product_operand<Major::k>(filters(args, 0), s.H, s.D),
                         args.bias_data<float>(),
                         parts.mutable_data_ptr<float>(),
                         static_cast<float>(args.share()),
                         args.activation,
                         static_cast<int>(splits),
                         static_cast<int>(s.S),
                         static_cast<int>(s.N),
                         static_cast<int>(s.H),
                         static_cast<int>(s.D)};
  with_tf32(args.tf32, [&](auto kind) {
    launch(device, "averaged_filters", averaged_filters_kernel<decltype(kind)::value>, tiles * splits, ProductTile::kThreads,
           kShared, work);
  });
  if (splits == 1) return;
  launch(device, "averaged_filters (sums of splits)", sum_parts_kernel<float>, ceil_div(out.numel(), int64_t{256}), 256, 0,
         parts.const_data_ptr<float>(), out.mutable_data_ptr<float>(), splits, out.numel());
}

template <Major A, Major B>
void multiply(const Device& device, const FilterArguments& args, const ProductSizes& size, const ProductSource& a,
              const ProductSource& b, const ProductTarget& to) {
  ProductWork work = product_work<A, B>(size, a, b, to);
  const ProductSplits splits(device, "averaged_filters (splits)", args.x, {&work});
  with_tf32(args.tf32, [&](auto kind) {
    launch(device, "averaged_filters (products)", filters_product_kernel<A, B, decltype(kind)::value>, work.blocks.count,
           ProductTile::kThreads, ProductTile::kSharedBytes, work);
  });
}

void backward(const Device& device, const FilterArguments& args, const Tensor& grad, FilterGradients& to) {
  const FilterSizes& s = args.size;
  by_transforms(s, [&](int64_t first, int64_t count) {
    const Tensor z = device_empty(grad, {count, s.H, s.N});
    float* const slopes = z.mutable_data_ptr<float>();
    // For each s: h, n from d.
    multiply<Major::k, Major::k>(device, args, {count, s.H, s.N, s.D}, filters(args, first), images(args),
                                 {slopes, s.H * s.N, s.N});
    make_slopes<float>(device, args, grad, z);
    if (to.bank) {  // for each s: h, d from n
      multiply<Major::k, Major::mn>(device, args, {count, s.H, s.D, s.N}, {slopes, s.H * s.N, s.N, 1},
                                    {args.x.const_data_ptr<float>(), 0, args.x.stride(1), args.x.stride(0)},
                                    {to.bank->mutable_data_ptr<float>() + first * s.H * s.D, s.H * s.D, s.D});
    }
    if (to.x) {  // n, d from s and h
      Tensor bank = library::part(args.bank, 0, first, count);
      if (count > 1 && bank.stride(0) != s.H * bank.stride(1)) bank = torch::stable::contiguous(bank);
      const Tensor part = device_empty(grad, {s.N, s.D});
      multiply<Major::mn, Major::mn>(device, args, {1, s.N, s.D, count * s.H}, {slopes, 0, 1, s.N},
                                     {bank.const_data_ptr<float>(), 0, bank.stride(2), bank.stride(1)},
                                     {part.mutable_data_ptr<float>(), 0, s.D});
      add_to(to.x, first == 0, part);
    }
    if (to.bias) add_to(to.bias, first == 0, sum_of(z, {0, 2}));
  });
}

}  // namespace tensor_cores

namespace in_double {

// z without the bias, (count, H, N), of transforms from `first` on.
Tensor sums(const FilterArguments& args, int64_t first, int64_t count) {
  const Tensor z = device_empty(args.x, {count, args.size.H, args.size.N});
  const Tensor images = torch::stable::unsqueeze(library::swapped(args.x, 0, 1), 0);
  for (int64_t i = 0; i < count; ++i) {
    library::multiply(library::part(args.bank, 0, first + i, 1), images, library::part(z, 0, i, 1));
  }
  return z;
}

void forward(const Device& device, const FilterArguments& args, const Tensor& out) {
  const FilterSizes& s = args.size;
  by_transforms(s, [&](int64_t first, int64_t count) {
    const Tensor z = sums(args, first, count);
    const double factor = first + count == s.S ? args.share() : 1.0;
    launch(device, "averaged_filters (averages)", average_kernel, ceil_div(out.numel(), int64_t{kElementThreads}),
           kElementThreads, 0, z.const_data_ptr<double>(), args.bias_data<double>(), out.mutable_data_ptr<double>(), count, s.N,
           s.H, args.activation, first == 0, factor);
  });
}

void backward(const Device& device, const FilterArguments& args, const Tensor& grad, FilterGradients& to) {
  const FilterSizes& s = args.size;
  by_transforms(s, [&](int64_t first, int64_t count) {
    const Tensor slopes = sums(args, first, count), x = torch::stable::unsqueeze(args.x, 0);
    make_slopes<double>(device, args, grad, slopes);
    for (int64_t i = 0; i < count; ++i) {
      const Tensor own = library::part(slopes, 0, i, 1);
      if (to.bank) library::multiply(own, x, library::part(*to.bank, 0, first + i, 1));
      if (to.x) {
        const Tensor images = device_empty(grad, {1, s.N, s.D});
        library::multiply(library::swapped(own, 1, 2), library::part(args.bank, 0, first + i, 1), images);
        add_to(to.x, first + i == 0, torch::stable::squeeze(images, 0));
      }
    }
    if (to.bias) add_to(to.bias, first == 0, sum_of(slopes, {0, 2}));
  });
}

}  // namespace in_double

void check_axes(const char* op, const FilterSizes& s) {
  constexpr int64_t kLargest = std::numeric_limits<int>::max() - ProductTile::kSide;
  ELLA_CHECK(std::max({s.N, s.S, s.H, s.D}) <= kLargest, op, ": axes on CUDA are up to ", kLargest);
}

std::optional<Tensor> contiguous(const std::optional<Tensor>& bias) {
  return bias ? std::optional<Tensor>(torch::stable::contiguous(*bias)) : std::nullopt;
}

std::tuple<Tensor, Tensor> averaged_filters(const Tensor& x, const Tensor& bank, std::optional<Tensor> bias, int64_t activation,
                                            bool, bool allow_tf32) {
  constexpr const char* op = "averaged_filters";
  const FilterSizes s = check_filters(op, x, bank, bias);
  const Activation kind = checked_activation(op, activation);
  check_axes(op, s);
  const Device device(x);
  const Tensor out = device_empty(x, {s.N, s.H}), none = empty_of(x, {0}, ScalarType::Byte);
  if (out.numel() == 0) return {out, none};
  const FilterArguments args{x, bank, contiguous(bias), s, kind, allow_tf32};
  if (x.scalar_type() == ScalarType::Double) {
    in_double::forward(device, args, out);
  } else {
    tensor_cores::forward(device, args, out);
  }
  return {out, none};
}

std::tuple<Tensor, Tensor, Tensor> averaged_filters_backward(const Tensor& grad, const Tensor& x, const Tensor& bank,
                                                             std::optional<Tensor> bias, std::optional<Tensor> kept,
                                                             int64_t activation, bool wants_x, bool wants_bank, bool wants_bias,
                                                             bool allow_tf32) {
  constexpr const char* op = "averaged_filters_backward";
  const FilterSizes s = check_filter_gradients(op, grad, x, bank, bias);
  const Activation kind = checked_activation(op, activation);
  check_axes(op, s);
  ELLA_CHECK(!kept || kept->numel() == 0, op, ": kept must be empty, nothing is kept on CUDA");
  const Device device(x);
  const bool empty = s.N == 0 || s.H == 0;
  const auto make = [&](bool wanted, std::initializer_list<int64_t> shape) {
    std::optional<Tensor> result;
    if (wanted) result = empty ? zeros_of(x, shape) : device_empty(x, shape);
    return result;
  };
  FilterGradients to{make(wants_x, {s.N, s.D}), make(wants_bank, {s.S, s.H, s.D}), make(wants_bias, {s.H})};
  if (!empty && (wants_x || wants_bank || wants_bias)) {
    const FilterArguments args{x, bank, contiguous(bias), s, kind, allow_tf32};
    if (x.scalar_type() == ScalarType::Double) {
      in_double::backward(device, args, grad, to);
    } else {
      tensor_cores::backward(device, args, grad, to);
    }
  }
  const auto result = [&](const std::optional<Tensor>& t) { return t ? *t : device_empty(x, {0}); };
  return {result(to.x), result(to.bank), result(to.bias)};
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) {
  m.impl("averaged_filters", TORCH_BOX(&averaged_filters));
  m.impl("averaged_filters_backward", TORCH_BOX(&averaged_filters_backward));
}

}  // namespace
}  // namespace ella

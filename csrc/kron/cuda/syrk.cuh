// factor[g] += alpha * sum_r a a^T for the rows a = rows(r, g, :), the one computation behind both Kronecker accumulations. How
// an element of a row is found is the `Rows` policy's affair (strides, or a patch of an image):
//   using Row, Column; const T* address(Row, Column)
//   Row row(int64_t r), Column column(int64_t g, int64_t i): the parts of the address that depend on one of them; computed also
//   for rows and columns beyond the last, whose addresses are then not read
//   bool rows_adjacent(): neighbouring rows, not neighbouring columns, are neighbours in memory; kRowsAdjacent: for sure
//   bool vectors(int64_t groups, int64_t d): four columns from a multiple of 4 on are always 16 aligned bytes (not
//   kRowsAdjacent)
#pragma once

#include "common/cuda_path.h"
#include "kron/cuda/syrk_scalar.cuh"
#include "kron/cuda/syrk_tensor.cuh"
#ifdef ELLA_WARPGROUPS
#include "kron/cuda/syrk_warpgroup.cuh"
#endif

namespace ella {

template <class T, int BT, class Rows>
void scalar_syrk(const Device& device, const char* name, const Rows& rows, const Tensor& factor, int64_t groups, int64_t d,
                 int64_t count, double alpha, int64_t split, bool) {
  launch_syrk<T, SyrkScalarTile<T, BT>>(device, name, syrk_scalar_kernel<T, BT, Rows>, rows, factor, groups, d, count, alpha,
                                        split);
}

// Calls run with the way of copying that the rows allow and the way of multiplying, as types.
template <class Rows, class Run>
void with_kinds(const Rows& rows, int64_t groups, int64_t d, bool tf32, const Run& run) {
  with_tf32(tf32, [&](auto kind) {
    if constexpr (Rows::kRowsAdjacent) {
      run(std::integral_constant<SyrkCopy, SyrkCopy::rows>{}, kind);
    } else if (rows.rows_adjacent()) {
      run(std::integral_constant<SyrkCopy, SyrkCopy::rows>{}, kind);
    } else if (rows.vectors(groups, d)) {
      run(std::integral_constant<SyrkCopy, SyrkCopy::vectors>{}, kind);
    } else {
      run(std::integral_constant<SyrkCopy, SyrkCopy::columns>{}, kind);
    }
  });
}

template <int BT, class Rows>
void tensor_syrk(const Device& device, const char* name, const Rows& rows, const Tensor& factor, int64_t groups, int64_t d,
                 int64_t count, double alpha, int64_t split, bool tf32) {
  with_kinds(rows, groups, d, tf32, [&](auto copy, auto kind) {
    const auto kernel = syrk_tensor_kernel<BT, decltype(copy)::value, decltype(kind)::value, Rows>;
    launch_syrk<float, SyrkTensorTile<BT>>(device, name, kernel, rows, factor, groups, d, count, alpha, split);
  });
}

#ifdef ELLA_WARPGROUPS
template <class Rows>
void warpgroup_syrk(const Device& device, const char* name, const Rows& rows, const Tensor& factor, int64_t groups, int64_t d,
                    int64_t count, double alpha, int64_t split, bool tf32) {
  with_kinds(rows, groups, d, tf32, [&](auto copy, auto kind) {
    const auto kernel = syrk_warpgroup_kernel<decltype(copy)::value, decltype(kind)::value, Rows>;
    launch_syrk<float, SyrkWarpgroupTile>(device, name, kernel, rows, factor, groups, d, count, alpha, split);
  });
}
constexpr bool kWarpgroupBuild = true;
#else
constexpr bool kWarpgroupBuild = false;
#endif

// The products that tiles of BT take for a block, those that are wasted included.
inline int64_t syrk_products(int64_t d, int64_t BT) {
  const int64_t side = ceil_div(d, BT);
  return side * (side + 1) / 2 * BT * BT;
}

// How a block is computed: what multiplies, the tile's rows and columns, and the splits of the rows, 0 for the launcher's
// choice.
struct SyrkPath {
  CudaPath::Product product;
  int64_t tile, split;
};

// The path for blocks of d columns; what cuda_path() fixes, or the widest tile that wastes few products, by warpgroups where
// this build and the device have them. Narrow blocks, and double, are for ordinary instructions.
inline SyrkPath syrk_path(const Device& device, const char* name, bool single, int64_t d) {
  using Product = CudaPath::Product;
  const CudaPath fixed = cuda_path();
  Product product = fixed.product;
  const bool warpgroups = kWarpgroupBuild && device.warpgroups();
  const int64_t tensor_tile = d <= 32 ? 32 : d <= 64 || 3 * syrk_products(d, 64) <= 2 * syrk_products(d, 128) ? 64 : 128;
  if (product == Product::automatic) {
    const int64_t tile = fixed.tile ? fixed.tile : tensor_tile;
    const bool narrow = d < 32 && tile < 128;
    product = !single || narrow ? Product::scalar : tile == 128 && warpgroups ? Product::wgmma : Product::mma;
  }
  ELLA_CHECK(product == Product::scalar || single, name,
             ": ELLA_CUDA_PATH: product=mma and product=wgmma multiply float32 only, got float64 rows");
  ELLA_CHECK(
      product != Product::wgmma || kWarpgroupBuild, name,
      ": ELLA_CUDA_PATH: product=wgmma needs a build for compute capability 9.0a, which TORCH_CUDA_ARCH_LIST did not name");
  ELLA_CHECK(product != Product::wgmma || warpgroups, name,
             ": ELLA_CUDA_PATH: product=wgmma needs a device of compute capability 9.0");
  const int64_t scalar_tile = d <= 16 ? 16 : d <= 32 ? 32 : 64;
  const int64_t natural = product == Product::scalar ? scalar_tile : product == Product::mma ? tensor_tile : 128;
  const int64_t tile = fixed.tile ? fixed.tile : natural;
  const bool there = product == Product::scalar ? tile == 16 || tile == 32 || tile == 64
                     : product == Product::mma  ? tile == 32 || tile == 64 || tile == 128
                                                : tile == 128;
  ELLA_CHECK(there, name, ": ELLA_CUDA_PATH: tile must be ",
             product == Product::scalar ? "16, 32 or 64 for ordinary instructions"
             : product == Product::mma  ? "32, 64 or 128 for products of warps"
                                        : "128 for products of warpgroups",
             ", got ", tile);
  ELLA_CHECK(tile >= 64 || d <= tile, name, ": ELLA_CUDA_PATH: tile=", tile, " is for blocks of at most ", tile,
             " columns, got ", d);
  return {product, tile, fixed.split};
}

// factor (groups, d, d), of T or double, += alpha * sum over `count` rows; `count` and the factor are not empty. `tf32`: tensor
// cores may round the rows to TF32, which changes nothing where they are TF32 numbers already.
template <class T, class Rows>
void syrk(const Device& device, const char* name, const Rows& rows, const Tensor& factor, int64_t groups, int64_t d,
          int64_t count, double alpha, bool tf32) {
  constexpr bool kSingle = sizeof(T) == sizeof(float);
  const SyrkPath path = syrk_path(device, name, kSingle, d);
  const auto run = [&](const auto& with) { with(device, name, rows, factor, groups, d, count, alpha, path.split, tf32); };
  if (path.product == CudaPath::Product::scalar) {
    run(path.tile == 16 ? scalar_syrk<T, 16, Rows> : path.tile == 32 ? scalar_syrk<T, 32, Rows> : scalar_syrk<T, 64, Rows>);
    return;
  }
  if constexpr (kSingle) {
#ifdef ELLA_WARPGROUPS
    if (path.product == CudaPath::Product::wgmma) {
      run(warpgroup_syrk<Rows>);
      return;
    }
#endif
    run(path.tile == 32 ? tensor_syrk<32, Rows> : path.tile == 64 ? tensor_syrk<64, Rows> : tensor_syrk<128, Rows>);
  }
}

}  // namespace ella

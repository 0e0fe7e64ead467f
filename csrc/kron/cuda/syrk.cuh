// factor[g] += alpha * sum_r a a^T for the rows a = rows(r, g, :), the one computation behind both Kronecker accumulations. How
// an element of a row is found is the `Rows` policy's affair (strides, or a patch of an image):
//   using Row, Column; const T* address(Row, Column)
//   Row row(int64_t r), Column column(int64_t g, int64_t i): the parts of the address that depend on one of them; computed also
//   for rows and columns beyond the last, whose addresses are then not read
//   bool inside(Row, Column): whether the element is there; else it is zero, and its address is not read
//   bool rows_adjacent(): neighbouring rows, not neighbouring columns, are neighbours in memory; kRowsAdjacent: for sure
//   bool vectors(int64_t groups, int64_t d): four columns from a multiple of 4 on are always 16 aligned bytes (not
//   kRowsAdjacent)
#pragma once

#include <tuple>
#include <utility>

#include "common/cuda_path.h"
#include "kron/cuda/syrk_scalar.cuh"
#include "kron/cuda/syrk_tensor.cuh"
#ifdef ELLA_WARPGROUPS
#include "kron/cuda/syrk_warpgroup.cuh"
#endif

namespace ella {

#ifdef ELLA_WARPGROUPS
constexpr bool kWarpgroupBuild = true;
#else
constexpr bool kWarpgroupBuild = false;
#endif

// Calls f with the one of the numbers that `tile` is, as a type.
template <int First, int... Others, class F>
void with_tile(int64_t tile, const F& f) {
  if constexpr (sizeof...(Others) > 0) {
    if (tile != First) return with_tile<Others...>(tile, f);
  }
  f(std::integral_constant<int, First>{});
}

// The products that tiles of BT take for a block, those that are wasted included.
inline int64_t syrk_products(int64_t d, int64_t BT) {
  const int64_t side = ceil_div(d, BT);
  return side * (side + 1) / 2 * BT * BT;
}

// How a block is computed: what multiplies, and the tile's rows and columns.
struct SyrkPath {
  CudaPath::Product product;
  int64_t tile;
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
  return {product, tile};
}

// What sums of one launch have in common: the kernel, and whether their factors are wider than the rows.
struct SyrkKind {
  CudaPath::Product product;
  int64_t tile;
  SyrkCopy copy;  // this and tf32: of tensor cores
  bool tf32, wide;

  template <class Rows>
  SyrkKind(const SyrkPath& path, const SyrkRequest<Rows>& r, bool widens)
      : product(path.product), tile(path.tile), copy(SyrkCopy::rows), tf32(false), wide(widens) {
    if (product == CudaPath::Product::scalar) return;
    tf32 = r.tf32;
    if constexpr (!Rows::kRowsAdjacent) {
      if (!r.rows.rows_adjacent()) copy = r.rows.vectors(r.groups, r.d) ? SyrkCopy::vectors : SyrkCopy::columns;
    }
  }

  bool operator==(const SyrkKind& o) const {
    return std::tie(product, tile, copy, tf32, wide) == std::tie(o.product, o.tile, o.copy, o.tf32, o.wide);
  }
};

// Calls run(copy, tf32) with the two as types.
template <class Rows, class Run>
void with_kinds(const SyrkKind& kind, const Run& run) {
  with_tf32(kind.tf32, [&](auto tf32) {
    if constexpr (!Rows::kRowsAdjacent) {
      if (kind.copy == SyrkCopy::vectors) return run(std::integral_constant<SyrkCopy, SyrkCopy::vectors>{}, tf32);
      if (kind.copy == SyrkCopy::columns) return run(std::integral_constant<SyrkCopy, SyrkCopy::columns>{}, tf32);
    }
    run(std::integral_constant<SyrkCopy, SyrkCopy::rows>{}, tf32);
  });
}

// Adds all of the requests, whose factors are different ones, those of one kind together.
template <class T, class Rows>
void syrk(const Device& device, const char* name, std::vector<SyrkRequest<Rows>> requests) {
  constexpr bool kSingle = sizeof(T) == sizeof(float);
  const int64_t split = cuda_path().split;
  const auto kind_of = [&](const SyrkRequest<Rows>& r) {
    const bool wide = kSingle && r.factor.scalar_type() == ScalarType::Double;
    return SyrkKind(syrk_path(device, name, kSingle, r.d), r, wide);
  };
  while (!requests.empty()) {
    const SyrkKind kind = kind_of(requests.front());
    std::vector<SyrkRequest<Rows>> own, others;
    for (const SyrkRequest<Rows>& r : requests) (kind_of(r) == kind ? own : others).push_back(r);
    requests = others;
    if (kind.product == CudaPath::Product::scalar) {
      with_tile<16, 32, 64>(kind.tile, [&](auto tile) {
        constexpr int BT = decltype(tile)::value;
        launch_syrk<T, SyrkScalarTile<T, BT>>(device, name, syrk_scalar_kernel<T, BT, Rows>, kind.wide, own, split);
      });
      continue;
    }
    if constexpr (kSingle) {
      with_kinds<Rows>(kind, [&](auto copy, auto tf32) {
        constexpr SyrkCopy kCopy = decltype(copy)::value;
        constexpr Tf32 kTf32 = decltype(tf32)::value;
#ifdef ELLA_WARPGROUPS
        if (kind.product == CudaPath::Product::wgmma) {
          launch_syrk<T, SyrkWarpgroupTile>(device, name, syrk_warpgroup_kernel<kCopy, kTf32, Rows>, kind.wide, own, split);
          return;
        }
#endif
        with_tile<32, 64, 128>(kind.tile, [&](auto tile) {
          constexpr int BT = decltype(tile)::value;
          launch_syrk<T, SyrkTensorTile<BT>>(device, name, syrk_tensor_kernel<BT, kCopy, kTf32, Rows>, kind.wide, own, split);
        });
      });
    }
  }
}

// Requests that wait for others to join them, until run().
template <class T, class Rows>
class SyrkQueue {
 public:
  using Number = T;

  SyrkQueue(const Device& device, const char* name) : device_(device), name_(name) {}

  // Sums of one factor are added in the order in which they come.
  void add(const SyrkRequest<Rows>& request) {
    settle(request.factor);
    waiting_.push_back(request);
  }

  // As run(), where a factor that waits has memory in common with this one.
  void settle(const Tensor& factor) {
    const auto begin = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data_ptr()); };
    const auto end = [&](const Tensor& t) { return begin(t) + t.numel() * t.element_size(); };
    for (const SyrkRequest<Rows>& other : waiting_) {
      if (begin(other.factor) < end(factor) && begin(factor) < end(other.factor)) return run();
    }
  }

  void run() { syrk<T>(device_, name_, std::exchange(waiting_, {})); }

 private:
  const Device& device_;
  const char* const name_;
  std::vector<SyrkRequest<Rows>> waiting_;
};

#ifndef ELLA_MAX_WIDENED_ELEMENTS
#define ELLA_MAX_WIDENED_ELEMENTS (1 << 22)
#endif
constexpr int64_t kMaxWidened = ELLA_MAX_WIDENED_ELEMENTS;  // copied at a time: 16 MiB of an H100's 50, an A100's 40

// Calls add(some, copied) for the rows x (N, ...) of an accumulation: those of float32 once; those of 16 bits as copies, so few
// that they stay in the second-level cache until the products, or of `min_count` rows. TF32 holds every 16-bit number, so that
// one product of tensor cores is exact where float32 takes three.
template <class Add>
void for_widened(Tensor x, int64_t min_count, const Add& add) {
  if (x.scalar_type() == ScalarType::Float) return add(x, false);
  const int64_t at_once = std::max({kMaxWidened * x.size(0) / x.numel(), min_count, int64_t{1}});
  for (int64_t first = 0; first < x.size(0); first += at_once) {
    const Tensor some = torch::stable::narrow(x, 0, first, std::min(at_once, x.size(0) - first));
    add(torch::stable::to(some, ScalarType::Float), true);
  }
}

}  // namespace ella

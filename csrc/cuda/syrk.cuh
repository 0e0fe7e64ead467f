// factor[g] += alpha * sum_r a a^T for the rows a = rows(r, g, :), the one computation behind both Kronecker accumulations. How
// an element of a row is found is the `Rows` policy's affair (strides, or a patch of an image):
//   using Row, Column; const T* address(Row, Column)
//   Row row(int64_t r), Column column(int64_t g, int64_t i): the parts of the address that depend on one of them; computed also
//   for rows and columns beyond the last, whose addresses are then not read
//   bool rows_adjacent(): neighbouring rows, not neighbouring columns, are neighbours in memory; kRowsAdjacent: for sure
//   bool vectors(int64_t groups, int64_t d): four columns from a multiple of 4 on are always 16 aligned bytes (not
//   kRowsAdjacent)
#pragma once

#include "syrk_scalar.cuh"
#include "syrk_tensor.cuh"
#ifdef ELLA_WARPGROUPS
#include "syrk_warpgroup.cuh"
#endif

namespace ella {

template <class T, int BT, class Rows>
void scalar_syrk(const Device& device, const char* name, const Rows& rows, const Tensor& factor, int64_t groups, int64_t d,
                 int64_t count, double alpha) {
  launch_syrk<T, SyrkScalarTile<T, BT>>(device, name, syrk_scalar_kernel<T, BT, Rows>, rows, factor, groups, d, count, alpha);
}

// Calls run with the way of copying that the rows allow, as a type.
template <class Rows, class Run>
void with_copy(const Rows& rows, int64_t groups, int64_t d, const Run& run) {
  if constexpr (Rows::kRowsAdjacent) {
    run(std::integral_constant<SyrkCopy, SyrkCopy::rows>{});
  } else if (rows.rows_adjacent()) {
    run(std::integral_constant<SyrkCopy, SyrkCopy::rows>{});
  } else if (rows.vectors(groups, d)) {
    run(std::integral_constant<SyrkCopy, SyrkCopy::vectors>{});
  } else {
    run(std::integral_constant<SyrkCopy, SyrkCopy::columns>{});
  }
}

template <int BT, class Rows>
void tensor_syrk(const Device& device, const char* name, const Rows& rows, const Tensor& factor, int64_t groups, int64_t d,
                 int64_t count, double alpha) {
  with_copy(rows, groups, d, [&](auto copy) {
    launch_syrk<float, SyrkTensorTile<BT>>(device, name, syrk_tensor_kernel<BT, decltype(copy)::value, Rows>, rows, factor,
                                           groups, d, count, alpha);
  });
}

// The widest tiles: by warpgroups where this build and the device have them.
template <class Rows>
void widest_syrk(const Device& device, const char* name, const Rows& rows, const Tensor& factor, int64_t groups, int64_t d,
                 int64_t count, double alpha) {
#ifdef ELLA_WARPGROUPS
  if (device.warpgroups()) {
    with_copy(rows, groups, d, [&](auto copy) {
      launch_syrk<float, SyrkWarpgroupTile>(device, name, syrk_warpgroup_kernel<decltype(copy)::value, Rows>, rows, factor,
                                            groups, d, count, alpha);
    });
    return;
  }
#endif
  tensor_syrk<128>(device, name, rows, factor, groups, d, count, alpha);
}

// The products that tiles of BT take for a block, those that are wasted included.
inline int64_t syrk_products(int64_t d, int64_t BT) {
  const int64_t side = ceil_div(d, BT);
  return side * (side + 1) / 2 * BT * BT;
}

// factor (groups, d, d), of T or double, += alpha * sum over `count` rows; `count` and the factor are not empty.
template <class T, class Rows>
void syrk(const Device& device, const char* name, const Rows& rows, const Tensor& factor, int64_t groups, int64_t d,
          int64_t count, double alpha) {
  if (d <= 16) {
    scalar_syrk<T, 16>(device, name, rows, factor, groups, d, count, alpha);
  } else if (sizeof(T) == 8 ? d <= 32 : d < 32) {
    scalar_syrk<T, 32>(device, name, rows, factor, groups, d, count, alpha);
  } else if constexpr (sizeof(T) == 8) {
    scalar_syrk<T, 64>(device, name, rows, factor, groups, d, count, alpha);
  } else if (d == 32) {
    tensor_syrk<32>(device, name, rows, factor, groups, d, count, alpha);
  } else if (d <= 64 || 3 * syrk_products(d, 64) <= 2 * syrk_products(d, 128)) {
    tensor_syrk<64>(device, name, rows, factor, groups, d, count, alpha);
  } else {
    widest_syrk(device, name, rows, factor, groups, d, count, alpha);
  }
}

}  // namespace ella

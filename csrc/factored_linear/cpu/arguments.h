// What F-FC's forward and backward on the CPU share: how they read their arguments, and the intermediate z.
//
// A sum over channels or images is a product with the images, or with the positions, in the lanes of vectors. A sum over
// positions can be taken along the rows as they lie in memory, lanes being added at the end (`row_products`), or be a product
// with a panel, the rows transposed. The first costs three operations for each of its results, the second about one for each
// element of the panel.
#pragma once

#include <algorithm>

#include "cpu/buffer.h"
#include "cpu/simd/kernels.h"
#include "factored_linear/plan.h"

namespace ella {

template <class T>
struct Array3 {
  explicit Array3(const Tensor& t) : data(t.const_data_ptr<T>()), s0(t.stride(0)), s1(t.stride(1)), s2(t.stride(2)) {}
  const T* at(int64_t i, int64_t j) const { return data + i * s0 + j * s1; }
  const T* data;
  int64_t s0, s1, s2;
};

template <class T>
struct Array1 {
  explicit Array1(const std::optional<Tensor>& t)
      : data(t ? t->const_data_ptr<T>() : nullptr), stride(t && t->size(0) > 1 ? t->stride(0) : 0) {}
  const T* from(int64_t i) const { return data ? data + i * stride : nullptr; }
  const T* data;
  int64_t stride;
};

// From one output channel's z, of so many input channels, to the next one's, and from one input channel's dz to the next one's:
// an odd number of panel's rows, since at many even distances they would share a few lines of the first-level cache.
template <class T>
int64_t intermediate_row(const Kernels<T>& k, int64_t channels) {
  return (channels | 1) * k.width;
}

// Elements of z of all images, as the forward keeps them for the backward: [block of images][d][c][lane]; 0 where it
// keeps none.
template <class T>
int64_t kept_intermediate(const Kernels<T>& k, const FactoredLinearSizes& s) {
  const int64_t elements = ceil_divide(s.N, k.width) * s.D * intermediate_row(k, s.C);
  return factored_linear_keeps(s, elements) ? elements : 0;
}

// Whether vectors can run along the last axis of an array of `size` positions.
template <class T>
bool whole_vectors(const Kernels<T>& k, int64_t size, const Array3<T>& array) {
  return size > 0 && size % k.vector == 0 && array.s2 == 1;
}

// Whether results for `size` positions are computed with these in the lanes; less than two vectors make poor tiles.
template <class T>
bool in_lanes(const Kernels<T>& k, int64_t size, const Array3<T>& weight) {
  return whole_vectors(k, size, weight) && size >= 2 * k.vector;
}

// Whether sums over `size` positions, `results` of them for every row that would have to be transposed, are taken along the
// rows.
template <class T>
bool along_rows(const Kernels<T>& k, int64_t size, int64_t results, const Array3<T>& left, const Array3<T>& right) {
  return whole_vectors(k, size, left) && whole_vectors(k, size, right) && size > 4 * results;
}

// Zeros in the lanes from n on up to a whole vector, which sums over lanes take in.
template <class T>
void clear_lanes(const Kernels<T>& k, int64_t rows, int64_t n, T* out, int64_t out_row) {
  for (int64_t i = 0; i < rows && n % k.vector != 0; ++i) {
    std::fill(out + i * out_row + n, out + i * out_row + ceil_divide(n, k.vector) * k.vector, T(0));
  }
}

// out[i * out_row + lane] = init[i * init_stride], or 0 without init, for n lanes, and zeros up to a whole vector.
template <class T>
void fill_rows(const Kernels<T>& k, int64_t rows, int64_t n, const T* init, int64_t init_stride, T* out, int64_t out_row) {
  for (int64_t i = 0; i < rows; ++i) {
    std::fill_n(out + i * out_row, n, init ? init[i * init_stride] : T(0));
  }
  clear_lanes(k, rows, n, out, out_row);
}

// z of one block of images, a channel c at a time.
template <class T>
class Intermediate {
 public:
  Intermediate(const FactoredLinearSizes& s, const Tensor& x, const Tensor& weight_in, const std::optional<Tensor>& bias_in)
      : k_(kernels<T>()), s_(s), x_(x), u_(weight_in), bias_(bias_in), rows_(along_rows(k_, s.X, s.D, x_, u_)) {}

  // Elements of a channel's panel, which serves all output channels of the images it was made for.
  int64_t panel_size() const { return rows_ ? 0 : s_.X * k_.width; }

  // z[d0 .. d0 + rows][c] of n images from n0 on, to z + i * z_row. `fresh`: the images' panel is to be made.
  void compute(int64_t n0, int64_t n, int64_t d0, int64_t rows, int64_t c, bool fresh, T* panel, T* z, int64_t z_row) const {
    const T* bias = bias_.from(d0);
    if (rows_) {
      fill_rows(k_, rows, n, bias, bias_.stride, z, z_row);
      k_.row_products(rows, n, s_.X, u_.at(d0, c), u_.s0, x_.at(n0, c), x_.s0, z, z_row);
      return;
    }
    if (fresh) k_.pack(n, s_.X, x_.at(n0, c), x_.s0, x_.s2, panel);
    k_.product(rows, n, s_.X, u_.at(d0, c), u_.s0, u_.s2, panel, k_.width, bias, bias_.stride, 0, z, z_row, false, false);
    clear_lanes(k_, rows, n, z, z_row);
  }

 private:
  const Kernels<T>& k_;
  const FactoredLinearSizes s_;
  const Array3<T> x_, u_;
  const Array1<T> bias_;
  const bool rows_;
};

}  // namespace ella

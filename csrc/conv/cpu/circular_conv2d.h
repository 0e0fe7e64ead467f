// What other CPU ops use of circular_conv2d_weight_grad.cpp.
#pragma once

#include <vector>

#include "common/stable.h"
#include "conv/cpu/circular_images.h"
#include "cpu/buffer.h"

namespace ella {

// Sums over n, h, w of x[n,d,h,w] x[n,c,(h+i-half_h) mod H,(w+j-half_w) mod W], or of zero outside the image in place of what
// lies around, of which those with c >= d are wanted, for the others follow from them, and those that are equal under circular
// padding are there once.
struct Lags {
  Buffer<double> sums;      // (C, C, count); what is not wanted is undefined
  int64_t count;            // of a pair of channels
  std::vector<int64_t> at;  // of (i, j) in a kernel of (2 half_h + 1) rows
};

Lags circular_autocorrelation(const Tensor& x, int64_t half_h, int64_t half_w);

// With zeros around images (N, C, H, W), H > half_h and W > half_w; T is float or double.
template <class T>
Lags zero_autocorrelation(const Images<T>& x, int64_t N, int64_t C, int64_t H, int64_t W, int64_t half_h, int64_t half_w);

}  // namespace ella

// What other CPU ops use of circular_conv2d_weight_grad.cpp.
#pragma once

#include "../common/stable.h"

namespace ella {

// Sums over n, h, w of x[n,d,h,w] x[n,c,(h+i-half_h) mod H,(w+j-half_w) mod W], (C, C, 2 half_h + 1, 2 half_w + 1). Entries
// with c < d mean nothing: they follow from those with c > d.
std::vector<double> circular_autocorrelation(const Tensor& x, int64_t half_h, int64_t half_w);

}  // namespace ella

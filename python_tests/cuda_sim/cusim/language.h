// The words of CUDA C++ that our kernels use, for a host compiler.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

inline dim3 threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, blockDim, gridDim;

using std::ceil;
using std::exp;
using std::fabs;
using std::floor;
using std::fma;
using std::log;
using std::log1p;
using std::max;
using std::min;

inline long long __double_as_longlong(double value) {
  long long bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline double __longlong_as_double(long long bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// One fiber runs at a time, and what it writes is seen by the others at once.
inline void __threadfence() {}

inline unsigned atomicInc(unsigned* address, unsigned last) {
  const unsigned before = *address;
  *address = before >= last ? 0 : before + 1;
  return before;
}

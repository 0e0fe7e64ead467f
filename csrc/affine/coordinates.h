// Affine maps in pixels.
#pragma once

#include <cstdint>

#ifdef __host__
#define ELLA_HOST_DEVICE __host__ __device__
#else
#define ELLA_HOST_DEVICE
#endif

namespace ella {

// Coordinates of pixels (row i, column j): column u[0] j + u[1] i + u[2] and row v[0] j + v[1] i + v[2].
struct AffineCoordinates {
  double u[3], v[3];
};

// A map of normalised coordinates in pixels. With the middles a = (W - 1) / 2 and b = (H - 1) / 2 normalised coordinates are
// (j - a) / a and (i - b) / b, and 0 on a side of one pixel; so rows of maps are multiplied by (1, a / b, a) and (b / a, 1, b).
struct AffineScales {
  double a, b;

  ELLA_HOST_DEVICE AffineScales(int64_t H, int64_t W) : a(static_cast<double>(W - 1) / 2), b(static_cast<double>(H - 1) / 2) {}
  ELLA_HOST_DEVICE double across() const { return b > 0 ? a / b : 0; }
  ELLA_HOST_DEVICE double down() const { return a > 0 ? b / a : 0; }
};

// Of six numbers by strides. `origin`: the middle's own coordinate is added; a direction of maps has none.
template <class T>
ELLA_HOST_DEVICE AffineCoordinates affine_coordinates(const T* map, int64_t stride_row, int64_t stride_column,
                                                      const AffineScales& scales, bool origin) {
  const double a = scales.a, b = scales.b;
  const T *first = map, *second = map + stride_row;
  AffineCoordinates p;
  p.u[0] = static_cast<double>(first[0]);
  p.u[1] = static_cast<double>(first[stride_column]) * scales.across();
  p.u[2] = static_cast<double>(first[2 * stride_column]) * a + ((origin ? a : 0.0) - p.u[0] * a) - p.u[1] * b;
  p.v[0] = static_cast<double>(second[0]) * scales.down();
  p.v[1] = static_cast<double>(second[stride_column]);
  p.v[2] = static_cast<double>(second[2 * stride_column]) * b + ((origin ? b : 0.0) - p.v[1] * b) - p.v[0] * a;
  return p;
}

}  // namespace ella

// Products of 32 x 32 results by a warp, of float32 numbers on tensor cores: how an operand's values come from shared memory to
// the lanes, and the sum of 16 rows.
//
// Accuracy (Tf32::split). A float is split in two TF32 numbers, a = A + a' + at most 2^-22 |a|, and a b is summed as a' B + A
// b' + A B: what is left out, a' b', is at most 2^-22 |a b|. A tensor core cuts its sums instead of rounding them, an error of
// one sign that grows with their number; so it sums 16 rows from zero, small terms first, and these sums are added to the total
// by ordinary, rounded additions. Tf32::rounded leaves a' and b' out; its sums are as accurate.
//
// Layout. Lane (g, t) = (lane / 4, lane % 4) of a warp takes from each 32 columns the four at 4 g, and from 16 rows four: by
// one vector read for each row or each column, whichever is adjacent in shared memory. To the tensor core, column 4 g + j is
// row g of the j-th eight, so a lane's results are the neighbouring rows 4 g.. and columns 8 t..
#pragma once

#include "common/device_memory.h"
#include "common/tensor_core.h"
#include "cuda/reduce.cuh"

namespace ella {

// In a K-major operand the slot of column 4 g + j is 8 j + g: a quarter warp's vectors of 2 columns then
// start 16 banks apart.
__host__ __device__ constexpr int column_of_slot(int slot) { return slot / 32 * 32 + slot % 8 * 4 + slot / 8 % 4; }

// A lane's values of an operand in 16 rows: value[q][j] is the q-th of its four rows, column 4 g + j.
struct Fragment {
  float value[4][4];
};

// Columns first.. first + 31 of the group-th 16 rows. The q-th row of lane (g, t) is 4 t + q in a K-major operand
//   (column in slot s at group * Shape::kGroupStride + s * Shape::kColumnStride),
// and the one in place 4 q + t in an MN-major one
//   (place r at r * Shape::kStride).
template <class Shape, bool KMajor>
__device__ __forceinline__ Fragment read_fragment(SharedArray<float> operand, int group, int first) {
  const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
  Fragment result;
  if constexpr (KMajor) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float rows[4];
      load_vector(rows, operand + (group * Shape::kGroupStride + (first + 8 * j + g) * Shape::kColumnStride + 4 * t));
#pragma unroll
      for (int q = 0; q < 4; ++q) result.value[q][j] = rows[q];
    }
  } else {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      load_vector(result.value[q], operand + ((16 * group + 4 * q + t) * Shape::kStride + first + 4 * g));
    }
  }
  return result;
}

// A fragment as the tensor cores get it.
template <Tf32 TF32>
struct Tf32Fragment {
  float big[4][4], small[4][4];  // small: where elements are split

  __device__ __forceinline__ explicit Tf32Fragment(const Fragment& from) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (TF32 == Tf32::split) {
          split_tf32(from.value[q][j], big[q][j], small[q][j]);
        } else {
          big[q][j] = round_tf32(from.value[q][j]);
        }
      }
    }
  }
};

// A lane's results of 32 x 32, as mma_tf32 has them: [16 rows][8 columns][]; result_row and result_column say where they lie.
using Results = float[2][4][4];

// chain += a b over 16 rows of TF32 values laid out as by read_fragment.
__device__ __forceinline__ void multiply_fragments(Results& chain, const float (&a)[4][4], const float (&b)[4][4]) {
#pragma unroll
  for (int q = 0; q < 4; q += 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float rows[4] = {a[q][2 * i], a[q][2 * i + 1], a[q + 1][2 * i], a[q + 1][2 * i + 1]};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float columns[2] = {b[q][j], b[q + 1][j]};
        mma_tf32(chain[i][j], rows, columns);
      }
    }
  }
}

// sum += a b over 16 rows.
template <Tf32 TF32>
__device__ __forceinline__ void add_product(Results& sum, const Tf32Fragment<TF32>& a, const Tf32Fragment<TF32>& b) {
  Results chain = {};
  if constexpr (TF32 == Tf32::split) {
    multiply_fragments(chain, a.small, b.big);
    multiply_fragments(chain, a.big, b.small);
  }
  multiply_fragments(chain, a.big, b.big);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int v = 0; v < 4; ++v) sum[i][j][v] += chain[i][j][v];
    }
  }
}

// A lane's results are the rows result_row().. + 3 and the columns result_column().. + 7 of the 32 x 32, here the four columns
// of one half.
__device__ __forceinline__ int result_row() { return threadIdx.x % kWarp / 4 * 4; }
__device__ __forceinline__ int result_column() { return threadIdx.x % 4 * 8; }

__device__ __forceinline__ void result_block(const Results& sum, int half, float (&block)[4][4]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int c = 0; c < 4; ++c) block[r][c] = sum[r / 2][c][r % 2 * 2 + half];
  }
}

}  // namespace ella

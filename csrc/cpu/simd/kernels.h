// The arithmetic that is compiled once for every instruction set: a table of functions per floating type, and the choice among
// the tables by what the running processor has. The ops are written against this table and know no instruction set.
//
// A "panel" is a block of a matrix packed for the product: K rows of `width` consecutive lanes, B[k * width + lane]. Lanes
// beyond the matrix are zero up to a full vector.
#pragma once

#include <cstdint>

#include "affine/coordinates.h"
#include "common/activation.h"

namespace ella {

constexpr int64_t kPanelBytes = 256;  // of a row of a panel

// Weights of a convolution with taps one after the other, those of output d and channel c at data + d * out_channel + c *
// channel; or, where out_channel is 0, packed: by groups of output channels, the last with what is left, as
// [channels * tap_count][channels of the group].
template <class T>
struct Weights {
  const T* data;
  int64_t out_channel, channel;
};

// A convolution on one padded block of images: output vector v of channel d is bias[d] + sum_{c,t} weight[d,c,t] times the
// vector at image + c * channel_stride + in[v] + taps[t], and lies at out + d * out_channel + place[v].
template <class T>
struct Convolution {
  const T* image;
  int64_t channels, channel_stride;
  const int64_t* taps;
  int64_t tap_count;
  const int64_t* in;
  const int64_t* place;
  int64_t vectors;
  Weights<T> weight;
  const T* bias;  // or null
  T* out;
  int64_t out_channels, group, out_channel;  // group <= Kernels::rows
};

// The gradient of its weights: sums[d * sums_row + k] += sum_v sum_lane grad[d * grad_channel + at[v] + lane] times the lane of
// the vector at columns[k] + in[v], k < column_count; those with k < d * skip are not wanted.
template <class T>
struct ConvolutionGradient {
  const T* grad;
  const int64_t* at;
  int64_t out_channels, grad_channel;
  const T* const* columns;
  int64_t column_count, skip;
  const int64_t* in;
  int64_t vectors;
  double* sums;
  int64_t sums_row;
};

// Coordinates of points, and directions they move in (or null), laid out by coordinate: that of point i along axis p is
// high[p * row + i] + low[p * row + i]. In float the two parts together have the precision of a double; in double only `high`
// is read. So differences of near points are as exact as the points are, however large the coordinates.
template <class T>
struct Points {
  const T *high, *low, *direction_high, *direction_low;
  int64_t row;
};

// The norm of a column: the sum of absolute values, the sum of squares, or the largest absolute value.
enum class Norm { one, two, max };

// An image cut into cells between four pixels, in a border of zeros: (height + 1) (width + 1) of them, the one between the
// corner of the border and the first pixel first, and one of zeros behind them for whatever lies outside. A cell is four
// numbers; for pixels p, q above r, s either the coefficients p, q - p, r - p, s - r - q + p of its bilinear function, or one
// number for each of its pixels. Places are pixels of a result: the cell each looks at, how far it lies to the right and down
// in there (0 to 1), and, for a derivative along a direction of the map, how far that moves it, else null. Behind the places
// are kAffineSlack more, in the cell of zeros.
constexpr int64_t kAffineSlack = 16;

template <class T>
struct AffinePlaces {
  const int32_t* cell;
  const T *right, *down, *right_moves, *down_moves;
};

// The gradients of sum_{c,p} grad[c * grad_channel + p] value(c, p), p < count, with values as affine_sample has them.
template <class T>
struct AffineGradients {
  int64_t count, channels;
  AffinePlaces<T> places;
  const T* grad;
  int64_t grad_channel;
  const T* cells;  // coefficients, of which channel c's begin at c * cells_channel
  T* pixels;       // or null; alike, a number for each pixel: what is added to its gradient
  int64_t cells_channel;
  const T *column, *row;  // of the places, with their slack
  double*
      sums;  // or null; what is added to: the gradients in the column's coordinate times column, row and 1, and in the row's
};

// The smallest group size that makes no more groups of `count` things than groups of `max_count` would.
inline int64_t balanced_group(int64_t count, int64_t max_count) {
  const int64_t groups = (count + max_count - 1) / max_count;
  return groups == 0 ? max_count : (count + groups - 1) / groups;
}

template <class T>
struct Kernels {
  const char* name;
  int64_t width;   // lanes of a panel, kPanelBytes of them
  int64_t vector;  // lanes of a vector; width is a multiple of it
  int64_t rows;    // rows of a register tile: row counts that are multiples of it are fastest
  int64_t lanes;   // of a register tile, which may be less than a panel's

  // C[i, j] = init[i * init_row + j * init_lane] + sum_k A[i * a_row + k * a_k] B[k * b_row + j], i < m, j < n <= width, with
  // init_lane 0 or 1, init perhaps null; `add` adds the sum to C instead (init is null then). Rows of C hold whole vectors (n
  // rounded up) unless `exact`. Rows of B, and of init where init_lane is 1, always do.
  void (*product)(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_row, int64_t a_k, const T* b, int64_t b_row,
                  const T* init, int64_t init_row, int64_t init_lane, T* c, int64_t c_row, bool add, bool exact);

  // C[i * c_row + j] += sum_k A[i * a_row + k] B[j * b_row + k], i < m, j < n, k < count, a multiple of `vector`. Fastest where
  // n is a multiple of 4.
  void (*row_products)(int64_t m, int64_t n, int64_t count, const T* a, int64_t a_row, const T* b, int64_t b_row, T* c,
                       int64_t c_row);

  // sums[i * stride] += sum_lane A[i * a_row + lane] over n <= width lanes rounded up to whole vectors; short sums in T, the
  // rest in double.
  void (*lane_sums)(int64_t m, int64_t n, const T* a, int64_t a_row, double* sums, int64_t stride);

  // Blocks of size <= vector, B = vector / size of them side by side in every vector, the v-th of which lies at x + v * B *
  // size: sums[(v * (size / 2 + 1) + rotation) * vector + lane] += sum_k x[k * x_row + lane] x'[k * x_row + lane], k < count,
  // where x' is the element that lies `rotation` <= size / 2 lanes further in the same block, around its end. Reads whole
  // vectors.
  void (*block_products)(int64_t size, int64_t vectors, int64_t count, const T* x, int64_t x_row, T* sums);

  // sums[i * sums_row + j] += sum_k x[k * x_row + i] x[k * x_row + j], k < count, for i <= j < size; what is added to the sums
  // below the diagonal and, up to whole vectors, beyond `size` is of no use. Reads and writes whole vectors. Unless `copy` is
  // null, x is read once, into rows at copy + k * copy_row, and as much at `next`, in rows like those of x, is asked for.
  void (*self_products)(int64_t size, int64_t count, const T* x, int64_t x_row, const T* next, T* copy, int64_t copy_row,
                        T* sums, int64_t sums_row);

  // panel[k * width + lane] = source[lane * lane_stride + k * k_stride], lane < n, k < count; zeros up to a whole vector.
  void (*pack)(int64_t n, int64_t count, const T* source, int64_t lane_stride, int64_t k_stride, T* panel);

  // target[lane * lane_stride + k] = panel[k * width + lane], the way back.
  void (*unpack)(int64_t n, int64_t count, const T* panel, T* target, int64_t lane_stride);

  // target[j * target_row + i] = source[i * source_row + j], i < rows, j < columns.
  void (*transpose)(int64_t rows, int64_t columns, const T* source, int64_t source_row, T* target, int64_t target_row);

  // target[before + i] = source[i], i < size, continued periodically by `before` and `after` elements; size >= vector. The same
  // for `rows` rows, those of the target one after the other.
  void (*wrap_rows)(int64_t rows, const T* source, int64_t source_row, int64_t size, int64_t before, int64_t after, T* target);

  // With d = the point of a lane less point k, e = exp(-|d|^2 / 2) and delta the difference of their directions:
  // panel[k * width + lane] = e, or its derivative -(d . delta) e if `tangent`, k < count, lanes up to n rounded up to whole
  // vectors, where points of the lanes must be readable.
  void (*gaussian_panel)(int64_t n, int64_t count, int64_t coordinates, const Points<T>& lanes, const Points<T>& points,
                         bool tangent, T* panel);

  // For the panel s of `rows` rows: with t = -s e d, or its derivative s e ((d . delta) d - delta) if `hessian`, adds t to
  // lane_sums[p * width + lane] and subtracts it from row_sums[p * row_sums_row + k]. Lanes from n on up to a whole vector of s
  // must be zero.
  void (*gaussian_terms)(int64_t n, int64_t rows, int64_t coordinates, const Points<T>& lanes, const Points<T>& points,
                         bool hessian, const T* s, T* lane_sums, double* row_sums, int64_t row_sums_row);

  // sums[j] becomes the norm of x[i * row + j] over i < count and of what sums[j] stands for already, j < columns; a largest
  // size is NaN once one was.
  void (*column_norms)(Norm norm, int64_t count, int64_t columns, const T* x, int64_t row, double* sums);

  void (*convolve)(const Convolution<T>& block);
  void (*convolve_gradient)(const ConvolutionGradient<T>& block);

  // to[r * to_row + c * positions + i] = u[r * u_row + c * positions + i] v[r * v_row + c * v_step], r < rows, c < channels,
  // i < positions. Fastest where positions is 4 or 1 and v_step 1.
  void (*multiply_out)(int64_t rows, int64_t channels, int64_t positions, const T* u, int64_t u_row, const T* v, int64_t v_row,
                       int64_t v_step, T* to, int64_t to_row);

  // The gradients of u and v, of which `sums` is that of their products, unless the one or the other is null: du is sums times
  // v, and dv[r * dv_row + c] = shift[r] + sum_i sums[r * sums_row + c * positions + i] u[...], without shift if it is null;
  // `add` adds to dv instead.
  void (*multiplied_gradients)(int64_t rows, int64_t channels, int64_t positions, const T* sums, int64_t sums_row, const T* u,
                               int64_t u_row, const T* v, int64_t v_row, int64_t v_step, T* du, int64_t du_row, T* dv,
                               int64_t dv_row, const T* shift, bool add);

  // out[j] = 1 / (l m[j] + p), divided in double, j < count.
  void (*inverse_row)(double l, const double* m, int64_t count, double p, T* out);

  // Places of rows first .. first + rows of an image of that height and width, one row after the other; the coordinates are
  // those of pixels, 1 added for the border. Writes the slack too.
  void (*affine_places)(const AffineCoordinates& coordinates, int64_t height, int64_t width, int64_t first, int64_t rows,
                        int32_t* cell, T* right, T* down);

  // The coordinates themselves, of a direction. Writes the slack too.
  void (*affine_moves)(const AffineCoordinates& coordinates, int64_t width, int64_t first, int64_t rows, T* right, T* down);

  // out[p] = the bilinear function of the place's cell, or its derivative along the direction, p < count.
  void (*affine_sample)(int64_t count, const AffinePlaces<T>& places, const T* cells, T* out);
  void (*affine_gradients)(const AffineGradients<T>& gradients);

  // Of tiles of m rows of a panel's width, up to n lanes rounded up to whole vectors: adds the activations of z to sums.
  void (*activations)(Activation activation, int64_t m, int64_t n, const T* z, T* sums);

  // Likewise: z becomes the activation's slope there times grad; that of ReLU is 0 at 0, and 1 where z is not a number.
  void (*activation_slopes)(Activation activation, int64_t m, int64_t n, const T* grad, T* z);

  // Likewise, a bit for each lane of a panel's width: whether ReLU's slope at z is 1, 0 behind the lanes; and `from` where a
  // bit is set, else 0.
  void (*positive_bits)(int64_t m, int64_t n, const T* z, uint8_t* bits, int64_t bits_row);
  void (*where_bits)(int64_t m, int64_t n, const uint8_t* bits, int64_t bits_row, const T* from, T* to);
};

// How sums in S join a total in T, which is S or wider; products with alpha are in T.
template <class S, class T>
struct Adders {
  // target[i * target_row + j] += alpha source[i * source_row + j], i < m, j < n.
  void (*rows)(int64_t m, int64_t n, T alpha, const S* source, int64_t source_row, T* target, int64_t target_row);

  // upper[i * target_row + j] += alpha sums[i * sums_row + j], and the same to lower[j * target_row + i], i < m, j < n. Fastest
  // where m is a multiple of Kernels<S>::vector and n not below it.
  void (*both)(int64_t m, int64_t n, T alpha, const S* sums, int64_t sums_row, T* upper, T* lower, int64_t target_row);

  // The same with upper = lower = target and m = n = size, for i <= j; sums below the diagonal are not looked at.
  void (*mirrored)(int64_t size, T alpha, const S* sums, int64_t sums_row, T* target, int64_t target_row);
};

// Rows of the sums in kron_logdet; always in double. t_j = l m_j + p, r_j = 1 / t_j.
struct LogdetKernels {
  // sum_j log t_j, for t_j > 0 between 2^-100 and 2^100: factors are multiplied before one logarithm is taken.
  double (*log_row)(double l, const double* m, int64_t count, double p);
  // Adds l r_j to dm[j]; sums[0] = sum_j m_j r_j, sums[1] = sum_j r_j.
  void (*gradient_row)(double l, const double* m, int64_t count, double p, double* dm, double* sums);
  // With s_j = -r_j^2 (u m_j + v_j l + w): adds l s_j + u r_j to hm[j]; sums[0] = sum_j m_j s_j + v_j r_j, sums[1] = sum_j s_j.
  void (*hvp_row)(double l, double u, const double* m, const double* v, int64_t count, double p, double w, double* hm,
                  double* sums);
};

// The sums of kron_evidence; always in double.
struct EvidenceKernels {
  int64_t lanes;  // columns are walked so many at a time
  // Adds sum log(1 + q) to sums[0] and sum q / (1 + q) to sums[1], q = row column; false, with nothing done, unless all
  // 0 <= q < 2^450. `count` columns, a multiple of lanes: zeros add nothing.
  bool (*tile)(const double* rows, int64_t row_count, const double* columns, int64_t count, double* sums);
};

template <class T>
const Kernels<T>& kernels();
template <>
const Kernels<float>& kernels<float>();
template <>
const Kernels<double>& kernels<double>();
template <class S, class T>
const Adders<S, T>& adders();
template <>
const Adders<float, float>& adders<float, float>();
template <>
const Adders<float, double>& adders<float, double>();
template <>
const Adders<double, double>& adders<double, double>();
const LogdetKernels& logdet_kernels();
const EvidenceKernels& evidence_kernels();

// One table for each instruction set that the compiler can produce; see kernels_<set>.cpp.
#define ELLA_DECLARE_KERNELS(SET)                  \
  namespace SET {                                  \
  extern const Kernels<float> floats;              \
  extern const Kernels<double> doubles;            \
  extern const Adders<float, float> add_floats;    \
  extern const Adders<float, double> widen_floats; \
  extern const Adders<double, double> add_doubles; \
  extern const LogdetKernels logdet;               \
  extern const EvidenceKernels evidence;           \
  }
#if defined(__aarch64__)
#define ELLA_NEON_KERNELS 1
ELLA_DECLARE_KERNELS(neon)
#else
ELLA_DECLARE_KERNELS(baseline)
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#define ELLA_X86_KERNELS 1
ELLA_DECLARE_KERNELS(avx2)
ELLA_DECLARE_KERNELS(avx512)
#endif
#undef ELLA_DECLARE_KERNELS

}  // namespace ella

// kron_logdet, its gradient and its Hessian times a vector. With v = l_i m_j + p and (u, w, q) the directions of l, m and p:
//   value      sum log v
//   gradient   of l_i: sum_j m_j / v          of m_j: sum_i l_i / v          of p: sum 1 / v
//   Hessian    of l_i: sum_j w_j / v - m_j t / v^2, t = u_i m_j + l_i w_j + q, likewise m_j; of p: sum -t / v^2
// All in double whatever the tensors' type; the products l_i m_j exist in registers only. One launch each: blocks leave double
// partial sums, the last block adds them in a fixed order. The number of partial sums depends on the shapes alone, so results
// do not depend on the device.
#include <algorithm>
#include <tuple>

#include "cuda/reduce.cuh"
#include "cuda/tickets.cuh"
#include "kron/checks.h"

namespace ella {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kPartColumns = 4096;  // of one row, per block
constexpr int64_t kMaxPartials = 1024;  // partial sums of the value

template <class T>
struct Matrix {
  const T* data;
  int64_t stride0, stride1;

  __device__ __forceinline__ double at(int64_t i, int64_t j) const {
    return static_cast<double>(data[i * stride0 + j * stride1]);
  }
};

// A sum of logarithms that takes only one: it keeps the product's mantissa in [1, 2) and its exponent apart. Exact but for the
// rounding of the multiplications, and several times cheaper than a logarithm per term.
class LogSum {
 public:
  __device__ __forceinline__ void add(double value) {
    const unsigned long long bits = __double_as_longlong(value);
    const int exponent = static_cast<int>(bits >> 52);  // with the sign above it
    if (exponent >= 1 && exponent <= 2046) {            // positive, normal, finite
      mantissa_ *= mantissa(bits);
      const unsigned long long product = __double_as_longlong(mantissa_);
      exponent_ += exponent - 1023 + static_cast<int>(product >> 52) - 1023;
      mantissa_ = mantissa(product);
    } else {
      others_ += log(value);  // zero, subnormal, infinite; NaN where negative
    }
  }

  __device__ __forceinline__ double total() const {
    return others_ + (log(mantissa_) + static_cast<double>(exponent_) * 0.693147180559945309417232121458);
  }

 private:
  static __device__ __forceinline__ double mantissa(unsigned long long bits) {
    return __longlong_as_double((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull);
  }

  double mantissa_ = 1, others_ = 0;
  long long exponent_ = 0;
};

// The sum of what blocks have left, by the last of them; the result is its thread 0's, and false in the others.
__device__ __forceinline__ bool sum_by_last_block(const double* partials, int64_t count, const Tickets<1>& ticket,
                                                  unsigned blocks, SharedArray<double> scratch, SharedArray<unsigned> flag,
                                                  double& total) {
  __syncthreads();  // thread 0 tells of what all threads have left
  if (!last_block(ticket[0], flag, blocks)) return false;
  total = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) total += partials[i];
  total = block_reduce(total, scratch, Sum{});
  return threadIdx.x == 0;
}

// partials[block] = the block's share of value = sum log(l[g,i] m[g,j] + p). `lanes` threads (a power of two) share a row
// (g,i); an item is 256 / lanes rows x kPartColumns columns, dealt to the blocks in turn.
//   l (G, a), m (G, b), precision (), partials (blocks), value ()
template <class T>
__global__ void __launch_bounds__(kThreads)
    value_kernel(Matrix<T> l, Matrix<T> m, const T* __restrict__ precision, double* partials, int64_t rows, int64_t a,
                 int64_t b, int lanes, Tickets<1> ticket, T* __restrict__ value) {
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<double> scratch = memory.array<double>(kThreads / kWarp);
  const double p = static_cast<double>(*precision);
  const int lane = threadIdx.x % lanes, own_row = threadIdx.x / lanes, rows_at_once = kThreads / lanes;
  const int64_t column_parts = ceil_div(b, kPartColumns);
  const int64_t items = ceil_div(rows, static_cast<int64_t>(rows_at_once)) * column_parts;
  LogSum sum;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t row = item / column_parts * rows_at_once + own_row;
    if (row >= rows) continue;
    const int64_t g = row / a, begin = item % column_parts * kPartColumns, end = min(begin + kPartColumns, b);
    const double own = l.at(g, row - g * a);
    for (int64_t j = begin + lane; j < end; j += lanes) sum.add(fma(own, m.at(g, j), p));
  }
  double total = block_reduce(sum.total(), scratch, Sum{});
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
  if (sum_by_last_block(partials, gridDim.x, ticket, gridDim.x, scratch, memory.array<unsigned>(1), total)) {
    *value = static_cast<T>(total);
  }
}

// One side of a derivative: the rows are the eigenvalues whose derivative is wanted, the columns those of the other side.
template <class T>
struct Side {
  Matrix<T> own, own_direction, other, other_direction;  // directions of the Hessian product only
  int64_t rows, own_size;                                // row r is own(r / own_size, r % own_size)
  int64_t columns, other_size;
  bool every_group;  // column k is other(k / other_size, k % other_size) instead of other(r / own_size, k)
  T* out;            // (rows)
  int lanes;         // that share a row: a power of two up to 32, or all 256
  int64_t blocks;
};

// The derivatives by the eigenvalues of both sides, and by the precision, of which precision_terms[r] is the part of row r of
// the inputs. The blocks of the inputs come first.
//   precision_terms (rows of the inputs), precision, precision_direction and d_precision ()
template <class T, bool Hessian>
__global__ void __launch_bounds__(kThreads)
    derivative_kernel(Side<T> inputs, Side<T> outputs, const T* __restrict__ precision,
                      const T* __restrict__ precision_direction, double* precision_terms, Tickets<1> ticket,
                      T* __restrict__ d_precision) {
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<double> scratch = memory.array<double>(kThreads / kWarp);
  const double p = static_cast<double>(*precision);
  const bool of_inputs = blockIdx.x < inputs.blocks;
  const Side<T>& side = of_inputs ? inputs : outputs;
  const int lanes = side.lanes, lane = threadIdx.x % lanes;
  const int64_t block = of_inputs ? blockIdx.x : blockIdx.x - inputs.blocks;
  const int64_t row = block * (kThreads / lanes) + threadIdx.x / lanes;
  double sum = 0, precision_sum = 0;
  if (row < side.rows) {
    const int64_t own_group = row / side.own_size, own_index = row - own_group * side.own_size;
    const double own = side.own.at(own_group, own_index);
    const double u = Hessian ? side.own_direction.at(own_group, own_index) : 0;
    const double q = Hessian ? static_cast<double>(*precision_direction) : 0;
#pragma unroll 1  // a double division is a call: unrolled, its operands spill
    for (int64_t k = lane; k < side.columns; k += lanes) {
      const int64_t group = side.every_group ? k / side.other_size : own_group;
      const int64_t index = side.every_group ? k - group * side.other_size : k;
      const double other = side.other.at(group, index);
      const double inverse = 1.0 / fma(own, other, p);
      if constexpr (Hessian) {
        const double w = side.other_direction.at(group, index);
        const double slope = -(u * other + own * w + q) * inverse * inverse;
        sum += fma(other, slope, w * inverse);
        precision_sum += slope;
      } else {
        sum += other * inverse;
        precision_sum += inverse;
      }
    }
  }
  if (lanes <= kWarp) {
    sum = warp_reduce(sum, Sum{}, lanes);
    precision_sum = warp_reduce(precision_sum, Sum{}, lanes);
  } else {
    sum = block_reduce(sum, scratch, Sum{});
    precision_sum = block_reduce(precision_sum, scratch, Sum{});
  }
  if (lane == 0 && row < side.rows) {
    side.out[row] = static_cast<T>(sum);
    if (of_inputs) precision_terms[row] = precision_sum;
  }
  const SharedArray<unsigned> flag = memory.array<unsigned>(1);
  const unsigned blocks = static_cast<unsigned>(inputs.blocks);
  if (of_inputs && sum_by_last_block(precision_terms, inputs.rows, ticket, blocks, scratch, flag, precision_sum)) {
    *d_precision = static_cast<T>(precision_sum);
  }
}

constexpr size_t kSharedBytes = shared_size(kThreads / kWarp * sizeof(double)) + shared_size(sizeof(unsigned));

// The smallest power of two that covers the columns, up to a warp; then the whole block.
int lanes_for(int64_t columns) {
  if (columns > kWarp) return kThreads;
  int lanes = 1;
  while (lanes < columns) lanes *= 2;
  return lanes;
}

template <class T>
Matrix<T> matrix(const Tensor& tensor, bool shared = false) {
  return {tensor.const_data_ptr<T>(), shared ? 0 : tensor.stride(0), tensor.stride(1)};
}

Tensor kron_logdet(const Tensor& eigenvalues_in, const Tensor& eigenvalues_out, const Tensor& precision) {
  const KronLogdetSizes s = check_kron_logdet("kron_logdet", eigenvalues_in, eigenvalues_out, precision);
  const Device device(eigenvalues_in);
  const int64_t rows = s.b == 0 ? 0 : s.G * s.a;
  const int lanes = lanes_for(s.b);
  const int64_t items = ceil_div(rows, static_cast<int64_t>(kThreads / lanes)) * ceil_div(s.b, kPartColumns);
  const Tensor out = device_empty(eigenvalues_in, {});
  const Tensor partials = device_empty(eigenvalues_in, {std::clamp<int64_t>(items, 1, kMaxPartials)}, ScalarType::Double);
  std::optional<Tensor> own_ticket;
  const Tickets<1> ticket = take_tickets<1>(device, "kron_logdet", eigenvalues_in, 1, own_ticket);
  ELLA_DISPATCH_FLOATING(eigenvalues_in.scalar_type(), "kron_logdet", [&] {
    launch(device, "kron_logdet", value_kernel<scalar_t>, partials.numel(), kThreads, kSharedBytes,
           matrix<scalar_t>(eigenvalues_in), matrix<scalar_t>(eigenvalues_out, s.shared), precision.const_data_ptr<scalar_t>(),
           partials.mutable_data_ptr<double>(), rows, s.a, s.b, lanes, ticket, out.mutable_data_ptr<scalar_t>());
  });
  return out;
}

// The three derivatives; the directions are null for the gradient.
template <class T, bool Hessian>
std::tuple<Tensor, Tensor, Tensor> derivatives(const char* name, const KronLogdetSizes& s, const Tensor& in, const Tensor& out,
                                               const Tensor& precision, const Tensor& v_in, const Tensor& v_out,
                                               const Tensor& v_precision) {
  const Device device(in);
  const Tensor d_in = device_empty(in, {s.G, s.a}), d_out = device_empty(in, {out.size(0), s.b});
  const Tensor d_precision = device_empty(in, {}), terms = device_empty(in, {s.G * s.a}, ScalarType::Double);
  Side<T> inputs{matrix<T>(in), matrix<T>(v_in), matrix<T>(out, s.shared),  matrix<T>(v_out, s.shared), s.G * s.a, s.a, s.b,
                 s.b,           false,           d_in.mutable_data_ptr<T>()};
  Side<T> outputs{matrix<T>(out),
                  matrix<T>(v_out),
                  matrix<T>(in),
                  matrix<T>(v_in),
                  out.size(0) * s.b,
                  s.b,
                  s.shared ? s.G * s.a : s.a,
                  s.a,
                  s.shared,
                  d_out.mutable_data_ptr<T>()};
  for (Side<T>* const side : {&inputs, &outputs}) {
    side->lanes = lanes_for(side->columns);
    side->blocks = ceil_div(side->rows, static_cast<int64_t>(kThreads / side->lanes));
  }
  inputs.blocks = std::max<int64_t>(inputs.blocks, 1);  // which also adds the parts of the precision's
  std::optional<Tensor> own_ticket;
  const Tickets<1> ticket = take_tickets<1>(device, name, in, 1, own_ticket);
  launch(device, name, derivative_kernel<T, Hessian>, inputs.blocks + outputs.blocks, kThreads, kSharedBytes, inputs, outputs,
         precision.const_data_ptr<T>(), v_precision.const_data_ptr<T>(), terms.mutable_data_ptr<double>(), ticket,
         d_precision.mutable_data_ptr<T>());
  return {d_in, d_out, d_precision};
}

std::tuple<Tensor, Tensor, Tensor> kron_logdet_gradient(const Tensor& eigenvalues_in, const Tensor& eigenvalues_out,
                                                        const Tensor& precision) {
  constexpr const char* name = "kron_logdet_gradient";
  const KronLogdetSizes s = check_kron_logdet(name, eigenvalues_in, eigenvalues_out, precision);
  std::tuple<Tensor, Tensor, Tensor> result;
  ELLA_DISPATCH_FLOATING(eigenvalues_in.scalar_type(), name, [&] {
    // The directions are not read; the inputs stand in for them.
    result = derivatives<scalar_t, false>(name, s, eigenvalues_in, eigenvalues_out, precision, eigenvalues_in, eigenvalues_out,
                                          precision);
  });
  return result;
}

std::tuple<Tensor, Tensor, Tensor> kron_logdet_hvp(const Tensor& eigenvalues_in, const Tensor& eigenvalues_out,
                                                   const Tensor& precision, const Tensor& v_in, const Tensor& v_out,
                                                   const Tensor& v_precision) {
  const KronLogdetSizes s = check_kron_logdet_hvp(eigenvalues_in, eigenvalues_out, precision, v_in, v_out, v_precision);
  std::tuple<Tensor, Tensor, Tensor> result;
  ELLA_DISPATCH_FLOATING(eigenvalues_in.scalar_type(), "kron_logdet_hvp", [&] {
    result =
        derivatives<scalar_t, true>("kron_logdet_hvp", s, eigenvalues_in, eigenvalues_out, precision, v_in, v_out, v_precision);
  });
  return result;
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) {
  m.impl("kron_logdet", TORCH_BOX(&kron_logdet));
  m.impl("kron_logdet_gradient", TORCH_BOX(&kron_logdet_gradient));
  m.impl("kron_logdet_hvp", TORCH_BOX(&kron_logdet_hvp));
}

}  // namespace
}  // namespace ella

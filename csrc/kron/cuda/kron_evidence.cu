// kron_evidence and its second derivative, one launch each. A block takes one tile of
// products q = e^z l m, which exist in registers only, and leaves its sums in double; the last block to finish adds them up,
// tensor by tensor in the tiles' order, so that results do not depend on the order of blocks or on the device.
#include <algorithm>
#include <tuple>

#include "cuda/reduce.cuh"
#include "cuda/tickets.cuh"
#include "kron/checks.h"

namespace ella {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr size_t kSharedBytes = shared_size(kWarps * sizeof(double)) + shared_size(sizeof(unsigned));

template <class T>
struct Vector {
  const T* data;
  int64_t stride;

  __device__ __forceinline__ double at(int64_t i) const { return static_cast<double>(data[i * stride]); }
};

// The spectra of `tensors` tensors in `count` tiles.
template <class T>
struct Spectra {
  Vector<T> eigenvalues;
  const int64_t* tiles;   // (count, 5): tensor, first row, rows, first column, columns
  const int64_t* starts;  // (tensors + 1)
  int64_t tensors, count;
};

// Whether l m is zero: the infinite ratio of a tiny precision times zero would be no number.
__device__ __forceinline__ bool is_zero(double l, double m) { return (l == 0 && m == m) || (m == 0 && l == l); }

// sum log(1 + q) and sum q / (1 + q) by a running product and the numerator of the second sum over it, see
// csrc/cpu/simd/evidence.inc: a logarithm and a division come only when the product grows beyond 2^500.
class EvidenceSum {
 public:
  __device__ __forceinline__ explicit EvidenceSum(double z) : z_(z), ratio_(exp(z)) {}

  __device__ __forceinline__ void add(double l, double m) {
    const double q = ratio_ * l * m;
    if (q >= 0 && q < 0x1p450) {
      numerator_ = fma(q, numerator_ + product_, numerator_);
      product_ = fma(q, product_, product_);
      if (product_ >= 0x1p500) settle();
    } else if (!is_zero(l, m)) {
      add_other(q, l, m);
    }
  }

  __device__ __forceinline__ void finish() {
    settle();
    logs_ += log(product_);
  }

  __device__ __forceinline__ double logs() const { return logs_; }
  __device__ __forceinline__ double quotients() const { return quotients_; }

 private:
  // Leaves the product in [1, 2) and the numerator zero.
  __device__ __forceinline__ void settle() {
    quotients_ += numerator_ / product_;
    numerator_ = 0;
    const unsigned long long bits = __double_as_longlong(product_);
    logs_ = fma(static_cast<double>(static_cast<int>(bits >> 52) - 1023), 0.693147180559945309417232121458, logs_);
    product_ = __longlong_as_double((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull);
  }

  // q is negative, huge or not a number.
  __device__ __forceinline__ void add_other(double q, double l, double m) {
    if (fabs(q) < 0x1p60 || q < 0 || q != q) {
      logs_ += log1p(q);
      quotients_ += q > -1 ? q / (1 + q) : log1p(q);
    } else {  // the product may be infinite
      const double y = z_ + log(fabs(l)) + log(fabs(m));
      logs_ += y + log1p(exp(-y));
      quotients_ += 1 / (1 + exp(-y));
    }
  }

  const double z_, ratio_;
  double product_ = 1, numerator_ = 0, logs_ = 0, quotients_ = 0;
};

// sum q / (1 + q)^2, of a q whose square may overflow.
class BendSum {
 public:
  __device__ __forceinline__ explicit BendSum(double z) : ratio_(exp(z)) {}

  __device__ __forceinline__ void add(double l, double m) {
    if (is_zero(l, m)) return;
    const double q = ratio_ * l * m, rest = 1 / (1 + q), part = q < 1 ? q * rest : 1 - rest;
    total_ = fma(part, rest, total_);
  }

  __device__ __forceinline__ double total() const { return total_; }

 private:
  const double ratio_;
  double total_ = 0;
};

// Adds the tile's products to every thread's sum. A power of two of threads, up to all, share a row.
template <class T, class Sum>
__device__ __forceinline__ void walk(const Spectra<T>& spectra, const int64_t* tile, Sum& sum) {
  const int64_t row = tile[1], rows = tile[2], column = tile[3], columns = tile[4];
  int lanes = 1;
  while (lanes < columns && lanes < kThreads) lanes *= 2;
  for (int64_t i = threadIdx.x / lanes; i < rows; i += kThreads / lanes) {
    const double l = spectra.eigenvalues.at(row + i);
#pragma unroll 1  // a double division is a call: unrolled, its operands spill
    for (int64_t j = threadIdx.x % lanes; j < columns; j += lanes) sum.add(l, spectra.eigenvalues.at(column + j));
  }
}

// The sum of parts[stride * t] over the tiles t of tensor b, by a warp; every lane gets it.
__device__ __forceinline__ double sum_of_tensor(const double* parts, int stride, const int64_t* starts, int64_t b) {
  double sum = 0;
  for (int64_t t = starts[b] + threadIdx.x % kWarp; t < starts[b + 1]; t += kWarp) sum += parts[stride * t];
  return warp_reduce(sum, Sum{});
}

//   square_norms, log_precision, slope, effective (tensors), log_scale, value (), parts (count, 2)
template <class T>
__global__ void __launch_bounds__(kThreads)
    evidence_kernel(Spectra<T> spectra, Vector<T> square_norms, Vector<T> log_precision, const T* __restrict__ log_scale,
                    double* parts, Tickets<1> ticket, T* __restrict__ value, T* __restrict__ slope, T* __restrict__ effective) {
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<double> scratch = memory.array<double>(kWarps);
  const SharedArray<unsigned> flag = memory.array<unsigned>(1);
  if (blockIdx.x < spectra.count) {  // without tiles there is one block
    const int64_t* tile = spectra.tiles + 5 * static_cast<int64_t>(blockIdx.x);
    EvidenceSum sum(static_cast<double>(*log_scale) - log_precision.at(tile[0]));
    walk(spectra, tile, sum);
    sum.finish();
    const double logs = block_reduce(sum.logs(), scratch, Sum{});
    const double quotients = block_reduce(sum.quotients(), scratch, Sum{});
    if (threadIdx.x == 0) {
      parts[2 * static_cast<int64_t>(blockIdx.x)] = logs;
      parts[2 * static_cast<int64_t>(blockIdx.x) + 1] = quotients;
    }
  }
  if (!last_block(ticket[0], flag, gridDim.x)) return;
  double total = 0;
  for (int64_t b = threadIdx.x / kWarp; b < spectra.tensors; b += kWarps) {
    const double logs = sum_of_tensor(parts, 2, spectra.starts, b), gamma = sum_of_tensor(parts + 1, 2, spectra.starts, b);
    if (threadIdx.x % kWarp == 0) {
      const double prior = exp(log_precision.at(b)) * square_norms.at(b);
      slope[b] = static_cast<T>(prior - gamma);
      effective[b] = static_cast<T>(gamma);
      total += logs + prior;
    }
  }
  total = block_reduce(total, scratch, Sum{});
  if (threadIdx.x == 0) *value = static_cast<T>(total);
}

//   log_ratio, out (tensors), parts (count)
template <class T>
__global__ void __launch_bounds__(kThreads)
    bend_kernel(Spectra<T> spectra, Vector<T> log_ratio, double* parts, Tickets<1> ticket, T* __restrict__ out) {
  ELLA_SHARED_MEMORY(memory);
  const SharedArray<double> scratch = memory.array<double>(kWarps);
  const SharedArray<unsigned> flag = memory.array<unsigned>(1);
  if (blockIdx.x < spectra.count) {
    const int64_t* tile = spectra.tiles + 5 * static_cast<int64_t>(blockIdx.x);
    BendSum sum(log_ratio.at(tile[0]));
    walk(spectra, tile, sum);
    const double total = block_reduce(sum.total(), scratch, Sum{});
    if (threadIdx.x == 0) parts[blockIdx.x] = total;
  }
  if (!last_block(ticket[0], flag, gridDim.x)) return;
  for (int64_t b = threadIdx.x / kWarp; b < spectra.tensors; b += kWarps) {
    const double total = sum_of_tensor(parts, 1, spectra.starts, b);
    if (threadIdx.x % kWarp == 0) out[b] = static_cast<T>(total);
  }
}

template <class T>
Vector<T> vector(const Tensor& tensor) {
  return {tensor.const_data_ptr<T>(), tensor.stride(0)};
}

template <class T>
Spectra<T> spectra_of(const KronEvidenceSizes& s, const Tensor& eigenvalues, const Tensor& tiles, const Tensor& starts) {
  return {vector<T>(eigenvalues), tiles.const_data_ptr<int64_t>(), starts.const_data_ptr<int64_t>(), s.tensors, s.tiles};
}

std::tuple<Tensor, Tensor, Tensor> kron_evidence(const Tensor& eigenvalues, const Tensor& tiles, const Tensor& starts,
                                                 const Tensor& square_norms, const Tensor& log_precision,
                                                 const Tensor& log_scale) {
  constexpr const char* name = "kron_evidence";
  const KronEvidenceSizes s = check_kron_evidence(eigenvalues, tiles, starts, square_norms, log_precision, log_scale);
  const Device device(eigenvalues);
  const Tensor parts = device_empty(eigenvalues, {s.tiles, 2}, ScalarType::Double);
  std::optional<Tensor> own_ticket;
  const Tickets<1> ticket = take_tickets<1>(device, name, eigenvalues, 1, own_ticket);
  const Tensor value = device_empty(eigenvalues, {}), slope = device_empty(eigenvalues, {s.tensors}),
               effective = device_empty(eigenvalues, {s.tensors});
  ELLA_DISPATCH_FLOATING(eigenvalues.scalar_type(), name, [&] {
    launch(device, name, evidence_kernel<scalar_t>, std::max<int64_t>(s.tiles, 1), kThreads, kSharedBytes,
           spectra_of<scalar_t>(s, eigenvalues, tiles, starts), vector<scalar_t>(square_norms), vector<scalar_t>(log_precision),
           log_scale.const_data_ptr<scalar_t>(), parts.mutable_data_ptr<double>(), ticket, value.mutable_data_ptr<scalar_t>(),
           slope.mutable_data_ptr<scalar_t>(), effective.mutable_data_ptr<scalar_t>());
  });
  return {value, slope, effective};
}

Tensor kron_evidence_bend(const Tensor& eigenvalues, const Tensor& tiles, const Tensor& starts, const Tensor& log_ratio) {
  constexpr const char* name = "kron_evidence_bend";
  const KronEvidenceSizes s = check_kron_evidence_bend(eigenvalues, tiles, starts, log_ratio);
  const Device device(eigenvalues);
  const Tensor parts = device_empty(eigenvalues, {s.tiles}, ScalarType::Double);
  std::optional<Tensor> own_ticket;
  const Tickets<1> ticket = take_tickets<1>(device, name, eigenvalues, 1, own_ticket);
  const Tensor out = device_empty(eigenvalues, {s.tensors});
  ELLA_DISPATCH_FLOATING(eigenvalues.scalar_type(), name, [&] {
    launch(device, name, bend_kernel<scalar_t>, std::max<int64_t>(s.tiles, 1), kThreads, kSharedBytes,
           spectra_of<scalar_t>(s, eigenvalues, tiles, starts), vector<scalar_t>(log_ratio), parts.mutable_data_ptr<double>(),
           ticket, out.mutable_data_ptr<scalar_t>());
  });
  return out;
}

ELLA_REGISTER(ELLA_DISPATCH_KEY, m) {
  m.impl("kron_evidence", TORCH_BOX(&kron_evidence));
  m.impl("kron_evidence_bend", TORCH_BOX(&kron_evidence_bend));
}

}  // namespace
}  // namespace ella

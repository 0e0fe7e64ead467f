// What of cuSOLVER's interface ella_cuda/laplace/cusolver.py calls, on the CPU: signatures as in cusolverDn.h, eigenvalues by
// Jacobi's rotations. It reads the triangle that it is told to and nothing else of a matrix, uses all of its workspaces, and
// refuses what the header does not allow.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int kInvalid = 3, kInternal = 7;
struct Handle {
  int magic = 17;
  bool has_stream = false;
};
struct Parameters {
  int magic = 23;
};
int64_t calls = 0;

size_t device_bytes(int64_t n, int64_t batch) { return static_cast<size_t>(batch * n * 8 + 256); }
constexpr size_t kHostBytes = 40;

bool valid(const void* handle, const void* parameters, int mode, int triangle, int64_t n, int type, const void* a, int64_t lda,
           int value_type, const void* w, int compute_type, int64_t batch) {
  return handle && static_cast<const Handle*>(handle)->magic == 17 && parameters &&
         static_cast<const Parameters*>(parameters)->magic == 23 && mode == 0 && (triangle == 0 || triangle == 1) && n > 0 &&
         type == 1 && value_type == 1 && compute_type == 1 && a && w && lda == n && batch > 0 && batch < 1 << 15;
}

std::vector<double> eigenvalues(const double* a, int64_t n, bool upper) {
  std::vector<double> m(static_cast<size_t>(n * n));
  const auto at = [&](int64_t i, int64_t j) -> double& { return m[static_cast<size_t>(i * n + j)]; };
  for (int64_t column = 0; column < n; ++column) {
    for (int64_t row = 0; row < n; ++row) {
      if (upper ? row <= column : row >= column) at(row, column) = at(column, row) = a[column * n + row];
    }
  }
  for (int sweep = 0; sweep < 60; ++sweep) {
    for (int64_t p = 0; p < n; ++p) {
      for (int64_t q = p + 1; q < n; ++q) {
        if (at(p, q) == 0) continue;
        const double theta = (at(q, q) - at(p, p)) / (2 * at(p, q));
        const double t = (theta < 0 ? -1 : 1) / (std::abs(theta) + std::sqrt(theta * theta + 1));
        const double c = 1 / std::sqrt(t * t + 1), s = t * c;
        for (int64_t k = 0; k < n; ++k) {
          const double x = at(k, p), y = at(k, q);
          at(k, p) = c * x - s * y, at(k, q) = s * x + c * y;
        }
        for (int64_t k = 0; k < n; ++k) {
          const double x = at(p, k), y = at(q, k);
          at(p, k) = c * x - s * y, at(q, k) = s * x + c * y;
        }
      }
    }
  }
  std::vector<double> values;
  for (int64_t i = 0; i < n; ++i) values.push_back(at(i, i));
  std::sort(values.begin(), values.end());
  return values;
}

}  // namespace

extern "C" {

int cusolverDnCreate(void** handle) {
  *handle = new Handle;
  return 0;
}

int cusolverDnCreateParams(void** parameters) {
  *parameters = new Parameters;
  return 0;
}

int cusolverDnSetStream(void* handle, void* stream) {
  if (!handle) return 1;
  static_cast<Handle*>(handle)->has_stream = stream == nullptr;  // the only one that the CPU has
  return 0;
}

#ifndef WITHOUT_BATCHED
int cusolverDnXsyevBatched_bufferSize(void* handle, void* parameters, int mode, int triangle, int64_t n, int type,
                                      const void* a, int64_t lda, int value_type, const void* w, int compute_type,
                                      size_t* on_device, size_t* on_host, int64_t batch) {
  if (!valid(handle, parameters, mode, triangle, n, type, a, lda, value_type, w, compute_type, batch)) return kInvalid;
  *on_device = device_bytes(n, batch);
  *on_host = kHostBytes;
  return 0;
}

// A matrix that begins with -1234 does not converge; one of 13 rows breaks the library.
int cusolverDnXsyevBatched(void* handle, void* parameters, int mode, int triangle, int64_t n, int type, void* a, int64_t lda,
                           int value_type, void* w, int compute_type, void* on_device, size_t device_size, void* on_host,
                           size_t host_size, int* info, int64_t batch) {
  if (!valid(handle, parameters, mode, triangle, n, type, a, lda, value_type, w, compute_type, batch)) return kInvalid;
  if (!on_device || device_size < device_bytes(n, batch) || !on_host || host_size < kHostBytes || !info) return kInvalid;
  if (!static_cast<Handle*>(handle)->has_stream) return kInternal;
  if (n == 13) return kInternal;
  ++calls;
  std::memset(on_device, 0xff, device_size);
  std::memset(on_host, 0xff, host_size);
  double *matrix = static_cast<double*>(a), *values = static_cast<double*>(w);
  for (int64_t i = 0; i < batch; ++i, matrix += n * n, values += n) {
    info[i] = matrix[0] == -1234 ? 2 : 0;
    const std::vector<double> found = eigenvalues(matrix, n, triangle == 1);
    std::copy(found.begin(), found.end(), values);
    std::fill_n(matrix, n * n, std::nan(""));
  }
  return 0;
}
#endif

int64_t stand_in_calls() { return calls; }
}

// kron_evidence: the log determinant ratios of all tensors and the effective numbers of parameters, in one pass over the
// products of eigenvalues, which are never stored. Every tile's sums are kept in double and added in order: no result depends
// on threads.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "cpu/buffer.h"
#include "cpu/simd/kernels.h"
#include "kron/checks.h"

namespace ella {
namespace {

template <class T>
struct Vector {
  explicit Vector(const Tensor& tensor)
      : data(tensor.const_data_ptr<T>()), stride(tensor.dim() ? tensor.stride(0) : 0), size(tensor.numel()) {}
  double operator[](int64_t i) const { return static_cast<double>(data[i * stride]); }
  void read(int64_t first, int64_t count, double* out) const {
    if (stride == 1) {
      std::copy(data + first, data + first + count, out);
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = (*this)[first + i];
    }
  }

  const T* data;
  int64_t stride, size;
};

struct Tile {
  int64_t tensor, row, rows, column, columns;
};

// The tiles, which must lie within the eigenvalues and belong to the tensors in order.
class Tiles {
 public:
  Tiles(const char* op, const KronEvidenceSizes& s, const Tensor& eigenvalues, const Tensor& tiles, const Tensor& starts)
      : data_(tiles.const_data_ptr<int64_t>()), starts_(starts.const_data_ptr<int64_t>()) {
    const int64_t count = eigenvalues.size(0);
    bool fits = starts_[0] == 0 && starts_[s.tensors] == s.tiles;
    for (int64_t b = 0; fits && b < s.tensors; ++b) {
      fits = starts_[b] <= starts_[b + 1] && starts_[b + 1] <= s.tiles;
      for (int64_t t = starts_[b]; fits && t < starts_[b + 1]; ++t) {
        const Tile tile = (*this)[t];
        fits = tile.tensor == b && inside(tile.row, tile.rows, count) && inside(tile.column, tile.columns, count);
      }
    }
    ELLA_CHECK(fits, op, ": tiles and starts do not fit together or leave the ", count,
               " eigenvalues; take them from pack_spectra");
  }

  Tile operator[](int64_t t) const {
    const int64_t* tile = data_ + 5 * t;
    return {tile[0], tile[1], tile[2], tile[3], tile[4]};
  }
  int64_t begin(int64_t b) const { return starts_[b]; }
  int64_t end(int64_t b) const { return starts_[b + 1]; }

 private:
  static bool inside(int64_t first, int64_t length, int64_t count) {
    return first >= 0 && length >= 0 && first <= count && length <= count - first;
  }

  const int64_t *data_, *starts_;
};

// Whether l m is zero: the infinite ratio of a tiny precision times zero would be no number.
bool is_zero(double l, double m) { return (l == 0.0 && m == m) || (m == 0.0 && l == l); }

// log(1 + q) and q / (1 + q) of any q = e^z l m, where it is negative, huge or not a number.
void add_term(double z, double l, double m, double* sums) {
  if (is_zero(l, m)) return;
  const double q = std::exp(z) * l * m;
  if (std::abs(q) < 0x1p60 || q < 0.0 || q != q) {
    const double log = std::log1p(q);
    sums[0] += log;
    sums[1] += q > -1.0 ? q / (1.0 + q) : log;
  } else {  // the product may be infinite
    const double y = z + std::log(std::abs(l)) + std::log(std::abs(m));
    sums[0] += y + std::log1p(std::exp(-y));
    sums[1] += 1.0 / (1.0 + std::exp(-y));
  }
}

// sums[0] and sums[1] over one tile; z = log_scale - log_precision of its tensor.
template <class T>
void sum_tile(const Vector<T>& eigenvalues, const Tile& tile, double z, double* sums) {
  constexpr int64_t kRows = 128, kColumns = 1024, kMaxLanes = 64;
  const EvidenceKernels& kernels = evidence_kernels();
  const double ratio = std::exp(z);
  double rows[kRows], columns[kColumns + kMaxLanes];
  for (int64_t j = 0; j < tile.columns; j += kColumns) {
    const int64_t width = std::min(kColumns, tile.columns - j), padded = ceil_divide(width, kernels.lanes) * kernels.lanes;
    eigenvalues.read(tile.column + j, width, columns);
    std::fill(columns + width, columns + padded, 0.0);
    for (int64_t i = 0; i < tile.rows; i += kRows) {
      const int64_t height = std::min(kRows, tile.rows - i);
      for (int64_t k = 0; k < height; ++k) rows[k] = ratio * eigenvalues[tile.row + i + k];
      if (!kernels.tile(rows, height, columns, padded, sums)) {
        for (int64_t k = 0; k < height; ++k) {
          const double l = eigenvalues[tile.row + i + k];
          for (int64_t c = 0; c < width; ++c) add_term(z, l, columns[c], sums);
        }
      }
    }
  }
}

template <class T>
std::tuple<Tensor, Tensor, Tensor> evidence(const KronEvidenceSizes& s, const Tensor& eigenvalues, const Tensor& tiles_,
                                            const Tensor& starts, const Tensor& square_norms, const Tensor& log_precision,
                                            const Tensor& log_scale) {
  const Tiles tiles("kron_evidence", s, eigenvalues, tiles_, starts);
  const Vector<T> values(eigenvalues), norms(square_norms), u(log_precision), scale(log_scale);
  const Buffer<double> sums(2 * s.tiles);
  sums.zero(0, 2 * s.tiles);
  torch::stable::parallel_for(0, s.tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) sum_tile(values, tiles[t], scale[0] - u[tiles[t].tensor], sums.data() + 2 * t);
  });
  const Tensor value = empty_of(eigenvalues, {}), slope = empty_of(eigenvalues, {s.tensors}),
               effective = empty_of(eigenvalues, {s.tensors});
  double total = 0.0;
  for (int64_t b = 0; b < s.tensors; ++b) {
    double logs = 0.0, quotients = 0.0;
    for (int64_t t = tiles.begin(b); t < tiles.end(b); ++t) {
      logs += sums.data()[2 * t];
      quotients += sums.data()[2 * t + 1];
    }
    const double prior = std::exp(u[b]) * norms[b];
    total += logs + prior;
    slope.mutable_data_ptr<T>()[b] = static_cast<T>(prior - quotients);
    effective.mutable_data_ptr<T>()[b] = static_cast<T>(quotients);
  }
  *value.mutable_data_ptr<T>() = static_cast<T>(total);
  return {value, slope, effective};
}

std::tuple<Tensor, Tensor, Tensor> kron_evidence(const Tensor& eigenvalues, const Tensor& tiles, const Tensor& starts,
                                                 const Tensor& square_norms, const Tensor& log_precision,
                                                 const Tensor& log_scale) {
  const KronEvidenceSizes s = check_kron_evidence(eigenvalues, tiles, starts, square_norms, log_precision, log_scale);
  std::tuple<Tensor, Tensor, Tensor> result;
  ELLA_DISPATCH_FLOATING(eigenvalues.scalar_type(), "kron_evidence", [&] {
    result = evidence<scalar_t>(s, eigenvalues, tiles, starts, square_norms, log_precision, log_scale);
  });
  return result;
}

// q / (1 + q)^2, of a q whose square may overflow.
double bend(double q) {
  const double rest = 1.0 / (1.0 + q), part = q < 1.0 ? q * rest : 1.0 - rest;
  return part * rest;
}

Tensor kron_evidence_bend(const Tensor& eigenvalues, const Tensor& tiles_, const Tensor& starts, const Tensor& log_ratio) {
  constexpr const char* op = "kron_evidence_bend";
  const KronEvidenceSizes s = check_kron_evidence_bend(eigenvalues, tiles_, starts, log_ratio);
  const Tiles tiles(op, s, eigenvalues, tiles_, starts);
  const Buffer<double> sums(s.tiles);
  const Tensor out = empty_of(eigenvalues, {s.tensors});
  ELLA_DISPATCH_FLOATING(eigenvalues.scalar_type(), op, [&] {
    const Vector<scalar_t> values(eigenvalues), z(log_ratio);
    torch::stable::parallel_for(0, s.tiles, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const Tile tile = tiles[t];
        const double ratio = std::exp(z[tile.tensor]);
        double sum = 0.0;
        for (int64_t i = 0; i < tile.rows; ++i) {
          const double l = values[tile.row + i];
          for (int64_t j = 0; j < tile.columns; ++j) {
            const double m = values[tile.column + j];
            if (!is_zero(l, m)) sum += bend(ratio * l * m);
          }
        }
        sums.data()[t] = sum;
      }
    });
    for (int64_t b = 0; b < s.tensors; ++b) {
      double total = 0.0;
      for (int64_t t = tiles.begin(b); t < tiles.end(b); ++t) total += sums.data()[t];
      out.mutable_data_ptr<scalar_t>()[b] = static_cast<scalar_t>(total);
    }
  });
  return out;
}

ELLA_REGISTER(CPU, m) {
  m.impl("kron_evidence", TORCH_BOX(&kron_evidence));
  m.impl("kron_evidence_bend", TORCH_BOX(&kron_evidence_bend));
}

}  // namespace
}  // namespace ella

// kron_variance_: variance[n,k,l] += sum_{g,i,j} M[n,k,g,i,j] M[n,l,g,i,j] / (l[g,i] m[g,j] + p).
//
// M is walked by tiles: some groups, rows and columns of it, of all outputs of a data point, which fit the second-level cache.
// A tile's denominators are inverted once for many data points. At one position M has rank one: its sum over i is a product of
// squares of the inputs with these inverses, for some data points at a time, and a row of a tile is a row of the outputs.
// Tiles are shared out to parts by the sizes alone, and the parts' sums, in double, are added in order: no result depends on
// threads. Squares, M and its products have the rows' type, the inverses are divided in double.
#include <algorithm>
#include <optional>

#include "cpu/buffer.h"
#include "cpu/gram.h"
#include "cpu/simd/kernels.h"
#include "kron/checks.h"

namespace ella {
namespace {

constexpr int64_t kStrip = 4;                        // outputs whose products with all later ones are taken at once
constexpr int64_t kPoints = 128;                     // data points that share inverses of a rank-one tile
constexpr int64_t kPositions = 256;                  // packed at once
constexpr int64_t kInverses = 256;                   // rows of them in a panel
constexpr int64_t kTasks = 32;                       // as many at least, where tiles and memory allow it
constexpr int64_t kElements = int64_t(1) << 16;      // of a tile
constexpr int64_t kShortest = 512, kLongest = 8192;  // of a row of a tile
constexpr int64_t kPartials = int64_t(1) << 20;      // doubles

enum class Kind { given, rank_one, products };

// inputs (N, T, G, a); outputs (K, N, T, G, b), or (K, N, G, a, b) where the Jacobian is given: there `out_i` is the stride of
// the rows, and `out_t` is not used. The eigenvalues lie one after the other.
template <class T>
struct Operands {
  const T *inputs, *outputs;
  int64_t in_n, in_t, in_g, in_i;
  int64_t out_k, out_n, out_t, out_g, out_i, out_j;
  const double *in, *out;
  double precision;
};

// Some groups, rows and columns.
struct Range {
  int64_t group, groups, row, rows, column, columns;
};

// How M is cut into tiles. Columns, which lie side by side in a tile, are those of the output side, or those of the input side.
template <class T>
class Plan {
 public:
  Plan(Kind kind, const KronVarianceSizes& s, const Operands<T>& o)
      : kind(kind),
        vector(kernels<T>().vector),
        in_columns(kind == Kind::products ? s.a >= vector || s.a >= s.b : kind == Kind::given && o.out_i == 1 && o.out_j != 1),
        groups(s.G),
        rows(kind == Kind::rank_one ? 1
             : in_columns           ? s.b
                                    : s.a),
        columns(in_columns ? s.a : s.b) {
    const int64_t length = std::min(std::max(kElements / s.K, kShortest), kind == Kind::rank_one ? kShortest : kLongest);
    column_step_ = std::min(columns, kind == Kind::products ? std::min(length, kernels<T>().width) : length);
    row_step_ = std::min(rows, std::max(length / pitch(column_step_), int64_t(1)));
    const bool whole = column_step_ == columns && row_step_ == rows;
    group_step_ = whole ? std::min(groups, std::max(length / (rows * pitch(columns)), int64_t(1))) : 1;
    column_tiles_ = ceil_divide(columns, column_step_);
    row_tiles_ = ceil_divide(rows, row_step_);
    tiles = ceil_divide(groups, group_step_) * column_tiles_ * row_tiles_;
    length_ = whole_vectors(group_step_ * row_step_ * pitch(column_step_));
  }

  Range range(int64_t tile) const {
    const int64_t group = tile / (column_tiles_ * row_tiles_) * group_step_, row = tile % row_tiles_ * row_step_,
                  column = tile / row_tiles_ % column_tiles_ * column_step_;
    return {group,  std::min(group_step_, groups - group),   row, std::min(row_step_, rows - row),
            column, std::min(column_step_, columns - column)};
  }

  int64_t whole_vectors(int64_t count) const { return ceil_divide(count, vector) * vector; }
  // From one row of M to the next within a row of a tile: products write whole vectors.
  int64_t pitch(int64_t count) const { return kind == Kind::products ? whole_vectors(count) : count; }
  int64_t length(const Range& r) const { return r.groups * r.rows * pitch(r.columns); }
  int64_t max_length() const { return length_; }

  const Kind kind;
  const int64_t vector;
  const bool in_columns;
  const int64_t groups, rows, columns;
  int64_t tiles;

 private:
  int64_t column_step_, row_step_, group_step_, column_tiles_, row_tiles_, length_;
};

// The tiles of one thread.
template <class T>
class Worker {
 public:
  Worker(const Plan<T>& plan, const KronVarianceSizes& s, const Operands<T>& o)
      : k_(kernels<T>()),
        plan_(plan),
        s_(s),
        o_(o),
        row_(plan.max_length() + plan.vector),  // not a power of two apart, and room for a group's last vector
        tile_(s.K * row_),
        weighted_(kStrip * row_),
        weights_((plan.kind == Kind::rank_one ? std::min(s.N, kPoints) : 1) * row_),
        panel_(plan.kind == Kind::given ? 0 : k_.width * std::max(kPositions, kInverses)),
        squares_(plan.kind == Kind::rank_one ? std::min(s.N, kPoints) * std::min(s.a, kInverses) : 0),
        strip_(s.K * kStrip) {}

  // Adds the tiles begin..end of the data points first..last to their sums, one after the other.
  void add(int64_t begin, int64_t end, int64_t first, int64_t last, double* sums) const {
    for (int64_t tile = begin; tile < end; ++tile) {
      const Range r = plan_.range(tile);
      if (plan_.kind == Kind::rank_one) {
        for (int64_t n = first; n < last; n += kPoints) {
          const int64_t count = std::min(kPoints, last - n);
          rank_one_weights(r, n, count);
          for (int64_t i = 0; i < count; ++i) add(r, n + i, weights_.data() + i * row_, sums + (n + i - first) * entries());
        }
      } else {
        invert(r);
        for (int64_t n = first; n < last; ++n) add(r, n, weights_.data(), sums + (n - first) * entries());
      }
    }
  }

  int64_t entries() const { return s_.diagonal ? s_.K : s_.K * s_.K; }

 private:
  // The inverses in the order of a row of a tile.
  void invert(const Range& r) const {
    T* to = weights_.data();
    const double *along_rows = plan_.in_columns ? o_.out : o_.in, *along_columns = plan_.in_columns ? o_.in : o_.out;
    const int64_t rows_of_group = plan_.in_columns && s_.shared ? 0 : plan_.rows,
                  columns_of_group = !plan_.in_columns && s_.shared ? 0 : plan_.columns, pitch = plan_.pitch(r.columns);
    for (int64_t g = r.group; g < r.group + r.groups; ++g) {
      for (int64_t i = r.row; i < r.row + r.rows; ++i, to += pitch) {
        k_.inverse_row(along_rows[g * rows_of_group + i], along_columns + g * columns_of_group + r.column, r.columns,
                       o_.precision, to);
        std::fill(to + r.columns, to + pitch, T(0));
      }
    }
    std::fill(to, weights_.data() + row_, T(0));
  }

  // Of `count` data points, sum_i inputs[n,g,i]^2 / (l_i m_j + p) in the order of a row of a tile.
  void rank_one_weights(const Range& r, int64_t first, int64_t count) const {
    const int64_t W = k_.width, length = plan_.length(r);
    for (int64_t g = 0; g < r.groups; ++g) {
      const T* const inputs = o_.inputs + first * o_.in_n + (r.group + g) * o_.in_g;
      const double *in = o_.in + (r.group + g) * s_.a, *out = o_.out + (s_.shared ? 0 : (r.group + g) * s_.b) + r.column;
      for (int64_t i0 = 0; i0 < s_.a; i0 += kInverses) {
        const int64_t rows = std::min(kInverses, s_.a - i0);
        for (int64_t n = 0; n < count; ++n) {
          const T* const from = inputs + n * o_.in_n + i0 * o_.in_i;
          T* const to = squares_.data() + n * rows;
          for (int64_t i = 0; i < rows; ++i) to[i] = from[i * o_.in_i] * from[i * o_.in_i];
        }
        for (int64_t j = 0; j < r.columns; j += W) {
          const int64_t lanes = std::min(W, r.columns - j);
          for (int64_t i = 0; i < rows; ++i) {
            T* const to = panel_.data() + i * W;
            k_.inverse_row(in[i0 + i], out + j, lanes, o_.precision, to);
            std::fill(to + lanes, to + plan_.whole_vectors(lanes), T(0));
          }
          // The zeros behind a group's last column are overwritten by the next group's weights.
          k_.product(count, lanes, rows, squares_.data(), rows, 1, panel_.data(), W, nullptr, 0, 0,
                     weights_.data() + g * r.columns + j, row_, i0 > 0, false);
        }
      }
    }
    for (int64_t n = 0; n < count; ++n) {
      T* const row = weights_.data() + n * row_;
      std::fill(row + length, row + plan_.whole_vectors(length), T(0));
    }
  }

  // Adds a data point's tile to its sums.
  void add(const Range& r, int64_t n, const T* weights, double* sums) const {
    const int64_t length = plan_.length(r), K = s_.K;
    const T* rows = as_it_lies(r, n);
    const int64_t row = rows ? o_.out_k : row_, count = plan_.whole_vectors(length);
    if (!rows) {
      rows = tile_.data();
      if (plan_.kind == Kind::products) {
        multiply(r, n);
      } else {
        gather(r, n);
      }
      for (int64_t k = 0; k < K; ++k) std::fill(tile_.data() + k * row_ + length, tile_.data() + k * row_ + count, T(0));
    }
    for (int64_t l = 0; l < K; l += kStrip) {
      const int64_t across = std::min(kStrip, K - l);
      k_.multiply_out(across, count, 1, rows + l * row, row, weights, 0, 1, weighted_.data(), row_);
      if (s_.diagonal) {
        for (int64_t k = 0; k < across; ++k) {
          T sum = 0;
          k_.row_products(1, 1, count, rows + (l + k) * row, row, weighted_.data() + k * row_, row_, &sum, 1);
          sums[l + k] += static_cast<double>(sum);
        }
        continue;
      }
      T* const strip = strip_.data();
      std::fill_n(strip, (K - l) * kStrip, T(0));
      k_.row_products(K - l, across, count, rows + l * row, row, weighted_.data(), row_, strip, kStrip);
      for (int64_t k = l; k < K; ++k) {
        for (int64_t c = 0; c < across; ++c) sums[k * K + l + c] += static_cast<double>(strip[(k - l) * kStrip + c]);
      }
    }
  }

  // The tile's rows where they lie side by side in the outputs and fill whole vectors, else null.
  const T* as_it_lies(const Range& r, int64_t n) const {
    const int64_t column = plan_.in_columns ? o_.out_i : o_.out_j, row = plan_.in_columns ? o_.out_j : o_.out_i;
    const bool side_by_side = plan_.kind != Kind::products && (column == 1 || r.columns == 1) &&
                              (row == r.columns || r.rows == 1) && (o_.out_g == r.rows * r.columns || r.groups == 1);
    return side_by_side && plan_.length(r) % plan_.vector == 0 ? first_element(r, n) : nullptr;
  }

  // Of a Jacobian that is given, or of the outputs at one position.
  const T* first_element(const Range& r, int64_t n) const {
    const int64_t i = plan_.in_columns ? r.column : r.row, j = plan_.in_columns ? r.row : r.column;
    return o_.outputs + n * o_.out_n + r.group * o_.out_g + i * o_.out_i + j * o_.out_j;
  }

  void gather(const Range& r, int64_t n) const {
    const int64_t column = plan_.in_columns ? o_.out_i : o_.out_j, row = plan_.in_columns ? o_.out_j : o_.out_i;
    for (int64_t k = 0; k < s_.K; ++k) {
      T* to = tile_.data() + k * row_;
      const T* const from = first_element(r, n) + k * o_.out_k;
      for (int64_t g = 0; g < r.groups; ++g) {
        for (int64_t i = 0; i < r.rows; ++i, to += r.columns) {
          const T* const source = from + g * o_.out_g + i * row;
          if (column == 1) {
            std::copy_n(source, r.columns, to);
          } else {
            for (int64_t j = 0; j < r.columns; ++j) to[j] = source[j * column];
          }
        }
      }
    }
  }

  // M's tile from the inputs and the outputs' gradients: the side of the columns is packed, the other is read where it lies.
  void multiply(const Range& r, int64_t n) const {
    const int64_t W = k_.width, pitch = plan_.pitch(r.columns), K = s_.K;
    for (int64_t g = 0; g < r.groups; ++g) {
      for (int64_t t = 0; t == 0 || t < s_.T; t += kPositions) {
        const int64_t positions = std::min(kPositions, s_.T - t);
        const T* const inputs = o_.inputs + n * o_.in_n + t * o_.in_t + (r.group + g) * o_.in_g;
        const T* const outputs = o_.outputs + n * o_.out_n + t * o_.out_t + (r.group + g) * o_.out_g;
        T* const to = tile_.data() + g * r.rows * pitch;
        if (!plan_.in_columns) {
          for (int64_t k = 0; k < K; ++k) {
            k_.pack(r.columns, positions, outputs + k * o_.out_k + r.column * o_.out_j, o_.out_j, o_.out_t, panel_.data());
            k_.product(r.rows, r.columns, positions, inputs + r.row * o_.in_i, o_.in_i, o_.in_t, panel_.data(), W, nullptr, 0,
                       0, to + k * row_, pitch, t > 0, false);
          }
          continue;
        }
        k_.pack(r.columns, positions, inputs + r.column * o_.in_i, o_.in_i, o_.in_t, panel_.data());
        if (K > r.rows) {
          for (int64_t j = 0; j < r.rows; ++j) {
            k_.product(K, r.columns, positions, outputs + (r.row + j) * o_.out_j, o_.out_k, o_.out_t, panel_.data(), W, nullptr,
                       0, 0, to + j * pitch, row_, t > 0, false);
          }
        } else {
          for (int64_t k = 0; k < K; ++k) {
            k_.product(r.rows, r.columns, positions, outputs + k * o_.out_k + r.row * o_.out_j, o_.out_j, o_.out_t,
                       panel_.data(), W, nullptr, 0, 0, to + k * row_, pitch, t > 0, false);
          }
        }
      }
    }
  }

  const Kernels<T>& k_;
  const Plan<T>& plan_;
  const KronVarianceSizes& s_;
  const Operands<T>& o_;
  const int64_t row_;  // from one output's row of a tile to the next
  const Buffer<T> tile_, weighted_, weights_, panel_, squares_, strip_;
};

// Some data points: sums of the parts, then variance[n,k,l] += sum_part sums[part][n][k][l] of k >= l, parts ascending.
template <class T, class Total>
void add_points(const Plan<T>& plan, const KronVarianceSizes& s, const Operands<T>& o, int64_t first, int64_t count,
                Total* variance) {
  const int64_t entries = s.diagonal ? s.K : s.K * s.K, together = plan.kind == Kind::rank_one ? kPoints : 1;
  const int64_t blocks = ceil_divide(count, together);
  const int64_t parts = std::max(std::min({plan.tiles, kTasks / blocks, kPartials / (count * entries)}), int64_t(1));
  const Buffer<double> sums(parts * count * entries);
  parallel_tasks(parts * blocks, [&](int64_t begin, int64_t end) {
    const Worker<T> worker(plan, s, o);
    while (begin < end) {
      const int64_t part = begin / blocks, block = begin % blocks, stop = std::min(blocks, block + end - begin);
      const int64_t from = block * together, to = std::min(stop * together, count);
      double* const own = sums.data() + (part * count + from) * entries;
      std::fill_n(own, (to - from) * entries, 0.0);
      worker.add(plan.tiles * part / parts, plan.tiles * (part + 1) / parts, first + from, first + to, own);
      begin += stop - block;
    }
  });
  for (int64_t n = 0; n < count; ++n) {
    for (int64_t k = 0; k < s.K; ++k) {
      for (int64_t l = s.diagonal ? k : 0; l <= k; ++l) {
        double sum = 0;
        for (int64_t part = 0; part < parts; ++part) {
          sum += sums.data()[(part * count + n) * entries + (s.diagonal ? k : k * s.K + l)];
        }
        Total* const own = variance + (first + n) * entries;
        if (s.diagonal) {
          own[k] += static_cast<Total>(sum);
        } else {
          own[k * s.K + l] += static_cast<Total>(sum);
          if (l < k) own[l * s.K + k] += static_cast<Total>(sum);
        }
      }
    }
  }
}

// The values of a matrix of eigenvalues, one after the other.
Buffer<double> values(const Tensor& t) {
  Buffer<double> out(t.numel());
  const double* const data = t.const_data_ptr<double>();
  for (int64_t i = 0; i < t.size(0); ++i) {
    for (int64_t j = 0; j < t.size(1); ++j) out.data()[i * t.size(1) + j] = data[i * t.stride(0) + j * t.stride(1)];
  }
  return out;
}

void kron_variance_(Tensor variance, const Tensor& outputs, const std::optional<Tensor>& inputs, const Tensor& eigenvalues_in,
                    const Tensor& eigenvalues_out, const Tensor& precision) {
  const KronVarianceSizes s = check_kron_variance(variance, outputs, inputs, eigenvalues_in, eigenvalues_out, precision);
  if (variance.numel() == 0 || outputs.numel() == 0 || s.a == 0) return;
  const Buffer<double> in = values(eigenvalues_in), out = values(eigenvalues_out);
  const int64_t entries = s.diagonal ? s.K : s.K * s.K, points = std::min(s.N, std::max(kPartials / entries, int64_t(1)));
  const auto add = [&](auto row, auto total) {
    using T = decltype(row);
    using Total = decltype(total);
    Operands<T> o{};
    o.outputs = outputs.const_data_ptr<T>();
    o.out_k = outputs.stride(0), o.out_n = outputs.stride(1), o.out_j = outputs.stride(4);
    if (inputs) {
      o.inputs = inputs->const_data_ptr<T>();
      o.in_n = inputs->stride(0), o.in_t = inputs->stride(1), o.in_g = inputs->stride(2), o.in_i = inputs->stride(3);
      o.out_t = outputs.stride(2), o.out_g = outputs.stride(3);
    } else {
      o.out_g = outputs.stride(2), o.out_i = outputs.stride(3);
    }
    o.in = in.data(), o.out = out.data(), o.precision = *precision.const_data_ptr<double>();
    const Plan<T> plan(!inputs ? Kind::given : s.T == 1 ? Kind::rank_one : Kind::products, s, o);
    for (int64_t n = 0; n < s.N; n += points) {
      add_points(plan, s, o, n, std::min(points, s.N - n), variance.mutable_data_ptr<Total>());
    }
  };
  if (outputs.scalar_type() == ScalarType::Double) {
    add(double(), double());
  } else if (variance.scalar_type() == ScalarType::Double) {
    add(float(), double());
  } else {
    add(float(), float());
  }
}

ELLA_REGISTER(CPU, m) { m.impl("kron_variance_", TORCH_BOX(&kron_variance_)); }

}  // namespace
}  // namespace ella

// kron_logdet and its first and second derivatives. The outer product of the eigenvalues is walked row by row, never stored.
// It is cut into tasks by the sizes alone and the tasks' sums, in double, are added in order: no result depends on threads.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "cpu/buffer.h"
#include "cpu/simd/kernels.h"
#include "kron/checks.h"

namespace ella {
namespace {

// A matrix of eigenvalues (or of a direction), as doubles.
class Doubles {
 public:
  explicit Doubles(const Tensor& t) : columns_(t.size(1)), buffer_(t.size(0) * t.size(1)) {
    ELLA_DISPATCH_FLOATING(t.scalar_type(), "kron_logdet", [&] {
      const scalar_t* data = t.const_data_ptr<scalar_t>();
      const int64_t s0 = t.stride(0), s1 = t.stride(1);
      for (int64_t i = 0; i < t.size(0); ++i) {
        for (int64_t j = 0; j < columns_; ++j) buffer_.data()[i * columns_ + j] = static_cast<double>(data[i * s0 + j * s1]);
      }
    });
  }
  const double* data() const { return buffer_.data(); }

 private:
  int64_t columns_;
  Buffer<double> buffer_;
};

double scalar(const Tensor& t) {
  double value = 0;
  ELLA_DISPATCH_FLOATING(t.scalar_type(), "kron_logdet", [&] { value = static_cast<double>(*t.const_data_ptr<scalar_t>()); });
  return value;
}

// A tensor of this shape from doubles.
Tensor rounded(const Tensor& like, std::initializer_list<int64_t> shape, const double* values) {
  Tensor out = empty_of(like, shape);
  ELLA_DISPATCH_FLOATING(like.scalar_type(), "kron_logdet", [&] {
    scalar_t* target = out.mutable_data_ptr<scalar_t>();
    const int64_t count = out.numel();
    for (int64_t i = 0; i < count; ++i) target[i] = static_cast<scalar_t>(values[i]);
  });
  return out;
}

// The table of l m + p as blocks of rows times columns. Eigenvalues shared by all groups make one block of it; the shorter side
// is the rows, so that the inner loops are long. Tasks are ranges of columns of one block.
class Table {
 public:
  static constexpr int64_t kColumns = 2048;

  explicit Table(const KronLogdetSizes& s)
      : blocks(s.shared ? 1 : s.G),
        swapped((s.shared ? s.G * s.a : s.a) > s.b),
        rows(swapped    ? s.b
             : s.shared ? s.G * s.a
                        : s.a),
        columns(swapped ? (s.shared ? s.G * s.a : s.a) : s.b),
        ranges(ceil_divide(columns, kColumns)),
        tasks(rows == 0 ? 0 : blocks * ranges) {}

  // Of an array over (G, a) and one over (G or 1, b), the one along rows and the one along columns.
  template <class A>
  const A& along_rows(const A& in, const A& out) const {
    return swapped ? out : in;
  }
  template <class A>
  const A& along_columns(const A& in, const A& out) const {
    return swapped ? in : out;
  }

  int64_t row_at(int64_t task) const { return task / ranges * rows; }
  int64_t column_at(int64_t task) const { return task / ranges * columns + task % ranges * kColumns; }
  int64_t length(int64_t task) const { return std::min(kColumns, columns - task % ranges * kColumns); }

  const int64_t blocks;
  const bool swapped;
  const int64_t rows, columns, ranges, tasks;
};

// l m + p is monotone in m: its ends tell whether the products of several stay in range.
double log_sum(double l, const double* m, int64_t count, double p, double smallest, double largest) {
  const double low = std::min(l * smallest, l * largest) + p, high = std::max(l * smallest, l * largest) + p;
  if (low > 0x1p-100 && high < 0x1p100) return logdet_kernels().log_row(l, m, count, p);
  double sum = 0;
  for (int64_t j = 0; j < count; ++j) sum += std::log(l * m[j] + p);
  return sum;
}

Tensor kron_logdet(const Tensor& eigenvalues_in, const Tensor& eigenvalues_out, const Tensor& precision) {
  const Table table(check_kron_logdet("kron_logdet", eigenvalues_in, eigenvalues_out, precision));
  const Doubles in(eigenvalues_in), out(eigenvalues_out);
  const double *l = table.along_rows(in, out).data(), *m = table.along_columns(in, out).data(), p = scalar(precision);
  const Buffer<double> sums(table.tasks);
  torch::stable::parallel_for(0, table.tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const double* columns = m + table.column_at(task);
      const int64_t count = table.length(task);
      double smallest = HUGE_VAL, largest = -HUGE_VAL;
      bool ordered = true;
      for (int64_t j = 0; j < count; ++j) {
        smallest = std::min(smallest, columns[j]);
        largest = std::max(largest, columns[j]);
        ordered = ordered && !std::isnan(columns[j]);
      }
      if (!ordered) smallest = NAN;
      double sum = 0;
      for (int64_t i = 0; i < table.rows; ++i) {
        sum += log_sum(l[table.row_at(task) + i], columns, count, p, smallest, largest);
      }
      sums.data()[task] = sum;
    }
  });
  double total = 0;
  for (int64_t task = 0; task < table.tasks; ++task) total += sums.data()[task];
  return rounded(eigenvalues_in, {}, &total);
}

// Runs `row(i, j, count, by_column, sums)` for row i and the columns j..j+count of every task: it adds to by_column and sets
// sums[0], the row's share, and sums[1], the scalar's.
template <class Row>
std::tuple<Tensor, Tensor, Tensor> sum_rows(const KronLogdetSizes& s, const Table& table, const Tensor& like, const Row& row) {
  const Buffer<double> by_row(table.blocks * table.rows), by_column(table.blocks * table.columns),
      partial(table.tasks * table.rows), totals(table.tasks);
  by_row.zero(0, table.blocks * table.rows);
  by_column.zero(0, table.blocks * table.columns);
  torch::stable::parallel_for(0, table.tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t j = table.column_at(task);
      double total = 0;
      for (int64_t i = 0; i < table.rows; ++i) {
        double sums[2];
        row(table.row_at(task) + i, j, table.length(task), by_column.data() + j, sums);
        partial.data()[task * table.rows + i] = sums[0];
        total += sums[1];
      }
      totals.data()[task] = total;
    }
  });
  double total = 0;
  for (int64_t task = 0; task < table.tasks; ++task) {
    double* target = by_row.data() + table.row_at(task);
    for (int64_t i = 0; i < table.rows; ++i) target[i] += partial.data()[task * table.rows + i];
    total += totals.data()[task];
  }
  const double *in = table.swapped ? by_column.data() : by_row.data(), *out = table.swapped ? by_row.data() : by_column.data();
  return {rounded(like, {s.G, s.a}, in), rounded(like, {s.shared ? 1 : s.G, s.b}, out), rounded(like, {}, &total)};
}

std::tuple<Tensor, Tensor, Tensor> kron_logdet_gradient(const Tensor& eigenvalues_in, const Tensor& eigenvalues_out,
                                                        const Tensor& precision) {
  const KronLogdetSizes s = check_kron_logdet("kron_logdet_gradient", eigenvalues_in, eigenvalues_out, precision);
  const Table table(s);
  const Doubles in(eigenvalues_in), out(eigenvalues_out);
  const double *l = table.along_rows(in, out).data(), *m = table.along_columns(in, out).data(), p = scalar(precision);
  const LogdetKernels& k = logdet_kernels();
  return sum_rows(s, table, eigenvalues_in, [&](int64_t i, int64_t j, int64_t count, double* by_column, double* sums) {
    k.gradient_row(l[i], m + j, count, p, by_column, sums);
  });
}

std::tuple<Tensor, Tensor, Tensor> kron_logdet_hvp(const Tensor& eigenvalues_in, const Tensor& eigenvalues_out,
                                                   const Tensor& precision, const Tensor& v_in, const Tensor& v_out,
                                                   const Tensor& v_precision) {
  const KronLogdetSizes s = check_kron_logdet_hvp(eigenvalues_in, eigenvalues_out, precision, v_in, v_out, v_precision);
  const Table table(s);
  const Doubles in(eigenvalues_in), out(eigenvalues_out), direction_in(v_in), direction_out(v_out);
  const double *l = table.along_rows(in, out).data(), *m = table.along_columns(in, out).data(), p = scalar(precision);
  const double *u = table.along_rows(direction_in, direction_out).data(),
               *v = table.along_columns(direction_in, direction_out).data(), w = scalar(v_precision);
  const LogdetKernels& k = logdet_kernels();
  return sum_rows(s, table, eigenvalues_in, [&](int64_t i, int64_t j, int64_t count, double* by_column, double* sums) {
    k.hvp_row(l[i], u[i], m + j, v + j, count, p, w, by_column, sums);
  });
}

ELLA_REGISTER(CPU, m) {
  m.impl("kron_logdet", TORCH_BOX(&kron_logdet));
  m.impl("kron_logdet_gradient", TORCH_BOX(&kron_logdet_gradient));
  m.impl("kron_logdet_hvp", TORCH_BOX(&kron_logdet_hvp));
}

}  // namespace
}  // namespace ella

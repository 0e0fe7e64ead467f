// kron_logdet and its first and second derivatives. The outer product of the eigenvalues is walked row by row, never stored.
// Rows are cut into tasks by the sizes alone and the tasks' sums, in double, are added in order: no result depends on threads.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "../common/checks.h"
#include "buffer.h"
#include "kernels.h"

namespace ella {
namespace {

constexpr int64_t kRowsOfTask = 256;

// A matrix of eigenvalues (or of a direction), as doubles.
class Doubles {
 public:
  explicit Doubles(const Tensor& t) : columns_(t.size(1)), buffer_(t, t.size(0) * t.size(1)) {
    ELLA_DISPATCH_FLOATING(t.scalar_type(), "kron_logdet", [&] {
      const scalar_t* data = t.const_data_ptr<scalar_t>();
      const int64_t s0 = t.stride(0), s1 = t.stride(1);
      for (int64_t i = 0; i < t.size(0); ++i) {
        for (int64_t j = 0; j < columns_; ++j) buffer_.data()[i * columns_ + j] = static_cast<double>(data[i * s0 + j * s1]);
      }
    });
  }
  const double* row(int64_t i) const { return buffer_.data() + i * columns_; }

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

struct Rows {
  explicit Rows(const KronLogdetSizes& s)
      : sizes(s), tasks_of_group(ceil_divide(s.a, kRowsOfTask)), tasks(s.G * tasks_of_group) {}
  int64_t group(int64_t task) const { return task / tasks_of_group; }
  int64_t out_row(int64_t task) const { return sizes.shared ? 0 : group(task); }
  int64_t begin(int64_t task) const { return task % tasks_of_group * kRowsOfTask; }
  int64_t end(int64_t task) const { return std::min(begin(task) + kRowsOfTask, sizes.a); }

  KronLogdetSizes sizes;
  int64_t tasks_of_group, tasks;
};

double log_sum(double l, const double* m, int64_t count, double p, double smallest, double largest) {
  // l m + p is monotone in m: its ends tell whether the products of eight stay in range.
  const double low = std::min(l * smallest, l * largest) + p, high = std::max(l * smallest, l * largest) + p;
  if (low > 0x1p-100 && high < 0x1p100) return logdet_kernels().log_row(l, m, count, p);
  double sum = 0;
  for (int64_t j = 0; j < count; ++j) sum += std::log(l * m[j] + p);
  return sum;
}

Tensor kron_logdet(const Tensor& eigenvalues_in, const Tensor& eigenvalues_out, const Tensor& precision) {
  const KronLogdetSizes s = check_kron_logdet("kron_logdet", eigenvalues_in, eigenvalues_out, precision);
  const Rows rows(s);
  const Doubles l(eigenvalues_in), m(eigenvalues_out);
  const double p = scalar(precision);
  const Buffer<double> sums(eigenvalues_in, rows.tasks);
  torch::stable::parallel_for(0, rows.tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const double* row = m.row(rows.out_row(task));
      double smallest = HUGE_VAL, largest = -HUGE_VAL;
      bool ordered = true;
      for (int64_t j = 0; j < s.b; ++j) {
        smallest = std::min(smallest, row[j]);
        largest = std::max(largest, row[j]);
        ordered = ordered && !std::isnan(row[j]);
      }
      if (!ordered) smallest = NAN;
      double sum = 0;
      for (int64_t i = rows.begin(task); i < rows.end(task); ++i) {
        if (s.b > 0) sum += log_sum(l.row(rows.group(task))[i], row, s.b, p, smallest, largest);
      }
      sums.data()[task] = sum;
    }
  });
  double total = 0;
  for (int64_t task = 0; task < rows.tasks; ++task) total += sums.data()[task];
  return rounded(eigenvalues_in, {}, &total);
}

// Runs `row(task, i, partial, sums)` for every row i: it adds to partial (b values a task) and fills the two sums of the row,
// of which the first is the row's value and the second adds to the scalar.
template <class Row>
std::tuple<Tensor, Tensor, Tensor> sum_rows(const Rows& rows, const Tensor& like, const Row& row) {
  const KronLogdetSizes& s = rows.sizes;
  const int64_t out_rows = s.shared ? 1 : s.G;
  const Buffer<double> by_row(like, s.G * s.a), partial(like, rows.tasks * s.b), total(like, rows.tasks),
      by_column(like, out_rows * s.b);
  torch::stable::parallel_for(0, rows.tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      partial.zero(task * s.b, (task + 1) * s.b);
      double sum = 0;
      for (int64_t i = rows.begin(task); i < rows.end(task); ++i) {
        double sums[2];
        row(task, i, partial.data() + task * s.b, sums);
        by_row.data()[rows.group(task) * s.a + i] = sums[0];
        sum += sums[1];
      }
      total.data()[task] = sum;
    }
  });
  by_column.zero(0, out_rows * s.b);
  double all = 0;
  for (int64_t task = 0; task < rows.tasks; ++task) {
    double* target = by_column.data() + rows.out_row(task) * s.b;
    for (int64_t j = 0; j < s.b; ++j) target[j] += partial.data()[task * s.b + j];
    all += total.data()[task];
  }
  return {rounded(like, {s.G, s.a}, by_row.data()), rounded(like, {out_rows, s.b}, by_column.data()), rounded(like, {}, &all)};
}

std::tuple<Tensor, Tensor, Tensor> kron_logdet_gradient(const Tensor& eigenvalues_in, const Tensor& eigenvalues_out,
                                                        const Tensor& precision) {
  const Rows rows(check_kron_logdet("kron_logdet_gradient", eigenvalues_in, eigenvalues_out, precision));
  const Doubles l(eigenvalues_in), m(eigenvalues_out);
  const double p = scalar(precision);
  const LogdetKernels& k = logdet_kernels();
  return sum_rows(rows, eigenvalues_in, [&](int64_t task, int64_t i, double* partial, double* sums) {
    k.gradient_row(l.row(rows.group(task))[i], m.row(rows.out_row(task)), rows.sizes.b, p, partial, sums);
  });
}

std::tuple<Tensor, Tensor, Tensor> kron_logdet_hvp(const Tensor& eigenvalues_in, const Tensor& eigenvalues_out,
                                                   const Tensor& precision, const Tensor& v_in, const Tensor& v_out,
                                                   const Tensor& v_precision) {
  const Rows rows(check_kron_logdet_hvp(eigenvalues_in, eigenvalues_out, precision, v_in, v_out, v_precision));
  const Doubles l(eigenvalues_in), m(eigenvalues_out), u(v_in), v(v_out);
  const double p = scalar(precision), w = scalar(v_precision);
  const LogdetKernels& k = logdet_kernels();
  return sum_rows(rows, eigenvalues_in, [&](int64_t task, int64_t i, double* partial, double* sums) {
    const int64_t g = rows.group(task), q = rows.out_row(task);
    k.hvp_row(l.row(g)[i], u.row(g)[i], m.row(q), v.row(q), rows.sizes.b, p, w, partial, sums);
  });
}

ELLA_REGISTER(CPU, m) {
  m.impl("kron_logdet", TORCH_BOX(&kron_logdet));
  m.impl("kron_logdet_gradient", TORCH_BOX(&kron_logdet_gradient));
  m.impl("kron_logdet_hvp", TORCH_BOX(&kron_logdet_hvp));
}

}  // namespace
}  // namespace ella

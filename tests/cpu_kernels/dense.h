// Test tensors as dense matrices of doubles, for oracles that are matrix algebra.
#pragma once
#include <Eigen/Dense>

#include "tests/cpu_kernels/oracle.h"

namespace hotbunk::kernels::test {

using Dense = Eigen::MatrixXd;

/// What the kernel sees of a tensor: (rows, cols), without the padding.
inline Dense dense(const Tensor& t) {
  return Dense::NullaryExpr(t.rows(), t.cols(), [&](Eigen::Index r, Eigen::Index c) { return t.at(r, c); });
}

inline double dense_error(const Tensor& actual, const Dense& wanted) {
  CHECK(actual.rows() == wanted.rows());
  CHECK(actual.cols() == wanted.cols());
  return error_of(actual, [&](std::int64_t r, std::int64_t c) { return wanted(r, c); });
}

inline void check_dense(const Tensor& actual, const Dense& wanted, double tolerance) {
  CHECK(dense_error(actual, wanted) <= tolerance);
  CHECK(actual.padding_intact());
}

}  // namespace hotbunk::kernels::test

// What each op is, in fp64 and by its definition in the catalogue: plain loops that share nothing with any kernel.
// Numbers come with how far a kernel may be from them (bounded.h); integers, and numbers that are only moved, are
// exact.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tests/conformance/bounded.h"
#include "tests/conformance/op_cases.h"

namespace hotbunk::conformance {

/// An operand before the op, row-major. Integers are whole numbers of it.
class Numbers {
 public:
  Numbers(DType dtype, std::vector<std::int64_t> shape, std::vector<double> values);
  DType dtype() const { return dtype_; }
  std::int64_t extent(std::size_t dim) const { return shape_.at(dim); }
  std::int64_t size() const { return std::ssize(values_); }
  /// All dimensions but the last one count rows.
  std::int64_t cols() const { return shape_.back(); }
  std::int64_t rows() const { return size() / cols(); }
  double operator()(std::int64_t i) const { return values_.at(static_cast<std::size_t>(i)); }
  double operator()(std::int64_t row, std::int64_t col) const { return (*this)(row * cols() + col); }
  std::int64_t whole(std::int64_t i) const { return static_cast<std::int64_t>((*this)(i)); }

 private:
  DType dtype_;
  std::vector<std::int64_t> shape_;
  std::vector<double> values_;
};

/// An output: what it was where the op finds numbers in it, else nothing.
struct Wanted {
  DType dtype;
  std::vector<std::int64_t> shape;
  std::vector<Bounded> numbers;       // of fp32 and bf16
  std::vector<std::uint64_t> wholes;  // of integers, two's complement
  std::int64_t cols() const { return shape.back(); }
  std::int64_t rows() const { return std::ssize(numbers) / cols(); }
  Bounded& operator()(std::int64_t i) { return numbers.at(static_cast<std::size_t>(i)); }
  Bounded& operator()(std::int64_t row, std::int64_t col) { return (*this)(row * cols() + col); }
  /// As a kernel stores it.
  void put(std::int64_t row, std::int64_t col, Bounded x) { (*this)(row, col) = rounded(x, dtype); }
  void put(std::int64_t i, Bounded x) { (*this)(i) = rounded(x, dtype); }
  void put_whole(std::int64_t i, std::int64_t x) {
    wholes.at(static_cast<std::size_t>(i)) = static_cast<std::uint64_t>(x);
  }
};

/// One op of a rank: what its formula reads and writes.
struct OracleCall {
  Op op;  // its kind and attributes
  const OpCase& drawn;
  std::vector<Numbers> inputs;
  std::vector<Wanted> outputs;
  std::int64_t place = 0;  // of the rank in its group
  bool asks(Attr a) const { return op.integer(a, 0) != 0; }
  /// The ids of a table or of logits that are here: a rank's part of them begins `vocab_stride` further for each place.
  struct Ids {
    std::int64_t begin, end;
    bool has(std::int64_t id) const { return id >= begin && id < end; }
  };
  Ids ids() const {
    const std::int64_t shift = place * op.integer(Attr::vocab_stride, 0), end = op.integer(Attr::vocab_end) + shift;
    return {op.integer(Attr::vocab_begin) + shift, std::min(end, op.integer(Attr::vocab, end))};
  }
  /// What is added to: what the i-th output was, or nothing.
  Bounded before(std::size_t output, std::int64_t i, Attr if_asked = Attr::accumulate) const {
    return asks(if_asked) ? outputs[output].numbers.at(static_cast<std::size_t>(i)) : Bounded(0.0);
  }
};

using Formula = void (*)(OracleCall&);
struct NamedFormula {
  OpKind kind;
  Formula formula;
};
std::span<const NamedFormula> row_formulas();        // data, products, activations, norms, rotations, losses, steps
std::span<const NamedFormula> attention_formulas();  // and what packs its operands
std::span<const NamedFormula> expert_formulas();
std::span<const NamedFormula> loss_formulas();  // and sampling, the optimizer

/// None of what computes nothing.
Formula formula_of(OpKind);

/// The outputs of a case, in its order, on the rank at `place`. given: of each operand, as the op finds it; of what it
/// must write anew whatever.
std::vector<Wanted> expected(const OpCase&, const std::vector<Numbers>& given, std::int64_t place);

}  // namespace hotbunk::conformance

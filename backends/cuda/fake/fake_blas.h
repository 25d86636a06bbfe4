// A double of cuBLASLt on the double of the driver: the entry points of blas_table.h. A product is a task of its
// stream, summed in fp32 in one order per shape; as the real one, it has no kernel for addresses that are aligned worse
// than was said, and its sums have another order than our kernels', unless it is told to have theirs.
#pragma once
#include <string>

#include "backends/cuda/blas_table.h"
#include "backends/cuda/fake/fake_driver.h"

namespace hotbunk::cuda {

class FakeBlasLt {
 public:
  /// C entry points know no object: at most one per process is alive at a time. The driver's double outlives it, counts
  /// its calls, and has its faults (FakeDriver::fail_call).
  explicit FakeBlasLt(FakeDriver&);
  ~FakeBlasLt();
  FakeBlasLt(const FakeBlasLt&) = delete;
  FakeBlasLt& operator=(const FakeBlasLt&) = delete;

  static BlasLt table();
  static bool has_entry(const std::string& name);
  /// From now on no kernel is found for any shape.
  void know_nothing() { knows_ = false; }

  /// From now on sums over K are one chain in steps of 16, as our kernels' are.
  void sum_as_ours() { as_ours_ = true; }

  struct Entries;

 private:
  friend struct Entries;
  FakeDriver& driver_;
  bool knows_ = true, as_ours_ = false;
};

}  // namespace hotbunk::cuda

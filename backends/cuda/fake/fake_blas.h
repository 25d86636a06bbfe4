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
  /// From now on searches end with this status, or find a kernel that has that one; blas::not_supported: there is none.
  void answer_search(BlasStatus search, BlasStatus kernel = 0) { search_ = search, kernel_ = kernel; }

  /// From now on sums over K are one chain in steps of 16, as our kernels' are.
  void sum_as_ours() { as_ours_ = true; }

  struct Entries;

 private:
  friend struct Entries;
  FakeDriver& driver_;
  BlasStatus search_ = 0, kernel_ = 0;
  bool as_ours_ = false;
};

}  // namespace hotbunk::cuda

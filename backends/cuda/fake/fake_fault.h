// What happens to one call of an entry point of the doubles, as `run --fake-fault` says it.
//
//   cuLaunchKernel:100        the hundredth launch fails
//   ncclSend:7:hang           the seventh send never returns
//   ncclAllGather:3:async@1   of rank 1's process the third gather is taken; then its communicator has an asynchronous
//                             error
//   seed:12                   one of those, drawn
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backends/cuda/fake/fake_driver.h"
#include "base/diagnostic.h"

namespace hotbunk::cuda {

struct FakeFault {
  enum class Kind : std::uint8_t { fails, hangs, fails_later };
  std::string entry;
  std::int64_t nth = 1;  // call of that entry point
  Kind kind = Kind::fails;
  std::optional<int> rank;  // of ranks that are processes, the one that meets it; nullopt: all
};

/// E708 where it names no call of the driver, cuBLASLt, cuDNN or NCCL, one that cannot fail later, or no rank.
Result<FakeFault> fake_fault_from(const std::string& text);
/// For what is wrong with `--fake-fault text`.
Diagnostic wrong_fault(const std::string& text, const std::string& why, const std::string& help);
std::string text_of(const FakeFault&);

/// One of the calls of these entry points, each as likely, and what happens to it: among the first 64 calls, early
/// ones more often. `processes`: how many ranks there are as processes, one of which meets it; else 0.
FakeFault drawn_fault(std::uint64_t seed, const std::vector<std::string>& entries, int processes);
/// The entry points that a run may call: the driver's, and with processes NCCL's.
std::vector<std::string> entries_with_faults(bool processes);

/// From now on.
void put(FakeDriver&, const FakeFault&);

}  // namespace hotbunk::cuda

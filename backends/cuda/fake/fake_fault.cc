#include "backends/cuda/fake/fake_fault.h"

#include <fmt/format.h>

#include <array>
#include <limits>
#include <string_view>

#include "backends/cuda/fake/fake_blas.h"
#include "backends/cuda/fake/fake_dnn.h"
#include "backends/cuda/fake/fake_nccl.h"
#include "base/parse.h"
#include "base/rng.h"

namespace hotbunk::cuda {
namespace {

bool is_known(const std::string& entry) {
  return FakeDriver::has_entry(entry) || FakeNccl::has_entry(entry) || FakeBlasLt::has_entry(entry) ||
         FakeDnn::has_entry(entry);
}

/// Takes `suffix` off.
bool ends(std::string& text, std::string_view suffix) {
  if (!text.ends_with(suffix)) return false;
  text.resize(text.size() - suffix.size());
  return true;
}

}  // namespace

Diagnostic wrong_fault(const std::string& text, const std::string& why, const std::string& help) {
  return {.code = "E708",
          .message = fmt::format("--fake-fault '{}' {}", text, why),
          .where = {},
          .notes = {},
          .help = help};
}

Result<FakeFault> fake_fault_from(const std::string& text) {
  const auto no_call = [&] {
    return fail(wrong_fault(text, "names no call of the driver, cuBLASLt, cuDNN or NCCL",
                            "write ENTRY:N, ENTRY:N:hang, of NCCL also ENTRY:N:async, or seed:S, as in "
                            "cuLaunchKernel:100"));
  };
  const auto colon = text.find(':');
  if (colon == std::string::npos) return no_call();
  FakeFault out{.entry = text.substr(0, colon), .rank = {}};
  std::string rest = text.substr(colon + 1);
  if (const auto at = rest.find('@'); at != std::string::npos) {
    const auto rank = parse_integer(rest.substr(at + 1));
    if (!rank || *rank < 0 || *rank > std::numeric_limits<int>::max())
      return fail(wrong_fault(text, "names no rank behind its @", "write a rank's number, from 0, or leave @RANK out"));
    out.rank = static_cast<int>(*rank);
    rest.resize(at);
  }
  if (ends(rest, ":hang")) out.kind = FakeFault::Kind::hangs;
  else if (ends(rest, ":async")) out.kind = FakeFault::Kind::fails_later;
  const auto nth = parse_integer(rest);
  if (!is_known(out.entry) || !nth || *nth < 1) return no_call();
  if (out.kind == FakeFault::Kind::fails_later && !FakeNccl::may_fail_later(out.entry))
    return fail(wrong_fault(text,
                            fmt::format("is of {}, which says at once that it fails, and cannot fail later", out.entry),
                            "leave :async out: only calls of NCCL with a communicator are taken and fail later"));
  out.nth = *nth;
  return out;
}

std::string text_of(const FakeFault& f) {
  return fmt::format("{}:{}{}{}", f.entry, f.nth,
                     f.kind == FakeFault::Kind::hangs         ? ":hang"
                     : f.kind == FakeFault::Kind::fails_later ? ":async"
                                                              : "",
                     f.rank ? fmt::format("@{}", *f.rank) : "");
}

std::vector<std::string> entries_with_faults(bool processes) {
  std::vector<std::string> out;
#define HB_CUDA_NAMED(entry) out.emplace_back(#entry);
  HB_CUDA_ENTRIES(HB_CUDA_NAMED)
#undef HB_CUDA_NAMED
#define HB_NCCL_NAMED(entry, ...) \
  if (processes) out.emplace_back(#entry);
  HB_NCCL_ENTRIES(HB_NCCL_NAMED)
  HB_NCCL_OPTIONAL_ENTRIES(HB_NCCL_NAMED)
#undef HB_NCCL_NAMED
  return out;
}

FakeFault drawn_fault(std::uint64_t seed, const std::vector<std::string>& entries, int processes) {
  const auto words = random_words(seed, RngPurpose::test, 0, 0);
  FakeFault out{.entry = entries[words[0] % entries.size()], .rank = {}};
  const std::uint32_t up_to = 1U << words[1] % 7;
  out.nth = 1 + words[1] / 7 % up_to;
  const std::uint32_t kind = words[2] % 3;
  if (kind == 1) out.kind = FakeFault::Kind::hangs;
  if (kind == 2 && FakeNccl::may_fail_later(out.entry)) out.kind = FakeFault::Kind::fails_later;
  if (processes > 0) out.rank = static_cast<int>(words[3] % static_cast<std::uint32_t>(processes));
  return out;
}

void put(FakeDriver& driver, const FakeFault& f) {
  switch (f.kind) {
    case FakeFault::Kind::fails:
      return driver.fail_call(f.entry, f.nth,
                              f.entry == "cuMemCreate" ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_LAUNCH_FAILED);
    case FakeFault::Kind::hangs:
      return driver.hang_call(f.entry, f.nth);
    case FakeFault::Kind::fails_later:
      return driver.fail_call_later(f.entry, f.nth);
  }
}

}  // namespace hotbunk::cuda

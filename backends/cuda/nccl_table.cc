#include "backends/cuda/nccl_table.h"

#include <fmt/format.h>

#include "backends/cuda/shared_library.h"

namespace hotbunk::cuda {
namespace {

constexpr int oldest_nccl = 21400;  // blocking = 0

Diagnostic no_nccl(const std::string& why) {
  return {.code = "E642",
          .message = "no NCCL: " + why,
          .where = {},
          .notes = {"several processes, each with a device of its own, talk through NCCL"},
          .help = "install NCCL 2.14 or later (libnccl.so.2), or start the run once: then all ranks share one device"};
}

}  // namespace

std::string nccl_version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

Result<Nccl> open_nccl(const std::string& name) {
  SharedLibrary library({name});
  Nccl nccl;
#define HB_NCCL_NEED(name, ...) library.find(nccl.name, #name);
#define HB_NCCL_FIND(name, ...) library.find_optional(nccl.name, #name);
  HB_NCCL_ENTRIES(HB_NCCL_NEED)
  HB_NCCL_OPTIONAL_ENTRIES(HB_NCCL_FIND)
#undef HB_NCCL_NEED
#undef HB_NCCL_FIND
  if (!library.missing().empty()) return fail(no_nccl(library.missing()));
  int version = 0;
  if (nccl.ncclGetVersion(&version) != NcclResult::success)
    return fail(no_nccl(fmt::format("{} gives no version", library.name())));
  if (version < oldest_nccl)
    return fail(no_nccl(fmt::format("{} is {}, and calls can be given up since {}", library.name(),
                                    nccl_version_text(version), nccl_version_text(oldest_nccl))));
  library.keep();
  return nccl;
}

}  // namespace hotbunk::cuda

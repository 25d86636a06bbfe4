#include "backends/cuda/nccl_table.h"

#include <dlfcn.h>
#include <fmt/format.h>

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

Result<Nccl> open_nccl(const std::string& library) {
  void* handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays open: the table points into it
  if (handle == nullptr) {
    const char* why = ::dlerror();
    return fail(no_nccl(why != nullptr ? why : library));
  }
  Nccl nccl;
  std::string missing;
#define HB_NCCL_FIND(name, ...) nccl.name = reinterpret_cast<decltype(nccl.name)>(::dlsym(handle, #name));
#define HB_NCCL_NEED(name, ...) \
  HB_NCCL_FIND(name)            \
  if (nccl.name == nullptr && missing.empty()) missing = #name;
  HB_NCCL_ENTRIES(HB_NCCL_NEED)
  HB_NCCL_OPTIONAL_ENTRIES(HB_NCCL_FIND)
#undef HB_NCCL_NEED
#undef HB_NCCL_FIND
  std::string why;
  if (int version = 0; !missing.empty()) why = fmt::format("{} lacks {}", library, missing);
  else if (nccl.ncclGetVersion(&version) != NcclResult::success) why = fmt::format("{} gives no version", library);
  else if (version < oldest_nccl)
    why = fmt::format("{} is {}, and calls can be given up since {}", library, nccl_version_text(version),
                      nccl_version_text(oldest_nccl));
  if (why.empty()) return nccl;
  ::dlclose(handle);
  return fail(no_nccl(why));
}

}  // namespace hotbunk::cuda

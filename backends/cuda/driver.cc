#include "backends/cuda/driver.h"

#include <dlfcn.h>
#include <fmt/format.h>

namespace hotbunk::cuda {
namespace {

// cuda.h renames entry points to their present versions by macros (cuMemAlloc is cuMemAlloc_v2): the name that the
// library exports is what the macro expands to.
#define HB_TEXT_OF(name) #name
#define HB_EXPORTED(name) HB_TEXT_OF(name)

Diagnostic no_driver(const std::string& why) {
  return {.code = "E640",
          .message = "no CUDA driver: " + why,
          .where = {},
          .notes = {},
          .help = "install the NVIDIA driver, or run on CPU ranks"};
}

}  // namespace

Result<Driver> open_driver(const std::string& library) {
  void* handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays open: the table points into it
  if (handle == nullptr) {
    const char* why = ::dlerror();
    return fail(no_driver(why != nullptr ? why : library));
  }
  Driver driver;
  std::string missing;
#define HB_CUDA_FIND(name)                                                                   \
  driver.name = reinterpret_cast<decltype(driver.name)>(::dlsym(handle, HB_EXPORTED(name))); \
  if (driver.name == nullptr && missing.empty()) missing = HB_EXPORTED(name);
  HB_CUDA_ENTRIES(HB_CUDA_FIND)
#undef HB_CUDA_FIND
  if (missing.empty()) return driver;
  ::dlclose(handle);
  return fail(no_driver(fmt::format("{} lacks {}: it is older than CUDA 12", library, missing)));
}

}  // namespace hotbunk::cuda

#include "backends/cuda/driver.h"

#include "backends/cuda/shared_library.h"

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

Result<Driver> open_driver(const std::string& name) {
  SharedLibrary library({name});
  Driver driver;
#define HB_CUDA_FIND(name) library.find(driver.name, HB_EXPORTED(name));
  HB_CUDA_ENTRIES(HB_CUDA_FIND)
#undef HB_CUDA_FIND
  if (const std::string& missing = library.missing(); !missing.empty())
    return fail(no_driver(library.name().empty() ? missing : missing + ": it is older than CUDA 12"));
  library.keep();
  return driver;
}

}  // namespace hotbunk::cuda

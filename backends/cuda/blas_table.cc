#include "backends/cuda/blas_table.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <vector>

namespace hotbunk::cuda {
namespace {

Diagnostic no_blas(const std::string& why) {
  return {.code = "E643",
          .message = "no cuBLASLt: " + why,
          .where = {},
          .notes = {},
          .help = "install it (libcublas), or run with --products own"};
}

}  // namespace

std::string blas_version_text(std::size_t v) { return fmt::format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100); }

Result<BlasLt> open_blas(const std::string& library) {
  void* handle = nullptr;
  std::string why;
  const auto names = library.empty() ? std::vector<std::string>{"libcublasLt.so.13", "libcublasLt.so.12"}
                                     : std::vector<std::string>{library};
  for (const std::string& name : names) {
    handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays open: the table points into it
    if (handle != nullptr) break;
    const char* said = ::dlerror();
    if (why.empty()) why = said != nullptr ? said : name;
  }
  if (handle == nullptr) return fail(no_blas(why));
  BlasLt blas;
  std::string missing;
#define HB_BLAS_FIND(name, ...)                                               \
  blas.name = reinterpret_cast<BlasLt::name##_type*>(::dlsym(handle, #name)); \
  if (blas.name == nullptr && missing.empty()) missing = #name;
  HB_BLAS_ENTRIES(HB_BLAS_FIND)
#undef HB_BLAS_FIND
  if (missing.empty()) return blas;
  ::dlclose(handle);
  return fail(no_blas(fmt::format("{} lacks {}", library.empty() ? names.front() : library, missing)));
}

}  // namespace hotbunk::cuda

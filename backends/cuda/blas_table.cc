#include "backends/cuda/blas_table.h"

#include <fmt/format.h>

#include <vector>

#include "backends/cuda/shared_library.h"

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

Result<BlasLt> open_blas(const std::string& name) {
  SharedLibrary library(name.empty() ? std::vector<std::string>{"libcublasLt.so.13", "libcublasLt.so.12"}
                                     : std::vector<std::string>{name});
  BlasLt blas;
#define HB_BLAS_FIND(name, ...) library.find(blas.name, #name);
  HB_BLAS_ENTRIES(HB_BLAS_FIND)
#undef HB_BLAS_FIND
  if (!library.missing().empty()) return fail(no_blas(library.missing()));
  library.keep();
  return blas;
}

}  // namespace hotbunk::cuda

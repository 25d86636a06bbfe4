#include "backends/cuda/dnn_table.h"

#include <fmt/format.h>

#include "backends/cuda/shared_library.h"

namespace hotbunk::cuda {
namespace {

// Attention's backward in 16 bits is wrong in 9.10.0 and 9.10.1, and before 9.10 a mask must be put on twice (NVIDIA's
// cudnn-frontend 1.32, which refuses or works around these versions).
constexpr std::size_t oldest_dnn = 91100;

Diagnostic no_dnn(const std::string& why) {
  return {.code = "E644",
          .message = "no cuDNN: " + why,
          .where = {},
          .notes = {},
          .help = "install cuDNN 9.11 or later (libcudnn.so.9), or run with --attention-backward own"};
}

}  // namespace

std::string dnn_version_text(std::size_t v) { return fmt::format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100); }

Result<Dnn> open_dnn(const std::string& name) {
  SharedLibrary library({name});
  Dnn dnn;
#define HB_DNN_FIND(name, ...) library.find(dnn.name, #name);
  HB_DNN_ENTRIES(HB_DNN_FIND)
#undef HB_DNN_FIND
  if (!library.missing().empty()) return fail(no_dnn(library.missing()));
  if (const std::size_t version = dnn.cudnnGetVersion(); version < oldest_dnn)
    return fail(no_dnn(fmt::format("{} is {}, and attention's backward is right since {}", library.name(),
                                   dnn_version_text(version), dnn_version_text(oldest_dnn))));
  library.keep();
  return dnn;
}

}  // namespace hotbunk::cuda

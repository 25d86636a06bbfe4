#include "backends/cuda/dnn_table.h"

#include <dlfcn.h>
#include <fmt/format.h>

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

Result<Dnn> open_dnn(const std::string& library) {
  void* handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays open: the table points into it
  if (handle == nullptr) {
    const char* why = ::dlerror();
    return fail(no_dnn(why != nullptr ? why : library));
  }
  Dnn dnn;
  std::string why;
#define HB_DNN_FIND(name, ...)                                            \
  dnn.name = reinterpret_cast<Dnn::name##_type*>(::dlsym(handle, #name)); \
  if (dnn.name == nullptr && why.empty()) why = fmt::format("{} lacks {}", library, #name);
  HB_DNN_ENTRIES(HB_DNN_FIND)
#undef HB_DNN_FIND
  if (why.empty() && dnn.cudnnGetVersion() < oldest_dnn)
    why = fmt::format("{} is {}, and attention's backward is right since {}", library,
                      dnn_version_text(dnn.cudnnGetVersion()), dnn_version_text(oldest_dnn));
  if (why.empty()) return dnn;
  ::dlclose(handle);
  return fail(no_dnn(why));
}

}  // namespace hotbunk::cuda

#include "backends/cuda/shared_library.h"

#include <dlfcn.h>

namespace hotbunk::cuda {

SharedLibrary::SharedLibrary(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    handle_ = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) {
      name_ = name, missing_.clear();
      return;
    }
    const char* why = ::dlerror();
    if (missing_.empty()) missing_ = why != nullptr ? why : name;
  }
}

SharedLibrary::~SharedLibrary() {
  if (handle_ != nullptr) ::dlclose(handle_);
}

void* SharedLibrary::address_of(const char* entry) const {
  return handle_ == nullptr ? nullptr : ::dlsym(handle_, entry);
}

void SharedLibrary::lacks(const char* entry) {
  if (missing_.empty()) missing_ = name_ + " lacks " + entry;
}

}  // namespace hotbunk::cuda

// What is opened at run time, so that the build and a machine without it need nothing: the driver, NCCL, cuBLASLt,
// cuDNN.
#pragma once
#include <string>
#include <vector>

namespace hotbunk::cuda {

/// A library of this machine whose entry points go into a table. Not copyable: closed with this object, unless kept.
class SharedLibrary {
 public:
  /// The first of these that opens; none: missing() says why the first did not.
  explicit SharedLibrary(const std::vector<std::string>& names);
  ~SharedLibrary();
  SharedLibrary(const SharedLibrary&) = delete;
  SharedLibrary& operator=(const SharedLibrary&) = delete;

  /// What was opened.
  const std::string& name() const { return name_; }
  /// "" or what is not there: the library, or the first entry point that it was asked for and lacks.
  const std::string& missing() const { return missing_; }

  template <class Function>
  void find(Function*& pointer, const char* entry) {
    if (pointer = reinterpret_cast<Function*>(address_of(entry)); pointer == nullptr) lacks(entry);
  }
  /// nullptr where an older library has none.
  template <class Function>
  void find_optional(Function*& pointer, const char* entry) {
    pointer = reinterpret_cast<Function*>(address_of(entry));
  }

  /// Open to the end of the process: a table points into it.
  void keep() { handle_ = nullptr; }

 private:
  void* address_of(const char* entry) const;
  void lacks(const char* entry);

  void* handle_ = nullptr;
  std::string name_, missing_;
};

}  // namespace hotbunk::cuda

// Internal faults: conditions that no input should reach. A user's mistake is a Diagnostic (diagnostic.h).
#pragma once
#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace hotbunk {

/// Thrown by HB_CHECK; `execute` adds rank, phase and op before it reaches the user (exit code 3).
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// A failure of the world at run time: a dead rank, an exhausted arena, a broken socket (exit code 3).
class RuntimeFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void throw_internal(const char* file, int line, const char* condition, const std::string& message) {
  throw InternalError(fmt::format("internal check failed: {} ({}:{}) {}", condition, file, line, message));
}

}  // namespace hotbunk

#define HB_CHECK(condition, ...)                                                                           \
  do {                                                                                                     \
    if (!(condition)) ::hotbunk::throw_internal(__FILE__, __LINE__, #condition, fmt::format(__VA_ARGS__)); \
  } while (false)

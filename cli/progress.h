// One line on a terminal's stderr while long work goes on; nothing anywhere else.
#pragma once
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>

namespace hotbunk {

class ProgressLine {
 public:
  ProgressLine() : shown_(isatty(fileno(stderr)) != 0) {}
  ~ProgressLine() {
    if (written_) std::fputs("\r\033[K", stderr);
  }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  /// Replaces what stood there, ten times a second at most.
  template <class Text>
  void show(Text&& text) {
    if (!shown_) return;
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < std::chrono::milliseconds(100)) return;
    last_ = now;
    written_ = true;
    std::fprintf(stderr, "\r\033[K%s", std::string(text()).c_str());
  }

 private:
  bool shown_, written_ = false;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace hotbunk

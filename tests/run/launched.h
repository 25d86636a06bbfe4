// The program in the background, and ranks that a test starts by hand as torchrun would: a port of their own, and what
// each finds in its environment.
#pragma once
#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/reserved_port.h"
#include "tests/run/program.h"

namespace hotbunk {

/// The program, started and not waited for; what it says on stderr is in the file `said`, what it prints in `printed`.
/// `before`: words of a command that starts it.
class Running {
 public:
  Running(const std::string& arguments, const fs::path& said, const std::map<std::string, std::string>& variables = {},
          const std::string& before = "", const fs::path& printed = "/dev/null") {
    std::vector<std::string> words;
    std::istringstream split(fmt::format("{} {} {}", before, program_file, arguments));
    for (std::string word; split >> word;) words.push_back(word);
    std::ofstream(said).close();  // what a run before said is not this one's
    std::fflush(nullptr);         // or the child prints our buffers again
    pid_ = ::fork();
    if (pid_ != 0) return;
    if (!std::freopen(said.c_str(), "w", stderr) || !std::freopen(printed.c_str(), "w", stdout)) ::_exit(9);
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    ::execvp(argv[0], argv.data());
    ::_exit(9);
  }
  ~Running() {
    if (!ended_) kill(SIGKILL), wait();
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  pid_t pid() const { return pid_; }
  void kill(int signal) const { ::kill(pid_, signal); }
  /// The exit code, or 128 + the signal that killed it.
  int wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    ended_ = true;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  bool ended_within(double seconds, int& code) {
    for (double waited = 0.0; waited < seconds; waited += 0.005) {
      int status = 0;
      if (::waitpid(pid_, &status, WNOHANG) == pid_) {
        ended_ = true;
        code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        return true;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }

 private:
  pid_t pid_ = -1;
  bool ended_ = false;
};

/// Whether the text stands in the file within a minute, on a machine that others use too; instrumented code has ten.
inline bool wait_for_text(const fs::path& file, const std::string& text) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr int looks = 12'000;
#else
  constexpr int looks = 1'200;
#endif
  for (int i = 0; i < looks; ++i) {
    if (text_of(file).find(text) != std::string::npos) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return false;
}

/// What torchrun sets for one rank of a world on this host; and ranks share its cores, so that idle teams do not spin.
inline std::map<std::string, std::string> rank_variables(std::size_t rank, std::size_t world,
                                                         const ReservedPort& port) {
  const std::string number = std::to_string(rank);
  return {{"RANK", number},
          {"LOCAL_RANK", number},
          {"WORLD_SIZE", std::to_string(world)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port.number())},
          {"OMP_WAIT_POLICY", "passive"}};
}

}  // namespace hotbunk

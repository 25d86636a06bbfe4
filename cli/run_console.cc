#include "cli/run_console.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "base/format.h"

namespace hotbunk {
namespace {

constexpr double pace_of_latest = 0.1;
constexpr std::int32_t lines_in_pipe = 100;

/// "45 s", "2:05 min", "3:07 h".
std::string duration(double seconds) {
  const auto s = static_cast<long long>(std::llround(seconds));
  if (s < 100) return fmt::format("{} s", s);
  if (s < 6000) return fmt::format("{}:{:02} min", s / 60, s % 60);
  return fmt::format("{}:{:02} h", s / 3600, s / 60 % 60);
}

int terminal_columns() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

struct Field {
  std::string text;
  int importance;  // the lowest go first on a narrow terminal
};

}  // namespace

RunConsole::RunConsole(const Scenario& scenario, std::int32_t first_step, bool terminal)
    : scenario_(scenario), first_step_(first_step), terminal_(terminal) {}

std::string RunConsole::line(const StepFigures& step, int width) const {
  const auto& values = step.metrics.values;
  const double step_s = step.step_seconds(), tokens = trained_tokens(scenario_, step.metrics);
  std::vector<Field> fields = {{fmt::format("step {}/{}", step.metrics.step, scenario_.steps), 9},
                               {format_seconds(step_s), 5}};
  const auto add = [&](const char* label, const char* name, int digits, int importance) {
    if (const auto found = values.find(name); found != values.end())
      fields.push_back({fmt::format("{} {:.{}f}", label, found->second, digits), importance});
  };
  if (step_s > 0.0 && tokens > 0.0) fields.push_back({format_count(std::llround(tokens / step_s)) + " tokens/s", 4});
  add("reward", "reward", 4, 8);
  if (scenario_.algorithm.name != AlgorithmName::sft) add("response", "response_length/mean", 1, 2);
  add("loss", "loss", 4, 7);
  add("grad norm", "actor/grad_norm", 4, 3);
  fields.push_back({"memory " + format_bytes(static_cast<double>(step.device.peak_bytes)), 1});
  if (const auto left = scenario_.steps - step.metrics.step; left > 0)
    fields.push_back({duration(static_cast<double>(left) * pace_s_) + " left", 6});
  const auto joined = [&] {
    std::string out;
    for (const Field& f : fields) out += (out.empty() ? "" : "  ") + f.text;
    return out;
  };
  while (width > 0 && fields.size() > 1 && static_cast<int>(joined().size()) > width)
    fields.erase(std::ranges::min_element(fields, {}, &Field::importance));
  std::string out = joined();
  if (width > 0) out.resize(std::min(out.size(), static_cast<std::size_t>(width)));
  return out;
}

/// The first ten steps' tenth, and later ones at distances of 1, 2 or 5 times a power of ten.
bool RunConsole::shown_in_pipe(std::int32_t step) const {
  std::int64_t distance = 10;
  while (scenario_.steps / distance > lines_in_pipe) {
    std::int64_t power = 1;
    while (power * 10 <= distance) power *= 10;
    distance = distance / power == 2 ? 5 * power : 2 * distance;
  }
  return step == first_step_ || step == scenario_.steps || step % distance == 0;
}

void RunConsole::show(const StepFigures& step) {
  const double step_s = step.step_seconds();
  pace_s_ = pace_s_ == 0.0 ? step_s : (1.0 - pace_of_latest) * pace_s_ + pace_of_latest * step_s;
  const bool last = step.metrics.step == scenario_.steps;
  // One column stays free: a terminal that is full to the edge may begin a new line by itself.
  if (terminal_)
    std::fprintf(stderr, "\r\033[K%s%s", line(step, std::max(1, terminal_columns() - 1)).c_str(), last ? "\n" : "");
  else if (shown_in_pipe(step.metrics.step)) std::fprintf(stderr, "%s\n", line(step).c_str());
}

}  // namespace hotbunk

#include "reports/shown_samples.h"

#include <fmt/format.h>

#include <fstream>
#include <optional>
#include <string>

#include "base/json.h"
#include "base/lines.h"

namespace hotbunk {
namespace {

using Json = nlohmann::ordered_json;

/// Of one step, seen line by line.
struct Extremes {
  std::optional<Json> best, worst;
  void add(const Json& line) {
    const double reward = line.value("reward", 0.0);
    if (!best || reward > best->value("reward", 0.0)) best = line;
    if (!worst || reward < worst->value("reward", 0.0)) worst = line;
  }
  void append(std::vector<Json>& out) const {
    if (best) out.push_back(*best);
    if (worst && *worst != *best) out.push_back(*worst);
  }
};

bool is_sample(const Json& line) {
  return line.is_object() && line.contains("step") && line["step"].is_number_integer() && line.contains("tokens") &&
         line["tokens"].is_object() && (!line.contains("reward") || line["reward"].is_number());
}

}  // namespace

Result<std::vector<Json>> read_shown_samples(const std::filesystem::path& path) {
  std::vector<Json> out;
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return out;
  std::ifstream file(path);
  std::optional<std::int64_t> first_step, last_step;
  Extremes first, last;
  std::string text;
  for (int number = 1; next_line(file, text) < LineRead::failed; ++number) {
    const Json line = json_or_discarded<Json>(text);
    if (!is_sample(line))
      return fail(Diagnostic{.code = line.is_discarded() ? "E111" : "E112",
                             .message = "this line is no sample",
                             .where = {path.string(), number, 0},
                             .notes = {},
                             .help = "the file is damaged or cut short: run again, or remove it"});
    const auto step = line["step"].get<std::int64_t>();
    if (!first_step) first_step = step;
    if (step == *first_step) {
      first.add(line);
      continue;
    }
    if (last_step != step) last_step = step, last = {};
    last.add(line);
  }
  first.append(out);
  last.append(out);
  return out;
}

}  // namespace hotbunk

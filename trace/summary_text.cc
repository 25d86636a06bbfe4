#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "trace/summary.h"
#include "trace/text_table.h"

namespace hotbunk {
namespace {

using Json = nlohmann::ordered_json;

/// Bytes, or "-" for none, so that what matters stands out.
std::string cell(std::int64_t bytes) { return bytes == 0 ? "-" : format_bytes(static_cast<double>(bytes)); }

std::int64_t bytes_at(const Json& object, const char* key) { return object.at(key).get<std::int64_t>(); }

std::string verdict(const Json& s, bool colour) {
  const Json& memory = s.at("memory");
  const std::int64_t capacity = bytes_at(memory, "capacity_bytes"), mapped = bytes_at(memory, "mapped_peak_bytes");
  const std::int64_t overhead =
      memory.at("by_rank").empty() ? 0 : bytes_at(memory.at("by_rank").front().at("at_peak"), "overhead");
  const std::int64_t need = mapped + overhead;
  const bool fits = s.at("fits").get<bool>();
  std::string where = fmt::format("{} live at the peak: rank {}, phase {}", cell(bytes_at(memory, "peak_bytes")),
                                  memory.at("peak_rank").get<int>(), memory.at("peak_phase").get<std::string>());
  std::string room = "no capacity set";
  if (capacity > 0)
    room = fmt::format("{} mapped{} of {}", format_bytes(static_cast<double>(need)),
                       overhead > 0 ? " with overhead" : "", format_bytes(static_cast<double>(capacity)));
  return fmt::format("{}  {}; {}\n", paint(fits ? "fits" : "does not fit", fits ? "1;32" : "1;31", colour), room,
                     where);
}

std::string speed(const Json& s) {
  return fmt::format("{} over {} step{}: {} per iteration, {:.4g} tokens/s, train MFU {:.1f} %\n",
                     s.at("source").get<std::string>(), s.at("steps").get<int>(),
                     s.at("steps").get<int>() == 1 ? "" : "s", format_seconds(s.at("iteration_seconds").get<double>()),
                     s.at("tokens_per_second").get<double>(), 100.0 * s.at("mfu").get<double>());
}

/// Mean over the steps in which a phase ran, in order of first appearance.
std::string phase_table(const Json& s, bool colour) {
  std::vector<std::string> order;
  std::map<std::string, std::pair<double, int>> totals;
  double all = 0.0;
  for (const Json& p : s.at("phases")) {
    const auto name = p.at("name").get<std::string>();
    auto& [seconds, count] = totals[name];
    if (count++ == 0) order.push_back(name);
    seconds += p.at("seconds").get<double>();
    all += p.at("seconds").get<double>();
  }
  TextTable table({"phase", "times", "mean", "share of all"});
  for (const std::string& name : order) {
    const auto& [seconds, count] = totals[name];
    table.add({name, fmt::format("{}", count), format_seconds(seconds / count),
               fmt::format("{:.1f} %", all > 0.0 ? 100.0 * seconds / all : 0.0)});
  }
  return table.str(colour);
}

/// Memory of the rank with the highest peak: one line per phase, one column per category that is ever used.
std::string memory_table(const Json& s, bool colour) {
  const Json& memory = s.at("memory");
  const Json& rank = memory.at("by_rank").at(memory.at("peak_rank").get<std::size_t>());
  std::vector<std::string> header = {"phase", "live peak", "mapped"}, used;
  for (const auto& [name, bytes] : rank.at("category_peaks").items())
    if (bytes.get<std::int64_t>() > 0) header.push_back(name), used.push_back(name);
  TextTable table(header);
  for (const auto& [phase, peak] : rank.at("phase_peaks").items()) {
    std::vector<std::string> row = {phase, cell(bytes_at(peak, "peak_bytes")),
                                    cell(bytes_at(peak, "mapped_peak_bytes"))};
    for (const std::string& name : used) row.push_back(cell(bytes_at(peak.at("by_category"), name.c_str())));
    table.add(row);
  }
  std::vector<std::string> last = {"whole run", cell(bytes_at(rank, "peak_bytes")),
                                   cell(bytes_at(rank, "mapped_peak_bytes"))};
  for (const std::string& name : used) last.push_back(cell(bytes_at(rank.at("category_peaks"), name.c_str())));
  table.add(last);
  return table.str(colour);
}

std::string rank_list(const Json& ranks) {
  const auto n = ranks.size();
  if (n == 0) return "";
  const int first = ranks.front().get<int>(), last = ranks.back().get<int>();
  if (n > 1 && last - first == static_cast<int>(n) - 1) return fmt::format("{}-{}", first, last);
  std::string out;
  for (std::size_t i = 0; i < n; ++i) out += fmt::format("{}{}", i ? "," : "", ranks[i].get<int>());
  return out;
}

/// All steps together.
std::string traffic_table(const Json& s, bool colour) {
  struct Sum {
    std::int64_t calls = 0, payload = 0, padding = 0, wire = 0;
  };
  std::vector<std::array<std::string, 4>> order;
  std::map<std::array<std::string, 4>, Sum> sums;
  for (const Json& row : s.at("traffic")) {
    const std::array<std::string, 4> key = {row.at("phase").get<std::string>(), row.at("group").get<std::string>(),
                                            row.at("op").get<std::string>(), rank_list(row.at("ranks"))};
    const auto [it, is_new] = sums.try_emplace(key);
    if (is_new) order.push_back(key);
    it->second.calls += bytes_at(row, "calls_per_rank");
    it->second.payload += bytes_at(row, "payload_bytes_per_rank");
    it->second.padding += bytes_at(row, "padding_bytes_per_rank");
    it->second.wire += bytes_at(row, "wire_bytes_per_rank");
  }
  TextTable table({"phase", "group", "op", "ranks", "calls", "payload", "padding", "wire"}, 4);
  for (const auto& key : order) {
    const Sum& sum = sums[key];
    table.add({key[0], key[1], key[2], key[3], format_count(sum.calls), cell(sum.payload), cell(sum.padding),
               cell(sum.wire)});
  }
  return table.empty() ? "" : "\nTraffic per rank, all steps\n" + table.str(colour);
}

std::string metrics_table(const Json& s, bool colour) {
  const Json& metrics = s.at("metrics");
  if (metrics.empty()) return "";
  std::vector<std::string> header;
  for (const auto& [name, value] : metrics.front().items())
    if (header.size() < 7) header.push_back(name);
  TextTable table(header, 0);
  const std::size_t n = metrics.size(), shown = 12;  // the first, the last, and even steps between
  for (std::size_t i = 0; i < std::min(n, shown); ++i) {
    const Json& row = metrics[n <= shown ? i : i * (n - 1) / (shown - 1)];
    std::vector<std::string> cells;
    for (const std::string& name : header)
      cells.push_back(!row.contains(name)      ? ""
                      : name == "step"         ? fmt::format("{}", row.at(name).get<int>())
                      : row.at(name).is_null() ? "nan"
                                               : fmt::format("{:.4g}", row.at(name).get<double>()));
    table.add(cells);
  }
  return "\nMetrics\n" + table.str(colour);
}

}  // namespace

std::string render_summary(const Json& s, bool colour) {
  std::string out = verdict(s, colour) + speed(s);
  out += "\nTime by phase\n" + phase_table(s, colour);
  if (!s.at("memory").at("by_rank").empty())
    out += fmt::format("\nMemory of rank {} (composition at each phase's peak)\n",
                       s.at("memory").at("peak_rank").get<int>()) +
           memory_table(s, colour);
  return out + traffic_table(s, colour) + metrics_table(s, colour) +
         fmt::format("\nplan {}\n", s.at("plan_hash").get<std::string>());
}

bool use_colour() {
  const char* no_colour = std::getenv("NO_COLOR");
  return ::isatty(STDOUT_FILENO) != 0 && (no_colour == nullptr || *no_colour == '\0');
}

}  // namespace hotbunk

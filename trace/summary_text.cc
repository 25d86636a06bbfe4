#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "trace/compare.h"
#include "trace/summary.h"
#include "trace/text_table.h"

namespace hotbunk {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t most_tensors = 12;  // rows of their own at a peak

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
  std::string filling;
  if (const double more = s.value("filling_seconds", 0.0); more > 0.01 * s.at("iteration_seconds").get<double>())
    filling = fmt::format(
        "The first iteration takes {} more: the trainer waits for the first samples, and nothing is rolled out beside "
        "the "
        "last training.\n",
        format_seconds(more));
  return fmt::format("{} over {} step{}: {} per iteration, {:.4g} tokens/s, train MFU {:.1f} %\n{}",
                     s.at("source").get<std::string>(), s.at("steps").get<int>(),
                     s.at("steps").get<int>() == 1 ? "" : "s", format_seconds(s.at("iteration_seconds").get<double>()),
                     s.at("tokens_per_second").get<double>(), 100.0 * s.at("mfu").get<double>(), filling);
}

/// Over all steps; beside it what was predicted, where there is a comparison.
std::string phase_table(const Json& s, const Comparison* predicted, bool colour) {
  double all = 0.0;
  for (const Json& p : s.at("phase_totals")) all += p.at("seconds").get<double>();
  const bool waits =
      std::ranges::any_of(s.at("phase_totals"), [](const Json& p) { return !p.at("waiting").is_null(); });
  std::vector<std::string> header = {"phase", "times", "mean", "share of all"};
  if (waits) header.push_back("waiting");
  if (predicted) header.insert(header.end(), {predicted->a_source, "error"});
  TextTable table(header);
  for (const Json& p : s.at("phase_totals")) {
    const auto name = p.at("name").get<std::string>();
    const auto seconds = p.at("seconds").get<double>();
    const auto times = p.at("times").get<std::int64_t>();
    std::vector<std::string> row = {name, format_count(times), format_seconds(p.at("mean").get<double>()),
                                    fmt::format("{:.1f} %", all > 0.0 ? 100.0 * seconds / all : 0.0)};
    if (waits) row.push_back(p.at("waiting").is_null() ? "-" : format_seconds(p.at("waiting").get<double>()));
    if (predicted)
      for (const TimeTotal& t : predicted->totals)
        if (t.phase == name)
          row.insert(row.end(), {format_seconds(t.a_s / static_cast<double>(t.times)), error_text(t)});
    table.add(row);
  }
  return table.str(colour);
}

/// Memory of the rank with the highest peak: one line per phase, one column per category that is ever used.
std::string memory_table(const Json& s, bool colour) {
  const Json& memory = s.at("memory");
  const Json& ranks = memory.at("by_rank");
  const Json& rank =
      *std::ranges::find_if(ranks, [&](const Json& r) { return r.at("rank") == memory.at("peak_rank"); });
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

std::string seconds_cell(const Json& seconds) {
  return seconds.is_null() ? "-" : format_seconds(seconds.get<double>());
}

/// Step by step what trainer and engine do on one GPU and hold behind it. Only where something sleeps or wakes.
std::string timeline_table(const Json& s, bool colour) {
  const Json& timeline = s.at("timeline");
  const Json& steps = timeline.at("steps");
  if (std::ranges::all_of(steps, [](const Json& step) { return step.at("action") == "works"; })) return "";
  TextTable table({"phase", "process", "what", "does", "takes", "waiting", "trainer", "engine", "device", "peak",
                   "mapped", "host trainer", "host engine"},
                  4);
  for (const Json& step : steps) {
    const Json &device = step.at("device_bytes"), &host = step.at("host_bytes");
    std::vector<std::string> row;
    for (const char* key : {"phase", "process", "tag", "action"}) row.push_back(step.at(key).get<std::string>());
    row.push_back(seconds_cell(step.at("seconds")));
    row.push_back(seconds_cell(step.at("waiting")));
    for (const char* key : {"trainer", "engine", "total", "peak", "mapped"}) row.push_back(cell(bytes_at(device, key)));
    for (const char* key : {"trainer", "engine"}) row.push_back(cell(bytes_at(host, key)));
    table.add(row);
  }
  return fmt::format(
             "\nTimeline of rank {}: how trainer and engine take turns. Live bytes behind each step; peak: meanwhile\n",
             timeline.at("rank").get<int>()) +
         table.str(colour);
}

/// Tensor by tensor what makes the peak of the weight update.
std::string sync_peak_table(const Json& s, bool colour) {
  std::string out;
  for (const Json& peak : s.at("live_at_peak")) {
    if (peak.at("phase") != "sync") continue;
    TextTable table({"tensor", "process", "category", "buffers", "bytes"}, 3);
    const Json& tensors = peak.at("tensors");
    std::int64_t others = 0, other_bytes = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const Json& t = tensors[i];
      if (i >= most_tensors) {
        others += bytes_at(t, "buffers"), other_bytes += bytes_at(t, "bytes");
        continue;
      }
      table.add({t.at("name").get<std::string>(), t.at("process").get<std::string>(),
                 t.at("category").get<std::string>(), format_count(bytes_at(t, "buffers")),
                 cell(bytes_at(t, "bytes"))});
    }
    if (others > 0) table.add({"others", "", "", format_count(others), cell(other_bytes)});
    table.add({"all together", "", "", "", cell(bytes_at(peak, "peak_bytes"))});
    out += fmt::format("\nAlive at the peak of the weight update (rank {}, phase sync)\n", peak.at("rank").get<int>()) +
           table.str(colour);
  }
  return out;
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
constexpr std::size_t most_groups = 4;  // of a phase and kind of op that have rows of their own

std::string traffic_table(const Json& s, bool colour) {
  TextTable table({"phase", "group", "op", "ranks", "calls", "payload", "padding", "wire"}, 4);
  const Json& rows = s.at("traffic_totals");
  for (std::size_t i = 0, next = 0; i < rows.size(); i = next) {
    const auto alike = [&](const Json& row) {
      return std::ranges::all_of(std::array{"phase", "group", "op"},
                                 [&](const char* key) { return row.at(key) == rows[i].at(key); });
    };
    for (next = i; next < rows.size() && alike(rows[next]);) ++next;
    // Of many groups the one that moves most stands for all; the document has each.
    const bool many = next - i > most_groups;
    std::size_t most = i;
    for (std::size_t k = i; many && k < next; ++k)
      if (bytes_at(rows[k], "payload_bytes_per_rank") > bytes_at(rows[most], "payload_bytes_per_rank")) most = k;
    for (std::size_t k = many ? most : i; k < (many ? most + 1 : next); ++k) {
      const Json& row = rows[k];
      table.add({row.at("phase").get<std::string>(), row.at("group").get<std::string>(),
                 row.at("op").get<std::string>(),
                 rank_list(row.at("ranks")) + (many ? fmt::format(", most of {} rows", next - i) : ""),
                 format_count(bytes_at(row, "calls_per_rank")), cell(bytes_at(row, "payload_bytes_per_rank")),
                 cell(bytes_at(row, "padding_bytes_per_rank")), cell(bytes_at(row, "wire_bytes_per_rank"))});
    }
  }
  return table.empty() ? "" : "\nTraffic per rank, all steps\n" + table.str(colour);
}

/// What a reader looks for first, as far as the run has it, then others in order of name.
std::vector<std::string> metric_columns(const Json& row) {
  constexpr std::size_t most = 7;
  std::vector<std::string> columns = {"step"};
  for (const char* name :
       {"reward", "loss", "response_length/mean", "actor/grad_norm", "actor/kl_loss", "actor/entropy"})
    if (row.contains(name)) columns.emplace_back(name);
  for (const auto& [name, value] : row.items())
    if (columns.size() < most && std::find(columns.begin(), columns.end(), name) == columns.end())
      columns.push_back(name);
  return columns;
}

std::string metrics_table(const Json& s, bool colour) {
  if (s.at("metrics").empty()) return "";
  const std::vector<std::string> header = metric_columns(s.at("metrics").front());
  std::vector<const Json*> whole;  // rows between them hold what was lowest or highest only
  for (const Json& row : s.at("metrics"))
    if (std::all_of(header.begin(), header.end(), [&](const std::string& name) { return row.contains(name); }))
      whole.push_back(&row);
  TextTable table(header, 0);
  const std::size_t n = whole.size(), shown = 12;  // the first, the last, and even steps between
  for (std::size_t i = 0; i < std::min(n, shown); ++i) {
    const Json& row = *whole[n <= shown ? i : i * (n - 1) / (shown - 1)];
    std::vector<std::string> cells;
    for (const std::string& name : header)
      cells.push_back(name == "step"           ? fmt::format("{}", row.at(name).get<int>())
                      : row.at(name).is_null() ? "nan"
                                               : fmt::format("{:.4g}", row.at(name).get<double>()));
    table.add(cells);
  }
  return "\nMetrics\n" + table.str(colour);
}

/// Empty where every step has rows.
std::string kept_line(const Json& s) {
  const Json& kept = s.at("kept");
  const auto rows = kept.at("steps").get<std::int64_t>(), of = kept.at("of").get<std::int64_t>();
  if (rows >= of) return "";
  return fmt::format(
      "Rows in the files: {} of {} steps (the first, one in {}, the slowest, the last); totals and means are over "
      "all\n",
      format_count(rows), format_count(of), kept.at("every").get<int>());
}

}  // namespace

std::string render_summary(const Json& s, bool colour, const Comparison* predicted) {
  std::string out = verdict(s, colour) + speed(s);
  if (const Json priced = s.value("priced_blocks", Json::array()); !priced.empty())
    out += fmt::format("\nPriced blocks: {}. They take what the closed form says; all else is the plan's.\n",
                       fmt::join(priced.get<std::vector<std::string>>(), ", "));
  out += "\nTime by phase: what a rank spends in it, mean over ranks and steps\n" + phase_table(s, predicted, colour);
  if (predicted) out += render_time_error(*predicted);
  if (!s.at("memory").at("by_rank").empty())
    out += fmt::format("\nMemory of rank {} (composition at each phase's peak)\n",
                       s.at("memory").at("peak_rank").get<int>()) +
           memory_table(s, colour);
  out += timeline_table(s, colour) + sync_peak_table(s, colour);
  out += traffic_table(s, colour) + metrics_table(s, colour) + '\n' + kept_line(s);
  out += fmt::format("plan {}\n", s.at("plan_hash").get<std::string>());
  if (s.contains("run_hash")) out += fmt::format("run  {}\n", s.at("run_hash").get<std::string>());
  return out + (predicted ? render_verdict(*predicted, colour) : "");
}

bool use_colour() {
  const char* no_colour = std::getenv("NO_COLOR");
  return ::isatty(STDOUT_FILENO) != 0 && (no_colour == nullptr || *no_colour == '\0');
}

}  // namespace hotbunk

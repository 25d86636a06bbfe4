#include "cli/calibrate_samples.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "cli/output.h"
#include "cli/streams.h"
#include "trace/text_table.h"

namespace hotbunk {

std::string key_of(const Measurement& m) {
  return fmt::format("{} {} {} {} {}", m.op, name_of(m.dtype), m.at[0], m.at[1], m.at[2]);
}

std::string text_of(const Samples& samples) {
  nlohmann::json rows = nlohmann::json::array();
  for (const auto& [key, s] : samples)
    rows.push_back({s.at.op, name_of(s.at.dtype), s.at.at[0], s.at.at[1], s.at.at[2], s.seconds, s.first});
  return json_text(rows);
}

Samples merge(const std::vector<std::string>& ranks) {
  Samples all;
  for (const std::string& text : ranks)
    for (const auto& row : json_from<nlohmann::json>(text)) {
      Measurement m{.op = row[0],
                    .dtype = dtype_from(row[1].get<std::string>()).value_or(DType::f32),
                    .at = {row[2], row[3], row[4]},
                    .seconds = 0};
      Sample& s = all[key_of(m)];
      s.at = m;
      for (double x : row[5]) s.seconds.push_back(x);
      for (double x : row[6]) s.first.push_back(x);
    }
  return all;
}

double quantile(std::vector<double> values, double q) {
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(q * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

double mean(const std::vector<double>& values) {
  double sum = 0.0;
  for (double v : values) sum += v;
  return sum / static_cast<double>(values.size());
}

bool is_collective(const std::string& op) {
  for (int k = 0; k < num_op_kinds; ++k)
    if (op == name_of(static_cast<OpKind>(k))) return is_communication(static_cast<OpKind>(k));
  return false;
}

void print_collectives(const std::vector<Measurement>& measurements) {
  TextTable table({"collective", "ranks", "size (B)", "time (us)", "algbw (GB/s)", "busbw (GB/s)"});
  for (const Measurement& m : measurements) {
    if (!is_collective(m.op) || m.at[2] <= 1.0) continue;
    const double algbw = m.at[2] / m.seconds / 1e9, share = (m.at[0] - 1) / m.at[0];
    table.add({m.op, fmt::format("{:.0f}", m.at[0]), fmt::format("{:.0f}", m.at[2]),
               fmt::format("{:.1f}", m.seconds * 1e6), fmt::format("{:.3f}", algbw),
               fmt::format("{:.3f}", algbw * (m.op == "all_reduce" ? 2 * share : share))});
  }
  if (!table.empty()) print_result(fmt::format("Collectives\n{}\n", table.str()));
}

void print_gemms(const std::vector<Measurement>& measurements) {
  TextTable table({"product", "dtype", "m", "n", "k", "time (us)", "GF/s"}, 2);
  for (const Measurement& m : measurements)
    if (is_gemm(m.op))
      table.add({m.op, std::string(name_of(m.dtype)), fmt::format("{:.0f}", m.at[0]), fmt::format("{:.0f}", m.at[1]),
                 fmt::format("{:.0f}", m.at[2]), fmt::format("{:.1f}", m.seconds * 1e6),
                 fmt::format("{:.2f}", 2e-9 * m.at[0] * m.at[1] * m.at[2] / m.seconds)});
  print_result(fmt::format("Matrix products on one rank, all ranks busy\n{}\n", table.str()));
}

}  // namespace hotbunk

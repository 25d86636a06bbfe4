// Plans as people read them: tests/lowering/plans/*.test hold what to lower and what to show of it, `----`, and the
// text (golden_text.h).
//
//   plan WORLD TP [key=value]...   the scenario of tiny.h with these settings; then, a line each:
//   outline                        phases, blocks, sections, slot limits
//   lines PHASE [WORD]             of the bodies and calls of a phase, those with the word
//   body NAME                      the ops of a body
//   boxes OP RANK                  what the moves of the first op of this name come to on a rank
//   memory                         peaks by phase, with the categories alive then
//   traffic PHASE                  calls and payload of one run of each of its blocks, by rank
#include <fmt/format.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>
#include <sstream>

#include "graph/catalogue.h"
#include "graph/print.h"
#include "tests/golden_text.h"
#include "tests/paths.h"
#include "tiny.h"
#include "trace/static_memory.h"

namespace hotbunk::test {
namespace {

/// The lines that have the word; all with an empty one.
std::string lines_with(const std::string& text, const std::string& word) {
  std::istringstream in(text);
  std::string out;
  for (std::string line; std::getline(in, line);)
    if (line.find(word) != std::string::npos) out += line + '\n';
  return out;
}

/// What print_plan says of one body.
std::string body_text(const std::string& text, const std::string& name) {
  const std::size_t begin = text.find("  body " + name + ": ");
  if (begin == text.npos) return fmt::format("no body '{}'\n", name);
  std::size_t end = text.find('\n', begin) + 1;
  while (text.compare(end, 6, "      ") == 0) end = text.find('\n', end) + 1;
  return text.substr(begin, end - begin);
}

std::string boxes_text(const Plan& plan, const std::string& name, Rank rank) {
  std::string out;
  for (const auto& blocks : plan.program(rank).phases)
    for (const Block& block : blocks)
      each_op(plan.program(rank), block, [&](const BoundOp& op) {
        if (!out.empty() || op.name() != name || op->moves.empty()) return;
        out = fmt::format("{} on rank {}\n", name, rank);
        for (const Box& b : boxes_of(*op, places_of(plan, rank))) {
          const auto side = [&](const std::vector<Tensor>& tensors, std::int32_t i) -> std::string {
            if (static_cast<std::size_t>(i) >= tensors.size()) return "(outside)";
            return op.buffer(tensors[static_cast<std::size_t>(i)]).name();
          };
          out += fmt::format("  {} x {}: {}{} at {} by {} -> {} at {} by {}\n", b.rows, b.cols,
                             side(op->inputs, b.input), b.peer < 0 ? "" : fmt::format(" of place {}", b.peer),
                             b.src_offset, b.src_pitch, side(op->outputs, b.output), b.dst_offset, b.dst_pitch);
        }
      });
  return out.empty() ? fmt::format("no op '{}' that moves\n", name) : out;
}

std::string memory_text(const Plan& plan) {
  const RankMemory m = static_memory(plan, 0);
  std::string out;
  for (std::size_t p = 0; p < plan.phases.size(); ++p) {
    const auto at = m.device.phase_peaks.find(static_cast<std::int16_t>(p));
    if (at == m.device.phase_peaks.end()) continue;
    out += fmt::format("{:<16} live {:>9} mapped {:>9} ", plan.phases[p].name, at->second.peak_bytes,
                       at->second.mapped_peak_bytes);
    for (std::size_t c = 0; c < num_categories; ++c)
      if (const std::int64_t bytes = at->second.by_category[c]; bytes > 0)
        out += fmt::format(" {} {}", name_of(static_cast<Category>(c)), bytes);
    out += '\n';
  }
  return out;
}

std::string traffic_text(const Plan& plan, const std::string& phase) {
  std::string out;
  for (Rank r = 0; r < plan.num_ranks(); ++r)
    for (const Block& block : plan.program(r).phases[static_cast<std::size_t>(plan.phase_index(phase))]) {
      std::map<std::pair<GroupId, OpKind>, std::pair<int, std::int64_t>> sums;
      each_op(plan.program(r), block, [&](const BoundOp& op) {
        if (!is_communication(op->kind)) return;
        auto& [calls, bytes] = sums[{op->group, op->kind}];
        ++calls, bytes += payload_bytes(*op, {.tokens = 1, .seqs = 1, .attention_pairs = 1}, places_of(plan, r));
      });
      for (const auto& [key, sum] : sums)
        out += fmt::format("rank {} {}: {} over {}: {} calls, {} B\n", r, block.name, name_of(key.second),
                           plan.groups[static_cast<std::size_t>(key.first)].name, sum.first, sum.second);
    }
  return out;
}

std::string shown(const Plan& plan, const std::string& line) {
  std::istringstream words(line);
  std::string what, name, word;
  words >> what >> name >> word;
  if (what == "outline") return print_plan(plan, {.phase = "", .ops = false});
  if (what == "lines") return lines_with(print_plan(plan, {.phase = name}), word);
  if (what == "body") return body_text(print_plan(plan), name);
  if (what == "boxes") return boxes_text(plan, name, static_cast<Rank>(std::stoi(word)));
  if (what == "memory") return memory_text(plan);
  if (what == "traffic") return traffic_text(plan, name);
  FAIL("unknown request '" << line << "'");
  return "";
}

std::string run_case(const std::string& input) {
  std::istringstream in(input);
  std::string line, word, out;
  std::getline(in, line);
  std::istringstream words(line);
  int world = 0, tp = 0;
  words >> word >> world >> tp;
  REQUIRE(word == "plan");
  std::vector<std::string> sets;
  while (words >> word) sets.push_back(word);
  const Plan plan = lowered(tiny(world, tp, sets));
  while (std::getline(in, line)) out += shown(plan, line);
  return out;
}

}  // namespace

TEST_CASE("plans as text") {
  const auto texts = check_golden_texts(std::filesystem::path(source_folder) / "tests/lowering/plans", run_case);
  for (const auto& [file, text] : texts) {
    INFO(file);
    CHECK(std::ranges::count(text, '\n') > 3);
  }
  CHECK(texts.size() >= 6);
}

}  // namespace hotbunk::test

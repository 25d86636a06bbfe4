#include "backends/cuda/evidence.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "backends/cuda/attention_variant.h"
#include "base/check.h"
#include "base/json.h"

namespace hotbunk {
std::string_view hardware_evidence_text(std::string_view name);  // generated: cmake/embed.cmake
}

namespace hotbunk::cuda {

namespace {

nlohmann::json evidence_file() {
  return json_from<nlohmann::json>(std::string(hardware_evidence_text("hardware_evidence")));
}
HardwareRun run_of(const nlohmann::json& run) {
  return {
      .date = run.at("date"), .machine = run.at("machine"), .command = run.at("command"), .commit = run.at("commit")};
}
std::optional<HardwareRun> last_run_of(const nlohmann::json& row) {
  const auto& run = row.at("last_run");
  if (run.is_null()) return {};
  return run_of(run);
}

/// By what, where there is a choice.
std::string maker_of(const Op& op, const RanBy& by) {
  if (is_communication(op.kind)) return " " + by.transport;
  switch (op.kind) {
    case OpKind::linear:
    case OpKind::fused_linear:
      if (by.products == ProductPolicy::equal) return " cublasLt or own";
      [[fallthrough]];
    case OpKind::linear_dgrad:
    case OpKind::linear_wgrad:
      return takes_products(by.products, op.kind) ? " cublasLt" : " own";
    case OpKind::attention:
    case OpKind::attention_backward:
    case OpKind::paged_attention: {
      const std::int64_t d = op.integer(Attr::head_dim), v = op.integer(Attr::value_dim, d);
      const std::string own = attends_in_tiles(op.outputs[0].dtype, d, v) ? "tiles" : "rows";
      const bool library = by.attention == AttentionPolicy::cudnn && op.kind == OpKind::attention_backward;
      return library ? " cudnn or " + own : " " + own;
    }
    default:
      return "";
  }
}

/// Its kind, the dtypes of its numbers in the order of its tensors, and its maker.
std::string op_text(const Op& op, const RanBy& by) {
  std::string out(name_of(op.kind));
  std::vector<DType> seen;
  for (const auto* side : {&op.inputs, &op.outputs})
    for (const Tensor& t : *side) {
      const bool number = t.dtype == DType::f32 || t.dtype == DType::bf16 || t.dtype == DType::f16;
      if (!number || std::ranges::find(seen, t.dtype) != seen.end()) continue;
      out += (seen.empty() ? " " : "/") + std::string(name_of(t.dtype));
      seen.push_back(t.dtype);
    }
  return out + maker_of(op, by);
}

}  // namespace

std::vector<Evidence> hardware_evidence() {
  std::vector<Evidence> out;
  const nlohmann::json document = evidence_file();
  for (const auto& row : document.at("claims")) out.push_back({.claim = row.at("claim"), .last_run = last_run_of(row)});
  return out;
}

std::vector<BodyEvidence> body_evidence() {
  std::vector<BodyEvidence> out;
  const nlohmann::json document = evidence_file();
  for (const auto& row : document.at("bodies"))
    for (auto& b = out.emplace_back(BodyEvidence{.body = row.at("body"), .ops = {}});
         const auto& [op, run] : row.at("ops").items())
      b.ops.emplace(op, run_of(run));
  return out;
}

std::string body_kind(std::string_view name) {
  name = name.substr(0, name.find('/'));
  std::string out;
  while (!name.empty()) {
    const std::string_view part = name.substr(0, name.find('.'));
    name.remove_prefix(std::min(name.size(), part.size() + 1));
    if (part.find_first_not_of("0123456789") == std::string_view::npos) continue;
    out += (out.empty() ? "" : ".") + std::string(part);
  }
  return out;
}

std::vector<RunBody> bodies_that_ran(const Plan& plan, std::span<const PhaseTotal> phases, const RanBy& by) {
  std::map<std::string, std::set<std::string>> found;
  std::set<std::pair<std::int32_t, std::int16_t>> looked_at;  // ranks of one program run the same
  for (const PhaseTotal& t : phases) {
    if (t.phase < 0 || t.blocks == 0) continue;
    const std::int32_t p = plan.program_of_rank.at(static_cast<std::size_t>(t.rank));
    if (!looked_at.emplace(p, t.phase).second) continue;
    const Program& program = plan.programs[static_cast<std::size_t>(p)];
    std::set<std::int32_t> bodies;
    for (const Block& block : program.phases.at(static_cast<std::size_t>(t.phase)))
      for (const Call& call : block.calls) bodies.insert(call.body);
    for (const std::int32_t b : bodies) {
      const Body& body = program.bodies[static_cast<std::size_t>(b)];
      std::set<std::string>& ops = found[body_kind(body.name)];
      for (const Op& op : body.ops)
        if (op.kind != OpKind::alloc && op.kind != OpKind::free && op.kind != OpKind::prepack)
          ops.insert(op_text(op, by));  // these ask nothing of a device
    }
  }
  std::vector<RunBody> out;
  for (const auto& [body, ops] : found)
    if (!ops.empty()) out.push_back({body, {ops.begin(), ops.end()}});
  return out;
}

std::optional<HardwareRun> ran_on_hardware(const RunBody& b, const std::vector<BodyEvidence>& all) {
  const auto row = std::ranges::find(all, b.body, &BodyEvidence::body);
  if (row == all.end()) return {};
  std::optional<HardwareRun> oldest;
  for (const std::string& op : b.ops) {
    const auto run = row->ops.find(op);
    if (run == row->ops.end()) return {};
    if (!oldest || run->second.date < oldest->date) oldest = run->second;
  }
  return oldest;
}

std::string bodies_text(const std::vector<BodyEvidence>& all) {
  if (all.empty()) return "never ran on hardware";
  return fmt::format("{} {} of bodies ran on hardware", all.size(), all.size() == 1 ? "kind" : "kinds");
}

std::string evidence_text() {
  const std::vector<Evidence> all = hardware_evidence();
  const auto ran = std::ranges::count_if(all, [](const Evidence& e) { return e.last_run.has_value(); });
  if (ran == 0) return "never ran on hardware";
  std::string last;
  for (const Evidence& e : all)
    if (e.last_run) last = std::max(last, e.last_run->date);
  return fmt::format("{} of {} claims ran on hardware, the last on {}", ran, all.size(), last);
}

}  // namespace hotbunk::cuda

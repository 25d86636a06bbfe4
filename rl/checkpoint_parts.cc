#include "rl/checkpoint_parts.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "base/partial_file.h"
#include "graph/boxes.h"

namespace hotbunk {
namespace {

Slot slot_of(const BoundOp& op) { return static_cast<Slot>(op->integer(Attr::slot)); }

/// What a rank tells the first one of what it has written.
std::string told(const ElementCount& taken, const Diagnostics& problems) {
  nlohmann::json out = {{"elements", taken.elements}, {"by_tensor", taken.by_tensor}};
  if (!problems.empty()) {
    const Diagnostic& d = problems.front();
    out["problem"] = {
        {"code", d.code}, {"message", d.message}, {"where", d.where.file}, {"notes", d.notes}, {"help", d.help}};
  }
  return json_text(out, -1, NotUtf8::replaced);  // a path is what it is
}

/// The elements, or what went wrong, with the rank.
Result<ElementCount> heard(const std::string& text, Rank rank) {
  const auto json = json_from<nlohmann::json>(text);
  if (!json.contains("problem"))
    return ElementCount{json["elements"].get<std::int64_t>(), json["by_tensor"].get<std::uint64_t>()};
  const auto& p = json["problem"];
  Diagnostic d{.code = p["code"],
               .message = p["message"],
               .where = {p["where"].get<std::string>()},
               .notes = p["notes"].get<std::vector<std::string>>(),
               .help = p["help"]};
  d.notes.push_back(fmt::format("on rank {}", rank));
  return fail(std::move(d));
}

/// A fault of ours, and yet not the end: what the run has computed is worth more.
Status check_complete(const ElementCount& all, const ElementCount& written) {
  if (written == all) return {};
  return fail(Diagnostic{.code = "E632",
                         .message = fmt::format("{} of {} elements were written{}", written.elements, all.elements,
                                                written.elements == all.elements ? ", not each once" : ""),
                         .where = {},
                         .notes = {"every rank writes its own part: that they do not add up is a fault of hotbunk"},
                         .help = {}});
}

}  // namespace

bool is_exported(Slot slot) {
  return slot == Slot::exported || slot == Slot::exported_first_moment || slot == Slot::exported_second_moment;
}

std::vector<Rank> exporting_ranks(const Plan& plan, std::int16_t phase) {
  std::vector<bool> writes(plan.programs.size(), false);
  for (std::size_t i = 0; i < writes.size(); ++i)
    for (const Block& block : plan.programs[i].phases[static_cast<std::size_t>(phase)])
      each_op(plan.programs[i], block, [&](const BoundOp& op) {
        writes[i] = writes[i] || (op->kind == OpKind::fetch && is_exported(slot_of(op)));
      });
  std::vector<Rank> out;
  for (Rank rank = 0; rank < plan.num_ranks(); ++rank)
    if (writes[static_cast<std::size_t>(plan.program_of_rank[static_cast<std::size_t>(rank)])]) out.push_back(rank);
  return out;
}

ExportedParts exported_by(const Plan& plan, std::int16_t phase, Rank rank) {
  // Ranks that share something share all of it: their boxes are equal or have nothing in common. What this one has is
  // kept, and goes where an earlier one has it too; of those only one is looked at at a time.
  using Key = ExportedParts::value_type;
  std::map<Key, std::set<std::vector<std::int64_t>>> own;
  const auto each_export = [&](const Program& program, const auto& f) {
    for (const Block& block : program.phases[static_cast<std::size_t>(phase)])
      each_op(program, block, [&](const BoundOp& op) {
        if (op->kind == OpKind::fetch && is_exported(slot_of(op))) f(op, Key(op.name(), slot_of(op)));
      });
  };
  const auto where = [](const BoundOp& op, const Places& places) {
    std::vector<std::int64_t> out;
    for (const Box& b : boxes_of(*op, places)) out.insert(out.end(), {b.dst_offset, b.dst_pitch, b.rows, b.cols});
    return out;
  };
  const Places mine = places_of(plan, rank);
  each_export(plan.program(rank), [&](const BoundOp& op, const Key& key) {
    if (auto there = where(op, mine); !there.empty()) own[key].insert(std::move(there));
  });
  // Ranks of a program that has none of these parameters (another stage's) need no look.
  std::vector<bool> shares(plan.programs.size(), false);
  for (std::size_t i = 0; i < shares.size(); ++i)
    each_export(plan.programs[i], [&](const BoundOp&, const Key& key) { shares[i] = shares[i] || own.contains(key); });
  for (Rank earlier = 0; earlier < rank && !own.empty(); ++earlier) {
    if (!shares[static_cast<std::size_t>(plan.program_of_rank[static_cast<std::size_t>(earlier)])]) continue;
    const Places places = places_of(plan, earlier);
    each_export(plan.program(earlier), [&](const BoundOp& op, const Key& key) {
      const auto at = own.find(key);
      if (at == own.end()) return;
      at->second.erase(where(op, places));
      if (at->second.empty()) own.erase(at);
    });
  }
  ExportedParts out;
  for (const auto& [key, parts] : own) out.insert(key);
  return out;
}

void WeightsPayload::take(const BoundOp& op, std::span<const std::byte> source) {
  if (written == nullptr || !written->contains({op.name(), slot_of(op)})) return;
  sink.take(op, places, source), merged.take(op, places, source);
}
void WeightsPayload::hear(const HearFromRank& hear_from, const std::vector<Rank>& writers) {
  for (Writing* w : all()) {
    ElementCount sum = w->to ? w->to->taken() : ElementCount{};
    for (const Rank rank : writers) {
      if (!w->to || rank == 0) continue;
      const auto part = heard(hear_from(fmt::format("{} by {}", w->key, rank), rank), rank);
      if (part) sum += *part;
      else w->note(tl::unexpected(part.error()));
    }
    if (w->to) w->note(check_complete(w->to->elements(), sum));
  }
}
void WeightsPayload::say(const SayToRanks& say_to, Rank rank, bool syncs) {
  for (Writing* w : all()) {
    if (w->key.empty()) continue;
    if (w->to && syncs) w->note(w->to->finish());
    say_to(fmt::format("{} by {}", w->key, rank), told(w->to ? w->to->taken() : ElementCount{}, w->problems));
    w->to.reset();
  }
}
void WeightsPayload::finish(bool on_disk) {
  if (sink.to && on_disk) sink.note(sink.to->finish());
  if (merged.to) merged.note(merged.to->finish());
  if (merged.to) merged.note(merged.to->place());
}

std::shared_ptr<const std::filesystem::path> make_probe(const std::filesystem::path& folder) {
  std::random_device random;
  std::filesystem::path file = folder / fmt::format(".{:08x}{:08x}.partial", random(), random());
  if (!FileDescriptor(::open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)))
    throw RuntimeFailure(render(write_error(file)));
  return {new std::filesystem::path(std::move(file)), [](const std::filesystem::path* made) {
            std::error_code ignored;
            std::filesystem::remove(*made, ignored);
            delete made;
          }};
}

bool appears(const std::filesystem::path& file) {
  std::error_code ec;
  for (int tries = 0; tries < 20; ++tries) {
    if (std::filesystem::is_regular_file(file, ec)) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return false;
}

}  // namespace hotbunk

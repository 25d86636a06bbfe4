// Sections that share pages of a rank's file.
#include "backends/cpu_gloo/section_pieces.h"

#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "backends/cpu_gloo/arena.h"
#include "graph/access.h"
#include "graph/bound.h"
#include "graph/section_states.h"
#include "lowering/lower.h"
#include "runtime/program_memory.h"
#include "spec/loader.h"
#include "tests/drawn_transition.h"
#include "tests/parity/harness.h"

using namespace hotbunk;
using namespace hotbunk::testing;

namespace {

/// What a walk of the program finds, chunk by chunk.
struct Walked {
  std::string clash;      // two sections on one chunk, or ""
  std::int64_t most = 0;  // bytes that are mapped or, of sections whose pages move to the host, were at some time
};

Walked walked(const Plan& plan, const Program& program, const std::vector<FilePiece>& pieces) {
  const std::vector<std::int64_t> bases = section_bases(program);
  const std::set<SectionId> move = MovingCopies(program).device_sections();
  std::map<std::int64_t, SectionId> owner;  // by chunk in the file
  SectionStates states(program);
  Walked out;
  for (const WalkTurn& turn : walk_turns(plan, program))
    for (const BlockVisit& visit : block_visits(plan, program, turn)) {
      const Block& block = block_at(program, visit);
      if (states.skips(block)) continue;
      states.ran(block);
      each_op(program, block, [&](const BoundOp& op) {
        if ((op->kind != OpKind::map && op->kind != OpKind::unmap) || op.section().space != Space::device) return;
        if (op->kind == OpKind::unmap && move.contains(op->section)) return;
        const auto piece = std::ranges::find(pieces, bases[static_cast<std::size_t>(op->section)], &FilePiece::begin);
        for (std::int64_t at = op->map_begin; at < op->map_end; at += arena_chunk_bytes) {
          if (op->kind == OpKind::unmap) {
            owner.erase(piece->file_offset + at);
          } else if (const auto [other, fresh] = owner.emplace(piece->file_offset + at, op->section);
                     !fresh && other->second != op->section) {
            out.clash = fmt::format("{} maps what {} has", op.name(), program.section(other->second).name);
          }
        }
        out.most = std::max(out.most, static_cast<std::int64_t>(owner.size()) * arena_chunk_bytes);
      });
    }
  return out;
}

}  // namespace

TEST_CASE("no walk of a plan has two sections on the same pages at once") {
  using Sets = std::vector<std::string>;
  const auto [world, tp, sets] = GENERATE(table<int, int, Sets>({
      {2, 2, {}},
      {2, 1, {"rollout.sleep_level=1", "algorithm.reference=true"}},
      {4, 2, {"train.offload=none"}},
      {2, 2, {"rollout.sleep=false"}},
      {4, 2, {"train.layout.pp=2", "train.layout.dp=2", "train.layout.fsdp=1", "train.pipeline_split=[2, 1]"}},
      {2, 2, {"sync.every=2", "rollout.sleep_level=1"}},
      {2,
       1,
       {"transition=[sleep_optimizer, sleep_train, wake_rollout, sync, wake_kv, rollout, sleep_rollout, wake_train]"}},
  }));
  CAPTURE(world, tp, sets);
  const auto plan = lower(tiny_scenario(world, tp, sets));
  REQUIRE(plan);
  for (const Program& program : plan->programs)
    CHECK(walked(*plan, program, section_pieces(*plan, program, MovingCopies(program))).clash == "");
}

TEST_CASE("in any legal order of sleep, wake and sync no two sections are on the same pages at once") {
  std::mt19937 draw(20261127);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(draw() % n); };
  for (int i = 0; i < 60; ++i) {
    const DrawnTransition drawn = draw_transition(below, true, true);
    std::vector<std::string> sets = drawn.sets();
    sets.insert(sets.end(), {"algorithm.reference=true", fmt::format("rollout.sleep_level={}", 1 + below(2))});
    CAPTURE(sets);
    const auto plan = lower(tiny_scenario(2, 1, sets));
    if (!plan) continue;  // a level that the order does not allow
    for (const Program& program : plan->programs)
      CHECK(walked(*plan, program, section_pieces(*plan, program, MovingCopies(program))).clash == "");
  }
}

TEST_CASE("the rollout lies on pages of training's transients: a rank's file is as long as its fullest moment") {
  for (const char* path : {"scenarios/demo.yaml", "scenarios/qwen2.5-0.5b-cpu.yaml"}) {
    CAPTURE(path);
    const auto scenario = load_scenario(path, {});
    REQUIRE(scenario);
    const auto plan = lower(*scenario);
    REQUIRE(plan);
    const Program& program = plan->programs[0];
    const std::vector<FilePiece> pieces = section_pieces(*plan, program, MovingCopies(program));
    const Walked walk = walked(*plan, program, pieces);
    CHECK(walk.clash == "");
    std::int64_t sections = 0, end = 0;
    for (const FilePiece& piece : pieces) {
      sections += piece.end - piece.begin;
      end = std::max(end, piece.file_offset + piece.end - piece.begin);
    }
    INFO("file " << end << ", sections " << sections << ", fullest " << walk.most);
    CHECK(end >= walk.most);
    CHECK(end <= walk.most + static_cast<std::int64_t>(pieces.size()) * section_alignment);
    CHECK(end < sections);
  }
}

TEST_CASE("from the second iteration on no page of a rank's file is new, and none leaves it") {
  const auto first = std::make_shared<std::int64_t>(0);
  const auto looked = std::make_shared<int>(0);
  const Case job{
      "shifts",
      tiny_scenario(2, 2, {"steps=3"}),
      {},
      [=](const CpuBackend& b, std::int32_t step, const std::string& phase) -> std::string {
        const std::int64_t held = b.device_arena().file_bytes();
        if (phase == "export" && *looked < 20) return fmt::format("looked {} times", *looked);
        if (step < 2) return "";
        if (*looked == 0) *first = held;
        ++*looked;
        return held == *first ? "" : fmt::format("{} B before {} of step {}, {} before", held, phase, step, *first);
      }};
  CpuOptions options;
  options.check_resident = true;
  CHECK(run_cases(
            2, {job}, [](const Outcome&) { return std::string(); }, options) == "");
}

#include "backends/cpu_gloo/section_pieces.h"

#include <algorithm>
#include <numeric>
#include <ranges>
#include <set>

#include "backends/cpu_gloo/arena.h"
#include "base/rounding.h"
#include "graph/access.h"
#include "graph/bound.h"
#include "graph/byte_ranges.h"
#include "graph/section_states.h"
#include "runtime/program_memory.h"

namespace hotbunk {
namespace {

/// [a][b]: where the bytes of section a end that are mapped at some time while some of section b are.
using MappedTogether = std::vector<std::vector<std::int64_t>>;

MappedTogether mapped_together(const Plan& plan, const Program& program) {
  const std::size_t sections = program.sections.size();
  MappedTogether together(sections, std::vector<std::int64_t>(sections));
  std::vector<ByteRanges> mapped(sections);
  SectionStates states(program);
  for (const WalkTurn& turn : walk_turns(plan, program))
    for (const BlockVisit& visit : block_visits(plan, program, turn)) {
      const Block& block = block_at(program, visit);
      if (states.skips(block)) continue;
      states.ran(block);
      each_op(program, block, [&](const BoundOp& op) {
        if (op->kind != OpKind::map && op->kind != OpKind::unmap) return;
        const auto a = static_cast<std::size_t>(op->section);
        if (op->kind == OpKind::unmap) return mapped[a].remove(op->map_begin, op->map_end);
        mapped[a].add(op->map_begin, op->map_end);
        for (std::size_t b = 0; b < sections; ++b) {
          if (mapped[b].empty()) continue;
          together[a][b] = std::max(together[a][b], mapped[a].end());
          together[b][a] = std::max(together[b][a], mapped[b].end());
        }
      });
    }
  return together;
}

bool overlap(std::int64_t a, std::int64_t a_bytes, std::int64_t b, std::int64_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

std::vector<FilePiece> section_pieces(const Plan& plan, const Program& program, const MovingCopies& moving) {
  MappedTogether together = mapped_together(plan, program);
  const std::set<SectionId> move_to_host = moving.device_sections();
  const auto bytes = [&](std::size_t s) { return program.sections[s].bytes; };
  for (const SectionId id : move_to_host)
    for (std::size_t other = 0; other < together.size(); ++other) {
      const auto own = static_cast<std::size_t>(id);
      together[own][other] = bytes(own), together[other][own] = bytes(other);
    }

  std::vector<std::size_t> order(program.sections.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::erase_if(order, [&](std::size_t s) { return program.sections[s].space != Space::device || bytes(s) == 0; });
  std::ranges::stable_sort(order, std::ranges::greater(), bytes);
  std::vector<std::int64_t> at(program.sections.size());
  std::vector<std::size_t> placed;
  for (const std::size_t s : order) {  // the large ones first, each as low as it may lie
    const auto free = [&](std::int64_t here) {
      return std::ranges::none_of(placed, [&](std::size_t p) {
        return together[s][p] > 0 && overlap(here, together[s][p], at[p], together[p][s]);
      });
    };
    const std::int64_t alignment = bytes(s) < section_alignment ? arena_chunk_bytes : section_alignment;
    std::set<std::int64_t> places = {0};
    for (const std::size_t p : placed) places.insert(round_up(at[p] + together[p][s], alignment));
    at[s] = *std::ranges::find_if(places, free);
    placed.push_back(s);
  }

  std::vector<FilePiece> pieces;
  const std::vector<std::int64_t> bases = section_bases(program);
  for (std::size_t s = 0; s < program.sections.size(); ++s)
    if (program.sections[s].space == Space::device && bytes(s) > 0)
      pieces.push_back({bases[s], bases[s] + bytes(s), at[s]});
  return pieces;
}

}  // namespace hotbunk

// The same plan with other numbers for its streams, sections and group families: whoever finds them by name, or by what
// they are, answers the same.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "graph/plan.h"

namespace hotbunk::test {

/// Each number's new one. The first `kept` stay: a plan's first stream computes, a program's first section is the
/// transient one.
inline std::vector<std::int32_t> other_numbers(std::size_t count, std::size_t kept, std::mt19937_64& random) {
  std::vector<std::int32_t> to(count);
  std::iota(to.begin(), to.end(), 0);
  for (std::size_t i = count; i > kept + 1; --i) std::swap(to[i - 1], to[kept + random() % (i - kept)]);
  return to;
}

template <class Id>
void renumber(Id& id, const std::vector<std::int32_t>& to) {
  if constexpr (std::is_same_v<Id, GroupId>) id = id < 0 ? id : to[static_cast<std::size_t>(id)];
  else id = static_cast<Id>(to[static_cast<std::size_t>(id)]);
}
template <class Thing>
void reorder(std::vector<Thing>& things, const std::vector<std::int32_t>& to) {
  std::vector<Thing> out(things.size());
  for (std::size_t i = 0; i < things.size(); ++i) out[static_cast<std::size_t>(to[i])] = std::move(things[i]);
  things = std::move(out);
}

/// Two families more than it has, which nobody uses, come first before all are drawn anew.
inline Plan renumbered(Plan plan, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  plan.groups.push_back({"nobody", {}});
  plan.groups.push_back({"nobody_else", {{0}}});
  const auto streams = other_numbers(plan.streams.size(), 1, random),
             families = other_numbers(plan.groups.size(), 0, random);
  reorder(plan.streams, streams), reorder(plan.groups, families);
  for (Program& program : plan.programs) {
    const auto sections = other_numbers(program.sections.size(), 1, random);
    reorder(program.sections, sections);
    for (Buffer& b : program.buffers) renumber(b.section, sections);
    for (Body& body : program.bodies) {
      for (Buffer& b : body.locals) renumber(b.section, sections);
      for (Op& op : body.ops) {
        renumber(op.stream, streams), renumber(op.section, sections), renumber(op.group, families);
        for (Move& move : op.moves)
          for (Side* side : {&move.from, &move.to})
            renumber(side->parts.family, families), renumber(side->parts.within.family, families);
      }
    }
    for (std::vector<Block>& blocks : program.phases)
      for (Block& block : blocks) {
        renumber(block.section, sections);
        for (Call& call : block.calls)
          for (Mark& mark : call.marks) renumber(mark.stream, streams);
      }
  }
  return plan;
}

}  // namespace hotbunk::test

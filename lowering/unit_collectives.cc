// Of what train_state.h declares: by which collectives a unit becomes whole, and what stands between them and what is
// computed with.
#include <fmt/format.h>

#include "lowering/train_state.h"

namespace hotbunk {

std::vector<TrainState::Region> TrainState::regions(const ShardedUnit& unit) const {
  std::vector<Region> out;
  if (unit.shared.full_elements > 0) out.push_back({.size = unit.shared, .num_replicas = mesh_.replicas, .name = ""});
  if (unit.experts.full_elements > 0)
    out.push_back({.size = unit.experts,
                   .shard_offset = unit.shared.shard_elements,
                   .full_offset = unit.shared.full_elements,
                   .gathered_offset = unit.shared.shards * unit.shared.shard_elements,
                   .shards = Family::expert_shards,
                   .replicas = Family::expert_replicas,
                   .num_replicas = mesh_.expert_replicas(),
                   .is_experts = true,
                   .name = ".experts"});
  return out;
}

TrainState::Collectives TrainState::collectives(const ShardedUnit& unit) const {
  Collectives out;
  const std::string prefix = parameters_prefix(unit);
  const std::int64_t least = scenario_.train.in_place_elements;
  int groups = 0;  // of small parameters that stand together
  for (const Region& region : regions(unit)) {
    if (unit.flat || region.is_experts || region.size.shards == 1) {
      out.regions.push_back(region);
      out.regions.back().in_place = unit.flat;
      continue;
    }
    for (const UnitParam& p : unit.params) {
      if (!p.has_place() || p.apart) continue;
      const std::int64_t elements = p.padded_elements();
      const bool is_all = elements == unit.shard_elements, is_even = elements * region.size.shards == p.elements();
      const bool in_place = is_even && least > 0 && (is_all || elements >= least);
      const bool goes_on = !in_place && groups > 0 && !out.regions.back().in_place;
      if (!goes_on) {
        Region& next = out.regions.emplace_back(region);
        next.size = {.shards = region.size.shards};
        next.shard_offset = p.shard_offset, next.full_offset = p.full_offset, next.in_place = in_place;
        if (!in_place) next.name = ++groups > 1 ? fmt::format(".rest.{}", groups) : "";
        else if (!is_all)
          next.name = "." + p.parameter.substr(prefix.size(), p.parameter.rfind(".weight") - prefix.size());
      }
      UnitRegion& size = out.regions.back().size;
      size.shard_elements += elements, size.full_elements += p.elements();
    }
  }
  for (Region& r : out.regions)
    if (!r.in_place && r.size.shards > 1)
      r.gathered_offset = out.copied, out.copied += r.size.shards * r.size.shard_elements;
  return out;
}

std::vector<Move> TrainState::shard_moves(const ShardedUnit& unit, const Collectives& of, bool to_whole) const {
  std::vector<Move> moves;
  for (const Region& region : of.regions) {
    if (region.size.shards == 1 || region.in_place) continue;
    const Range inside{region.shard_offset, region.shard_offset + region.size.shard_elements};
    for (const UnitParam& p : unit.params) {
      if (!p.has_place() || p.shard_offset < inside.begin || p.shard_offset >= inside.end) continue;
      // Of what a tensor-parallel rank has of it, and of experts a place of a block.
      const Side gathered{.piece = {.row_end = p.padded_rows,
                                    .col_end = p.cols,
                                    .offset = region.gathered_offset + p.shard_offset - region.shard_offset,
                                    .pitch = p.cols},
                          .parts = {.who = Holds::every,
                                    .family = static_cast<GroupId>(region.shards),
                                    .count = static_cast<std::int32_t>(region.size.shards),
                                    .rows = p.padded_rows,
                                    .pitch = region.size.shard_elements,
                                    .last_row = p.rows,
                                    .within = {}}};
      Side whole = local(p);
      whole.piece.offset = p.full_offset;
      moves.push_back(to_whole ? Move{gathered, whole} : Move{whole, gathered});
    }
  }
  return moves;
}

Tensor TrainState::part_of(const ProgramBuilder& b, const Tensor& of, std::int64_t offset, std::int64_t elements) {
  return elements == of.shape[0].size ? of : b.view(of.buffer, of.dtype, {fixed(elements)}, offset);
}

std::vector<BufferId> TrainState::fill(ProgramBuilder& b, const UnitState& state, const Tensor& shard,
                                       const Tensor& whole, const std::string& name) const {
  const std::int64_t n = state.unit.shard_elements;
  if (shards() == 1) {
    if (state.is_split()) publish_parts(b, state, whole, name);
    else b.emit(OpKind::cast, streams::gather, name + ".cast", {shard}, {whole});
    return {};
  }
  std::vector<BufferId> made;
  Tensor send = shard;
  if (state.is_split()) {
    send = b.transient(name + ".gather_in", whole.dtype, {fixed(n)}, Category::communication);
    publish_parts(b, state, send, name);
    made.push_back(send.buffer);
  } else if (shard.dtype != whole.dtype) {
    send = b.transient(name + ".gather_in", whole.dtype, {fixed(n)}, Category::communication);
    b.emit(OpKind::cast, streams::gather, name + ".cast", {shard}, {send});
    made.push_back(send.buffer);
  }
  const Collectives all = collectives(state.unit);
  Tensor gathered;
  if (all.copied > 0) {
    gathered = b.transient(name + ".gather_out", whole.dtype, {fixed(all.copied)}, Category::communication);
    made.push_back(gathered.buffer);
  }
  for (const Region& r : all.regions) {
    const Tensor part = part_of(b, send, r.shard_offset, r.size.shard_elements);
    // Of a flat unit with its padding.
    const std::int64_t elements = r.in_place ? r.size.shards * r.size.shard_elements : r.size.full_elements;
    const Tensor place = part_of(b, whole, r.full_offset, elements);
    if (r.size.shards == 1) {  // experts, of which each rank has its own
      b.emit(OpKind::copy, streams::gather, name + r.name + ".copy_out", {part}, {place});
      continue;
    }
    Op& op = b.communicate(
        OpKind::all_gather, streams::gather, r.shards, name + r.name + ".all_gather", {part},
        {r.in_place ? place : part_of(b, gathered, r.gathered_offset, r.size.shards * r.size.shard_elements)});
    with(op, Attr::padding_bytes, r.size.padding_elements() * size_of(whole.dtype));
  }
  if (all.copied > 0)
    b.emit(OpKind::copy_boxes, streams::gather, name + ".copy_out", {gathered}, {whole}).moves =
        shard_moves(state.unit, all, true);
  return made;
}

}  // namespace hotbunk

// Of what train_state.h declares: where gradients are written, and how they are summed.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "lowering/train_state.h"

namespace hotbunk {

void TrainState::add_gradients(ProgramBuilder& b, std::size_t u, const std::string& prefix, WholeUnit& out) const {
  const UnitState& state = units_[u];
  const DType dtype = scenario_.train.precision.grads;
  if (!state.is_trained()) return;
  const BufferId whole = accumulates() ? state.grad
                                       : b.transient(prefix + state.unit.name + ".grads", dtype,
                                                     whole_elements(state.unit), Category::grads);
  out.parts.push_back({&state.unit, whole, dtype});
}

WholeUnit TrainState::outer_gradients(ProgramBuilder& b, const std::string& prefix) const {
  WholeUnit out;
  for (const std::size_t u : outer_) add_gradients(b, u, prefix, out);
  return out;
}

WholeUnit TrainState::layer_gradients(ProgramBuilder& b, std::size_t i, const std::string& prefix,
                                      const WholeUnit& outer, std::optional<SlotLimitId> limit) const {
  const Layer& layer = layers_[i];
  WholeUnit out{.parts = {}, .layer = layer.number, .kind = layer.kind};
  std::vector<BufferId> made;
  for (const std::size_t u : layer.units) add_gradients(b, u, prefix, out);
  if (!accumulates())
    for (const WholeUnit::Part& part : out.parts) made.push_back(part.buffer);
  if (layer.is_shared) out.parts.insert(out.parts.end(), outer.parts.begin(), outer.parts.end());
  if (limit && !made.empty()) b.take_turn(*limit, made);
  return out;
}

std::pair<Tensor, StreamId> TrainState::sum_of_ranks(ProgramBuilder& b, const UnitState& state, const Tensor& whole,
                                                     Category category, const std::string& name) const {
  Tensor sum = whole;
  StreamId last = streams::reduce;
  const DType dtype = whole.dtype;
  const std::int64_t n = state.unit.shard_elements;
  const Collectives all = collectives(state.unit);
  if (shards() > 1) sum = b.transient(name + ".reduce_out", dtype, {fixed(n)}, category);
  if (sum.buffer != whole.buffer) {
    // Padding takes part in the sum and in the gradient norm: it must be zero.
    const std::int64_t padding = state.unit.padding_elements();
    const auto zero = [&](const Tensor& t) { b.emit(OpKind::zero, streams::reduce, name + ".zero_padding", {}, {t}); };
    Tensor in;
    if (state.unit.flat && padding > 0) {
      zero(b.view(whole.buffer, dtype, {fixed(padding)}, state.unit.full_elements));
    } else if (all.copied > 0) {
      in = b.transient(name + ".reduce_in", dtype, {fixed(all.copied)}, Category::communication);
      if (padding > 0) zero(in);
      Op& copy = b.emit(OpKind::copy_boxes, streams::reduce, name + ".copy_in", {whole}, {in});
      copy.moves = shard_moves(state.unit, all, false);
    }
    for (const Region& r : all.regions) {
      const Tensor part = part_of(b, sum, r.shard_offset, r.size.shard_elements);
      const std::int64_t elements = r.size.shards * r.size.shard_elements;
      if (r.size.shards == 1) {
        b.emit(OpKind::copy, streams::reduce, name + r.name + ".copy_in",
               {part_of(b, whole, r.full_offset, r.size.full_elements)}, {part});
        continue;
      }
      Op& op = b.communicate(
          OpKind::reduce_scatter, streams::reduce, r.shards, name + r.name + ".reduce_scatter",
          {r.in_place ? part_of(b, whole, r.full_offset, elements) : part_of(b, in, r.gathered_offset, elements)},
          {part});
      with(op, Attr::padding_bytes, r.size.padding_elements() * size_of(dtype));
    }
  }
  for (const Region& r : regions(state.unit)) {
    if (r.num_replicas == 1) continue;
    last = streams::replicas;
    const Tensor part = part_of(b, sum, r.shard_offset, r.size.shard_elements);
    b.communicate(OpKind::all_reduce, last, r.replicas, name + r.name + ".all_reduce", {part}, {part});
  }
  return {sum, last};
}

void TrainState::reduce(ProgramBuilder& b, const std::vector<std::size_t>& units, const WholeUnit& gradients,
                        const std::string& prefix) const {
  if (accumulates()) return;
  for (const std::size_t u : units) {
    const UnitState& state = units_[u];
    if (!state.is_trained()) continue;
    const auto part = std::ranges::find(gradients.parts, &state.unit, &WholeUnit::Part::unit);
    HB_CHECK(part != gradients.parts.end(), "no gradients of {}", state.unit.name);
    const std::string name = prefix + state.unit.name;
    std::vector<Input> inputs = {part->buffer, state.grad};
    const BufferId below = come_down_[u % come_down_.size()];
    if (streams_) inputs.emplace_back(below);
    b.call(prefix + "reduce", state.unit.kind, name + ".", std::move(inputs), [&] {
      auto [sum, stream] = sum_of_ranks(b, state, b.whole(part->buffer), Category::communication, name);
      const Tensor shard = b.whole(state.grad);
      if (streams_) {
        const Tensor down = b.view(below, sum.dtype, {fixed(b.buffer(state.grad).elements)});
        b.emit(OpKind::copy, streams::d2h, name + ".down", {sum}, {down});
        sum = down, stream = streams::host;
      }
      b.emit(OpKind::add, stream, name + ".accumulate", {shard, sum}, {shard});
    });
  }
}

void TrainState::reduce_outer(ProgramBuilder& b, const WholeUnit& gradients, const std::string& prefix,
                              Outer outer) const {
  std::vector<std::size_t> units = outer_;
  if (outer == Outer::all_but_loss)
    std::erase_if(units, [&](std::size_t u) { return std::ranges::count(loss_, u) > 0; });
  reduce(b, units, gradients, prefix);
}

void TrainState::reduce_loss_units(ProgramBuilder& b, const WholeUnit& gradients, const std::string& prefix) const {
  reduce(b, loss_, gradients, prefix);
}

void TrainState::reduce_layer(ProgramBuilder& b, std::size_t i, const WholeUnit& gradients,
                              const std::string& prefix) const {
  reduce(b, layers_[i].units, gradients, prefix);
}

BufferId TrainState::reduced(ProgramBuilder& b, std::size_t u, const std::string& prefix) const {
  const UnitState& state = units_[u];
  if (!whole_grads_ || !sums_gradients()) return state.grad;
  const std::string name = prefix + state.unit.name;
  const Tensor sum = b.call(prefix + "reduce", state.unit.kind, name + ".", {state.grad}, [&] {
    const Tensor out = sum_of_ranks(b, state, b.whole(state.grad), Category::grads, name).first;
    if (out.buffer != state.grad) b.free(state.grad, streams::reduce);
    return out;
  });
  return sum.buffer;
}

}  // namespace hotbunk

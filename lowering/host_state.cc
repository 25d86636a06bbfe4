// What of training's state lies on the host (train.offload: layerwise, optimizer.cpu_fraction), and its ways to the
// device and back.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "lowering/train_state.h"

namespace hotbunk {

/// `on_host`: so many elements of the shard are stepped there, beside parameters that stay on the device.
void TrainState::make_parts(ProgramBuilder& b, UnitState& state, std::int64_t on_host, const std::string& name) const {
  const std::int64_t n = state.unit.shard_elements;
  const Precision& precision = scenario_.train.precision;
  const auto below = [&](const char* what, DType dtype, Category category) {
    return b.managed(name + ".host_" + what, dtype, on_host, category, sections::host_resident);
  };
  if (on_host > 0)
    state.parts.push_back({.elements = {0, on_host},
                           .on_host = true,
                           .shard = below("master", precision.master, Category::optimizer),
                           .exp_avg = below("exp_avg", precision.moments, Category::optimizer),
                           .exp_avg_sq = below("exp_avg_sq", precision.moments, Category::optimizer),
                           .grad = below("grad", precision.grads, Category::grads)});
  if (on_host < n)
    state.parts.push_back({.elements = {on_host, n},
                           .on_host = streams_,
                           .shard = state.shard,
                           .exp_avg = state.exp_avg,
                           .exp_avg_sq = state.exp_avg_sq,
                           .first = state.publishes() ? 0 : on_host});
}

void TrainState::make_host_buffers(ProgramBuilder& b) {
  const Precision& precision = scenario_.train.precision;
  std::int64_t reduced = 0, apart = 0;  // elements: of the largest unit's gradients that come down, and of a part
  for (const UnitState& u : units_) {
    if (streams_ && u.is_trained()) reduced = std::max(reduced, u.unit.shard_elements);
    for (const SteppedPart& p : u.parts)
      if (u.is_split() && p.on_host && u.publishes()) apart = std::max(apart, p.elements.size());
  }
  // A stage where nothing trains has sums and steps all the same: the norm and its coefficient go through all stages.
  const bool steps = streams_ || std::ranges::any_of(units_, &UnitState::is_split);
  const auto make = [&](const std::string& name, DType dtype, std::int64_t elements, Category category) {
    return b.managed("train.host_" + name, dtype, elements, category, sections::host_resident);
  };
  for (std::size_t i = 0; i < come_down_.size(); ++i) {
    if (reduced > 0)
      come_down_[i] = make("reduced." + std::to_string(i), precision.grads, reduced, Category::communication);
    if (apart > 0 && precision.params != precision.master)
      cast_below_[i] = make("cast." + std::to_string(i), precision.params, apart, Category::communication);
  }
  if (streams_) host_sums_ = make("grad_squares", DType::f32, repeats_adapters() ? 5 : 4, Category::workspace);
  if (steps) host_step_ = make("step", DType::f32, 3, Category::workspace);
}

namespace {

template <class Visit>
void each_host_gradient(const std::vector<UnitState>& units, const std::array<BufferId, 2>& come_down, BufferId sums,
                        BufferId step, Visit visit) {
  for (const BufferId id : {come_down[0], come_down[1], sums, step})
    if (id >= 0) visit(id);
  for (const UnitState& u : units)
    for (const SteppedPart& p : u.parts)
      if (p.grad >= 0) visit(p.grad);
}

}  // namespace

void TrainState::alloc_host_gradients(ProgramBuilder& b) const {
  each_host_gradient(units_, come_down_, host_sums_, host_step_, [&](BufferId id) { b.alloc(id, streams::host); });
}

void TrainState::free_host_gradients(ProgramBuilder& b) const {
  each_host_gradient(units_, come_down_, host_sums_, host_step_, [&](BufferId id) { b.free(id, streams::host); });
}

namespace {

BufferId buffer_of(const SteppedPart& part, StateTensor what) {
  return what == StateTensor::shard ? part.shard : what == StateTensor::exp_avg ? part.exp_avg : part.exp_avg_sq;
}

}  // namespace

void TrainState::add_host_parts(const UnitState& u, std::vector<Input>& inputs) const {
  for (const SteppedPart& p : u.parts)
    if (p.on_host) inputs.emplace_back(p.shard);
  if (u.publishes() && cast_below(u) >= 0) inputs.emplace_back(cast_below(u));
}

BufferId TrainState::cast_below(const UnitState& u) const {
  return cast_below_[static_cast<std::size_t>(&u - units_.data()) % cast_below_.size()];
}

Tensor TrainState::on_device(ProgramBuilder& b, std::size_t u, StateTensor what, const std::string& name) const {
  const UnitState& of = units_[u];
  if (what == StateTensor::shard && (!of.is_split() || !of.publishes()) && !b.is_on_host(of.shard))
    return b.whole(of.shard);
  std::vector<SteppedPart> parts = of.parts;
  if (parts.empty())  // of what is frozen
    parts.push_back({.elements = {0, of.unit.shard_elements}, .on_host = true, .shard = of.shard});
  if (parts.size() == 1 && !parts.front().on_host) return b.whole(buffer_of(parts.front(), what));
  std::vector<Input> inputs;
  for (const SteppedPart& p : parts) inputs.emplace_back(buffer_of(p, what));
  const DType dtype = b.buffer(inputs.front().buffer).dtype;
  return b.call("export.come_up", 3 * of.unit.kind + static_cast<std::int64_t>(what), name + ".", inputs, [&] {
    const Tensor out = b.transient(name + ".come_up", dtype, {fixed(of.unit.shard_elements)}, Category::communication);
    for (const SteppedPart& p : parts)
      b.emit(OpKind::copy, p.on_host ? streams::h2d : streams::gather, name + (p.on_host ? ".up" : ".own"),
             {b.whole(buffer_of(p, what))}, {part_of(b, out, p.elements.begin, p.elements.size())});
    return out;
  });
}

void TrainState::put_parts(ProgramBuilder& b, const UnitState& u, StateTensor what, const Tensor& from,
                           const std::string& name) const {
  for (const SteppedPart& p : u.parts) {
    const BufferId id = buffer_of(p, what);
    if (id == from.buffer) continue;  // it is stepped in place
    b.alloc(id, p.on_host ? streams::d2h : streams::h2d);
    b.emit(OpKind::copy, p.on_host ? streams::d2h : streams::gather, name + (p.on_host ? ".down" : ".own"),
           {part_of(b, from, p.elements.begin, p.elements.size())}, {b.whole(id)});
  }
}

void TrainState::publish_parts(ProgramBuilder& b, const UnitState& u, const Tensor& to, const std::string& name) const {
  for (const SteppedPart& p : u.parts) {
    const Tensor mine = part_of(b, to, p.elements.begin, p.elements.size());
    Tensor held = b.whole(p.shard);
    const OpKind kind = held.dtype == to.dtype ? OpKind::copy : OpKind::cast;
    if (!p.on_host) {
      b.emit(kind, streams::gather, name + ".own", {held}, {mine});
      continue;
    }
    const BufferId below = cast_below(u);
    if (kind == OpKind::cast) {
      b.alloc(below, streams::host);
      const Tensor cast = b.view(below, to.dtype, {fixed(p.elements.size())});
      b.emit(kind, streams::host, name + ".cast_below", {held}, {cast});
      held = cast;
    }
    b.emit(OpKind::copy, streams::h2d, name + ".up", {held}, {mine});
    if (kind == OpKind::cast) b.free(below, streams::h2d);
  }
}

void TrainState::take_up_in_place(ProgramBuilder& b, const std::string& prefix) const {
  for (const UnitState& u : units_) {
    if (!u.is_split() || u.publishes()) continue;
    const SteppedPart& p = u.parts.front();
    const std::string name = prefix + u.unit.name;
    b.call(prefix + "take_up", u.unit.kind, name + ".", {p.shard, u.whole}, [&] {
      b.emit(OpKind::copy, streams::h2d, name + ".up", {b.whole(p.shard)},
             {part_of(b, b.whole(u.whole), p.elements.begin, p.elements.size())});
    });
  }
}

}  // namespace hotbunk

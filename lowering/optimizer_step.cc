// The end of a mini-batch: gradients that ranks have found in part are added up, their norm is taken once over all that
// is distinct, and every rank steps with its shards.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>

#include "base/check.h"
#include "layout/placement.h"
#include "lowering/train_passes.h"
#include "spec/parameter_roles.h"

namespace hotbunk {
namespace {

using R = ParamRole;

bool is_fixed(const UnitParam& p) { return rule_of(p.role).fixed; }

/// Elements [begin, end) of a unit's shard that the optimizer steps.
std::vector<Range> stepped(const ShardedUnit& unit) {
  std::vector<Range> out{{0, unit.shard_elements}};
  for (const UnitParam& p : unit.params) {
    if (!is_fixed(p)) continue;
    HB_CHECK(!unit.flat, "{} of a flat unit lies elsewhere in each rank's shard", p.parameter);
    out.back().end = p.shard_offset;
    out.push_back({p.shard_offset + p.padded_elements(), unit.shard_elements});
  }
  std::erase_if(out, [](const Range& r) { return r.size() == 0; });
  return out;
}

/// Of an expert's adapters what all ranks have that share its columns.
bool repeats_of_expert(const UnitParam& p) { return p.expert >= 0 && p.step.repeat > 1; }

/// Of what every tensor-parallel rank has, the gradients of which each has found only what its heads, or its tokens,
/// add (RoleGradient): they are summed before anybody steps. Ranks that share a KV head have each what its own query
/// heads add; ranks that share an expert's columns of each of its adapters' two matrices what their columns add. No
/// family: nothing is missing.
std::optional<Family> found_in_parts(const UnitParam& p, std::int64_t tensor, bool cuts_tokens) {
  if (p.step.repeat == 1) return std::nullopt;
  if (repeats_of_expert(p)) return Family::expert_sharers;
  if (p.step.repeat < tensor) return Family::kv_sharers;
  const RoleGradient found = rule_of(p.role).gradient;
  if (found == RoleGradient::whole || (found == RoleGradient::by_tokens && !cuts_tokens)) return std::nullopt;
  return Family::train_tp;
}

/// Of a table that the first and the last stage of a pipeline both have, the last one's.
bool is_tied_copy(const UnitParam& p, const TrainState& state) { return p.role == R::embedding && !state.part().first; }

/// A parameter's gradients in a unit's, over a family; what lies on the host goes up for it and comes back.
void sum_part(ProgramBuilder& b, BufferId grad, const UnitParam& p, Family among, const std::string& name,
              const char* op = "", bool is_unit = false) {
  const std::int64_t elements = is_unit ? b.buffer(grad).elements : p.padded_elements();
  const Tensor held = b.view(grad, b.buffer(grad).dtype, {fixed(elements)}, is_unit ? 0 : p.shard_offset);
  Tensor part = held;
  if (b.is_on_host(grad)) {
    part = b.transient(name + ".come_up", held.dtype, {fixed(elements)}, Category::communication);
    b.emit(OpKind::copy, streams::h2d, name + ".up", {held}, {part});
  }
  b.communicate(OpKind::all_reduce, streams::control, among, name + op, {part}, {part});
  if (b.is_on_host(grad)) b.emit(OpKind::copy, streams::d2h, name + ".down", {part}, {held});
}

/// Such a table's gradients, which each of the two stages has found in part; a flat unit has nothing else.
void sum_tied(ProgramBuilder& b, const TrainState& state, const std::vector<BufferId>& grads) {
  if (state.part().first == state.part().last || !state.model().tie_embeddings) return;
  const std::vector<std::size_t> trained = state.trained();
  for (std::size_t u = 0; u < grads.size(); ++u) {
    const ShardedUnit& unit = state.units()[trained[u]].unit;
    for (const UnitParam& p : unit.params) {
      if (p.role != R::embedding) continue;
      b.begin_call("train.sum_tied", "train.");
      sum_part(b, grads[u], p, Family::tied, "train.sum_tied", ".all_reduce", unit.flat);
    }
  }
}

void sum_parts(const Scenario& s, ProgramBuilder& b, const TrainState& state, const std::vector<BufferId>& grads) {
  const std::vector<std::size_t> trained = state.trained();
  for (std::size_t u = 0; u < grads.size(); ++u) {
    const ShardedUnit& unit = state.units()[trained[u]].unit;
    if (unit.flat) continue;  // sum_flat_squares
    if (state.mesh().tensor == 1 && std::ranges::none_of(unit.params, repeats_of_expert)) continue;
    b.call("train.sum_parts", unit.kind, "train.sum_parts." + unit.name + ".", {grads[u]}, [&] {
      for (const UnitParam& p : unit.params) {
        const std::optional<Family> among = found_in_parts(p, state.mesh().tensor, s.train.layout.sp);
        if (among && p.has_place())
          sum_part(b, grads[u], p, *among, fmt::format("train.sum_parts.{}.{}", unit.name, p.shard_offset));
      }
    });
  }
}

/// Where squares of gradients are added up: of what a rank has alone, of what all tensor-parallel ranks have, of KV
/// heads that some of them share, and of what all have that share an expert.
struct SquareSums {
  Tensor own, common, shared, of_sharers;
  StreamId stream = streams::compute;
  bool counts = true;  // the gradients are this stage's to count
};

/// A flat unit over tensor-parallel ranks. What of it several of these have lies elsewhere in each data rank's shard,
/// and at the same place in those of its tensor-parallel ones. So it is taken out, into a vector of all such
/// parameters, zero where other data ranks have them: there it is summed where it was found in parts, squared apart
/// from the rest, and then put back.
void sum_flat_squares(const Scenario& s, ProgramBuilder& b, const TrainState& state, const ShardedUnit& unit,
                      BufferId grad, const SquareSums& sums, const std::string& name) {
  const std::int64_t tensor = state.mesh().tensor;
  // Those whose gradients are summed over all, those that have been found whole, and those over neighbours: that share
  // a KV head, or an expert.
  std::array<std::vector<const UnitParam*>, 4> kinds;
  for (const UnitParam& p : unit.params) {
    if (p.step.repeat == 1 || !p.has_place()) continue;
    const std::optional<Family> among = found_in_parts(p, tensor, s.train.layout.sp);
    kinds[!among ? 1 : *among == Family::train_tp ? 0 : *among == Family::kv_sharers ? 2 : 3].push_back(&p);
  }
  const DType dtype = b.buffer(grad).dtype;
  const auto add = [&](const char* of, const Tensor& squared, const Tensor& to, StreamId at) {
    if (sums.counts)
      with(b.emit(OpKind::sum_squares, at, name + of, {squared}, {to}), Attr::accumulate, std::int64_t{1});
  };
  std::array<std::int64_t, 5> begin{};  // of each kind
  std::vector<Move> out, back;
  for (std::size_t k = 0; k < kinds.size(); ++k) {
    begin[k + 1] = begin[k];
    for (const UnitParam* p : kinds[k]) {
      const Side runs = runs_of(unit, *p, Holds::mine, {0, unit.shard_elements}, unit.shard_elements);
      Side dense = local(*p);
      dense.piece.offset = begin[k + 1], begin[k + 1] += p->elements();
      out.push_back({runs, dense}), back.push_back({dense, runs});
    }
  }
  if (out.empty()) return add(".own", b.whole(grad), sums.own, sums.stream);
  const bool below = b.is_on_host(grad);
  Tensor shard = b.whole(grad);
  if (below) {
    shard = b.transient(name + ".come_up", dtype, {fixed(unit.shard_elements)}, Category::communication);
    b.emit(OpKind::copy, streams::h2d, name + ".up", {b.whole(grad)}, {shard});
  }
  const auto down = [&](const char* why) {
    if (below) b.emit(OpKind::copy, streams::d2h, name + why, {shard}, {b.whole(grad)});
  };
  const Tensor taken = b.transient(name + ".taken", dtype, {fixed(begin[4])}, Category::workspace),
               zeros = b.transient(name + ".zeros", dtype, {fixed(begin[4])}, Category::workspace);
  for (const Tensor& t : {taken, zeros})
    b.emit(OpKind::zero, streams::compute, b.buffer(t.buffer).name + ".zero", {}, {t});
  b.emit(OpKind::copy_boxes, streams::compute, name + ".take", {shard}, {taken}).moves = out;
  b.emit(OpKind::copy_boxes, streams::compute, name + ".clear", {zeros}, {shard}).moves = back;
  down(".cleared.down");
  add(".own", b.whole(grad), sums.own, sums.stream);
  const auto of = [&](std::size_t first, std::size_t last) {
    return b.view(taken.buffer, dtype, {fixed(begin[last] - begin[first])}, begin[first]);
  };
  const auto sum = [&](std::size_t k, Family among, const char* op) {
    if (begin[k + 1] > begin[k])
      b.communicate(OpKind::all_reduce, streams::control, among, name + op, {of(k, k + 1)}, {of(k, k + 1)});
  };
  sum(0, Family::train_tp, ".sum_parts");
  sum(2, Family::kv_sharers, ".sum_shared");
  sum(3, Family::expert_sharers, ".sum_of_sharers");
  const auto add_taken = [&](const char* what, std::size_t first, std::size_t last, const Tensor& to) {
    if (begin[last] > begin[first]) add(what, of(first, last), to, streams::compute);
  };
  add_taken(".common", 0, 2, sums.common);
  add_taken(".shared", 2, 3, sums.shared);
  add_taken(".of_sharers", 3, 4, sums.of_sharers);
  b.emit(OpKind::copy_boxes, streams::compute, name + ".put", {taken}, {shard}).moves = back;
  down(".down");
}

/// Adds up the squares of all gradients that this rank has, in one sum; of what tensor-parallel ranks have each a part
/// of, the parts of all of them.
/// Gradients on the host are summed there, and the sums come up. Returns the sum of what all have that share an expert,
/// where there is such: it counts once of as many ranks.
std::optional<Tensor> sum_squares(const Scenario& s, ProgramBuilder& b, const TrainState& state,
                                  const std::vector<BufferId>& grads, const Tensor& total) {
  const std::int64_t tensor = state.mesh().tensor;
  const bool below = state.streams_from_host();
  const StreamId at = below ? streams::host : streams::compute;
  const auto host_sum = [&](std::int64_t i) { return b.view(state.host_sums(), DType::f32, {fixed(1)}, i); };
  Tensor sum = below ? host_sum(0) : total;
  Tensor common = sum, shared = sum;  // of what all of them have, and of KV heads that several have
  // Of flat units both are taken out of the shards on the device, wherever these lie.
  const std::vector<std::size_t> trained = state.trained();
  const bool flat = std::ranges::any_of(trained, [&](std::size_t u) { return state.units()[u].unit.flat; });
  // Of experts that lie apart on ranks which have all else whole.
  const ExpertMesh& experts = state.mesh().experts;
  const bool spreads = experts.lies_apart() && state.shards() == 1;
  Tensor spread = sum;
  if (below) {
    b.begin_call("train.sum_squares.zero_below", "train.");
    b.emit(OpKind::zero, at, "train.host_grad_squares.zero", {}, {b.whole(state.host_sums())});
  }
  if (spreads) {
    b.begin_call("train.sum_squares.zero_experts", "train.");
    spread =
        below ? host_sum(1) : b.transient("train.grad_squares_of_experts", DType::f32, {fixed(1)}, Category::workspace);
    if (!below) b.emit(OpKind::zero, at, "train.grad_squares_of_experts.zero", {}, {spread});
    if (tensor == 1 && !below) b.emit(OpKind::zero, at, "train.grad_squares.zero", {}, {sum});
  }
  const bool repeats = state.repeats_adapters();
  Tensor of_sharers = sum;
  if (repeats) {
    b.begin_call("train.sum_squares.zero_sharers", "train.");
    of_sharers = below && !flat
                     ? host_sum(4)
                     : b.transient("train.grad_squares_of_sharers", DType::f32, {fixed(1)}, Category::workspace);
    if (!b.is_on_host(of_sharers.buffer))
      b.emit(OpKind::zero, streams::compute, "train.grad_squares_of_sharers.zero", {}, {of_sharers});
    if (tensor == 1 && !spreads && !below) b.emit(OpKind::zero, at, "train.grad_squares.zero", {}, {sum});
  }
  if (tensor > 1) {
    b.begin_call("train.sum_squares.zero", "train.");
    const auto make = [&](std::int64_t i, const char* name) {
      return below && !flat ? host_sum(i) : b.transient(name, DType::f32, {fixed(1)}, Category::workspace);
    };
    common = make(2, "train.grad_squares_in_common");
    shared = make(3, "train.grad_squares_shared");
    for (const Tensor& t : {sum, common, shared})
      if (!b.is_on_host(t.buffer)) b.emit(OpKind::zero, streams::compute, b.buffer(t.buffer).name + ".zero", {}, {t});
  }
  // Where the squares of a parameter's gradients go; nowhere, of what is another stage's to count.
  const auto sum_for = [&](const UnitParam& p) -> const Tensor* {
    if (is_tied_copy(p, state)) return nullptr;
    if (repeats_of_expert(p)) return &of_sharers;
    if (spreads && p.apart) return &spread;
    return p.step.repeat == 1 || tensor == 1 ? &sum : p.step.repeat == tensor ? &common : &shared;
  };
  bool shares = false;
  // A stage of which nothing trains, or nothing in the first unit that is its own to count.
  const bool begins_empty =
      trained.empty() ||
      std::ranges::all_of(state.units()[trained[0]].unit.params, [&](const auto& p) { return is_tied_copy(p, state); });
  if (begins_empty && tensor == 1 && !spreads && !repeats && !below) {
    b.begin_call("train.sum_squares.zero", "train.");
    b.emit(OpKind::zero, at, "train.grad_squares.zero", {}, {sum});
  }
  for (std::size_t u = 0; u < grads.size(); ++u) {
    const ShardedUnit& unit = state.units()[trained[u]].unit;
    const std::string name = "train.sum_squares." + unit.name;
    const BufferId grad = grads[u];
    const auto add = [&](const std::string& op, const Tensor& of, const Tensor& to, bool accumulate) {
      with(b.emit(OpKind::sum_squares, at, op, {of}, {to}), Attr::accumulate, std::int64_t{accumulate ? 1 : 0});
    };
    if (tensor == 1 && !spreads && std::ranges::none_of(unit.params, [&](const auto& p) {
          return is_tied_copy(p, state) || repeats_of_expert(p);
        })) {
      const bool adds = begins_empty || repeats || u > 0;
      b.call("train.sum_squares", adds ? 1 : 0, name, {grad}, [&] { add(name, b.whole(grad), sum, adds); });
      continue;
    }
    shares |= std::ranges::any_of(unit.params, [&](const UnitParam& p) {
      return p.step.repeat > 1 && p.step.repeat < tensor && !repeats_of_expert(p);
    });
    if (unit.flat) {
      const SquareSums sums{sum, common, shared, of_sharers, at, !is_tied_copy(unit.params.front(), state)};
      if (sums.counts || std::ranges::any_of(unit.params, [](const UnitParam& p) { return p.step.repeat > 1; }))
        b.call("train.sum_squares.flat", 2 * unit.kind + (sums.counts ? 1 : 0), name + ".", {grad},
               [&] { sum_flat_squares(s, b, state, unit, grad, sums, name); });
      continue;
    }
    b.call("train.sum_squares", unit.kind, name + ".", {grad}, [&] {
      for (std::size_t i = 0; i < unit.params.size();) {
        const UnitParam& first = unit.params[i];
        const Tensor* const to = sum_for(first);
        std::int64_t elements = 0;
        for (; i < unit.params.size() && sum_for(unit.params[i]) == to; ++i)
          elements += unit.params[i].has_place() ? unit.params[i].padded_elements() : 0;
        if (to != nullptr)
          add(name + "." + std::to_string(i), b.view(grad, b.buffer(grad).dtype, {fixed(elements)}, first.shard_offset),
              *to, spreads || repeats || tensor > 1 || begins_empty || u > 0);
      }
    });
  }
  if (below) {
    b.begin_call("train.sum_squares.up", "train.");
    const auto up = [&](Tensor& t, const char* name) {
      const Tensor to = t.offset_bytes == 0 ? total : b.transient(name, DType::f32, {fixed(1)}, Category::workspace);
      b.emit(OpKind::copy, streams::h2d, std::string(name) + ".up", {t}, {to});
      t = to;
    };
    if (spreads) up(spread, "train.grad_squares_of_experts");
    if (tensor > 1 && !flat) up(common, "train.grad_squares_in_common");
    if (shares && !flat) up(shared, "train.grad_squares_shared");
    if (repeats && !flat) up(of_sharers, "train.grad_squares_of_sharers");
    up(sum, "train.grad_squares");
  }
  const std::optional<Tensor> counts_once = repeats ? std::optional(of_sharers) : std::nullopt;
  if (tensor == 1 && !spreads) return counts_once;
  b.begin_call("train.sum_squares.all", "train.");
  const auto add_all = [&](const Tensor& t, std::optional<Family> among) {
    const std::string& name = b.buffer(t.buffer).name;
    if (among) b.communicate(OpKind::all_reduce, streams::control, *among, name + ".all_reduce", {t}, {t});
    if (t.buffer != sum.buffer) b.emit(OpKind::add, streams::compute, name + ".add", {sum, t}, {sum});
  };
  if (spreads && experts.blocks == 1) add_all(spread, Family::experts);
  if (tensor == 1) return counts_once;
  add_all(sum, Family::train_tp);
  if (shares) add_all(shared, Family::kv_parts);
  add_all(common, std::nullopt);
  // Several blocks of these ranks have copies of the same experts: each counts once.
  const bool several = experts.places * experts.spread > 1;  // have parts of them
  if (spreads && experts.blocks > 1) add_all(spread, several ? std::optional(Family::expert_places) : std::nullopt);
  return counts_once;
}

/// The largest gaps are maxima, the other metrics are sums.
void all_reduce_metrics(ProgramBuilder& b, Family among, const Tensor& metrics, const std::string& suffix) {
  static_assert(static_cast<int>(Metric::max_rollout_gap) == static_cast<int>(Metric::max_logp_gap) + 1);
  const std::string name = "train.max_gaps." + suffix;
  const Tensor gaps =
      b.transient(name.substr(0, name.size() - 1), DType::f32, {fixed(num_max_metrics)}, Category::workspace);
  const Tensor gaps_in_metrics =
      b.view(metrics.buffer, DType::f32, {fixed(num_max_metrics)}, static_cast<std::int64_t>(Metric::max_logp_gap));
  b.emit(OpKind::copy, streams::compute, name + "take", {gaps_in_metrics}, {gaps});
  with(b.communicate(OpKind::all_reduce, streams::control, among, name + "all_reduce", {gaps}, {gaps}),
       Attr::reduce_max, std::int64_t{1});
  b.communicate(OpKind::all_reduce, streams::control, among, "train.metrics." + suffix + "all_reduce", {metrics},
                {metrics});
  b.emit(OpKind::copy, streams::compute, name + "put", {gaps}, {gaps_in_metrics});
}

/// Of what the host steps beside the device, the gradients.
void copy_down(ProgramBuilder& b, const TrainState& state, const std::vector<BufferId>& grads) {
  const std::vector<std::size_t> trained = state.trained();
  for (std::size_t i = 0; i < grads.size(); ++i)
    for (const SteppedPart& part : state.units()[trained[i]].parts) {
      if (part.grad < 0) continue;
      const ShardedUnit& unit = state.units()[trained[i]].unit;
      const std::string name = "train.copy_down." + unit.name;
      b.call("train.copy_down", unit.kind, name, {grads[i], part.grad}, [&] {
        const Tensor down = b.whole(part.grad);
        b.emit(OpKind::copy, streams::d2h, name,
               {b.view(grads[i], down.dtype, {fixed(part.elements.size())}, part.elements.begin)}, {down});
      });
    }
}

/// What both steps are told.
struct StepNumbers {
  Tensor lr, coefficient;
};

void step_part(const OptimizerSpec& o, ProgramBuilder& b, const UnitState& u, const SteppedPart& part, BufferId grads,
               const StepNumbers& numbers) {
  const std::string name = "train.adamw." + u.unit.name + (part.on_host ? ".on_host" : "");
  std::vector<Range> ranges = stepped(u.unit);
  const bool all = ranges.size() == 1 && ranges.front() == part.elements && !u.is_split();
  for (Range& r : ranges) r = {std::max(r.begin, part.elements.begin), std::min(r.end, part.elements.end)};
  std::erase_if(ranges, [](const Range& r) { return r.size() <= 0; });
  const BufferId grad = part.grad >= 0 ? part.grad : grads;
  b.call(part.on_host ? "train.adamw.on_host" : "train.adamw", all ? 0 : 1 + u.unit.kind, name,
         {grad, part.shard, part.exp_avg, part.exp_avg_sq}, [&] {
           for (const Range& r : ranges) {
             const auto of = [&](BufferId id, std::int64_t first) {
               return all ? b.whole(id) : b.view(id, b.buffer(id).dtype, {fixed(r.size())}, r.begin - first);
             };
             const std::int64_t begin = part.elements.begin;
             Op& a = b.emit(OpKind::adamw, part.on_host ? streams::host : streams::compute,
                            all ? name : fmt::format("{}.{}", name, r.begin),
                            {of(grad, part.grad >= 0 ? begin : 0), numbers.lr, numbers.coefficient},
                            {of(part.shard, begin - part.first), of(part.exp_avg, begin), of(part.exp_avg_sq, begin)});
             with(with(with(with(a, Attr::beta1, o.beta1), Attr::beta2, o.beta2), Attr::eps, o.eps), Attr::weight_decay,
                  o.weight_decay);
           }
         });
}

/// The host's part first: its copies and its step go on beside the device's.
void step_units(const OptimizerSpec& o, ProgramBuilder& b, const TrainState& state, const std::vector<BufferId>& grads,
                const Tensor& lr, const Tensor& coefficient) {
  StepNumbers on_host;
  if (state.steps_on_host()) {
    on_host = {b.view(state.host_step(), DType::f32, {fixed(2)}), b.view(state.host_step(), DType::f32, {fixed(1)}, 2)};
    b.begin_call("train.step_numbers", "train.");
    b.emit(OpKind::copy, streams::d2h, "train.learning_rate.down", {lr}, {on_host.lr});
    b.emit(OpKind::copy, streams::d2h, "train.clip_coefficient.down", {coefficient}, {on_host.coefficient});
  }
  const std::vector<std::size_t> trained = state.trained();
  for (const bool host : {true, false})
    for (std::size_t i = 0; i < grads.size(); ++i)
      for (const SteppedPart& part : state.units()[trained[i]].parts)
        if (part.on_host == host)
          step_part(o, b, state.units()[trained[i]], part, grads[i], host ? on_host : StepNumbers{lr, coefficient});
  state.take_up_in_place(b, "train.");
}

}  // namespace

void lower_step(const Scenario& s, ProgramBuilder& b, const TrainState& state, const Tensor& metrics) {
  const OptimizerSpec& o = s.optimizer;
  const Tensor sum = b.transient("train.grad_squares", DType::f32, {fixed(1)}, Category::workspace);
  const Tensor coefficient = b.transient("train.clip_coefficient", DType::f32, {fixed(1)}, Category::workspace);
  const Tensor lr = b.transient("train.learning_rate", DType::f32, {fixed(2)}, Category::workspace);
  b.feed(lr, Slot::learning_rate);
  const std::vector<std::size_t> trained = state.trained();
  std::vector<BufferId> grads;  // of these
  for (const std::size_t u : trained) grads.push_back(state.reduced(b, u, "train."));
  sum_parts(s, b, state, grads);
  sum_tied(b, state, grads);
  copy_down(b, state, grads);
  const std::optional<Tensor> of_sharers = sum_squares(s, b, state, grads, sum);
  b.begin_call("train.norm", "train.");
  // As late as can be, and still in what all ranks add up: a request ends the run after the step it came in.
  b.feed(b.view(metrics.buffer, DType::f32, {fixed(1)}, static_cast<std::int64_t>(Metric::stop_requests)),
         Slot::stop_request);
  // Every copy of the shards has all gradients.
  const ShardMesh& mesh = state.mesh();
  if (state.shards() > 1)
    b.communicate(OpKind::all_reduce, streams::control, mesh.ranks() == mesh.shards ? Family::world : Family::fsdp,
                  "train.grad_squares.all_reduce", {sum}, {sum});
  if (of_sharers) {
    if (mesh.expert_columns_ranks() > 1)  // else all experts are on the ranks that share each
      b.communicate(OpKind::all_reduce, streams::control, Family::expert_columns,
                    "train.grad_squares_of_sharers.all_reduce", {*of_sharers}, {*of_sharers});
    b.emit(OpKind::add, streams::compute, "train.grad_squares_of_sharers.add", {sum, *of_sharers}, {sum});
  }
  if (mesh.stages > 1)
    b.communicate(OpKind::all_reduce, streams::control, Family::train_pp, "train.grad_squares.all_stages", {sum},
                  {sum});
  if (mesh.tensor > 1) {  // ranks of one tensor-parallel place add up their metrics; a request may come to any rank
    const Tensor stop =
        b.view(metrics.buffer, DType::f32, {fixed(1)}, static_cast<std::int64_t>(Metric::stop_requests));
    b.communicate(OpKind::all_reduce, streams::control, Family::train_tp, "train.stop.all_reduce", {stop}, {stop});
  }
  const bool alone = mesh.tensor == 1 && mesh.stages == 1;
  if (mesh.data() > 1) all_reduce_metrics(b, alone ? Family::world : Family::data, metrics, "");
  // Losses are the last stage's; requests may come to any.
  if (mesh.stages > 1) all_reduce_metrics(b, Family::train_pp, metrics, "all_stages.");
  with(b.emit(OpKind::clip_coefficient, streams::compute, "train.clip", {sum}, {coefficient, metrics}), Attr::max_norm,
       o.max_grad_norm);
  step_units(o, b, state, grads, lr, coefficient);
  state.publish(b, "train.");
  b.begin_call("train.metrics", "train.");
  b.fetch(metrics, Slot::metrics);
  for (std::size_t i = 0; i < grads.size(); ++i)
    if (grads[i] == state.units()[trained[i]].grad) b.free(grads[i]);
  state.free_host_gradients(b);
}

}  // namespace hotbunk

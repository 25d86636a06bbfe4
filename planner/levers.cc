#include "planner/levers.h"

#include <fmt/format.h>

#include <functional>

#include "lowering/sample_rows.h"
#include "planner/choices.h"
#include "spec/validate.h"

namespace hotbunk {
namespace {

/// The models price it, and the loader takes the scenario that it is.
bool legal(const ScenarioPricer& s, const RlPoint& p) {
  if (s.why_unpriced(p)) return false;
  return validate(with_point(s.scenario(), p), [](std::string_view) { return SourceLocation{}; }).empty();
}

}  // namespace

std::vector<std::pair<std::string, RlPoint>> neighbours(const ScenarioPricer& s, const RlPoint& p) {
  std::vector<std::pair<std::string, RlPoint>> out;
  const auto add = [&](std::string name, const std::function<void(RlPoint&)>& change) {
    RlPoint q = p;
    change(q);
    if (!(q == p) && legal(s, q)) out.emplace_back(std::move(name), q);
  };
  for (Recompute r : {Recompute::none, Recompute::selective, Recompute::full})
    add(fmt::format("train.recompute = {}", r == Recompute::none        ? "none"
                                            : r == Recompute::selective ? "selective"
                                                                        : "full"),
        [&](RlPoint& q) { q.train.recompute = r; });
  const std::int64_t halved = s.scenario().train.micro_batch_tokens / 2;
  if (p.train.micro_batch > 1 && p.train.micro_batch % 2 == 0 && halved >= max_sample_tokens(s.scenario()))  // E217
    add("train.micro_batch_tokens halved", [](RlPoint& q) {
      const std::int64_t sequences = q.train.sequences();
      q.train.micro_batch /= 2;
      q.train.set_sequences(sequences);
    });
  if (p.train.micro_batches % 2 == 0)
    add("train.micro_batch_tokens doubled", [](RlPoint& q) {
      const std::int64_t sequences = q.train.sequences();
      q.train.micro_batch *= 2;
      q.train.set_sequences(sequences);
    });
  const auto trade = [&](const char* name, std::int64_t TrainPoint::*axis) {
    if (p.train.dp % 2 == 0)
      add(fmt::format("train.layout.{} doubled, dp halved", name), [&](RlPoint& q) {
        q.train.*axis *= 2, q.train.dp /= 2;
        q.train.set_sequences(2 * q.train.sequences());
      });
    if (p.train.*axis % 2 == 0 && p.train.micro_batches % 2 == 0)
      add(fmt::format("train.layout.{} halved, dp doubled", name), [&](RlPoint& q) {
        q.train.*axis /= 2, q.train.dp *= 2;
        q.train.set_sequences((q.train.sequences() + 1) / 2);
      });
  };
  trade("tp", &TrainPoint::tp);
  trade("pp", &TrainPoint::pp);
  trade("cp", &TrainPoint::cp);
  trade("ulysses", &TrainPoint::ulysses);
  if (p.train.tp > 1)
    add(p.train.sp ? "train.layout.sp = false" : "train.layout.sp = true",
        [](RlPoint& q) { q.train.sp = !q.train.sp; });
  if (s.scenario().algorithm.name == AlgorithmName::sft) return out;
  if (p.placement == PlacementMode::colocated) {
    const bool rollout = s.scenario().rollout.sleep;
    if (!p.train.optimizer_on_host)
      add(p.sleeps() ? "train.offload = none" : "train.offload = sleep", [&](RlPoint& q) {
        if (const auto order = transition_from("hotbunk", !p.sleeps(), rollout)) q.transition = *order;
      });
    if (p.sleeps())
      for (const std::string_view name : transition_names())
        add(fmt::format("transition = {}", name), [&](RlPoint& q) {
          if (const auto order = transition_from(name, true, rollout)) q.transition = *order;
        });
  }
  if (p.rollout.engines % 2 == 0)
    add("rollout.layout.tp doubled", [](RlPoint& q) { q.rollout.tp *= 2, q.rollout.engines /= 2; });
  if (p.rollout.tp % 2 == 0)
    add("rollout.layout.tp halved", [](RlPoint& q) { q.rollout.tp /= 2, q.rollout.engines *= 2; });
  add("rollout.layout.order = strided", [](RlPoint& q) { q.rollout.strided = true; });
  add("sync.mode = direct", [](RlPoint& q) { q.sync = SyncMechanism::shard_to_shard; });
  add("rollout.memory_fraction - 0.1", [](RlPoint& q) { q.rollout.memory_fraction -= 0.1; });
  return out;
}

}  // namespace hotbunk

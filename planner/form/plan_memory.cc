// Memory of the plan in closed form: the phases around the passes, the sections and what of them is mapped.
#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "base/check.h"
#include "lowering/sample_rows.h"
#include "planner/form/plan_walk.h"

namespace hotbunk {
namespace {

using enum Category;

/// What the sections hold, live and mapped. Host sections are as large as the device's that move there.
struct Sections {
  std::int64_t params = 0, moments = 0, reference = 0, weights = 0, kv = 0;  // live bytes
  struct Mapped {
    std::int64_t params = 0, moments = 0, reference = 0, weights = 0, kv = 0;
  } mapped;

  Sections(const ShardedShapes& sharded, const Scenario& s, std::int64_t kv_blocks, std::int64_t chunk) {
    const Precision& precision = s.train.precision;
    const PlanShapes& shapes = sharded.shapes;
    const std::int64_t root = sharded.root.elements, layer = sharded.layer.elements;
    const auto shards = [&](DType dtype) { return (root + shapes.layers * layer) * size_of(dtype); };
    const auto section = [&](DType dtype) {
      return aligned_bytes(root * size_of(dtype)) + shapes.layers * aligned_bytes(layer * size_of(dtype));
    };
    params = shards(precision.master), moments = 2 * shards(precision.moments);
    mapped.params = round_up(section(precision.master), chunk);
    mapped.moments = round_up(2 * section(precision.moments), chunk);
    if (s.algorithm.reference) {
      reference = shards(precision.params);
      mapped.reference = round_up(section(precision.params), chunk);
    }
    if (s.algorithm.name == AlgorithmName::sft) return;
    const EngineSlices& e = engine_of(shapes, s);
    weights = e.elements(shapes.layers) * size_of(s.rollout.dtype);
    mapped.weights = round_up(e.section_bytes(shapes.layers, s.rollout.dtype), chunk);
    kv = shapes.layers * kv_blocks * 2 * s.rollout.block_tokens * e.kv_heads * s.model.head_dim *
         size_of(s.rollout.dtype);
    mapped.kv = round_up(aligned_bytes(kv), chunk);
  }
};

/// What moves between device and host as a whole.
enum class Part : std::uint8_t { params, moments, reference, weights };

/// Bytes mapped on both sides through the phases.
class MapWalk {
 public:
  explicit MapWalk(FormMemory& memory) : memory_(memory) {}
  void enter(const JobPhase& p) { at_ = static_cast<std::size_t>(p.phase), note(); }
  void device(std::int64_t delta) { device_ += delta, note(); }
  void host(std::int64_t delta) { host_ += delta, note(); }
  /// map there, then unmap here.
  void to_host(std::int64_t bytes, Part) { host(bytes), device(-bytes); }
  void to_device(std::int64_t bytes, Part) { device(bytes), host(-bytes); }
  void upload() {}

 private:
  void note() {
    raise(memory_.device, device_);
    raise(memory_.host, host_);
  }
  void raise(FormSpace& space, std::int64_t mapped) const {
    space.phases[at_].mapped_bytes = std::max(space.phases[at_].mapped_bytes, mapped);
    space.whole.mapped_bytes = std::max(space.whole.mapped_bytes, mapped);
  }
  FormMemory& memory_;
  std::int64_t device_ = 0, host_ = 0;
  std::size_t at_ = 0;
};

/// The same phases as ops, those of an iteration's shifts.
class ShiftWalk {
 public:
  ShiftWalk(const ShardedShapes& sharded, const Scenario& s) : sharded_(sharded), s_(s) {}
  void enter(const JobPhase& p) { at_ = p.phase, every_ = p.every; }
  void device(std::int64_t delta) { map(delta, Space::device); }
  void host(std::int64_t delta) { map(delta, Space::host); }
  /// Buffer by buffer, between the map there and the unmap here.
  void to_host(std::int64_t bytes, Part part) { host(bytes), copy(part), device(-bytes); }
  void to_device(std::int64_t bytes, Part part) { device(bytes), copy(part), host(-bytes); }
  /// What a sync from the host brings up.
  void upload() {
    for (const auto& [elements, times] : sync_uploads(sharded_, s_.sync.bucket_bytes, s_.rollout.dtype))
      copy(times, elements * size_of(s_.train.precision.master));
  }
  std::vector<ShiftOp> take() { return std::move(out_); }

 private:
  void map(std::int64_t delta, Space space) {
    if (delta != 0) out_.push_back({at_, delta > 0 ? OpKind::map : OpKind::unmap, space, 1, std::abs(delta), every_});
  }
  void copy(std::int64_t count, std::int64_t bytes) {
    if (count > 0 && bytes > 0)
      out_.push_back({.phase = at_, .kind = OpKind::copy, .count = count, .bytes = bytes, .every = every_});
  }
  void copy_shards(DType dtype, std::int64_t each) {
    copy(each, sharded_.root.elements * size_of(dtype));
    copy(each * sharded_.shapes.layers, sharded_.layer.elements * size_of(dtype));
  }
  void copy(Part part) {
    switch (part) {
      case Part::params:
        return copy_shards(s_.train.precision.master, 1);
      case Part::moments:
        return copy_shards(s_.train.precision.moments, 2);
      case Part::reference:
        if (s_.algorithm.reference) copy_shards(s_.train.precision.params, 1);
        return;
      case Part::weights: {
        const EngineSlices& e = engine_of(sharded_.shapes, s_);
        for (std::int64_t elements : e.root_buffers) copy(1, elements * size_of(s_.rollout.dtype));
        for (std::int64_t elements : e.layer_buffers)
          copy(sharded_.shapes.layers, elements * size_of(s_.rollout.dtype));
        return;
      }
    }
  }

  const ShardedShapes& sharded_;
  const Scenario& s_;
  PlanPhase at_ = PlanPhase::load;
  std::int32_t every_ = 1;
  std::vector<ShiftOp> out_;
};

/// Transients mapped from each phase's start on; the rule of lowering/builder.cc (transient_levels) over a job's
/// phases: one that maps provides for those behind it that do not, the last such phase also for the next iteration's
/// first ones, the prologue for all until the first change.
PhaseBytes transient_levels(const JobPhases& phases, const PhaseBytes& need, bool keep_mapped) {
  PhaseBytes level{};
  if (keep_mapped) {
    level.fill(*std::max_element(need.begin(), need.end()));
    return level;
  }
  const auto at = [](const JobPhase& p) { return static_cast<std::size_t>(p.phase); };
  const auto repeats = [](const JobPhase& p) { return !is_prologue(p.phase) && p.phase != PlanPhase::export_; };
  std::int64_t carried = 0, entry = 0;
  const JobPhase* last = phases.end();  // of the iteration that maps
  for (const JobPhase* p = phases.end(); p-- != phases.begin();) {
    carried = std::max(carried, need[at(*p)]);
    level[at(*p)] = carried;
    if (p->maps_transients()) carried = 0;
    if (!repeats(*p)) continue;
    entry = carried;  // of the iteration's first phase in the end
    if (p->maps_transients() && last == phases.end()) last = p;
  }
  if (last != phases.end()) {
    entry = std::max(level[at(*last)], entry);
    for (const JobPhase* p = last; p != phases.end() && repeats(*p); ++p) level[at(*p)] = entry;
  }
  for (const JobPhase& p : phases)
    if (is_prologue(p.phase)) level[at(p)] = std::max(level[at(p)], entry);
  return level;
}

/// Everything that a job's phases do to live and mapped bytes, in order.
class JobWalk {
 public:
  JobWalk(const PlanShapes& shapes, const Scenario& s, std::int64_t kv_blocks)
      : sharded_(shapes, s.train.layout.ranks()),
        s_(s),
        phases_(s),
        chunk_(s.cluster.gpu.is_cpu ? std::int64_t{4} << 10 : std::int64_t{2} << 20),
        hold_(sharded_, s, kv_blocks, chunk_),
        backed_up_(phases_.sleepers().weights && s.rollout.sleep_level == 1) {}

  FormMemory walk(Placed placed) {
    FormMemory out;
    out.phases = phases_;
    for (const JobPhase& p : phases_) device_.enter(p.phase), host_.enter(p.phase), live(p);
    out.device = whole(device_), out.host = whole(host_);
    map(out, placed == Placed::each ? placed_transients(plan_phases_of(s_)) : transients_of(device_));
    return out;
  }

  PhaseBytes transients(Placed placed, const PlanPhases& of) const {
    if (placed == Placed::each) return placed_transients(of);
    LiveWalk alone;
    for (const JobPhase& p : phases_)
      if (of[static_cast<std::size_t>(p.phase)]) alone.enter(p.phase), walk_phase(alone, p, sharded_, s_);
    alone.finish();
    return transients_of(alone);
  }

  std::vector<ShiftOp> shifts(const PhaseBytes& transients) const {
    ShiftWalk walk(sharded_, s_);
    map_all(walk, transients);
    std::vector<ShiftOp> out = walk.take();
    std::erase_if(out, [](const ShiftOp& op) { return is_prologue(op.phase); });
    return out;
  }

  FormMemory mapped(const PhaseBytes& transients) const {
    FormMemory out;
    out.phases = phases_;
    map(out, transients);
    return out;
  }

 private:
  void to_host(Category c, std::int64_t bytes) { host_.hold(c, bytes), device_.drop(c, bytes); }
  void to_device(Category c, std::int64_t bytes) { device_.hold(c, bytes), host_.drop(c, bytes); }

  /// In the order of lowering/sleep.cc.
  void live(const JobPhase& p) {
    if (p.phase == PlanPhase::load) {
      device_.hold(params, hold_.params), device_.hold(params, hold_.reference);
      return device_.hold(optimizer, hold_.moments);
    }
    if (!is_transition(p.phase)) return walk_phase(device_, p, sharded_, s_);
    if (p.sleeps.moments) to_host(optimizer, hold_.moments);
    if (p.sleeps.reference) to_host(params, hold_.reference);
    if (p.sleeps.params) to_host(params, hold_.params);
    if (p.wakes.params) to_device(params, hold_.params);
    if (p.wakes.reference) to_device(params, hold_.reference);
    if (p.wakes.moments) to_device(optimizer, hold_.moments);
    if (p.sleeps.kv) device_.drop(kv_cache, hold_.kv);
    if (p.sleeps.weights) backed_up_ ? to_host(params, hold_.weights) : device_.drop(params, hold_.weights);
    if (p.wakes.weights) backed_up_ ? to_device(params, hold_.weights) : device_.hold(params, hold_.weights);
    if (p.wakes.kv) device_.hold(kv_cache, hold_.kv);
    if (p.phase == PlanPhase::start_rollout && backed_up_) host_.hold(params, hold_.weights);
  }

  /// The peak of all phases is the highest phase's, the first of equals.
  FormSpace whole(LiveWalk& w) const {
    FormSpace out = w.finish();
    for (const JobPhase& p : phases_) {
      const FormPeak& peak = out.phases[static_cast<std::size_t>(p.phase)];
      if (peak.bytes > out.whole.bytes) out.whole = peak, out.peak_phase = p.phase;
    }
    return out;
  }

  template <class Walk>
  PhaseBytes transients_of(const Walk& walk) const {
    PhaseBytes out{};
    for (const JobPhase& p : phases_) {
      const auto i = static_cast<std::size_t>(p.phase);
      out[i] = walk.transients(i);
    }
    return out;
  }
  PhaseBytes placed_transients(const PlanPhases& of) const {
    ArenaWalk arena;
    for (const JobPhase& p : phases_)
      if (of[static_cast<std::size_t>(p.phase)]) arena.enter(p.phase), walk_phase(arena, p, sharded_, s_);
    return transients_of(arena);
  }

  void map(FormMemory& out, const PhaseBytes& need) const {
    MapWalk walk(out);
    map_all(walk, need);
  }

  /// Each phase in order: first the transients' level, then its sections.
  template <class Walk>
  void map_all(Walk& walk, PhaseBytes need) const {
    for (std::int64_t& bytes : need) bytes = round_up(bytes, chunk_);
    const bool nothing_sleeps = s_.train.offload != Offload::sleep && !s_.rollout.sleep;
    const PhaseBytes level = transient_levels(phases_, need, nothing_sleeps);
    std::int64_t transients = 0;
    for (const JobPhase& phase : phases_) {
      const auto p = static_cast<std::size_t>(phase.phase);
      walk.enter(phase);
      if (phase.maps_transients()) walk.device(level[p] - transients), transients = level[p];
      map(walk, phase);
    }
  }

  template <class Walk>
  void map(Walk& walk, const JobPhase& p) const {
    const Sections::Mapped& m = hold_.mapped;
    if (p.phase == PlanPhase::load) return walk.device(m.params + m.moments + m.reference);
    if (p.from_host) walk.upload();
    if (!is_transition(p.phase)) return;
    if (p.sleeps.moments) walk.to_host(m.moments, Part::moments);
    if (p.sleeps.reference) walk.to_host(m.reference, Part::reference);
    if (p.sleeps.params) walk.to_host(m.params, Part::params);
    if (p.wakes.params) walk.to_device(m.params, Part::params);
    if (p.wakes.reference) walk.to_device(m.reference, Part::reference);
    if (p.wakes.moments) walk.to_device(m.moments, Part::moments);
    if (p.sleeps.kv) walk.device(-m.kv);
    if (p.sleeps.weights) backed_up_ ? walk.to_host(m.weights, Part::weights) : walk.device(-m.weights);
    if (p.wakes.weights) backed_up_ ? walk.to_device(m.weights, Part::weights) : walk.device(m.weights);
    if (p.wakes.kv) walk.device(m.kv);
    if (p.phase == PlanPhase::start_rollout && backed_up_) walk.host(m.weights);
  }

  ShardedShapes sharded_;
  const Scenario& s_;
  JobPhases phases_;
  std::int64_t chunk_;
  Sections hold_;
  bool backed_up_;  // the rollout's weights sleep in host memory
  LiveWalk device_, host_;
};

}  // namespace

namespace {

JobWalk walk_of(const PlanForm& form, const Scenario& s) {
  std::int64_t blocks = 0;
  if (s.algorithm.name != AlgorithmName::sft) {
    const auto known = form.kv_blocks(s);
    HB_CHECK(known, "no room for a KV pool");
    blocks = *known;
  }
  return {form.shapes(), s, blocks};
}

}  // namespace

FormMemory PlanForm::memory(const Scenario& s, Placed placed) const { return walk_of(*this, s).walk(placed); }

PhaseBytes PlanForm::transients(const Scenario& s, Placed placed) const {
  return transients(s, placed, plan_phases_of(s));
}

PhaseBytes PlanForm::transients(const Scenario& s, Placed placed, const PlanPhases& of) const {
  return walk_of(*this, s).transients(placed, of);
}

std::vector<ShiftOp> PlanForm::shifts(const Scenario& s, const PhaseBytes& transients) const {
  return walk_of(*this, s).shifts(transients);
}

FormMemory PlanForm::mapped(const Scenario& s, const PhaseBytes& transients) const {
  return walk_of(*this, s).mapped(transients);
}

}  // namespace hotbunk

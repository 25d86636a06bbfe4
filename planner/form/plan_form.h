// The closed form of the plan: the bytes and the traffic of what lowering/ writes, without writing it. Arithmetic over
// the kinds of units (root, layer, engine slice), whatever the number of layers; no allocation once the tables are
// built.
//
//   memory   live peaks per phase and category, and mapped ones: equal to trace/static_memory.h's, to the byte; without
//            placing the transients (Placed::gapless) the device's mapped peaks are a lower bound
//   shifts   what the phases between training and rollout take, give back and copy: the plan's ops
//   traffic  calls, payload and padding per phase, group and op of one rank: equal to a run's with the same sizes
//
// tests/planner/plan_form_test.cc holds it to the lowered plan over random scenarios; docs/memory.md derives it.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lowering/builder.h"
#include "lowering/phases.h"
#include "planner/form/plan_shapes.h"
#include "spec/scenario.h"
#include "trace/trace.h"

namespace hotbunk {

/// Which phases are meant.
using PlanPhases = std::array<bool, num_plan_phases>;
/// All that a scenario's plan has.
PlanPhases plan_phases_of(const Scenario&);

struct FormPeak {
  std::int64_t bytes = 0;         // live
  CategoryBytes by_category{};    // when the total was highest, first time
  std::int64_t mapped_bytes = 0;  // device: see Placed
};

/// How mapped device bytes count transients: as if no gaps lay between them, a lower bound in the time of a few layers
/// and without allocation; or each at its place, as the plan's pass puts it, exact in the time of all layers.
enum class Placed : std::uint8_t { gapless, each };

/// Peaks of one rank (all ranks have the same) in one space.
struct FormSpace {
  FormPeak whole;
  PlanPhase peak_phase = PlanPhase::load;
  CategoryBytes category_peaks{};
  std::array<FormPeak, num_plan_phases> phases{};
};
struct FormMemory {
  JobPhases phases;  // that the plan has, in order
  FormSpace device, host;
};

/// A number of bytes for each phase; 0 where a plan lacks it.
using PhaseBytes = std::array<std::int64_t, num_plan_phases>;

/// One op of the phases that put something to sleep, wake it or synchronise the weights, in the order of the plan.
/// Copies of a sync bring parameters up that sleep.
struct ShiftOp {
  PlanPhase phase{};
  OpKind kind{};                      // map, unmap: memory taken, given back; copy: between device and host
  Space space = Space::device;        // of map and unmap
  std::int64_t count = 1, bytes = 0;  // copies: so many alike, each of these bytes
  std::int32_t every = 1;             // of its phase: only in each so manieth iteration
  friend bool operator==(const ShiftOp&, const ShiftOp&) = default;
};

/// How often the blocks of one iteration run, with which sizes in total.
struct BlockRuns {
  std::int64_t runs = 0, tokens = 0, seqs = 0;
};
struct PlanRuns {
  BlockRuns prefill, decode;
  std::int64_t reference = 0, old_logprobs = 0, micro_batches = 0;  // of one rank
  std::int64_t optimizer_steps = 0, checkpoints = 0, exports = 0;
};
/// Every block once, filled to its capacity.
PlanRuns one_run_each(const Scenario&);

struct FormTraffic {
  PlanPhase phase{};
  Family group{};
  OpKind op{};
  std::int64_t calls = 0, payload_bytes = 0, padding_bytes = 0;
  friend bool operator==(const FormTraffic&, const FormTraffic&) = default;
};
/// The lines that have calls, in the order of the phases. It is walked itself, also where a function returns it; a
/// pointer into a value that dies in the same statement does not compile.
struct FormTraffics {
  std::array<FormTraffic, 16> lines{};
  std::size_t count = 0;
  const FormTraffic* begin() const& { return lines.data(); }
  const FormTraffic* end() const& { return lines.data() + count; }
  const FormTraffic* begin() const&& = delete;
  const FormTraffic* end() const&& = delete;
};

class PlanForm {
 public:
  /// Tables of the model, which every scenario asked about must have.
  explicit PlanForm(const ModelSpec& m) : shapes_(m) {}

  /// "" or why the closed form does not speak of this scenario: it is not lowered, or there is no room for a KV pool.
  static std::string why_not(const Scenario&);

  /// Blocks of the KV pool (kv_pool_blocks of lowering/lower.h); nullopt: no room for one sequence.
  std::optional<std::int64_t> kv_blocks(const Scenario&) const;

  // All ask for a scenario that why_not accepts.
  FormMemory memory(const Scenario&, Placed = Placed::gapless) const;
  /// The slow part of it: what each phase's transients need. Nothing that sleeps and no KV pool is among them, so the
  /// memory fraction does not change it, and of the transition only whether a sync reads parameters that sleep.
  PhaseBytes transients(const Scenario&, Placed) const;
  /// The same of some phases, 0 elsewhere: those of different phases do not touch one another.
  PhaseBytes transients(const Scenario&, Placed, const PlanPhases& of) const;
  /// The rest: memory() of the scenario with these transients, but for live bytes.
  FormMemory mapped(const Scenario&, const PhaseBytes& transients) const;
  /// What one iteration's shifts take, give back and copy; exact where the transients are placed.
  std::vector<ShiftOp> shifts(const Scenario&, const PhaseBytes& transients) const;
  FormTraffics traffic(const Scenario&, Rank, const PlanRuns&) const;

  const PlanShapes& shapes() const { return shapes_; }

 private:
  PlanShapes shapes_;
};

}  // namespace hotbunk

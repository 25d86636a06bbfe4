// Traffic of the plan in closed form: what each block's collectives move, times how often the block runs.
#include <algorithm>

#include "base/check.h"
#include "lowering/rollout.h"
#include "lowering/sample_rows.h"
#include "planner/form/plan_form.h"

namespace hotbunk {
namespace {

class Traffic {
 public:
  Traffic(const PlanShapes& shapes, const Scenario& s, Rank rank, const PlanRuns& runs)
      : sharded_(shapes, s.train.layout.ranks()),
        shapes_(shapes),
        s_(s),
        rank_(rank),
        runs_(runs),
        world_(sharded_.world) {}

  FormTraffics count() {
    const PlanPhases present = plan_phases_of(s_);
    const auto on = [&](PlanPhase p) { return present[static_cast<std::size_t>(p)]; };
    const Precision& precision = s_.train.precision;
    if (on(PlanPhase::sync)) sync();
    if (on(PlanPhase::rollout)) rollout();
    if (on(PlanPhase::exchange)) exchange();
    if (on(PlanPhase::reference)) gathers(PlanPhase::reference, runs_.reference, precision.params);
    if (on(PlanPhase::old_logprobs)) gathers(PlanPhase::old_logprobs, runs_.old_logprobs, precision.params);
    train();
    exports(PlanPhase::checkpoint, runs_.checkpoints);
    exports(PlanPhase::export_, runs_.exports);
    return out_;
  }

 private:
  void add(PlanPhase phase, Family group, OpKind op, std::int64_t calls, std::int64_t payload,
           std::int64_t padding = 0) {
    if (calls > 0) out_.lines[out_.count++] = {phase, group, op, calls, payload, padding};
  }

  /// `times` collectives over the elements of the model's units, each unit padded to equal shards.
  FormTraffic units(PlanPhase phase, OpKind op, std::int64_t root_times, std::int64_t layer_times, DType dtype) const {
    const std::int64_t root_padding = world_ * sharded_.root.elements - shapes_.root.elements;
    const std::int64_t layer_padding = world_ * sharded_.layer.elements - shapes_.layer.elements;
    return {
        phase,
        Family::fsdp,
        op,
        root_times + layer_times * shapes_.layers,
        (root_times * shapes_.root.elements + layer_times * shapes_.layers * shapes_.layer.elements) * size_of(dtype),
        (root_times * root_padding + layer_times * shapes_.layers * layer_padding) * size_of(dtype)};
  }
  void add(const FormTraffic& line) {
    if (world_ > 1) add(line.phase, line.group, line.op, line.calls, line.payload_bytes, line.padding_bytes);
  }
  void gathers(PlanPhase phase, std::int64_t times, DType dtype) {
    add(units(phase, OpKind::all_gather, times, times, dtype));
  }
  /// Parameters and both moments.
  void exports(PlanPhase phase, std::int64_t times) {
    FormTraffic all = units(phase, OpKind::all_gather, times, times, s_.train.precision.master);
    const FormTraffic moments = units(phase, OpKind::all_gather, 2 * times, 2 * times, s_.train.precision.moments);
    all.calls += moments.calls;
    all.payload_bytes += moments.payload_bytes, all.padding_bytes += moments.padding_bytes;
    add(all);
  }

  void train() {
    const std::int64_t n = runs_.micro_batches;
    // Layers are gathered again for backward when they were resharded; the root stays.
    add(units(PlanPhase::train, OpKind::all_gather, n, s_.train.reshard_after_forward ? 2 * n : n,
              s_.train.precision.params));
    add(units(PlanPhase::train, OpKind::reduce_scatter, n, n, s_.train.precision.grads));
    // Sum of squares, largest log-prob gaps, metrics: fp32.
    constexpr std::int64_t step_elements = 1 + num_max_metrics + static_cast<std::int64_t>(Metric::count);
    if (world_ > 1)
      add(PlanPhase::train, Family::world, OpKind::all_reduce, 3 * runs_.optimizer_steps,
          runs_.optimizer_steps * step_elements * size_of(DType::f32));
  }

  void rollout() {
    const EngineSlices& e = engine();
    if (e.tp == 1) return;
    const BlockRuns &p = runs_.prefill, &d = runs_.decode;
    // After the embedding, and per layer after attention and after the MLP; then the logits of each last token.
    const std::int64_t reductions = 1 + 2 * shapes_.layers;
    add(PlanPhase::rollout, Family::tp, OpKind::all_reduce, reductions * (p.runs + d.runs),
        reductions * (p.tokens + d.tokens) * s_.model.hidden * size_of(s_.rollout.dtype));
    add(PlanPhase::rollout, Family::tp, OpKind::all_gather, p.runs + d.runs,
        e.tp * (p.seqs + d.seqs) * e.vocab_rows * size_of(DType::f32));
  }

  void exchange() {
    if (world_ == 1) return;
    add(PlanPhase::exchange, Family::world, OpKind::all_gather, 2,
        world_ * rows_per_rank(s_) *
            (row_ints(s_) * size_of(DType::i32) + max_response_tokens(s_) * size_of(DType::f32)));
  }

  void sync() {
    const DType dtype = s_.rollout.dtype;
    const RankSlice& slice = my_slice();
    const SyncBuckets buckets = fill_sync_buckets(sharded_, s_.sync.bucket_bytes, dtype, slice);
    if (s_.sync.transport == SyncTransport::ipc || world_ == 1) {
      if (world_ > 1) add(PlanPhase::sync, Family::fsdp, OpKind::barrier, 2 * buckets.count, 0);
      add(PlanPhase::sync, Family::fsdp, OpKind::peer_copy, buckets.wanted, missing_elements(slice) * size_of(dtype));
    }
    if (world_ == 1) return;
    std::int64_t calls = 0, element_bytes = 0, hash_bytes = 0;
    if (s_.sync.transport == SyncTransport::collective) calls += buckets.count, element_bytes = size_of(dtype);
    if (s_.sync.verify) ++calls, hash_bytes = world_ * shapes_.sync_hash_bytes();
    add(PlanPhase::sync, Family::fsdp, OpKind::all_gather, calls, shapes_.elements() * element_bytes + hash_bytes,
        (world_ * sharded_.elements() - shapes_.elements()) * element_bytes);
  }

  /// Elements of this rank's rollout weights that its own shards lack.
  std::int64_t missing_elements(const RankSlice& slice) const {
    const auto of_unit = [&](const UnitShape& unit, const std::array<Piece, max_unit_params>& wanted) {
      std::int64_t n = 0;
      for (std::size_t i = 0; i < unit.count; ++i) {
        const Piece& w = wanted[i];
        const Range own = chunk_range(unit.params[i].rows, world_, rank_);
        const std::int64_t mine =
            std::max<std::int64_t>(0, std::min(own.end, w.row_end) - std::max(own.begin, w.row_begin));
        n += (w.row_end - w.row_begin - mine) * (w.col_end - w.col_begin);
      }
      return n;
    };
    return of_unit(shapes_.root, slice.root) + shapes_.layers * of_unit(shapes_.layer, slice.layer);
  }

  const EngineSlices& engine() const {
    const EngineSlices* e = shapes_.engine(s_.rollout.layout.tp);
    HB_CHECK(e, "no engine of tp {}", s_.rollout.layout.tp);
    return *e;
  }
  const RankSlice& my_slice() const {
    return engine().ranks[static_cast<std::size_t>(engine_seat(s_.rollout.layout, rank_).tp_rank)];
  }

  ShardedShapes sharded_;
  const PlanShapes& shapes_;
  const Scenario& s_;
  std::int64_t rank_;
  const PlanRuns& runs_;
  std::int64_t world_;
  FormTraffics out_;
};

}  // namespace

PlanRuns one_run_each(const Scenario& s) {
  const std::int64_t slots = s.rollout.max_running_requests, prefill = s.rollout.max_prefill_tokens;
  return {.prefill = {1, prefill, std::min(slots, prefill)},
          .decode = {1, slots, slots},
          .reference = 1,
          .old_logprobs = 1,
          .micro_batches = 1,
          .optimizer_steps = 1,
          .checkpoints = 1,
          .exports = 1};
}

FormTraffics PlanForm::traffic(const Scenario& s, Rank rank, const PlanRuns& runs) const {
  return Traffic(shapes_, s, rank, runs).count();
}

}  // namespace hotbunk

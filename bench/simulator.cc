// Simulator: ops per second from Device call to trace, and plan + simulate of the demo scenario.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include "exec/length_driver.h"
#include "lowering/lower.h"
#include "planner/cost/cost_model.h"
#include "sim/links.h"
#include "sim/model_cost.h"
#include "sim/sim_backend.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "tests/blocks.h"

namespace hotbunk {
namespace {

Tensor vector_of(std::int64_t elements) {
  Tensor t;
  t.buffer = 0;
  t.rank = 1;
  t.shape[0] = {elements};
  return t;
}

/// A decode step of `layers` layers under tensor parallelism: kernels on compute, a collective per half layer on its
/// stream, events in between.
Plan decode_plan(Rank ranks, int layers) {
  Plan plan = test::empty_plan();
  Program program = test::empty_program();
  std::vector<Op> ops;
  EventId event = 0;
  const auto add = [&](OpKind kind, StreamId stream, std::string name) -> Op& {
    Op op;
    op.kind = kind;
    op.stream = stream;
    op.name = std::move(name);
    return ops.emplace_back(std::move(op));
  };
  const auto hand_over = [&](StreamId from, StreamId to) {
    add(OpKind::record, from, "").event = event;
    add(OpKind::wait, to, "").event = event++;
  };
  for (int l = 0; l < layers; ++l)
    for (const char* half : {"attention", "mlp"}) {
      for (const char* part : {"norm", "in", "core", "out"}) {
        Op& kernel = add(OpKind::add, streams::compute, fmt::format("layers.{}.{}.{}", l, half, part));
        kernel.inputs = {vector_of(1 << 16), vector_of(1 << 16)};
        kernel.outputs = {vector_of(1 << 16)};
      }
      hand_over(streams::compute, streams::tensor);
      Op& reduce = add(OpKind::all_reduce, streams::tensor, fmt::format("layers.{}.{}.reduce", l, half));
      reduce.group = 0;
      reduce.inputs = reduce.outputs = {vector_of(1 << 16)};
      hand_over(streams::tensor, streams::compute);
    }
  program.num_events = event;
  program.phases = {{test::block_of(program, "decode", ops)}};
  plan.programs = {std::move(program)};
  plan.program_of_rank.assign(static_cast<std::size_t>(ranks), 0);
  plan.groups = {{"tp", {{}}}};
  for (Rank r = 0; r < ranks; ++r) plan.groups[0].groups[0].push_back(r);
  plan.phases = {{"rollout", When::iteration, true}};
  return plan;
}

struct UnitCost final : OpCost {
  std::int64_t nanoseconds(const Plan&, Rank, const Op& op, const Args&) const override {
    return op.kind == OpKind::all_reduce ? 7 : 10;
  }
};

struct Steps final : Driver {
  std::int64_t steps = 0;
  std::vector<std::int64_t> done;
  std::optional<Args> next(Rank r, std::int32_t step, std::int16_t) override {
    if (done[static_cast<std::size_t>(r)]++ == steps) return std::nullopt;
    Args args;
    args.step = step;
    args.sizes = {8, 8, done[static_cast<std::size_t>(r)]};
    return args;
  }
  void feed(Rank, const BoundOp&, const Args&, std::span<std::byte>) override {}
  void fetch(Rank, const BoundOp&, const Args&, std::span<const std::byte>) override {}
  void completed(Rank, const Args&, std::int16_t) override {}
  bool wants_results() const override { return false; }
  void report(Trace&) const override {}
};

/// 512 decode steps of 252 calls on `ranks` ranks. items = calls that reach a stream.
void decode(benchmark::State& state, std::int32_t first_recorded_step) {
  const auto ranks = static_cast<Rank>(state.range(0));
  const Plan plan = decode_plan(ranks, 14);
  const UnitCost cost;
  std::int64_t ops = 0, peak = 0;
  for (auto _ : state) {
    SimOptions options;
    options.timeline.first_step = first_recorded_step;
    SimBackend backend({}, cost, options);
    Steps driver;
    driver.steps = 512;
    driver.done.assign(static_cast<std::size_t>(ranks), 0);
    RunOptions run;
    for (Rank r = 0; r < ranks; ++r) run.local_ranks.push_back(r);
    const auto trace = execute(plan, backend, driver, run);
    if (!trace) return state.SkipWithError(render(trace.error()).c_str());
    ops += backend.engine().num_done();
    peak = backend.engine().peak_entries();
  }
  state.SetItemsProcessed(ops);
  state.counters["peak_calls_held"] = static_cast<double>(peak);
}
void decode_without_spans(benchmark::State& state) { decode(state, 2); }
void decode_with_spans(benchmark::State& state) { decode(state, 1); }
BENCHMARK(decode_without_spans)->Arg(1)->Arg(8)->Arg(64)->Unit(benchmark::kMillisecond);
BENCHMARK(decode_with_spans)->Arg(8)->Unit(benchmark::kMillisecond);

/// `jobs` at a time on links of their own (sharing 0), or in eights on one more (1): each that is done begins again.
/// items = jobs done.
void shared_links(benchmark::State& state) {
  const auto jobs = static_cast<std::uint32_t>(state.range(0));
  const bool sharing = state.range(1) != 0;
  std::int64_t done = 0;
  for (auto _ : state) {
    SharedLinks links;
    for (std::uint32_t job = 0; job < 3 * jobs; ++job) links.add_link("link");
    const auto join = [&](std::int64_t now, std::uint32_t job) {
      const Demand demands[] = {{job, 0.9}, {jobs + job, 0.5}, {2 * jobs + (sharing ? job / 8 : job), 0.2}};
      links.join(now, job, 1000 + 7 * (job % 101), demands);
    };
    for (std::uint32_t job = 0; job < jobs; ++job) join(0, job);
    for (std::int64_t end = done + 200'000; done < end;) {
      const std::int64_t now = *links.next_done_ns();
      while (const auto job = links.take_done(now)) {
        join(now, *job);
        ++done;
      }
    }
  }
  state.SetItemsProcessed(done);
}
BENCHMARK(shared_links)->Args({4096, 0})->Args({4096, 1})->Unit(benchmark::kMillisecond);

/// From the scenario file to the trace, as `hotbunk simulate` does it. Run from the repository's root.
void demo_scenario(benchmark::State& state) {
  std::int64_t ops = 0;
  for (auto _ : state) {
    const auto scenario = load_scenario("scenarios/demo.yaml", {});
    if (!scenario) return state.SkipWithError(render(scenario.error()).c_str());
    const auto plan = lower(*scenario);
    if (!plan) return state.SkipWithError(render(plan.error()).c_str());
    const auto hardware = hardware_for(scenario->cluster, catalog_root());
    if (!hardware) return state.SkipWithError(render(hardware.error()).c_str());
    const CostModel model(*hardware, scenario->cluster);
    const ModelCost cost(model);
    SimBackend backend(scenario->cluster, cost);
    auto driver = LengthDriver::create(*plan, *scenario);
    if (!driver) return state.SkipWithError(render(driver.error()).c_str());
    RunOptions run;
    run.steps = static_cast<std::int32_t>(scenario->steps);
    for (Rank r = 0; r < plan->num_ranks(); ++r) run.local_ranks.push_back(r);
    const auto trace = execute(*plan, backend, **driver, run);
    if (!trace) return state.SkipWithError(render(trace.error()).c_str());
    ops += backend.engine().num_done();
  }
  state.SetItemsProcessed(ops);
}
BENCHMARK(demo_scenario)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace hotbunk

BENCHMARK_MAIN();

// A small plan and hand-made traces of it: two ranks, two phases, numbers that can be added up by hand.
#pragma once
#include "spec/scenario.h"
#include "tests/blocks.h"
#include "trace/folds.h"

namespace hotbunk::test {

inline constexpr std::int64_t ms = 1'000'000;  // ns

inline Plan sample_plan() {
  Plan p = test::empty_plan();
  p.scenario = "sample";
  p.device_capacity_bytes = 8192;
  p.overhead_bytes = 100;
  p.groups = {{"fsdp", {{0, 1}}}, {"tp", {{0}, {1}}}};
  p.phases = {{"load", When::prologue, false}, {"rollout", When::iteration, true}, {"train", When::iteration, true}};
  p.program_of_rank = {0, 0};
  Program program = test::empty_program();
  program.buffers = {{"weights", DType::f32, 500, Category::params, sections::train_params, 0},
                     {"logits", DType::f32, 250, Category::activations, sections::transient, 0}};
  program.section(sections::train_params).bytes = 4096;
  program.phases.resize(3);
  p.programs = {program};
  return p;
}

inline Scenario sample_scenario() {
  Scenario s;
  s.name = "sample";
  s.cluster.gpu.flops["bf16"] = {1e6, "for the test"};
  s.cluster.gpus_per_node = 2;
  return s;
}

inline RankMemory sample_memory(std::int64_t activations) {
  RankMemory m;
  SpaceMemory& d = m.device;
  d.peak_bytes = 2000 + activations;
  d.mapped_peak_bytes = 4096;
  d.peak_step = 1;
  d.peak_phase = 2;
  d.at_peak = {2000, 0, 0, activations};
  d.category_peaks = {2000, 0, 0, activations};
  d.phase_peaks[0] = {2000, 4096, {2000}};
  d.phase_peaks[1] = {2000, 4096, {2000}};
  d.phase_peaks[2] = {2000 + activations, 4096, {2000, 0, 0, activations}};
  d.end_live_bytes = 2000;
  d.end_mapped_bytes = 4096;
  m.host.peak_bytes = 64;
  m.host.mapped_peak_bytes = 4096;
  m.host.at_peak[static_cast<std::size_t>(Category::optimizer)] = 64;
  m.host.category_peaks[static_cast<std::size_t>(Category::optimizer)] = 64;
  return m;
}

/// Two steps. Rank 1 starts each phase 1 ms later; its peak is 200 bytes higher.
inline Trace sample_trace() {
  Trace t;
  for (const Stream& s : plan_streams()) t.streams.push_back(s.name);
  t.names = {"weights", "layers.0.all_gather", "layers.0.linear", "logits"};
  t.memory = {sample_memory(1000), sample_memory(1200)};
  t.traffic.resize(2);
  for (Rank r = 0; r < 2; ++r) {
    const std::int64_t late = r * ms;
    t.phases.push_back({r, 0, 0, 0, 2 * ms, 1});
    t.memory_events.push_back({r, Space::device, Category::params, 0, 0, 0, ms, 2000});
    for (int step = 1; step <= 2; ++step) {
      const std::int64_t base = (step - 1) * 20 * ms + 2 * ms;
      t.phases.push_back({r, step, 1, base + late, base + 10 * ms, 7});
      t.phases.push_back({r, step, 2, base + 10 * ms + late, base + 18 * ms + late, 3});
      t.spans.push_back({r, streams::gather, OpKind::all_gather, 2, step, 1, base + 11 * ms, base + 13 * ms, 2000, 0});
      t.spans.push_back({r, streams::compute, OpKind::linear, 2, step, 2, base + 13 * ms, base + 17 * ms, 300, 5e3});
      t.memory_events.push_back({r, Space::device, Category::activations, 2, step, 3, base + 12 * ms, 1000 + 200 * r});
      t.memory_events.push_back({r, Space::device, Category::activations, 2, step, 3, base + 17 * ms, -1000 - 200 * r});
      t.traffic[static_cast<std::size_t>(r)][{step, 2, 0, OpKind::all_gather}] = {3, 6000, 16, 3000};
      t.traffic[static_cast<std::size_t>(r)][{step, 2, 1, OpKind::all_reduce}] = {1, 40 + 4 * r, 0, 0};
    }
  }
  t.metrics = {{1, {{"actor/loss", 0.5}, {"reward", 0.25}}}, {2, {{"actor/loss", 0.25}, {"reward", 0.5}}}};
  t.trained_tokens = 380;
  t.model_flops = 7.2e3;
  total_up(sample_plan(), t);
  return t;
}

}  // namespace hotbunk::test

#include "trace/summary.h"

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "tests/json.h"
#include "tests/trace/sample.h"

namespace hotbunk {
namespace {

using Json = nlohmann::ordered_json;

/// The eight categories in DESIGN's order.
Json categories(int params, int activations, int overhead, int optimizer = 0) {
  return {{"params", params}, {"grads", 0},         {"optimizer", optimizer}, {"activations", activations},
          {"kv_cache", 0},    {"communication", 0}, {"workspace", 0},         {"overhead", overhead}};
}

Json rank_memory(int rank, int activations) {
  return {{"rank", rank},
          {"peak_bytes", 2000 + activations},
          {"mapped_peak_bytes", 4096},
          {"at_peak", categories(2000, activations, 100)},
          {"category_peaks", categories(2000, activations, 100)},
          {"phase_peaks",
           {{"load", {{"peak_bytes", 2000}, {"mapped_peak_bytes", 4096}, {"by_category", categories(2000, 0, 100)}}},
            {"rollout", {{"peak_bytes", 2000}, {"mapped_peak_bytes", 4096}, {"by_category", categories(2000, 0, 100)}}},
            {"train",
             {{"peak_bytes", 2000 + activations},
              {"mapped_peak_bytes", 4096},
              {"by_category", categories(2000, activations, 100)}}}}},
          {"host", {{"peak_bytes", 64}, {"mapped_peak_bytes", 4096}, {"category_peaks", categories(0, 0, 0, 64)}}}};
}

Json traffic(int step, const char* group, const char* op, std::vector<int> ranks, int calls, int payload, int padding,
             int wire) {
  return {{"step", step},
          {"phase", "train"},
          {"group", group},
          {"op", op},
          {"ranks", std::move(ranks)},
          {"calls_per_rank", calls},
          {"payload_bytes_per_rank", payload},
          {"padding_bytes_per_rank", padding},
          {"wire_bytes_per_rank", wire}};
}

}  // namespace

TEST_CASE("the summary is DESIGN's document, key by key") {
  const Plan plan = test::sample_plan();
  const Json s = summarize(plan, test::sample_scenario(), test::sample_trace());
  std::vector<std::string> keys;
  for (const auto& item : s.items()) keys.push_back(item.key());
  CHECK(keys == std::vector<std::string>{"schema",
                                         "source",
                                         "scenario",
                                         "plan_hash",
                                         "priced_blocks",
                                         "fits",
                                         "steps",
                                         "iteration_seconds",
                                         "filling_seconds",
                                         "tokens_per_second",
                                         "mfu",
                                         "phases",
                                         "memory",
                                         "traffic",
                                         "metrics",
                                         "iteration",
                                         "phase_totals",
                                         "traffic_totals",
                                         "kept",
                                         "timeline",
                                         "live_at_peak",
                                         "critical_path",
                                         "links"});
  CHECK(s["schema"] == "hotbunk.trace-summary/1");
  CHECK(s["source"] == "simulated");
  CHECK(s["scenario"] == "sample");
  CHECK(s["plan_hash"] == plan_hash(plan));
  CHECK(s["fits"] == true);  // 4096 + 100 <= 8192
  CHECK(s["steps"] == 2);
  // An iteration takes either rank 18 ms: rank 1 enters its rollout 1 ms later and leaves its training 1 ms later.
  CHECK(s["iteration_seconds"].get<double>() == Approx(0.018));
  CHECK(s["filling_seconds"] == 0.0);
  const Json& path = s["critical_path"];
  CHECK(path["elapsed_s"].get<double>() >= path["busy_s"].get<double>());
  double phases = 0.0;
  for (const Json& p : path["phases"]) phases += p["elapsed_s"].get<double>();
  CHECK(phases == Approx(path["elapsed_s"].get<double>()));
  CHECK(s["tokens_per_second"].get<double>() == Approx(380 / 0.036));
  // Training takes a rank 8 ms per step: 7200 / (0.016 s * 1e6 FLOP/s * 2 devices).
  CHECK(s["mfu"].get<double>() == Approx(0.225));

  REQUIRE(s["phases"].size() == 5);
  CHECK(s["phases"][0] == Json({{"step", 0}, {"name", "load"}, {"start", 0.0}, {"seconds", 0.002}}));
  CHECK(s["phases"][2]["name"] == "train");
  CHECK(s["phases"][2]["start"].get<double>() == Approx(0.012));
  CHECK(s["phases"][2]["seconds"].get<double>() == Approx(0.008));

  CHECK(s["memory"] == Json({{"capacity_bytes", 8192},
                             {"peak_bytes", 3200},
                             {"mapped_peak_bytes", 4096},
                             {"peak_rank", 1},
                             {"peak_phase", "train"},
                             {"by_rank", {rank_memory(0, 1000), rank_memory(1, 1200)}}}));
  CHECK(s["traffic"] ==
        Json({traffic(1, "fsdp", "all_gather", {0, 1}, 3, 6000, 16, 3000),
              traffic(1, "tp", "all_reduce", {0}, 1, 40, 0, 0), traffic(1, "tp", "all_reduce", {1}, 1, 44, 0, 0),
              traffic(2, "fsdp", "all_gather", {0, 1}, 3, 6000, 16, 3000),
              traffic(2, "tp", "all_reduce", {0}, 1, 40, 0, 0), traffic(2, "tp", "all_reduce", {1}, 1, 44, 0, 0)}));
  CHECK(s["metrics"] == Json({{{"step", 1}, {"actor/loss", 0.5}, {"reward", 0.25}},
                              {{"step", 2}, {"actor/loss", 0.25}, {"reward", 0.5}}}));

  // Over both steps: the rollout takes rank 0 10 ms and rank 1 9 ms, twice.
  CHECK(s["kept"] == Json({{"steps", 2}, {"of", 2}, {"every", 1}, {"metrics", 2}}));
  REQUIRE(s["phase_totals"].size() == 3);
  const Json& rollout = s["phase_totals"][1];
  CHECK(rollout["name"] == "rollout");
  CHECK(rollout["times"] == 2);
  CHECK(rollout["seconds"].get<double>() == Approx(0.019));
  CHECK(rollout["mean"].get<double>() == Approx(0.0095));
  CHECK(rollout["shortest"].get<double>() == Approx(0.009));
  CHECK(rollout["p50"].get<double>() == Approx(0.009).epsilon(0.011));
  CHECK(rollout["longest"].get<double>() == Approx(0.010));
  CHECK(rollout["longest_step"] == 1);
  REQUIRE(s["traffic_totals"].size() == 3);
  Json gather = traffic(0, "fsdp", "all_gather", {0, 1}, 6, 12000, 32, 6000);
  gather.erase("step");
  CHECK(s["traffic_totals"][0] == gather);
}

TEST_CASE("overhead, the host and one byte decide whether it fits") {
  Plan plan = test::sample_plan();
  const Trace trace = test::sample_trace();
  const auto fits = [&] { return summarize(plan, test::sample_scenario(), trace)["fits"].get<bool>(); };
  plan.device_capacity_bytes = 4196;
  CHECK(fits());
  plan.device_capacity_bytes = 4195;
  CHECK_FALSE(fits());
  plan.device_capacity_bytes = 0;  // unlimited
  CHECK(fits());
  plan.host_capacity_bytes = 4095;
  CHECK_FALSE(fits());
}

TEST_CASE("ranks of one group with different counts have rows of their own") {
  Trace trace = test::sample_trace();
  trace.traffic[1][{1, 2, 0, OpKind::all_gather}].calls = 4;
  total_up(test::sample_plan(), trace);
  const Json s = summarize(test::sample_plan(), test::sample_scenario(), trace);
  CHECK(s["traffic"].size() == 7);
  CHECK(s["traffic"][0]["ranks"] == Json::array({0}));
  CHECK(s["traffic"][1]["ranks"] == Json::array({1}));
  CHECK(s["traffic"][1]["calls_per_rank"] == 4);
}

TEST_CASE("of many ranks those have rows whose memory is drawn, and one of each kind") {
  Plan plan = test::sample_plan();
  Trace trace = test::sample_trace();
  const RankMemory small = trace.memory.at(0), large = trace.memory.at(1);
  const auto rows_of = [&](std::size_t ranks) {
    plan.program_of_rank.assign(ranks, 0);
    trace.memory.assign(ranks, small);
    for (const std::size_t r : {3, 9, 30}) trace.memory[r] = large;
    trace.traffic.assign(ranks, {}), trace.traffic_totals.assign(ranks, {});
    trace.memory_events = {{.rank = 5}, {.rank = 9}};
    std::vector<int> out;
    const Json memory = summarize(plan, test::sample_scenario(), trace)["memory"];
    CHECK(memory["peak_rank"] == 3);
    for (const Json& row : memory["by_rank"]) out.push_back(row["rank"].get<int>());
    return out;
  };
  CHECK(rows_of(256).size() == 256);
  CHECK(rows_of(257) == std::vector<int>{0, 3, 5, 9});
  // Rank 5 was not played: rank 0 stands for it.
  for (Rank r = 0; r < 257; ++r) trace.players.push_back(r == 5 ? 0 : r);
  CHECK(rows_of(257) == std::vector<int>{0, 3, 9});
}

TEST_CASE("an empty trace has a summary too") {
  const Json s = summarize(test::sample_plan(), test::sample_scenario(), Trace{});
  CHECK(s["steps"] == 0);
  CHECK(s["mfu"] == 0.0);
  CHECK(render_summary(s, false).find("fits") == 0);
}

TEST_CASE("the summary as text") {
  const Plan plan = test::sample_plan();
  const std::string text = render_summary(summarize(plan, test::sample_scenario(), test::sample_trace()), false);
  CHECK(text ==
        R"(fits  4.1 KiB mapped with overhead of 8.0 KiB; 3.1 KiB live at the peak: rank 1, phase train
simulated over 2 steps: 18.00 ms per iteration, 1.056e+04 tokens/s, train MFU 22.5 %

Time by phase: what a rank spends in it, mean over ranks and steps
  phase    times     mean  share of all
  load         1  2.00 ms         5.4 %
  rollout      2  9.50 ms        51.4 %
  train        2  8.00 ms        43.2 %

Memory of rank 1 (composition at each phase's peak)
  phase      live peak   mapped   params  activations  overhead
  load         2.0 KiB  4.0 KiB  2.0 KiB            -     100 B
  rollout      2.0 KiB  4.0 KiB  2.0 KiB            -     100 B
  train        3.1 KiB  4.0 KiB  2.0 KiB      1.2 KiB     100 B
  whole run    3.1 KiB  4.0 KiB  2.0 KiB      1.2 KiB     100 B

Traffic per rank, all steps
  phase  group  op          ranks  calls   payload  padding     wire
  train  fsdp   all_gather  0-1        6  11.7 KiB     32 B  5.9 KiB
  train  tp     all_reduce  0          2      80 B        -        -
  train  tp     all_reduce  1          2      88 B        -        -

Metrics
  step  reward  actor/loss
     1    0.25         0.5
     2     0.5        0.25

plan )" + plan_hash(plan) +
            "\n");
  CHECK(render_summary(summarize(plan, test::sample_scenario(), test::sample_trace()), true)
            .find("\x1b[1;32mfits\x1b[0m") == 0);
}

}  // namespace hotbunk

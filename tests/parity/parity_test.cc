// P1 and P2: simulated memory and traffic equal the measured ones, for every rank, phase, category, group and op,
// exactly. Long for the ways of training and rolling out, one table of cases each, which share what compares.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <catch2/catch.hpp>
#include <numeric>
#include <string_view>

#include "lowering/lower.h"
#include "spec/expert_mesh.h"
#include "spec/expert_rounds.h"
#include "tests/blocks.h"
#include "tests/parity/harness.h"
#include "trace/compare.h"

using namespace hotbunk;
using namespace hotbunk::testing;

namespace {

/// World x rollout TP x recompute x reshard_after_forward x sleep, as the promise's test asks.
std::vector<Case> matrix(int world) {
  std::vector<Case> cases;
  for (int tp : {1, 2, 4})
    for (const char* recompute : {"none", "selective", "full"})
      for (const char* reshard : {"true", "false"})
        for (bool sleep : {true, false}) {
          if (tp > world) continue;
          std::vector<std::string> sets = {fmt::format("train.recompute={}", recompute),
                                           fmt::format("train.reshard_after_forward={}", reshard)};
          if (!sleep) sets.insert(sets.end(), {"train.offload=none", "rollout.sleep=false"});
          cases.push_back(
              {fmt::format("world {} tp {} recompute {} reshard {} sleep {}", world, tp, recompute, reshard, sleep),
               tiny_scenario(world, tp, sets),
               {},
               {}});
        }
  return cases;
}

std::string same_plan(const Outcome& o) { return complaint(o, o.plan); }

}  // namespace

TEST_CASE("simulated bytes and calls equal the measured ones: 1 rank") {
  CHECK(run_cases(1, matrix(1), same_plan) == "");
}
TEST_CASE("simulated bytes and calls equal the measured ones: 2 ranks") {
  CHECK(run_cases(2, matrix(2), same_plan) == "");
}
TEST_CASE("simulated bytes and calls equal the measured ones: 4 ranks") {
  CHECK(run_cases(4, matrix(4), same_plan) == "");
}

TEST_CASE("and so with every other part of the iteration") {
  const auto with = [](const char* name, int tp, std::vector<std::string> sets) {
    return Case{name, tiny_scenario(4, tp, sets), {}, {}};
  };
  const std::vector<Case> cases = {
      with("reference, two mini-batches", 2,
           {"algorithm.reference=true", "algorithm.mini_batches=2", "algorithm.kl_coef=0.1"}),
      with("all-gather buckets, verified", 2, {"sync.transport=collective", "sync.verify=true"}),
      with("shared-memory buckets, verified", 2, {"sync.verify=true"}),
      with("bf16 compute and rollout", 2, {"train.precision.params=bf16", "sync.verify=true"}),
      with("chunked loss, no prefetch", 1, {"train.loss_chunk_tokens=10", "train.prefetch=0"}),
      with("weights kept on the host", 2, {"rollout.sleep_level=1"}),
      with("rollout log-probs trusted", 4, {"algorithm.old_logprobs=false"}),
      with("only training sleeps", 2, {"rollout.sleep=false"}),
      with("only rollout sleeps", 2, {"train.offload=none"}),
      with("strided engines", 2, {"rollout.layout.order=strided", "sync.verify=true"}),
      with("checkpoints", 2, {"checkpoint_every=1"}),
  };
  CHECK(run_cases(4, cases, same_plan) == "");
}

TEST_CASE("and so with every way to share state among data ranks") {
  std::vector<Case> cases;
  for (const char* engine : {"ddp", "zero1", "zero2", "fsdp1", "fsdp2"})
    for (const char* group : {"-1", "2", "1"})
      for (const char* transport : {"ipc", "collective"}) {
        if (std::string_view(engine) == "ddp" && std::string_view(group) != "-1") continue;  // it shards nothing
        cases.push_back(
            {fmt::format("{}, groups of {}, {}", engine, group, transport),
             tiny_scenario(
                 4, 2,
                 {fmt::format("train.engine={}", engine), fmt::format("train.layout.fsdp={}", group),
                  fmt::format("sync.transport={}", transport), "sync.verify=true", "train.precision.params=bf16",
                  "algorithm.reference=true",
                  fmt::format("train.precision.grads={}", std::string_view(transport) == "ipc" ? "fp32" : "bf16")}),
             {},
             {}});
      }
  CHECK(run_cases(4, cases, same_plan) == "");
}

TEST_CASE("and so with flat parameters of every kind of module") {
  std::vector<Case> cases;
  for (const std::vector<std::string>& wrap : {std::vector<std::string>{"policy=size", "min_parameters=1000000000"},
                                               {"policy=size", "min_parameters=700"},
                                               {"policy=size", "min_parameters=1"},
                                               {"policy=names", "names=[model.layers.1, '*.mlp', '*embed*']"}})
    for (const char* transport : {"ipc", "collective"})
      for (const char* order : {"offload=sleep", "offload=none", "reshard_after_forward=false"}) {
        std::vector<std::string> sets = {"train.engine=fsdp1",
                                         "train.layout.dp=3",
                                         fmt::format("train.{}", order),
                                         fmt::format("sync.transport={}", transport),
                                         "sync.verify=true",
                                         "train.precision.params=bf16",
                                         "algorithm.reference=true"};
        for (const std::string& w : wrap) sets.push_back("train.wrap." + w);
        cases.push_back(
            {fmt::format("{}, {}, {}", fmt::join(wrap, " "), transport, order), tiny_scenario(3, 1, sets), {}, {}});
      }
  CHECK(run_cases(3, cases, same_plan) == "");
  // Of tensor-parallel ranks, and of stages of which two have one table.
  cases.clear();
  for (const char* layout : {"{dp: 2, tp: 2, sp: true}", "{dp: 2, pp: 2}", "{cp: 2, pp: 2, dp: 1}"})
    for (const char* transport : {"ipc", "collective"})
      cases.push_back({fmt::format("{}, {}", layout, transport),
                       tiny_scenario(4, 2,
                                     {"train.engine=fsdp1", fmt::format("train.layout={}", layout),
                                      fmt::format("sync.transport={}", transport), "sync.verify=true",
                                      "train.wrap.policy=size", "train.wrap.min_parameters=700",
                                      "model.tie_word_embeddings=true", "model.num_hidden_layers=4"}),
                       {},
                       {}});
  CHECK(run_cases(4, cases, same_plan) == "");
}

TEST_CASE("and so with tensor and sequence parallelism in training") {
  struct Way {
    const char* engine;
    int group, dp, tp, rollout_tp;
    const char* transport;
  };
  std::vector<Case> cases;
  for (const Way way : {Way{"fsdp2", -1, 2, 2, 2, "ipc"},
                        {"fsdp2", -1, 2, 2, 4, "collective"},
                        {"fsdp2", -1, 1, 4, 1, "ipc"},
                        {"fsdp2", 1, 2, 2, 2, "ipc"},
                        {"zero1", -1, 2, 2, 2, "collective"},
                        {"zero2", -1, 2, 2, 1, "ipc"},
                        {"ddp", -1, 2, 2, 4, "ipc"},
                        {"ddp", -1, 1, 4, 2, "collective"}})
    for (const bool sequence : {false, true})
      cases.push_back(
          {fmt::format("{} groups of {}, dp {} tp {} sp {}, engines of {}, {}", way.engine, way.group, way.dp, way.tp,
                       sequence, way.rollout_tp, way.transport),
           tiny_scenario(4, way.rollout_tp,
                         {fmt::format("train.engine={}", way.engine), fmt::format("train.layout.fsdp={}", way.group),
                          fmt::format("train.layout.dp={}", way.dp), fmt::format("train.layout.tp={}", way.tp),
                          fmt::format("train.layout.sp={}", sequence), fmt::format("sync.transport={}", way.transport),
                          "sync.verify=true", "train.loss_chunk_tokens=10", "train.recompute=selective",
                          "train.precision.params=bf16", "algorithm.reference=true"}),
           {},
           {}});
  CHECK(run_cases(4, cases, same_plan) == "");
}

TEST_CASE("and so with Ulysses in training") {
  struct Way {
    const char* engine;
    const char* layout;
    int rollout_tp;
    const char* transport;
    const char* recompute = "selective";
    const char* modules = "[]";
    const char* load = "shards";
  };
  std::vector<Case> cases;
  for (const Way way : {Way{"fsdp2", "dp: 2, ulysses: 2", 2, "ipc"},
                        {"fsdp2", "dp: 1, ulysses: 4", 2, "collective", "full"},
                        {"fsdp2", "dp: 2, ulysses: 2, fsdp: 2", 4, "ipc", "none"},
                        {"zero1", "dp: 2, ulysses: 2", 1, "collective", "selective", "[]", "rank0"},
                        {"zero2", "ulysses: 2, tp: 2", 2, "ipc", "full"},
                        {"ddp", "ulysses: 4", 4, "ipc", "selective", "[core_attn, mlp]"},
                        {"fsdp2", "ulysses: 2, tp: 2, sp: true", 2, "collective"},
                        {"fsdp2", "ulysses: 2, pp: 2", 2, "ipc", "full", "[]", "rank0"}})
    for (const int tokens : {6, 64}) {
      const bool staged = std::string_view(way.layout).ends_with("pp: 2");
      cases.push_back(
          {fmt::format("{} {}, engines of {}, {}, recompute {}, {} tokens", way.engine, way.layout, way.rollout_tp,
                       way.transport, way.recompute, tokens),
           tiny_scenario(
               4, way.rollout_tp,
               {fmt::format("train.layout={{{}}}", way.layout), fmt::format("train.engine={}", way.engine),
                fmt::format("train.pipeline_split={}", staged ? "[2, 1]" : "[]"),
                fmt::format("sync.transport={}", way.transport), "sync.verify=true",
                fmt::format("train.micro_batch_tokens={}", tokens), fmt::format("train.recompute={}", way.recompute),
                fmt::format("train.recompute_modules={}", way.modules), fmt::format("train.load={}", way.load),
                "train.loss_chunk_tokens=10", "train.precision.params=bf16", "algorithm.reference=true",
                "algorithm.mini_batches=2", "checkpoint_every=1"}),
           {},
           {}});
    }
  CHECK(run_cases(4, cases, same_plan) == "");
}

TEST_CASE("and so with context parallelism in training") {
  struct Way {
    const char* engine;
    const char* layout;
    int rollout_tp;
    const char* transport;
    const char* recompute = "selective";
  };
  std::vector<Case> cases;
  for (const Way way : {Way{"fsdp2", "dp: 2, cp: 2", 2, "ipc"},
                        {"fsdp2", "dp: 1, cp: 4", 2, "collective", "full"},
                        {"fsdp2", "dp: 2, cp: 2, fsdp: 2", 4, "ipc", "none"},
                        {"zero1", "dp: 2, cp: 2", 1, "collective"},
                        {"zero2", "cp: 2, tp: 2", 2, "ipc", "full"},
                        {"ddp", "cp: 4", 4, "ipc"},
                        {"fsdp2", "cp: 2, tp: 2, sp: true", 2, "collective"},
                        {"fsdp2", "cp: 2, ulysses: 2", 2, "ipc"},
                        {"fsdp2", "cp: 2, pp: 2", 2, "ipc", "full"}})
    for (const char* exchange : {"ring", "all-gather"})
      for (const int tokens : {8, 64}) {
        const bool staged = std::string_view(way.layout).ends_with("pp: 2");
        cases.push_back(
            {fmt::format("{} {} by {}, engines of {}, {}, recompute {}, {} tokens", way.engine, way.layout, exchange,
                         way.rollout_tp, way.transport, way.recompute, tokens),
             tiny_scenario(
                 4, way.rollout_tp,
                 {fmt::format("train.layout={{{}}}", way.layout), fmt::format("train.engine={}", way.engine),
                  fmt::format("train.context_exchange={}", exchange),
                  fmt::format("train.pipeline_split={}", staged ? "[2, 1]" : "[]"),
                  fmt::format("sync.transport={}", way.transport), "sync.verify=true",
                  fmt::format("train.micro_batch_tokens={}", tokens), fmt::format("train.recompute={}", way.recompute),
                  "train.loss_chunk_tokens=10", "train.precision.params=bf16", "algorithm.reference=true",
                  "algorithm.mini_batches=2", "checkpoint_every=1"}),
             {},
             {}});
      }
  CHECK(run_cases(4, cases, same_plan) == "");
}

TEST_CASE("and so with pipelines in training") {
  struct Way {
    const char* engine;
    const char* layout;
    int rollout_tp;
    const char* transport;
    const char* schedule = "1f1b";
    bool tied = false;
    std::vector<int> split = {2, 1};
  };
  std::vector<Case> cases;
  for (const Way& way :
       {Way{"fsdp2", "dp: 2, pp: 2", 2, "ipc"},
        {"fsdp2", "dp: 2, pp: 2", 2, "collective", "1f1b", true},
        {"fsdp2", "tp: 2, sp: true, pp: 2", 4, "ipc", "1f1b", true},
        {"fsdp2", "dp: 2, pp: 2, fsdp: 1", 1, "collective", "gpipe"},
        {"zero1", "dp: 2, pp: 2", 2, "ipc", "1f1b", true},
        {"zero2", "tp: 2, pp: 2", 2, "collective", "gpipe"},
        {"ddp", "dp: 2, pp: 2", 4, "ipc"},
        {"ddp", "dp: 1, pp: 4", 2, "collective", "1f1b", true, {1, 1, 1, 1}},
        {"fsdp2", "dp: 2, pp: 2, vpp: 2", 2, "ipc", "interleaved", false, {1, 1, 1, 1}},
        {"fsdp2", "tp: 2, sp: true, pp: 2, vpp: 3", 2, "collective", "1f1b", true, {1, 1, 1, 2, 1, 1}},
        {"zero1", "dp: 2, pp: 2, vpp: 2", 4, "ipc", "gpipe", true, {2, 1, 1, 1}},
        {"ddp", "dp: 1, pp: 4, vpp: 2", 1, "collective", "interleaved", false, {1, 1, 1, 1, 1, 1, 1, 1}},
        {"fsdp2", "dp: 2, pp: 2", 2, "ipc", "zero-bubble", true},
        {"zero2", "dp: 2, pp: 2, vpp: 2", 2, "collective", "zero-bubble", false, {1, 1, 1, 1}},
        {"fsdp2", "tp: 2, sp: true, pp: 2", 4, "ipc", "zero-bubble", false}})
    for (const int tokens : {12, 64}) {
      cases.push_back(
          {fmt::format("{} {}, engines of {}, {}, {}, {} tokens", way.engine, way.layout, way.rollout_tp, way.transport,
                       way.schedule, tokens),
           tiny_scenario(
               4, way.rollout_tp,
               {fmt::format("train.layout={{{}}}", way.layout), fmt::format("train.engine={}", way.engine),
                fmt::format("train.pipeline_schedule={}", way.schedule),
                fmt::format("train.pipeline_split=[{}]", fmt::join(way.split, ", ")),
                fmt::format("model.num_hidden_layers={}", std::accumulate(way.split.begin(), way.split.end(), 0)),
                fmt::format("model.tie_word_embeddings={}", way.tied), fmt::format("sync.transport={}", way.transport),
                "sync.verify=true", fmt::format("train.micro_batch_tokens={}", tokens), "train.recompute=selective",
                "train.precision.params=bf16", "algorithm.reference=true", "algorithm.mini_batches=2",
                "checkpoint_every=1"}),
           {},
           {}});
    }
  CHECK(run_cases(4, cases, same_plan) == "");
}

TEST_CASE("and so with a vocabulary that is padded to a multiple, of which engines and files have nothing") {
  std::vector<Case> cases;
  for (const auto& [engine, layout, split, multiple, rollout_tp, transport] :
       {std::tuple("fsdp2", "dp: 2, tp: 2, sp: true", "[]", 32, 4, "collective"),
        std::tuple("fsdp1", "dp: 4", "[]", 64, 1, "ipc"),
        std::tuple("zero1", "dp: 1, tp: 2, pp: 2", "[2, 1]", 64, 2, "ipc")})
    cases.push_back({fmt::format("{} {}, rows by {}", engine, layout, multiple),
                     tiny_scenario(4, rollout_tp,
                                   {fmt::format("train.layout={{{}}}", layout), fmt::format("train.engine={}", engine),
                                    fmt::format("train.pipeline_split={}", split),
                                    fmt::format("train.make_vocab_size_divisible_by={}", multiple),
                                    fmt::format("sync.transport={}", transport), "sync.verify=true",
                                    "algorithm.reference=true", "checkpoint_every=1", "steps=2"}),
                     {},
                     {}});
  CHECK(run_cases(4, cases, same_plan) == "");
}

TEST_CASE("and so with experts") {
  const std::vector<std::string> mixtral = {"model.model_type=mixtral", "model.architectures=[MixtralForCausalLM]",
                                            "model.num_local_experts=4", "model.num_experts_per_tok=2"},
                                 qwen3 = {"model.model_type=qwen3_moe",
                                          "model.architectures=[Qwen3MoeForCausalLM]",
                                          "model.num_experts=5",
                                          "model.num_experts_per_tok=3",
                                          "model.moe_intermediate_size=12",
                                          "model.norm_topk_prob=true"};
  struct Way {
    const std::vector<std::string>& model;
    const char* engine;
    int group, dp, tp, rollout_tp;
    const char *recompute, *params;
    bool sequence = false;
    int ep = 1, pp = 1, etp = 0;  // 0: experts over tensor-parallel ranks, as many as ep
    const char* transport = "ipc";
    int rollout_ep = 1, rollout_pp = 1;
  };
  std::vector<Case> cases;
  int spread = 0, copied = 0, full = 0, staged = 0;
  for (const Way& way :
       {Way{mixtral, "fsdp2", -1, 4, 1, 1, "none", "fp32"},
        {mixtral, "fsdp2", 2, 4, 1, 2, "selective", "bf16"},
        {mixtral, "zero1", -1, 2, 2, 4, "full", "bf16", true},
        {mixtral, "ddp", -1, 1, 4, 2, "selective", "fp32"},
        {qwen3, "fsdp2", -1, 2, 2, 2, "full", "bf16"},
        {qwen3, "zero2", -1, 4, 1, 4, "none", "bf16"},
        {qwen3, "fsdp2", -1, 2, 2, 1, "selective", "fp32", true},
        {mixtral, "fsdp2", -1, 2, 2, 2, "none", "bf16", true, 2},
        {mixtral, "fsdp2", 1, 2, 2, 4, "full", "fp32", false, 2},
        {mixtral, "ddp", -1, 1, 4, 1, "selective", "bf16", true, 4},
        {qwen3, "fsdp2", -1, 2, 1, 2, "selective", "bf16", false, 1, 2},
        {mixtral, "zero1", -1, 1, 2, 1, "none", "fp32", true, 2, 2},
        {mixtral, "fsdp2", -1, 4, 1, 1, "none", "fp32", false, 2, 1, 1},
        {mixtral, "fsdp2", -1, 4, 1, 2, "full", "bf16", false, 4, 1, 1, "collective"},
        {mixtral, "fsdp2", 2, 4, 1, 4, "selective", "bf16", false, 2, 1, 1},
        {mixtral, "fsdp2", 1, 4, 1, 2, "selective", "fp32", false, 2, 1, 1},
        {mixtral, "zero1", -1, 4, 1, 2, "selective", "bf16", false, 2, 1, 1},
        {mixtral, "zero2", -1, 4, 1, 1, "none", "fp32", false, 4, 1, 1, "collective"},
        {mixtral, "ddp", -1, 4, 1, 2, "full", "bf16", false, 2, 1, 1},
        {mixtral, "ddp", -1, 2, 2, 2, "none", "bf16", true, 2, 1, 2, "collective"},
        {mixtral, "fsdp2", -1, 2, 2, 4, "selective", "fp32", true, 2, 1, 2},
        {mixtral, "zero1", -1, 2, 2, 1, "full", "fp32", false, 2, 1, 2},
        {mixtral, "fsdp2", -1, 2, 1, 2, "full", "bf16", false, 2, 2, 1},
        {mixtral, "fsdp2", -1, 2, 2, 2, "selective", "bf16", true, 4, 1, 1, "collective", 2},
        {mixtral, "ddp", -1, 2, 2, 4, "none", "fp32", true, 4, 1, 1, "ipc", 4},
        {mixtral, "zero1", -1, 2, 2, 2, "full", "bf16", true, 2, 1, 2, "ipc", 2},
        // Parts of some experts; all of them on several ranks of a tensor-parallel group, whole or not.
        {mixtral, "fsdp2", -1, 1, 4, 2, "selective", "bf16", true, 2, 1, 2, "collective", 2},
        {mixtral, "ddp", -1, 2, 2, 2, "none", "fp32", true, 1, 1, 1},
        {qwen3, "fsdp2", -1, 2, 2, 4, "selective", "bf16", true, 1, 1, 1, "collective"},
        {mixtral, "zero1", -1, 1, 4, 1, "full", "bf16", true, 2, 1, 1},
        {mixtral, "fsdp2", -1, 4, 1, 1, "none", "bf16", false, 2, 1, 1, "collective", 1, 2},
        {mixtral, "fsdp1", -1, 4, 1, 2, "none", "fp32", false, 1, 1, 1, "ipc", 2, 2},
        {qwen3, "fsdp2", -1, 2, 1, 1, "none", "bf16", false, 1, 2, 1, "ipc", 1, 2},
        // Flat parameters, those of experts by themselves: in one part or several, with copies, over tensor-parallel
        // ranks.
        {mixtral, "fsdp1", -1, 4, 1, 2, "none", "fp32", false, 2, 1, 1, "collective"},
        {mixtral, "fsdp1", -1, 4, 1, 1, "full", "bf16", false, 4, 1, 1},
        {mixtral, "fsdp1", 2, 4, 1, 4, "selective", "fp32", false, 2, 1, 1, "collective", 2},
        {mixtral, "fsdp1", -1, 2, 2, 2, "none", "bf16", true, 4, 1, 1, "ipc", 2},
        {mixtral, "fsdp1", -1, 2, 2, 2, "selective", "fp32", true, 1, 1, 1, "collective"},
        {mixtral, "fsdp1", -1, 2, 1, 2, "full", "bf16", false, 2, 2, 1},
        // Engines of two groups of two ranks, each with columns of its own experts.
        {mixtral, "fsdp2", -1, 4, 1, 4, "none", "fp32", false, 2, 1, 1, "ipc", 2},
        {mixtral, "zero1", -1, 1, 4, 4, "full", "bf16", true, 2, 1, 2, "collective", 2},
        {mixtral, "ddp", -1, 2, 2, 4, "selective", "bf16", true, 4, 1, 1, "ipc", 2},
        {mixtral, "fsdp1", -1, 2, 2, 4, "none", "fp32", true, 1, 1, 2, "collective", 2},
        {mixtral, "fsdp2", -1, 2, 1, 4, "full", "fp32", false, 1, 2, 1, "ipc", 2},
        // Data ranks share each expert's columns: all of them, pairs, and pairs beside those of a tensor-parallel
        // group.
        {mixtral, "fsdp2", -1, 4, 1, 2, "none", "fp32", false, 1, 1, 4, "ipc", 2},
        {mixtral, "zero1", -1, 4, 1, 1, "full", "bf16", false, 2, 1, 2, "collective"},
        {mixtral, "ddp", -1, 2, 2, 4, "selective", "fp32", true, 1, 1, 4, "ipc", 2},
        {mixtral, "fsdp1", -1, 2, 2, 2, "none", "bf16", false, 1, 1, 4, "collective"}}) {
    std::vector<std::string> sets = way.model;
    sets.insert(
        sets.end(),
        {fmt::format("train.engine={}", way.engine), fmt::format("train.layout.fsdp={}", way.group),
         fmt::format("train.layout.dp={}", way.dp), fmt::format("train.layout.tp={}", way.tp),
         fmt::format("train.layout.ep={}", way.ep),
         fmt::format("train.layout.etp={}", way.etp > 0 ? way.etp : way.tp / way.ep),
         fmt::format("sync.transport={}", way.transport), fmt::format("train.layout.pp={}", way.pp),
         way.pp > 1 ? "train.pipeline_split=[1, 2]" : "train.pipeline_split=[]",
         fmt::format("rollout.layout.ep={}", way.rollout_ep), fmt::format("rollout.layout.pp={}", way.rollout_pp),
         fmt::format("rollout.layout.dp={}", 4 / way.rollout_tp / way.rollout_pp),
         fmt::format("train.layout.sp={}", way.sequence), fmt::format("train.recompute={}", way.recompute),
         fmt::format("train.precision.params={}", way.params),
         fmt::format("train.precision.grads={}", std::string_view(way.recompute) == "full" ? way.params : "fp32"),
         "sync.verify=true", "algorithm.reference=true"});
    // Of those whose data ranks have all tensor-parallel places' experts every third one sends a token once to each
    // rank; others that could have several rounds, of few rows each.
    const bool copies = way.ep > 1 && way.etp == way.tp && spread++ % 3 == 1;
    if (copies) {
      sets.emplace_back("train.expert_dispatch=per-rank"), ++copied;
      if (way.pp > 1) sets.emplace_back("train.micro_batch_tokens=16");  // several micro-batches
      full += std::string_view(way.recompute) == "full" ? 1 : 0, staged += way.pp > 1 ? 1 : 0;
    } else if (way.etp > 0 && expert_mesh(tiny_scenario(4, way.rollout_tp, sets)).spread > 1 &&
               std::string_view(way.recompute) != "selective") {
      sets.emplace_back("train.expert_capacity=0.3");
      CHECK(expert_rounds(tiny_scenario(4, way.rollout_tp, sets)).rounds > 3);
    }
    if (way.rollout_pp > 1)
      sets.insert(sets.end(), {"model.num_hidden_layers=4",
                               way.pp > 1 ? "train.pipeline_split=[1, 3]" : "train.pipeline_split=[]"});
    cases.push_back({fmt::format("{}: {}, dp {} tp {} ep {}, engines of tp {} ep {} pp {}", way.model.front(),
                                 way.engine, way.dp, way.tp, way.ep, way.rollout_tp, way.rollout_ep, way.rollout_pp),
                     tiny_scenario(4, way.rollout_tp, sets)});
  }
  CHECK(copied > 3);
  CHECK((full > 1 && staged > 0));
  CHECK(run_cases(4, cases, same_plan) == "");
}

TEST_CASE("and so with engines whose ranks share each sequence's cache, or have sequences of their own") {
  const std::string latents =
      "model={model_type: deepseek_v3, hidden_size: 20, intermediate_size: 36, num_hidden_layers: 2, "
      "num_attention_heads: 4, first_k_dense_replace: 1, kv_lora_rank: 10, qk_nope_head_dim: 6, qk_rope_head_dim: 4, "
      "v_head_dim: 6, q_lora_rank: 9, moe_intermediate_size: 12, n_routed_experts: 4, num_experts_per_tok: 2, "
      "n_shared_experts: 1, n_group: 2, topk_group: 1, vocab_size: 33, max_position_embeddings: 256, "
      "initializer_range: 0.2, bos_token_id: 1, eos_token_id: 2}";
  const std::string sinks =
      "model={model_type: gpt_oss, architectures: [GptOssForCausalLM], hidden_size: 24, intermediate_size: 40, "
      "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 6, vocab_size: 33, "
      "max_position_embeddings: 64, num_local_experts: 4, num_experts_per_tok: 2, sliding_window: 4, "
      "initializer_range: 0.2, bos_token_id: 1, eos_token_id: 2}";
  struct Way {
    const char* engines;
    std::vector<std::string> sets;
  };
  std::vector<Case> cases;
  for (const Way& way :
       {Way{"tp: 1, cp: 2, dp: 2", {}},
        {"tp: 2, cp: 2, dp: 1", {"train.precision.params=bf16", "sync.transport=collective"}},
        {"tp: 1, cp: 4, dp: 1", {"rollout.sleep_level=1", "train.layout={dp: 2, tp: 2}"}},
        {"tp: 1, cp: 2, dp: 2, order: strided", {"rollout.max_prefill_tokens=5", "rollout.block_tokens=1"}},
        {"tp: 1, cp: 2, pp: 2, dp: 1", {"model.num_hidden_layers=4", "sync.transport=collective"}},
        {"tp: 2, cp: 2, dp: 1", {latents, "train.precision.params=bf16"}},
        {"tp: 2, cp: 2, ep: 2, dp: 1", {sinks, "train.layout={dp: 1, cp: 2, ulysses: 2}"}}}) {
    std::vector<std::string> sets = {fmt::format("rollout.layout={{{}}}", way.engines), "sync.verify=true",
                                     "rollout.kv_cache_tokens=32", way.sets.empty() ? "steps=2" : "steps=1"};
    sets.insert(sets.end(), way.sets.begin(), way.sets.end());
    cases.push_back(
        {fmt::format("engines of {}, {}", way.engines, fmt::join(way.sets, " ")), tiny_scenario(4, 1, sets)});
  }
  for (const Way& way :
       {Way{"tp: 2, attention_dp: 2, dp: 2", {}},
        {"tp: 4, attention_dp: 4, dp: 1", {"sync.transport=collective", "train.layout={dp: 2, tp: 2, sp: true}"}},
        {"tp: 2, attention_dp: 2, dp: 2, order: strided", {"rollout.sleep_level=1", "train.precision.params=bf16"}},
        {"tp: 2, attention_dp: 2, ep: 2, dp: 2", {latents, "rollout.max_prefill_tokens=10"}},
        // Two groups of two ranks that share attention.
        {"tp: 4, attention_dp: 2, dp: 1", {}},
        {"tp: 4, attention_dp: 2, dp: 1, order: strided",
         {"sync.transport=collective", "train.layout={dp: 2, tp: 2, sp: true}", "rollout.max_prefill_tokens=10"}},
        {"tp: 4, attention_dp: 2, ep: 2, dp: 1", {latents, "train.precision.params=bf16", "rollout.sleep_level=1"}},
        {"tp: 4, attention_dp: 2, ep: 4, dp: 1", {sinks, "train.layout={dp: 4, ep: 2}", "train.engine=zero1"}},
        {"tp: 4, attention_dp: 4, dp: 1",
         {sinks, "train.precision.params=bf16", "train.layout={dp: 1, pp: 2, tp: 2, etp: 2}"}},
        // On each stage of a pipeline, and beside ranks that hold parts of the groups' sequences.
        {"tp: 2, attention_dp: 2, pp: 2, dp: 1", {"model.num_hidden_layers=4", "rollout.max_prefill_tokens=10"}},
        {"tp: 2, attention_dp: 2, cp: 2, dp: 1", {}},
        {"tp: 2, attention_dp: 2, cp: 2, dp: 1", {latents, "sync.transport=collective"}},
        {"tp: 2, attention_dp: 2, ep: 2, cp: 2, dp: 1", {sinks, "rollout.sleep_level=1"}}}) {
    std::vector<std::string> sets = {fmt::format("rollout.layout={{{}}}", way.engines), "sync.verify=true",
                                     "rollout.kv_cache_tokens=80", way.sets.empty() ? "steps=2" : "steps=1"};
    sets.insert(sets.end(), way.sets.begin(), way.sets.end());
    cases.push_back(
        {fmt::format("engines of {}, {}", way.engines, fmt::join(way.sets, " ")), tiny_scenario(4, 1, sets)});
  }
  // In fp32, log-probs are those of training up to the order in which the parts are summed.
  const auto sound = [](const Outcome& o) {
    for (const StepMetrics& m : o.measured.metrics)
      if (o.job.scenario.rollout.dtype == DType::f32 && !(m.values.at("rollout/logprob_gap_max") < 1e-5))
        return fmt::format("step {}: a gap of {}", m.step, m.values.at("rollout/logprob_gap_max"));
    return same_plan(o);
  };
  CHECK(run_cases(4, cases, sound) == "");
}

TEST_CASE(
    "a KV cache of another type than the engine's: as simulated, and log-probs are training's but for its rounding") {
  std::vector<Case> cases;
  const std::string engines = "rollout.layout={tp: 2, cp: 2, dp: 1}";
  for (const std::vector<std::string>& sets :
       {std::vector<std::string>{"rollout.kv_cache_dtype=bf16", "steps=2"},
        {"rollout.kv_cache_dtype=bf16", engines, "rollout.kv_cache_tokens=32"},
        {"rollout.kv_cache_dtype=fp32", "train.precision.params=bf16", "rollout.sleep_level=1"}})
    cases.push_back({fmt::format("{}", fmt::join(sets, " ")), tiny_scenario(4, 2, sets)});
  const auto sound = [](const Outcome& o) {
    const bool narrow = o.job.scenario.rollout.kv_dtype() == DType::bf16;  // the wide one rounds less than bf16 does
    for (const StepMetrics& m : o.measured.metrics)
      if (const double gap = m.values.at("rollout/logprob_gap_max"); narrow && !(gap > 1e-5 && gap < 0.05))
        return fmt::format("step {}: a gap of {}", m.step, gap);
    return same_plan(o);
  };
  CHECK(run_cases(4, cases, sound) == "");
}

TEST_CASE("and so with latent attention, dense first layers, shared experts and their routers") {
  struct Way {
    const char *type, *engine;
    int group, dp, tp, rollout_tp;
    const char *recompute, *params;
    bool sequence = false;
    int ep = 1, etp = 1, pp = 1;
    const char* transport = "ipc";
    int cp = 1, ulysses = 1;
    const char* exchange = "ring";
  };
  std::vector<Case> cases;
  for (const Way& way : {Way{"deepseek_v2", "fsdp2", -1, 4, 1, 1, "none", "fp32"},
                         {"deepseek_v3", "fsdp2", 2, 4, 1, 2, "selective", "bf16"},
                         {"deepseek_v3", "zero1", -1, 2, 2, 4, "full", "fp32", true, 1, 2},
                         {"deepseek_v2", "ddp", -1, 1, 4, 2, "selective", "bf16", true, 1, 4, 1, "collective"},
                         {"deepseek_v3", "zero2", -1, 2, 2, 2, "none", "bf16", true, 2, 1},
                         {"deepseek_v3", "fsdp2", -1, 4, 1, 2, "selective", "fp32", false, 4, 1},
                         {"deepseek_v2", "fsdp2", -1, 2, 2, 1, "full", "bf16", true, 2, 2, 1, "collective"},
                         {"deepseek_v3", "fsdp2", -1, 1, 2, 2, "full", "fp32", true, 1, 2, 2},
                         {"deepseek_v2", "zero1", -1, 2, 1, 4, "selective", "fp32", false, 2, 1, 2},
                         {"deepseek_v3", "fsdp2", -1, 2, 1, 2, "none", "bf16", false, 1, 1, 1, "ipc", 2, 1},
                         {"deepseek_v2", "ddp", -1, 1, 1, 2, "full", "fp32", false, 1, 1, 1, "ipc", 4, 1, "all-gather"},
                         {"deepseek_v2", "zero1", -1, 1, 2, 4, "selective", "fp32", true, 1, 2, 1, "ipc", 1, 2},
                         {"deepseek_v3", "fsdp2", -1, 1, 1, 2, "full", "bf16", false, 1, 1, 1, "ipc", 2, 2}}) {
    const bool v2 = std::string(way.type) == "deepseek_v2";
    const std::string model = fmt::format(
        "model={{model_type: {}, hidden_size: 20, intermediate_size: 36, num_hidden_layers: 3, num_attention_heads: 4, "
        "first_k_dense_replace: 1, kv_lora_rank: 10, qk_nope_head_dim: 6, qk_rope_head_dim: 4, v_head_dim: {}, "
        "q_lora_rank: {}, moe_intermediate_size: 12, n_routed_experts: 8, num_experts_per_tok: 3, n_shared_experts: "
        "{}, "
        "n_group: 4, topk_group: 2, vocab_size: 33, max_position_embeddings: 256, initializer_range: 0.2, "
        "bos_token_id: 1, eos_token_id: 2{}}}",
        way.type, v2 ? 11 : 5, v2 ? "null" : "9", v2 ? 2 : 1, v2 ? ", topk_method: group_limited_greedy" : "");
    cases.push_back(
        {fmt::format("{}: {}, dp {} tp {} pp {} ep {} cp {} ulysses {}, engines of {}", way.type, way.engine, way.dp,
                     way.tp, way.pp, way.ep, way.cp, way.ulysses, way.rollout_tp),
         tiny_scenario(
             4, way.rollout_tp,
             {model, fmt::format("train.engine={}", way.engine), fmt::format("train.layout.fsdp={}", way.group),
              fmt::format("train.layout.dp={}", way.dp), fmt::format("train.layout.tp={}", way.tp),
              fmt::format("train.layout.ep={}", way.ep), fmt::format("train.layout.etp={}", way.etp),
              fmt::format("train.layout.pp={}", way.pp), fmt::format("train.layout.cp={}", way.cp),
              fmt::format("train.layout.ulysses={}", way.ulysses),
              fmt::format("train.context_exchange={}", way.exchange),
              way.pp > 1 ? "train.pipeline_split=[1, 2]" : "train.pipeline_split=[]",
              fmt::format("sync.transport={}", way.transport), fmt::format("train.layout.sp={}", way.sequence),
              fmt::format("train.recompute={}", way.recompute), fmt::format("train.precision.params={}", way.params),
              "sync.verify=true", "algorithm.reference=true"})});
  }
  CHECK(run_cases(4, cases, same_plan) == "");
}

TEST_CASE("and so with biases behind sums, windows, Gemma-2's norms and caps, and GPT-2") {
  const std::vector<std::string> yarn = {"model.attention_bias=true",
                                         "model.rope_scaling={rope_type: yarn, factor: 4.0, "
                                         "original_max_position_embeddings: 16}"},
                                 mistral = {"model.model_type=mistral", "model.architectures=[MistralForCausalLM]",
                                            "model.sliding_window=4"},
                                 gemma = {"model.model_type=gemma2", "model.architectures=[Gemma2ForCausalLM]",
                                          "model.sliding_window=4", "model.tie_word_embeddings=true",
                                          "model.query_pre_attn_scalar=6"},
                                 gpt = {
                                     "model={model_type: gpt2, n_embd: 24, n_layer: 3, n_head: 4, n_inner: 40, "
                                     "n_positions: 30, vocab_size: 33, initializer_range: 0.1, bos_token_id: 1, "
                                     "eos_token_id: 2}"};
  struct Way {
    const std::vector<std::string>& model;
    const char* engine;
    int dp, tp, pp, ulysses, rollout_tp;
    const char *recompute, *params;
    bool sequence = false;
  };
  std::vector<Case> cases;
  for (const Way& way : {Way{yarn, "fsdp2", 4, 1, 1, 1, 1, "none", "fp32"},
                         {yarn, "fsdp2", 2, 2, 1, 1, 2, "selective", "bf16", true},
                         {yarn, "zero1", 1, 4, 1, 1, 4, "full", "bf16"},
                         {mistral, "fsdp2", 4, 1, 1, 1, 2, "full", "bf16"},
                         {mistral, "fsdp2", 1, 2, 1, 2, 1, "selective", "fp32"},
                         {gemma, "fsdp2", 4, 1, 1, 1, 1, "none", "bf16"},
                         {gemma, "fsdp2", 2, 2, 1, 1, 2, "selective", "fp32", true},
                         {gemma, "ddp", 1, 2, 2, 1, 4, "full", "bf16"},
                         {gemma, "zero2", 1, 2, 1, 2, 2, "none", "bf16"},
                         {gpt, "fsdp2", 4, 1, 1, 1, 1, "none", "fp32"},
                         {gpt, "fsdp2", 2, 2, 1, 1, 2, "selective", "bf16", true},
                         {gpt, "zero1", 1, 2, 2, 1, 4, "full", "bf16"},
                         {gpt, "fsdp2", 1, 2, 1, 2, 2, "selective", "fp32"}}) {
    std::vector<std::string> sets = way.model;
    sets.insert(sets.end(),
                {fmt::format("train.engine={}", way.engine), fmt::format("train.layout.dp={}", way.dp),
                 fmt::format("train.layout.tp={}", way.tp), fmt::format("train.layout.pp={}", way.pp),
                 fmt::format("train.layout.ulysses={}", way.ulysses),
                 way.pp > 1 ? "train.pipeline_split=[1, 2]" : "train.pipeline_split=[]",
                 fmt::format("train.layout.sp={}", way.sequence), fmt::format("train.recompute={}", way.recompute),
                 fmt::format("train.precision.params={}", way.params), "train.loss_chunk_tokens=10", "sync.verify=true",
                 "algorithm.reference=true"});
    cases.push_back({fmt::format("{}: {}, dp {} tp {} pp {} ulysses {}, engines of {}", way.model.front(), way.engine,
                                 way.dp, way.tp, way.pp, way.ulysses, way.rollout_tp),
                     tiny_scenario(4, way.rollout_tp, sets)});
  }
  CHECK(run_cases(4, cases, same_plan) == "");
}

TEST_CASE("and so with GLM-4.5's and gpt-oss's layers, and with parameters that do not train") {
  const std::string sizes =
      "hidden_size: 20, intermediate_size: 12, num_hidden_layers: 3, num_attention_heads: 4, num_key_value_heads: 2, "
      "head_dim: 8, vocab_size: 33, max_position_embeddings: 256, initializer_range: 0.2, bos_token_id: 1, "
      "eos_token_id: 2, num_experts_per_tok: 2, ";
  const std::string glm = "model={model_type: glm4_moe, " + sizes +
                          "moe_intermediate_size: 12, n_routed_experts: 8, n_group: 4, topk_group: 2, "
                          "first_k_dense_replace: 1, attention_bias: true, use_qk_norm: true}",
                    oss = "model={model_type: gpt_oss, " + sizes +
                          "num_local_experts: 4, sliding_window: 4, swiglu_limit: 0.5}";
  const char* const all = "[]";
  const char* const some = "['*.0.*', '*.mlp.*', model.norm.weight]";
  struct Way {
    const std::string& model;
    const char* engine;
    int dp, tp, pp, ulysses, cp, ep, etp, rollout_tp, rollout_ep;
    const char *recompute, *params;
    bool sequence;
    const char* frozen;
  };
  std::vector<Case> cases;
  for (const Way& way : {Way{glm, "fsdp2", 4, 1, 1, 1, 1, 1, 1, 1, 1, "none", "fp32", false, all},
                         {glm, "fsdp2", 2, 2, 1, 1, 1, 1, 2, 2, 2, "selective", "bf16", true, all},
                         {glm, "zero1", 1, 2, 2, 1, 1, 2, 1, 4, 1, "full", "fp32", true, all},
                         {oss, "fsdp2", 4, 1, 1, 1, 1, 1, 1, 1, 1, "none", "fp32", false, all},
                         {oss, "fsdp2", 2, 2, 1, 1, 1, 1, 2, 2, 1, "selective", "bf16", true, all},
                         {oss, "fsdp2", 2, 2, 1, 1, 1, 2, 2, 2, 2, "full", "fp32", true, all},
                         {oss, "ddp", 4, 1, 1, 1, 1, 4, 1, 4, 1, "selective", "bf16", false, all},
                         {oss, "zero2", 1, 2, 1, 2, 1, 2, 1, 4, 4, "none", "fp32", false, all},
                         {oss, "fsdp2", 2, 2, 1, 1, 1, 2, 2, 4, 2, "selective", "fp32", true, all},
                         {oss, "zero1", 1, 1, 2, 1, 2, 1, 1, 2, 1, "full", "bf16", false, all},
                         {oss, "fsdp1", 2, 1, 1, 2, 1, 1, 1, 2, 1, "none", "bf16", false, all},
                         {oss, "fsdp2", 2, 2, 1, 1, 1, 1, 2, 2, 1, "selective", "bf16", true, some},
                         {glm, "fsdp2", 4, 1, 1, 1, 1, 2, 1, 1, 1, "full", "bf16", false, some},
                         {oss, "ddp", 2, 2, 1, 1, 1, 2, 1, 2, 1, "none", "bf16", false, some},
                         {oss, "zero1", 1, 2, 2, 1, 1, 1, 2, 4, 1, "selective", "fp32", true, some},
                         {oss, "fsdp1", 4, 1, 1, 1, 1, 1, 1, 2, 1, "selective", "bf16", false, some},
                         {glm, "zero2", 4, 1, 1, 1, 1, 1, 1, 2, 1, "none", "fp32", false, some}})
    cases.push_back(
        {fmt::format("{}: {}, dp {} tp {} pp {} ulysses {} cp {} ep {}, engines of {}, frozen {}",
                     way.model.substr(7, 20), way.engine, way.dp, way.tp, way.pp, way.ulysses, way.cp, way.ep,
                     way.rollout_tp, way.frozen),
         tiny_scenario(
             4, way.rollout_tp,
             {way.model, fmt::format("train.engine={}", way.engine), fmt::format("train.layout.dp={}", way.dp),
              fmt::format("train.layout.tp={}", way.tp), fmt::format("train.layout.pp={}", way.pp),
              fmt::format("train.layout.ulysses={}", way.ulysses), fmt::format("train.layout.cp={}", way.cp),
              fmt::format("train.layout.ep={}", way.ep), fmt::format("train.layout.etp={}", way.etp),
              fmt::format("rollout.layout.ep={}", way.rollout_ep),
              way.pp > 1 ? "train.pipeline_split=[1, 2]" : "train.pipeline_split=[]",
              fmt::format("train.layout.sp={}", way.sequence), fmt::format("train.recompute={}", way.recompute),
              fmt::format("train.precision.params={}", way.params), fmt::format("train.frozen={}", way.frozen),
              "train.loss_chunk_tokens=10", "sync.verify=true", "algorithm.reference=true"})});
  CHECK(run_cases(4, cases, same_plan) == "");
}

TEST_CASE("gloo counts what shared memory counts") {
  CpuOptions options;
  options.transport = Transport::gloo;
  CHECK(run_cases(
            2,
            {{"gloo", tiny_scenario(2, 2, {"sync.transport=collective"}), {}, {}},
             {"gloo, ulysses", tiny_scenario(2, 2, {"sync.transport=collective", "train.layout={ulysses: 2}"}), {}, {}},
             {"gloo, cp", tiny_scenario(2, 2, {"sync.transport=collective", "train.layout={cp: 2}"}), {}, {}},
             {"gloo, experts",
              tiny_scenario(2, 2,
                            {"sync.transport=collective", "train.layout={dp: 2, ep: 2}", "model.model_type=mixtral",
                             "model.architectures=[MixtralForCausalLM]", "model.num_local_experts=4",
                             "model.num_experts_per_tok=2"}),
              {},
              {}}},
            same_plan, options) == "");
}

namespace {

/// Drops the n-th op of a kind from every program's phase; every rank drops the same one.
Plan without(const Plan& plan, OpKind kind, const char* phase, std::size_t nth) {
  Plan out = plan;
  const auto p = static_cast<std::size_t>(plan.phase_index(phase));
  for (Program& program : out.programs) {
    std::size_t seen = 0;
    for (Block& block : program.phases[p]) {
      test::EditedOps ops(program, block);
      std::erase_if(ops, [&](const Op& op) { return op.kind == kind && seen++ == nth; });
    }
  }
  return out;
}

}  // namespace

// The comparison must bite: one op dropped from the plan that one side sees is found, whatever the op is.
TEST_CASE("a dropped free, collective, wait, map or copy is found") {
  const auto check = [](const Outcome& o) -> std::string {
    if (auto bad = complaint(o, o.plan); !bad.empty()) return bad;
    struct Mutation {
      OpKind kind;
      const char* phase;
      std::size_t nth;
    };
    for (const Mutation& m :
         {Mutation{OpKind::free, "train", 0}, Mutation{OpKind::free, "train", 40}, Mutation{OpKind::free, "rollout", 7},
          Mutation{OpKind::all_gather, "train", 1}, Mutation{OpKind::reduce_scatter, "train", 0},
          Mutation{OpKind::all_reduce, "rollout", 2}, Mutation{OpKind::wait, "train", 5},
          Mutation{OpKind::wait, "sync", 1}, Mutation{OpKind::unmap, "sleep_train", 0},
          Mutation{OpKind::peer_copy, "sync", 0}, Mutation{OpKind::alloc, "wake_kv", 0}}) {
      const Plan mutated = without(o.plan, m.kind, m.phase, m.nth);
      if (mutated == o.plan) return fmt::format("{} {} of {} is not there to drop", name_of(m.kind), m.nth, m.phase);
      if (complaint(o, mutated).empty())
        return fmt::format("dropping {} {} of {} went unnoticed", name_of(m.kind), m.nth, m.phase);
    }
    return "";
  };
  CHECK(run_cases(2, {{"mutations", tiny_scenario(2, 2), {}, {}}}, check) == "");
  const auto exchanged = [](const Outcome& o) -> std::string {
    if (auto bad = complaint(o, o.plan); !bad.empty()) return bad;
    for (const OpKind kind : {OpKind::all_to_all, OpKind::split_heads, OpKind::merge_heads})
      for (const char* phase : {"train", "old_logprobs"})
        if (complaint(o, without(o.plan, kind, phase, 1)).empty())
          return fmt::format("dropping {} of {} went unnoticed", name_of(kind), phase);
    return "";
  };
  CHECK(run_cases(2, {{"mutations", tiny_scenario(2, 2, {"train.layout={ulysses: 2}"}), {}, {}}}, exchanged) == "");
  const auto around = [](const Outcome& o) -> std::string {
    if (auto bad = complaint(o, o.plan); !bad.empty()) return bad;
    for (const OpKind kind : {OpKind::send_recv, OpKind::take_kv, OpKind::context_attention})
      for (const char* phase : {"train", "old_logprobs"})
        if (complaint(o, without(o.plan, kind, phase, 1)).empty())
          return fmt::format("dropping {} of {} went unnoticed", name_of(kind), phase);
    return "";
  };
  CHECK(run_cases(2, {{"mutations", tiny_scenario(2, 2, {"train.layout={cp: 2}"}), {}, {}}}, around) == "");
  const auto spread = [](const Outcome& o) -> std::string {
    if (auto bad = complaint(o, o.plan); !bad.empty()) return bad;
    for (const OpKind kind : {OpKind::all_to_all, OpKind::all_gather, OpKind::expert_arrivals, OpKind::grouped_linear})
      for (const char* phase : {"train", "old_logprobs"})
        if (complaint(o, without(o.plan, kind, phase, 1)).empty())
          return fmt::format("dropping {} of {} went unnoticed", name_of(kind), phase);
    return "";
  };
  CHECK(run_cases(2,
                  {{"mutations of experts",
                    tiny_scenario(2, 2,
                                  {"train.layout={dp: 2, ep: 2}", "model.model_type=mixtral",
                                   "model.architectures=[MixtralForCausalLM]", "model.num_local_experts=4",
                                   "model.num_experts_per_tok=2"}),
                    {},
                    {}}},
                  spread) == "");
}

// How many copies of tokens go no plan says. What a side says of them it says twice, and what it leaves out is found.
TEST_CASE("how many copies of tokens go is checked on each side by itself") {
  const auto check = [](const Outcome& o) -> std::string {
    if (auto bad = complaint(o, o.plan); !bad.empty()) return bad;
    for (const OpKind kind :
         {OpKind::all_to_all, OpKind::gather_rows, OpKind::copy_sort, OpKind::copy_arrivals, OpKind::dispatch_backward})
      if (complaint(o, without(o.plan, kind, "train", 1)).empty())
        return fmt::format("dropping {} of train went unnoticed", name_of(kind));
    // The routers of two choices send more than one copy of some token and fewer than two of another.
    const auto simulated = simulate(o, o.plan);
    if (!simulated) return render(simulated.error());
    const auto sent = [&](const Trace& trace) {
      std::int64_t bytes = 0;
      for (const RankTraffic& rank : trace.traffic_totals)
        for (const auto& [key, count] : rank) bytes += key.op == OpKind::all_to_all ? count.payload_bytes : 0;
      return bytes;
    };
    if (sent(*simulated) == sent(o.measured)) return "as many copies go as a simulation takes to be usual: no test";
    const auto over = [&](const TrafficKey& key, std::string_view group) {
      return key.op == OpKind::all_to_all && o.plan.groups[static_cast<std::size_t>(key.group)].name == group;
    };
    // Without spans too: rows of experts are known to the byte, and no more copies go than there is room for.
    for (const char* group : {"experts", "expert_copies"}) {
      Trace b = o.measured;
      bool found = false;
      for (auto& [key, count] : b.traffic_totals[0])
        if (over(key, group) && count.payload_bytes > 0) {
          count.payload_bytes += group == std::string_view("experts") ? 1 : std::int64_t{1} << 40;
          found = true;
          break;
        }
      if (!found) return fmt::format("nothing is sent over {}", group);
      const Comparison c = compare_traces(o.plan, *simulated, b);
      if (c.differences.size() != 1 ||
          c.differences[0].what.find(fmt::format("all_to_all over {}: payload bytes", group)) == std::string::npos)
        return fmt::format("more bytes of all steps over {}: {}", group, render_comparison(c, false));
    }
    // Of either side: a row more on the wire, and a span that counts one more.
    for (const bool on_wire : {true, false})
      for (const bool of_measured : {true, false}) {
        Trace a = *simulated, b = o.measured;
        Trace& spoiled = of_measured ? b : a;
        const auto span = std::ranges::find_if(spoiled.spans, [&](const Span& s) {
          return s.kind == OpKind::all_to_all && spoiled.names[static_cast<std::size_t>(s.name)].find(
                                                     "dispatched.copies.all_to_all") != std::string::npos;
        });
        if (span == spoiled.spans.end()) return "no copy was sent";
        constexpr std::int64_t row = 4;
        if (!on_wire) span->bytes += row;
        else
          for (auto& [key, count] : spoiled.traffic[static_cast<std::size_t>(span->rank)])
            if (over(key, "expert_copies") && key.step == span->step && key.phase == span->phase)
              count.payload_bytes += row;
        const Comparison c = compare_traces(o.plan, a, b);
        if (c.differences.size() != 1 ||
            c.differences[0].what.find("payload of what the device counted, and what was sent") == std::string::npos)
          return fmt::format("a row more in {} of {}: {}", on_wire ? "traffic" : "spans", spoiled.source,
                             render_comparison(c, false));
      }
    return "";
  };
  CHECK(run_cases(2,
                  {{"copies",
                    tiny_scenario(2, 2,
                                  {"train.layout={dp: 2, ep: 2}", "model.model_type=mixtral",
                                   "model.architectures=[MixtralForCausalLM]", "model.num_local_experts=4",
                                   "model.num_experts_per_tok=2", "train.expert_dispatch=per-rank"}),
                    {},
                    {}}},
                  check) == "");
}

// What ranks sent and held, counted while they ran, beside formulas of the model's sizes alone: BACKGROUND's section A
// for data parallelism, all-to-alls of sequences and experts, and the micro-batches that a pipeline's stages hold.
#include <fmt/format.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <initializer_list>

#include "lowering/builder.h"
#include "tests/parity/harness.h"

using namespace hotbunk;
using namespace hotbunk::testing;

namespace {

/// Of one rank's train phases: payload, or what goes over the wire, padding aside.
struct Sent {
  double payload = 0, wire = 0, padding = 0;
  std::int64_t calls = 0;
};
Sent sent_by(const Outcome& o, Rank rank, Family family, OpKind op) {
  Sent out;
  for (const auto& [key, count] : o.measured.traffic[static_cast<std::size_t>(rank)]) {
    if (key.phase != o.plan.phase_index("train") || key.group != static_cast<std::int16_t>(family) || key.op != op)
      continue;
    out.payload += static_cast<double>(count.payload_bytes), out.wire += static_cast<double>(count.wire_bytes);
    out.padding += static_cast<double>(count.padding_bytes), out.calls += count.calls;
  }
  return out;
}
Sent of_all(const Outcome& o, Family family, OpKind op) {
  Sent out;
  for (Rank r = 0; r < o.plan.num_ranks(); ++r) {
    const Sent one = sent_by(o, r, family, op);
    out.payload += one.payload, out.wire += one.wire, out.padding += one.padding, out.calls += one.calls;
  }
  return out;
}

/// Micro-batches that a rank trained, of all steps.
std::int64_t micro_batches(const Outcome& o, Rank rank) {
  std::int64_t blocks = 0;
  for (const PhaseSpan& s : o.measured.phases)
    if (s.rank == rank && s.phase == o.plan.phase_index("train")) blocks += s.blocks - 2;  // begin, step
  return blocks;
}

std::int64_t tokens(const Outcome& o) {
  std::int64_t all = 0;
  for (const SampleLengths& step : o.lengths) {
    for (const std::int64_t n : step.prompt_tokens) all += n;
    for (const std::int64_t n : step.response_tokens) all += n;
  }
  return all;
}

std::string unequal(const char* what, double found, double expected) {
  return found == expected ? "" : fmt::format("{}: {}, not {}", what, found, expected);
}
std::string first_of(std::initializer_list<std::string> complaints) {
  for (const std::string& c : complaints)
    if (!c.empty()) return c;
  return "";
}

/// Section A, per rank, over W shards and C copies of each; over all of a group fractions of W need no rounding.
std::string data_parallel(const Outcome& o) {
  const Scenario& s = o.job.scenario;
  double bytes = 0, root = 0;
  for (const ParamSpec& p : parameters_of(s.model)) {
    bytes += 4.0 * static_cast<double>(p.numel());
    if (p.layer < 0) root += 4.0 * static_cast<double>(p.numel());
  }
  const bool whole = s.train.engine == TrainEngine::ddp;
  const double ranks = static_cast<double>(o.plan.num_ranks()), steps = static_cast<double>(s.steps),
               W = whole ? 1.0 : static_cast<double>(s.train.layout.shard_ranks()), C = ranks / W;
  double micro = 0;  // of all ranks, which play as many each
  for (Rank r = 0; r < o.plan.num_ranks(); ++r) micro += static_cast<double>(micro_batches(o, r));
  if (micro < 2 * ranks * steps) return "one micro-batch a step: nothing accumulates";
  const Sent reduced = of_all(o, Family::replicas, OpKind::all_reduce),
             scattered = of_all(o, Family::fsdp, OpKind::reduce_scatter),
             gathered = of_all(o, Family::fsdp, OpKind::all_gather);
  const auto ring = [&](const Sent& x) { return (W - 1) / W * (x.payload + x.padding); };
  const double each = ranks * steps;
  double scatters = micro, gathers = 0;  // of all parameters
  switch (s.train.engine) {
    case TrainEngine::ddp:
      scatters = 0;
      break;
    case TrainEngine::zero1:
    case TrainEngine::zero2:  // which scatters every micro-batch's
      scatters = s.train.engine == TrainEngine::zero1 ? each : micro, gathers = each * bytes;
      break;
    default:  // the root stays from forward to backward, and so do units that nothing reshards
      gathers = micro * (s.train.reshard_after_forward ? 2 * bytes - root : bytes);
  }
  // What copies sum is a shard, its padding too; all of it where nothing is sharded.
  const double copied = whole ? each * bytes : C > 1 ? (scattered.payload + scattered.padding) / W : 0.0;
  return first_of({unequal("reduce-scatter", scattered.payload, scatters * bytes),
                   unequal("its wire", scattered.wire, ring(scattered)),
                   unequal("all-gather", gathered.payload, gathers), unequal("its wire", gathered.wire, ring(gathered)),
                   unequal("all-reduce", reduced.payload, copied),
                   unequal("its wire", reduced.wire, 2 * (C - 1) / C * copied)});
}

/// HSDP of W shards in R copies: a micro-batch gathers and scatters among the W ranks of a shard group, and sums each
/// shard over the R that have it. Groups are of ranks that differ in dp and in nothing else.
std::string shards_over_dp(const Outcome& o) {
  const Scenario& s = o.job.scenario;
  double bytes = 0, root = 0;
  for (const ParamSpec& p : parameters_of(s.model)) {
    bytes += 4.0 * static_cast<double>(p.numel());
    if (p.layer < 0) root += 4.0 * static_cast<double>(p.numel());
  }
  const double W = static_cast<double>(s.train.layout.dp), R = static_cast<double>(s.train.layout.cp);
  double micro = 0;
  for (Rank r = 0; r < o.plan.num_ranks(); ++r) micro += static_cast<double>(micro_batches(o, r));
  const auto& groups = o.plan.groups[static_cast<std::size_t>(Family::fsdp)].groups;
  if (groups != std::vector<std::vector<Rank>>{{0, 2}, {1, 3}}) return "shard groups of other ranks";
  const Sent reduced = of_all(o, Family::replicas, OpKind::all_reduce),
             scattered = of_all(o, Family::fsdp, OpKind::reduce_scatter),
             gathered = of_all(o, Family::fsdp, OpKind::all_gather);
  // What is summed over the copies is a shard, its padding too.
  return first_of({unequal("reduce-scatter", scattered.payload, micro * bytes),
                   unequal("all-gather", gathered.payload, micro * (2 * bytes - root)),
                   unequal("its wire", gathered.wire, (W - 1) / W * (gathered.payload + gathered.padding)),
                   unequal("all-reduce", reduced.payload, (scattered.payload + scattered.padding) / W),
                   unequal("its wire", reduced.wire, 2 * (R - 1) / R * reduced.payload)});
}

/// FSDP1 over the data ranks of what tensor parallelism with sp leaves: each place gathers and scatters its flat units,
/// and in the step its ranks sum the norms' gradients, each found in part by who has so many tokens: all of the norms,
/// zero where other data ranks have them. So do the squares of all gradients, and who asks to stop: 4 B each.
std::string flat_over_tensor(const Outcome& o) {
  const Scenario& s = o.job.scenario;
  const TrainLayout& l = s.train.layout;
  double place = 0, root = 0, norms = 0;  // bytes of a tensor-parallel rank
  for (const ParamSpec& p : parameters_of(s.model)) {
    const bool norm = p.shape.size() == 1;
    double bytes = 4.0 * static_cast<double>(p.numel());
    if (norm) norms += bytes;
    else if (p.layer >= 0) bytes /= static_cast<double>(l.tp);
    else bytes = 4.0 * static_cast<double>(ceil_div(p.shape[0], l.tp) * p.shape[1]);  // a vocabulary is rounded up
    place += bytes, root += p.layer < 0 ? bytes : 0.0;
  }
  double micro = 0;
  for (Rank r = 0; r < o.plan.num_ranks(); ++r) micro += static_cast<double>(micro_batches(o, r));
  const double each = static_cast<double>(o.plan.num_ranks()) * static_cast<double>(s.steps);
  return first_of(
      {unequal("reduce-scatter", of_all(o, Family::fsdp, OpKind::reduce_scatter).payload, micro * place),
       unequal("all-gather", of_all(o, Family::fsdp, OpKind::all_gather).payload, micro * (2 * place - root)),
       unequal("all-reduce", of_all(o, Family::train_tp, OpKind::all_reduce).payload, each * (norms + 2.0 * 4.0))});
}

/// Ulysses, of a token, layer and direction: d e (h + 2 max(k, N)) of q, k and v, and d e h of what was attended.
std::string by_heads(const Outcome& o) {
  const Scenario& s = o.job.scenario;
  const ModelSpec& m = s.model;
  const std::int64_t n = s.train.layout.ulysses, rows = m.head_dim * 4 * (2 * m.heads + 2 * std::max(m.kv_heads, n));
  double all = 0;  // rounded up, micro-batch by micro-batch, to what its ranks have each
  for (Rank r = 0; r < n; ++r) all += sent_by(o, r, Family::ulysses, OpKind::all_to_all).payload;
  const double least = static_cast<double>(2 * m.layers * rows * tokens(o)),
               most = least + static_cast<double>(2 * m.layers * rows * (n - 1) * micro_batches(o, 0));
  return least <= all && all <= most ? "" : fmt::format("{} sent, of {} to {}", all, least, most);
}

/// Experts over data ranks: a row of H for each choice, there and back, both ways.
std::string by_experts(const Outcome& o) {
  const ModelSpec& m = o.job.scenario.model;
  const double expected = 4.0 * static_cast<double>(m.layers * tokens(o) * m.moe->experts_per_token * m.hidden * 4);
  return unequal("rows of experts", of_all(o, Family::experts, OpKind::all_to_all).payload, expected);
}

/// A ring of W: each rank sends its own keys and values, and what came, to the next one W - 1 times, so that (W - 1) /
/// W of them all come to each; backward again, and their gradients with them. Or each gathers all, and what comes of
/// their gradients is reduced and scattered. Sequences are filled up to 2 W equal chunks.
std::string around_context(const Outcome& o) {
  const Scenario& s = o.job.scenario;
  const ModelSpec& m = s.model;
  const std::int64_t W = s.train.layout.cp;
  std::int64_t rows = 0;
  for (const SampleLengths& step : o.lengths)
    for (std::size_t i = 0; i < step.prompt_tokens.size(); ++i)
      rows += round_up(step.prompt_tokens[i] + step.response_tokens[i], 2 * W);
  const auto ranks = static_cast<double>(W), layers = static_cast<double>(m.layers);
  const double kv = static_cast<double>(rows * 2 * m.kv_heads * m.head_dim * 4);
  double micro = 0;
  for (Rank r = 0; r < W; ++r) micro += static_cast<double>(micro_batches(o, r));
  const Sent sent = of_all(o, Family::context, OpKind::send_recv),
             gathered = of_all(o, Family::context, OpKind::all_gather),
             scattered = of_all(o, Family::context, OpKind::reduce_scatter);
  const double share = (ranks - 1) / ranks;
  const bool ring = s.train.context_exchange == ContextExchange::ring;
  return first_of({unequal("sent", sent.payload, ring ? 3 * layers * ranks * share * kv : 0.0),
                   unequal("its wire", sent.wire, sent.payload),
                   unequal("messages", static_cast<double>(sent.calls), ring ? 3 * layers * (ranks - 1) * micro : 0.0),
                   unequal("gathered", gathered.payload, ring ? 0.0 : 2 * layers * ranks * kv),
                   unequal("its wire", gathered.wire, share * gathered.payload),
                   unequal("scattered", scattered.payload, ring ? 0.0 : layers * ranks * kv),
                   unequal("its wire", scattered.wire, share * scattered.payload)});
}

/// FSDP2 in a pipeline whose layers stay whole, or of which few ranks keep parts: those are gathered once a step, what
/// is of no layer once a micro-batch; and those that few keep twice a micro-batch, among these.
std::string held_layers(const Outcome& o) {
  const Scenario& s = o.job.scenario;
  double layers = 0, root = 0;
  for (const ParamSpec& p : parameters_of(s.model))
    (p.layer < 0 ? root : layers) += 4.0 * static_cast<double>(p.numel());
  const double copies = static_cast<double>(s.train.layout.dp), steps = static_cast<double>(s.steps);
  const double micro = of_all(o, Family::fsdp, OpKind::reduce_scatter).payload / (layers + root);  // of all copies
  if (micro < 2 * copies * steps || micro != std::floor(micro)) return fmt::format("{} micro-batches", micro);
  const Sent kept = of_all(o, Family::reshard, OpKind::all_gather);
  const auto few = static_cast<double>(s.train.reshard_ranks);
  return first_of({unequal("all-gather", of_all(o, Family::fsdp, OpKind::all_gather).payload,
                           copies * steps * layers + micro * root),
                   unequal("all-gather among few", kept.payload, few > 0 ? 2 * micro * layers : 0.0),
                   unequal("its wire", kept.wire, few > 0 ? (few - 1) / few * (kept.payload + kept.padding) : 0.0)});
}

double activations(const Outcome& o, Rank rank) {
  const auto& peaks = o.measured.memory[static_cast<std::size_t>(rank)].device.phase_peaks;
  return static_cast<double>(
      peaks.at(o.plan.phase_index("train")).by_category[static_cast<std::size_t>(Category::activations)]);
}

}  // namespace

TEST_CASE("what data ranks sent is what section A says of DDP, ZeRO and FSDP, on the wire too") {
  std::vector<Case> cases;
  const auto add = [&](const char* engine, int shards, const char* reshard) {
    cases.push_back(
        {fmt::format("{} over {}, {}", engine, shards, reshard),
         tiny_scenario(4, 2,
                       {fmt::format("train.engine={}", engine), fmt::format("train.layout.fsdp={}", shards),
                        "train.micro_batch_tokens=24", fmt::format("train.reshard_after_forward={}", reshard)}),
         {},
         {}});
  };
  add("ddp", -1, "true");
  for (const int shards : {-1, 2})  // 2: each shard on two ranks (HSDP)
    for (const char* engine : {"zero1", "zero2", "fsdp1", "fsdp2"}) add(engine, shards, "true");
  for (const char* engine : {"fsdp1", "fsdp2"}) add(engine, -1, "false");
  CHECK(run_cases(4, cases, data_parallel) == "");
}

TEST_CASE("a ring brings (W - 1) / W of keys and values to each rank, in so many messages; a gather as much") {
  for (const int ranks : {2, 4}) {
    std::vector<Case> cases;
    for (const char* exchange : {"ring", "all-gather"})
      cases.push_back({exchange,
                       tiny_scenario(ranks, 1,
                                     {fmt::format("train.layout={{dp: 1, cp: {}}}", ranks),
                                      fmt::format("train.context_exchange={}", exchange)}),
                       {},
                       {}});
    CHECK(run_cases(ranks, cases, around_context) == "");
  }
}

TEST_CASE("shards over dp beside cp: gathers among ranks that share no sequence, sums over those that do") {
  CHECK(run_cases(
            4,
            {{"dp 2 x cp 2",
              tiny_scenario(4, 2, {"train.layout={dp: 2, cp: 2, shard_over: [dp]}", "train.micro_batch_tokens=24"})}},
            shards_over_dp) == "");
}

TEST_CASE("flat units over tensor-parallel ranks: each place's own, and the norms' gradients once a step") {
  CHECK(run_cases(4,
                  {{"dp 2 x tp 2", tiny_scenario(4, 2,
                                                 {"train.engine=fsdp1", "train.layout={dp: 2, tp: 2, sp: true}",
                                                  "train.micro_batch_tokens=24"})}},
                  flat_over_tensor) == "");
}

TEST_CASE("layers of a pipeline that nothing reshards are gathered once a step, whatever its micro-batches") {
  std::vector<Case> cases;
  for (const char* layout : {"{dp: 2, pp: 2}", "{dp: 2, pp: 2, vpp: 2}"})
    cases.push_back({layout,
                     tiny_scenario(4, 2,
                                   {fmt::format("train.layout={}", layout), "model.num_hidden_layers=4",
                                    "train.micro_batch_tokens=24", "train.reshard_after_forward=false"}),
                     {},
                     {}});
  CHECK(run_cases(4, cases, held_layers) == "");
}

TEST_CASE("layers of a pipeline that few ranks keep are gathered once a step, and among those in every pass") {
  CHECK(run_cases(8,
                  {{"dp 4 x pp 2", tiny_scenario(8, 2,
                                                 {"train.layout={dp: 4, pp: 2}", "model.num_hidden_layers=4",
                                                  "train.micro_batch_tokens=24", "train.reshard_after_forward=2"})}},
                  held_layers) == "");
}

TEST_CASE("what all-to-alls sent are closed forms of tokens, heads and choices") {
  CHECK(run_cases(2,
                  {{"2 KV heads", tiny_scenario(2, 1, {"train.layout={dp: 1, ulysses: 2}"})},
                   {"a KV head that both have",
                    tiny_scenario(2, 1, {"train.layout={dp: 1, ulysses: 2}", "model.num_key_value_heads=1"})}},
                  by_heads) == "");
  CHECK(run_cases(2,
                  {{"experts over data ranks",
                    tiny_scenario(2, 1,
                                  {"model={model_type: mixtral, hidden_size: 24, intermediate_size: 20, "
                                   "num_hidden_layers: 3, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 6, "
                                   "vocab_size: 33, max_position_embeddings: 64, num_local_experts: 4, "
                                   "num_experts_per_tok: 2, initializer_range: 0.1, bos_token_id: 1, eos_token_id: 2}",
                                   "train.layout.ep=2"})}},
                  by_experts) == "");
}

TEST_CASE("stage p of a 1F1B pipeline holds min(m, PP - p) micro-batches, to the byte; GPipe's hold all") {
  std::vector<std::vector<double>> held;  // by case and stage
  const auto scenario = [](const char* schedule) {
    return tiny_scenario(4, 2,
                         {"train.layout={dp: 1, pp: 4}", "model.num_hidden_layers=4", "train.micro_batch_tokens=40",
                          fmt::format("train.pipeline_schedule={}", schedule)});
  };
  const auto check = [&](const Outcome& o) -> std::string {
    held.emplace_back();
    for (Rank stage = 0; stage < 4; ++stage) held.back().push_back(activations(o, stage));
    if (held.size() < 2) return "";
    const ModelSpec& m = o.job.scenario.model;
    const std::int64_t T = o.job.scenario.train.micro_batch_tokens;
    // docs/memory.md, of a layer with recompute: none: x, normed1, qkv, attended, h, normed2, gate_up, activated; fp32.
    const double kept = static_cast<double>(
        4 * T * (4 * m.hidden + m.head_dim * (2 * m.heads + 2 * m.kv_heads) + 3 * m.intermediate + 2 + m.heads));
    const std::vector<double>&one = held[0], &all = held[1];
    const double most = (all[1] - one[1]) / kept + 3;  // micro-batches of a step, of GPipe's second stage
    return first_of({unequal("stage 0 - stage 1", one[0] - one[1], kept), unequal("stage 1 - 2", one[1] - one[2], kept),
                     unequal("GPipe's stage 1 - 2", all[1] - all[2], 0.0),
                     most >= 5 && most == std::floor(most) ? "" : fmt::format("GPipe's stages hold {} each", most)});
  };
  CHECK(run_cases(4, {{"1f1b", scenario("1f1b")}, {"gpipe", scenario("gpipe")}}, check) == "");
}

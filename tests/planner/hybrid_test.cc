// Hybrid sharding (HSDP): shards inside a group, replicas of them across groups. And what scoring passes exchange.
#include <catch2/catch.hpp>
#include <set>

#include "planner/answers/answers.h"
#include "planner/answers/choices.h"
#include "planner/search/train_points.h"
#include "planner/validate/validate_tables.h"
#include "spec/catalog.h"
#include "spec/family.h"
#include "spec/loader.h"

namespace hotbunk {
namespace {

ClusterSpec hybrid_cluster(std::int64_t nodes, double network = 2.5e10) {
  ClusterSpec c;
  c.gpu.name = "test-gpu";
  c.gpu.memory_bandwidth = {2e12, "test"};
  c.gpu.flops = {{"bf16", {3e14, "test"}}, {"fp32", {2e13, "test"}}};
  c.gpu.nvlink_bandwidth = {3e11, "test"};
  c.gpu.pcie_bandwidth = {2.5e10, "test"};
  c.network_bandwidth = {network, "test"};
  c.gpus_per_node = 8;
  c.nodes = nodes;
  return c;
}

TrainModel hybrid_model(const ModelSpec& m, std::int64_t nodes, bool overlaps = false, double network = 2.5e10) {
  FrameworkProfile f;
  f.forward_kernels.value = 0;
  f.overlap_grad_reduce = f.overlap_param_gather = overlaps;
  const ClusterSpec c = hybrid_cluster(nodes, network);
  return {m, {.sequence = 2048}, CostModel(hardware_from_datasheet(c), c), f};
}

ModelSpec dense() { return gpt_model(8, 1024, 16, 32000, 2048); }
ModelSpec sparse() {
  ModelSpec m = dense();
  m.family = find_family("qwen3_moe");
  m.gated_mlp = true;
  m.layer_norm = m.qkv_bias = m.o_bias = m.mlp_bias = m.tie_embeddings = m.learned_positions = false;
  m.moe = MoeSpec{.experts = 16, .experts_per_token = 2, .expert_intermediate = 512};
  return m;
}

double term_of(const TrainPrice& t, Term term) { return t.seconds[static_cast<std::size_t>(term)]; }

std::unique_ptr<ScenarioPricer> hybrid_pricer(const std::string& text, const std::vector<std::string>& sets = {}) {
  auto s = load_scenario_text(text, "hybrid.yaml", sets);
  if (!s) FAIL(render(s.error()));
  auto p = ScenarioPricer::make(*s, catalog_root());
  if (!p) FAIL(render(p.error()));
  return std::move(*p);
}

/// Node and network bytes of one line of the links table, 0 when it is not there.
std::pair<double, double> line(const ScenarioPricer& p, RlPhase phase, const std::string& what) {
  for (const LinkUse& u :
       link_bytes(p.rl(), p.point(), p.train().price(p.point().train), p.rl().price_rollout(p.point()), true))
    if (u.phase == phase && u.what == what) return {u.node_wire, u.network_wire};
  return {0, 0};
}

}  // namespace

TEST_CASE("hybrid shards: memory, traffic and time of 32 ranks in groups of 8, by hand") {
  const TrainModel model = hybrid_model(dense(), 4);
  const double n = static_cast<double>(parameter_count(dense()));
  const TrainPoint hybrid{.dp = 32, .fsdp = 8, .sharding = Sharding::fsdp, .micro_batches = 3};
  TrainPoint full = hybrid;
  full.fsdp = -1;
  const TrainPrice h = model.price(hybrid), f = model.price(full);
  // One shard in fp32 with its gradient and two moments, 16 B, over the group, not over all ranks.
  CHECK(h.state_bytes == Approx(16 * n / 8).epsilon(0.002));
  CHECK(f.state_bytes == Approx(16 * n / 32).epsilon(0.002));
  // Payloads: whole tensors, so the same in both; the replicas add an eighth of the fp32 gradients, each backward pass.
  CHECK(h.data_gather_payload == f.data_gather_payload);
  CHECK(h.data_reduce_payload == f.data_reduce_payload);
  CHECK(f.replica_payload == 0);
  CHECK(h.replica_payload == Approx(3 * 4 * n / 8).epsilon(0.002));
  // Nothing overlaps in this profile: the data term is the sum of its collectives, one per layer.
  const CostModel& cost = model.cost();
  const GroupShape inside = GroupShape::strided(8, 1, 8), across = GroupShape::strided(4, 8, 8);
  CHECK((inside.nodes == 1 && across.nodes == 4 && across.per_node == 1));
  const double elements = h.data_reduce_payload / 3 / 4;  // of the rank, as the model counts them
  const double gather = cost.collective_seconds(OpKind::all_gather, inside, 2 * elements / 8);
  const double scatter = cost.collective_seconds(OpKind::reduce_scatter, inside, 4 * elements / 8);
  const double reduce = cost.collective_seconds(OpKind::all_reduce, across, 4 * elements / 8 / 8);
  CHECK(term_of(h, Term::data) == Approx(3 * 8 * (2 * gather + scatter + reduce)));
  // Through each of 8 ports a full gather and scatter sends 31/32 (2 x 2 + 4) n / 8 = 0.97 n, hybrid shards 2 x 3/4 x
  // 4 n / 8 = 0.75 n after what they do inside the node: less time where the network is what takes it.
  const TrainModel slow = hybrid_model(dense(), 4, false, 1e9);
  CHECK(term_of(slow.price(hybrid), Term::data) / term_of(slow.price(full), Term::data) ==
        Approx(0.75 / 0.97).epsilon(0.06));
  // A whole gradient all-reduce is never less than a shard's: DDP against one rank per group.
  TrainPoint groups_of_one = hybrid;
  groups_of_one.fsdp = 1;
  CHECK(model.price(groups_of_one).replica_payload == Approx(3 * 4 * n).epsilon(0.002));
  CHECK(model.price(groups_of_one).state_bytes == Approx(16 * n).epsilon(0.002));
  // ZeRO-1 reduces once per step, ZeRO-2 after each micro-batch.
  TrainPoint zero = hybrid;
  zero.sharding = Sharding::zero1;
  CHECK(model.price(zero).replica_payload == Approx(4 * n / 8).epsilon(0.002));
  zero.sharding = Sharding::zero2;
  CHECK(model.price(zero).replica_payload == Approx(3 * 4 * n / 8).epsilon(0.002));
  // Replicas of everything have no shards.
  zero.sharding = Sharding::replicated;
  CHECK(zero.replicas() == 1);
  CHECK(model.price(zero).replica_payload == 0);
}

TEST_CASE("hybrid shards: what can hide behind backward does") {
  const TrainModel exposed = hybrid_model(dense(), 4), overlapped = hybrid_model(dense(), 4, true);
  const TrainPoint p{.dp = 32, .fsdp = 8, .sharding = Sharding::fsdp, .micro_batch = 8, .micro_batches = 3};
  const TrainPrice a = exposed.price(p), b = overlapped.price(p);
  CHECK(b.hidden_seconds > 0);
  // Of 8 layers all but one hide, where backward is longer than what it hides.
  CHECK(term_of(b, Term::data) == Approx(term_of(a, Term::data) / 8).epsilon(1e-6));
  CHECK(term_of(a, Term::data) == Approx(term_of(b, Term::data) + b.hidden_seconds));
}

TEST_CASE(
    "hybrid shards: our own ops wait for the replicas' sum of the last units, and for what is longer than compute") {
  FrameworkProfile f;
  f.lowered_ops = true;
  const ClusterSpec c = hybrid_cluster(4);
  const TrainModel model(dense(), {.sequence = 2048}, CostModel(hardware_from_datasheet(c), c), f);
  const TrainPoint p{.dp = 32, .fsdp = 8, .sharding = Sharding::fsdp, .micro_batches = 3};
  TrainPoint alone = p;  // the same shard group, and no replicas
  alone.dp = 8, alone.fsdp = -1;
  const TrainModel::Layers l = model.layers(p);
  const GroupShape across = model.groups(p).replicas();
  CHECK((across.ranks == 4 && across.nodes == 4));
  const auto sum = [&](double elements) {
    return model.cost().collective_seconds(OpKind::all_reduce, across, 4 * elements / 8);
  };
  const double ends = model.end_parameters(p, l, 0);
  const double waits = term_of(model.price(p), Term::data) - term_of(model.price(alone), Term::data);
  CHECK(waits >= 3 * (sum(l.dense.parameters) + sum(ends)) * (1 - 1e-9));
  CHECK(waits < 3 * (8 * sum(l.dense.parameters) + sum(ends)));
}

TEST_CASE("hybrid shards of experts: divided within a group, summed over the groups' replicas") {
  const TrainModel model = hybrid_model(sparse(), 4);
  const TrainPoint p{.dp = 32, .ep = 4, .fsdp = 8, .sharding = Sharding::fsdp, .micro_batches = 2};
  // 32 / 4 = 8 ranks hold the same experts, 2 of them in one shard group of 8, so 4 replicas.
  CHECK(p.expert_ranks() == 8);
  CHECK(p.expert_shard_ranks() == 2);
  const TrainModel::Layers l = model.layers(p);
  const double experts = 8 * l.moe.expert_parameters;
  const TrainPrice t = model.price(p, l);
  CHECK(t.expert_data_reduce_payload == Approx(2 * 4 * experts));
  CHECK(t.expert_data_gather_payload == Approx(2 * 2 * 2 * experts));
  CHECK(t.expert_replica_payload == Approx(2 * 4 * experts / 2));
  // Experts spread wider than a group are whole in it: only the replicas have something to sum.
  TrainPoint wide = p;
  wide.ep = 16;
  CHECK(wide.expert_shard_ranks() == 1);
  const TrainModel::Layers w = model.layers(wide);
  const TrainPrice v = model.price(wide, w);
  CHECK(v.expert_data_reduce_payload == 0);
  CHECK(v.expert_replica_payload == Approx(2 * 4 * 8 * w.moe.expert_parameters));
}

TEST_CASE("hybrid shards: explain lists both levels, and the search tries groups") {
  const char* text =
      "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 4, gpus_per_node: 8}\n"
      "train: {engine: fsdp2, layout: {dp: 32, fsdp: 8}, recompute: full, micro_batch_tokens: 4096}\n"
      "rollout: {engine: sglang, layout: {tp: 2, dp: 16}}\nsync: {transport: collective}\n"
      "algorithm: {prompts: 64, samples_per_prompt: 8, reference: true}\n";
  const auto p = hybrid_pricer(text);
  const TrainPrice t = p->train().price(p->point().train);
  const double n = t.data_gather_payload / 2 / 2 / static_cast<double>(p->point().train.micro_batches);
  const auto gradients = line(*p, RlPhase::train, "dp gradients"),
             replicas = line(*p, RlPhase::train, "replicas' gradients");
  const auto m = static_cast<double>(p->point().train.micro_batches);
  // Reduce-scatter inside a node: 7/8 of the fp32 gradients; all-reduce of the shard over 4 nodes: 2 x 3/4 of an
  // eighth.
  CHECK(gradients.first == Approx(m * 4 * n * 7 / 8));
  CHECK(gradients.second == 0);
  CHECK(replicas.first == 0);
  CHECK(replicas.second == Approx(m * 4 * n / 8 * 2 * 3 / 4));
  CHECK(line(*p, RlPhase::train, "dp parameters").second == 0);
  // A sync gathers one replica of the shards.
  CHECK(p->rl().sync_job(p->point()).sources == 8);
  CHECK_THAT(describe(p->point()), Catch::Contains("fsdp over 8"));
  const std::vector<std::int64_t> tried = default_rl_space(p->scenario()).train.shard;
  CHECK(std::count(tried.begin(), tried.end(), 8) == 1);
}

TEST_CASE("layers that a pipeline holds are gathered once a step, in seconds and in bytes") {
  const TrainModel model = hybrid_model(dense(), 2);  // nothing overlaps
  const auto price = [&](bool held, std::int64_t m, bool on_host) {
    TrainPoint p{.dp = 8, .pp = 2, .sharding = Sharding::fsdp, .micro_batches = m};
    p.reshard_after_forward = !held, p.optimizer_on_host = on_host;
    REQUIRE(p.holds_units() == held);
    return model.price(p);
  };
  for (const bool on_host : {false, true}) {
    INFO(on_host);
    const TrainPrice half = price(true, 8, on_host), held = price(true, 16, on_host), few = price(false, 8, on_host),
                     streamed = price(false, 16, on_host);
    CHECK(held.data_gather_payload == half.data_gather_payload);
    CHECK(streamed.data_gather_payload == Approx(32 * held.data_gather_payload));
    CHECK(held.host_up_bytes == half.host_up_bytes);
    CHECK(streamed.host_up_bytes == Approx(32 * held.host_up_bytes));
    CHECK((held.host_up_bytes > 0) == on_host);
    // All else is alike, so that the difference is gathers: of 16 micro-batches 31, of 8 of them 15.
    const double more = term_of(streamed, Term::data) - term_of(held, Term::data),
                 fewer = term_of(few, Term::data) - term_of(half, Term::data);
    CHECK(fewer > 0);
    CHECK(more == Approx(31.0 / 15 * fewer));
  }
  // A stage's parameters in bf16, once; and a scoring pass gathers them in each micro-batch, held or not.
  const auto asked = [](bool held) {
    return hybrid_pricer(
        "model: llama-3.1-8b\nprofile: torchtitan\ncluster: {gpu: h100-sxm-80gb, nodes: 2, gpus_per_node: 8}\n"
        "train: {engine: fsdp2, layout: {dp: 8, pp: 2}, recompute: full, micro_batch_tokens: 4096}\n"
        "rollout: {engine: vllm, layout: {tp: 2, dp: 8}}\nalgorithm: {prompts: 128, samples_per_prompt: 1}\n"
        "workload: {prompt_tokens: {mean: 2048, max: 2048, distribution: fixed},"
        " response_tokens: {mean: 2048, max: 2048, distribution: fixed}}\n",
        {held ? "train.reshard_after_forward=false" : "train.reshard_after_forward=true"});
  };
  const auto held = asked(true), streamed = asked(false);
  REQUIRE(held->point().train.micro_batches == 16);
  CHECK(held->train().price(held->point().train).data_gather_payload == Approx(8.03e9).epsilon(0.001));
  CHECK(streamed->train().price(streamed->point().train).data_gather_payload == Approx(32 * 8.03e9).epsilon(0.001));
  CHECK(line(*held, RlPhase::old_logprobs, "dp parameters").first > 0);
  CHECK(line(*held, RlPhase::old_logprobs, "dp parameters").first ==
        Approx(line(*streamed, RlPhase::old_logprobs, "dp parameters").first));
}

TEST_CASE("scoring passes exchange what their layers do, one forward pass of it") {
  const char* text =
      "model: qwen3-30b-a3b\ncluster: {gpu: h100-sxm-80gb, nodes: 4, gpus_per_node: 8}\n"
      "train: {engine: megatron, layout: {dp: 4, tp: 4, sp: true, pp: 2, ep: 4}, recompute: none, micro_batch_tokens: "
      "4096}\n"
      "rollout: {engine: sglang, layout: {tp: 4, dp: 8}}\n"
      "algorithm: {prompts: 64, samples_per_prompt: 8, reference: true}\n";
  const auto p = hybrid_pricer(text);
  const TrainPoint& q = p->point().train;
  const TrainModel::Layers l = p->train().layers(q);
  const double m = q.full_micro_batches(), tokens = static_cast<double>(q.micro_batch * p->train().setting().sequence) +
                                                    p->train().padding_tokens(q);
  for (RlPhase phase : {RlPhase::reference, RlPhase::old_logprobs}) {
    INFO(name_of(phase));
    // 24 layers of a stage, in each a gather and a scatter of [T, h] around attention; on the last stage also the
    // head's gather and three fp32 numbers per token of the loss, on the first the embedding's scatter. 3/4 of it sent.
    const double one = 2 * tokens * 2048, last = 24 * 2 * one + one + 12 * tokens;
    CHECK(line(*p, phase, "tp gather and scatter").first == Approx(m * last * 3 / 4));
    // Dispatch and combine: each token's 8 experts, a quarter of the tokens on each tp rank, 3 of 4 elsewhere.
    const auto experts = line(*p, phase, "expert dispatch and combine");
    CHECK(experts.first + experts.second == Approx(m * 24 * 2 * (2 * tokens / 4 * 8 * 2048 * 3 / 4)));
    // One [T, h] / tp between the stages, once.
    const auto pipeline = line(*p, phase, "pipeline");
    CHECK(pipeline.first + pipeline.second == Approx(m * l.dense.input_bytes + 0.0));
    CHECK(line(*p, phase, "dp parameters").first == 0);  // ZeRO-1 holds them
  }
  CHECK(line(*p, RlPhase::train, "tp gather and scatter").first >
        2 * line(*p, RlPhase::reference, "tp gather and scatter").first);
  const auto ulysses = hybrid_pricer(
      "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}\n"
      "train: {engine: fsdp2, layout: {dp: 4, ulysses: 2}, recompute: full, micro_batch_tokens: 4096}\n"
      "rollout: {engine: sglang, layout: {tp: 2, dp: 4}}\n");
  // Forward twice and backward once in training, forward once here.
  CHECK(line(*ulysses, RlPhase::old_logprobs, "ulysses").first * 3 ==
        Approx(line(*ulysses, RlPhase::train, "ulysses").first));
}

}  // namespace hotbunk

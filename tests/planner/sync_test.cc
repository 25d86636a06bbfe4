// Weight updates: what crosses which link, and what does not grow with the cluster.
#include <catch2/catch.hpp>

#include "planner/answers/answers.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "tests/paths.h"
#include "tests/planner/played.h"
#include "tests/planner/pricers.h"

namespace hotbunk {
namespace {

struct Sync {
  double seconds = 0, network = 0, node = 0;
};

Sync sync_of(const std::vector<std::string>& sets) {
  auto s = load_scenario(std::filesystem::path(source_folder) / "scenarios" / "qwen2.5-7b-colocated.yaml", sets);
  if (!s) FAIL(render(s.error()));
  const auto pricer = ScenarioPricer::make(*s, catalog_root());
  REQUIRE(pricer.has_value());
  const RlPoint p = (*pricer)->point();
  Sync out{.seconds = (*pricer)->price(p).seconds[static_cast<std::size_t>(RlPhase::sync)]};
  REQUIRE(out.seconds > 0);
  for (const LinkUse& u :
       link_bytes((*pricer)->rl(), p, (*pricer)->train().price(p.train), (*pricer)->rl().price_rollout(p), true))
    if (u.phase == RlPhase::sync) out.network += u.network_wire, out.node += u.node_wire;
  return out;
}

std::vector<std::string> apart(const std::string& mode, const std::string& network) {
  return {"placement=disaggregated",       "cluster.nodes=2",   "train.layout={dp: 8}",
          "rollout.layout={tp: 4, dp: 2}", "sync.mode=" + mode, "cluster.network_gb_per_s=" + network};
}

}  // namespace

TEST_CASE("weights for engines on other nodes cross the network at its rate") {
  const double weights = 7'615'616'512 * 2.0;
  for (const std::string mode : {"bucketed", "stream", "broadcast", "direct"}) {
    INFO(mode);
    double last = 0.0;
    for (const auto& [text, rate] : {std::pair{"400", 400e9}, {"50", 50e9}, {"1", 1e9}, {"0.1", 0.1e9}}) {
      const Sync s = sync_of(apart(mode, text));
      // Direct, every rank of two engines of tp 4 takes its quarter; else every byte leaves through the port of the one
      // rank that sends.
      const double port = weights / (mode == "direct" ? 4.0 : 1.0);
      CHECK(s.seconds > port / rate);
      CHECK(s.seconds >= last);
      CHECK(s.network == Approx(mode == "direct" ? weights / 4 : weights * 15 / 16 / 8));
      last = s.seconds;
    }
    // So slow that nothing else counts: 90 % of the line rate is what collectives reach, fewer protocols less.
    const double port = weights / (mode == "direct" ? 4.0 : 1.0) / 0.1e9;
    CHECK(last > port);
    CHECK(last < 1.4 * port + 3.0);
  }
}

TEST_CASE("few trainers that feed many engines are the bottleneck of a direct update") {
  const auto of = [](const std::string& nodes, const std::string& dp) {
    return sync_of({"placement=disaggregated", "cluster.nodes=" + nodes, "train.layout={dp: 8}",
                    "rollout.layout={tp: 4, dp: " + dp + "}", "sync.mode=direct", "cluster.network_gb_per_s=0.1"});
  };
  const Sync same = of("2", "2"), many = of("4", "6");  // 8 to 8, 8 to 24
  CHECK(many.network == Approx(3 * same.network));
  CHECK(many.seconds > 2.9 * same.seconds);
}

TEST_CASE("requests per bucket of engines on the trainers' GPUs do not grow with the cluster") {
  const auto job = [](std::int64_t ranks) {
    return SyncJob{.model_bytes = 15.2e9, .tensors = 339, .sources = ranks, .target_parts = 4, .targets = ranks};
  };
  const auto cluster = catalogue_cluster("h100-sxm-80gb");
  REQUIRE(cluster.has_value());
  ClusterSpec many = *cluster;
  many.gpus_per_node = 8, many.nodes = 64;
  const CostModel cost(hardware_from_datasheet(many), many);
  const auto buckets = [&](SyncMechanism m, std::int64_t ranks) { return price_sync(m, job(ranks), cost).buckets; };
  for (SyncMechanism m : {SyncMechanism::bucketed, SyncMechanism::flattened_buckets}) {
    CHECK(buckets(m, 8) == Approx(29 * 0.010));  // 15.2 GB in buckets of 512 MiB, 10 ms each
    CHECK(buckets(m, 512) == buckets(m, 8));
  }
  // A broadcast's tree has six levels more over 64 nodes.
  CHECK(buckets(SyncMechanism::broadcast, 512) == Approx(7 * buckets(SyncMechanism::broadcast, 8)));
}

TEST_CASE("a weight update between two sets of GPUs is bound by the port of the rank that sends") {
  // 15.2 GB through one port of 12.5 GB/s: 1.22 s, and a tenth of the line more.
  const Sync one = sync_of(apart("broadcast", "12.5"));
  CHECK(one.seconds > 7'615'616'512 * 2.0 / 12.5e9);
  // NeMo-RL's group has every training rank: its node's eight ports share the bytes.
  std::vector<std::string> all = apart("broadcast", "0.1");
  const double alone = sync_of(all).seconds;
  all.insert(all.end(), {"profile=nemo-megatron", "train.engine=megatron"});
  CHECK(sync_of(all).seconds < 0.2 * alone);
}

TEST_CASE("constants of a weight update stand in YAML, each with two sources") {
  const auto table = read_sync_table(catalog_root() / "sync.yaml");
  REQUIRE(table.has_value());
  for (const SyncConstants& c : *table)
    for (const Sourced& s : {c.start, c.per_tensor, c.per_bucket, c.bandwidth})
      CHECK_THAT(s.source, Catch::Contains("; "));
  // What was measured: slime's 7 s (61 GB, 114 buckets of 18,867 tensors on a node), GLM-4.5's 27 s on 64 GPUs (705 GB,
  // 44,189 tensors), and NeMo-RL's, verl's and Moonshot's updates of DeepSeek-V3 between 2.4 and 55 s.
  const auto cluster = catalogue_cluster("h100-sxm-80gb");
  REQUIRE(cluster.has_value());
  ClusterSpec many = *cluster;
  many.gpus_per_node = 8, many.nodes = 32;
  const CostModel cost(hardware_from_datasheet(many), many);
  const auto seconds = [&](double bytes, double tensors, std::int64_t ranks) {
    return price_sync(SyncMechanism::flattened_buckets,
                      {.model_bytes = bytes, .tensors = tensors, .sources = ranks, .target_parts = 8, .targets = ranks},
                      cost)
        .seconds();
  };
  CHECK(seconds(61e9, 18'867, 8) == Approx(7.0).epsilon(0.1));
  CHECK(seconds(705e9, 44'189, 64) == Approx(27.0).epsilon(0.2));
  CHECK(seconds(1342e9, 45'500, 256) < 55.0);
}

TEST_CASE(
    "an update between two sides of the same GPUs has the seconds in which trainers collect garbage; apart none") {
  const std::string common =
      "model: qwen2.5-7b\ntrain: {engine: megatron, layout: {dp: 2, pp: 4}, micro_batch_tokens: 4096}\n"
      "algorithm: {prompts: 64}\n";
  struct Updated {
    double seconds, played, cleanup;
  };
  const auto update = [&](const std::string& rest) {
    const auto s = pricer_of_text(common + rest, {});
    const RlPoint p = s->point();
    const auto job = priced_job(*s);
    REQUIRE(job.has_value());
    const auto at = static_cast<std::size_t>(RlPhase::sync);
    return Updated{s->price(p).seconds[at], play(*job, s->train().cost()).seconds[at], s->rl().sync_price(p).cleanup};
  };
  const std::string together = "cluster: {gpu: h100-sxm-80gb}\nrollout: {engine: vllm, layout: {tp: 2, dp: 4}}\n",
                    apart =
                        "cluster: {gpu: h100-sxm-80gb, nodes: 2}\nplacement: disaggregated\n"
                        "rollout: {engine: vllm, layout: {tp: 2, dp: 4}}\nsync: {mode: broadcast}\n";
  const Updated verl = update("profile: verl-megatron\n" + together);
  const double cleanup = pricer_of_text(common + "profile: verl-megatron\n" + together, {})
                             ->train()
                             .framework()
                             .update_cleanup_seconds.value;
  REQUIRE(cleanup > 0.5);
  CHECK(verl.cleanup == cleanup);
  CHECK(verl.seconds > cleanup + 0.2);
  CHECK(verl.played == Approx(verl.seconds).epsilon(0.03));
  CHECK(update("profile: verl-megatron\n" + apart).cleanup == 0.0);
  CHECK(update("profile: slime-megatron\n" + together).cleanup == 0.0);
}

TEST_CASE("ipc across nodes is refused, and is no default there") {
  const std::string text =
      "model: qwen2.5-0.5b\ncluster: {gpu: h100-sxm-80gb, nodes: 2, gpus_per_node: 2}\ntrain: {layout: {dp: 4}, "
      "micro_batch_tokens: 4096}\nrollout: {layout: {tp: 1, dp: 4}}\n";
  const auto s = load_scenario_text(text, "two.yaml");
  REQUIRE(s.has_value());
  CHECK(s->sync.transport == SyncTransport::collective);
  const auto asked = load_scenario_text(text, "two.yaml", {"sync.transport=ipc"});
  REQUIRE_FALSE(asked.has_value());
  CHECK(asked.error()[0].code == "E229");
  CHECK(load_scenario_text(text, "two.yaml", {"sync.transport=ipc", "rollout.engine=sglang"}).has_value());
}

}  // namespace hotbunk

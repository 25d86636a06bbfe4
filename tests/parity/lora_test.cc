// Adapters: P1 and P2 in every kind of layout, P4 of what is frozen and what is not, P5 of matrices that are sent with
// their adapters in them.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/hash.h"
#include "layout/rollout_weights.h"
#include "layout/train_weights.h"
#include "lowering/lower.h"
#include "tests/parity/harness.h"

using namespace hotbunk;
using namespace hotbunk::testing;

namespace {

const char* const lora = "train.lora={rank: 3, alpha: 6}";

std::string same_lora_plan(const Outcome& o) { return complaint(o, o.plan); }

/// alpha / rank is 2: the factor's product is exact, and what is left of the kernel's order of sums is its own.
float merged(float w, std::span<const float> b, const std::vector<float>& a, std::int64_t cols, std::int64_t col) {
  float sum = 0.0f;
  for (std::size_t k = 0; k < b.size(); ++k)
    sum = std::fmaf(b[k], a[k * static_cast<std::size_t>(cols) + static_cast<std::size_t>(col)], sum);
  return std::fmaf(2.0f, sum, w);
}

std::vector<float> floats_of(std::span<const std::byte> bytes) {
  std::vector<float> out(bytes.size() / sizeof(float));
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

/// What one rank holds of every parameter, in fp32.
std::map<std::string, std::vector<float>> trained_parameters_of(const CpuBackend& backend, const Scenario& s) {
  std::map<std::string, std::vector<float>> out;
  for (const ShardedUnit& u : train_units(s.model, 1, 1, 0)) {
    const std::vector<float> shard = floats_of(backend.peek("train." + u.name + ".shard"));
    for (const UnitParam& p : u.params)
      out[p.parameter].assign(shard.begin() + p.shard_offset, shard.begin() + p.shard_offset + p.elements());
  }
  return out;
}

/// Element by element; `moved`: how many elements an adapter has changed; `packed`: how many matrices lay in an order
/// of their own.
std::string compare_merged(const CpuBackend& backend, const Scenario& s, const Plan& plan, std::int64_t& moved,
                           std::int64_t& packed) {
  const auto trained = trained_parameters_of(backend, s);
  std::int64_t compared = 0;
  for (const LocalWeight& w : rollout_weights(s.model, 1, 0)) {
    const Rows rows = rows_of(backend, plan, "rollout." + w.name);
    packed += rows.moved ? 1 : 0;
    const std::vector<float> local = floats_of(rows.bytes);
    for (const auto& source : w.sources) {
      const std::vector<float>& base = trained.at(source.parameter);
      const Piece& p = source.piece;
      const std::string module = source.parameter.substr(0, source.parameter.size() - std::string("weight").size());
      const auto a = trained.find(module + "lora_A.weight"), b = trained.find(module + "lora_B.weight");
      const auto rank = static_cast<std::size_t>(s.model.lora.rank);
      for (std::int64_t r = p.row_begin; r < p.row_end; ++r)
        for (std::int64_t c = p.col_begin; c < p.col_end; ++c, ++compared) {
          const float before = base[static_cast<std::size_t>(r * p.col_end + c)];
          const float expected =
              a == trained.end()
                  ? before
                  : merged(before, std::span(b->second).subspan(static_cast<std::size_t>(r) * rank, rank), a->second,
                           p.col_end, c);
          moved += expected != before ? 1 : 0;
          const float found = local[static_cast<std::size_t>(p.offset + (r - p.row_begin) * p.pitch + c - p.col_begin)];
          if (std::bit_cast<std::uint32_t>(found) != std::bit_cast<std::uint32_t>(expected))
            return fmt::format("{}: element ({}, {}) of {} is {}, merged {}", w.name, r, c, source.parameter, found,
                               expected);
        }
    }
  }
  return compared == parameter_count(s.model) ? "" : fmt::format("compared {} elements", compared);
}

}  // namespace

TEST_CASE("adapters: simulated bytes and calls equal the measured ones, in every kind of layout") {
  std::vector<Case> cases;
  const auto add = [&](int rollout_tp, std::vector<std::string> sets) {
    sets.insert(sets.end(), {lora, "sync.verify=true", "algorithm.reference=true", "checkpoint_every=1"});
    cases.push_back({fmt::format("{}", fmt::join(sets, " ")), tiny_scenario(4, rollout_tp, sets), {}, {}});
  };
  for (const char* engine : {"fsdp2", "zero2", "zero1", "ddp"})
    for (const char* params : {"fp32", "bf16"}) {
      const std::string e = fmt::format("train.engine={}", engine),
                        p = fmt::format("train.precision.params={}", params);
      add(2, {e, p});
      add(1, {e, p, "train.layout.dp=2", "train.layout.tp=2", "train.layout.sp=true", "train.recompute=full"});
      add(4,
          {e, p, "train.layout.dp=2", "train.layout.pp=2", "train.pipeline_split=[2, 1]", "sync.transport=collective"});
      add(2, {e, p, "transition=slime", "train.recompute=selective"});  // the sync reads the host's copy
    }
  for (const char* wrap :
       {"{policy: layer}", "{policy: size, min_parameters: 3000}", "{policy: names, names: ['*.1']}"}) {
    const std::string engine = "train.engine=fsdp1", wrapped = fmt::format("train.wrap={}", wrap);
    add(2, {engine, wrapped, "sync.transport=collective", "train.layout.fsdp=2"});
    add(2, {engine, wrapped, "train.precision.params=bf16", "rollout.dtype=bf16", "sync.bucket_mib=0.003"});
    add(4, {engine, wrapped, "transition=slime"});
    add(2, {engine, wrapped, "train.offload=layerwise", "train.recompute=full"});
  }
  add(2, {"train.engine=fsdp1", "train.layout.dp=2", "train.layout.pp=2", "train.pipeline_split=[2, 1]"});
  add(2, {"train.layout.fsdp=2", "sync.transport=collective"});
  add(2, {"transition=verl-old", "sync.transport=collective"});
  add(2, {"transition=slime", "train.layout.dp=2", "train.layout.pp=2", "train.pipeline_split=[2, 1]"});
  add(2, {"train.layout.dp=2", "train.layout.cp=2"});
  add(2, {"train.layout.dp=2", "train.layout.ulysses=2"});
  add(2, {"train.engine=zero1", "train.layout.dp=1", "train.layout.tp=2", "train.layout.pp=2",
          "train.pipeline_split=[2, 1]", "train.pipeline_schedule=zero-bubble"});
  add(2, {"train.lora.targets=[q_proj, v_proj]", "rollout.sleep_level=1", "train.reshard_after_forward=false"});
  CHECK(run_cases(4, cases, same_lora_plan) == "");
}

TEST_CASE("adapters of latents, and of one module for q, k and v: simulated bytes and calls equal the measured ones") {
  const std::string latent =
      "model={model_type: deepseek_v3, hidden_size: 20, intermediate_size: 36, num_hidden_layers: 3, "
      "num_attention_heads: 4, first_k_dense_replace: 1, kv_lora_rank: 10, qk_nope_head_dim: 6, qk_rope_head_dim: 4, "
      "v_head_dim: 5, q_lora_rank: 9, moe_intermediate_size: 12, n_routed_experts: 4, num_experts_per_tok: 2, "
      "n_shared_experts: 1, n_group: 2, topk_group: 1, vocab_size: 33, max_position_embeddings: 256, "
      "initializer_range: 0.2, bos_token_id: 1, eos_token_id: 2}";
  const std::string mixture =
      "model={model_type: mixtral, architectures: [MixtralForCausalLM], hidden_size: 24, intermediate_size: 20, "
      "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 6, vocab_size: 33, "
      "max_position_embeddings: 64, num_local_experts: 4, num_experts_per_tok: 2, initializer_range: 0.2, "
      "bos_token_id: 1, eos_token_id: 2}";
  const std::string packed =
      "model={model_type: gpt2, n_embd: 24, n_layer: 3, n_head: 4, n_positions: 64, vocab_size: 33, "
      "initializer_range: 0.2, bos_token_id: 1, eos_token_id: 2}";
  const char *const of_latents = "targets: [q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj]",
                    *const all = "targets: all-linear", *const split = "train.pipeline_split=[1, 2]";
  struct Way {
    const std::string& model;
    const char* targets;
    int rollout_tp;
    std::vector<std::string> sets;
  };
  std::vector<Case> cases;
  for (const Way& way :
       {Way{latent, of_latents, 2, {"train.layout={dp: 2, tp: 2, sp: true, etp: 2}", "train.recompute=full"}},
        Way{latent, "targets: [kv_b_proj]", 1, {"train.layout={dp: 2, cp: 2}", "train.precision.params=bf16"}},
        Way{latent, of_latents, 2, {"train.layout={dp: 2, pp: 2}", split, "train.engine=zero1"}},
        Way{latent, of_latents, 4, {"train.layout={dp: 2, ulysses: 2}", "train.recompute=selective"}},
        Way{latent, all, 2, {"train.layout={dp: 4, ep: 2}", "train.expert_capacity=0.5", "rollout.layout.ep=2"}},
        Way{latent,
            "targets: [gate_proj, down_proj]",
            2,
            {"train.layout={dp: 2, tp: 2, ep: 4, sp: true}", "train.engine=zero1", "train.precision.params=bf16"}},
        Way{latent, "targets: [up_proj]", 1, {"train.engine=ddp", "train.layout={dp: 2, cp: 2}"}},
        Way{mixture, all, 2, {"train.engine=fsdp1", "train.layout={dp: 4, ep: 2}", "sync.transport=collective"}},
        Way{mixture,
            "targets: [w1, w2]",
            4,
            {"train.engine=fsdp1", "train.layout={dp: 4, fsdp: 2, ep: 2}", "train.precision.params=bf16",
             "transition=slime", "rollout.layout.ep=2"}},
        Way{mixture, all, 1, {"train.engine=fsdp1", "train.layout={dp: 2, tp: 2, ep: 4, sp: true}"}},
        Way{mixture, all, 2, {"train.engine=fsdp1", "train.layout={dp: 4, fsdp: 1, ep: 2}"}},
        // Ranks share each expert's columns, and its adapters' other matrices are whole on them.
        Way{mixture, all, 2, {"train.layout={dp: 4, ep: 2, etp: 2}", "train.expert_capacity=0.5"}},
        Way{mixture, all, 4, {"train.engine=ddp", "train.layout={dp: 2, tp: 2, etp: 2, sp: true}"}},
        Way{mixture, all, 1, {"train.engine=fsdp1", "train.layout={dp: 2, tp: 2, etp: 4}", "transition=slime"}},
        Way{latent, all, 2, {"train.engine=zero1", "train.layout={dp: 1, tp: 4, ep: 2, etp: 2}"}},
        // All experts are on the ranks that share each: nobody else has other ones.
        Way{mixture, all, 2, {"train.engine=ddp", "train.layout={dp: 4, etp: 2}"}},
        Way{mixture, all, 2, {"train.layout={dp: 1, tp: 4, etp: 4}"}},
        Way{packed, all, 2, {"train.layout={dp: 2, tp: 2, sp: true}", "transition=slime"}},
        Way{packed, all, 4, {"train.engine=fsdp1", "train.precision.params=bf16", "train.layout={dp: 2, cp: 2}"}},
        Way{packed, "targets: [c_attn]", 1, {"train.layout={dp: 2, pp: 2}", split, "train.recompute=full"}}}) {
    std::vector<std::string> sets = {way.model, fmt::format("train.lora={{rank: 3, alpha: 6, {}}}", way.targets),
                                     "sync.verify=true", "algorithm.reference=true", "checkpoint_every=1"};
    sets.insert(sets.end(), way.sets.begin(), way.sets.end());
    cases.push_back({fmt::format("{}", fmt::join(sets, " ")), tiny_scenario(4, way.rollout_tp, sets), {}, {}});
  }
  CHECK(run_cases(4, cases, same_lora_plan) == "");
}

TEST_CASE("adapters: after a sync the rollout has the merged matrices, bit for bit") {
  std::vector<Case> cases;
  for (const bool packable : {false, true}) {
    std::vector<std::string> sets = {lora, "steps=3"};
    if (packable) sets.push_back(packable_model());
    const Scenario s = tiny_scenario(1, 1, sets);
    const auto moved = std::make_shared<std::int64_t>(0), packed = std::make_shared<std::int64_t>(0);
    const auto plan = std::make_shared<const Plan>(lower(s).value());
    REQUIRE(packs(*plan) >= packable);
    cases.push_back({packable ? "packed" : "merged",
                     s,
                     {},
                     [=](const CpuBackend& b, std::int32_t, const std::string& phase) -> std::string {
                       if (phase == "sleep_train") return compare_merged(b, s, *plan, *moved, *packed);
                       if (phase != "export") return "";
                       if (packable && *packed == 0) return "no matrix is packed";
                       return *moved == 0 ? "no adapter has changed anything" : "";
                     }});
  }
  CHECK(run_cases(1, cases, [](const Outcome&) { return ""; }) == "");
}

TEST_CASE("adapters: ranks with flat parameters merge to the bits of ranks with shards of rows") {
  const auto seen = std::make_shared<std::vector<std::string>>();  // after each sync, of shards of rows
  const auto hash = [](const CpuBackend& b, const Scenario& s) {
    Hasher h;
    for (const LocalWeight& w : rollout_weights(s.model, 1, 0)) h.add(b.peek("rollout." + w.name));
    return h.hex();
  };
  const auto with = [](const char* engine, const char* wrap) {
    return tiny_scenario(2, 1,
                         {lora, "steps=3", "optimizer.max_grad_norm=0", fmt::format("train.engine={}", engine),
                          fmt::format("train.wrap={}", wrap)});
  };
  const Scenario rows = with("fsdp2", "{policy: layer}");
  std::vector<Case> cases = {{"rows", rows, {}, [=](const CpuBackend& b, std::int32_t, const std::string& phase) {
                                if (phase == "sleep_train") seen->push_back(hash(b, rows));
                                return std::string(phase == "export" && seen->front() == seen->back() ? "not trained"
                                                                                                      : "");
                              }}};
  for (const char* wrap :
       {"{policy: layer}", "{policy: size, min_parameters: 3000}", "{policy: names, names: ['*.1']}"}) {
    const Scenario flat = with("fsdp1", wrap);
    const auto at = std::make_shared<std::size_t>(0);
    cases.push_back({wrap, flat, {}, [=](const CpuBackend& b, std::int32_t, const std::string& phase) -> std::string {
                       if (phase != "sleep_train") return phase == "export" && *at != seen->size() ? "fewer syncs" : "";
                       return hash(b, flat) == seen->at((*at)++) ? "" : "other weights than of shards of rows";
                     }});
  }
  CHECK(run_cases(2, cases, [](const Outcome&) { return ""; }) == "");
}

TEST_CASE("adapters: what wakes up is what went to sleep, frozen and trained") {
  for (const int world : {1, 2}) {
    const Scenario s = tiny_scenario(world, 1, {lora, "steps=3", "algorithm.reference=true"});
    struct Seen {
      std::string frozen, trained, last;
      int compared = 0, changed = 0;
    };
    const auto seen = std::make_shared<Seen>();
    const auto hash = [s, world](const CpuBackend& b, bool adapters) {
      Hasher h;
      for (const ShardedUnit& u : train_units(s.model, 1, world, 0)) {
        if (u.adapters != adapters) continue;
        h.add(b.peek("train." + u.name + ".shard"));
        if (!adapters) continue;
        for (const char* moment : {"exp_avg", "exp_avg_sq"}) h.add(b.peek(fmt::format("train.{}.{}", u.name, moment)));
      }
      return h.hex();
    };
    const Case job{"lora", s, {}, [=](const CpuBackend& b, std::int32_t, const std::string& phase) -> std::string {
                     if (phase == "sleep_optimizer") {
                       const std::string frozen = hash(b, false);
                       if (!seen->frozen.empty() && frozen != seen->frozen) return "what is frozen has changed";
                       seen->frozen = frozen, seen->trained = hash(b, true);
                       seen->changed += !seen->last.empty() && seen->last != seen->trained ? 1 : 0;
                       seen->last = seen->trained;
                     }
                     if (phase == "reference") {
                       ++seen->compared;
                       if (hash(b, false) != seen->frozen || hash(b, true) != seen->trained)
                         return "what woke up is not what went to sleep";
                     }
                     if (phase == "export" && (seen->compared < 2 || seen->changed < 1))
                       return fmt::format("compared {} times, changed {} times", seen->compared, seen->changed);
                     return "";
                   }};
    CHECK(run_cases(world, {job}, [](const Outcome&) { return ""; }) == "");
  }
}

TEST_CASE("adapters: a verified sync finds a matrix without its adapter") {
  const Scenario s = tiny_scenario(2, 2, {lora, "sync.verify=true", "steps=3"});
  const auto forget = [](Plan& plan) {  // the first matrix that is packed with its adapter is packed as it is
    for (Program& program : plan.programs)
      for (Body& body : program.bodies)
        for (Op& op : body.ops)
          if (op.kind == OpKind::lora_merge && op.name.starts_with("merge.")) {
            for (auto& [key, value] : op.attrs)
              if (key == Attr::factor) value = 0.0;
            return;
          }
  };
  CHECK(run_cases(2, {{"forgotten", s, forget, {}, "does not hold the training weights in fp32"}},
                  [](const Outcome&) { return ""; }) == "");
}

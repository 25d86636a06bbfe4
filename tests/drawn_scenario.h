// Scenarios of everything that lowers, at random.
#pragma once
#include <fmt/format.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "layout/sequence.h"
#include "tests/drawn_transition.h"

namespace hotbunk::testing {

inline std::string yaml_bool(bool b) { return b ? "true" : "false"; }

inline std::int64_t in(std::int64_t from, std::int64_t to) { return *rc::gen::inRange<std::int64_t>(from, to + 1); }
inline bool coin() { return *rc::gen::arbitrary<bool>(); }
template <class T>
T one_of(std::vector<T> values) {
  return *rc::gen::elementOf(values);
}

/// Llama, Qwen2 (biases), Qwen3 (head norms), and with experts Mixtral and Qwen3-MoE, tied or not, shapes that divide
/// nothing they need not.
struct DrawnModel {
  std::string text;
  std::int64_t heads = 0, kv_heads = 0, experts = 0;
};
inline DrawnModel draw_model(std::int64_t tp, bool experts, std::int64_t expert_ranks, std::int64_t expert_columns,
                             std::int64_t layers) {
  const auto type =
      experts ? one_of<std::string>({"mixtral", "qwen3_moe"}) : one_of<std::string>({"llama", "qwen2", "qwen3"});
  const std::int64_t heads = tp * in(1, 4);
  std::vector<std::int64_t> kv;
  for (std::int64_t k = 1; k <= heads; ++k)
    if (heads % k == 0 && (k % tp == 0 || tp % k == 0)) kv.push_back(k);
  const std::int64_t kv_heads = one_of(kv);
  std::string routed;
  std::int64_t number = 0;
  if (experts) {
    const std::int64_t each = number = expert_ranks * in(1, expert_ranks > 1 ? 3 : 6);
    routed = fmt::format(", num_local_experts: {}, num_experts_per_tok: {}", each, in(1, each));
    if (type == "qwen3_moe")
      routed +=
          fmt::format(", moe_intermediate_size: {}, norm_topk_prob: {}", expert_columns * in(1, 20), yaml_bool(coin()));
  }
  std::string text = fmt::format(
      "{{model_type: {}, hidden_size: {}, intermediate_size: {}, num_hidden_layers: {}, num_attention_heads: {}, "
      "num_key_value_heads: {}, head_dim: {}, vocab_size: {}, max_position_embeddings: 64, tie_word_embeddings: {}{}}}",
      type, in(3, 40), (type == "mixtral" ? expert_columns : tp) * in(1, 40), layers, heads, kv_heads, 2 * in(1, 6),
      in(3, 150), yaml_bool(coin()), routed);
  return {std::move(text), heads, kv_heads, number};
}

/// FSDP1's units: train.wrap.
inline std::string draw_wrapping() {
  const auto policy = one_of<std::string>({"layer", "size", "size", "names"});
  const std::string names =
      policy == "names" ? one_of<std::string>({"[model.layers.0*]", "['*embed*', '*.self_attn']", "['*']"}) : "[]";
  const auto least = one_of<std::int64_t>({1, 100, 1000, 10'000, 1'000'000});
  return policy == "size" ? fmt::format("{{policy: size, min_parameters: {}}}", least)
                          : fmt::format("{{policy: {}, names: {}}}", policy, names);
}

inline std::string draw_scenario() {
  const auto tp = one_of<std::int64_t>({1, 1, 2, 2, 3, 4, 8}), engines = in(1, tp > 2 ? 2 : 4), world = tp * engines;
  const bool gpu = in(0, 4) == 0;  // chunks of 2 MiB
  const std::int64_t nodes = gpu && world % 2 == 0 && coin() ? 2 : 1;
  const std::string cluster =
      gpu ? fmt::format("{{gpu: h100-sxm-80gb, nodes: {}, gpus_per_node: {}}}", nodes, world / nodes)
          : fmt::format("{{gpu: local-cpu, nodes: 1, gpus_per_node: 1, ranks_per_device: {}, device_memory_mib: {}}}",
                        world, one_of<std::string>({"0.25", "1", "64"}));
  const std::int64_t prompt = in(1, 8), response = in(1, 9), block = in(1, 5), longest = prompt + response;
  const std::int64_t tokens = (longest + in(0, 60) + 23) / 24 * 24;  // of any tp a multiple
  const auto dtype = [] { return one_of<std::string>({"fp32", "bf16"}); };
  const auto state = [] { return in(0, 20) == 0 ? "bf16" : "fp32"; };  // the optimizer's: fp32 is what lowers
  const bool sft = in(0, 6) == 0, reference = coin(), old_logprobs = coin();
  // As often as not hotbunk's order, else any legal one.
  auto offload = one_of<std::string>({"none", "sleep"});
  bool rollout_sleeps = in(0, 3) > 0;
  std::string transition = "hotbunk";
  if (coin()) {
    const auto drawn =
        draw_transition([](std::size_t n) { return static_cast<std::size_t>(in(0, static_cast<std::int64_t>(n) - 1)); },
                        reference, old_logprobs);
    transition = to_text(drawn.order);
    offload = drawn.training_sleeps ? "sleep" : "none", rollout_sleeps = drawn.rollout_sleeps;
  }
  const std::int64_t level = in(1, 2), every = level == 1 || !rollout_sleeps ? in(1, 3) : 1;
  const std::int64_t samples = in(1, 4), mini_batches = coin() ? 1 : samples;
  // What divides over an engine's ranks divides over fewer of them.
  std::vector<std::int64_t> tensor{1, 1};
  for (std::int64_t t = 2; t <= tp; ++t)
    if (tp % t == 0) tensor.push_back(t);
  const std::int64_t train_tp = one_of(tensor), some_layers = in(1, 8);
  std::vector<std::int64_t> stages{1, 1};
  for (std::int64_t p = 2; p <= std::min(some_layers, world / train_tp); ++p)
    if (world / train_tp % p == 0) stages.push_back(p);
  const std::int64_t pp = one_of(stages), data = world / train_tp / pp;
  const std::int64_t vpp = pp > 1 ? one_of<std::int64_t>({1, 1, 2, 3}) : 1, chunks = pp * vpp,
                     layers = std::max(some_layers, chunks);
  const bool experts = in(0, 3) == 0;
  // Any mesh of experts (spec/expert_mesh.h): ranks that share each, and have other ones each, in a block; and blocks.
  const auto divisor_of = [](std::int64_t n) {
    std::vector<std::int64_t> all{n};
    for (std::int64_t k = 1; k < n; ++k)
      if (n % k == 0) all.push_back(k);
    return one_of(all);
  };
  const std::int64_t columns = experts ? divisor_of(train_tp) : train_tp,
                     wholes = experts ? divisor_of(train_tp / columns) : 1, blocks = train_tp / columns / wholes;
  std::vector<std::int64_t> holders{1};  // of other experts each, among the data ranks
  for (std::int64_t k = 2; k <= data; ++k)
    if (experts && data % k == 0 && std::gcd(k, blocks) == 1) holders.push_back(k);
  const std::int64_t spread = one_of(holders);
  const bool over_both = columns < train_tp && (blocks > 1 || spread > 1);
  const std::int64_t parts =
      experts && coin() ? divisor_of(wholes * spread) : 1;  // of ranks with other experts some share each
  const DrawnModel model = draw_model(tp, experts, wholes * spread / parts, tp * parts, layers);
  // An engine's stages, and experts on groups of its ranks.
  std::vector<std::int64_t> engine_stages{1, 1};
  for (std::int64_t p = 2; p <= engines; ++p)
    if (engines % p == 0 && layers % p == 0) engine_stages.push_back(p);
  const std::int64_t rollout_pp = one_of(engine_stages),
                     rollout_ep = experts && coin() ? divisor_of(std::gcd(tp, model.experts)) : 1;
  std::vector<std::int64_t> sharers{1, 1};
  for (std::int64_t u = 2; u <= data; ++u)
    if (data % u == 0 &&
        why_not_ulysses(model.heads / train_tp, std::max<std::int64_t>(1, model.kv_heads / train_tp), u).empty())
      sharers.push_back(u);
  const std::int64_t ulysses = one_of(sharers);
  std::vector<std::int64_t> chunked{1, 1};
  for (std::int64_t c = 2; c <= data / ulysses; ++c)
    if (data / ulysses % c == 0) chunked.push_back(c);
  const std::int64_t cp = one_of(chunked);
  std::vector<std::int64_t> split(static_cast<std::size_t>(chunks), 1);
  for (std::int64_t rest = layers - chunks; rest > 0; --rest) ++split[static_cast<std::size_t>(in(0, chunks - 1))];
  const bool defers = pp > 1 && in(0, 2) == 0;  // weight gradients
  const bool flat = in(0, 2) == 0;              // units
  const auto engine = flat ? std::string("fsdp1") : one_of<std::string>({"fsdp2", "fsdp2", "ddp", "zero1", "zero2"}),
             schedule = defers ? "zero-bubble" : one_of<std::string>({"1f1b", "1f1b", "gpipe", "interleaved"});
  // Training's state on the host: all of it where training never sleeps, or a part of each shard's optimizer.
  if (engine == "fsdp2" && offload == "none" && coin()) offload = "layerwise";
  const auto on_host = engine.starts_with("fsdp") ? "0" : one_of<std::string>({"0", "0", "0.3", "1"});
  const bool sequence = train_tp > 1 && (over_both || coin());
  std::vector<std::int64_t> shard_groups{-1};
  for (std::int64_t g = 1; g <= data; ++g)
    if (data % g == 0 && (g == 1 || g % spread == 0)) shard_groups.push_back(g);
  // Units that few ranks keep among them from forward to backward.
  std::int64_t group = one_of(shard_groups), shared = group == -1 ? data : group;
  // Or all ranks of some of the data ranks' dimensions: what spreads experts is among them.
  std::string over;
  if (engine != "ddp" && in(0, 3) == 0) {
    const std::int64_t outer = data / ulysses / cp;
    const auto [names, ranks] = one_of<std::pair<std::string, std::int64_t>>({{"cp", cp},
                                                                              {"cp, ulysses", cp * ulysses},
                                                                              {"dp", outer},
                                                                              {"ulysses", ulysses},
                                                                              {"dp, cp", outer * cp},
                                                                              {"ulysses, dp", ulysses * outer}});
    if (ranks == 1 || ranks % spread == 0) over = fmt::format(", shard_over: [{}]", names), group = -1, shared = ranks;
  }
  std::vector<std::string> reshards{yaml_bool(true), yaml_bool(false)};
  for (std::int64_t few = 2; few < shared && engine == "fsdp2"; ++few)
    if (shared % (few * spread) == 0) reshards.push_back(std::to_string(few));
  const std::string params = dtype(), grads = params == "bf16" && coin() ? "bf16" : state(), master = state(),
                    moments = state();
  std::string some;  // of what trains: adapters only of what lowers, and where the model is awake for its reference
  const bool lowers = (grads == "fp32" || params == "bf16") && master + moments == "fp32fp32";
  if (in(0, 3) == 0 && transition == "hotbunk" && lowers)
    some =
        fmt::format(", lora: {{rank: {}, targets: {}}}", in(1, 9), coin() ? "[q_proj, v_proj, o_proj]" : "all-linear");
  // Parameters that do not train: whole layers, parts of each, the ends.
  else if (!flat && lowers && in(0, 3) == 0)
    some = fmt::format(", frozen: {}", one_of<std::string>({"[model.embed_tokens.*]", "['*.self_attn.*']",
                                                            "[model.layers.0.*, model.norm.weight]",
                                                            experts ? "['*experts*', '*.input_layernorm.weight']"
                                                                    : "['*.mlp.*', '*.input_layernorm.weight']"}));
  if (spread > 1 && coin()) some += fmt::format(", expert_capacity: {}", one_of<std::string>({"0.4", "1", "1.5"}));
  // Rows of padding: of a part of a rank's vocabulary, of all of some rank's, of most of them.
  const std::string padded =
      in(0, 2) == 0 ? fmt::format(", make_vocab_size_divisible_by: {}", one_of<std::int64_t>({2, 7, 64, 200})) : "";
  std::string text = fmt::format("name: drawn\nmodel: {}\ncluster: {}\n", model.text, cluster);
  text += fmt::format(
      "train: {{engine: {}, layout: {{dp: {}, cp: {}, ulysses: {}, tp: {}, pp: {}, vpp: {}, ep: {}, etp: {}, sp: {}, "
      "fsdp: "
      "{}{}}}, context_exchange: {}, "
      "pipeline_schedule: {}, pipeline_split: [{}], micro_batch_tokens: {}, recompute: {}, "
      "reshard_after_forward: {}, prefetch: {}, in_place_elements: {}, "
      "loss_chunk_tokens: {}, offload: {}, precision: {{params: {}, grads: {}, master: {}, moments: {}}}, wrap: "
      "{}{}{}}}\n",
      engine, data / ulysses / cp, cp, ulysses, train_tp, pp, vpp, wholes * spread / parts,
      experts ? columns * parts : 1, yaml_bool(sequence), group, over,
      one_of<std::string>({"auto", "ring", "all-gather"}), schedule,
      pp > 1 ? fmt::format("{}", fmt::join(split, ", ")) : "", tokens,
      one_of<std::string>({"none", "selective", "full"}), one_of(reshards), in(0, 1),
      one_of<std::int64_t>({0, 1, 100, 400, TrainSpec().in_place_elements}), coin() ? 0 : in(1, tokens + 3), offload,
      params, grads, master, moments, flat ? draw_wrapping() : "{policy: layer}", flat ? "" : some, padded);
  text += fmt::format("optimizer: {{max_grad_norm: {}, cpu_fraction: {}}}\n", in(0, 1), on_host);
  text += fmt::format(
      "rollout: {{engine: hotbunk, layout: {{tp: {}, ep: {}, pp: {}, dp: {}, order: {}}}, dtype: {}, "
      "max_running_requests: {}, "
      "max_prefill_tokens: {}, block_tokens: {}, kv_cache_dtype: {}, kv_cache_tokens: {}, memory_fraction: {}, sleep: "
      "{}, "
      "sleep_level: {}}}\n",
      tp, rollout_ep, rollout_pp, engines / rollout_pp, one_of<std::string>({"contiguous", "strided", "auto"}), dtype(),
      in(1, 20), prompt + in(0, 40), block, one_of<std::string>({"auto", "auto", "fp32", "bf16"}),
      coin() ? 0 : longest + block + in(0, 30), one_of<std::string>({"0.3", "0.9"}), yaml_bool(rollout_sleeps), level);
  text += fmt::format("transition: {}\n", transition);
  text += fmt::format("sync: {{transport: {}, verify: {}, every: {}}}\n", nodes == 1 && coin() ? "ipc" : "collective",
                      yaml_bool(coin()), every);
  text += fmt::format(
      "algorithm: {{name: {}, prompts: {}, samples_per_prompt: {}, mini_batches: {}, reference: {}, "
      "old_logprobs: {}}}\n",
      sft ? "sft" : "grpo", sft ? samples * in(1, 6) : in(1, 9), samples, mini_batches, yaml_bool(reference),
      yaml_bool(old_logprobs));
  text += fmt::format("workload: {{prompt_tokens: {{mean: 1, max: {}}}, response_tokens: {{mean: 1, max: {}}}}}\n",
                      prompt, response);
  return text;
}

}  // namespace hotbunk::testing

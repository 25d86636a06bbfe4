// Rules of what an iteration does: lengths, batches, micro-batches, losses, staleness.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "interop/rule_parts.h"
#include "spec/names.h"

namespace hotbunk::rules {

// ---- lengths

/// A launch says how long prompts and responses may be, never how long they are.
constexpr double assumed_prompt_part = 0.25, assumed_response_part = 1.0 / 3.0;
constexpr double assumed_sft_tokens = 4096;

/// Rotary positions have no table that ends: what trains alone goes beyond what its config says, an engine does not.
static void widen_positions(RuleInput& in, double longest) {
  const auto line = std::ranges::find(in.lines, "model", &ScenarioLine::key);
  if (!in.model || in.model->learned_positions || line == in.lines.end()) return;
  if (longest <= static_cast<double>(in.model->max_position)) return;
  const std::string key = "max_position_embeddings: ", positions = fmt::format("{}{}", key, longest);
  std::string& yaml = line->value;
  if (const std::size_t said = yaml.find(key); said != yaml.npos)  // by the launch, too
    yaml.replace(said, yaml.find_first_of(",}", said) - said, positions);
  else if (yaml.starts_with('{')) yaml.insert(yaml.size() - 1, ", " + positions);
  else yaml = fmt::format("{{base: {}, {}}}", yaml, positions);
  line->comment +=
      fmt::format("; its positions end at {}, the launch's samples at {}", in.model->max_position, longest);
}

/// SFT of a system that rolls out otherwise: samples of any length up to a cap, which are read, not sampled.
static void read_sft_lengths(RuleInput& in) {
  const auto total = in.number("max_total");
  const std::string said = total ? in.said("max_total") : "assumed, the launch has no limit";
  const double longest = std::max(1.0, total.value_or(assumed_sft_tokens) - 1);
  widen_positions(in, longest + 1);
  const std::string whole = "a sample is one sequence: it stands under response_tokens";
  in.set("workload.prompt_tokens.mean", 1, whole);
  in.set("workload.prompt_tokens.max", 1, whole);
  in.set("workload.prompt_tokens.distribution", "fixed", whole);
  in.set("workload.response_tokens.max", longest, said + ", less one token", in.where("max_total"));
  in.set("workload.response_tokens.mean",
         std::max(1.0, std::floor(in.scenario_number("workload.response_tokens.max") * assumed_response_part)),
         "assumed, a third of the longest: --set workload.response_tokens.mean=N");
}

void read_lengths(RuleInput& in) {
  if (const auto whole = in.number("sequence")) {  // pre-training: every sample is as long
    const std::string said = in.said("sequence");
    const SourceLocation where = in.where("sequence");
    in.set("workload.prompt_tokens.mean", 1, said, where);
    in.set("workload.prompt_tokens.max", 1, said, where);
    in.set("workload.prompt_tokens.distribution", "fixed", said, where);
    in.set("workload.response_tokens.mean", *whole - 1, said, where);
    in.set("workload.response_tokens.max", *whole - 1, said, where);
    in.set("workload.response_tokens.distribution", "fixed", said, where);
    return;
  }
  if (in.trains_only()) return read_sft_lengths(in);
  // A release that has one cap has a default for it; a launch that gives both lengths is of one that has none.
  const auto given = [&](const char* role) { return in.find(role) != nullptr && in.find(role)->given; };
  if (given("max_prompt") && given("max_response") && !given("max_total")) in.roles.erase("max_total");
  const auto total = in.number("max_total"), prompt = in.number("max_prompt"), response = in.number("max_response");
  double longest_prompt = prompt.value_or(0), longest_response = response.value_or(0);
  std::string prompt_said = in.said("max_prompt"), response_said = in.said("max_response");
  const bool one_cap = total && !prompt && !response;  // either may have what the other leaves
  if (one_cap) {
    longest_prompt = longest_response = std::max(1.0, *total - 1);
    prompt_said = response_said = in.said("max_total") + ", all but one token";
  } else if (!response && total) {
    longest_response = std::max(1.0, *total - longest_prompt);
    response_said = in.said("max_total") + " less the prompt";
  }
  if (!prompt && !one_cap) {
    longest_prompt = total ? std::max(1.0, *total - longest_response) : 1024;
    prompt_said = total ? in.said("max_total") + " less the response"
                        : "assumed, the launch has no limit: --set workload.prompt_tokens.max=N";
  }
  if (!response && !total) longest_response = 1024, response_said = "assumed, the launch has no limit";
  if (total && longest_prompt + longest_response > *total) {
    longest_prompt = std::min(longest_prompt, *total - 1);
    longest_response = std::min(longest_response, *total - 1);
    in.set("workload.max_tokens", *total, in.said("max_total"), in.where("max_total"));
  }
  in.set("workload.prompt_tokens.max", longest_prompt, prompt_said, in.where("max_prompt"));
  in.set("workload.response_tokens.max", longest_response, response_said, in.where("max_response"));
  const double top_prompt = in.scenario_number("workload.prompt_tokens.max"),
               top_response = in.scenario_number("workload.response_tokens.max");
  const double cap = in.scenario_number("workload.max_tokens");
  in.set("workload.prompt_tokens.mean", std::max(1.0, std::floor(top_prompt * assumed_prompt_part)),
         "assumed, a quarter of the longest: --set workload.prompt_tokens.mean=N");
  in.set("workload.response_tokens.mean",
         std::clamp(std::floor((cap > 0 ? cap - in.scenario_number("workload.prompt_tokens.mean") : top_response) *
                               assumed_response_part),
                    1.0, top_response),
         fmt::format("assumed, a third of {}: --set workload.response_tokens.mean=N",
                     cap > 0 ? "what an assumed prompt leaves" : "the longest"));
  if (const auto prefill = in.number("prefill_tokens"); prefill && *prefill > 0)
    in.set("rollout.max_prefill_tokens", std::max(*prefill, top_prompt),
           *prefill < top_prompt ? in.said("prefill_tokens") + ", longer prompts in chunks" : in.said("prefill_tokens"),
           in.where("prefill_tokens"));
  else in.set("rollout.max_prefill_tokens", std::max(8192.0, top_prompt), "assumed");
}

void write_lengths(RuleOutput& out) {
  const WorkloadSpec& w = out.scenario.workload;
  out.give("sequence", w.prompt_tokens.max + w.response_tokens.max);
  out.give("max_prompt", w.prompt_tokens.max);
  out.give("max_response", w.response_tokens.max);
  out.give("max_total", w.longest());
  out.give("prefill_tokens", static_cast<double>(out.scenario.rollout.max_prefill_tokens));
}

// ---- batches

void read_batches(RuleInput& in) {
  if (in.trains_only()) {
    // What a system says of its rollouts by default is not of SFT.
    if (std::ranges::count(in.lines, "algorithm.samples_per_prompt", &ScenarioLine::key) > 0)
      in.set("algorithm.samples_per_prompt", 1, "SFT has a sample of each");
    const std::string role = in.find("global_batch") != nullptr ? "global_batch" : "mini_batch_samples";
    if (const auto batch = in.number(role); batch && *batch > 0) {
      in.set("algorithm.prompts", *batch, in.said(role), in.where(role));
    } else {
      // One micro-batch of each data rank.
      const double ranks =
          in.scenario_number("cluster.nodes") * in.scenario_number("cluster.gpus_per_node") / train_factor(in);
      in.set("algorithm.prompts", ranks * in.number("micro_sequences").value_or(1),
             fmt::format("{} data ranks x {}", ranks, in.said("micro_sequences")));
    }
    return;
  }
  double prompts = in.number("prompts").value_or(0);
  std::string prompts_said = in.said("prompts");
  const auto mini_prompts = in.number("mini_batch_prompts"), mini_samples = in.number("mini_batch_samples"),
             steps = in.number("mini_batches");
  if (prompts <= 0) {
    // Streamed to training: a step takes so many mini-batches.
    prompts = mini_prompts.value_or(1) * in.number("stream_mini_batches").value_or(1);
    prompts_said = fmt::format("{} x {}", in.said("mini_batch_prompts"), in.said("stream_mini_batches"));
  }
  in.set("algorithm.prompts", prompts, prompts_said, in.where("prompts"));
  const double samples = prompts * in.scenario_number("algorithm.samples_per_prompt");
  double batches = 1;
  std::string said, role;
  if (mini_prompts) {
    role = "mini_batch_prompts";
    batches = prompts / *mini_prompts;
    said = fmt::format("{} prompts / {} prompts of a mini-batch", prompts, *mini_prompts);
  } else if (mini_samples) {
    role = "mini_batch_samples";
    batches = samples / *mini_samples;
    said = fmt::format("{} samples / {} samples of a mini-batch", samples, *mini_samples);
  } else if (steps) {
    role = "mini_batches";
    batches = *steps;
  }
  if (steps && mini_samples && *steps * *mini_samples != samples)
    in.contradict("mini_batches", "two keys say how many optimizer steps there are, and differ",
                  {in.said("mini_batches"), fmt::format("{}: {}", in.said("mini_batch_samples"), said)},
                  "keep one of them");
  if (role.empty()) return;
  const double ours = mini_prompts && batches != std::floor(batches) ? 0 : batches;
  if (ours < 1 || ours != std::floor(ours))
    return in.contradict(
        role, "the batch does not divide into mini-batches", {said + fmt::format(" = {:.3f}", batches), in.said(role)},
        mini_prompts ? "verl's ppo_mini_batch_size counts prompts" : "the batch of a step counts samples, not prompts");
  in.set("algorithm.mini_batches", ours, said.empty() ? in.said(role) : fmt::format("{}: {}", said, in.said(role)),
         in.where(role));
}

void write_batches(RuleOutput& out) {
  const AlgorithmSpec& a = out.scenario.algorithm;
  if (a.name == AlgorithmName::sft) return out.give("global_batch", static_cast<double>(a.prompts));
  out.give("prompts", static_cast<double>(a.prompts));
  const std::int64_t prompts = a.prompts / a.mini_batches, samples = a.prompts * a.samples_per_prompt / a.mini_batches;
  if (a.prompts % a.mini_batches == 0) out.give("mini_batch_prompts", static_cast<double>(prompts));
  out.give("mini_batch_samples", static_cast<double>(samples));
}

// ---- micro-batches

static double longest_of(const RuleInput& in) {
  const double both =
      in.scenario_number("workload.prompt_tokens.max") + in.scenario_number("workload.response_tokens.max");
  const double cap = in.scenario_number("workload.max_tokens");
  return cap > 0 ? std::min(cap, both) : both;
}

static TrainLayout sharing_layout(const RuleInput& in) {
  return {.cp = static_cast<std::int64_t>(in.scenario_number("train.layout.cp")),
          .ulysses = static_cast<std::int64_t>(in.scenario_number("train.layout.ulysses"))};
}

void read_micro_batches(RuleInput& in) {
  const TrainLayout layout = sharing_layout(in);
  const std::int64_t cut = layout.sharers();
  const auto share = [&](double all) {
    return static_cast<double>(layout.share_of(static_cast<std::int64_t>(std::ceil(all))));
  };
  if (in.is_true("packed") || in.is_true("packed_dynamically")) {  // a bin of tokens before cp cuts it
    const std::string role = in.is_true("packed") ? "packed_tokens" : "dynamic_tokens";
    if (const auto tokens = in.number(role))
      return in.set("train.micro_batch_tokens", share(*tokens),
                    in.said(role) + (cut > 1 ? fmt::format(" / {} ranks of a sequence", cut) : ""), in.where(role));
  }
  // What no micro-batch may exceed; or what is collected to, and a longer sample goes alone.
  const std::string tokens_role = in.find("micro_tokens") != nullptr ? "micro_tokens" : "micro_tokens_or_sample";
  const auto tokens = in.number(tokens_role), sequences = in.number("micro_sequences");
  if (in.is_true("dynamic") || (!sequences && tokens && in.find("dynamic") == nullptr)) {
    const double longest = tokens_role == "micro_tokens" ? 0 : share(longest_of(in));
    if (tokens && *tokens < longest)
      return in.set("train.micro_batch_tokens", longest,
                    in.said(tokens_role) + ", and a longer sample is a micro-batch of its own", in.where(tokens_role));
    if (tokens) return in.set("train.micro_batch_tokens", *tokens, in.said(tokens_role), in.where(tokens_role));
    return in.contradict("dynamic", "micro-batches go by tokens, and nothing says how many", {in.said("dynamic")},
                         "give the tokens of a GPU");
  }
  if (!sequences)
    return in.contradict("dynamic", "nothing says how large a micro-batch is", {in.said("dynamic")},
                         "give its sequences, or its tokens with dynamic batches");
  in.set("train.micro_batch_sequences", *sequences, in.said("micro_sequences"), in.where("micro_sequences"));
  in.set("train.micro_batch_tokens", share(longest_of(in) * *sequences),
         fmt::format("{} sequences of at most {} tokens{}", *sequences, longest_of(in),
                     cut > 1 ? fmt::format(" / {} ranks", cut) : ""));
}

void write_micro_batches(RuleOutput& out) {
  const TrainSpec& t = out.scenario.train;
  const std::int64_t cut = t.layout.cp * t.layout.ulysses;
  const bool by_sequences = t.micro_batch_sequences > 0;
  out.give("dynamic", !by_sequences);
  out.give("packed", !by_sequences && t.padding != Padding::batch);
  out.give("packed_dynamically", false);
  if (!by_sequences) {
    out.give("micro_tokens", static_cast<double>(t.micro_batch_tokens));
    out.give("micro_tokens_or_sample", static_cast<double>(t.micro_batch_tokens));
    out.give("packed_tokens", static_cast<double>(t.micro_batch_tokens * cut));
    if (t.padding == Padding::batch)  // by sequences: as many of the longest as the tokens hold
      out.give("micro_sequences", std::max(1.0, std::floor(static_cast<double>(t.micro_batch_tokens * cut) /
                                                           out.scenario.workload.longest())));
    return;
  }
  out.give("micro_sequences", static_cast<double>(t.micro_batch_sequences));
}

// ---- micro-batches of log-prob passes

namespace {

/// How one kind of pass is cut, 0: not said.
struct LogprobCut {
  double tokens = 0, sequences = 0;
  std::string said;
  SourceLocation where;
  /// Tokens that it has room for.
  double room(double longest) const { return tokens > 0 ? tokens : sequences * longest; }
};

/// As the roles with this prefix say it; whether by tokens or by sequences, where they do not say, goes as in training.
LogprobCut logprob_cut(RuleInput& in, const std::string& prefix, const TrainLayout& layout) {
  const auto share = [&](double all) {
    return static_cast<double>(layout.share_of(static_cast<std::int64_t>(std::ceil(all))));
  };
  const auto of = [&](const std::string& role, double tokens, double sequences) {
    return LogprobCut{tokens, sequences, in.said(role), in.where(role)};
  };
  if (in.is_true("packed") || in.is_true("packed_dynamically")) {  // a bin of tokens before cp cuts it
    const std::string role = in.is_true("packed") ? "logprob_packed_tokens" : "logprob_dynamic_tokens";
    const auto tokens = in.number(role);
    return tokens ? of(role, share(*tokens), 0) : LogprobCut{};
  }
  const std::string dynamic = in.find(prefix + "_dynamic") != nullptr ? prefix + "_dynamic" : "dynamic";
  if (in.is_true(dynamic)) {
    if (const auto tokens = in.number(prefix + "_tokens")) return of(prefix + "_tokens", *tokens, 0);
    if (const auto tokens = in.number(prefix + "_tokens_or_sample"))
      return of(prefix + "_tokens_or_sample", std::max(*tokens, share(longest_of(in))), 0);
    return {};
  }
  const auto sequences = in.number(prefix + "_sequences");
  return sequences ? of(prefix + "_sequences", 0, *sequences) : LogprobCut{};
}

}  // namespace

void read_logprob_batches(RuleInput& in) {
  if (in.trains_only()) return;
  const TrainLayout layout = sharing_layout(in);
  const double longest = longest_of(in) / static_cast<double>(layout.sharers());
  LogprobCut cut = logprob_cut(in, "logprob", layout);
  // One batch stands for both passes: the larger, which is what memory has to hold.
  if (const LogprobCut other = logprob_cut(in, "reference", layout); other.room(longest) > cut.room(longest)) {
    const std::string smaller = cut.said;
    cut = other;
    if (!smaller.empty()) cut.said += "; old log-probs take " + smaller;
  }
  const double tokens = in.scenario_number("train.micro_batch_tokens"),
               sequences = in.scenario_number("train.micro_batch_sequences");
  const bool as_training = cut.sequences > 0 ? cut.sequences == sequences : cut.tokens == tokens && sequences == 0;
  if (cut.room(longest) <= 0 || as_training) return;
  if (cut.tokens > 0) in.set("train.logprob_micro_batch_tokens", cut.tokens, cut.said, cut.where);
  else in.set("train.logprob_micro_batch_sequences", cut.sequences, cut.said, cut.where);
}

/// Said whether or not it is training's: by default systems have other batches here.
void write_logprob_batches(RuleOutput& out) {
  const TrainSpec& t = out.scenario.train;
  const bool apart = t.scores_apart();
  const std::int64_t sequences = apart ? t.logprob_micro_batch_sequences : t.micro_batch_sequences;
  const std::int64_t tokens = apart ? t.logprob_micro_batch_tokens : t.micro_batch_tokens;
  const bool by_sequences = sequences > 0;
  for (const std::string prefix : {"logprob", "reference"}) {
    out.give(prefix + "_dynamic", !by_sequences);
    if (by_sequences) {
      out.give(prefix + "_sequences", static_cast<double>(sequences));
      continue;
    }
    out.give(prefix + "_tokens", static_cast<double>(tokens));
    out.give(prefix + "_tokens_or_sample", static_cast<double>(tokens));
    if (prefix == "logprob") out.give("logprob_packed_tokens", static_cast<double>(tokens * t.layout.sharers()));
  }
}

// ---- losses

void read_loss(RuleInput& in) {
  if (in.trains_only()) return;
  const auto clip = in.number("clip"), low = in.number("clip_low"), high = in.number("clip_high");
  if (low || clip) {
    const char* const role = low ? "clip_low" : "clip";
    const double below = low.value_or(clip.value_or(0.2));  // CISPO's 10 is a ratio that has no lower bound
    in.set("algorithm.clip_low", std::min(below, 1.0),
           in.said(role) + (below > 1.0 ? ": ratios are positive, so nothing is clipped below" : ""), in.where(role));
  }
  if (high || clip)
    in.set("algorithm.clip_high", high.value_or(clip.value_or(0.2)), in.said(high ? "clip_high" : "clip"),
           in.where(high ? "clip_high" : "clip"));
  const double coefficient = in.number("kl_loss_coef").value_or(0), reward = in.number("kl_reward_coef").value_or(0);
  const bool switched = in.find("kl_in_loss") != nullptr,
             in_loss = switched ? in.is_true("kl_in_loss") : coefficient > 0;
  const bool in_reward = in.find("kl_in_reward") != nullptr ? in.is_true("kl_in_reward") : reward > 0;
  if (in.find("kl_loss_coef") == nullptr && in.find("kl_reward_coef") == nullptr) return;
  const std::string said = switched ? in.said("kl_in_loss") : in.said("kl_loss_coef");
  in.set("algorithm.reference", in_loss || in_reward ? "true" : "false",
         in_reward && !in_loss ? in.said(in.find("kl_in_reward") != nullptr ? "kl_in_reward" : "kl_reward_coef") : said,
         in.where(switched ? "kl_in_loss" : "kl_loss_coef"));
  in.set("algorithm.kl_coef", in_loss ? coefficient : 0, in_loss ? in.said("kl_loss_coef") : "no KL term in the loss",
         in.where("kl_loss_coef"));
}

void write_loss(RuleOutput& out) {
  const AlgorithmSpec& a = out.scenario.algorithm;
  if (a.clip_low == a.clip_high) out.give("clip", a.clip_low);
  out.give("clip_low", a.clip_low);
  out.give("clip_high", a.clip_high);
  out.give("kl_in_loss", a.reference);
  out.give("kl_in_reward", false);
  out.give("kl_loss_coef", a.kl_coef);
}

// ---- the critic

/// GPUs that a model has for itself; it is taken in the actor's layout and on as many as the actor has.
static void set_apart(RuleInput& in, const std::string& model, const std::string& key) {
  const double own = in.number(model + "_nodes").value_or(1) * in.number(model + "_gpus_per_node").value_or(8),
               actor = in.number("train_nodes").value_or(1) * in.number("train_gpus_per_node").value_or(8);
  std::string said = in.said(model + "_nodes");
  if (own != actor) said += fmt::format(": {} GPUs, taken as {}, the actor's number", own, actor);
  in.set(key, "disaggregated", std::move(said), in.where(model + "_nodes"));
}

static void give_apart(RuleOutput& out, const std::string& model) {
  const auto per_node = static_cast<double>(out.scenario.cluster.gpus_per_node);
  out.give(model + "_nodes", static_cast<double>(out.scenario.train.layout.ranks()) / per_node);
  out.give(model + "_gpus_per_node", per_node);
}

/// OpenRLHF's has nodes of its own unless all models are colocated (train_ppo_ray.py: RayActorGroup of the critic).
void read_critic(RuleInput& in) {
  if (in.find("critic_nodes") == nullptr || in.scenario_text("algorithm.name") != "ppo" || in.is_true("colocated"))
    return;
  set_apart(in, "critic", "algorithm.critic_placement");
}

void write_critic(RuleOutput& out) {
  const AlgorithmSpec& a = out.scenario.algorithm;
  if (a.name == AlgorithmName::ppo && a.critic_placement == PlacementMode::disaggregated) give_apart(out, "critic");
}

// ---- the reference model

/// OpenRLHF's has nodes of its own unless it is colocated with the actor, or all models are.
void read_reference(RuleInput& in) {
  if (in.find("reference_nodes") == nullptr || in.scenario_text("algorithm.reference") != "true" ||
      in.is_true("colocated") || in.is_true("reference_beside_actor"))
    return;
  set_apart(in, "reference", "algorithm.reference_placement");
}

void write_reference(RuleOutput& out) {
  const AlgorithmSpec& a = out.scenario.algorithm;
  if (!a.reference) return;
  const bool apart = a.reference_placement == PlacementMode::disaggregated;
  out.give("reference_beside_actor", !apart);
  give_apart(out, "reference");  // beside the actor the numbers must be the actor's
}

// ---- padding

/// verl (its engines of 2026: to_padded_tensor up to a micro-batch's longest) and OpenRLHF.
void read_padding(RuleInput& in) {
  // NeMo-RL collates an iteration's samples to its longest; packing and dynamic batches (sorted, cut to their own
  // longest) leave little of that (nemo_rl/distributed/batched_data_dict.py).
  if (in.find("packed") != nullptr)
    return in.set("train.padding", in.is_true("packed") || in.is_true("packed_dynamically") ? "none" : "batch",
                  in.said(in.is_true("packed_dynamically") ? "packed_dynamically" : "packed"), in.where("packed"));
  if (in.find("padding_removed") == nullptr) return;
  in.set("train.padding", in.is_true("padding_removed") ? "none" : "micro-batch", in.said("padding_removed"),
         in.where("padding_removed"));
}
void write_padding(RuleOutput& out) { out.give("padding_removed", out.scenario.train.padding == Padding::none); }

// ---- one step off

void read_staleness(RuleInput& in) {
  if (in.is_true("asynchronous"))
    in.set("algorithm.max_staleness", std::max(1.0, in.number("staleness").value_or(1)), in.said("asynchronous"),
           in.where("asynchronous"));
  else if (const auto threshold = in.number("staleness");
           threshold && *threshold > 0 && in.find("asynchronous") == nullptr)
    in.set("algorithm.max_staleness", std::ceil(*threshold), in.said("staleness"), in.where("staleness"));
}

void write_staleness(RuleOutput& out) {
  const std::int64_t lag = out.scenario.algorithm.max_staleness;
  out.give("asynchronous", lag > 0);
  if (lag > 0) out.give("staleness", static_cast<double>(lag));
}

}  // namespace hotbunk::rules

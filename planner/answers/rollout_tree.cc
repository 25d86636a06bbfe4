#include "planner/answers/rollout_tree.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "base/format.h"
#include "planner/answers/nodes.h"

namespace hotbunk {
namespace {

/// How a part is told: its name, what its bytes are, and whether its calls are worth a number.
struct Told {
  StepPart part;
  std::string_view name, bytes, calls;
};

constexpr Told products[] = {{StepPart::qkv, "q, k, v", "weights", ""},
                             {StepPart::output, "attention's output", "weights", ""},
                             {StepPart::latent, "latent projections", "weights", ""},
                             {StepPart::mlp, "mlp", "weights", ""},
                             {StepPart::experts, "experts", "touched weights, router and norms among them,", ""},
                             {StepPart::head, "head", "weights", ""}};
constexpr Told streams[] = {{StepPart::streams, "norms, positions, gates", "activations", ""},
                            {StepPart::sampling, "logits", "fp32", ""}};
constexpr Told between_ranks[] = {{StepPart::reduce, "tp all-reduce", "payload", "all-reduces"},
                                  {StepPart::dispatch, "experts' all-to-all", "payload", "exchanges"},
                                  {StepPart::experts_reduce, "experts' all-reduce", "payload", "all-reduces"},
                                  {StepPart::context, "cp keys, values and sums", "payload", "collectives"},
                                  {StepPart::logits, "logits' gather", "payload", ""},
                                  {StepPart::arrival, "tp gather behind a hop", "payload", "gathers"},
                                  {StepPart::hops, "hops between stages", "", "hops"}};

/// "57 all-reduces, 99.8 MiB of payload a step".
std::string told(const Told& t, const StepParts::Share& s, double steps) {
  std::string out;
  if (!t.calls.empty()) out = fmt::format("{:.4g} {}", s.calls / steps, t.calls);
  if (s.bytes > 0.0) out += fmt::format("{}{} of {}", out.empty() ? "" : ", ", format_bytes(s.bytes / steps), t.bytes);
  return out.empty() ? out : out + " a step";
}

CostNode group_of(std::string name, std::string why, const StepParts& p, std::span<const Told> parts) {
  CostNode out = node_of(std::move(name), std::move(why), 0, 0, {});
  for (const Told& t : parts) {
    const StepParts::Share& s = p.of(t.part);
    if (s.seconds <= 0.0) continue;
    out.seconds += s.seconds;
    out.children.push_back(seconds_of(std::string(t.name), s.seconds, told(t, s, p.steps)));
  }
  return out;
}

/// Why the device waits for the host.
std::string host_note(const StepParts& p, const RlModel& rl, bool decodes) {
  const double launched = p.of(StepPart::launches).calls / std::max(p.steps, 1e-300);
  const EngineProfile& own = rl.engine_profile();
  if (decodes && launched <= 1.5 && own.decode_sequence_seconds.value > 0)
    return "the engine's own time: its scheduler and sampler for every running sequence, its further nodes";
  if (decodes && rl.setting().eager && own.eager_kernel_seconds.value > 0)
    return fmt::format("launches {:.4g} kernels a step, {} each without captured graphs; the engine's own time",
                       launched, format_seconds(own.eager_kernel_seconds.value));
  return fmt::format("launches {:.4g} kernels a step one by one, {} each: what the device waits for them", launched,
                     format_seconds(rl.train().cost().hardware().launch.value));
}

/// What the steps' seconds are spent on; per step and rank.
std::vector<CostNode> parts_of(const StepParts& p, const RlModel& rl, bool decodes) {
  const CostModel& cost = rl.train().cost();
  const double steps = std::max(p.steps, 1e-300);
  const StepParts::Share &attention = p.of(StepPart::attention), &kernels = p.of(StepPart::kernels),
                         &quantize = p.of(StepPart::quantize);
  const auto seconds = [&](StepPart part) { return p.of(part).seconds; };
  return {group_of("products", "with the weights", p, products),
          seconds_of("attention", attention.seconds,
                     fmt::format("{} of keys, values and queries a step", format_bytes(attention.bytes / steps))),
          group_of("streams", "passes over activations", p, streams),
          seconds_of("quantisation", quantize.seconds,
                     fmt::format("{} of activations a step, read wide and written narrow",
                                 format_bytes(quantize.bytes / steps))),
          group_of("between ranks", "nothing hides them", p, between_ranks),
          seconds_of("kernels' start and drain", kernels.seconds,
                     fmt::format("{:.4g} kernels a step, {} each", kernels.calls / steps,
                                 format_seconds(cost.hardware().kernel_overhead.value))),
          seconds_of("host", seconds(StepPart::launches), host_note(p, rl, decodes)),
          seconds_of("ids up, tokens down", seconds(StepPart::feeds), "over the host link, in every step"),
          seconds_of("filling", seconds(StepPart::filling), "the first prompts' way through the other stages"),
          seconds_of("held", seconds(StepPart::held), "beside training no faster than alone")};
}

std::string count_of(double steps, const char* what) {
  return fmt::format("{} {}{}", format_count(std::llround(steps)), what, std::llround(steps) == 1 ? "" : "s");
}
std::string running(const StepParts& p) { return fmt::format("{:.4g}", p.tokens / std::max(p.steps, 1e-300)); }

std::string pace_note(const RlModel& rl, const RolloutPoint& r, double sequences) {
  if (r.pp == 1) return "";
  const DecodeRound d = rl.decode_round(r, sequences, rl.held_tokens());
  return fmt::format(", in {:.3g} micro-batches of {:.3g}, paced by {}", d.micro_batches, d.sequences,
                     d.seconds() > d.latency ? "the slowest stage" : "the way through all stages and back");
}

}  // namespace

std::vector<CostNode> rollout_nodes(const RlModel& rl, const RlPoint& p, const RolloutPrice& r) {
  RolloutParts parts;
  rl.price_rollout(p, &parts);
  const std::string pace = pace_note(rl, p.rollout, r.slots),
                    context = fmt::format("{} tokens of context each", format_count(std::llround(rl.held_tokens())));
  const auto node = [&](std::string name, double seconds, std::string why, const StepParts& of) {
    const bool decodes = name != "prefill";
    return node_of(std::move(name), std::move(why), 0, seconds, parts_of(of, rl, decodes));
  };
  return {node("prefill", r.prefill_seconds,
               fmt::format("{} of {} tokens", count_of(parts.prefill.steps, "step"), running(parts.prefill)),
               parts.prefill),
          node("decode", r.decode_seconds,
               fmt::format("{} of {} sequences, {}{}", count_of(parts.decode.steps, "step"), running(parts.decode),
                           context, pace),
               parts.decode),
          node("tail", r.tail_seconds,
               fmt::format("{} of {} sequences on average, {}: {}, the longest alone at last",
                           count_of(parts.tail.steps, "step"), running(parts.tail), context,
                           r.decode_seconds > 0 ? "no more to admit" : fmt::format("{:.0f} from the start", r.slots)),
               parts.tail),
          seconds_of("exchange", r.exchange_seconds, "every rank learns every sample")};
}

}  // namespace hotbunk

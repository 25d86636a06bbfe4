#include "planner/answers/lint.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/format.h"
#include "base/json.h"
#include "lowering/sample_rows.h"
#include "planner/answers/levers.h"
#include "planner/answers/remedies.h"
#include "planner/search/lacking.h"
#include "spec/names.h"

namespace hotbunk {
namespace {

constexpr std::array all_lint_rules = {
    LintRule{"L01", "a bucket of the weight update that is smaller than the largest tensor",
             "slime's 512 MiB beside an embedding of 152,064 rows: 622 MB (BACKGROUND F7)"},
    LintRule{"L02", "batches that leave ranks of one optimizer step with unequal work",
             "verl's ppo_mini_batch_size counts prompts, others samples"},
    LintRule{"L03", "a transition that wakes the KV cache before the weight update needs the device",
             "verl pull request 729: 10 GB of Qwen2.5-7B saved by waking in stages"},
    LintRule{"L04", "a fit by less than what a sleeping engine leaves behind",
             "slept engines that hold 0.8 to 7 GB (BACKGROUND E2d)"},
    LintRule{"L05", "a micro-batch capacity that no mini-batch fills, or that random lengths overflow",
             "verl's 72B on 32 H800: a budget of 24,000 tokens beside 16,000 of a rank's mini-batch"},
    LintRule{"L06", "logits that take more than what is free",
             "NeMo-RL pull request 687: 4 x 8192 tokens x 151,936 logits"},
    LintRule{"L07", "host memory near or above the node's", "slime issue 1851: Ray kills at 999.9 of 1,007.5 GB"},
    LintRule{"L08", "tensor parallelism that leaves a node", "two all-reduces a layer over the network"},
    LintRule{"L09", "an engine that starts by less than what the next release takes more",
             "vLLM asks at its start for its whole share of the device (BACKGROUND D3)"},
    LintRule{"L10", "what the system's launches cannot say", "scenarios/catalog/frameworks: can"},
    LintRule{"L11", "a KV pool that does not hold the sequences that are sampled together",
             "preempted sequences are computed again: seconds are those without preemption"},
    LintRule{"L12", "keys that change nothing", "a setting of another engine"},
    LintRule{"L13", "a layout that does not fit", "device or host, with what does"},
    LintRule{"L14", "micro-batches that are padded",
             "verl issue 7203: log-probs three times as slow by padded micro-batches"},
    LintRule{"L15", "expandable segments beside an engine that sleeps (of a launch)",
             "vLLM pull requests 14189 and 40812, torch_memory_saver issue 24, OpenRLHF issue 1011"},
};

class Linter {
 public:
  Linter(const ScenarioPricer& s, const Explanation& e) : s_(s), scenario_(s.scenario()), e_(e) {}

  std::vector<Finding> run() {
    lacks();
    batch();
    if (const std::string note = e_.unpriced ? "" : oversized_tensor(s_, e_.point); !note.empty())
      add("L01", LintLevel::note, note, "");
    wake_order();
    tensor_parallel();
    padding();
    for (const std::string& what : without_effect(scenario_, e_.mapped_bytes > 0.0))
      add("L12", LintLevel::note, what, "");
    if (e_.unpriced) {
      std::string what = e_.unpriced->message;
      for (const std::string& note : e_.unpriced->notes) what += "; " + note;
      add("L13", LintLevel::error, what, e_.unpriced->help);
    } else {
      fit();
      load();
      logits();
      host();
      engine();
    }
    std::stable_sort(out_.begin(), out_.end(), [](const Finding& a, const Finding& b) {
      return std::pair(-static_cast<int>(a.level), a.code) < std::pair(-static_cast<int>(b.level), b.code);
    });
    return std::move(out_);
  }

 private:
  void add(const char* code, LintLevel level, std::string what, std::string help) {
    out_.push_back({code, level, std::move(what), std::move(help)});
  }
  bool samples() const { return scenario_.algorithm.name != AlgorithmName::sft; }
  bool shared() const { return samples() && e_.point.placement == PlacementMode::colocated; }

  void lacks() {
    const FrameworkProfile& frame = s_.train().framework();
    for (const Lack& lack : lacking(scenario_, e_.point, frame.can))
      add("L10", LintLevel::error, fmt::format("{}: {} has no {}", lack.key, frame.name, lack.what), frame.can.source);
  }

  /// Samples of one optimizer step over the data ranks.
  void batch() {
    const std::int64_t step = num_samples(scenario_) / std::max<std::int64_t>(1, scenario_.algorithm.mini_batches);
    const std::int64_t dp = std::max<std::int64_t>(1, e_.point.train.dp);
    if (step % dp != 0)
      add("L02", LintLevel::warning,
          fmt::format("{} samples of an optimizer step over {} data ranks: some have {}, others {}", step, dp,
                      step / dp + 1, step / dp),
          "a batch that dp divides");
    if (step < dp)
      add("L02", LintLevel::error,
          fmt::format("{} samples of an optimizer step, {} data ranks: {} have none", step, dp, dp - step),
          "fewer mini-batches, or less dp");
  }

  void wake_order() {
    if (!shared()) return;
    bool kv = false;
    for (const TransitionStep step : e_.point.transition) {
      kv = kv || step == TransitionStep::wake_kv;
      if (step == TransitionStep::sync && kv)
        add("L03", LintLevel::warning, "the KV cache wakes before the weight update, which it does not serve",
            "wake_kv behind sync");
    }
  }

  void padding() {
    const TrainModel& model = s_.train();
    const auto count = static_cast<double>(e_.point.train.micro_batch);
    const double own = static_cast<double>(model.setting().sequence),
                 computed = own + model.padding_tokens(e_.point.train) / count;
    if (model.setting().padded() && computed > 1.05 * own)
      add("L14", LintLevel::warning,
          fmt::format("every sample is computed with the tokens of the longest of {}, {:.0f} where they have {:.0f} on "
                      "average: {:.1f} times the work",
                      scenario_.train.padding == Padding::batch ? "all" : fmt::format("its {:.0f}", count), computed,
                      own, computed / own),
          "train.padding: none");
  }

  void tensor_parallel() {
    const std::int64_t node = scenario_.cluster.ranks_per_node();
    const auto over = [&](const char* key, std::int64_t tp) {
      if (tp > node)
        add("L08", LintLevel::warning,
            fmt::format("{} {} on nodes of {}: two all-reduces a layer cross the network", key, tp, node),
            fmt::format("{} {} at most, and pipeline stages beyond", key, node));
    };
    over("train.layout.tp", e_.point.train.tp);
    if (samples()) over("rollout.layout.tp", e_.point.rollout.tp);
  }

  void fit() {
    if (!e_.price.fits) {
      const bool host = e_.price.host_bytes > e_.host_capacity_bytes;
      add("L13", LintLevel::error,
          host ? fmt::format("host memory: {} of {} for a rank", format_bytes(e_.price.host_bytes),
                             format_bytes(e_.host_capacity_bytes))
               : fmt::format("device memory: {} of {}", format_bytes(e_.price.peak_bytes()),
                             format_bytes(e_.capacity_bytes)),
          e_.remedy);
      return;
    }
    if (e_.verdict.verdict == Verdict::tight && e_.verdict.asleep_bytes > e_.capacity_bytes)
      add("L13", LintLevel::warning,
          fmt::format("it fits, but not with the most that PyTorch keeps of a sleeping trainer: {} of {}",
                      format_bytes(e_.verdict.asleep_bytes), format_bytes(e_.capacity_bytes)),
          "");
    else if (e_.verdict.verdict == Verdict::tight &&
             e_.verdict.reserved_bytes * (1.0 + e_.verdict.error) > e_.capacity_bytes)
      add("L13", LintLevel::warning,
          fmt::format("it fits, but not with the error of such predictions: {} reserved x {:.2f} of {}",
                      format_bytes(e_.verdict.reserved_bytes), 1.0 + e_.verdict.error, format_bytes(e_.capacity_bytes)),
          "");
    constexpr double residue = 0.8e9;  // the least that slept engines were seen to hold
    const double left = e_.capacity_bytes - e_.price.train_bytes;
    if (shared() && scenario_.rollout.sleep && s_.rl().setting().engine != RolloutEngine::hotbunk && left < residue)
      add("L04", LintLevel::warning,
          fmt::format("training leaves {} free; a sleeping {} keeps 0.8 to 7 GB", format_bytes(left),
                      name_of(s_.rl().setting().engine)),
          "");
  }

  void load() {
    if (!e_.verdict.random) return;
    const MicroBatchLoad& load = e_.verdict.load;
    // Where no micro-batch fits, L13 says what lacks.
    if (load.overflows > 1.05 && load.fitting > 0)
      add("L05", load.overflows > 50 ? LintLevel::error : LintLevel::warning,
          fmt::format("{:.0f} of 1,000 iterations have a micro-batch of more than {:.0f} tokens, what fits",
                      load.overflows, load.fitting),
          e_.remedy);
    const double capacity = static_cast<double>(scenario_.train.micro_batch_tokens) *
                            static_cast<double>(e_.point.train.cp * e_.point.train.ulysses);
    if (load.charged < 0.9 * capacity)
      add("L05", LintLevel::note,
          scenario_.train.micro_batch_sequences > 0
              ? fmt::format("{} sequences of the longest would be {:.0f} tokens, a micro-batch has {:.0f} at most in "
                            "1,000 iterations: memory is charged for these",
                            scenario_.train.micro_batch_sequences, capacity, load.charged)
              : fmt::format("train.micro_batch_tokens allows {:.0f} tokens, a mini-batch brings {:.0f} at most: memory "
                            "is charged for these",
                            capacity, load.charged),
          "");
  }

  void logits() {
    const TrainModel& model = s_.train();
    const PeakBytes parts = model.peak_bytes(e_.point.train, model.layers(e_.point.train), e_.point.train.pp - 1);
    const double bytes = parts[static_cast<std::size_t>(PeakTensor::logits)];
    if (const double free = e_.capacity_bytes - e_.price.train_bytes + bytes;
        bytes > 0.5 * free && free > 0)  // else L13 says what lacks
      add("L06", LintLevel::warning,
          fmt::format("logits and their copies take {} of the {} that training's other bytes leave",
                      format_bytes(bytes), format_bytes(free)),
          s_.train().framework().can.loss_chunks
              ? fmt::format("train.loss_chunk_tokens: {}",
                            std::max<std::int64_t>(1, scenario_.train.micro_batch_tokens / 8))
              : half("", scenario_.train.micro_batch_tokens, scenario_.train.micro_batch_sequences));
    scored_logits();
  }

  /// "key: value" of half a micro-batch, of training ("") or of log-prob passes ("logprob_"), in sequences where it is
  /// said in them (above 0); "" where less than the longest sample would be left, which is no micro-batch (E217).
  std::string half(std::string_view pass, std::int64_t tokens, std::int64_t sequences) const {
    const auto longest = static_cast<std::int64_t>(std::ceil(scenario_.workload.longest()));
    const std::int64_t least = scenario_.train.layout.share_of(longest);
    if (sequences > 1) return fmt::format("train.{}micro_batch_sequences: {}", pass, sequences / 2);
    if (sequences == 0 && std::max(tokens / 2, least) < tokens)
      return fmt::format("train.{}micro_batch_tokens: {}", pass, std::max(tokens / 2, least));
    return "";
  }

  /// Of log-prob passes that have micro-batches of their own.
  void scored_logits() {
    const RlSetting& set = s_.rl().setting();
    if (!samples() || (set.logprob_tokens <= 0.0 && set.logprob_sequences <= 0.0)) return;
    const TrainPoint& p = e_.point.train;
    const RlModel::Scoring by = s_.rl().scoring(p, s_.train().layers(p));
    const TrainSide train = s_.rl().parts(e_.point).train;
    const double bytes = by.model->scored_logits_bytes(by.layers);
    const double free = e_.capacity_bytes - train.persistent() - std::max(train.reference_work, train.old_work) + bytes;
    if (bytes <= 0.5 * free) return;
    const TrainSpec& t = scenario_.train;
    const bool by_tokens = set.logprob_tokens > 0.0;
    add("L06", LintLevel::warning,
        fmt::format("logits of a log-prob batch and their copies take {} of the {} that its other bytes leave",
                    format_bytes(bytes), format_bytes(free)),
        half("logprob_", t.logprob_micro_batch_tokens, by_tokens ? 0 : t.logprob_micro_batch_sequences));
  }

  void host() {
    if (e_.host_capacity_bytes <= 0 || !e_.price.fits) return;
    const double share = e_.price.host_bytes / e_.host_capacity_bytes;
    const auto ranks = static_cast<double>(scenario_.cluster.ranks_per_node());
    if (share > 0.8 || e_.verdict.host_bytes > e_.verdict.host_limit_bytes)
      add("L07", LintLevel::warning,
          fmt::format("{} of a node's {} are pinned or in use; Ray kills at 95 %",
                      format_bytes(ranks * e_.price.host_bytes), format_bytes(ranks * e_.host_capacity_bytes)),
          "");
  }

  void engine() {
    if (!samples()) return;
    const RlSetting& set = s_.rl().setting();
    const RolloutPoint& r = e_.point.rollout;
    const RolloutPrice price = s_.rl().price_rollout(e_.point);
    const double each = std::ceil(set.prompts * set.samples / static_cast<double>(r.engines));
    if (const double wanted = std::min(each, set.max_running); price.slots < 0.999 * wanted)
      add("L11", LintLevel::warning,
          fmt::format("the pool holds {:.0f} of the {:.0f} sequences that an engine would decode together ({} a token, "
                      "{:.0f} tokens each on average)",
                      price.slots, wanted, format_bytes(price.kv_bytes_per_token), s_.rl().held_tokens()),
          "");
    if (set.engine != RolloutEngine::vllm) return;
    const double overhead = s_.train().framework().context_bytes.value + s_.rl().communicators(r);
    const double spare = set.device_bytes * (1.0 - r.memory_fraction) - overhead;
    constexpr double grows = 1.0 * 1024 * 1024 * 1024;
    if (spare < grows)
      add("L09", LintLevel::warning,
          fmt::format("vLLM's share leaves {} beside its context and communicators", format_bytes(spare)),
          "a smaller rollout.memory_fraction before an upgrade");
  }

  const ScenarioPricer& s_;
  const Scenario& scenario_;
  const Explanation& e_;
  std::vector<Finding> out_;
};

}  // namespace

std::string_view name_of(LintLevel l) {
  constexpr std::string_view names[] = {"note", "warning", "error"};
  return names[static_cast<std::size_t>(l)];
}

std::span<const LintRule> lint_rules() { return all_lint_rules; }

std::vector<Finding> lint(const ScenarioPricer& s, const Explanation& e) { return Linter(s, e).run(); }
std::vector<Finding> lint(const ScenarioPricer& s) { return lint(s, explain(s)); }

std::vector<Finding> lint_launch(const ScenarioPricer& s, const LaunchHabits& habits) {
  std::vector<Finding> out;
  const Scenario& scenario = s.scenario();
  const bool sleeps = scenario.algorithm.name != AlgorithmName::sft && scenario.placement == PlacementMode::colocated &&
                      scenario.rollout.sleep;
  if (!habits.expandable.empty() && sleeps)
    out.push_back(
        {"L15", LintLevel::warning,
         fmt::format("{}: {}", habits.expandable,
                     scenario.rollout.engine == RolloutEngine::vllm
                         ? "vLLM that sleeps ends at its start before April 2026, and switches it off for its "
                           "own pool since"
                         : "torch_memory_saver cannot put such memory to sleep"),
         "leave it out of the engine's environment"});
  return out;
}

std::vector<Finding> lint_beside(const ScenarioPricer& s, const Explanation& e) {
  std::vector<Finding> out = lint(s, e);
  std::erase_if(out, [](const Finding& f) { return f.level == LintLevel::note || f.code == "L13"; });
  return out;
}

std::string render_beside(const std::vector<Finding>& findings) {
  std::string out;
  for (const Finding& f : findings)
    out += fmt::format("note: {} {}: {}{}{}\n", f.code, name_of(f.level), f.what, f.help.empty() ? "" : "; ", f.help);
  return out;
}

std::string render(const std::vector<Finding>& findings) {
  std::string out;
  for (const Finding& f : findings) {
    out += fmt::format("{} {}: {}\n", f.code, name_of(f.level), f.what);
    if (!f.help.empty()) out += fmt::format("    {}\n", f.help);
  }
  const auto count = [&](LintLevel l) { return std::ranges::count(findings, l, &Finding::level); };
  out += findings.empty() ? "Nothing found\n"
                          : fmt::format("{} errors, {} warnings, {} notes\n", count(LintLevel::error),
                                        count(LintLevel::warning), count(LintLevel::note));
  return out;
}

std::string to_json(const std::string& scenario, const std::vector<Finding>& findings) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Finding& f : findings) {
    const auto rule = std::ranges::find_if(all_lint_rules, [&](const LintRule& r) { return f.code == r.code; });
    list.push_back(
        {{"code", f.code}, {"rule", rule->title}, {"level", name_of(f.level)}, {"what", f.what}, {"help", f.help}});
  }
  return json_text(nlohmann::ordered_json{{"schema", "hotbunk.lint/1"}, {"scenario", scenario}, {"findings", list}}, 1);
}

}  // namespace hotbunk

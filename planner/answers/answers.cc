#include "planner/answers/answers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "base/json.h"
#include "lowering/sample_rows.h"
#include "planner/answers/choices.h"
#include "planner/answers/levers.h"
#include "planner/answers/plan_answer.h"
#include "planner/answers/plan_shifts.h"
#include "planner/answers/plan_time_tree.h"
#include "planner/answers/remedies.h"
#include "planner/answers/stated_error.h"
#include "planner/answers/trees.h"
#include "spec/names.h"
#include "spec/shard_over.h"

namespace hotbunk {

ScenarioPricer::ScenarioPricer(const Scenario& s, const CostModel& cost, const FrameworkProfile& frame)
    : scenario_(s), train_(s.model, train_setting_of(s), cost, frame), rl_(train_, rl_setting_of(s)) {}

Result<std::unique_ptr<ScenarioPricer>> ScenarioPricer::make(const Scenario& s,
                                                             const std::filesystem::path& catalogue) {
  auto hardware = hardware_for(s, catalogue);
  if (!hardware) return fail(hardware.error());
  auto frame = framework_named(s.profile, catalogue);
  if (!frame) return fail(frame.error());
  if (s.optimizer.cpu_fraction > 0 && !frame->separate_master &&
      (s.train.engine == TrainEngine::fsdp1 || s.train.engine == TrainEngine::fsdp2))
    return fail({.code = "E214",
                 .message = fmt::format("optimizer.cpu_fraction: {} under profile {} keeps its optimizer where its "
                                        "shards are",
                                        name_of(s.train.engine), s.profile),
                 .where = {},
                 .notes = {fmt::format("cpu_fraction {}", s.optimizer.cpu_fraction)},
                 .help = "set train.offload to layerwise for FSDP's own, or train.engine to megatron or zero1"});
  frame->recompute_modules = recompute_modules(s.train.recompute_modules, frame->recompute_modules);
  // A process on a CPU has no device context and no graphs, and its communicators are its own threads.
  if (s.cluster.gpu.is_cpu)
    frame->context_bytes = frame->communicator_bytes = frame->vllm.graph_bytes =
        frame->sglang.graph_bytes = {0.0, "none on a CPU"};
  return std::unique_ptr<ScenarioPricer>(new ScenarioPricer(s, CostModel(std::move(*hardware), s.cluster), *frame));
}

RlPoint ScenarioPricer::point() const {
  const RlPoint given = rl_point_of(scenario_);
  if (!given.samples()) return given;
  std::vector<RlPoint> choices = {given};
  if (scenario_.rollout.layout.order == RankOrder::automatic) {
    choices.push_back(given);
    choices.back().rollout.strided = !given.rollout.strided;
  }
  if (scenario_.transition == "auto" && scenario_.placement == PlacementMode::colocated) {
    const bool sleeps = scenario_.train.offload == Offload::sleep;
    const std::size_t orders = choices.size();
    const bool rollout = scenario_.rollout.sleep;
    // What sleeps is for the order to say, as long as something does.
    std::vector<TransitionOrder> orders_of;
    const std::vector<std::pair<bool, bool>> parts =
        sleeps ? std::vector<std::pair<bool, bool>>{{true, true}, {false, true}, {true, false}}
               : std::vector<std::pair<bool, bool>>{{false, false}};
    for (const auto& [params, optimizer] : parts)
      for (const TransitionOrder& o : transition_choices(scenario_, train_.framework().can, params, optimizer))
        orders_of.push_back(o);
    for (const TransitionOrder& o : undominated(std::move(orders_of), rollout && scenario_.rollout.sleep_level == 1))
      for (std::size_t i = 0; i < orders; ++i) {
        choices.push_back(choices[i]);
        choices.back().transition = o;
      }
  }
  // The fastest that fits, else the leanest; between equals the leaner, then the first.
  const auto better = [&](const RlPrice& a, const RlPrice& b) {
    if (a.fits != b.fits) return a.fits;
    const auto key = [](const RlPrice& x) {
      return x.fits ? std::pair(x.iteration_seconds, x.peak_bytes()) : std::pair(x.peak_bytes(), x.iteration_seconds);
    };
    return key(a) < key(b);
  };
  RlPoint best = given;
  for (const RlPoint& p : choices)
    if (better(price(p), price(best))) best = p;
  return best;
}

RlPrice ScenarioPricer::price(const RlPoint& p) const {
  if (scenario_.algorithm.name != AlgorithmName::sft) return rl_.price(p);
  const TrainPrice t = train_.price(p.train);
  RlPrice out;
  if (!t.valid) return out;
  out.iteration_seconds = out.seconds[static_cast<std::size_t>(RlPhase::train)] =
      t.step_seconds * rl_.setting().mini_batches;
  out.train_bytes = t.total_bytes();
  out.host_bytes = t.host_bytes;
  out.fits = out.train_bytes <= rl_.setting().device_bytes && out.host_bytes <= rl_.setting().host_bytes;
  return out;
}

double ScenarioPricer::tokens() const {
  if (scenario_.algorithm.name != AlgorithmName::sft) return rl_.tokens();
  return static_cast<double>(num_samples(scenario_)) * (rl_.setting().prompt_tokens + rl_.setting().response_tokens);
}

namespace {

void render_node(const CostNode& n, int depth, bool bytes, double whole, std::string& out) {
  const double value = bytes ? n.bytes : n.seconds;
  out +=
      fmt::format("{:<{}}{:<{}} {:>12} {:>6.1f} %  {}\n", "", 2 * depth, n.name, 34 - 2 * depth,
                  bytes ? format_bytes(value) : format_seconds(value), whole > 0 ? 100.0 * value / whole : 0.0, n.why);
  for (const CostNode& c : n.children) render_node(c, depth + 1, bytes, whole, out);
}

/// Why what fits may not: what is reserved, the error, and how often a micro-batch is too long.
std::string verdict_lines(const FitVerdict& v, double capacity) {
  std::string out;
  if (v.verdict == Verdict::tight && v.asleep_bytes > capacity)
    out +=
        fmt::format("  tight: beside the engine PyTorch may keep so much of the sleeping trainer that it is {} of {}\n",
                    format_bytes(v.asleep_bytes), format_bytes(capacity));
  if (v.verdict == Verdict::tight && v.host_bytes > v.host_limit_bytes)
    out +=
        fmt::format("  tight: of the host, with the error and a rank's part of what a node holds besides, {} of {}\n",
                    format_bytes(v.host_bytes), format_bytes(v.host_limit_bytes));
  if (v.verdict == Verdict::tight && v.reserved_bytes * (1.0 + v.error) > capacity)
    out +=
        fmt::format("  tight: with what PyTorch reserves {}, with the error of such predictions ({:.0f} %) {} of {}\n",
                    format_bytes(v.reserved_bytes), 100.0 * v.error, format_bytes(v.reserved_bytes * (1.0 + v.error)),
                    format_bytes(capacity));
  // Samples of one length say nothing of how often.
  if (!v.random || v.load.charged <= v.load.mean * (1.0 + 1e-9)) return out;
  const MicroBatchLoad& load = v.load;
  out += fmt::format("  train: a micro-batch has {:.0f} tokens on average, {:.0f} at most in 1,000 iterations; ",
                     load.mean, load.charged);
  if (load.fitting <= 0) return out + "not even the average fits\n";
  const std::string often = load.overflows < 1e-3    ? "fewer than 0.001"
                            : load.overflows > 999.9 ? "all"
                                                     : fmt::format("{:.3g}", load.overflows);
  out += fmt::format("{:.0f} fit: {} of 1,000 iterations overflow\n", load.fitting, often);
  return out;
}

/// "  device: live 55.29 GiB, mapped 79.64 GiB of 79.19 GiB for a rank: it does not fit, 0.45 GiB too much". Where
/// there is a plan its mapped bytes decide, which include the gaps between buffers.
std::string fit_line(const char* where, double live, double mapped, double capacity) {
  const double over = std::max(live, mapped) - capacity;
  return fmt::format("  {}: {}{} of {} for a rank: {}\n", where,
                     mapped > 0 ? fmt::format("live {}, mapped ", format_bytes(live)) : std::string(),
                     format_bytes(mapped > 0 ? mapped : live), format_bytes(capacity),
                     over > 0 ? fmt::format("it does not fit, {} too much", format_bytes(over)) : "it fits");
}

nlohmann::ordered_json node_json(const CostNode& n, bool bytes) {
  nlohmann::ordered_json j = {{"name", n.name}};
  if (bytes) j["bytes"] = n.bytes;
  else j["seconds"] = n.seconds;
  if (!n.why.empty()) j["why"] = n.why;
  for (const CostNode& c : n.children) j["children"].push_back(node_json(c, bytes));
  return j;
}

}  // namespace

Standing standing_of(const ScenarioPricer& s) {
  const Scenario& scenario = s.scenario();
  Standing out{s.train().cost().hardware().source, s.train().cost().hardware().calibrated};
  const std::string gemm = scenario.train.precision.gemm == "params" ? "" : scenario.train.precision.gemm;
  const std::string rollout = scenario.algorithm.name == AlgorithmName::sft ? "" : scenario.rollout.quantization;
  for (const std::string& format : {gemm, rollout == gemm ? "" : rollout}) {
    if (format.empty()) continue;
    out.hardware += fmt::format("; {} products from the datasheet, uncalibrated", format);
    out.calibrated = false;
  }
  if (scenario.algorithm.name != AlgorithmName::sft && scenario.rollout.kv_cache_dtype == "fp8") {
    out.hardware += "; the KV cache in fp8 by its bytes alone, uncalibrated";
    out.calibrated = false;
  }
  return out;
}

namespace {

void add_remedy(const ScenarioPricer& s, Explanation& out) {
  const auto found = remedy_of(s, out.point);
  out.remedy = remedy_text(found);
  if (found) out.remedy_flags = found->flags;
}

}  // namespace

Explanation explain(const ScenarioPricer& s) {
  Explanation out;
  out.scenario = s.scenario().name;
  const Standing standing = standing_of(s);
  out.hardware = standing.hardware, out.calibrated = standing.calibrated;
  out.framework = s.train().framework().name;
  out.seconds_error = iteration_error(s.scenario());
  out.point = s.point();
  const RlPrice estimate = out.price = s.price(out.point);
  out.capacity_bytes = s.rl().setting().device_bytes;
  out.host_capacity_bytes = s.rl().setting().host_bytes;
  out.unpriced = s.why_unpriced(out.point);
  if (out.unpriced) {
    if (out.unpriced->code == "E301" && out.unpriced->help.empty()) add_remedy(s, out);
    if (out.unpriced->help.empty()) out.unpriced->help = out.remedy;
    out.remedy = out.unpriced->help;
    return out;
  }
  if (out.framework != "hotbunk") out.torch = replay_step(s.train(), out.point.train);
  const TrainPrice train = s.train().price(out.point.train);
  out.memory = memory_tree(s, out.point, out.price, train);
  const auto plan = plan_answer_of(s.scenario());
  if (plan) {
    const ShiftsSeconds shifts = shifts_seconds(plan->shifts, s.train().cost());
    const PlanSeconds seconds = plan_seconds(s.scenario(), out.point.train, plan->plan, s.train().cost());
    use_plan_bytes(s.scenario(), plan->memory, out.price);
    use_plan_seconds(ComputedSeconds::of(s.scenario(), seconds), shifts, out.price);
    out.time = plan_time_tree(s.scenario(), out.point.train, plan->plan, seconds, shifts, out.price);
    out.mapped_bytes = static_cast<double>(plan->memory.device.whole.mapped_bytes);
    out.host_mapped_bytes = static_cast<double>(plan->memory.host.whole.mapped_bytes);
    out.memory = plan_memory_tree(plan->memory);
    out.micro_batch = micro_batch_streams(s.scenario(), out.point, *plan, s.train().cost());
  }
  out.verdict = verdict_of(s, out.point, out.price, out.torch, plan.has_value());
  if (!plan) out.host = host_tree(s, out.point, out.price);
  if (!out.price.fits) add_remedy(s, out);
  if (!plan) out.time = time_tree(s, out.point, out.price, train);
  for (CostNode& phase : out.time.children)
    for (std::size_t i = 0; i < num_rl_phases; ++i)
      if (phase.name == name_of(static_cast<RlPhase>(i)))
        phase.why += (phase.why.empty() ? "" : "; ") +
                     error_text(phase_error(static_cast<RlPhase>(i), s.scenario().cluster.gpu.name,
                                            s.train().framework().name, out.point.sync));
  const bool sampled = s.scenario().algorithm.name != AlgorithmName::sft;
  out.links =
      plan ? plan_link_bytes(s.scenario(), *plan, expected_runs(s.scenario(), out.point), s.train().cost())
           : link_bytes(s.rl(), out.point, train, sampled ? s.rl().price_rollout(out.point) : RolloutPrice{}, sampled);
  out.notes = without_effect(s.scenario(), plan.has_value());
  if (s.rl().setting().critic_apart)
    out.notes.push_back(fmt::format("the critic has {} GPUs of its own beside these {}, and works while the actor does",
                                    out.point.train.ranks(), out.point.gpus()));
  if (s.rl().setting().reference_apart)
    out.notes.push_back(
        fmt::format("the reference model has {} GPUs of its own beside these {}, and works while the actor does",
                    out.point.train.ranks(), out.point.gpus()));
  if (std::string note = oversized_tensor(s, out.point); !note.empty()) out.notes.push_back(std::move(note));
  if (auto lever = one_step_off(s, out.point)) out.levers.push_back(std::move(*lever));
  for (const auto& [name, point] : neighbours(s, out.point)) {
    RlPrice q = s.price(point);
    if (q.iteration_seconds <= 0) continue;
    // Plans compare with plans; a layout that is not lowered as its estimate with this one's estimate.
    const bool lowered = plan && use_plan_at(s.scenario(), point, s.train().cost(), q);
    const RlPrice& from = lowered ? out.price : estimate;
    const double seconds = q.iteration_seconds - from.iteration_seconds, bytes = q.peak_bytes() - from.peak_bytes();
    out.levers.push_back({name, point, seconds, bytes, q.fits, flags_of(s.scenario(), point)});
  }
  std::stable_sort(out.levers.begin(), out.levers.end(),
                   [](const Lever& a, const Lever& b) { return a.seconds < b.seconds; });
  return out;
}

std::string render(const Explanation& e) {
  std::string out = fmt::format("{}: {}\nhardware: {}\nframework profile: {}\n\n", e.scenario, describe(e.point),
                                e.hardware, e.framework);
  if (e.unpriced) {
    out += fmt::format("This layout has no price: {}\n", e.unpriced->message);
    for (const std::string& note : e.unpriced->notes) out += fmt::format("  {}\n", note);
    if (!e.remedy.empty()) out += fmt::format("  to fit: {}\n", e.remedy);
    return out;
  }
  out += "Where the bytes are\n";
  render_node(e.memory, 0, true, e.capacity_bytes, out);
  out += fit_line("device", e.price.peak_bytes(), e.mapped_bytes, e.capacity_bytes);
  out += verdict_lines(e.verdict, e.capacity_bytes);
  if (e.price.host_bytes > 0) out += fit_line("host", e.price.host_bytes, e.host_mapped_bytes, e.host_capacity_bytes);
  for (const CostNode& part : e.host.children) render_node(part, 2, true, e.host_capacity_bytes, out);
  if (!e.remedy.empty()) out += fmt::format("  to fit: {}\n", e.remedy);
  if (e.torch.reserved > 0)
    out += fmt::format("  train, as PyTorch shows it: allocated {}, reserved {} ({:.1f} % of it in no tensor)\n",
                       format_bytes(static_cast<double>(e.torch.allocated)),
                       format_bytes(static_cast<double>(e.torch.reserved)), 100.0 * e.torch.unused());
  const auto& error = e.seconds_error;
  out += fmt::format("\nWhere the seconds go ({}{}; of each phase behind it)\n", error_text(error),
                     error ? ": " + error->source : ": no measured iteration of profile " + e.framework);
  render_node(e.time, 0, false, e.time.seconds, out);
  if (e.micro_batch) {
    const MicroBatchStreams& m = *e.micro_batch;
    out += fmt::format("\nA micro-batch of training on a rank's streams ({} sequences, {} tokens; from the plan)\n",
                       m.sequences, m.tokens);
    for (std::size_t i = 0; i < m.streams.size(); ++i)
      if (const double seconds = m.seconds.busy[i]; seconds > 0)
        out += fmt::format("  {:<36} {:>10}  {:>5.1f} %\n", m.streams[i].name, format_seconds(seconds),
                           100.0 * seconds / m.seconds.elapsed);
    out += fmt::format("  {:<36} {:>10}  of which the busiest stream waits {}\n", "from first to last",
                       format_seconds(m.seconds.elapsed), format_seconds(m.exposed()));
  }
  out += "\nWhat a rank sends in an iteration (GB)\n";
  out += fmt::format("  {:<14} {:<28} {:>12} {:>12} {:>12}\n", "phase", "what", "inside node", "network", "host link");
  for (const LinkUse& u : e.links)
    out += fmt::format("  {:<14} {:<28} {:>12.3f} {:>12.3f} {:>12.3f}\n", name_of(u.phase), u.what, u.node_wire / 1e9,
                       u.network_wire / 1e9, u.host_bytes / 1e9);
  for (const std::string& note : e.notes) out += "\nNote: " + note + "\n";
  out += "\nWhat one change buys (iteration, fullest moment)\n";
  for (const Lever& l : e.levers)
    out += fmt::format("  {:<44} {:>+10.3f} s  {:>+9.2f} GiB  {}\n", l.change, l.seconds, l.bytes / gib,
                       l.fits ? "fits" : "does not fit");
  return out;
}

std::string to_json(const Explanation& e) {
  nlohmann::ordered_json doc = {{"schema", "hotbunk.explain/1"},
                                {"scenario", e.scenario},
                                {"layout", describe(e.point)},
                                {"hardware", e.hardware},
                                {"calibrated", e.calibrated},
                                {"framework", e.framework},
                                {"priced", !e.unpriced},
                                {"fits", e.price.fits},
                                {"capacity_bytes", e.capacity_bytes},
                                {"host_capacity_bytes", e.host_capacity_bytes}};
  if (e.unpriced) {
    doc["why_not"] = {{"code", e.unpriced->code}, {"message", e.unpriced->message}, {"notes", e.unpriced->notes}};
    return json_text(doc, 2);
  }
  doc["verdict"] = name_of(e.verdict.verdict);
  doc["memory_error"] = e.verdict.error;
  doc["reserved_bytes"] = e.verdict.reserved_bytes;
  if (e.verdict.host_limit_bytes > 0)
    doc.update({{"host_in_use_bytes", e.verdict.host_bytes}, {"host_limit_bytes", e.verdict.host_limit_bytes}});
  if (e.verdict.asleep_bytes > 0) doc["asleep_bytes"] = e.verdict.asleep_bytes;
  if (e.verdict.random)
    doc["load"] = {{"mean_tokens", e.verdict.load.mean},
                   {"charged_tokens", e.verdict.load.charged},
                   {"fitting_tokens", e.verdict.load.fitting},
                   {"overflows_per_1000_iterations", e.verdict.load.overflows}};
  doc.update({{"iteration_seconds", e.price.iteration_seconds},
              {"peak_bytes", e.price.peak_bytes()},
              {"host_bytes", e.price.host_bytes},
              {"host", node_json(e.host, true)},
              {"remedy", e.remedy},
              {"memory", node_json(e.memory, true)},
              {"time", node_json(e.time, false)}});
  if (e.mapped_bytes > 0) doc.update({{"mapped_bytes", e.mapped_bytes}, {"host_mapped_bytes", e.host_mapped_bytes}});
  if (e.torch.reserved > 0)
    doc["torch"] = {{"allocated_bytes", e.torch.allocated}, {"reserved_bytes", e.torch.reserved}};
  if (e.micro_batch) {
    const MicroBatchStreams& m = *e.micro_batch;
    doc["micro_batch"] = {{"sequences", m.sequences}, {"tokens", m.tokens}, {"seconds", m.seconds.elapsed}};
    for (std::size_t i = 0; i < m.streams.size(); ++i)
      if (m.seconds.busy[i] > 0) doc["micro_batch"]["streams"][m.streams[i].name] = m.seconds.busy[i];
  }
  doc["links"] = nlohmann::ordered_json::array();
  for (const LinkUse& u : e.links)
    doc["links"].push_back({{"phase", name_of(u.phase)},
                            {"what", u.what},
                            {"node_wire_bytes", u.node_wire},
                            {"network_wire_bytes", u.network_wire},
                            {"host_bytes", u.host_bytes}});
  doc["notes"] = e.notes;
  doc["levers"] = nlohmann::ordered_json::array();
  for (const Lever& l : e.levers)
    doc["levers"].push_back(
        {{"change", l.change}, {"seconds", l.seconds}, {"bytes", l.bytes}, {"fits", l.fits}, {"flags", l.flags}});
  return json_text(doc, 2);
}

std::string describe(const TrainPoint& p) {
  std::string out = fmt::format("dp {}", p.dp);
  const auto axis = [&](const char* name, std::int64_t value) {
    if (value > 1) out += fmt::format(" {} {}", name, value);
  };
  axis("tp", p.tp), axis("pp", p.pp), axis("vpp", p.vpp), axis("cp", p.cp), axis("ulysses", p.ulysses),
      axis("ep", p.ep), axis("etp", p.etp);
  constexpr const char* sharding[] = {"replicated", "zero1", "zero2", "zero3", "fsdp"};
  constexpr const char* recompute[] = {"none", "selective", "full"};
  const std::string shards_of_axes = p.shard_over.some() ? " of " + listed_shard_over(text_of(p.shard_over)) : "";
  const bool groups = p.sharding != Sharding::replicated && p.shard_ranks() < p.data_ranks();
  out += fmt::format("{} {}{}{}, {} x {} sequences, recompute {}{}", p.sp ? " sp" : "",
                     sharding[static_cast<std::size_t>(p.sharding)],
                     groups ? fmt::format(" over {}{}", p.shard_ranks(), shards_of_axes) : "",
                     !p.reshard_after_forward ? " gathered once"
                     : p.reshard_ranks > 0    ? fmt::format(" kept among {}", p.reshard_ranks)
                                              : "",
                     p.micro_batches, p.micro_batch, recompute[static_cast<std::size_t>(p.recompute)],
                     p.streams_from_host() ? ", layer-wise offload"
                     : p.optimizer_on_host ? ", optimizer on the host"
                                           : "");
  if (p.schedule != PipelineSchedule::one_f_one_b) out += fmt::format(", {}", name_of(p.schedule));
  if (p.optimizer != OptimizerName::adamw) out += fmt::format(", {}", name_of(p.optimizer));
  return out;
}

std::string describe(const RlPoint& p) {
  if (!p.samples()) return "train " + describe(p.train);
  const bool buckets = p.sync != SyncMechanism::shard_to_shard && p.sync != SyncMechanism::point_to_point &&
                       mode_of(p.sync) != SyncMode::stream;
  const auto axis = [](const char* name, std::int64_t value) {
    return value > 1 ? fmt::format(" {} {}", name, value) : std::string();
  };
  return fmt::format("train {} | rollout {} engine{} of tp {}{}{}{}{}, memory {:.2f} | {} | sync {}{}",
                     describe(p.train), p.rollout.engines, p.rollout.engines == 1 ? "" : "s", p.rollout.tp,
                     axis("ep", p.rollout.ep), axis("attention dp", p.rollout.attention_dp),
                     axis("cp", p.rollout.cp) + axis("pp", p.rollout.pp), p.rollout.strided ? " strided" : "",
                     p.rollout.memory_fraction,
                     p.placement == PlacementMode::disaggregated ? "disaggregated"
                     : p.sleeps()                                ? "order " + to_text(p.transition)
                                                                 : "stays awake",
                     name_of(p.sync), buckets ? " " + format_bytes(p.bucket_bytes) : "");
}

}  // namespace hotbunk

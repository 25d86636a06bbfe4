// P3 over whole GRPO iterations: whatever layout trains and whatever layout serves, the samples of one rank are drawn,
// and the rewards, losses and gradients are its own; every sync is verified, every byte and call as simulated.
// HOTBUNK_LAYOUT_ROUNDS draws more pairs of layouts, HOTBUNK_LAYOUT_SEED others.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <stdexcept>

#include "backends/cpu_gloo/cpu_backend.h"
#include "base/file.h"
#include "base/json.h"
#include "layout/rollout_weights.h"
#include "layout/scenario_layout.h"
#include "lowering/lower.h"
#include "rl/sft_driver.h"
#include "runtime/gather.h"
#include "spec/names.h"
#include "spec/validate.h"
#include "tests/numerics/drawn_layout.h"
#include "tests/numerics/golden_checks.h"
#include "tests/numerics/training_run.h"
#include "tests/numerics/value.h"
#include "tests/runtime/ranks.h"
#include "tests/simulated.h"
#include "trace/merge.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

using Json = nlohmann::json;
constexpr std::int64_t prompt_tokens = 5, response_tokens = 6, longest = prompt_tokens + response_tokens;

/// Two iterations of two optimizer steps each, with a reference and verified syncs. Rewards of any tokens differ, so
/// that gradients of random weights do not vanish.
void make_grpo(Scenario& s) {
  s.algorithm = {};
  s.algorithm.prompts = 4, s.algorithm.samples_per_prompt = 3, s.algorithm.mini_batches = 2;
  s.algorithm.reference = true, s.algorithm.kl_coef = 0.1;
  s.workload.prompt_tokens = {prompt_tokens, prompt_tokens};
  s.workload.response_tokens = {4, response_tokens};
  s.task = {.name = "parity", .digits = 3, .data = ""};
  s.rollout.dtype = DType::f32;
  s.rollout.max_running_requests = 8, s.rollout.max_prefill_tokens = 24, s.rollout.block_tokens = 4;
  s.sync.verify = true, s.sync.bucket_bytes = 8192;
  s.steps = 2, s.checkpoint_every = 0;
  // What a scenario's file would not say, and what FSDP1 does not do: gradients of several micro-batches on the host.
  if (s.train.wrap.policy != WrapPolicy::size) s.train.wrap.min_parameters = WrapSpec().min_parameters;
  if (s.train.wrap.policy == WrapPolicy::names) s.train.wrap.names = "*attn*";
  if (s.train.engine == TrainEngine::fsdp1) s.train.offload = Offload::sleep;
}

/// Why that is no layout, or none that executes; "" where it is one.
std::string why_not(const Scenario& s) {
  if (const Diagnostics found = validate(s, [](std::string_view) { return SourceLocation(); }); !found.empty())
    return render(found);
  if (const auto reasons = unsupported_to_execute(s); !reasons.empty()) return reasons.front();
  for (const EngineCut& cut : engine_cuts(s))
    if (const std::string reason = why_not_rollout_tp(s.model, cut); !reason.empty()) return reason;
  return "";
}

/// How the ranks serve: any engines that this model can have. Throws std::runtime_error where none was found.
Scenario draw_engines(const Scenario& trained, std::mt19937_64& random) {
  std::string reason;
  const auto number = [&](std::uint64_t below) { return static_cast<std::int64_t>(random() % below); };
  const auto divisor_of = [&](std::int64_t n) {
    std::vector<std::int64_t> all;
    for (std::int64_t k = 1; k <= n; ++k)
      if (n % k == 0) all.push_back(k);
    return all[static_cast<std::size_t>(number(all.size()))];
  };
  for (int attempt = 0; attempt < 60; ++attempt) {
    Scenario s = trained;
    RolloutLayout& r = s.rollout.layout;
    std::int64_t ranks = s.train.layout.ranks();
    r.tp = divisor_of(ranks), ranks /= r.tp;
    if (number(2) == 0) r.pp = divisor_of(ranks), ranks /= r.pp;
    if (number(3) == 0) r.cp = divisor_of(ranks), ranks /= r.cp;
    r.dp = ranks;
    if (s.model.moe) r.ep = divisor_of(r.tp);
    if (number(3) == 0) r.attention_dp = divisor_of(r.tp);
    r.order = number(2) == 0 ? RankOrder::contiguous : RankOrder::strided;
    s.rollout.max_running_requests = (1 + number(6)) * r.attention_dp;
    s.rollout.block_tokens = 1 + number(6);
    s.rollout.kv_cache_tokens =
        number(2) == 0 ? 0 : (longest + s.rollout.block_tokens * r.cp + number(40)) * r.attention_dp;
    s.rollout.max_prefill_tokens = longest + number(30);
    s.rollout.sleep = number(2) == 0, s.rollout.sleep_level = 1 + number(2);
    s.sync.transport = number(2) == 0 ? SyncTransport::ipc : SyncTransport::collective;
    if (reason = why_not(s); reason.empty()) return s;
  }
  throw std::runtime_error("no engines were found: " + reason);
}

/// What a run gave: tokens by step and sample, figures by step, and the first difference from the simulation.
struct GrpoResult {
  Json tokens, figures;
  std::string unlike_plan;
};

void run_rank(const Plan& plan, const Scenario& s, CpuWorld& world, const std::filesystem::path& folder) {
  Json result{{"tokens", Json::object()}, {"figures", Json::array()}};
  std::vector<SampleLengths> lengths;
  std::unique_ptr<TrainingDriver> driver;
  DriverOptions options;
  options.on_samples = [&](std::int32_t, const SampleLengths& of_step) { lengths.push_back(of_step); };
  options.on_step = [&](const StepMetrics& m) {
    result["figures"].push_back(m.values);
    if (world.rank() > 0) return;
    for (const SampleRecord& sample : driver->sample_records(
             m.step, 0, static_cast<std::size_t>(s.algorithm.prompts * s.algorithm.samples_per_prompt)))
      result["tokens"][fmt::format("step {} sample {:02}", m.step, sample.sample)] = sample.sequence.tokens;
  };
  driver = value(make_training_driver(plan, s, options));
  CpuOptions cpu;
  cpu.poison = cpu.check_finite = true;
  CpuBackend backend(world, *driver, cpu);
  const Trace own =
      value(execute(plan, backend, *driver,
                    {.steps = static_cast<std::int32_t>(s.steps), .local_ranks = {static_cast<Rank>(world.rank())}}));
  const auto parts = gather_strings_at_first(world, "trace", pack_trace(own));
  if (world.rank() > 0) return;
  result["unlike_plan"] = testing::unlike_simulated(plan, s, std::move(lengths), merge_traces(parts));
  if (auto written = write_file_atomic(folder / "result.json", json_text(result)); !written)
    throw std::runtime_error(render(written.error()));
}

GrpoResult run_grpo(const Scenario& s) {
  const TemporaryFolder folder;
  const Plan plan = value(lower(s));
  const LaunchResult ended =
      with_ranks(plan.num_ranks(), [&](CpuWorld& world) { run_rank(plan, s, world, folder.path()); });
  if (ended.exit_code != 0) throw std::runtime_error(ended.message);
  const Json found = json_from<Json>(value(read_file(folder.path() / "result.json")));
  return {found.at("tokens"), found.at("figures"), found.at("unlike_plan")};
}

const GrpoResult& by_one_rank(const Golden& g) {
  static std::map<std::string, GrpoResult> known;
  if (const auto found = known.find(g.folder); found != known.end()) return found->second;
  Scenario s = golden_scenario(g, 1);
  make_grpo(s);
  s.train.micro_batch_tokens = 4 * longest;
  REQUIRE(why_not(s) == "");
  return known.emplace(g.folder, run_grpo(s)).first->second;
}

std::string engines_of(const Scenario& s) {
  const RolloutLayout& r = s.rollout.layout;
  return fmt::format(
      "engines tp {} pp {} cp {} dp {} ep {} attention_dp {} {} slots {} block {} pool {} sleep {} {} {}", r.tp, r.pp,
      r.cp, r.dp, r.ep, r.attention_dp, name_of(r.order), s.rollout.max_running_requests, s.rollout.block_tokens,
      s.rollout.kv_cache_tokens, s.rollout.sleep, s.rollout.sleep_level, name_of(s.sync.transport));
}

}  // namespace

TEST_CASE("GRPO in drawn pairs of a training and a rollout layout samples, rewards and learns what one rank does") {
  std::vector<std::string> goldens = golden_models();
  std::ranges::copy(golden_router_losses(), std::back_inserter(goldens));
  std::set<std::string> ways;  // of engines
  std::uint64_t several = 0, pairs = 0;
  for_drawn_layouts(goldens, 40, 9'000'011, [&](const Golden& g, const Scenario& drawn) {
    std::mt19937_64 random(static_cast<std::uint64_t>(drawn.train.layout.ranks()) * 31 + ++pairs);
    Scenario trained = drawn;
    make_grpo(trained);
    trained.train.micro_batch_tokens = trained.train.layout.share_of(pairs % 2 == 0 ? longest : 3 * longest);
    CAPTURE(g.folder);
    const Scenario s = draw_engines(trained, random);
    CAPTURE(engines_of(s));
    const RolloutLayout& r = s.rollout.layout;
    for (const auto& [name, size] : {std::pair("tp", r.tp),
                                     {"pp", r.pp},
                                     {"cp", r.cp},
                                     {"dp", r.dp},
                                     {"ep", r.ep},
                                     {"attention dp", r.attention_dp}})
      if (size > 1) ways.insert(name);
    several += s.train.layout.ranks() > 1 ? 1 : 0;
    const GrpoResult found = run_grpo(s);
    const GrpoResult& one = by_one_rank(g);
    CHECK(found.unlike_plan == "");
    CHECK(one.tokens.size() == 2 * 12);
    for (const auto& [sample, tokens] : one.tokens.items()) {
      CAPTURE(sample);
      CHECK(found.tokens.at(sample) == tokens);
    }
    REQUIRE(found.figures.size() == one.figures.size());
    for (std::size_t step = 0; step < one.figures.size(); ++step)
      for (const char* figure : {"reward", "loss", "actor/grad_norm", "actor/kl_loss", "actor/pg_loss"}) {
        CAPTURE(step, figure);
        CHECK(found.figures[step].at(figure).get<double>() ==
              Approx(one.figures[step].at(figure).get<double>()).epsilon(2e-4).margin(2e-6));
      }
    CHECK(one.figures[0].at("actor/grad_norm").get<double>() > 0.01);
  });
  CHECK(2 * several > pairs);
  CHECK(ways.size() == 6);
}

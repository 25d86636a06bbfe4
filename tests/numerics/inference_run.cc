#include "tests/numerics/inference_run.h"

#include <nlohmann/json.hpp>
#include <stdexcept>

#include "backends/cpu_gloo/cpu_backend.h"
#include "base/file.h"
#include "base/json.h"
#include "lowering/lower.h"
#include "tests/numerics/training_run.h"
#include "tests/numerics/value.h"
#include "tests/runtime/ranks.h"

namespace hotbunk::test {
namespace {

Generated run(const Plan& plan, const Scenario& s, CpuWorld& world, std::vector<TokenSequence> sequences) {
  const auto driver = value(InferenceDriver::create(plan, s, std::move(sequences)));
  CpuOptions cpu;
  cpu.poison = cpu.check_finite = true;
  CpuBackend backend(world, *driver, cpu);
  value(execute(plan, backend, *driver, {.steps = 1, .local_ranks = {static_cast<Rank>(world.rank())}}));
  return {driver->sequences(), driver->statistics().preemptions, driver->statistics().prefill_steps};
}

}  // namespace

std::vector<float> Generated::logps() const {
  std::vector<float> out;
  for (const TokenSequence& s : sequences) out.insert(out.end(), s.rollout_logps.begin(), s.rollout_logps.end());
  return out;
}

std::vector<std::vector<std::int32_t>> Generated::new_tokens() const {
  std::vector<std::vector<std::int32_t>> out;
  for (const TokenSequence& s : sequences) out.emplace_back(s.tokens.begin() + s.prompt_tokens, s.tokens.end());
  return out;
}

std::vector<TokenSequence> prompts_of(const std::vector<std::vector<std::int32_t>>& prompts) {
  std::vector<TokenSequence> out;
  for (const auto& p : prompts) out.push_back({p, static_cast<std::int64_t>(p.size()), {}});
  return out;
}

Generated generate(const Scenario& s, const std::vector<TokenSequence>& prompts) {
  const Plan plan = value(lower(s, Purpose::generate));
  if (plan.num_ranks() == 1) {
    CpuWorld world;
    return run(plan, s, world, prompts);
  }
  const TemporaryFolder folder;
  const auto file = folder.path() / "generated.json";
  const LaunchResult ended = with_ranks(plan.num_ranks(), [&](CpuWorld& world) {
    const Generated mine = run(plan, s, world, prompts);
    if (world.rank() > 0) return;
    const nlohmann::json json = {mine.new_tokens(), mine.logps()};
    if (auto written = write_file_atomic(file, json_text(json)); !written)
      throw std::runtime_error(render(written.error()));
  });
  if (ended.exit_code != 0) throw std::runtime_error(ended.message);
  const auto json = json_from<nlohmann::json>(value(read_file(file)));
  const auto logps = json[1].get<std::vector<float>>();
  Generated out{prompts};
  auto at = logps.begin();
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    TokenSequence& sequence = out.sequences[i];
    const auto tokens = json[0][i].get<std::vector<std::int32_t>>();
    sequence.tokens.insert(sequence.tokens.end(), tokens.begin(), tokens.end());
    sequence.rollout_logps.assign(at, at + static_cast<std::ptrdiff_t>(tokens.size()));
    at += static_cast<std::ptrdiff_t>(tokens.size());
  }
  return out;
}

std::vector<float> score(const ModelSpec& model, std::vector<TokenSequence> sequences) {
  const Scenario s = score_scenario(model, sequences, DType::f32);
  const Plan plan = value(lower(s, Purpose::score));
  CpuWorld world;
  return run(plan, s, world, std::move(sequences)).logps();
}

}  // namespace hotbunk::test

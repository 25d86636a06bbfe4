#include "cli/run_outputs.h"

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "base/json.h"
#include "trace/kept_steps.h"

namespace hotbunk {
namespace {

constexpr std::int32_t first_hashes = 16;  // steps from 1 on whose tensors are listed each

/// Whether a step's line lists every tensor: many lines of a large model are long, and the digest holds all of them.
bool lists_tensors(std::int32_t step, std::int64_t steps) {
  return step <= first_hashes || step == steps || step % KeptSteps{}.distance(static_cast<std::int32_t>(steps)) == 0;
}

}  // namespace

Status RunOutputs::open(const RunFolder& folder) {
  const bool verifies = job_.scenario.sync.verify && job_.plan.phase_index("sync") >= 0;
  const std::tuple<bool, std::filesystem::path, std::optional<StepLines>*> files[] = {
      {true, folder.metrics(), &metrics_},
      {true, folder.lengths(), &lengths_},
      {verifies, folder.sync_hashes(), &hashes_},
      {options_.samples_every != 0, folder.samples(), &samples_}};
  for (const auto& [wanted, path, file] : files) {
    if (!wanted) continue;
    if (auto s = bring_earlier(path); !s) return s;
    auto lines =
        options_.after_step > 0 ? StepLines::continue_after(path, options_.after_step) : StepLines::create(path);
    if (!lines) return fail(std::move(lines.error()));
    file->emplace(std::move(*lines));
  }
  if (hashes_ && !hashes_->last().empty()) digest_ = json_from<nlohmann::json>(hashes_->last()).value("digest", "");
  return {};
}

Status RunOutputs::bring_earlier(const std::filesystem::path& path) const {
  std::error_code ec;
  const std::filesystem::path from = options_.earlier ? options_.earlier->root / path.filename() : path;
  if (!std::filesystem::exists(from, ec) || std::filesystem::equivalent(from, path, ec)) return {};
  std::filesystem::copy_file(from, path, std::filesystem::copy_options::overwrite_existing, ec);
  if (!ec) return {};
  return fail(Diagnostic{.code = "E103",
                         .message = fmt::format("cannot copy {}: {}", from.string(), ec.message()),
                         .where = {path.string()},
                         .notes = {},
                         .help = "check the folder, its permissions and the free space"});
}

void RunOutputs::observe(const std::shared_ptr<RunOutputs>& self, DriverOptions& driver) {
  driver.on_step = [self](const StepMetrics& m) { self->figures_ = m; };
  driver.on_samples = [self](std::int32_t, const SampleLengths& lengths) { self->sample_lengths_ = lengths; };
  driver.on_sync = [self](std::int32_t, const TensorHashes& tensors) { self->tensors_ = tensors; };
}

Status RunOutputs::write_sync(std::int32_t step) {
  if (!hashes_ || !tensors_) return {};
  const TensorHashes tensors = *std::exchange(tensors_, std::nullopt);
  digest_ = chained_digest(digest_, tensors);
  return hashes_->add(
      sync_line(step, job_.scenario.rollout.dtype, digest_, tensors, lists_tensors(step, job_.scenario.steps)));
}

Status RunOutputs::write_samples(std::int32_t step, TrainingDriver& driver) {
  if (!samples_ || samples_full_ || !writes_samples(step, job_.scenario.steps, options_.samples_every)) return {};
  for (const SampleRecord& record : driver.sample_records(step, 0, samples_of_a_step)) {
    const std::string line = sample_line(step, record);
    samples_full_ = samples_->bytes() + static_cast<std::int64_t>(line.size()) > most_sample_bytes;
    if (samples_full_) {
      std::fprintf(stderr, "samples.jsonl is full (%lld MiB) at step %d: no more samples are written\n",
                   static_cast<long long>(most_sample_bytes >> 20), step);
      return {};
    }
    if (Status s = samples_->add(line); !s) return s;
  }
  return {};
}

Status RunOutputs::step_ended(std::int32_t step, RankBackend& backend, TrainingDriver& driver) {
  const std::vector<PhaseSpan> stays = backend.stays(step);
  const RankMemory memory = backend.memory_so_far();
  const StepFigures figures{figures_, stays, memory.device};
  // What refers to a step is there before the line that says the step is done.
  if (Status s = lengths_->add(lengths_line(step, sample_lengths_)); !s) return s;
  if (Status s = write_sync(step); !s) return s;
  if (Status s = write_samples(step, driver); !s) return s;
  if (Status s = metrics_->add(metrics_line(job_.plan, job_.scenario, figures)); !s) return s;
  if (options_.on_step) options_.on_step(figures);
  return {};
}

}  // namespace hotbunk

#include "tests/numerics/training_run.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "backends/cpu_gloo/cpu_backend.h"
#include "base/file.h"
#include "base/json.h"
#include "graph/slots.h"
#include "graph/verify.h"
#include "layout/train_weights.h"
#include "lowering/lower.h"
#include "rl/adapter.h"
#include "rl/sft_driver.h"
#include "tests/blocks.h"
#include "tests/numerics/value.h"
#include "tests/runtime/ranks.h"

namespace hotbunk::test {
namespace {

constexpr std::int32_t golden_steps = 5;

Op probe(const std::string& name, const Tensor& t) {
  Op op;
  op.kind = OpKind::fetch;
  // On the stream of the op that wrote the tensor: no event is needed, and nothing overwrites it before.
  op.stream = streams::compute;
  op.name = "probe." + name;
  op.inputs = {t};
  op.attrs.emplace_back(Attr::slot, static_cast<std::int64_t>(Slot::logps));
  return op;
}

/// Plans are data: fetches of the logits, the log-probs and, before the norm is taken, of the gradient shards.
void add_probes(Plan& plan) {
  const auto train = static_cast<std::size_t>(plan.phase_index("train"));
  for (Program& program : plan.programs)
    for (Block& block : program.phases[train]) {
      test::EditedOps edited(program, block);
      std::vector<Op> ops;
      for (const Op& op : edited) {
        if (op.kind == OpKind::sum_squares) {
          const std::string& buffer = program.buffers[static_cast<std::size_t>(op.inputs[0].buffer)].name;
          ops.push_back(probe(buffer, op.inputs[0]));
        }
        ops.push_back(op);
        if (op.kind == OpKind::log_prob)
          ops.insert(ops.end(), {probe("logits", op.inputs[0]), probe("logps", op.outputs[0])});
      }
      edited.assign(ops.begin(), ops.end());
    }
  const auto faults = verify(plan);
  if (!faults.empty()) throw std::runtime_error("a plan with probes does not verify: " + faults.front());
}

/// Takes the probes of the first step; everything else is the inner driver's.
class ProbingDriver final : public Driver {
 public:
  explicit ProbingDriver(Driver& inner) : inner_(inner) {}
  std::map<std::string, std::vector<float>> taken;

  std::optional<Args> next(Rank r, std::int32_t step, std::int16_t phase) override {
    return inner_.next(r, step, phase);
  }
  void feed(Rank r, const BoundOp& op, const Args& args, std::span<std::byte> d) override {
    inner_.feed(r, op, args, d);
  }
  void fetch(Rank r, const BoundOp& op, const Args& args, std::span<const std::byte> source) override {
    const std::string name = op.name();
    if (!name.starts_with("probe.")) return inner_.fetch(r, op, args, source);
    if (args.step > 1) return;
    auto& values = taken[name.substr(6)];
    const std::size_t before = values.size();
    values.resize(before + source.size() / sizeof(float));
    if (!source.empty()) std::memcpy(values.data() + before, source.data(), source.size());
  }
  void completed(Rank r, const Args& args, std::int16_t phase) override { inner_.completed(r, args, phase); }
  Status step_ended(std::int32_t step) override { return inner_.step_ended(step); }
  bool wants_results() const override { return true; }
  void report(Trace& trace) const override { inner_.report(trace); }

 private:
  Driver& inner_;
};

/// The units' gradient shards (of one rank: whole) by tensor of the model's file; rows without a prediction taken out
/// of the log-probs.
std::map<std::string, std::vector<float>> by_parameter(const Golden& g, std::map<std::string, std::vector<float>> raw) {
  std::map<std::string, std::vector<float>> out;
  std::map<std::string, StoredParameter> stored_in_file;
  for (const ParamSpec& p : trained_parameters(g.model)) stored_in_file.emplace(p.name, stored_trained(g.model, p));
  for (const ShardedUnit& unit : train_units(g.model, 1, 1, 0)) {
    if (g.model.lora.on() && !unit.adapters) continue;
    const auto& grad = raw.at("train." + unit.name + ".grad");
    for (const UnitParam& p : unit.params) {
      const StoredParameter& at = stored_in_file.at(p.parameter);
      auto& tensor = out["grad." + at.tensor];
      std::int64_t elements = 1;
      for (const std::int64_t extent : at.shape) elements *= extent;
      tensor.resize(static_cast<std::size_t>(elements));
      for (std::int64_t i = 0; i < p.elements(); ++i)
        tensor[static_cast<std::size_t>(at.element(i))] = grad[static_cast<std::size_t>(p.shard_offset + i)];
    }
  }
  out["logits"] = std::move(raw.at("logits"));
  const auto& logps = raw.at("logps");
  std::size_t row = 0;
  for (const TokenSequence& s : g.sequences) {
    out["logps"].insert(out["logps"].end(), logps.begin() + static_cast<std::ptrdiff_t>(row),
                        logps.begin() + static_cast<std::ptrdiff_t>(row + s.tokens.size() - 1));
    row += s.tokens.size();
  }
  return out;
}

/// One rank's whole run; rank 0 leaves metrics.json and checkpoints in the folder.
std::map<std::string, std::vector<float>> run_rank(const Plan& plan, const Scenario& s, CpuWorld& world,
                                                   const std::filesystem::path& folder,
                                                   const std::optional<SavedCheckpoint>& from = {}) {
  nlohmann::json metrics;
  DriverOptions options;
  options.checkpoints = folder, options.resume = from;
  options.on_step = [&](const StepMetrics& m) {
    metrics["losses"].push_back(m.values.at("loss"));
    metrics["grad_norms"].push_back(m.values.at("actor/grad_norm"));
  };
  const auto driver = value(SftDriver::create(plan, s, options));
  ProbingDriver probing(*driver);
  CpuOptions cpu;
  cpu.poison = cpu.check_finite = true;
  CpuBackend backend(world, probing, cpu);
  value(execute(plan, backend, probing,
                {.steps = static_cast<std::int32_t>(s.steps),
                 .local_ranks = {static_cast<Rank>(world.rank())},
                 .first_step = from ? static_cast<std::int32_t>(from->state.step) + 1 : 1}));
  if (world.rank() == 0)
    if (auto written = write_file_atomic(folder / "metrics.json", json_text(metrics)); !written)
      throw std::runtime_error(render(written.error()));
  return probing.taken;
}

}  // namespace

TemporaryFolder::TemporaryFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "hotbunk-numerics-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp " + pattern);
  path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

Scenario golden_scenario(const Golden& g, std::int64_t ranks) {
  Scenario s;
  s.name = "golden";
  s.model = g.model;
  s.cluster.gpu.is_cpu = true;
  s.cluster.gpus_per_node = ranks;
  s.cluster.device_memory_bytes = std::int64_t{64} << 20;
  s.cluster.host_memory_bytes = std::int64_t{1} << 30;
  s.train.layout.dp = ranks;
  s.train.precision.params = DType::f32;
  s.train.micro_batch_tokens = g.num_tokens();
  s.optimizer = g.optimizer;
  s.algorithm.name = AlgorithmName::sft;
  s.algorithm.prompts = static_cast<std::int64_t>(g.sequences.size());
  s.steps = golden_steps + 1;
  s.checkpoint_every = golden_steps;
  return s;
}

namespace {

void write_data(const Golden& g, const std::string& path) {
  std::string lines;
  for (const TokenSequence& sequence : g.sequences) lines += json_text(nlohmann::json(sequence.tokens)) + "\n";
  if (auto written = write_file_atomic(path, lines); !written) throw std::runtime_error(render(written.error()));
}

void run_ranks(const Plan& plan, const Scenario& s, const std::filesystem::path& folder,
               const std::optional<SavedCheckpoint>& from = {}) {
  const LaunchResult ended =
      with_ranks(plan.num_ranks(), [&](CpuWorld& world) { run_rank(plan, s, world, folder, from); });
  if (ended.exit_code != 0) throw std::runtime_error(ended.message);
}

void read_result(const Golden& g, const std::filesystem::path& folder, TrainingResult& result) {
  const auto metrics = json_from<nlohmann::json>(value(read_file(folder / "metrics.json")));
  result.losses = metrics["losses"].get<std::vector<double>>();
  result.grad_norms = metrics["grad_norms"].get<std::vector<double>>();
  const bool lora = g.model.lora.on();
  const Checkpoint after =
      value(Checkpoint::open(lora ? folder / "step_5" / adapter_file::weights : folder / "step_5"));
  for (const ParamSpec& p : trained_parameters(g.model)) {
    const StoredParameter at = stored_trained(g.model, p);
    const TensorView view = value(after.require(at));
    auto& values = result.after5[at.tensor];
    values.resize(static_cast<std::size_t>(view.numel()));
    copy_as_f32(view, 0, values);
  }
  if (!lora) return;
  const Checkpoint merged = value(Checkpoint::open(folder / "merged"));
  for (const ParamSpec& p : parameters_of(g.model)) result.merged[p.name] = value(merged.load_parameter(g.model, p));
}

}  // namespace

TrainingResult train_on(const Golden& g, const Scenario& first, const Scenario& then, std::int64_t steps) {
  const TemporaryFolder folder;
  Scenario before = first, after = then;
  before.task.data = after.task.data = (folder.path() / "data.jsonl").string();
  write_data(g, after.task.data);
  before.steps = steps, before.checkpoint_every = 0;
  run_ranks(value(lower(before)), before, folder.path());
  run_ranks(value(lower(after)), after, folder.path(), value(read_checkpoint(folder.path() / "final")));
  TrainingResult result;
  read_result(g, folder.path(), result);
  return result;
}

TrainingResult train(const Golden& g, const Scenario& given) {
  const TemporaryFolder folder;
  Scenario s = given;
  s.task.data = (folder.path() / "data.jsonl").string();
  write_data(g, s.task.data);
  Plan plan = value(lower(s));
  TrainingResult result;
  if (plan.num_ranks() == 1) {
    add_probes(plan);
    CpuWorld world;
    result.probes = by_parameter(g, run_rank(plan, s, world, folder.path()));
  } else {
    run_ranks(plan, s, folder.path());
  }
  read_result(g, folder.path(), result);
  return result;
}

}  // namespace hotbunk::test

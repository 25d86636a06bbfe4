#include "tests/numerics/training_run.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "backends/cpu_gloo/cpu_backend.h"
#include "backends/cpu_gloo/kernels/gemm.h"
#include "base/file.h"
#include "base/json.h"
#include "graph/boxes.h"
#include "graph/slots.h"
#include "graph/verify.h"
#include "lowering/lower.h"
#include "rl/adapter.h"
#include "rl/sft_driver.h"
#include "runtime/gather.h"
#include "tests/blocks.h"
#include "tests/numerics/value.h"
#include "tests/runtime/ranks.h"
#include "tests/simulated.h"
#include "trace/merge.h"

namespace hotbunk::test {
namespace {

constexpr std::int32_t golden_steps = 5;

Op probe(const std::string& name, const Tensor& t, StreamId stream = streams::compute) {
  Op op;
  op.kind = OpKind::fetch;
  // On the stream of the op that wrote the tensor: no event is needed, and nothing overwrites it before.
  op.stream = stream;
  op.name = "probe." + name;
  op.inputs = {t};
  op.attrs.emplace_back(Attr::slot, static_cast<std::int64_t>(Slot::logps));
  return op;
}

/// What loads the parameters of a unit into the buffer that its optimizer steps.
using Loads = std::map<BufferId, std::vector<Op>>;
Loads loads_of(const Plan& plan, const Program& program) {
  Loads out;
  for (const Block& block : program.phases[static_cast<std::size_t>(plan.phase_index("load"))])
    for (Op& op : ops_of(program, block))
      if (op.kind == OpKind::feed && op.integer(Attr::slot) == static_cast<std::int64_t>(Slot::parameter))
        out[op.outputs[0].buffer].push_back(std::move(op));
  return out;
}

/// Fetches of what AdamW takes: a gradient lies in its tensor as the parameter does in what is stepped.
std::vector<Op> gradient_probes(const Op& adamw, const Loads& loads) {
  std::vector<Op> out;
  const auto found = loads.find(adamw.outputs[0].buffer);
  if (found == loads.end()) return out;  // it steps a part of what was loaded
  for (const Op& load : found->second) {
    Tensor part = load.outputs[0];
    part.buffer = adamw.inputs[0].buffer, part.dtype = adamw.inputs[0].dtype;
    part.offset_bytes = part.offset_bytes / size_of(load.outputs[0].dtype) * size_of(part.dtype);
    Op& op = out.emplace_back(probe("gradient." + load.name, part, adamw.stream));
    for (const Move& move : load.moves) op.moves.push_back({move.to, move.from});
  }
  return out;
}

/// Plans are data: fetches of the gradients that a step takes, summed over the ranks, and on one rank of the logits and
/// log-probs.
void add_probes(Plan& plan) {
  const auto train = static_cast<std::size_t>(plan.phase_index("train"));
  for (Program& program : plan.programs) {
    const Loads loads = loads_of(plan, program);
    for (Block& block : program.phases[train]) {
      test::EditedOps edited(program, block);
      std::vector<Op> ops;
      for (const Op& op : edited) {
        // The host's step waits for what it is told: a probe in front of it would wait for nothing of its own.
        const bool waits = op.stream == streams::host;
        if (waits) ops.push_back(op);
        if (op.kind == OpKind::adamw)
          for (Op& fetch : gradient_probes(op, loads)) ops.push_back(std::move(fetch));
        if (!waits) ops.push_back(op);
        if (op.kind == OpKind::log_prob && plan.num_ranks() == 1)
          ops.insert(ops.end(), {probe("logits", op.inputs[0]), probe("logps", op.outputs[0])});
      }
      edited.assign(ops.begin(), ops.end());
    }
  }
  const auto faults = verify(plan);
  if (!faults.empty()) throw std::runtime_error("a plan with probes does not verify: " + faults.front());
}

/// Gradients by parameter, as its logical tensor lies; not a number where a rank has no part.
using Gradients = std::map<std::string, std::vector<float>>;
constexpr float nobodys = std::numeric_limits<float>::quiet_NaN();

/// Takes the probes of the first step; everything else is the inner driver's.
class ProbingDriver final : public Driver {
 public:
  ProbingDriver(const Plan& plan, const ModelSpec& model, Driver& inner) : plan_(plan), inner_(inner) {
    for (const ParamSpec& p : trained_parameters(model))
      gradients[p.name].assign(static_cast<std::size_t>(p.numel()), nobodys);
  }
  std::map<std::string, std::vector<float>> taken;
  Gradients gradients;

  std::optional<Args> next(Rank r, std::int32_t step, std::int16_t phase) override {
    return inner_.next(r, step, phase);
  }
  void feed(Rank r, const BoundOp& op, const Args& args, std::span<std::byte> d) override {
    inner_.feed(r, op, args, d);
  }
  void fetch(Rank r, const BoundOp& op, const Args& args, std::span<const std::byte> source) override {
    constexpr std::string_view of_gradient = "probe.gradient.";
    const std::string name = op.name();
    if (!name.starts_with("probe.")) return inner_.fetch(r, op, args, source);
    if (args.step > 1) return;
    if (name.starts_with(of_gradient)) return take_gradient(r, *op, name.substr(of_gradient.size()), source);
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
  void take_gradient(Rank r, const Op& op, const std::string& parameter, std::span<const std::byte> source) {
    std::vector<std::byte> wide;  // of bf16, the same numbers in fp32
    if (op.inputs[0].dtype == DType::bf16) {
      wide.resize(2 * source.size());
      for (std::size_t i = 0; i < source.size() / sizeof(bf16); ++i) {
        bf16 narrow;
        std::memcpy(&narrow, source.data() + i * sizeof narrow, sizeof narrow);
        const float value = to_f32(narrow);
        std::memcpy(wide.data() + i * sizeof value, &value, sizeof value);
      }
      source = wide;
    }
    std::vector<float>& values = gradients.at(parameter);
    for (const Box& box : boxes_of(op, places_of(plan_, r)))
      for (std::int64_t i = 0; i < box.rows; ++i) {
        const auto from = static_cast<std::size_t>(box.src_offset + i * box.src_pitch) * sizeof(float),
                   to = static_cast<std::size_t>(box.dst_offset + i * box.dst_pitch),
                   cols = static_cast<std::size_t>(box.cols);
        if (from + cols * sizeof(float) > source.size() || to + cols > values.size())
          throw std::runtime_error("a gradient outside of its tensor: " + parameter);
        std::memcpy(values.data() + to, source.data() + from, cols * sizeof(float));
      }
  }

  const Plan& plan_;
  Driver& inner_;
};

std::filesystem::path gradients_file(const std::filesystem::path& folder, int rank) {
  return folder / ("gradients." + std::to_string(rank));
}

void write_gradients(const std::filesystem::path& folder, int rank, const Gradients& gradients) {
  std::string bytes;
  for (const auto& [name, values] : gradients)
    bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  if (auto written = write_file_atomic(gradients_file(folder, rank), bytes); !written)
    throw std::runtime_error(render(written.error()));
}

/// What the ranks left, as one: all that several have must be the same bit for bit.
Gradients read_gradients(const ModelSpec& model, const std::filesystem::path& folder, int ranks) {
  Gradients out;
  for (const ParamSpec& p : trained_parameters(model)) out[p.name].assign(static_cast<std::size_t>(p.numel()), nobodys);
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string bytes = value(read_file(gradients_file(folder, rank)));
    std::size_t at = 0;
    for (auto& [name, values] : out)
      for (float& v : values) {
        float own = nobodys;
        std::memcpy(&own, bytes.data() + at, sizeof own);
        at += sizeof own;
        if (std::isnan(own)) continue;
        if (!std::isnan(v) && std::memcmp(&v, &own, sizeof v) != 0)
          throw std::runtime_error(fmt::format("rank {} has {} for the gradient {} in {}", rank, own, v, name));
        v = own;
      }
  }
  return out;
}

/// Gradients by tensor of the model's file.
void add_gradients(const Golden& g, const Gradients& gradients, std::map<std::string, std::vector<float>>& out) {
  for (const ParamSpec& p : trained_parameters(g.model)) {
    const StoredParameter at = stored_trained(g.model, p);
    auto& tensor = out["grad." + at.tensor];
    std::int64_t elements = 1;
    for (const std::int64_t extent : at.shape) elements *= extent;
    tensor.resize(static_cast<std::size_t>(elements));
    const std::vector<float>& values = gradients.at(p.name);
    for (std::size_t i = 0; i < values.size(); ++i)
      tensor[static_cast<std::size_t>(at.element(static_cast<std::int64_t>(i)))] = values[i];
  }
}

/// Rows without a prediction taken out of the log-probs.
void add_forward(const Golden& g, std::map<std::string, std::vector<float>> raw,
                 std::map<std::string, std::vector<float>>& out) {
  out["logits"] = std::move(raw.at("logits"));
  const auto& logps = raw.at("logps");
  std::size_t row = 0;
  for (const TokenSequence& s : g.sequences) {
    out["logps"].insert(out["logps"].end(), logps.begin() + static_cast<std::ptrdiff_t>(row),
                        logps.begin() + static_cast<std::ptrdiff_t>(row + s.tokens.size() - 1));
    row += s.tokens.size();
  }
}

/// Of what all ranks counted, what differs from what the simulator says of the plan (P1, P2); said on rank 0.
std::string unlike_plan(const Plan& plan, const Scenario& s, World& world, const Trace& own,
                        std::vector<SampleLengths> lengths) {
  const auto parts = gather_strings_at_first(world, "trace", pack_trace(own));
  if (world.rank() > 0) return "";
  Scenario as_long = s;  // its sequences are those of the file
  as_long.workload.prompt_tokens.max = as_long.workload.response_tokens.max = 1;
  for (const SampleLengths& step : lengths)
    for (const auto& [most, of] : {std::pair(&as_long.workload.prompt_tokens.max, &step.prompt_tokens),
                                   std::pair(&as_long.workload.response_tokens.max, &step.response_tokens)})
      for (const std::int64_t tokens : *of) *most = std::max(*most, static_cast<double>(tokens));
  return testing::unlike_simulated(plan, as_long, std::move(lengths), merge_traces(parts));
}

/// One rank's whole run; rank 0 leaves metrics.json, checkpoints and what differs from the plan in the folder, each its
/// gradients.
std::map<std::string, std::vector<float>> run_rank(const Plan& plan, const Scenario& s, World& world,
                                                   const MakeTestBackend& make, const std::filesystem::path& folder,
                                                   const std::optional<SavedCheckpoint>& from = {},
                                                   Against against = Against::reference) {
  nlohmann::json metrics;
  std::vector<SampleLengths> lengths;
  DriverOptions options;
  options.checkpoints = folder, options.resume = from;
  if (world.size() > 1) {
    options.say = [&world](const std::string& key, const std::string& value) { world.set(key, value); };
    options.hear = [&world](const std::string& key, Rank from_rank) { return world.await(key, from_rank); };
  }
  options.opens_files = world.rank() == 0 || s.train.load == "shards";  // as a run has it
  options.on_step = [&](const StepMetrics& m) {
    metrics["losses"].push_back(m.values.at("loss"));
    metrics["grad_norms"].push_back(m.values.at("actor/grad_norm"));
  };
  options.on_samples = [&](std::int32_t, const SampleLengths& of_step) { lengths.push_back(of_step); };
  const auto driver = value(SftDriver::create(plan, s, options));
  ProbingDriver probing(plan, s.model, *driver);
  const auto backend = make(probing);
  const Trace trace = value(execute(plan, *backend, probing,
                                    {.steps = static_cast<std::int32_t>(s.steps),
                                     .local_ranks = {static_cast<Rank>(world.rank())},
                                     .first_step = from ? static_cast<std::int32_t>(from->state.step) + 1 : 1}));
  if (against == Against::reference_and_plan)
    metrics["unlike_plan"] = unlike_plan(plan, s, world, trace, std::move(lengths));
  write_gradients(folder, world.rank(), probing.gradients);
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
  s.train.router_aux_loss_coef = g.router_aux, s.train.router_z_loss_coef = g.router_z;
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

/// Rank 0's probes, where it was in this process.
std::map<std::string, std::vector<float>> run_ranks(const Plan& plan, const Scenario& s,
                                                    const std::filesystem::path& folder, const StartRanks& start,
                                                    const std::optional<SavedCheckpoint>& from = {},
                                                    Against against = Against::reference) {
  std::map<std::string, std::vector<float>> taken;
  start(plan.num_ranks(), [&](World& world, const MakeTestBackend& make) {
    auto own = run_rank(plan, s, world, make, folder, from, against);
    if (world.rank() == 0) taken = std::move(own);
  });
  return taken;
}

void read_result(const Golden& g, const std::filesystem::path& folder, TrainingResult& result) {
  const auto metrics = json_from<nlohmann::json>(value(read_file(folder / "metrics.json")));
  result.losses = metrics["losses"].get<std::vector<double>>();
  result.grad_norms = metrics["grad_norms"].get<std::vector<double>>();
  result.unlike_plan = metrics.value("unlike_plan", "");
  const bool lora = g.model.lora.on();
  const auto read = [&](const std::filesystem::path& file, std::map<std::string, std::vector<float>>& into) {
    const Checkpoint saved = value(Checkpoint::open(file));
    for (const ParamSpec& p : saved_parameters(g.model)) {
      const StoredParameter at = stored_trained(g.model, p);
      const TensorView view = value(saved.require(at));
      auto& values = into[at.tensor];
      values.resize(static_cast<std::size_t>(view.numel()));
      copy_as_f32(view, 0, values);
    }
  };
  const auto step_5 = folder / "step_5";
  if (std::filesystem::exists(step_5)) read(lora ? step_5 / adapter_file::weights : step_5, result.after5);
  if (!lora) read(folder / "final", result.at_end);
  if (!lora) return;
  const Checkpoint merged = value(Checkpoint::open(folder / "merged"));
  for (const ParamSpec& p : parameters_of(g.model)) result.merged[p.name] = value(merged.load_parameter(g.model, p));
}

}  // namespace

void start_cpu_ranks(int ranks, const PlayRank& play) {
  static std::once_flag prepared;  // not anew in each of some thousands of ranks
  std::call_once(prepared, kernels::prepare_products);
  const auto on = [&](CpuWorld& world) {
    CpuOptions cpu;
    cpu.poison = cpu.check_finite = true;
    cpu.span_steps = 1;
    play(world, [&](Driver& driver) { return std::make_unique<CpuBackend>(world, driver, cpu); });
  };
  if (ranks == 1) {
    CpuWorld world;
    return on(world);
  }
  const LaunchResult ended = with_ranks(ranks, on);
  if (ended.exit_code != 0) throw std::runtime_error(ended.message);
}

TrainingResult train_on(const Golden& g, const Scenario& first, const Scenario& then, std::int64_t steps) {
  const TemporaryFolder folder;
  Scenario before = first, after = then;
  before.task.data = after.task.data = (folder.path() / "data.jsonl").string();
  write_data(g, after.task.data);
  before.steps = steps, before.checkpoint_every = 0;
  run_ranks(value(lower(before)), before, folder.path(), start_cpu_ranks);
  run_ranks(value(lower(after)), after, folder.path(), start_cpu_ranks,
            value(read_checkpoint(folder.path() / "final")));
  TrainingResult result;
  read_result(g, folder.path(), result);
  return result;
}

TrainingResult train(const Golden& g, const Scenario& given, Against against, const StartRanks& start) {
  const TemporaryFolder folder;
  Scenario s = given;
  s.task.data = (folder.path() / "data.jsonl").string();
  write_data(g, s.task.data);
  Plan plan = value(lower(s));
  add_probes(plan);
  TrainingResult result;
  auto taken = run_ranks(plan, s, folder.path(), start, {}, against);
  if (plan.num_ranks() == 1) add_forward(g, std::move(taken), result.probes);
  add_gradients(g, read_gradients(g.model, folder.path(), plan.num_ranks()), result.probes);
  read_result(g, folder.path(), result);
  return result;
}

}  // namespace hotbunk::test

// Training's state in the host's memory on the double: layer-wise offload and a part of the optimizer, whose ops run on
// the host by the CPU backend's kernels, ordered with the device by streams and events alone.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "base/file.h"
#include "spec/loader.h"
#include "spec/safetensors.h"
#include "tests/cuda_backend/beside_cpu.h"
#include "tests/cuda_backend/left_out.h"
#include "tests/cuda_backend/runs.h"
#include "tests/paths.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// Where checkpoints of a test go.
class CheckpointFolder {
 public:
  CheckpointFolder() { std::filesystem::create_directories(root); }
  ~CheckpointFolder() { std::filesystem::remove_all(root); }
  const std::filesystem::path root =
      std::filesystem::temp_directory_path() / fmt::format("hotbunk_host_state_test.{}", ::getpid());
  std::string bytes(const std::string& checkpoint) const {
    return read_file(root / checkpoint / "model.safetensors").value_or("");
  }
};

/// The largest difference of a weight.
double apart(const ModelSpec& model, const std::filesystem::path& one, const std::filesystem::path& other) {
  const auto a = Checkpoint::open(one), b = Checkpoint::open(other);
  REQUIRE((a && b));
  double most = 0;
  for (const ParamSpec& p : parameters_of(model)) {
    const auto x = a->load_parameter(model, p), y = b->load_parameter(model, p);
    REQUIRE((x && y));
    REQUIRE(x->size() == y->size());
    for (std::size_t i = 0; i < x->size(); ++i)
      most = std::max(most, std::abs(static_cast<double>((*x)[i]) - static_cast<double>((*y)[i])));
  }
  return most;
}

/// Weights that both AdamWs step: of a learning rate, which is what a step of Adam's comes to. Roundings of gradients
/// near zero count most. Measured: 9e-4.
constexpr double roundings = 1e-2;

bool computes_on_host(const Plan& plan, const Op& op) {
  return plan.stream(op.stream).kind == StreamKind::host && !is_memory(op.kind) && op.kind != OpKind::feed;
}

/// Ops of a plan that compute on the host.
std::set<OpKind> computed_on_host(const Plan& plan) {
  std::set<OpKind> out;
  for (const Program& program : plan.programs)
    for (const Body& body : program.bodies)
      for (const Op& op : body.ops)
        if (computes_on_host(plan, op)) out.insert(op.kind);
  return out;
}

Sets with_sets(Sets sets, const Sets& more) {
  sets.insert(sets.end(), more.begin(), more.end());
  return sets;
}

/// The tiny job with its state on the host, or a part of it: small enough for hundreds of schedules. bf16, so that what
/// the host has stepped is cast there before it goes up.
const Sets tiny_layerwise = {"seed=9", "train.offload=layerwise", "sync.transport=collective"};
const Sets tiny_part = {"seed=9", "train.engine=zero1", "optimizer.cpu_fraction=0.5", "train.precision.params=bf16",
                        "rollout.dtype=bf16"};

}  // namespace

TEST_CASE("state on the host: bytes and calls as simulated, one CPU rank's figures, weights of the device's own step") {
  struct HostCase {
    std::string file;
    Sets on_device;  // the same layout without
    std::set<OpKind> on_host;
  };
  for (const HostCase& c :
       {HostCase{"offload", {"train.offload=sleep"}, {OpKind::zero, OpKind::add, OpKind::sum_squares, OpKind::adamw}},
        {"cpu-optimizer", {"optimizer.cpu_fraction=0"}, {OpKind::adamw}}}) {
    INFO(c.file);
    // Narrower, and still of more elements than the kernels give to one thread.
    const Sets sets = with_sets(shortened(), {"seed=1", "steps=2", "model.num_hidden_layers=1", "model.hidden_size=48",
                                              "model.intermediate_size=64", "model.num_attention_heads=4",
                                              "model.num_key_value_heads=2", "model.head_dim=12"});
    const auto load = [&](const Sets& how) {
      return planned(load_scenario(fmt::format("{}/scenarios/{}-cpu.yaml", source_folder, c.file), how));
    };
    const auto job = load(sets), one_job = load(on_one_rank(sets)), on_device = load(with_sets(sets, c.on_device));
    REQUIRE((job && one_job && on_device));
    CHECK(computed_on_host(job->plan) == c.on_host);
    const CheckpointFolder folder;
    const auto run = [&](const Planned& p, const std::string& name, std::uint64_t seed, int threads) {
      Iteration ran =
          run_iteration(p.plan, p.scenario, {.seed = seed, .host_threads = threads, .checkpoints = folder.root / name});
      REQUIRE_THAT(ran.text(), Catch::Equals(""));
      return ran;
    };
    const Iteration it = run(*job, "once", 1, 1), one = run_on_cpu(one_job->plan, one_job->scenario);
    CHECK_THAT(hotbunk::testing::unlike_simulated(job->plan, job->scenario, it.lengths, it.trace), Catch::Equals(""));
    REQUIRE_THAT(one.text(), Catch::Equals(""));
    CHECK(one.trace.metrics.at(0).values.at("actor/grad_norm") > 0.1);
    check_like(it, one);
    CHECK(!it.calls.contains("cuCtxSynchronize"));
    // Under another schedule and with more threads on the host it is the same run, to the bit (P7).
    CHECK(run(*job, "again", 3, 3).numbers == it.numbers);
    CHECK(!folder.bytes("once/final").empty());
    CHECK(folder.bytes("once/final") == folder.bytes("again/final"));
    // The device's AdamW takes the same terms in another order.
    run(*on_device, "device", 2, 1);
    const double most = apart(job->scenario.model, folder.root / "once/final", folder.root / "device/final");
    CAPTURE(most);
    CHECK(most > 0);
    CHECK(most < roundings * job->scenario.optimizer.lr);
  }
}

TEST_CASE("state on the host under twenty schedules: no finding, the same numbers") {
  for (const Sets& sets : {tiny_layerwise, tiny_part}) {
    const auto job = planned(load_tiny_job(with_sets(sets, {"steps=2"})));
    REQUIRE(job);
    const Iteration first = run_iteration(job->plan, job->scenario);
    REQUIRE_THAT(first.text(), Catch::Equals(""));
    for (std::uint64_t seed = 2; seed <= 11; ++seed) {
      INFO("seed " << seed);
      const Iteration it = run_iteration(job->plan, job->scenario, {.seed = seed});
      REQUIRE_THAT(it.text(), Catch::Equals(""));
      REQUIRE(it.numbers == first.numbers);
    }
  }
}

TEST_CASE("every wait that the host's ops need, or that is for them, is missed where it is left out") {
  struct WaitsCase {
    Sets sets;
    std::size_t of_host,
        needed;  // of both ranks: on the host's streams; by this run's sizes, there or for their events
  };
  for (const WaitsCase& c : {WaitsCase{tiny_layerwise, 9, 6}, {tiny_part, 8, 12}}) {
    const auto job = planned(load_tiny_job(c.sets));
    REQUIRE(job);
    const auto is_of_host = [&](const Mark& m) { return job->plan.stream(m.stream).kind == StreamKind::host; };
    const auto for_the_host = [&](const Program& program, const Mark& wait) {
      for (const auto& blocks : program.phases)
        for (const Block& block : blocks)
          for (const Call& call : block.calls)
            if (std::ranges::any_of(call.marks, [&](const Mark& m) {
                  return m.kind == OpKind::record && m.event == wait.event && is_of_host(m);
                }))
              return true;
      return false;
    };
    std::size_t of_host = 0;
    const LeftOut out = leave_out_waits(job->plan, job->scenario, [&](const Program& program, const Mark& m) {
      of_host += is_of_host(m) ? 1 : 0;
      return is_of_host(m) || for_the_host(program, m);
    });
    CAPTURE(out.asked, out.needed, of_host);
    CHECK(of_host == c.of_host);
    CHECK(out.needed == c.needed);
  }
}

TEST_CASE("a checkpoint does not know that its state lay on the host: the run goes on from it, there or elsewhere") {
  const CheckpointFolder folder;
  const Sets two_steps = {"steps=2", "checkpoint_every=1"};
  for (const auto& [sets, elsewhere] :
       {std::pair{tiny_layerwise, Sets{"train.offload=sleep"}}, {tiny_part, Sets{"optimizer.cpu_fraction=0.25"}}}) {
    const auto job = planned(load_tiny_job(with_sets(sets, two_steps))),
               other = planned(load_tiny_job(with_sets(with_sets(sets, two_steps), elsewhere)));
    REQUIRE((job && other));
    const std::string whole = fmt::format("{}", fmt::join(sets, "_"));
    REQUIRE_THAT(run_iteration(job->plan, job->scenario, {.checkpoints = folder.root / whole}).text(),
                 Catch::Equals(""));
    const auto saved = read_checkpoint(folder.root / whole / "step_1");
    REQUIRE(saved);
    CHECK(saved->has_moments);
    const auto goes_on = [&](const Planned& p, const std::string& name) {
      const Iteration it =
          run_iteration(p.plan, p.scenario, {.seed = 2, .checkpoints = folder.root / name, .resume = *saved});
      CHECK_THAT(it.text(), Catch::Equals(""));
    };
    goes_on(*job, "here");
    CHECK(!folder.bytes("here/final").empty());
    CHECK(folder.bytes("here/final") == folder.bytes(whole + "/final"));
    // A boundary between the device's part and the host's within a word, of bf16: no finding, though not the same
    // roundings.
    goes_on(*other, "there");
    if (other->scenario.train.precision.params == DType::f32)
      CHECK(apart(job->scenario.model, folder.root / "there/final", folder.root / whole / "final") <
            roundings * job->scenario.optimizer.lr);
  }
}

TEST_CASE("an op with tensors on the host and others on the device is refused before anything runs") {
  auto job = planned(load_tiny_job(tiny_layerwise));
  REQUIRE(job);
  for (Program& program : job->plan.programs) {
    BufferId of_program = -1;
    for (const auto& blocks : program.phases)
      for (const Block& block : blocks)
        each_op(program, block, [&](const BoundOp& op) {
          if (op->kind == OpKind::adamw && of_program < 0) of_program = op.buffer(op->inputs[0]).id;
        });
    REQUIRE(of_program >= 0);
    program.buffers[static_cast<std::size_t>(of_program)].section = transient_section;  // the device's
  }
  const Iteration it = run_iteration(job->plan, job->scenario);
  for (const std::string& f : it.failures)
    CHECK_THAT(
        f, Catch::Contains("E601") && Catch::Contains("tensors are in the host's memory, the others on the device"));
  CHECK(it.launches.empty());
}

namespace {

/// Calls of the double's entries at a moment of a run.
using Calls = std::map<std::string, std::int64_t>;
/// What a tampered table does when one of these ops touches the host's memory. Of the case below.
std::set<std::string> host_ops;
std::function<void()> at_host_op;
void (*touch_host)(const std::string&, const void*, std::size_t, bool) = nullptr;

void tell_host_ops(cuda::Driver& table) {
  touch_host = table.host_touches;
  table.host_touches = [](const std::string& op, const void* at, std::size_t bytes, bool write) {
    if (host_ops.contains(op)) at_host_op();
    touch_host(op, at, bytes, write);
  };
}

}  // namespace

TEST_CASE("a call that fails beside the host's ops: the run ends with rank, phase and op") {
  const auto job = planned(load_tiny_job(tiny_layerwise));
  REQUIRE(job);
  host_ops.clear();
  for (const Program& program : job->plan.programs)
    for (const auto& blocks : program.phases)
      for (const Block& block : blocks)
        each_op(program, block, [&](const BoundOp& op) {
          if (computes_on_host(job->plan, *op)) host_ops.insert(op.name());
        });
  REQUIRE(!host_ops.empty());
  // From where both ranks have computed something on the host, which they do in training alone, to the last such op.
  std::mutex mutex;
  std::set<std::thread::id> begun;
  Calls before, behind;
  cuda::FakeDriver* played = nullptr;
  const auto both_begun = [&] {
    begun.insert(std::this_thread::get_id());
    return begun.size() == 2;
  };
  at_host_op = [&] {
    const std::lock_guard lock(mutex);
    if (!both_begun()) return;
    behind = played->calls();
    if (before.empty()) before = behind;
  };
  const Iteration whole = run_iteration(
      job->plan, job->scenario, {.prepare = [&](cuda::FakeDriver& fake) { played = &fake; }, .tamper = tell_host_ops});
  REQUIRE_THAT(whole.text(), Catch::Equals(""));
  REQUIRE(!before.empty());
  // Where none of the ops is at work: events of the plan, and the wait at a block's end.
  const std::set<std::string> between_ops = {"cuEventRecord", "cuStreamWaitEvent", "cuStreamSynchronize"};
  for (const std::string entry : {"cuStreamSynchronize", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventRecord",
                                  "cuStreamWaitEvent", "cuLaunchKernel"}) {
    // Early among them, in training; on a busy machine a rank may be through with it by then.
    const auto nth = std::max<std::int64_t>(1, (behind.at(entry) - before.at(entry)) / 4);
    begun.clear();
    bool armed = false;
    at_host_op = [&] {
      const std::lock_guard lock(mutex);
      if (!armed && both_begun()) armed = true, played->fail_call(entry, nth, CUDA_ERROR_LAUNCH_FAILED);
    };
    const Iteration it =
        run_iteration(job->plan, job->scenario,
                      {.prepare = [&](cuda::FakeDriver& fake) { played = &fake; }, .tamper = tell_host_ops});
    INFO(entry << " call " << nth << " from there on\n" << it.text());
    CHECK(it.seconds < hangs_after_seconds(whole.seconds));
    CHECK(it.faults_met == 1);
    bool names_call = false;
    for (std::size_t rank = 0; rank < it.failures.size(); ++rank) {
      const std::string& f = it.failures[rank];
      if (f.empty()) continue;  // one that has nothing left to wait for may be through
      CHECK_THAT(f, Catch::Contains(fmt::format("rank {}, phase ", rank)));
      if (f.find("noticed it in") != std::string::npos) continue;
      // The context is both ranks', and its error stays: the other one may meet it at a call of its own.
      CHECK_THAT(f, Catch::Contains("CUDA_ERROR_LAUNCH_FAILED"));
      const bool is_its_call = f.find(entry) != std::string::npos;
      names_call = names_call || is_its_call;
      if (is_its_call && !between_ops.contains(entry)) CHECK_THAT(f, Catch::Contains("(op "));
      else
        CHECK_THAT(f, Catch::Contains("(op ") || Catch::Contains(" event") || Catch::Contains("for the streams)") ||
                          Catch::Contains(", between two phases"));
    }
    CHECK(names_call);
  }
}

TEST_CASE("what the host computes is no kernel of a device's profile") {
  const Folder folder;
  REQUIRE(write_file_atomic(folder.root / "tiny.yaml", tiny_job_text));
  const Ended e = folder.command(
      fmt::format("{0} calibrate {1}/tiny.yaml --set train.offload=layerwise --set sync.transport=collective --backend "
                  "cuda-fake --steps 2 --out {1}/profile.double.yaml",
                  program_file, folder.root.string()),
      "calibrate");
  INFO(e.err);
  REQUIRE(e.code == 0);
  const std::string profile = read_file(folder.root / "profile.double.yaml").value_or("");
  CHECK_THAT(profile, Catch::Contains("op: clip_coefficient,") && Catch::Contains("op: d2h,"));
  CHECK_THAT(profile, !Catch::Contains("op: adamw,") && !Catch::Contains("op: sum_squares,"));
}

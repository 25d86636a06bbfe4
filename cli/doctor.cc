// doctor: what this machine is, and whether a CPU run would work here.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "backends/cpu_gloo/arena.h"
#include "backends/cpu_gloo/cpu_world.h"
#include "backends/cpu_gloo/kernels/context.h"
#include "backends/cpu_gloo/kernels/gemm.h"
#include "base/json.h"
#include "runtime/launch.h"
#ifdef HOTBUNK_CUDA
#include "backends/cuda/blas_table.h"
#include "backends/cuda/dnn_table.h"
#include "backends/cuda/driver.h"
#include "backends/cuda/evidence.h"
#include "backends/cuda/machine.h"
#include "backends/cuda/nccl_table.h"
#endif
#include "base/check.h"
#include "base/format.h"
#include "cli/capabilities.h"
#include "cli/command.h"
#include "cli/product_choice.h"
#include "cli/streams.h"
#include "spec/catalog.h"
#include "trace/text_table.h"

namespace hotbunk {
namespace {

struct Checked {
  std::string what, found;
  bool good = true;
  std::string help;
};

Checked check_catalog() {
  const auto models = catalog_names("models"), gpus = catalog_names("gpus");
  return {"catalogue", fmt::format("{} models, {} GPUs in {}", models.size(), gpus.size(), catalog_root().string()),
          !models.empty() && !gpus.empty(), "set HOTBUNK_CATALOG to the folder scenarios/catalog"};
}

/// Maps, touches and returns memory as a sleeping rank does.
Checked check_arena(bool shared) {
  const std::string what = shared ? "shared arena (memfd)" : "private arena";
  try {
    const std::int64_t bytes = std::int64_t{8} << 20;
    Arena arena({.name = "doctor", .reserve_bytes = bytes, .capacity_bytes = bytes, .shared = shared});
    arena.map(0, bytes, "doctor");
    const std::int64_t awake = arena.resident_bytes();
    arena.unmap(0, bytes);
    const std::int64_t asleep = arena.resident_bytes();
    return {what,
            fmt::format("{} resident when mapped, {} when returned", format_bytes(static_cast<double>(awake)),
                        format_bytes(static_cast<double>(asleep))),
            awake == bytes && asleep == 0, "sleeping would not give memory back on this kernel"};
  } catch (const std::exception& e) {
    return {what, e.what(), false, "allow memfd_create and mmap for this process"};
  }
}

Checked check_launch() {
  auto env = launch_env(process_env);
  if (!env) return {"launch variables", render(env.error()), false, "fix or unset them"};
  if (!*env) return {"launch variables", "none: `hotbunk run` starts local ranks itself", true, ""};
  return {"launch variables",
          fmt::format("{}: rank {} of {}, master {}:{}", (*env)->source, (*env)->rank, (*env)->world_size,
                      (*env)->master_addr, (*env)->master_port),
          true, ""};
}

/// Two ranks that meet and exchange a number.
Checked check_two_ranks() {
  const LaunchResult result = fork_ranks(2, [](const LaunchEnv& env) {
    CpuWorld world(env);
    const std::vector<int> both = {0, 1};
    auto c = world.communicator(both, "doctor");
    float x = 1.0f, sum = 0.0f;
    c->all_reduce(&x, &sum, 1, DType::f32);
    c.reset();
    world.leave();
    return sum == 2.0f ? 0 : 3;
  });
  return {"two local ranks", result.exit_code == 0 ? "met, and added 1 + 1" : result.message, result.exit_code == 0,
          "check that loopback sockets and shared memory are allowed"};
}

/// What `run --backend cuda` would find, and whether anything of it ever ran.
Checked check_cuda() {
#ifdef HOTBUNK_CUDA
  const auto driver = cuda::open_driver();
  const std::string evidence = "the backend " + cuda::evidence_text();
  if (!driver) return {"CUDA", driver.error().front().message + "; " + evidence, true, ""};
  int version = 0;
  driver->cuDriverGetVersion(&version);
  int devices = 0;
  if (driver->cuInit(0) == CUDA_SUCCESS) driver->cuDeviceGetCount(&devices);
  return {"CUDA",
          fmt::format("driver for CUDA {}.{}, {} devices; {}", version / 1000, version % 1000 / 10, devices, evidence),
          true, ""};
#else
  return {"CUDA", "built without it: CPU ranks only", true, ""};
#endif
}

/// What ranks that are processes, each on a device of its own, would talk through.
Checked check_nccl() {
#ifdef HOTBUNK_CUDA
  const auto nccl = cuda::open_nccl();
  if (!nccl) return {"NCCL", nccl.error().front().message, true, ""};
  int version = 0;
  nccl->ncclGetVersion(&version);
  return {"NCCL",
          fmt::format("{}{}", cuda::nccl_version_text(version),
                      nccl->ncclCommSplit != nullptr ? "" : ", which does not split communicators"),
          true, ""};
#else
  return {"NCCL", "built without CUDA", true, ""};
#endif
}

/// The devices, whether they reach one another, what nodes talk over, and which libraries may take ops.
void check_devices([[maybe_unused]] std::vector<Checked>& out) {
#ifdef HOTBUNK_CUDA
  if (const auto driver = cuda::open_driver()) {
    for (const std::string& line : cuda::device_lines(*driver)) out.push_back({"CUDA device", line, true, ""});
    if (const std::string peers = cuda::peer_access_text(*driver); !peers.empty())
      out.push_back({"peer access", peers, true, ""});
  }
  out.push_back({"InfiniBand", cuda::infiniband_text(), true, ""});
  const auto blas = cuda::open_blas();
  out.push_back({"cuBLASLt",
                 blas ? fmt::format("{}: backward products, and forward ones where its bits are ours (run --products)",
                                    cuda::blas_version_text(blas->cublasLtGetVersion()))
                      : blas.error().front().message + "; our kernels form all products",
                 true, ""});
  const auto dnn = cuda::open_dnn();
  out.push_back({"cuDNN",
                 dnn ? fmt::format("{}: attention's backward, where it is asked for (run --attention-backward cudnn)",
                                   cuda::dnn_version_text(dnn->cudnnGetVersion()))
                     : dnn.error().front().message + "; our kernels form attention's gradients",
                 true, ""});
#endif
}

/// backends/cuda/hardware_evidence.json, as it was compiled in.
nlohmann::ordered_json evidence_rows() {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
#ifdef HOTBUNK_CUDA
  for (const cuda::Evidence& e : cuda::hardware_evidence())
    rows.push_back({{"claim", e.claim},
                    {"last_run", e.last_run ? fmt::format("{} on {}: {}", e.last_run->date, e.last_run->machine,
                                                          e.last_run->command)
                                            : "never ran on hardware"}});
#endif
  return rows;
}

/// Of the same file the kinds of bodies that ran, each with its ops.
nlohmann::ordered_json body_rows() {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
#ifdef HOTBUNK_CUDA
  for (const cuda::BodyEvidence& b : cuda::body_evidence()) {
    nlohmann::ordered_json ops = nlohmann::ordered_json::object();
    for (const auto& [op, run] : b.ops)
      ops[op] = fmt::format("{} on {}: {}, {}", run.date, run.machine, run.command, run.commit);
    rows.push_back({{"body", b.body}, {"ops", std::move(ops)}});
  }
#endif
  return rows;
}

/// What a run in bf16 would take, and the rates on one core that it would choose by.
struct MeasuredProducts {
  Checked chosen;
  std::vector<Checked> classes;
  nlohmann::ordered_json document;
};

MeasuredProducts measured_products() {
  const kernels::Bf16Products unit = kernels::bf16_unit();
  const auto asked = products_asked(process_env, unit);
  const auto begin = std::chrono::steady_clock::now();
  const kernels::ProductRates rates = kernels::measure_product_paths();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const kernels::ProductPaths paths =
      asked && asked->fixed ? *asked->fixed : kernels::choose(kernels::rule_of_machine(), rates);
  MeasuredProducts out;
  const std::string text = kernels::text_of(paths, unit), rule = kernels::text_of(kernels::rule_of_machine(), unit);
  out.chosen = {"bf16 GEMM", text, asked.has_value(), asked ? "" : asked.error().front().message};
  if (text != rule) out.chosen.found += fmt::format(" (rule of the machine: {})", rule);
  if (asked && asked->fixed) out.chosen.found += fmt::format(" (as {} says)", bf16_products_variable);
  out.document = {
      {"choice", text}, {"rule", rule}, {"measuring_s", seconds}, {"classes", nlohmann::ordered_json::array()}};
  for (const kernels::ProductClass c : kernels::kProductClasses) {
    const std::string taken(name_of(paths[c], unit));
    nlohmann::ordered_json of_paths = nlohmann::ordered_json::array();
    std::vector<std::string> said;
    for (const auto& [path, gflop_s] : rates[c]) {
      of_paths.push_back({{"path", name_of(path, unit)}, {"gflop_s", gflop_s}});
      said.push_back(fmt::format("{} {:.0f} GF/s", name_of(path, unit), gflop_s));
    }
    out.document["classes"].push_back({{"class", name_of(c)}, {"taken", taken}, {"measured", std::move(of_paths)}});
    out.classes.push_back({fmt::format("bf16, {}", name_of(c)),
                           said.empty() ? taken : fmt::format("{} ({}; one thread)", taken, fmt::join(said, ", ")),
                           true, ""});
  }
  return out;
}

/// `most`: threads of a team, by OpenMP.
Checked check_cores(std::int64_t cores, std::int64_t most) {
  if (most >= cores) return {"cores", fmt::format("{}", cores), cores >= 1, ""};
  return {"cores", fmt::format("{}, and OMP_THREAD_LIMIT allows a team of {}", cores, most), false,
          fmt::format("unset OMP_THREAD_LIMIT, or run with --threads {}", most)};
}

int run(bool json) {
  const LocalMachine machine = local_machine();
  std::vector<Checked> findings;
  findings.push_back(check_two_ranks());  // first: it forks
  findings.push_back(check_cores(machine.cores, kernels::most_team_threads()));
  findings.push_back({"memory", format_bytes(static_cast<double>(machine.memory_bytes)), machine.memory_bytes > 0, ""});
  const MeasuredProducts products = measured_products();
  findings.push_back(products.chosen);
  findings.insert(findings.end(), products.classes.begin(), products.classes.end());
  findings.push_back(check_arena(false));
  findings.push_back(check_arena(true));
  findings.push_back(check_launch());
  findings.push_back(check_catalog());
  findings.push_back(check_cuda());
  findings.push_back(check_nccl());
  check_devices(findings);
  bool good = true;
  nlohmann::ordered_json document = {{"schema", "hotbunk.doctor/1"}, {"checks", nlohmann::ordered_json::array()}};
  for (const Checked& f : findings) {
    good = good && f.good;
    document["checks"].push_back(
        {{"what", f.what}, {"found", f.found}, {"good", f.good}, {"help", f.good ? "" : f.help}});
    if (!json)
      fmt::print("{:<4} {:<22} {}{}\n", f.good ? "ok" : "BAD", f.what, f.found,
                 f.good || f.help.empty() ? "" : "  -> " + f.help);
  }
  document["good"] = good;
  document["bf16_products"] = products.document;
  document["hardware_evidence"] = evidence_rows();
  document["hardware_bodies"] = body_rows();
  if (!json) {
    for (const auto& row : document["hardware_evidence"])
      fmt::print("     {:<40} {}\n", row["claim"].get<std::string>(), row["last_run"].get<std::string>());
#ifdef HOTBUNK_CUDA
    fmt::print("     {:<40} {}\n", "bodies of plans, by kind", cuda::bodies_text(cuda::body_evidence()));
#endif
  }
  const std::filesystem::path demo = "scenarios/demo.yaml";
  std::error_code ignored;
  if (json) print_document(json_text(document, 1));
  else if (std::filesystem::exists(demo, ignored)) flush_output(), say_next("plan " + demo.string());
  return good ? exit_done : exit_no;
}

}  // namespace

namespace {

/// The table of what plans, simulates and executes, from the code.
int show_capabilities(bool json) {
  const std::vector<CapabilityRow> rows = capabilities();
  if (json) {
    nlohmann::ordered_json document = {{"schema", "hotbunk.capabilities/1"}, {"rows", nlohmann::ordered_json::array()}};
    for (const CapabilityRow& r : rows)
      document["rows"].push_back({{"key", r.key},
                                  {"value", r.value},
                                  {"plans", r.plans},
                                  {"simulates", r.simulates},
                                  {"executes", r.executes},
                                  {"why", r.why}});
    print_document(json_text(document, 1));
    return exit_done;
  }
  TextTable table({"key", "value", "plans", "simulates", "executes", "why not"}, 6);
  const auto mark = [](bool yes) { return std::string(yes ? "yes" : "-"); };
  for (const CapabilityRow& r : rows)
    table.add({r.key, r.value, mark(r.plans), mark(r.simulates), mark(r.executes), r.why});
  fmt::print("{}", table.str());
  return exit_done;
}

}  // namespace

void add_doctor(CommandLine& line) {
  auto json = std::make_shared<bool>(false), table = std::make_shared<bool>(false);
  const Command sub =
      line.add_command("doctor", "check this machine: memory, launch variables, kernels, ranks that meet");
  sub.flag("--json", *json, "one JSON document on stdout, nothing else there");
  sub.flag("--capabilities", *table, "what plans, what simulates and what executes, asked of the code");
  sub.action([json, table] { return *table ? show_capabilities(*json) : run(*json); });
}

}  // namespace hotbunk

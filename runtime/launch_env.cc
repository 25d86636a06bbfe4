#include <fmt/format.h>

#include <charconv>
#include <cstdlib>

#include "runtime/launch.h"
#include "runtime/wire.h"

namespace hotbunk {
namespace {

constexpr int default_port = 29500;  // torchrun's default MASTER_PORT
constexpr std::size_t longest_token = stranger_limits.value_bytes;

Diagnostic launch_error(std::string code, std::string message, std::string note, std::string help) {
  Diagnostic d;
  d.code = std::move(code);
  d.message = std::move(message);
  if (!note.empty()) d.notes.push_back(std::move(note));
  d.help = std::move(help);
  return d;
}

/// Reads variables and collects every mistake among them before giving up.
class Reader {
 public:
  Reader(const EnvLookup& env, std::string source) : env_(env), source_(std::move(source)) {}

  std::optional<std::string> text(std::string_view name) const { return env_(name); }

  std::int64_t number(std::string_view name, std::int64_t low, std::int64_t high,
                      std::optional<std::int64_t> absent = std::nullopt) {
    const auto value = env_(name);
    if (!value) {
      if (absent) return *absent;
      errors_.push_back(launch_error(
          "E701", std::string(name) + " is not set", "launched by " + source_ + ", as its other variables say",
          "set " + std::string(name) + ", or unset " + source_ + "'s variables to start the ranks here"));
      return low;
    }
    std::int64_t n = 0;
    const char* last = value->data() + value->size();
    const auto [end, error] = std::from_chars(value->data(), last, n);
    if (error != std::errc() || end != last) {
      errors_.push_back(launch_error("E702", std::string(name) + " is not a number: \"" + *value + "\"",
                                     "launched by " + source_, ""));
      return low;
    }
    if (n < low || n > high) {
      errors_.push_back(launch_error("E703", std::string(name) + " = " + *value + " is out of range",
                                     std::to_string(low) + " … " + std::to_string(high) + " expected", ""));
      return low;
    }
    return n;
  }

  void contradiction(std::string message, std::string note) {
    errors_.push_back(
        launch_error("E703", std::move(message), std::move(note), "launch every rank with the same variables"));
  }

  void missing(std::string_view name, std::string why) {
    errors_.push_back(
        launch_error("E701", std::string(name) + " is not set", std::move(why), "set it to the host of rank 0"));
  }

  Result<std::optional<LaunchEnv>> finish(LaunchEnv e) {
    e.source = source_;
    if (errors_.empty() && e.rank >= e.world_size)
      contradiction("rank " + std::to_string(e.rank) + " does not exist in a world of " + std::to_string(e.world_size),
                    "ranks count from 0 to world size - 1, by " + source_ + "'s variables");
    if (errors_.empty() && e.local_rank >= e.world_size)
      contradiction("local rank " + std::to_string(e.local_rank) + " does not exist in a world of " +
                        std::to_string(e.world_size),
                    "by " + source_ + "'s variables");
    e.token = env_("HOTBUNK_TOKEN").value_or("");
    if (e.token.size() > longest_token)
      contradiction(fmt::format("HOTBUNK_TOKEN has {} characters", e.token.size()),
                    fmt::format("{} are the most", longest_token));
    if (!errors_.empty()) return fail(errors_);
    return std::optional<LaunchEnv>(std::move(e));
  }

 private:
  const EnvLookup& env_;
  std::string source_;
  Diagnostics errors_;
};

constexpr std::int64_t max_ranks = 1 << 20;

Result<std::optional<LaunchEnv>> from_torchrun(const EnvLookup& env) {
  Reader read(env, "torchrun");
  LaunchEnv e;
  e.world_size = static_cast<int>(read.number("WORLD_SIZE", 1, max_ranks));
  e.rank = static_cast<int>(read.number("RANK", 0, max_ranks));
  e.local_rank = static_cast<int>(read.number("LOCAL_RANK", 0, max_ranks, 0));
  e.listen_fd = static_cast<int>(read.number("HOTBUNK_LISTEN_FD", 0, 1 << 20, -1));
  const bool alone = e.world_size == 1;
  e.master_port = static_cast<int>(
      read.number("MASTER_PORT", 1, 65534, alone ? std::optional<std::int64_t>(default_port) : std::nullopt));
  if (read.text("TORCHELASTIC_USE_AGENT_STORE") == "True") ++e.master_port;
  if (const auto addr = read.text("MASTER_ADDR"); addr && !addr->empty()) e.master_addr = *addr;
  else if (!alone)
    read.missing("MASTER_ADDR", "world of " + std::to_string(e.world_size) + " ranks, by torchrun's variables");
  return read.finish(std::move(e));
}

/// "node[003-010,020],other" -> "node003"; "a,b" -> "a".
std::string first_host(const std::string& list) {
  const auto bracket = list.find('['), comma = list.find(',');
  if (bracket == std::string::npos || comma < bracket) return list.substr(0, comma);
  const auto end = list.find_first_of(",-]", bracket + 1);
  return list.substr(0, bracket) + list.substr(bracket + 1, end - bracket - 1);
}

Result<std::optional<LaunchEnv>> from_slurm(const EnvLookup& env) {
  Reader read(env, "slurm");
  LaunchEnv e;
  e.rank = static_cast<int>(read.number("SLURM_PROCID", 0, max_ranks));
  e.world_size = static_cast<int>(read.number("SLURM_NTASKS", 1, max_ranks));
  e.local_rank = static_cast<int>(read.number("SLURM_LOCALID", 0, max_ranks, 0));
  const std::int64_t job = read.number("SLURM_JOB_ID", 0, std::int64_t{1} << 40, 0);
  e.master_port = static_cast<int>(read.number("MASTER_PORT", 1, 65535, 20000 + job % 10000));
  if (const auto addr = read.text("MASTER_ADDR"); addr && !addr->empty()) e.master_addr = *addr;
  else if (const auto nodes = read.text("SLURM_JOB_NODELIST"); nodes && !nodes->empty())
    e.master_addr = first_host(*nodes);
  else if (e.world_size > 1)
    read.missing("SLURM_JOB_NODELIST",
                 "world of " + std::to_string(e.world_size) + " ranks, and no MASTER_ADDR either");
  return read.finish(std::move(e));
}

Result<std::optional<LaunchEnv>> from_mpi(const EnvLookup& env, bool open_mpi) {
  Reader read(env, "mpi");
  LaunchEnv e;
  std::int64_t local_size = -1;
  if (open_mpi) {
    e.rank = static_cast<int>(read.number("OMPI_COMM_WORLD_RANK", 0, max_ranks));
    e.world_size = static_cast<int>(read.number("OMPI_COMM_WORLD_SIZE", 1, max_ranks));
    e.local_rank = static_cast<int>(read.number("OMPI_COMM_WORLD_LOCAL_RANK", 0, max_ranks, 0));
    local_size = read.number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, max_ranks, e.world_size);
  } else {
    e.rank = static_cast<int>(read.number("PMI_RANK", 0, max_ranks));
    e.world_size = static_cast<int>(read.number("PMI_SIZE", 1, max_ranks));
    e.local_rank = static_cast<int>(read.number("MPI_LOCALRANKID", 0, max_ranks, e.rank));
    local_size = read.number("MPI_LOCALNRANKS", 1, max_ranks, e.world_size);
  }
  e.master_port = static_cast<int>(read.number("MASTER_PORT", 1, 65535, default_port));
  if (const auto addr = read.text("MASTER_ADDR"); addr && !addr->empty()) e.master_addr = *addr;
  else if (local_size < e.world_size)
    read.missing("MASTER_ADDR", "MPI started " + std::to_string(e.world_size) + " ranks, " +
                                    std::to_string(local_size) + " of them here");
  return read.finish(std::move(e));
}

}  // namespace

std::optional<std::string> process_env(std::string_view name) {
  const char* value = std::getenv(std::string(name).c_str());
  if (value == nullptr) return std::nullopt;
  return std::string(value);
}

Result<std::optional<LaunchEnv>> launch_env(const EnvLookup& env) {
  if (env("RANK") || env("WORLD_SIZE")) return from_torchrun(env);
  // Inside an allocation but outside srun the SLURM_NTASKS of the batch script is there, yet we are one process.
  if (env("SLURM_PROCID") && env("SLURM_STEP_ID")) return from_slurm(env);
  if (env("OMPI_COMM_WORLD_RANK") || env("OMPI_COMM_WORLD_SIZE")) return from_mpi(env, true);
  if (env("PMI_RANK") || env("PMI_SIZE")) return from_mpi(env, false);
  return std::optional<LaunchEnv>();
}

}  // namespace hotbunk

// How ranks come to be: started by torchrun, Slurm or MPI (their variables say who we are), or by ourselves on this
// host.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/diagnostic.h"

namespace hotbunk {

/// Who this process is in its world.
struct LaunchEnv {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  /// Rank 0 of a local launch inherits the listening socket, so that no port can be lost between choosing and binding
  /// it.
  int listen_fd = -1;
  /// What the ranks of this run know and strangers do not (HOTBUNK_TOKEN); "": nothing.
  std::string token;
  std::string source;  // "torchrun", "slurm", "mpi", "local"
};

using EnvLookup = std::function<std::optional<std::string>(std::string_view name)>;
/// getenv.
std::optional<std::string> process_env(std::string_view name);

/// Reads, in this order:
/// (and with each of them HOTBUNK_TOKEN, the secret of this run's ranks)
///   torchrun  RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT (HOTBUNK_LISTEN_FD from spawn_local). Where
///   torchrun's
///             agent itself listens on MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE=True) ours is the next port.
///   Slurm     SLURM_PROCID SLURM_NTASKS SLURM_LOCALID; MASTER_ADDR or the first host of SLURM_JOB_NODELIST;
///             MASTER_PORT or 20000 + SLURM_JOB_ID mod 10000. Only inside srun (SLURM_STEP_ID is set).
///   MPI       OMPI_COMM_WORLD_RANK/_SIZE/_LOCAL_RANK, or PMI_RANK/PMI_SIZE/MPI_LOCALRANKID; MASTER_ADDR and
///   MASTER_PORT are
///             needed when world size > 1 (127.0.0.1:29500 where all ranks are local).
/// nullopt when none of them is there. Errors: E701 a variable is missing, E702 not a number, E703 out of range or
/// contradicting another.
Result<std::optional<LaunchEnv>> launch_env(const EnvLookup&);

/// How one local rank ended.
struct RankExit {
  int rank = -1;
  int pid = 0;
  int exit_code = 0;  // of exit(), when signal is 0
  int signal = 0;
  bool stopped = false;  // it was stopped when the others had ended, and was killed
};

struct LaunchResult {
  /// 0; or 1 or 2 when the first failing rank said so; else 3.
  int exit_code = 0;
  /// The rank that failed first, nullopt when none did.
  std::optional<RankExit> first_failure;
  /// "rank 2 (pid 123) was killed by signal 9 (Killed)"; empty when none failed.
  std::string message;
  std::vector<RankExit> ranks;  // by rank
};

struct LaunchOptions {
  /// After the first failure the others have this long to say what they saw and end by themselves.
  double grace_seconds = 8.0;
  /// Called with the first SIGINT or SIGTERM to this process; may be empty.
  std::function<void(int signal)> on_stop{};
  /// Called with a line about a child that has been stopped for so long, and again ever more rarely; empty: stderr.
  double say_after_seconds = 10.0;
  std::function<void(const std::string&)> say{};
};

/// Set for the children of spawn_local to the launcher's pid, so that a rank knows who sends it signals.
inline constexpr const char* launcher_variable = "HOTBUNK_LAUNCHER_PID";

/// Forks n children on this host; child r runs body(env of rank r) and ends with what it returns (3 after an
/// exception). The first SIGINT or SIGTERM to this process is passed on, and the children end when they will: the exit
/// code is then 130 after SIGINT where it would be 0. A second SIGINT kills them. The children die with this process.
/// Call it before starting threads, or with both signals blocked in all of them.
LaunchResult fork_ranks(int n, const std::function<int(const LaunchEnv&)>& body, const LaunchOptions& = {});

/// The same, each child executing argv (argv[0]: path of the program, e.g. /proc/self/exe) with RANK, WORLD_SIZE,
/// LOCAL_RANK, MASTER_ADDR, MASTER_PORT, HOTBUNK_TOKEN set: launch_env finds them there.
LaunchResult spawn_local(int n, const std::vector<std::string>& argv, const LaunchOptions& = {});

/// Runs n ranks as threads of this process, thread r body(env of rank r); returns when all have ended. What each
/// returned, by rank; 3 after an exception, which is said on stderr.
std::vector<int> thread_ranks(int n, const std::function<int(const LaunchEnv&)>& body);

}  // namespace hotbunk

// What the system refuses, said with the limit's name: threads, open files, a closed or full standard output; and what
// a stopped rank looks like from outside.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <catch2/catch.hpp>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/json.h"
#include "tests/run/launched.h"

using namespace hotbunk;

namespace {

/// A shell command line with {} for the program; stdout and stderr are its own.
Result2 shell(const std::string& command) {
  const fs::path err = work_folder() / "shell.err";
  const int status = std::system(fmt::format("( {} ) 2> {} < /dev/null", command, err.string()).c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128, "", text_of(err)};
}

}  // namespace

TEST_CASE("a closed standard output is said to be closed, before any work; a full one is said to be full") {
  const fs::path file = scenario("output", 1, 1, "steps: 1");
  const Result2 closed = shell(fmt::format("{} plan {} >&-", program_file, file.string()));
  CHECK(closed.code == 2);
  CHECK(closed.err ==
        "error[E105]: standard output is closed: results go there\n"
        "   = help: give it somewhere to go: a file, a pipe or /dev/null\n");
  const fs::path out = work_folder() / "output";
  const Result2 run = shell(fmt::format("{} run {} --out {} >&-", program_file, file.string(), out.string()));
  CHECK(run.code == 2);
  CHECK_FALSE(fs::exists(out));
  const Result2 full = shell(fmt::format("{} plan {} > /dev/full", program_file, file.string()));
  CHECK(full.code == 3);
  CHECK_THAT(full.err, Catch::Contains("error[E605]: results cannot be written to standard output: No space left"));
}

TEST_CASE("with closed standard streams narration and input vanish: no file is written into or read") {
  const fs::path file = scenario("closed", 2, 1, "steps: 1"), out = work_folder() / "closed";
  for (const char* closed : {"2>&-", "0<&-", "0<&- 2>&-"}) {
    INFO(closed);
    const fs::path answer = work_folder() / "closed.json";
    const Result2 r = shell(fmt::format("( exec {} run {} --json --overwrite --out {} > {} {} )", program_file,
                                        file.string(), out.string(), answer.string(), closed));
    INFO(r.err);
    CHECK(r.code == 0);
    CHECK(json_from<nlohmann::json>(text_of(answer))["equal"] == true);
    // Every file that the run had open is what it should be: compare reads them all.
    CHECK(hotbunk_command("compare " + out.string()).code == 0);
    for (const char* name : {"metrics.jsonl", "lengths.jsonl", "sync_hashes.jsonl"})
      CHECK_THAT(text_of(out / name), !Catch::Contains("starting"));
  }
  // And an error that nobody hears is still told by the exit code.
  CHECK(shell(fmt::format("( exec {} plan {} --set steps=x > /dev/null 2>&- )", program_file, file.string())).code ==
        2);
}

TEST_CASE("a result that is lost is E605 with its reason, of every command") {
  const fs::path file = scenario("lost", 2, 1, "steps: 1"), out = work_folder() / "lost";
  REQUIRE(hotbunk_command(fmt::format("run {} --out {}", file.string(), out.string())).code == 0);
  const fs::path ids = work_folder() / "lost_ids.jsonl";
  std::ofstream(ids) << "[1, 3]\n";
  const std::string ask = fmt::format("--model {} --tokens {}", (out / "checkpoints/final").string(), ids.string());
  const fs::path profile = work_folder() / "lost_profile.yaml", again = work_folder() / "lost_again";
  const std::string s = file.string();
  for (const std::string& command : {std::string("--help"),
                                     std::string("--version"),
                                     std::string("run --help"),
                                     std::string("doctor"),
                                     std::string("doctor --json"),
                                     std::string("validate"),
                                     std::string("validate --json"),
                                     "plan " + s,
                                     "plan --json " + s,
                                     "plan --resolved " + s,
                                     "plan --print " + s,
                                     "simulate " + s,
                                     "simulate --json " + s,
                                     "explain " + s,
                                     "layout " + s,
                                     "layout --json --rank 1 " + s,
                                     "sweep --vary seed=1,2 " + s,
                                     "generate " + ask,
                                     "generate --json " + ask,
                                     "logprobs " + ask,
                                     "logprobs --json " + ask,
                                     "compare " + out.string(),
                                     "compare --json " + out.string(),
                                     "report " + out.string(),
                                     "report --json " + out.string(),
                                     fmt::format("calibrate {} --out {}", s, profile.string()),
                                     fmt::format("run {} --overwrite --out {}", s, again.string()),
                                     fmt::format("run {} --json --overwrite --out {}", s, again.string())}) {
    const Result2 r = shell(fmt::format("{} {} > /dev/full", program_file, command));
    INFO(command << '\n' << r.err);
    CHECK(r.code == 3);
    CHECK_THAT(r.err, Catch::Contains("error[E605]: results cannot be written to standard output: No space left"));
    CHECK_THAT(r.err, !Catch::Contains("in phase"));  // nothing of the computation failed
  }
  // What was wrong before decides the exit code; that its document is lost is said.
  const Result2 both = shell(fmt::format("{} plan /nowhere --json > /dev/full", program_file));
  CHECK(both.code == 2);
  CHECK_THAT(both.err, Catch::Contains("error[E101]") && Catch::Contains("error[E605]"));
}

TEST_CASE("limits of memory and of the size of files are named") {
  const fs::path file = scenario("small", 2, 1, "steps: 1"), out = work_folder() / "small.out";
  const Result2 size =
      shell(fmt::format("ulimit -f 1; exec {} simulate {} > {}", program_file, file.string(), out.string()));
  CHECK(size.code == 3);
  CHECK_THAT(size.err, Catch::Contains("error[E605]") &&
                           Catch::Contains("File too large: a file of this process may "
                                           "have") &&
                           Catch::Contains("B (ulimit -f)"));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // whose runtime takes all addresses there are
  const fs::path run = work_folder() / "small", ids = work_folder() / "small_ids.jsonl";
  REQUIRE(hotbunk_command(fmt::format("run {} --out {}", file.string(), run.string())).code == 0);
  {
    std::ofstream many(ids);
    for (int i = 0; i < 2'000'000; ++i) many << "[1,3,4,5,6,7,8,9,10,11,12,13]\n";
  }
  const Result2 memory = shell(fmt::format("ulimit -v 153600; exec {} logprobs --model {} --tokens {}", program_file,
                                           (run / "checkpoints/final").string(), ids.string()));
  fs::remove(ids);
  INFO(memory.err);
  CHECK(memory.code == 3);
  CHECK_THAT(memory.err, Catch::Contains("error[E604]: the system gives no more memory: ") &&
                             Catch::Contains("this process may have 157286400 B of addresses (ulimit -v)"));
#endif
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // whose runtime wants files and threads too
TEST_CASE("limits of threads and of open files are named") {
  const fs::path file = scenario("limits", 4, 1, "steps: 1");
  const std::string run =
      fmt::format("{} run {} --out {}", program_file, file.string(), (work_folder() / "limits").string());
  const auto start = std::chrono::steady_clock::now();
  const Result2 files = shell("ulimit -n 8; exec " + run);
  INFO(files.err);
  CHECK(files.code == 3);
  CHECK_THAT(files.err, Catch::Contains("this process may have 8 (ulimit -n)") && !Catch::Contains("E699"));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(50));  // not the rendezvous's 60 s, and more
  // Root has no limit of processes: as somebody who runs nothing else.
  const std::string nobody = ::geteuid() == 0 ? "setpriv --reuid=54321 --regid=54321 --clear-groups " : "";
  if (!nobody.empty() && shell(nobody + "true").code != 0) {
    std::fprintf(stderr, "skipped: no other user to be here (setpriv)\n");
    WARN("skipped: no other user to be here (setpriv)");
    return;
  }
  fs::permissions(work_folder(), fs::perms::all);
  const auto with_threads = [&](int limit) {
    return shell(fmt::format("exec {} prlimit --nproc={} {} run {} --overwrite --out {}", nobody, limit, program_file,
                             file.string(), (work_folder() / "threads_of_nobody").string()));
  };
  // Low: the launcher cannot start its ranks. Higher: a rank cannot start its threads. No limit is a fault of hotbunk.
  for (const int limit : {2, 9}) {
    const Result2 r = with_threads(limit);
    INFO(limit << '\n' << r.err);
    CHECK(r.code == 3);
    CHECK_THAT(r.err, Catch::Contains(fmt::format("this user may have {} processes and threads (ulimit -u)", limit)) &&
                          !Catch::Contains("E699"));
  }
  // Of one process what is too much are the threads of its products, which OpenMP would end it for without a word.
  const Result2 products =
      shell(fmt::format("exec {} prlimit --nproc=12 {} run {} --threads 16 --overwrite --out {}", nobody, program_file,
                        scenario("products", 1, 1, "steps: 1").string(), (work_folder() / "threads_alone").string()));
  INFO(products.err);
  CHECK(products.code == 3);
  CHECK_THAT(products.err,
             Catch::Contains("this user may have 12 processes and threads (ulimit -u)") && !Catch::Contains("E699"));
}
#endif

TEST_CASE("variables of OpenMP and oneDNN change no bit of a run, or are refused") {
  const auto threads = static_cast<int>(std::thread::hardware_concurrency()) + 1;  // which OMP_DYNAMIC never gives
  const auto run = [&](const std::string& variables, int ranks, const fs::path& out) {
    return shell(fmt::format("exec env {} {} run {} --threads {} --overwrite --out {}", variables, program_file,
                             scenario("teams", ranks, 1, "steps: 2").string(), threads, out.string()));
  };
  const auto weights = [](const fs::path& out) { return text_of(out / "checkpoints/final/model.safetensors"); };
  const fs::path as_it_is = work_folder() / "teams", other = work_folder() / "teams_other";
  REQUIRE(run("", 1, as_it_is).code == 0);
  REQUIRE(weights(as_it_is).size() > 1000);
  for (const std::string& variables :
       {std::string("OMP_DYNAMIC=true"), std::string("OMP_MAX_ACTIVE_LEVELS=0"), std::string("OMP_NUM_THREADS=1"),
        fmt::format("OMP_THREAD_LIMIT={}", threads),
        std::string("ONEDNN_DEFAULT_FPMATH_MODE=BF16")}) {  // the last on machines that multiply bf16
    const Result2 r = run(variables, 1, other);
    INFO(variables << '\n' << r.err);
    CHECK(r.code == 0);
    CHECK(weights(other) == weights(as_it_is));
  }
  // Once, with the remedy, and before anything of the earlier run is gone.
  for (const int ranks : {1, 2}) {
    const Result2 refused = run(fmt::format("OMP_THREAD_LIMIT={}", threads - 1), ranks, other);
    CHECK(refused.code == 2);
    CHECK(refused.err ==
          fmt::format("error[E710]: OMP_THREAD_LIMIT allows a team of {}, and a rank computes on {} threads\n"
                      "   = help: unset OMP_THREAD_LIMIT, or run with --threads {}\n",
                      threads - 1, threads, threads - 1));
    CHECK(weights(other) == weights(as_it_is));
  }
  if (threads < 3) return;  // one core needs no team
  const fs::path said = work_folder() / "teams.doctor";
  CHECK(shell(fmt::format("exec env OMP_THREAD_LIMIT=1 {} doctor > {}", program_file, said.string())).code != 0);
  CHECK_THAT(text_of(said),
             Catch::Contains("OMP_THREAD_LIMIT allows a team of 1") && Catch::Contains("run with --threads 1"));
}

TEST_CASE("where one host's ranks get too small a team, they say so, the others name them, and no folder is touched") {
  const fs::path file = scenario("teams_launched", 2, 1, "steps: 1"), out = work_folder() / "teams_launched";
  REQUIRE(hotbunk_command(fmt::format("run {} --threads 2 --out {}", file.string(), out.string())).code == 0);
  const std::string before = text_of(out / "run.json");
  for (const std::size_t limited : {0u, 1u}) {
    const ReservedPort port;
    std::vector<std::unique_ptr<Running>> ranks;
    const auto said = [](std::size_t rank) { return work_folder() / fmt::format("teams.{}.err", rank); };
    for (std::size_t rank = 0; rank < 2; ++rank) {
      auto variables = rank_variables(rank, 2, port);
      if (rank == limited) variables["OMP_THREAD_LIMIT"] = "1";
      ranks.push_back(std::make_unique<Running>(
          fmt::format("run {} --threads 2 --overwrite --out {}", file.string(), out.string()), said(rank), variables));
    }
    const std::array codes = {ranks[0]->wait(), ranks[1]->wait()};
    INFO("limited: rank " << limited << '\n' << text_of(said(0)) << text_of(said(1)));
    CHECK(codes[limited] == 2);
    CHECK(codes[1 - limited] == 3);
    CHECK_THAT(text_of(said(limited)), Catch::Contains("error[E710]: OMP_THREAD_LIMIT allows a team of 1"));
    CHECK_THAT(text_of(said(1 - limited)), Catch::Contains(fmt::format("rank {} ", limited)) &&
                                               Catch::Contains("OMP_THREAD_LIMIT allows a team of 1"));
    CHECK(text_of(out / "run.json") == before);
  }
}

TEST_CASE("a stopped rank ends the run after run.timeout_s, and is named by the ranks and by the launcher") {
  const fs::path file = scenario("stopped", 3, 1, "steps: 100000\nrun: {timeout_s: 4}");
  const fs::path err = work_folder() / "stopped.err";
  Running run(fmt::format("run {} --out {}", file.string(), (work_folder() / "stopped").string()), err);
  REQUIRE(wait_for_text(err, "step 1/"));
  const std::vector<int> ranks = children_of(run.pid());
  REQUIRE(ranks.size() == 3);
  ::kill(ranks[1], SIGSTOP);
  int code = 0;
  const bool ended = run.ended_within(180.0, code);
  const std::string said = text_of(err);
  INFO(said);
  REQUIRE(ended);
  CHECK(code == 3);
  CHECK_THAT(said, Catch::Contains(fmt::format(" (pid {}): stopped (SIGSTOP", ranks[1])) &&
                       Catch::Contains("error[E603]: rank ") &&
                       Catch::Contains("for 4 s nobody it waits for worked (run.timeout_s)") &&
                       Catch::Contains(fmt::format(" (pid {}) was stopped (SIGSTOP", ranks[1])));
  for (const int pid : ranks) CHECK(::kill(pid, 0) != 0);
}

// What a run writes and shows while it goes on: files of whole lines, samples, the console; and that neither memory nor
// files grow with the number of steps.
#include <fcntl.h>
#include <pty.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "base/hash.h"
#include "cli/run_console.h"
#include "cli/step_lines.h"
#include "tests/json.h"
#include "tests/run/json_lines.h"
#include "tests/run/launched.h"

using namespace hotbunk;
using Json = nlohmann::json;

namespace {

std::string run_of(const std::string& name, const fs::path& out, const std::string& more) {
  const Result2 r =
      hotbunk_command(fmt::format("run {} --threads 1 --out {} {}", scenario(name, 1, 1).string(), out.string(), more));
  INFO(r.err);
  REQUIRE(r.code == 0);
  return r.out + r.err;
}

}  // namespace

TEST_CASE("lines of steps: what is there is whole, and a file goes on where it is told") {
  const fs::path path = work_folder() / "lines" / "steps.jsonl";
  {
    auto lines = StepLines::create(path);
    REQUIRE(lines);
    for (int step = 1; step <= 3; ++step) {
      REQUIRE(lines->add(fmt::format("{{\"step\": {}}}", step)));
      CHECK(static_cast<std::int64_t>(fs::file_size(path)) == lines->bytes());  // it does not wait in a buffer
    }
  }
  std::ofstream(path, std::ios::app) << "{\"step\": 4}\n{\"step\": 5, \"loss";  // torn by a kill
  {
    auto goes_on = StepLines::continue_after(path, 9);
    REQUIRE(goes_on);
    CHECK(goes_on->last() == "{\"step\": 4}");
    REQUIRE(goes_on->add("{\"step\": 5}"));
  }
  CHECK(lines_of(path).size() == 5);
  {
    auto goes_on = StepLines::continue_after(path, 2);  // later lines go
    REQUIRE(goes_on->add("{\"step\": 3, \"again\": true}"));
  }
  CHECK(text_of(path) == "{\"step\": 1}\n{\"step\": 2}\n{\"step\": 3, \"again\": true}\n");
  { CHECK(StepLines::continue_after(path, 0)->last().empty()); }
  CHECK(text_of(path).empty());
  CHECK(StepLines::create("/dev/full/x").error().front().code == "E103");
}

TEST_CASE("a line that the disk has no room for is taken back, whole") {
  const fs::path path = work_folder() / "full.jsonl";
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const auto no_signal = ::signal(SIGXFSZ, SIG_IGN);  // then a write that is too long is an error
  auto lines = StepLines::create(path);
  REQUIRE(lines);
  rlimit small = before;
  small.rlim_cur = 40;
  ::setrlimit(RLIMIT_FSIZE, &small);
  Status first = lines->add("{\"step\": 1, \"loss\": 0.5}"), second = lines->add("{\"step\": 2, \"loss\": 0.25}");
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, no_signal);
  CHECK(first);
  REQUIRE_FALSE(second);
  CHECK(second.error().front().code == "E103");
  CHECK(second.error().front().message.find("File too large") != std::string::npos);
  CHECK(text_of(path) == "{\"step\": 1, \"loss\": 0.5}\n");
}

TEST_CASE("the console's line fits its terminal, the less important fields go first") {
  Scenario s;
  s.steps = 110;
  s.algorithm.prompts = 2, s.algorithm.samples_per_prompt = 2;
  const StepMetrics metrics{12,
                            {{"reward", 0.25},
                             {"loss", -0.5},
                             {"actor/grad_norm", 0.772},
                             {"prompt_length/mean", 4.0},
                             {"response_length/mean", 3.5}}};
  const std::vector<PhaseSpan> stays = {{0, 12, 1, 1'000'000'000, 1'020'000'000, 1},
                                        {0, 12, 2, 1'020'000'000, 1'030'000'000, 1}};
  SpaceMemory device;
  device.peak_bytes = 3 << 20;
  const StepFigures step{metrics, stays, device};
  RunConsole console(s, 1, false);
  CHECK(
      console.line(step) ==
      "step 12/110  30.00 ms  1,000 tokens/s  reward 0.2500  response 3.5  loss -0.5000  grad norm 0.7720  memory 3.00 "
      "MiB  0 s left");
  CHECK(console.line(step, 60) == "step 12/110  30.00 ms  reward 0.2500  loss -0.5000  0 s left");
  CHECK(console.line(step, 30) == "step 12/110  reward 0.2500");
  for (int width = 1; width < 140; ++width)
    REQUIRE(console.line(step, width).size() <= static_cast<std::size_t>(width));
  // Supervised fine-tuning has neither reward nor sampled responses.
  s.algorithm.name = AlgorithmName::sft;
  const StepMetrics sft{12, {{"loss", 0.5}, {"prompt_length/mean", 4.0}, {"response_length/mean", 3.5}}};
  const std::string line = RunConsole(s, 1, false).line({sft, stays, device});
  CHECK(line.find("reward") == std::string::npos);
  CHECK(line.find("response") == std::string::npos);
  CHECK(line.find("  500 tokens/s  loss 0.5000") != std::string::npos);
}

TEST_CASE("a narrow terminal gets one line in place that never wraps") {
  constexpr unsigned short columns = 47;
  const winsize size{.ws_row = 24, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0};
  int screen = -1;
  const std::string path = scenario("narrow", 1, 1, "steps: 6").string(), out = (work_folder() / "narrow").string();
  const pid_t child = ::forkpty(&screen, nullptr, nullptr, &size);
  if (child == 0) {
    const int results = ::open("/dev/null", O_WRONLY);
    ::dup2(results, STDOUT_FILENO);
    ::execl(program_file, "hotbunk", "run", path.c_str(), "--out", out.c_str(), static_cast<char*>(nullptr));
    ::_exit(9);
  }
  std::string said;
  char buffer[4096];
  for (ssize_t n; (n = ::read(screen, buffer, sizeof buffer)) > 0;) said.append(buffer, static_cast<std::size_t>(n));
  ::close(screen);
  int status = 0;
  ::waitpid(child, &status, 0);
  INFO(said);
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(said.find("step 1/6") != std::string::npos);
  CHECK(said.find("step 6/6") != std::string::npos);
  std::size_t longest = 0, newlines = 0;
  for (std::size_t at = 0; at < said.size();) {
    const std::size_t end = std::min(said.find_first_of("\r\n", at), said.size());
    std::string part = said.substr(at, end - at);
    if (part.starts_with("\033[K")) part.erase(0, 3);
    if (part.starts_with("step ")) longest = std::max(longest, part.size());
    newlines += end < said.size() && said[end] == '\n' ? 1 : 0;
    at = end + 1;
  }
  CHECK(longest > 20);
  CHECK(longest < columns);
  CHECK(newlines == 2);  // behind the last step, and behind what comes next
}

TEST_CASE("phases, times and rewards are printed once") {
  const std::string said = run_of("once", work_folder() / "once", "--set steps=2");
  const auto times = [&](const std::string& what) {
    std::size_t n = 0;
    for (auto at = said.find(what); at != std::string::npos; at = said.find(what, at + 1)) ++n;
    return n;
  };
  CHECK(times("Time by phase") == 1);
  CHECK(times("\n  rollout  ") == 3);  // its time, its memory, its turn on the GPU
  CHECK(times("\nMetrics\n") == 1);    // the table with the reward
  CHECK(times("equal  memory, traffic and ops") == 1);
  CHECK(times("step 1/2  ") == 1);
  CHECK(said.find("\033[") == std::string::npos);
  // With --json stdout is one document.
  const Result2 json = hotbunk_command(fmt::format(
      "run {} --json --out {}", scenario("once", 1, 1, "steps: 2").string(), (work_folder() / "once_json").string()));
  CHECK(json_from<Json>(json.out)["steps"] == 2);
  CHECK(json.err.find("step 2/2  ") != std::string::npos);
  // The files and the document speak of the same seconds.
  double in_lines = 0.0;
  for (const Json& line : lines_of(work_folder() / "once_json/metrics.jsonl"))
    in_lines += line["timing_s/gen"].get<double>();
  const Json document = json_from<Json>(json.out);
  for (const Json& p : document["phase_totals"])
    if (p["name"] == "rollout") CHECK(p["seconds"].get<double>() == Approx(in_lines));
}

TEST_CASE("samples of the first, the last and some steps, the best and the worst among them") {
  const fs::path out = work_folder() / "samples";
  run_of("samples", out, "--set steps=45 --set algorithm.old_logprobs=false");
  const std::vector<Json> samples = lines_of(out / "samples.jsonl");
  std::set<int> steps;
  std::map<int, int> per_step;
  for (const Json& s : samples) steps.insert(s["step"].get<int>()), ++per_step[s["step"].get<int>()];
  CHECK(steps.contains(1));
  CHECK(steps.contains(45));
  CHECK(steps.size() == 16);  // every third
  for (const auto& [step, count] : per_step) CHECK(count == 8);
  std::map<int, double> mean;
  for (const Json& line : lines_of(out / "metrics.jsonl")) {
    mean[line["step"]] = line["reward"];
    if (!steps.contains(line["step"].get<int>())) continue;
    double best = -1.0, worst = 2.0;
    for (const Json& s : samples)
      if (s["step"] == line["step"])
        best = std::max(best, s["reward"].get<double>()), worst = std::min(worst, s["reward"].get<double>());
    CHECK(best == line["critic/score/max"].get<double>());
    CHECK(worst == line["critic/score/min"].get<double>());
  }
  const Json& first = samples.front();
  CHECK(first["tokens"]["prompt"].size() == 4);  // BOS, two digits, '='
  CHECK(first["tokens"]["response"].size() == first["response_tokens"].get<std::size_t>());
  CHECK(first["logprobs"]["rollout"].size() == first["response_tokens"].get<std::size_t>());
  CHECK(first["text"]["prompt"].get<std::string>().size() == 3);
  CHECK(first["text"]["prompt"].get<std::string>().back() == '=');
  CHECK(first.contains("advantage"));
  CHECK_FALSE(first["logprobs"].contains("training"));  // without a pass of its own nobody computes them
  CHECK(text_of(out / "report.html").find("\"samples\":[{\"step\":1,") != std::string::npos);

  // The same again, and with what else can be asked for; nothing else changes.
  const fs::path again = work_folder() / "samples_again";
  run_of("samples", again, "--set steps=45 --set algorithm.old_logprobs=false");
  CHECK(text_of(again / "samples.jsonl") == text_of(out / "samples.jsonl"));
  const fs::path none = work_folder() / "samples_none";
  run_of("samples", none, "--set steps=45 --set algorithm.old_logprobs=false --samples-every 0");
  CHECK_FALSE(fs::exists(none / "samples.jsonl"));
  CHECK(text_of(none / "sync_hashes.jsonl") == text_of(out / "sync_hashes.jsonl"));
  CHECK(text_of(none / "lengths.jsonl") == text_of(out / "lengths.jsonl"));
  const fs::path own = work_folder() / "samples_own";
  run_of("samples", own, "--set steps=5 --samples-every 2 --set algorithm.old_logprobs=true");
  const std::vector<Json> with = lines_of(own / "samples.jsonl");
  CHECK(with.size() == 4 * 8);  // steps 1, 2, 4, 5
  for (const Json& s : with) {
    REQUIRE(s["logprobs"]["training"].size() == s["response_tokens"].get<std::size_t>());
    for (std::size_t t = 0; t < s["logprobs"]["training"].size(); ++t)
      CHECK(s["logprobs"]["training"][t].get<double>() ==
            Approx(s["logprobs"]["rollout"][t].get<double>()).margin(1e-4));
  }
}

TEST_CASE("samples.jsonl has a most, and what is behind it is not written and said once") {
  // As a run that has filled its file: the first line takes nearly all of it.
  const fs::path out = work_folder() / "full";
  run_of("full", out, "--set steps=2 --set checkpoint_every=1");
  constexpr std::int64_t most = std::int64_t{32} << 20;  // docs/run.md
  const std::string before = text_of(out / "samples.jsonl");
  REQUIRE(before.starts_with("{"));
  const std::size_t room = 3 * before.find('\n') / 2;  // for a line more, and not for two
  {
    std::ofstream file(out / "samples.jsonl");
    file << '{' << std::string(static_cast<std::size_t>(most) - before.size() - room, ' ') << before.substr(1);
  }
  const Result2 r = hotbunk_command(fmt::format("run --resume {} --set steps=4", out.string()));
  INFO(r.err);
  CHECK(r.code == 0);
  const auto said = r.err.find("samples.jsonl is full (32 MiB) at step 3: no more samples are written");
  CHECK(said != std::string::npos);
  CHECK(r.err.find("samples.jsonl is full", said + 1) == std::string::npos);
  const auto size = static_cast<std::int64_t>(fs::file_size(out / "samples.jsonl"));
  CHECK(size <= most);
  std::map<int, int> per_step;
  for (const Json& line : lines_of(out / "samples.jsonl")) ++per_step[line["step"].get<int>()];
  CHECK(per_step == std::map<int, int>{{1, 8}, {2, 8}, {3, 1}});
  CHECK(hotbunk_command(fmt::format("report {}", out.string())).code == 0);
}

TEST_CASE("files of a long run are as large as those of a short one, and say so; compare is exact over all steps") {
  const auto run = [](int steps) {
    const fs::path out = work_folder() / fmt::format("long{}", steps);
    const std::string said = run_of("long", out, fmt::format("--set steps={}", steps));
    CHECK(said.find("equal  memory, traffic and ops") != std::string::npos);
    CHECK(said.find(fmt::format(" of {} steps (the first, one in", steps)) != std::string::npos);
    return out;
  };
  const fs::path some = run(400), more = run(900);
  for (const char* file : {"trace.json", "simulated.json", "summary.json", "report.html", "perfetto.json"}) {
    INFO(file);
    CHECK(static_cast<double>(fs::file_size(more / file)) < 1.3 * static_cast<double>(fs::file_size(some / file)));
  }
  const Json summary = json_from<Json>(text_of(more / "summary.json"));
  CHECK(summary["steps"] == 900);
  CHECK(summary["kept"]["of"] == 900);
  CHECK(summary["kept"]["every"] == 4);
  CHECK(summary["kept"]["steps"].get<int>() < 260);
  CHECK(summary["metrics"].size() < 1000);
  for (const Json& p : summary["phase_totals"])
    if (p["name"] == "train") CHECK(p["times"] == 900);
  // The files of lines have all of them, the hashes in full in some.
  CHECK(lines_of(more / "metrics.jsonl").size() == 900);
  CHECK(lines_of(more / "lengths.jsonl").size() == 900);
  const std::vector<Json> hashes = lines_of(more / "sync_hashes.jsonl");
  REQUIRE(hashes.size() == 900);
  CHECK(hashes[3].contains("tensors"));
  CHECK(hashes[899].contains("tensors"));
  CHECK_FALSE(hashes[500].contains("tensors"));
  CHECK(hashes[500]["digest"] != hashes[501]["digest"]);
  // A step that nobody keeps rows of is compared too: other lengths move other bytes there.
  CHECK(hotbunk_command(fmt::format("compare {}", more.string())).code == 0);
  std::string lengths = text_of(more / "lengths.jsonl");
  const std::string line = fmt::format("{{\"step\": {},", 501);
  const auto at = lengths.find("\"response_tokens\": [", lengths.find(line)) + 20;
  REQUIRE(lengths[at] == '3');
  for (std::size_t i = at; lengths[i] != ']'; ++i)
    if (lengths[i] == '3' || lengths[i] == '2') lengths[i] = '1';
  std::ofstream(more / "lengths.jsonl") << lengths;
  Json record = json_from<Json>(text_of(more / "folder.json"));  // as if the run had written it so
  record["digests"]["lengths.jsonl"] = hash_text(lengths);
  std::ofstream(more / "folder.json") << json_text(record);
  const Result2 differs = hotbunk_command(fmt::format("compare {}", more.string()));
  CHECK(differs.code == 1);
  CHECK(differs.out.find("not equal") == 0);
}

// A sanitizer keeps what was freed, to know it again.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
namespace {

/// Peak resident bytes of a process so far.
std::int64_t peak_resident(pid_t pid) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) * 1024;
  return -1;
}

}  // namespace

TEST_CASE("the memory of a run's ranks does not grow with its steps") {
  constexpr std::int64_t from = 300, until = 900;
  // A run that kept its rows took 7,600 B a step, 4.5 MB here. One that does not takes some 140 B a step over 20,000
  // steps, in pieces of 0.6 MB, of which two may fall into these 600 steps (2,000 B a step, which was seen).
  constexpr std::int64_t most_bytes_per_step = 4000;
  const std::string path = scenario("soak", 2, 2, "steps: 1000000").string();
  const fs::path out = work_folder() / "soak";
  Running run(fmt::format("run {} --out {}", path, out.string()), "/dev/null");
  const auto wait_for = [&](std::int64_t step) {
    const std::string sign = fmt::format("\n{{\"step\":{},", step);
    std::ifstream file;
    std::string seen;
    for (int i = 0; i < 3000; ++i) {
      if (!file.is_open()) file.open(out / "metrics.jsonl");
      file.clear();
      for (std::string line; std::getline(file, line);) seen = "\n" + line;
      const Json row = json_or_discarded<Json>(seen);  // the last line may be in the middle of being written
      if (row.is_object() && row.value("step", std::int64_t{0}) >= step) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    return false;
  };
  const bool came = wait_for(from);
  std::vector<std::pair<int, std::int64_t>> before;
  for (const int pid : children_of(run.pid())) before.emplace_back(pid, peak_resident(pid));
  const bool went_on = came && wait_for(until);
  std::vector<std::int64_t> after;
  for (const auto& [pid, bytes] : before) after.push_back(peak_resident(pid));
  run.kill(SIGKILL);
  run.wait();
  REQUIRE(went_on);
  REQUIRE(before.size() == 2);
  for (std::size_t i = 0; i < before.size(); ++i) {
    const double slope = static_cast<double>(after[i] - before[i].second) / static_cast<double>(until - from);
    INFO("rank " << i << ": " << before[i].second << " B, then " << after[i] << " B");
    CHECK(before[i].second > 0);
    CHECK(slope < most_bytes_per_step);
  }
}
#endif

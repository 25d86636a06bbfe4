// Mistakes in a command line, and every error as a document: one form for people, one for programs.
#include <sys/stat.h>

#include <array>
#include <catch2/catch.hpp>
#include <cctype>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>

#include "tests/json.h"
#include "tests/run/launched.h"

using namespace hotbunk;
using Json = nlohmann::json;

namespace {

Result2 piped(const std::string& arguments, const fs::path& input) {
  const fs::path out = work_folder() / "stdout", err = work_folder() / "stderr";
  const int status = std::system(
      fmt::format("{} {} > {} 2> {} < {}", program_file, arguments, out.string(), err.string(), input.string())
          .c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128, text_of(out), text_of(err)};
}

/// A tiny model with random weights, made by a run of one step.
const fs::path& tiny_model() {
  static const fs::path model = [] {
    const fs::path out = work_folder() / "tiny";
    REQUIRE(hotbunk_command(fmt::format("run {} --out {}", scenario("tiny", 1, 1, "steps: 1").string(), out.string()))
                .code == 0);
    return out / "checkpoints" / "final";
  }();
  return model;
}

fs::path with_config(const std::string& name, const std::function<void(Json&)>& change) {
  const fs::path folder = work_folder() / name;
  fs::remove_all(folder);
  fs::copy(tiny_model(), folder, fs::copy_options::recursive);
  Json config = json_from<Json>(text_of(folder / "config.json"));
  change(config);
  std::ofstream(folder / "config.json") << json_text(config);
  return folder;
}

/// A page less than the plan of the scenario maps.
std::string too_small(const std::string& file) {
  const std::int64_t mapped = json_from<Json>(hotbunk_command("plan " + file + " --json").out).at("mapped_peak_bytes");
  return fmt::format(" --set cluster.device_memory_mib={}", static_cast<double>(mapped - 4096) / (1 << 20));
}

fs::path file_of(const std::string& name, const std::string& text) {
  const fs::path path = work_folder() / name;
  std::ofstream(path) << text;
  return path;
}

}  // namespace

TEST_CASE("a mistake in the command line is a diagnostic with the nearest option") {
  const std::string file = scenario("usage", 1, 1).string();
  struct Case {
    std::string arguments, code, says, help;
  };
  for (const Case& c :
       {Case{"", "E142", "no command is given", "hotbunk --help"},
        Case{"simulat x", "E126", "there is no command 'simulat'", "did you mean simulate?"},
        Case{"plan " + file + " --jsn", "E141", "nothing takes '--jsn'", "did you mean --json?"},
        Case{"plan " + file + " --sett=a=b", "E141", "'--sett=a=b'", "did you mean --set?"},
        Case{"plan " + file + " other.yaml", "E141", "'other.yaml'", "hotbunk plan --help"},
        Case{"plan", "E142", "scenario is required", "hotbunk plan --help"},
        Case{"plan " + file + " --out", "E143", "--out: 1 required TEXT missing", "hotbunk plan --help"},
        Case{"plan " + file + " --top x", "E143", "--top", "hotbunk plan --help"},
        Case{"plan " + file + " --resolved --print", "E144", "exclude each other", "--help"},
        Case{"plan " + file + " --phase train", "E144", "need each other", "--help"}}) {
    const Result2 r = hotbunk_command(c.arguments);
    INFO(c.arguments << '\n' << r.err);
    CHECK(r.code == 2);
    CHECK(r.out.empty());
    CHECK_THAT(r.err, Catch::StartsWith("error[" + c.code + "]: ") && Catch::Contains(c.says) &&
                          Catch::Contains("\n  --> hotbunk") && Catch::Contains("   = help: ") &&
                          Catch::Contains(c.help));
  }
  CHECK(hotbunk_command("--help").code == 0);
  CHECK(hotbunk_command("plan --help").code == 0);
  CHECK(hotbunk_command("--version").code == 0);
}

TEST_CASE("under --json an error is one document, of every command") {
  const std::string file = scenario("errors", 2, 1).string();
  const std::string nowhere = (work_folder() / "nowhere").string();
  for (const std::string& arguments : std::vector<std::string>{
           "plan " + nowhere + " --json", "simulate " + nowhere + " --json", "run " + nowhere + " --json",
           "explain " + nowhere + " --json", "sweep " + nowhere + " --vary seed=1,2 --json",
           "calibrate " + nowhere + " --json", "report " + nowhere + " --json", "compare " + nowhere + " --json",
           "validate --json --data " + nowhere, "logprobs --json --model " + nowhere + " --tokens " + nowhere,
           "generate --json --model " + nowhere + " --tokens " + nowhere, "doctor --json --no-such-flag", "plan --json",
           "no-such-command --json", "--json", "plan " + file + " --json --set seed=x --set steps=y",
           "run " + file + " --json --set algorithm.name=sft --set \"task.name=''\" --set task.data=" + nowhere}) {
    const Result2 r = hotbunk_command(arguments);
    INFO(arguments << '\n' << r.out << '\n' << r.err);
    CHECK(r.code == 2);
    REQUIRE(is_json(r.out));
    const Json doc = json_from<Json>(r.out);
    CHECK(doc.at("schema") == "hotbunk.error/1");
    CHECK(doc.at("exit_code") == r.code);
    CHECK(doc.at("code").get<std::string>().starts_with("E"));
    CHECK_FALSE(doc.at("message").get<std::string>().empty());
    CHECK(doc.at("where").contains("line"));
    CHECK(doc.at("notes").is_array());
    CHECK(doc.at("help").is_string());
    CHECK(doc.at("errors").at(0).at("code") == doc.at("code"));
  }
  const Json two = json_from<Json>(hotbunk_command("plan " + file + " --json --set seed=x --set steps=y").out);
  CHECK(two.at("errors").size() == 2);
  // A result stays the only document: what does not fit is said on stderr.
  const Result2 small = hotbunk_command("plan " + file + " --json" + too_small(file));
  CHECK(small.code == 1);
  REQUIRE(is_json(small.out));
  CHECK(json_from<Json>(small.out).at("schema") == "hotbunk.plan/1");
  CHECK_THAT(small.err, Catch::Contains("error[E301]"));
}

TEST_CASE("a run that fails in its ranks leaves one document, rank 0's or the launcher's") {
  const std::string file = scenario("fails", 2, 1, "steps: 1").string();
  const std::string out = (work_folder() / "fails").string();
  const Result2 r = hotbunk_command("run " + file + " --json --no-fit-check" + too_small(file) + " --out " + out);
  INFO(r.out << r.err);
  CHECK(r.code == 3);
  REQUIRE(is_json(r.out));
  CHECK(json_from<Json>(r.out).at("schema") == "hotbunk.error/1");
  CHECK(json_from<Json>(r.out).at("exit_code") == 3);

  // A rank that is killed says nothing. The document is rank 0's, who noticed; of rank 0 itself the launcher's.
  const fs::path said = work_folder() / "fails.err", printed = work_folder() / "fails.json";
  const auto document_after_kill_of = [&](std::size_t rank) {
    Running run(fmt::format("run {} --json --set steps=100000 --overwrite --out {}", file, out), said, {}, "", printed);
    REQUIRE(wait_for_text(said, "step 1/"));
    const std::vector<int> ranks = children_of(run.pid());
    REQUIRE(ranks.size() == 2);
    const int killed = ranks[rank];
    ::kill(killed, SIGKILL);
    CHECK(run.wait() == 3);
    INFO(text_of(said));
    CHECK_THAT(text_of(said), Catch::Contains(fmt::format("rank {} (pid {}) was killed by signal 9", rank, killed)));
    REQUIRE(is_json(text_of(printed)));
    const Json document = json_from<Json>(text_of(printed));
    CHECK(document.at("errors").size() == 1);
    return document;
  };
  const Json noticed = document_after_kill_of(1);
  CHECK(noticed.at("code") == "E602");
  CHECK_THAT(noticed.at("message").get<std::string>(),
             Catch::Contains("rank 1 (pid ") && Catch::Contains("died while"));
  const Json launchers = document_after_kill_of(0);
  CHECK(launchers.at("code") == "E603");
  CHECK_THAT(launchers.at("message").get<std::string>(), Catch::Contains("rank 0 (pid "));
}

TEST_CASE("the next command is narration, and it works") {
  const fs::path file = scenario("next", 2, 1, "steps: 1");
  const Result2 plan = hotbunk_command(fmt::format("plan {} --set seed=3", file.string()));
  CHECK(plan.out.find("Next:") == std::string::npos);
  CHECK_THAT(plan.err, Catch::Contains(fmt::format("Next: hotbunk simulate {} --set seed=3\n", file.string())));
  const Result2 simulated = hotbunk_command("simulate " + file.string());
  CHECK(simulated.out.find("Next:") == std::string::npos);
  CHECK_THAT(simulated.err, Catch::Contains("Next: hotbunk run "));
  // What nothing lowers is not to be run, nor is here what is of H100s.
  const std::string megatron = file.string() + " --set train.engine=megatron";
  CHECK_THAT(hotbunk_command("explain " + megatron).err, Catch::Contains("Next: hotbunk simulate "));
  const Result2 priced = hotbunk_command("simulate " + megatron);
  CHECK(priced.code == 0);
  CHECK(priced.err.find("hotbunk run") == std::string::npos);
  const std::string h100 = file.string() + " --set cluster.gpu=h100-sxm-80gb --set cluster.device_memory_mib=512";
  CHECK(hotbunk_command("simulate " + h100).err.find("hotbunk run") == std::string::npos);
}

TEST_CASE("behind an answer of no the next command has what cures it, and that command says yes") {
  const fs::path file = work_folder() / "too-large.yaml";
  std::ofstream(file)
      << "model: qwen2.5-7b\nprofile: verl-fsdp\ncluster: {gpu: h100-sxm-80gb}\n"
         "train: {engine: fsdp2, layout: {dp: 8}, micro_batch_tokens: 65536, recompute: none}\n"
         "rollout: {engine: vllm, layout: {tp: 1, dp: 8}, memory_fraction: 0.6}\n"
         "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 8192, max: 16384}}\n";
  for (const std::string command : {"explain", "plan --budget 2000"}) {
    const Result2 no = hotbunk_command(command + " " + file.string());
    INFO(no.out << no.err);
    CHECK(no.code == 1);
    const std::string next = "Next: hotbunk ";
    const auto at = no.err.find(next);
    REQUIRE(at != std::string::npos);
    const std::string line = no.err.substr(at + next.size(), no.err.find('\n', at) - at - next.size());
    INFO(line);
    CHECK_THAT(line, Catch::Contains(file.string() + " --set "));
    CHECK(line.substr(0, line.find(' ')) != command.substr(0, command.find(' ')));
    CHECK(hotbunk_command(line + (line.starts_with("plan") ? " --budget 2000" : "")).code == 0);
  }
}

TEST_CASE("what plans, simulates and executes is asked of the code") {
  const Result2 r = hotbunk_command("doctor --capabilities --json");
  REQUIRE(r.code == 0);
  const auto doc = nlohmann::json::parse(r.out);
  CHECK(doc.at("schema") == "hotbunk.capabilities/1");
  std::map<std::string, std::string> rows;  // "key value" -> what it does
  for (const auto& row : doc.at("rows")) {
    const std::string name = row.at("key").get<std::string>() + " " + row.at("value").get<std::string>();
    INFO(name << ": " << row.at("why"));
    CHECK(row.at("plans") == true);
    CHECK(row.at("simulates") == true);
    CHECK(row.at("executes") == row.at("why").get<std::string>().empty());
    rows[name] = row.at("executes") == true ? "executes" : "simulates";
  }
  CHECK(rows.size() > 80);
  CHECK(rows.at("train.engine fsdp2") == "executes");
  CHECK(rows.at("train.engine fsdp1 with tp 2") == "executes");
  CHECK(rows.at("train.engine fsdp1 with pp 2") == "executes");
  CHECK(rows.at("train.engine fsdp1 with ep 2") == "executes");
  CHECK(rows.at("rollout.layout.attention_dp 2") == "executes");
  CHECK(rows.at("rollout.layout.ep 2") == "executes");
  CHECK(rows.at("train.layout.shard_over [dp]") == "executes");
  CHECK(rows.at("train.reshard_after_forward 4 with pp 2") == "executes");
  CHECK(rows.at("train.engine megatron") == "simulates");
  CHECK(rows.at("model deepseek-v3") == "executes");
  CHECK(rows.at("model qwen3-8b") == "executes");
  CHECK(rows.at("placement disaggregated") == "simulates");
  CHECK(hotbunk_command("doctor --capabilities").out.find("train.engine") != std::string::npos);
}

TEST_CASE("a scenario of other devices runs on this CPU only when the user says so") {
  const fs::path file = scenario("h100", 2, 1, "steps: 1");
  const fs::path out = work_folder() / "h100";
  const std::string command =
      fmt::format("run {} --set cluster.gpu=h100-sxm-80gb --set cluster.device_memory_mib=512 --out {}", file.string(),
                  out.string());
  const Result2 refused = hotbunk_command(command);
  CHECK(refused.code == 2);
  CHECK_THAT(refused.err, Catch::Contains("error[E251]") && Catch::Contains("--on-cpu"));
  CHECK_FALSE(fs::exists(out));
  CHECK(hotbunk_command(command + " --on-cpu").code == 0);
  const Result2 calibrate = hotbunk_command(
      fmt::format("calibrate {} --set cluster.gpu=h100-sxm-80gb --set cluster.device_memory_mib=512 --out {}",
                  file.string(), (out / "c.yaml").string()));
  CHECK(calibrate.code == 2);
  CHECK_THAT(calibrate.err, Catch::Contains("error[E251]"));
}

TEST_CASE("a model named as on the hub is planned, and runs with nobody's weights only under the catalogue's name") {
  const std::string file = (fs::path(source_folder) / "scenarios/qwen2.5-0.5b-cpu.yaml").string();
  CHECK(hotbunk_command("plan " + file + " --set model=qwen/qwen2.5-0.5B-instruct").code == 0);
  const fs::path out = work_folder() / "hub";
  const Result2 r =
      hotbunk_command(fmt::format("run {} --set model=Qwen/Qwen2.5-0.5B-Instruct --out {}", file, out.string()));
  CHECK(r.code == 2);
  CHECK_THAT(r.err, Catch::Contains("error[E426]: model Qwen/Qwen2.5-0.5B-Instruct names weights that are not here") &&
                        Catch::Contains("or model: qwen2.5-0.5b for random weights"));
  CHECK_FALSE(fs::exists(out));
}

TEST_CASE("what the kernels refuse is refused when it is read, before ranks start") {
  const fs::path file = scenario("dtypes", 2, 1, "steps: 1");
  for (const char* set : {"train.precision.params=fp16", "train.precision.grads=bf16", "train.precision.master=bf16",
                          "train.precision.moments=bf16", "train.precision.moments=fp16", "rollout.dtype=fp16"}) {
    const Result2 r = hotbunk_command(fmt::format("run {} --set {}", file.string(), set));
    INFO(set << '\n' << r.err);
    CHECK(r.code == 2);
    CHECK_THAT(r.err, Catch::Contains("error[E250]: this scenario is not run yet: ") &&
                          Catch::Contains(std::string(set).substr(0, std::string(set).find('='))));
    CHECK(r.err.find("starting") == std::string::npos);
    if (!std::string(set).ends_with("bf16")) continue;  // this CPU has no rate of fp16
    CHECK_THAT(hotbunk_command(fmt::format("plan {} --set {}", file.string(), set)).err,
               Catch::Contains("note: priced, not lowered to a plan"));
    const Result2 played = hotbunk_command(fmt::format("simulate {} --set {}", file.string(), set));
    CHECK(played.code == 0);
    CHECK_THAT(played.out, Catch::Contains("Priced blocks: ") && Catch::Contains("train.micro"));
  }
  for (const char* command : {"plan", "simulate", "run"}) {
    const Result2 cold = hotbunk_command(fmt::format("{} {} --set rollout.temperature=1e-320", command, file.string()));
    CHECK(cold.code == 2);
    CHECK_THAT(cold.err, Catch::Contains("error[E206]: rollout.temperature is 1e-320, expected 0 or at least 1e-06"));
  }
}

TEST_CASE("a missing task.data names the file and the key") {
  const std::string sft =
      scenario("sft", 1, 1, "steps: 1").string() + " --set algorithm.name=sft --set \"task.name=''\"";
  const Result2 none = hotbunk_command("run " + sft);
  CHECK(none.code == 2);
  CHECK_THAT(none.err, Catch::Contains("error[E208]") && Catch::Contains("task.data") && Catch::Contains("sft.yaml"));
  const Result2 missing = hotbunk_command("run " + sft + " --set task.data=/nowhere/data.jsonl");
  CHECK(missing.code == 2);
  CHECK_THAT(missing.err, Catch::Contains("error[E101]") && Catch::Contains("--> /nowhere/data.jsonl") &&
                              Catch::Contains("task.data names it"));
}

TEST_CASE("standard input is -, a pipe by name is no file") {
  const fs::path file = scenario("pipe", 1, 1);
  const Result2 plan = piped("plan - --json", file);
  CHECK(plan.code == 0);
  CHECK(json_from<Json>(plan.out).at("scenario") == "pipe");
  const Result2 swept = piped("sweep - --vary seed=1,2", file);
  CHECK(swept.code == 0);
  const Result2 wrong = piped("plan -", file_of("wrong.yaml", "modle: x\n"));
  CHECK_THAT(wrong.err, Catch::Contains("--> stdin:1:1"));
  CHECK_THAT(piped("run -", file).err, Catch::Contains("error[E101]"));
  const fs::path pipe = work_folder() / "fifo";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  for (const std::string& arguments :
       {"plan " + pipe.string(), std::string("plan /dev/zero"),
        fmt::format("logprobs --model {} --tokens {}", tiny_model().string(), pipe.string()),
        fmt::format("plan {} --set model={}", file.string(), pipe.string()),
        fmt::format("plan {} --set cluster.calibration={}", file.string(), pipe.string()),
        fmt::format("simulate {} --lengths {}", file.string(), pipe.string()),
        fmt::format("run {} --plan {}", file.string(), pipe.string())}) {
    const Result2 r = hotbunk_command(arguments);
    INFO(arguments << '\n' << r.err);
    CHECK(r.code == 2);
    CHECK_THAT(r.err, Catch::Contains("error[E101]") && Catch::Contains("not a regular file"));
  }
  fs::remove(pipe);
}

TEST_CASE("a name with terminal escapes reaches no terminal raw") {
  const fs::path file = file_of("escapes.yaml", text_of(scenario("plain", 1, 1, "steps: 1")) + "\n");
  const std::string set = R"( --set 'name="red \e[31m bell \a"')";
  for (const char* command : {"plan", "simulate", "explain"}) {
    const Result2 r = hotbunk_command(fmt::format("{} {}{}", command, file.string(), set));
    INFO(command << '\n' << r.err);
    CHECK(r.code == 0);
    CHECK(r.out.find('\x1b') == std::string::npos);
    CHECK(r.out.find('\x07') == std::string::npos);
    CHECK(r.err.find('\x1b') == std::string::npos);
  }
}

TEST_CASE("cells of a table of somebody else's reach no terminal raw, and make no JSON that is none") {
  const fs::path data = work_folder() / "published";
  fs::create_directories(data);
  int changed = 0;
  for (const auto& entry : fs::directory_iterator(fs::path(source_folder) / "data/published")) {
    std::string text = text_of(entry.path());
    const auto line = text.find('\n');
    if (entry.path().extension() != ".csv" || line == std::string::npos) continue;
    // Into the first cell of letters of every row.
    for (std::size_t at = line + 1; at < text.size() && at != 0; at = text.find('\n', at) + 1)
      if (std::isalpha(static_cast<unsigned char>(text[at])) != 0) text.insert(at, "\x1b[31m\xc2\x9b"), ++changed;
    std::ofstream(data / entry.path().filename()) << text;
  }
  for (const char* other : {"\x1b[31m.csv", "\xff.csv"}) std::ofstream(data / other) << "a,b\n1,2\n";
  REQUIRE(changed > 0);
  for (const char* more : {"", " --rows", " --json"}) {
    const Result2 r = hotbunk_command(fmt::format("validate --data {}{}", data.string(), more));
    INFO(more << '\n' << r.out << r.err);
    CHECK_FALSE(r.out.empty());
    CHECK((r.out + r.err).find('\x1b') == std::string::npos);
    if (std::string(more) == " --json") CHECK(is_json(r.out));
    else CHECK((r.out + r.err).find("\xc2\x9b") == std::string::npos);
  }
}

TEST_CASE("log-probs are numbers or an error, never NaN") {
  const fs::path tokens = file_of("tokens.jsonl", "[1, 5, 6]\n");
  const auto ask = [&](const fs::path& model, const std::string& more = "") {
    return hotbunk_command(fmt::format("logprobs --model {} --tokens {}{}", model.string(), tokens.string(), more));
  };
  CHECK(ask(tiny_model()).code == 0);
  const Result2 rope = ask(with_config("rope0", [](Json& c) {
    c["rope_parameters"] = {{"rope_type", "llama3"}, {"rope_theta", 1e4}, {"factor", 0.0}};
  }));
  CHECK(rope.code == 2);
  CHECK(rope.out.empty());
  CHECK_THAT(rope.err, Catch::Contains("error[E411]") && Catch::Contains("\"factor\""));
  // Finite weights whose products are not.
  const fs::path large = with_config("large", [](Json&) {});
  std::string weights = text_of(large / "model.safetensors");
  std::uint64_t header = 0;
  std::memcpy(&header, weights.data(), sizeof header);
  const std::array<float, 3> huge = {1e18f, -1e18f, 6e17f};
  for (std::size_t at = 8 + header, i = 0; at + 4 <= weights.size(); at += 4, ++i)
    std::memcpy(weights.data() + at, &huge[i * i % 7 % 3], 4);
  std::ofstream(large / "model.safetensors", std::ios::binary) << weights;
  fs::remove(large / "manifest.json");
  for (const char* more : {"", " --json"}) {
    const Result2 r = ask(large, more);
    INFO(r.out << r.err);
    CHECK(r.code == 3);
    CHECK_THAT(r.err, Catch::Contains("error[E620]"));
    CHECK(r.out.find("nan") == std::string::npos);
  }
  const Result2 vocabulary = hotbunk_command(fmt::format("logprobs --model {} --tokens {}", tiny_model().string(),
                                                         file_of("far.jsonl", "[1, 16]\n").string()));
  CHECK(vocabulary.code == 2);
  CHECK_THAT(vocabulary.err, Catch::Contains("error[E123]"));
  for (const char* id : {"18446744073709551615", "9223372036854775808", "-1"})
    CHECK(hotbunk_command(fmt::format("generate --model {} --tokens {}", tiny_model().string(),
                                      file_of("far.jsonl", fmt::format("[1, {}]\n", id)).string()))
              .code == 2);
}

TEST_CASE("simulate says where engines are played less far ahead than the scenario lets them be") {
  const std::string job = fmt::format(
      "simulate {}/scenarios/qwen2.5-32b-megatron.yaml --set placement=disaggregated --set train.layout.dp=2 --set "
      "rollout.layout.dp=4",
      source_folder);
  const auto said = [&](const std::string& sets) { return hotbunk_command(job + sets).err; };
  CHECK_THAT(said(" --set algorithm.max_staleness=3 --set sync.every=2"),
             Catch::Contains("max_staleness 3: engines are played one iteration ahead, as sync.every is 2"));
  CHECK_THAT(said(" --set algorithm.max_staleness=100"), Catch::Contains("engines are played 65 iterations ahead"));
  CHECK_THAT(said(" --set algorithm.max_staleness=3"), !Catch::Contains("engines are played"));
}

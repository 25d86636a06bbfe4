// A run that was interrupted and resumed is the run that was not, bit for bit; what is interrupted leaves nothing half;
// signals end a run whole. Long for the ways to stop, which share the runs that they are compared with.
#include <signal.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/rng.h"
#include "tests/run/launched.h"
#include "tests/run/resumed.h"

using namespace hotbunk;
using Json = nlohmann::json;

TEST_CASE("a run in parts is the run in one piece: tokens, rewards, losses, weights and moments") {
  struct Case {
    const char* name;
    int ranks, tp;
    std::string keys;
  };
  // Measured by each, the whole run's products of bf16 could be others than those of the parts.
  const EnvironmentVariable products("HOTBUNK_BF16_PRODUCTS", "rule");
  const std::string data = (work_folder() / "samples.jsonl").string();
  std::ofstream(data) << "[1,3,4,5]\n[1,5,6]\n[1,7,8,9,10]\n[1,3]\n[1,9,4]\n[1,5,5,5]\n[1,8,6,4]\n";
  for (const Case& c :
       {Case{"kl", 1, 1, "algorithm.kl_coef=0.1 optimizer.lr=0.01 optimizer.warmup_steps=5"},
        Case{"bf16", 2, 2,
             "algorithm.kl_coef=0.1 train.precision.params=bf16 rollout.sleep_level=1 optimizer.lr=0.01 "
             "algorithm.mini_batches=2"},
        Case{"awake", 2, 1, "rollout.sleep=false train.offload=none algorithm.reference=false"},
        Case{"sft", 2, 2, "algorithm.name=sft algorithm.reference=false \"task.name=''\" task.data=" + data}}) {
    INFO(c.name);
    const std::string file = scenario(c.name, c.ranks, c.tp, "steps: 5\ncheckpoint_every: 2").string() + sets(c.keys);
    const fs::path whole = work_folder() / (std::string(c.name) + "_whole");
    const fs::path parts = work_folder() / (std::string(c.name) + "_parts");
    must_run(fmt::format("run {} --out {}", file, whole.string()));
    must_run(fmt::format("run {} --set steps=2 --out {}", file, parts.string()));
    // With a scenario file, and with the checkpoint's own.
    must_run(fmt::format("run {} --set steps=3 --resume {}", file, parts.string()));
    must_run(fmt::format("run --resume {} --set steps=5", parts.string()));
    check_same(whole, parts);
    check_whole(parts);
    // The folder of the whole run's last part is one that other commands read.
    must_run(fmt::format("compare {}", parts.string()));
    must_run(fmt::format("report {}", parts.string()));
    CHECK(computed(parts).size() == 5);
    // Into another folder, from a checkpoint that is not the last.
    const fs::path branch = work_folder() / (std::string(c.name) + "_branch");
    must_run(fmt::format("run --resume {} --out {}", (whole / "checkpoints/step_2").string(), branch.string()));
    check_same(whole, branch);
  }
}

TEST_CASE("what a scenario leaves to cost stays as the run began, and may be said otherwise with a warning") {
  // The scenario without its line: auto.
  const fs::path file = work_folder() / "exchange.yaml";
  {
    std::istringstream lines(text_of(fs::path(source_folder) / "scenarios/context-parallel-cpu.yaml"));
    std::ofstream out(file);
    for (std::string line; std::getline(lines, line);)
      if (line.find("context_exchange") == std::string::npos) out << line << '\n';
  }
  const auto exchange_of = [](const fs::path& run) {
    const std::string text = text_of(run / "scenario.yaml");
    for (const char* way : {"ring", "all-gather"})
      if (text.find(std::string("context_exchange: ") + way) != std::string::npos) return std::string(way);
    return std::string("none");
  };
  const fs::path out = work_folder() / "exchange", other = work_folder() / "exchange_other";
  must_run(fmt::format("run {} --set steps=1 --out {}", file.string(), out.string()));
  const std::string chosen = exchange_of(out), another = chosen == "ring" ? "all-gather" : "ring";
  CHECK(chosen != "none");
  const Result2 on = hotbunk_command(fmt::format("run {} --set steps=2 --resume {}", file.string(), out.string()));
  INFO(on.err);
  CHECK(on.code == 0);
  CHECK(on.err.find("E425") == std::string::npos);
  CHECK(exchange_of(out) == chosen);
  CHECK(computed(out).size() == 2);
  // A run that was told the other way goes on so, whatever takes less.
  must_run(fmt::format("run {} --set steps=1 --set train.context_exchange={} --out {}", file.string(), another,
                       other.string()));
  const Result2 kept = hotbunk_command(fmt::format("run {} --set steps=2 --resume {}", file.string(), other.string()));
  INFO(kept.err);
  CHECK(kept.code == 0);
  CHECK(kept.err.find("E425") == std::string::npos);
  CHECK(exchange_of(other) == another);
  const Result2 told = hotbunk_command(fmt::format("run {} --set steps=3 --set train.context_exchange={} --resume {}",
                                                   file.string(), chosen, other.string()));
  INFO(told.err);
  CHECK(told.code == 0);
  CHECK_THAT(told.err,
             Catch::Contains("warning[E425]") &&
                 Catch::Contains(fmt::format("train.context_exchange: {} in the checkpoint, {} now", another, chosen)));
}

TEST_CASE("kill -9 at fifty random moments loses no step that was saved and changes no bit") {
  const std::string file =
      scenario("killed_often", 1, 1, "steps: 6\ncheckpoint_every: 1").string() + sets("algorithm.kl_coef=0.1");
  const fs::path whole = work_folder() / "killed_often_whole", out = work_folder() / "killed_often";
  const auto begin = std::chrono::steady_clock::now();
  must_run(fmt::format("run {} --out {}", file, whole.string()));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  int resumed = 0, finished = 0;
  // Kills are drawn from so many times that run's length: from more where a kill left no checkpoint, from less where a
  // run ended before it. Others use the machine, then or now.
  double longer = 1.0;
  // A machine that others use makes a run of a second one of a minute: then fewer moments have to do.
  const auto enough = begin + std::chrono::minutes(4);
  for (std::uint64_t kills = 0, turn = 0; kills < 50 && (resumed == 0 || std::chrono::steady_clock::now() < enough);
       ++turn) {
    const bool resume = has_checkpoint(out);
    if (!resume) fs::remove_all(out);
    Running run(
        (resume ? fmt::format("run --resume {}", out.string()) : fmt::format("run {} --out {}", file, out.string())) +
            sets(kills % 2 == 0 ? "" : "run.checkpoint_async=true"),
        work_folder() / "killed_often.err");
    resumed += resume ? 1 : 0;
    const double moment =
        longer * seconds * static_cast<double>(uniform24(random_words(7, RngPurpose::test, turn, 0)[0]));
    int code = 0;
    const bool ended = run.ended_within(moment, code);
    if (!ended) run.kill(SIGKILL), code = run.wait(), ++kills;
    INFO(text_of(work_folder() / "killed_often.err"));
    check_whole(out);
    if (ended) longer /= 1.1;
    else if (!has_checkpoint(out)) longer *= 1.1;
    if (code == 128 + SIGKILL) continue;
    // It has reached its end, or the one before did and was killed as it went: then there is nothing left to resume.
    if (code != 0) REQUIRE(text_of(work_folder() / "killed_often.err").find("no step is left") != std::string::npos);
    check_same(whole, out);
    ++finished;
    fs::remove_all(out);
  }
  CHECK(resumed > 0);
  // However the last one was left, it comes to the same end.
  const fs::path last = work_folder() / "killed_often_last";
  const Result2 end =
      hotbunk_command(has_checkpoint(out) ? fmt::format("run --resume {} --out {}", out.string(), last.string())
                                          : fmt::format("run {} --out {}", file, last.string()));
  INFO(end.err);
  if (end.code != 0) REQUIRE(end.err.find("no step is left") != std::string::npos);
  check_same(whole, end.code == 0 ? last : out);
  INFO(resumed << " resumed, " << finished << " came to their end");
}

TEST_CASE("checkpoints that are put on disk meanwhile are the same, and one that cannot be ends the run") {
  const std::string file = scenario("meanwhile", 2, 2, "steps: 5\ncheckpoint_every: 1").string();
  const fs::path whole = work_folder() / "meanwhile_whole", out = work_folder() / "meanwhile";
  must_run(fmt::format("run {} --out {}", file, whole.string()));
  must_run(fmt::format("run {} --out {}", file + sets("run.checkpoint_async=true"), out.string()));
  check_whole(out);
  for (const char* name : {"step_1", "step_2", "step_3", "step_4", "final"})
    for (const char* part : {"model.safetensors", "optimizer.safetensors", "state.json"})
      CHECK(text_of(out / "checkpoints" / name / part).size() > 0);
  for (const char* name : {"step_2", "final"})
    for (const char* part : {"model.safetensors", "optimizer.safetensors"})
      CHECK(text_of(out / "checkpoints" / name / part) == text_of(whole / "checkpoints" / name / part));
}

TEST_CASE("a checkpoint that cannot take its place ends the run, with its step, now or meanwhile") {
  for (const char* meanwhile : {"false", "true"}) {
    const fs::path out = work_folder() / fmt::format("occupied_{}", meanwhile), place = out / "checkpoints/step_400",
                   said = work_folder() / "said";
    Running run(fmt::format("run {}{} --out {}", scenario("occupied", 1, 1, "steps: 100000").string(),
                            sets(fmt::format("run.checkpoint_async={} checkpoint_every=400", meanwhile)), out.string()),
                said);
    while (!fs::exists(out / "metrics.jsonl")) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    fs::create_directories(place.parent_path());
    std::ofstream(place) << "mine";
    int code = 0;
    const bool ended = run.ended_within(60, code);
    INFO(text_of(said));
    CHECK(ended);
    CHECK(code == 3);
    CHECK_THAT(text_of(said), Catch::Contains("error[E632]") && Catch::Contains("after step 400") &&
                                  Catch::Contains("a file has the checkpoint's name"));
    CHECK(text_of(place) == "mine");
  }
}

TEST_CASE("SIGTERM and SIGINT end a run after its step, whole; all ranks stop after the same one") {
  const fs::path said = work_folder() / "stopped.err";
  struct Case {
    const char* name;
    int ranks, signal, code;
  };
  for (const Case& c : {Case{"term", 2, SIGTERM, 0}, Case{"int", 2, SIGINT, 130}, Case{"int_alone", 1, SIGINT, 130}}) {
    const std::string file =
        scenario("stopped", c.ranks, c.ranks, "steps: 100000").string() + sets("algorithm.kl_coef=0.1");
    const fs::path out = work_folder() / (std::string("stopped_") + c.name);
    Running run(fmt::format("run {} --out {}", file, out.string()), said);
    REQUIRE(wait_for_text(said, "step 1/"));
    run.kill(c.signal);
    const int code = run.wait();
    INFO(text_of(said));
    CHECK(code == c.code);
    CHECK(text_of(said).find("stopping after this step") != std::string::npos);
    CHECK(text_of(said).find("error") == std::string::npos);
    check_whole(out);
    const std::int64_t last = json_from<Json>(text_of(out / "checkpoints/final/state.json"))["step"];
    CHECK(fs::exists(out / fmt::format("checkpoints/step_{}", last)));
    CHECK(computed(out).rbegin()->first == last);
    must_run(fmt::format("report {}", out.string()));
    must_run(fmt::format("compare {}", out.string()));
    must_run(fmt::format("run --resume {} --set steps={}", out.string(), last + 2));
    const fs::path whole = work_folder() / (std::string("stopped_whole_") + c.name);
    must_run(fmt::format("run {} --set steps={} --out {}", file, last + 2, whole.string()));
    check_same(whole, out);
  }
}

TEST_CASE("a second SIGINT ends a run at once, and what was whole stays") {
  const fs::path said = work_folder() / "twice_int.err";
  // Steps of seconds: time for both signals within one.
  const std::string long_steps = sets("algorithm.prompts=192 algorithm.samples_per_prompt=32");
  for (int ranks : {1, 2}) {
    INFO(ranks);
    const std::string file =
        scenario("twice_int", ranks, 1, "steps: 100000\ncheckpoint_every: 1").string() + long_steps;
    const fs::path out = work_folder() / fmt::format("twice_int{}", ranks);
    Running run(fmt::format("run {} --out {}", file, out.string()), said);
    REQUIRE(wait_for_text(said, "step 1/"));
    REQUIRE(wait_for_text(out / "checkpoints/step_1/manifest.json", "model"));
    // Of two ranks one is stopped: the step never ends, and only the second signal can end the run.
    if (ranks > 1) ::kill(children_of(run.pid()).at(1), SIGSTOP);
    run.kill(SIGINT);
    REQUIRE(wait_for_text(said, "stopping after this step"));
    run.kill(SIGINT);
    int code = 0;
    REQUIRE(run.ended_within(600.0, code));  // a run that goes on goes on for ever
    INFO(text_of(said));
    CHECK(code == 130);
    CHECK(text_of(said).find("error") == std::string::npos);
    CHECK_FALSE(fs::exists(out / "checkpoints/final"));  // which the end of a step asked to stop would have written
    check_whole(out);
  }
}

TEST_CASE("an interrupt that comes while ranks start is a request too") {
  const std::string file = scenario("early_int", 2, 1, "steps: 100000").string();
  const fs::path said = work_folder() / "early_int.err", out = work_folder() / "early_int";
  for (const int wait_ms : {0, 5, 20, 80}) {
    INFO(wait_ms);
    Running run(fmt::format("run {} --overwrite --out {}", file, out.string()), said);
    for (int i = 0; i < 60'000 && children_of(run.pid()).size() < 2; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(wait_ms));
    run.kill(SIGINT);
    int code = 0;
    REQUIRE(run.ended_within(120.0, code));
    INFO(text_of(said));
    CHECK(code == 130);
    CHECK(text_of(said).find("error") == std::string::npos);
    check_whole(out);
  }
}

TEST_CASE("ranks that another launcher started stop together when one of them is asked to") {
  const std::string file = scenario("launched_stop", 2, 1, "steps: 100000").string();
  const fs::path out = work_folder() / "launched_stop";
  const ReservedPort port;
  const auto start = [&](std::size_t rank) {
    return std::make_unique<Running>(fmt::format("run {} --out {}", file, out.string()),
                                     work_folder() / fmt::format("launched_stop{}", rank),
                                     rank_variables(rank, 2, port));
  };
  const auto first = start(0), second = start(1);
  REQUIRE(wait_for_text(work_folder() / "launched_stop0", "step 1/"));
  second->kill(SIGTERM);
  CHECK(second->wait() == 0);
  CHECK(first->wait() == 0);
  INFO(text_of(work_folder() / "launched_stop0") << text_of(work_folder() / "launched_stop1"));
  check_whole(out);
  CHECK(fs::exists(out / "report.html"));
}

TEST_CASE("what is not the same computation any more is refused with what differs") {
  const fs::path initial = work_folder() / "refused_initial", out = work_folder() / "refused";
  const std::string base = scenario("refused", 1, 1, "steps: 2\ncheckpoint_every: 1").string();
  must_run(fmt::format("run {} --set steps=1 --out {}", base, initial.string()));
  const fs::path model = work_folder() / "refused_model";
  fs::copy(initial / "checkpoints/final", model);
  std::ofstream(model / "tokenizer.json") << "{}";
  const std::string file = base + sets("algorithm.kl_coef=0.1 model=" + model.string());
  must_run(fmt::format("run {} --out {}", file, out.string()));
  for (const char* name : {"step_1", "final"}) CHECK(text_of(out / "checkpoints" / name / "tokenizer.json") == "{}");
  const auto refused = [&](const std::string& arguments, const std::vector<std::string>& texts) {
    const Result2 r = hotbunk_command("run " + arguments);
    INFO(arguments << '\n' << r.err);
    CHECK(r.code == 2);
    for (const std::string& text : texts) CHECK(r.err.find(text) != std::string::npos);
    CHECK(r.err.find("starting") == std::string::npos);
  };
  const std::string resume = "--resume " + out.string();
  refused(resume + " --set steps=3 --set optimizer.lr=0.5 --set seed=4",
          {"error[E424]", "optimizer.lr: 1e-06 in the checkpoint, 0.5 now", "seed: 0 in the checkpoint, 4 now"});
  refused(resume + " --set steps=3 --set algorithm.kl_coef=0.2", {"error[E424]", "algorithm.kl_coef"});
  refused(resume, {"error[E424]: no step is left: the checkpoint is of step 2", "set steps to more than 2"});
  refused("--resume " + (work_folder() / "nowhere").string(), {"error[E422]: there is no checkpoint to resume from"});
  refused("--resume " + (out / "checkpoints/step_1").string() + " --set steps=3",
          {"error[E422]", "has a later checkpoint", "--out another folder"});
  // The reference is the policy that the run began with: with another one it would be another run.
  const std::string weights = text_of(model / "model.safetensors");
  fs::remove(model / "manifest.json");
  std::ofstream(model / "model.safetensors", std::ios::binary)
      << weights.substr(0, weights.size() - 4) << std::string("\1\0\0\0", 4);
  refused(resume + " --set steps=3", {"error[E424]", "initial policy is not what the run began with"});
  // A checkpoint whose files are not as they were written.
  const fs::path final = out / "checkpoints/final", spoilt = work_folder() / "spoilt";
  fs::copy(final, spoilt);
  const std::string moments = text_of(spoilt / "optimizer.safetensors");
  std::ofstream(spoilt / "optimizer.safetensors", std::ios::binary) << moments.substr(0, moments.size() - 1) << 'x';
  refused("--resume " + spoilt.string() + " --set steps=3 --set algorithm.reference=false --set algorithm.kl_coef=0",
          {"error[E424]"});
  std::ofstream(model / "model.safetensors", std::ios::binary) << weights;
  refused("--resume " + spoilt.string() + " --set steps=3", {"error[E421]", "optimizer.safetensors holds other bytes"});
  refused(base + " --set model=" + spoilt.string(), {"error[E421]", "optimizer.safetensors holds other bytes"});
}

TEST_CASE("a folder without weights is refused by whoever reads it, and a bare config.json starts at random") {
  const fs::path out = work_folder() / "weights_run", bare = work_folder() / "bare";
  const std::string file = scenario("weights_run", 1, 1, "steps: 1").string();
  must_run(fmt::format("run {} --out {}", file, out.string()));
  fs::create_directories(bare);
  fs::copy(out / "checkpoints/final/config.json", bare);
  std::ofstream(work_folder() / "ids.jsonl") << "[1, 3]\n";
  for (const std::string& command :
       {fmt::format("run {} --set model={} --out {}", file, bare.string(), (work_folder() / "x").string()),
        fmt::format("plan {} --set model={}", file, bare.string()),
        fmt::format("logprobs --model {} --tokens {}", bare.string(), (work_folder() / "ids.jsonl").string())}) {
    const Result2 r = hotbunk_command(command);
    INFO(command << '\n' << r.err);
    CHECK(r.code == 2);
    CHECK(r.err.find("error[E420]: the model folder holds no weights\n  --> " + bare.string()) != std::string::npos);
  }
  must_run(fmt::format("run {} --set model={} --out {}", file, (bare / "config.json").string(),
                       (work_folder() / "from_config").string()));
}

TEST_CASE("a resumed run that syncs where the run in one piece did not says so; one that does not is the same bits") {
  const fs::path out = work_folder() / "every";
  const std::string file = scenario("every", 1, 1, "steps: 4").string() +
                           sets("sync.every=2 rollout.sleep_level=1 checkpoint_every=1 optimizer.lr=0.01");
  must_run(fmt::format("run {} --out {}", file, out.string()));
  for (const int step : {1, 2}) {
    const fs::path on = work_folder() / fmt::format("every_{}", step);
    const Result2 r = hotbunk_command(fmt::format(
        "run --resume {} --out {}", (out / fmt::format("checkpoints/step_{}", step)).string(), on.string()));
    INFO(step << '\n' << r.err);
    CHECK(r.code == 0);
    CHECK((r.err.find("warning[E425]: the run goes on with newer weights in the rollout") != std::string::npos) ==
          (step == 1));
    CHECK((computed(out).at(4) == computed(on).at(4)) == (step == 2));
  }
}

TEST_CASE("without its moments a checkpoint is resumed with fresh ones and a warning; another layout works") {
  const fs::path out = work_folder() / "light";
  const std::string file = scenario("light", 1, 1, "steps: 2").string() + sets("optimizer.lr=0.01");
  must_run(fmt::format("run {} --out {}", file, out.string()));
  // On two ranks: what is saved is the logical tensors.
  const fs::path two = work_folder() / "light_two", one = work_folder() / "light_one";
  const std::string checkpoint = (out / "checkpoints/final").string();
  const Result2 wider = hotbunk_command(
      fmt::format("run {} --set steps=4 --resume {} --out {}",
                  scenario("light", 2, 2, "steps: 2").string() + sets("optimizer.lr=0.01"), checkpoint, two.string()));
  INFO(wider.err);
  CHECK(wider.code == 0);
  CHECK(wider.err.find("warning[E425]: the run goes on elsewhere") != std::string::npos);
  must_run(fmt::format("run --resume {} --set steps=4 --out {}", checkpoint, one.string()));
  const auto a = computed(one), b = computed(two);
  REQUIRE(a.size() == 4);
  CHECK(a.at(4)["loss"].get<double>() == Approx(b.at(4)["loss"].get<double>()).margin(1e-3));

  fs::remove(out / "checkpoints/final/optimizer.safetensors");
  const Result2 fresh = hotbunk_command(fmt::format("run --resume {} --set steps=3", out.string()));
  INFO(fresh.err);
  CHECK(fresh.code == 0);
  CHECK(fresh.err.find("warning[E425]: the checkpoint has no optimizer.safetensors") != std::string::npos);
  // Moments count from there, and so they do for whoever resumes that.
  CHECK(json_from<Json>(text_of(out / "checkpoints/final/state.json"))["optimizer_step"] == 1);
  must_run(fmt::format("run --resume {} --set steps=4", out.string()));
  CHECK(json_from<Json>(text_of(out / "checkpoints/final/state.json"))["optimizer_step"] == 2);
}

TEST_CASE("a pipeline goes on with another split and schedule, and says so") {
  const std::string file = (fs::path(source_folder) / "scenarios/pipeline-parallel-cpu.yaml").string();
  const fs::path run = work_folder() / "stages", same = work_folder() / "stages_same",
                 other = work_folder() / "stages_other";
  must_run(fmt::format("run {} --set steps=1 --out {}", file, run.string()));
  const std::string on =
      fmt::format("run {} --set steps=2 --resume {} --out ", file, (run / "checkpoints/final").string());
  const Result2 goes_on = hotbunk_command(on + same.string());
  CHECK(goes_on.code == 0);
  CHECK(goes_on.err.find("E425") == std::string::npos);
  const Result2 elsewhere =
      hotbunk_command(on + other.string() + sets("train.pipeline_split=[1,2]") + sets("train.pipeline_schedule=gpipe"));
  INFO(elsewhere.err);
  REQUIRE(elsewhere.code == 0);
  for (const char* said :
       {"warning[E425]: the run goes on elsewhere", "train.pipeline_split: [2, 1] in the checkpoint, [1, 2] now",
        "train.pipeline_schedule: \"1f1b\" in the checkpoint, gpipe now"})
    CHECK(elsewhere.err.find(said) != std::string::npos);
  const auto a = computed(same), b = computed(other);
  CHECK(a.at(2)["loss"].get<double>() == Approx(b.at(2)["loss"].get<double>()).margin(1e-3));
}

TEST_CASE("where the optimizer's state lay changes no bit of what goes on, and is said") {
  const std::string file = (fs::path(source_folder) / "scenarios/cpu-optimizer-cpu.yaml").string();
  const fs::path run = work_folder() / "host_step", same = work_folder() / "host_step_same",
                 other = work_folder() / "host_step_other";
  must_run(fmt::format("run {} --set steps=1 --out {}", file, run.string()));
  const std::string on =
      fmt::format("run {} --set steps=2 --resume {} --out ", file, (run / "checkpoints/final").string());
  must_run(on + same.string());
  const Result2 elsewhere = hotbunk_command(on + other.string() + sets("optimizer.cpu_fraction=0"));
  INFO(elsewhere.err);
  REQUIRE(elsewhere.code == 0);
  CHECK_THAT(elsewhere.err, Catch::Contains("warning[E425]: the run goes on elsewhere") &&
                                Catch::Contains("optimizer.cpu_fraction: 0.5 in the checkpoint, 0 now"));
  CHECK(computed(other) == computed(same));
  for (const char* weights : {"model.safetensors", "optimizer.safetensors"})
    CHECK(text_of(other / "checkpoints/final" / weights) == text_of(same / "checkpoints/final" / weights));
}

TEST_CASE("a checkpoint has no padding of the vocabulary: the run goes on with another") {
  const std::string base = scenario("vocabulary", 2, 2, "steps: 1").string();
  const fs::path padded = work_folder() / "vocabulary_padded", same = work_folder() / "vocabulary_same",
                 other = work_folder() / "vocabulary_other";
  const std::string multiple = sets("train.make_vocab_size_divisible_by=48");
  must_run(fmt::format("run {}{} --out {}", base, multiple, padded.string()));
  const std::string on = fmt::format("run {} --set steps=2 --resume {}", base, (padded / "checkpoints/final").string());
  must_run(fmt::format("{}{} --out {}", on, multiple, same.string()));
  const Result2 less = hotbunk_command(fmt::format("{} --out {}", on, other.string()));
  INFO(less.err);
  REQUIRE(less.code == 0);
  CHECK_THAT(less.err, Catch::Contains("warning[E425]: the run goes on elsewhere") &&
                           Catch::Contains("train.make_vocab_size_divisible_by: 48 in the checkpoint, 0 now"));
  CHECK(computed(other).at(2)["loss"].get<double>() == Approx(computed(same).at(2)["loss"].get<double>()).margin(1e-4));
}

TEST_CASE("a checkpoint goes on in any engine and shard group, bit for bit where nothing changed") {
  const std::string base = scenario("engines", 2, 2, "steps: 2").string() + sets("optimizer.lr=0.01");
  const auto with = [](const std::string& engine, int group) {
    return fmt::format(" --set train.engine={} --set train.layout.fsdp={}", engine, group);
  };
  struct Way {
    const char* engine;
    int group;
  };
  const std::vector<std::pair<Way, Way>> ways = {{{"zero1", -1}, {"zero1", -1}},
                                                 {{"zero1", -1}, {"fsdp2", 1}},
                                                 {{"fsdp2", -1}, {"ddp", -1}},
                                                 {{"ddp", -1}, {"zero2", -1}},
                                                 {{"zero2", -1}, {"fsdp2", -1}}};
  int n = 0;
  for (const auto& [first, then] : ways) {
    const std::string name = fmt::format("{}_{}_{}", first.engine, then.engine, n++);
    CAPTURE(name);
    const fs::path whole = work_folder() / (name + "_whole"), half = work_folder() / (name + "_half"),
                   rest = work_folder() / (name + "_rest");
    must_run(fmt::format("run {}{} --set steps=4 --out {}", base, with(first.engine, first.group), whole.string()));
    must_run(fmt::format("run {}{} --out {}", base, with(first.engine, first.group), half.string()));
    const Result2 on =
        hotbunk_command(fmt::format("run {}{} --set steps=4 --resume {} --out {}", base, with(then.engine, then.group),
                                    (half / "checkpoints/final").string(), rest.string()));
    INFO(on.err);
    REQUIRE(on.code == 0);
    const bool same = std::string_view(first.engine) == then.engine && first.group == then.group;
    CHECK((on.err.find("warning[E425]: the run goes on elsewhere") == std::string::npos) == same);
    const auto a = computed(whole), b = computed(rest);
    REQUIRE(b.size() == 4);
    if (same) {
      CHECK(a == b);
      CHECK(text_of(whole / "checkpoints/final/model.safetensors") ==
            text_of(rest / "checkpoints/final/model.safetensors"));
    } else {
      CHECK(a.at(4)["loss"].get<double>() == Approx(b.at(4)["loss"].get<double>()).margin(1e-3));
      CHECK(a.at(4)["actor/grad_norm"].get<double>() == Approx(b.at(4)["actor/grad_norm"].get<double>()).epsilon(1e-3));
    }
  }
}

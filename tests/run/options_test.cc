// Options of the program: what is out of range or contradicts itself is refused with exit code 2, before any work.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "tests/json.h"
#include "tests/run/program.h"

using namespace hotbunk;
using Json = nlohmann::json;

TEST_CASE("threads are bounded by the cores") {
  const fs::path file = scenario("threads", 1, 1, "steps: 1");
  const std::string ask = fmt::format("--model {} --tokens /nowhere", (work_folder() / "no_model").string());
  for (const char* threads : {"100000", "-3", "0", "1.5", "nan"})
    for (const std::string& command : {"run " + file.string(), "generate " + ask, "logprobs " + ask}) {
      const Result2 r = hotbunk_command(fmt::format("{} --threads {}", command, threads));
      INFO(command << " --threads " << threads << '\n' << r.err);
      CHECK(r.code == 2);
      CHECK(r.err.find(fmt::format("--threads: {} is not from 1 to ", threads)) != std::string::npos);
      CHECK(r.err.find(" cores x 16)") != std::string::npos);
    }
  CHECK(hotbunk_command(fmt::format("run {} --threads 2 --out {}", file.string(), (work_folder() / "threads").string()))
            .code == 0);
}

TEST_CASE("what is not a number in range is refused, NaN too") {
  const fs::path file = scenario("range", 1, 1);
  for (const std::string& command :
       {fmt::format("plan {} --headroom", file.string()), std::string("generate --model x --tokens y --temperature"),
        std::string("compare /nowhere --max-error")})
    for (const char* value : {"nan", "inf", "-1", "x"}) {
      const Result2 r = hotbunk_command(fmt::format("{} {}", command, value));
      INFO(command << ' ' << value << '\n' << r.err);
      CHECK(r.code == 2);
      CHECK(r.err.find(fmt::format("{} is not a number from 0 to ", value)) != std::string::npos);
    }
}

TEST_CASE("flags that contradict each other are refused, not dropped") {
  const fs::path file = scenario("flags", 2, 2, "steps: 2");
  for (const char* flags : {"--gpus '?' --print", "--gpus '?' --resolved", "--resolved --print", "--phase train",
                            "--resolved --out plan.json", "--gpus '?' --out plan.json"}) {
    INFO(flags);
    const Result2 r = hotbunk_command(fmt::format("plan {} {}", file.string(), flags));
    CHECK(r.code == 2);
    CHECK(r.out.empty());
    CHECK_FALSE(r.err.empty());
  }
  const Result2 negative = hotbunk_command(fmt::format("plan {} --budget -3", file.string()));
  CHECK(negative.code == 2);
  CHECK_THAT(negative.err, Catch::Contains("-3 is not a whole number from 0 up"));
}

TEST_CASE("a sweep varies a key once, and writes into a folder that is there") {
  const fs::path file = scenario("grid", 2, 2, "steps: 2");
  const Result2 twice = hotbunk_command(fmt::format("sweep {} --vary seed=1,2 --vary seed=3,4", file.string()));
  CHECK(twice.code == 2);
  CHECK_THAT(twice.err, Catch::Contains("E261") && Catch::Contains("seed is varied twice"));
  const fs::path nowhere = work_folder() / "no-such-folder";
  for (const char* flag : {"--out", "--svg"}) {
    const Result2 r = hotbunk_command(
        fmt::format("sweep {} --vary seed=1,2 {} {}", file.string(), flag, (nowhere / "grid.csv").string()));
    CHECK(r.code == 2);
    CHECK_THAT(r.err, Catch::Contains("E103") && Catch::Contains("no-such-folder"));
    CHECK_FALSE(fs::exists(nowhere));
  }
}

// Options of the program: what is out of range or contradicts itself is refused with exit code 2, before any work.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

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

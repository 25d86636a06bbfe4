// Who am I: variables of torchrun, Slurm and MPI, whole, missing, garbled and contradicting.
#include <catch2/catch.hpp>
#include <map>

#include "runtime/launch.h"

namespace hotbunk {
namespace {

using Vars = std::map<std::string, std::string>;

Result<std::optional<LaunchEnv>> read(const Vars& vars) {
  return launch_env([&](std::string_view name) -> std::optional<std::string> {
    const auto it = vars.find(std::string(name));
    return it == vars.end() ? std::nullopt : std::optional(it->second);
  });
}

LaunchEnv whole(const Vars& vars) {
  const auto env = read(vars);
  INFO((env ? std::string() : render(env.error())));
  REQUIRE(env);
  REQUIRE(env->has_value());
  return **env;
}

std::string code_of(const Vars& vars) {
  const auto env = read(vars);
  REQUIRE_FALSE(env);
  return env.error().at(0).code + ": " + env.error().at(0).message;
}

TEST_CASE("nothing set: no launcher", "[launch]") { CHECK(read({})->has_value() == false); }

TEST_CASE("torchrun", "[launch]") {
  Vars vars = {
      {"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "node0"}, {"MASTER_PORT", "29511"}};
  const LaunchEnv e = whole(vars);
  CHECK(e.rank == 5);
  CHECK(e.world_size == 8);
  CHECK(e.local_rank == 1);
  CHECK(e.master_addr == "node0");
  CHECK(e.master_port == 29511);
  CHECK(e.listen_fd == -1);
  CHECK(e.source == "torchrun");
  vars["TORCHELASTIC_USE_AGENT_STORE"] = "True";  // the agent listens on 29511 itself
  CHECK(whole(vars).master_port == 29512);
}

TEST_CASE("torchrun variables that cannot be right", "[launch]") {
  const Vars good = {
      {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "1234"}};
  const auto without = [&](const char* name) {
    Vars v = good;
    v.erase(name);
    return v;
  };
  const auto with = [&](const char* name, const char* value) {
    Vars v = good;
    v[name] = value;
    return v;
  };
  CHECK(code_of(without("RANK")) == "E701: RANK is not set");
  CHECK(code_of(without("WORLD_SIZE")) == "E701: WORLD_SIZE is not set");
  CHECK(code_of(without("MASTER_PORT")) == "E701: MASTER_PORT is not set");
  CHECK(code_of(without("MASTER_ADDR")) == "E701: MASTER_ADDR is not set");
  CHECK(code_of(with("RANK", "one")) == "E702: RANK is not a number: \"one\"");
  CHECK(code_of(with("RANK", "1x")) == "E702: RANK is not a number: \"1x\"");
  CHECK(code_of(with("RANK", "")) == "E702: RANK is not a number: \"\"");
  CHECK(code_of(with("RANK", "-1")) == "E703: RANK = -1 is out of range");
  CHECK(code_of(with("RANK", "2")) == "E703: rank 2 does not exist in a world of 2");
  CHECK(code_of(with("WORLD_SIZE", "0")) == "E703: WORLD_SIZE = 0 is out of range");
  CHECK(code_of(with("LOCAL_RANK", "2")) == "E703: local rank 2 does not exist in a world of 2");
  CHECK(code_of(with("MASTER_PORT", "70000")) == "E703: MASTER_PORT = 70000 is out of range");
  CHECK(read({{"RANK", "x"}, {"WORLD_SIZE", "y"}}).error().size() >= 2);  // all mistakes at once
}

TEST_CASE("Slurm: the first host of the node list, a port from the job", "[launch]") {
  const Vars base = {{"SLURM_PROCID", "3"},
                     {"SLURM_NTASKS", "4"},
                     {"SLURM_LOCALID", "1"},
                     {"SLURM_STEP_ID", "0"},
                     {"SLURM_JOB_ID", "123456"}};
  const auto host = [&](const char* list) {
    Vars v = base;
    v["SLURM_JOB_NODELIST"] = list;
    return whole(v).master_addr;
  };
  CHECK(host("node7") == "node7");
  CHECK(host("a1,b2") == "a1");
  CHECK(host("node[003-010,020],other") == "node003");
  CHECK(host("gpu-[12,14]") == "gpu-12");
  CHECK(host("x,y[1-2]") == "x");
  Vars v = base;
  CHECK(code_of(v) == "E701: SLURM_JOB_NODELIST is not set");
  v["MASTER_ADDR"] = "head";
  CHECK(whole(v).master_addr == "head");
  CHECK(whole(v).master_port == 20000 + 3456);
  CHECK(whole(v).local_rank == 1);
  v.erase("SLURM_STEP_ID");  // the batch script itself, outside srun
  CHECK(read(v)->has_value() == false);
}

TEST_CASE("MPI: Open MPI and PMI", "[launch]") {
  Vars v = {{"OMPI_COMM_WORLD_RANK", "1"},
            {"OMPI_COMM_WORLD_SIZE", "4"},
            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
  CHECK(whole(v).master_addr == "127.0.0.1");
  CHECK(whole(v).source == "mpi");
  v["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2";  // two hosts: somebody must say where rank 0 is
  CHECK(code_of(v) == "E701: MASTER_ADDR is not set");
  v["MASTER_ADDR"] = "head";
  CHECK(whole(v).rank == 1);
  CHECK(whole({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}).world_size == 2);
  CHECK(code_of({{"PMI_RANK", "2"}, {"PMI_SIZE", "2"}}) == "E703: rank 2 does not exist in a world of 2");
  CHECK(code_of({{"PMI_RANK", "0"}}) == "E701: PMI_SIZE is not set");
}

}  // namespace
}  // namespace hotbunk

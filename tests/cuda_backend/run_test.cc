// scenarios/demo.yaml, shortened, as a user runs it on the driver's double: 4 ranks, FSDP 4 <-> 2 engines x TP 2, both
// sides asleep in turn.
#include <fmt/format.h>

#include <future>
#include <map>
#include <set>

#include "tests/cuda_backend/runs.h"
#include "tests/reserved_port.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// 8 samples per step instead of 512: what the double computes in seconds.
const char* const short_demo_told =
    "scenarios/demo.yaml --set steps=2 --set algorithm.prompts=4 --set algorithm.samples_per_prompt=2 "
    "--set algorithm.mini_batches=1 --set train.micro_batch_tokens=18 --set rollout.max_running_requests=4 "
    "--set rollout.max_prefill_tokens=20 --samples-every 1";
/// The same, as a program reads it.
const std::string short_demo = std::string(short_demo_told) + " --json";

}  // namespace

TEST_CASE("the demo on the double: bytes and calls as simulated, the CPU backend's tokens, its losses to rounding") {
  const Folder folder;
  const Ended cpu = folder.run("cpu", short_demo),
              fake = folder.run("fake", fmt::format("{} --backend cuda-fake", short_demo));
  INFO(fake.err);
  REQUIRE(cpu.code == 0);
  REQUIRE(fake.code == 0);
  // P1, P2: memory by category, phase and rank, calls and bytes of every collective, ops in order.
  const Json summary = json_from<Json>(fake.out);
  CHECK(summary["equal"] == true);
  CHECK(summary["source"] == "measured");
  // Which bodies it executed, of which ops, and where these ever ran; in the folder too, also of a report made anew.
  REQUIRE(summary.contains("bodies"));
  std::set<std::string> bodies;
  for (const Json& body : summary["bodies"]) {
    bodies.insert(body["body"]);
    CHECK(body.contains("last_run_on_hardware"));
    if (body["body"] == "train.layer.backward")
      CHECK(Json(body["ops"]).dump().find("attention_backward fp32 rows") != std::string::npos);
  }
  for (const char* body : {"rollout.decode.layer", "sync.hash", "train.layer.backward", "wake_train.params"})
    CHECK(bodies.contains(body));
  const auto saved = [&] {
    const Json all = json_from<Json>(read_file(folder.root / "fake/summary.json").value_or(""));
    return std::vector<Json>{all.value("bodies", Json()), all.value("matrix_products", Json()),
                             all.value("hardware_evidence", Json())};
  };
  CHECK(saved() == std::vector<Json>{summary["bodies"], summary["matrix_products"], summary["hardware_evidence"]});
  CHECK(folder.command(fmt::format("{} report {}", program_file, (folder.root / "fake").string()), "report").code == 0);
  CHECK(saved().front() == summary["bodies"]);
  CHECK(!json_from<Json>(read_file(folder.root / "cpu/summary.json").value_or("")).contains("bodies"));

  // P3: what was sampled is what the CPU backend samples; figures agree as far as fp32 sums in another order do.
  CHECK(tokens_of(folder, "fake").size() == 16);
  CHECK(tokens_of(folder, "fake") == tokens_of(folder, "cpu"));
  const auto ours = folder.lines("fake", "metrics.jsonl"), theirs = folder.lines("cpu", "metrics.jsonl");
  REQUIRE(ours.size() == 2);
  check_figures(ours, theirs, 1e-5);
  // P4, P5: a verified sync compares every tensor's hash, trained and rollout, after both sides have slept.
  for (const Json& step : ours) CHECK(step["sync/tensors_verified"] == 21);

  // P7: under another schedule of the streams it is the same run, to the bit.
  const Ended again = folder.run("again", fmt::format("{} --backend cuda-fake --fake-seed 2", short_demo));
  INFO(again.err);
  REQUIRE(again.code == 0);
  for (const char* file : {"samples.jsonl", "lengths.jsonl", "sync_hashes.jsonl"})
    CHECK(folder.lines("again", file) == folder.lines("fake", file));
  const auto same = folder.lines("again", "metrics.jsonl");
  for (std::size_t step = 0; step < 2; ++step)
    for (const auto& [key, value] : ours[step].items())
      if (!is_time(key)) {
        INFO(key);
        CHECK(same[step][key] == value);
      }
  const auto weights = [&](const std::string& run) {
    return read_file(folder.root / run / "checkpoints/final/model.safetensors").value_or("");
  };
  CHECK(!weights("fake").empty());
  CHECK(weights("again") == weights("fake"));
}

TEST_CASE("a call of the driver that fails, or never returns, ends the run with rank, phase and op") {
  const Folder folder;
  const auto fails = [&](const std::string& fault, const std::string& more = "") {
    INFO(fault);
    const Ended e = folder.run(
        "failed", fmt::format("{} --overwrite --backend cuda-fake --fake-fault {} {}", short_demo, fault, more));
    INFO(e.err);
    CHECK(e.code == 3);
    CHECK_THAT(e.err, Catch::Contains("rank ") && Catch::Contains("phase "));
    return e;
  };
  const Ended kernel = fails("cuLaunchKernel:500");
  CHECK_THAT(kernel.err, Catch::Contains("cuLaunchKernel(") && Catch::Contains("CUDA_ERROR_LAUNCH_FAILED") &&
                             Catch::Contains("(op "));
  CHECK_THAT(fails("cuMemCreate:20").err, Catch::Contains("CUDA_ERROR_OUT_OF_MEMORY"));
  // What was written is whole: each line, and the checkpoint of the step before, from which the CPU backend goes on.
  fails("cuLaunchKernel:2500", "--set checkpoint_every=1");
  for (const char* file : {"metrics.jsonl", "samples.jsonl", "lengths.jsonl", "sync_hashes.jsonl"})
    CHECK_FALSE(folder.lines("failed", file).empty());
  std::vector<std::string> checkpoints;
  for (const auto& entry : fs::directory_iterator(folder.root / "failed/checkpoints"))
    checkpoints.push_back(entry.path().filename());
  CHECK(checkpoints == std::vector<std::string>{"step_1"});
  const Ended resumed = folder.resume("failed");
  INFO(resumed.err);
  CHECK(resumed.code == 0);
  CHECK(fs::exists(folder.root / "failed/checkpoints/final/model.safetensors"));
  const Ended stuck = fails("cuStreamWaitEvent:300:hang", "--set run.timeout_s=2");
  CHECK(stuck.seconds < 40);  // this machine may be busy; the limits are 2 s without work and 5 s to unwind
}

TEST_CASE("a rank that is alone ends too when a call of the driver never returns, soon, with rank, phase and op") {
  const Folder folder;
  const std::string alone = fmt::format(
      "{} --overwrite --backend cuda-fake --set cluster.ranks_per_device=1 --set cluster.device_memory_mib=16 --set "
      "train.layout.dp=1 --set rollout.layout.tp=1 --set rollout.layout.dp=1 --set run.timeout_s=1 --fake-fault ",
      short_demo);
  // On the thread of a stream; on the calling thread, while it maps and while it waits.
  std::vector<std::future<Ended>> runs;
  for (const char* fault : {"cuLaunchKernel:300:hang", "cuMemSetAccess:12:hang", "cuStreamSynchronize:60:hang"})
    runs.push_back(
        std::async(std::launch::async, [&folder, &alone, fault] { return folder.run(fault, alone + fault); }));
  for (auto& run : runs) {
    const Ended e = run.get();
    INFO(e.err);
    CHECK(e.code == 3);
    CHECK(e.seconds < 40);  // this machine may be busy; the limits are 1 s without work and 5 s to unwind
    CHECK_THAT(e.err, Catch::Contains("rank 0") && Catch::Contains("phase ") && Catch::Contains(", op ") &&
                          Catch::Contains("run.timeout_s"));
  }
}

TEST_CASE(
    "ranks as processes, a device each, over NCCL's double: the run that threads of one process make, to the bit") {
  const Folder folder;
  const std::string demo = fmt::format("{} --backend cuda-fake", short_demo);
  /// Two nodes of two GPUs, on this host. `more`: of rank 1; `of_first`: of rank 0.
  const auto launched = [&](const std::string& name, const std::string& options, const std::string& more, int port,
                            const std::string& of_first = "") {
    std::vector<std::future<Ended>> runs;
    for (int node = 0; node < 2; ++node)
      runs.push_back(std::async(std::launch::async, [&, node] {
        const std::string launch = fmt::format(
            "NODE_RANK={} NODES=2 GPUS=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={} scripts/launch_node bash -c '"
            "case $RANK in 0) more=\"{}\";; 1) more=\"{}\";; esac; exec \"$@\" $more' - ",
            node, port, of_first, more);
        return folder.run(name, options, launch, fmt::format(".{}", node));
      }));
    std::vector<Ended> ended;
    for (auto& run : runs) ended.push_back(run.get());
    return ended;
  };
  const ReservedPort first, second, third, fourth, fifth;
  const Ended threads = folder.run("threads", demo);
  INFO(threads.err);
  REQUIRE(threads.code == 0);
  const auto weights = [&](const std::string& run) {
    return read_file(folder.root / run / "checkpoints/final/model.safetensors").value_or("");
  };
  CHECK(!weights("threads").empty());
  // Weights are read where their peers keep them, mapped anew after every wake; or all of them are gathered.
  for (const std::string transport : {"ipc", "collective"}) {
    const auto ended = launched(transport, fmt::format("{} --set sync.transport={}", demo, transport), "",
                                (transport == "ipc" ? third : first).number());
    for (const Ended& e : ended) {
      INFO(transport << ": " << e.err);
      REQUIRE(e.code == 0);
    }
    CHECK(json_from<Json>(ended[0].out)["equal"] == true);  // P1, P2
    for (const char* file : {"samples.jsonl", "lengths.jsonl", "sync_hashes.jsonl"})
      CHECK(folder.lines(transport, file) == folder.lines("threads", file));
    CHECK(weights(transport) == weights("threads"));
  }

  // A rank that fails takes the others with it, and each names it.
  const auto failed =
      launched("failed", demo + " --set sync.transport=collective", "--fake-fault cuLaunchKernel:300", second.number());
  for (std::size_t r = 0; r < failed.size(); ++r) {
    INFO(r << ": " << failed[r].err);
    CHECK(failed[r].code == 3);
    CHECK_THAT(failed[r].err, Catch::Contains("rank 1") && Catch::Contains("phase train") &&
                                  Catch::Contains("cuLaunchKernel(") && !Catch::Contains("double found"));
  }
  // NCCL fails behind a call, or a call of it never returns: likewise, and soon.
  const std::string gathers = demo + " --set sync.transport=collective --set run.timeout_s=2 --fake-fault ";
  for (const auto& [fault, says] : {std::pair("ncclAllGather:9:async@2", "remote process exited or there was"),
                                    std::pair("ncclSend:40:hang@1", "run.timeout_s")}) {
    const ReservedPort port;
    const auto broken = launched("broken", gathers + fault + " --overwrite", "", port.number());
    for (std::size_t r = 0; r < broken.size(); ++r) {
      INFO(fault << ", node " << r << ": " << broken[r].err);
      CHECK(broken[r].code == 3);
      CHECK(broken[r].seconds < 40);  // this machine may be busy; the limits are 2 s without work and 5 s to unwind
      CHECK_THAT(broken[r].err, Catch::Contains(fault[4] == 'A' ? "rank 2" : "rank 1") && Catch::Contains("phase ") &&
                                    Catch::Contains(", op ") && Catch::Contains(says));
    }
  }
  // Where ranks never give their communicators back, what the run has written is whole, and what it has said.
  const ReservedPort sixth, seventh;
  const auto late =
      launched("late",
               fmt::format("{} --backend cuda-fake --set sync.transport=collective --set run.timeout_s=2 --fake-fault "
                           "ncclCommFinalize:1:hang",
                           short_demo_told),
               "", sixth.number());
  INFO(late[0].err);
  CHECK((late[0].code == 3 && late[1].code == 3));
  for (const char* rank : {"rank 0", "rank 1"})
    CHECK_THAT(late[0].err,
               Catch::Contains(fmt::format("{}, giving communicators and context back, has not come to an end", rank)));
  CHECK_THAT(late[0].out, Catch::Contains("tokens") && Catch::Contains("Report: "));
  CHECK(weights("late") == weights("threads"));
  for (const char* file : {"samples.jsonl", "lengths.jsonl", "sync_hashes.jsonl"})
    CHECK(folder.lines("late", file) == folder.lines("threads", file));
  // A failed run's rank 0 that does not come back from aborting says what was wrong as whoever asked reads it.
  const auto hung = launched("hung", demo + " --set sync.transport=collective", "--fake-fault cuLaunchKernel:300",
                             seventh.number(), "--fake-fault ncclCommAbort:1:hang");
  INFO(hung[0].err);
  CHECK(hung[0].code == 3);
  const Json wrong = json_from<Json>(hung[0].out);
  CHECK((wrong["schema"] == "hotbunk.error/1" && wrong["exit_code"] == 3 && !wrong["errors"].empty()));
  CHECK_THAT(wrong.dump(), Catch::Contains("cuLaunchKernel(") && Catch::Contains("rank 0 does not come back"));
  // A fault of a rank that is none of them is refused before they meet.
  const ReservedPort eighth;
  const auto nobody = launched("nobody", gathers + "ncclSend:1@99", "", eighth.number());
  for (const Ended& e : nobody) {
    INFO(e.err);
    CHECK(e.code == 2);
    CHECK_THAT(e.err, Catch::Contains("E708") && Catch::Contains("is of rank 99, and the ranks are 0 to 3"));
  }
  // Memory that cannot be had from a peer ends the run likewise.
  const auto no_import = launched("no_import", demo, "--fake-fault cuMemImportFromShareableHandle:1", fourth.number());
  for (std::size_t r = 0; r < no_import.size(); ++r) {
    INFO(r << ": " << no_import[r].err);
    CHECK(no_import[r].code == 3);
    CHECK_THAT(no_import[r].err, Catch::Contains("cannot be mapped by rank 1") && Catch::Contains("phase sync"));
  }
  // Ranks whose gradients would be of other libraries are refused before the first step.
  const auto apart = launched("apart", demo, "--attention-backward cudnn", fifth.number());
  for (std::size_t r = 0; r < apart.size(); ++r) {
    INFO(r << ": " << apart[r].err);
    CHECK(apart[r].code == 2);
    CHECK_THAT(apart[r].err, Catch::Contains("E705") && Catch::Contains("--attention-backward: rank 0 has own kernels, "
                                                                        "rank 1 has cuDNN 9.19.0 (double)"));
  }
}

TEST_CASE("the demo with attention's backward by cuDNN: what it was and who formed what is in its summary") {
  const Folder folder;
  const std::string demo =
      fmt::format("{} --backend cuda-fake --set train.precision.params=bf16 --set rollout.dtype=bf16", short_demo);
  const Ended own = folder.run("own", demo), dnn = folder.run("dnn", demo + " --attention-backward cudnn"),
              both = folder.run("both", demo + " --attention-backward cudnn --products equal");
  for (const Ended* e : {&own, &dnn, &both}) {
    INFO(e->err);
    REQUIRE(e->code == 0);
    CHECK(json_from<Json>(e->out)["equal"] == true);  // P1, P2
  }
  const Json summary = json_from<Json>(dnn.out), without = json_from<Json>(own.out);
  CHECK(without["attention_backward"] == "own kernels");
  CHECK(without["library_choices"].empty());
  CHECK(summary["attention_backward"] == "cuDNN 9.19.0 (double), what it takes");
  // Two layers, two steps, of rank 0.
  CHECK(summary["library_choices"] == Json::parse(R"([{"op": "attention_backward", "by": "cuDNN", "times": 4}])"));
  bool named = false;
  for (const Json& body : summary["bodies"])
    if (body["body"] == "train.layer.backward") {
      named = Json(body["ops"]).dump().find("attention_backward bf16/fp32 cudnn or tiles") != std::string::npos;
      CHECK(body["last_run_on_hardware"].is_null());
    }
  CHECK(named);
  // The first step's figures: the same but for the gradients' roundings.
  check_figures({folder.lines("dnn", "metrics.jsonl").front()}, {folder.lines("own", "metrics.jsonl").front()}, 0.005);
  // Forward products have few rows here, so they are ours; the backward ones of each weight are cuBLASLt's.
  std::map<std::string, std::string> by;
  const Json of_both = json_from<Json>(both.out);
  for (const Json& c : of_both["library_choices"]) {
    by[c["op"]] = std::string(c["by"]) + (c.contains("why") ? ": " + std::string(c["why"]) : "");
    CHECK(c["times"] > 0);
  }
  CHECK(by.at("attention_backward") == "cuDNN");
  CHECK(by.at("linear 128 x 64 bf16") == "own: few rows");  // queries, keys and values of 4 + 2 + 2 heads of 16
  CHECK(by.at("linear_dgrad 128 x 64 bf16") == "cuBLASLt");
  CHECK(by.at("linear_wgrad 128 x 64 bf16/fp32") == "cuBLASLt");
  // The folder keeps it, also for a report made anew.
  CHECK(folder.command(fmt::format("{} report {}", program_file, (folder.root / "both").string()), "report").code == 0);
  const Json saved = json_from<Json>(read_file(folder.root / "both/summary.json").value_or(""));
  CHECK(saved["library_choices"] == of_both["library_choices"]);
  CHECK(saved["attention_backward"] == summary["attention_backward"]);

  for (const char* fault : {"cudnnBackendExecute:3", "cudnnBackendFinalize:40"}) {
    const Ended failed =
        folder.run("failed", fmt::format("{} --attention-backward cudnn --overwrite --fake-fault {}", demo, fault));
    INFO(failed.err);
    CHECK(failed.code == 3);
    CHECK_THAT(failed.err, Catch::Contains("rank ") && Catch::Contains("phase train") && Catch::Contains("(op ") &&
                               Catch::Contains("attention") && Catch::Contains("CUDNN_STATUS_INTERNAL_ERROR"));
  }
}

TEST_CASE("what a backend has not is refused before anything runs") {
  const Folder folder;
  const auto refused = [&](const std::string& options, int code, const char* says) {
    const Ended e = folder.run("refused", fmt::format("{} {}", short_demo, options));
    INFO(options << ": " << e.err);
    CHECK(e.code == code);
    CHECK_THAT(e.err, Catch::Contains(says));
    CHECK(!fs::exists(folder.root / "refused" / "metrics.jsonl"));
  };
  refused("--backend cuda-fake --fake-fault cuNothing:1", 2, "E708");
  refused("--backend cuda-fake --fake-fault cuLaunchKernel", 2, "E708");
  refused("--backend cuda-fake --fake-fault cuLaunchKernel:1:async", 2, "E708");  // it fails when it is called
  refused("--backend cuda-fake --fake-fault cuLaunchKernel:1@0", 2, "E708");      // ranks are threads
  refused("--fake-fault cuLaunchKernel:1", 2, "E707");
  refused("--backend cuda-fake --transport shm", 2, "E707");
  refused("--attention-backward cudnn", 2, "E707");
  refused("--backend cuda-fake --set model.head_dim=264 --set cluster.device_memory_mib=64", 2,
          "heads of 256 numbers at most, not 264");
}

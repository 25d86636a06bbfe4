// Saves that several ranks write together, and are killed while they do.
#include <signal.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <thread>

#include "base/rng.h"
#include "tests/run/launched.h"
#include "tests/run/resumed.h"

using namespace hotbunk;

namespace {

/// Whether a checkpoint is being written.
bool is_saving(const fs::path& run) {
  std::error_code ec;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints", ec))
    if (entry.path().filename().string().ends_with(".partial")) return true;
  return false;
}

}  // namespace

// HOTBUNK_KILL_MOMENTS kills more often.
TEST_CASE("kill -9 of all ranks, or of one, while they write a checkpoint leaves those before whole") {
  const char* const wanted = std::getenv("HOTBUNK_KILL_MOMENTS");
  const std::uint64_t moments = wanted != nullptr ? std::stoull(wanted) : 3;
  const std::string file = scenario("killed_saves", 2, 1, "steps: 5\ncheckpoint_every: 1").string();
  const fs::path whole = work_folder() / "killed_saves_whole", out = work_folder() / "killed_saves",
                 said = work_folder() / "killed_saves.err";
  must_run(fmt::format("run {} --out {}", file, whole.string()));
  std::uint64_t kills = 0, in_a_save = 0, resumed = 0;
  for (std::uint64_t turn = 0; (kills < moments || in_a_save == 0 || resumed == 0) && turn < 20 * moments; ++turn) {
    const bool resume = has_checkpoint(out);
    if (!resume) fs::remove_all(out);
    resumed += resume ? 1 : 0;
    Running run(
        (resume ? fmt::format("run --resume {}", out.string()) : fmt::format("run {} --out {}", file, out.string())) +
            sets(turn % 2 == 0 ? "" : "run.checkpoint_async=true"),
        said);
    const auto random = random_words(11, RngPurpose::test, turn, 0);
    // Of the saves that it comes to, any; and of that one any moment.
    int code = 0, saves = 1 + static_cast<int>(random[0] % 3);
    bool ended = false, was = false;
    while (saves > 0 && !(ended = run.ended_within(0.001, code))) {
      const bool is = is_saving(out);
      saves -= is && !was ? 1 : 0, was = is;
    }
    if (!ended) {
      std::this_thread::sleep_for(std::chrono::microseconds(random[1] % 12'000));
      const std::vector<int> ranks = children_of(run.pid());
      in_a_save += is_saving(out) ? 1 : 0, ++kills;
      const std::uint64_t who = turn % 3;
      if (who == 0) run.kill(SIGKILL);
      for (std::size_t r = 0; r < ranks.size(); ++r)
        if (who == 0 || who == r + 1) ::kill(ranks[r], SIGKILL);
      code = run.wait();
      INFO(text_of(said));
      // A signal may come when all is written, or when one rank alone is through: then the run has ended as it would.
      CHECK((code == 0 || code == (who == 0 ? 128 + SIGKILL : 3)));
      if (resume) CHECK(has_checkpoint(out));
    }
    INFO(text_of(said));
    check_whole(out);
    if (code == 128 + SIGKILL || code == 3) continue;
    if (code != 0) REQUIRE(text_of(said).find("no step is left") != std::string::npos);
    check_same(whole, out);
    fs::remove_all(out);
  }
  CHECK(kills >= moments);
  CHECK(resumed > 0);
  CHECK(in_a_save > 0);
  // However the last one was left, it comes to the same end.
  const Result2 end = hotbunk_command(has_checkpoint(out) ? fmt::format("run --resume {}", out.string())
                                                          : fmt::format("run {} --out {}", file, out.string()));
  INFO(end.err);
  if (end.code != 0) REQUIRE(end.err.find("no step is left") != std::string::npos);
  check_same(whole, out);
}

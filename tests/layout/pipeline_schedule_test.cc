// The order of passes on the stages of a pipeline: which blocks they play, and what they hold meanwhile.
#include "layout/pipeline_schedule.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <functional>
#include <map>
#include <vector>

#include "layout/pipeline.h"
#include "layout/pipeline_diagram.h"

using namespace hotbunk;
using enum PipelineBlock;

namespace {

std::vector<std::string> names_of(const std::vector<PipelineStep>& steps) {
  std::vector<std::string> out;
  for (const PipelineStep& s : steps) out.push_back(name_of(s));
  return out;
}

}  // namespace

TEST_CASE("1F1B on two stages: the first runs one micro-batch ahead") {
  const Pipeline p{.stages = 2};
  CHECK(p.warm_up(0) == 1);
  CHECK(p.warm_up(1) == 0);
  // Three micro-batches: stage 0 runs F0, F1 B0, F2 B1, B2; stage 1 has nothing to warm up, but its part of fill.0 is
  // where it receives micro-batch 0.
  CHECK(names_of(pipeline_steps(p, 0, 3, 1)) ==
        std::vector<std::string>{"fill.0", "forward", "backward", "forward", "backward", "drain.0"});
  CHECK(names_of(pipeline_steps(p, 1, 3, 1)) ==
        std::vector<std::string>{"fill.0", "forward", "backward", "forward", "backward", "forward", "drain.0"});
  const std::vector<PipelineStep> first = pipeline_steps(p, 0, 3, 1);
  CHECK(first[1].micro == 1);  // the forward of a block runs ahead of its backward
  CHECK(first[2].micro == 0);
}

TEST_CASE("Zero-bubble leaves weight gradients behind by as many passes as there are stages before") {
  const Pipeline p{.stages = 3, .schedule = PipelineSchedule::zero_bubble};
  // The last stage: of four passes the first two leave theirs behind, which come at the end.
  CHECK(names_of(pipeline_steps(p, 2, 4, 2)) ==
        std::vector<std::string>{"fill.0", "forward", "fill.1", "backward", "forward", "backward", "forward",
                                 "drain.1.weights", "forward", "drain.0.weights", "weights", "weights"});
  CHECK(names_of(pipeline_steps(p, 0, 2, 2)) ==
        std::vector<std::string>{"fill.0", "fill.1", "drain.1.weights", "drain.0.weights"});
}

TEST_CASE("Every stage passes each micro-batch forward and backward, through the same row of messages") {
  for (const PipelineSchedule schedule :
       {PipelineSchedule::one_f_one_b, PipelineSchedule::gpipe, PipelineSchedule::zero_bubble})
    for (std::int64_t stages = 2; stages <= 5; ++stages)
      for (std::int64_t chunks = 1; chunks <= (schedule == PipelineSchedule::one_f_one_b ? 3 : 1); ++chunks)
        for (std::int64_t micros = 0; micros <= 12; ++micros)
          for (const bool known : {false, true}) {  // as many blocks as there are passes, or as the pipeline is deep
            const Pipeline p{stages, chunks, schedule};
            const std::int64_t passes = micros * chunks, fills = p.fills(known ? passes : 1'000'000);
            CAPTURE(stages, chunks, micros, known, name_of(schedule));
            const std::vector<PipelineStep> blocks = pipeline_blocks(p, fills);
            std::vector<PipelineStep> row;  // of blocks with messages
            for (std::int64_t stage = 0; stage < stages; ++stage) {
              std::vector<PipelineStep> own;
              std::map<std::int64_t, std::int64_t> forwards, backwards, gradients;  // by micro-batch
              std::int64_t held = 0, most = 0;
              for (const PipelineStep& s : pipeline_steps(p, stage, micros, fills)) {
                CHECK(name_of(blocks[static_cast<std::size_t>(pipeline_block_index(p, s, fills))]) == name_of(s));
                const bool messages = s.block != weights && (s.block != forward || schedule == PipelineSchedule::gpipe);
                if (messages) own.push_back({s.block, s.number, s.micro});
                const bool is_forward = s.block == forward || (s.block == fill && s.number < p.warm_up(stage));
                if (is_forward) ++forwards[s.micro], most = std::max(most, ++held);
                if (s.block == backward || s.block == drain) {
                  ++backwards[s.micro], --held;
                  CHECK(backwards[s.micro] <= forwards[s.micro]);
                }
                // Those within a pass have its sizes.
                if (s.block == weights || s.weights) ++gradients[s.micro];
              }
              CHECK(held == 0);
              for (std::int64_t i = 0; i < micros; ++i) {
                CHECK(forwards[i] == chunks);
                CHECK(backwards[i] == chunks);
                CHECK(gradients[i] == (schedule == PipelineSchedule::zero_bubble ? 1 : 0));
              }
              // Micro-batches in flight as published: all of them, or min(m, PP - p), or the interleaved warm-up and
              // one.
              if (schedule == PipelineSchedule::gpipe) CHECK(most == micros);
              else if (chunks == 1) CHECK(most == std::min(in_flight_1f1b(micros, stages, stage), micros));
              else CHECK(most == std::min(passes, 2 * (stages - stage - 1) + (chunks - 1) * stages + 1));
              if (stage == 0) row = own;
              else CHECK(names_of(own) == names_of(row));
              CHECK(own == row);  // with the same sizes
            }
          }
}

namespace {

/// A stage as it plays its turns: what has arrived for a pass, and what it holds.
struct PlayedStage {
  std::vector<StageTurn> turns;
  std::size_t at = 0;
  std::int64_t input = -1, left = -1, gradient = -1;  // the micro-batches that its three tensors are of
  std::vector<bool> forwards, backwards;
  std::int64_t held = 0, most = 0;
  bool done() const { return at == turns.size(); }
  const StageTurn& turn() const { return turns[at]; }
};

/// Plays the turns of all stages, each side of a message waiting for the other. False: some wait for ever.
bool play(const Pipeline& p, std::vector<PlayedStage>& stages) {
  const auto pass = [&](std::size_t s) {
    PlayedStage& stage = stages[s];
    const auto [step, micro, returned, edge] = stage.turn();
    const auto m = static_cast<std::size_t>(micro);
    if (step == StageStep::forward) {
      CHECK((s == 0 || stage.input == micro));
      CHECK(!stage.forwards[m]);
      stage.forwards[m] = true, stage.left = micro;
      stage.most = std::max(stage.most, ++stage.held);
    } else {
      CHECK((s + 1 == stages.size() || stage.gradient == micro));
      CHECK((stage.forwards[m] && !stage.backwards[m]));
      stage.backwards[m] = true, stage.gradient = micro, --stage.held;
    }
    ++stage.at;
  };
  const auto message = [&](std::size_t edge) {
    PlayedStage &from = stages[edge], &to = stages[edge + 1];
    if (from.done() || to.done() || from.turn() != to.turn() || from.turn().edge != static_cast<std::int64_t>(edge))
      return false;
    const StageTurn t = from.turn();
    if (t.step != StageStep::gradient) {
      CHECK(from.left == t.micro);
      to.input = t.micro;
    }
    if (t.step != StageStep::output) {
      CHECK(to.gradient == t.returned);
      from.gradient = t.returned;
    }
    ++from.at, ++to.at;
    return true;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t s = 0; s < stages.size(); ++s) {
      for (; !stages[s].done() && stages[s].turn().edge < 0; moved = true) pass(s);
      if (s + 1 < stages.size()) moved |= message(s);
    }
  }
  return std::ranges::all_of(stages, [&](const PlayedStage& s) { return s.done(); }) && p.stages > 1;
}

}  // namespace

TEST_CASE("Stages whose messages wait for one another come to an end, and each pass has what it needs") {
  for (const PipelineSchedule schedule : {PipelineSchedule::one_f_one_b, PipelineSchedule::gpipe})
    for (std::int64_t stages = 2; stages <= 16; ++stages)
      for (std::int64_t micros = 0; micros <= 34; ++micros) {
        CAPTURE(name_of(schedule), stages, micros);
        const Pipeline p{.stages = stages, .schedule = schedule};
        std::vector<PlayedStage> played(static_cast<std::size_t>(stages));
        for (std::int64_t s = 0; s < stages; ++s) {
          PlayedStage& stage = played[static_cast<std::size_t>(s)];
          stage.turns = stage_turns(p, s, micros);
          stage.forwards.assign(static_cast<std::size_t>(micros), false), stage.backwards = stage.forwards;
        }
        REQUIRE(play(p, played));
        for (std::int64_t s = 0; s < stages; ++s) {
          const PlayedStage& stage = played[static_cast<std::size_t>(s)];
          CHECK(std::ranges::all_of(stage.backwards, std::identity{}));
          // BACKGROUND B6: all of them, or min(m, PP - p).
          CHECK(stage.most == p.slots(s, micros));
          if (schedule == PipelineSchedule::one_f_one_b) CHECK(stage.most == std::min(micros, stages - s));
        }
      }
}

TEST_CASE("The picture of a pipeline, and the share of its time that is a bubble") {
  CHECK(pipeline_diagram({.stages = 2}, 2) ==
        "  stage 0  0  1  .  .  0'    .  1'\n"
        "  stage 1  .  0  0'    1  1'    .  .\n");
  CHECK(pipeline_diagram({.stages = 2, .schedule = PipelineSchedule::gpipe}, 2) ==
        "  stage 0  0  1  .  .  .  0'    1'\n"
        "  stage 1  .  0  1  0'    1'    .  .\n");
  for (std::int64_t stages = 2; stages <= 6; ++stages)
    for (const std::int64_t rows : {1, 2, 5}) {
      const std::int64_t m = rows * stages;
      CAPTURE(stages, m);
      // BACKGROUND B6: (p - 1) / m of the ideal time, and of virtual stages 1 / v of that.
      const auto of_ideal = [&](const Pipeline& p) {
        const double bubble = play_pipeline(p, m).bubble;
        return bubble / (1.0 - bubble);
      };
      const auto theory = static_cast<double>(stages - 1) / static_cast<double>(m);
      CHECK(of_ideal({.stages = stages}) == Approx(theory));
      CHECK(of_ideal({.stages = stages, .schedule = PipelineSchedule::gpipe}) == Approx(theory));
      CHECK(of_ideal({.stages = stages, .chunks = 2}) == Approx(theory / 2));
      CHECK(of_ideal({.stages = stages, .chunks = 4}) == Approx(theory / 4));
      // Qi et al.: forward, backward and weight gradients of one unit each, (p - 1)(F + B - W) = p - 1 units of m * 3.
      CHECK(of_ideal({.stages = stages, .schedule = PipelineSchedule::zero_bubble}) == Approx(theory / 3));
    }
}

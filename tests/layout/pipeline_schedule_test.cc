// The order of passes on the stages of a pipeline: which blocks they play, and what they hold meanwhile.
#include "layout/pipeline_schedule.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <utility>
#include <vector>

#include "layout/pipeline.h"
#include "layout/pipeline_turns.h"

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
      for (std::int64_t chunks = 1; chunks <= (schedule == PipelineSchedule::gpipe ? 1 : 3); ++chunks)
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
              std::vector<std::pair<StageStep, std::int64_t>> passed, lowered;      // and of a plan that executes
              std::int64_t held = 0, most = 0;
              for (const PipelineStep& s : pipeline_steps(p, stage, micros, fills)) {
                CHECK(name_of(blocks[static_cast<std::size_t>(pipeline_block_index(p, s, fills))]) == name_of(s));
                const bool messages = s.block != weights && (s.block != forward || schedule == PipelineSchedule::gpipe);
                if (messages) own.push_back({s.block, s.number, s.micro});
                const bool is_forward = s.block == forward || (s.block == fill && s.number < p.warm_up(stage));
                if (is_forward) {
                  ++forwards[s.micro], most = std::max(most, ++held);
                  passed.emplace_back(StageStep::forward, s.micro);
                }
                if (s.block == backward || s.block == drain) {
                  passed.emplace_back(StageStep::backward, s.micro);
                  ++backwards[s.micro], --held;
                  CHECK(backwards[s.micro] <= forwards[s.micro]);
                }
                // Those within a pass have its sizes.
                if (s.block == weights || s.weights) ++gradients[s.micro];
              }
              for (const StageTurn& t : stage_passes(p, stage, micros))
                if (t.step != StageStep::weights) lowered.emplace_back(t.step, t.micro);
              // Whole rows of interleaved micro-batches alone: a priced plan has no others (Megatron's rule).
              if (chunks == 1 || micros % stages == 0) CHECK(passed == lowered);
              CHECK(held == 0);
              for (std::int64_t i = 0; i < micros; ++i) {
                CHECK(forwards[i] == chunks);
                CHECK(backwards[i] == chunks);
                CHECK(gradients[i] == (schedule == PipelineSchedule::zero_bubble ? chunks : 0));
              }
              // Micro-batches in flight as published: all of them, or min(m, PP - p), or the interleaved warm-up and
              // one.
              if (schedule == PipelineSchedule::gpipe) CHECK(most == micros);
              else if (chunks == 1) CHECK(most == std::min(micros, stages - stage));
              else CHECK(most == std::min(passes, 2 * (stages - stage - 1) + (chunks - 1) * stages + 1));
              if (stage == 0) row = own;
              else CHECK(names_of(own) == names_of(row));
              CHECK(own == row);  // with the same sizes
            }
          }
}

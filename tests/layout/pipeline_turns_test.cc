// What the stages of a pipeline play, turn by turn, each side of a message waiting for the other.
#include "layout/pipeline_turns.h"

#include <fmt/format.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <optional>
#include <vector>

#include "layout/pipeline_diagram.h"

using namespace hotbunk;

namespace {

/// Of an edge, and of a micro-batch.
using Content = std::optional<std::pair<std::int64_t, std::int64_t>>;

/// A stage as it plays its turns: what lies in its tensors, and what it keeps.
struct PlayedStage {
  std::vector<StageTurn> turns;
  std::size_t at = 0;
  Content input, output, gradient, returned;
  std::vector<Content> outputs, gradients;                          // parked
  std::map<std::pair<std::int64_t, std::int64_t>, StageStep> done;  // the latest pass, by chunk and micro-batch
  std::vector<std::int64_t> slots, held, most;                      // by chunk
  bool over() const { return at == turns.size(); }
  const StageTurn& turn() const { return turns[at]; }
};

/// Stages that play a mini-batch by themselves, nothing buffered in between.
class PlayedStages {
 public:
  PlayedStages(const Pipeline& p, std::int64_t micro_batches, PipelinePasses which = PipelinePasses::both_ways)
      : p_(p), last_(p.stages * p.chunks - 1) {
    const std::vector<StageRoom> rooms = pipeline_room(p, micro_batches, which);
    std::vector<std::vector<StageTurn>> turns = pipeline_turns(p, micro_batches, which);
    for (std::size_t s = 0; s < rooms.size(); ++s) {
      PlayedStage& stage = stages.emplace_back();
      stage.turns = std::move(turns[s]);
      stage.outputs.resize(static_cast<std::size_t>(rooms[s].parked_outputs));
      stage.gradients.resize(static_cast<std::size_t>(rooms[s].parked_gradients));
      stage.slots = rooms[s].slots;
      stage.held.assign(stage.slots.size(), 0), stage.most = stage.held;
    }
  }

  /// "" or what went wrong.
  std::string play() {
    for (bool moved = true; moved && fault_.empty();) {
      moved = false;
      for (std::int64_t s = 0; s < p_.stages; ++s)
        for (; !at(s).over() && fault_.empty(); moved = true) {
          const StageTurn& t = at(s).turn();
          if (t.edge >= 0 && !message(t)) break;
          if (t.place >= 0) park(at(s));
          if (t.is_pass()) pass(s);
        }
    }
    for (std::int64_t s = 0; s < p_.stages; ++s) need(at(s).over(), s, "waits for ever");
    return fault_;
  }

  std::vector<PlayedStage> stages;

 private:
  PlayedStage& at(std::int64_t s) { return stages[static_cast<std::size_t>(s)]; }
  void need(bool ok, std::int64_t s, const char* what) {
    if (!ok && fault_.empty()) fault_ = fmt::format("stage {}, turn {}: {}", s, at(s).at, what);
  }
  static bool take(Content& from, std::int64_t edge, std::int64_t micro) {
    return std::exchange(from, std::nullopt) == Content({edge, micro});
  }

  void pass(std::int64_t s) {
    PlayedStage& stage = at(s);
    const StageTurn& t = stage.turn();
    const std::int64_t chunk = t.chunk * p_.stages + s;
    const auto c = static_cast<std::size_t>(t.chunk);
    const auto before = stage.done.find({t.chunk, t.micro});
    const auto follows = [&](StageStep step) { return before != stage.done.end() && before->second == step; };
    if (t.step == StageStep::forward) {
      need(before == stage.done.end(), s, "forward twice");
      if (chunk > 0) need(take(stage.input, chunk - 1, t.micro), s, "forward without its input");
      need(!stage.output, s, "writes over an output");
      if (chunk < last_) stage.output = {chunk, t.micro};
      stage.most[c] = std::max(stage.most[c], ++stage.held[c]);
    } else if (t.step == StageStep::backward) {
      need(follows(StageStep::forward), s, "backward without forward");
      if (chunk < last_) need(take(stage.gradient, chunk, t.micro), s, "backward without its gradient");
      need(!stage.returned, s, "writes over a gradient");
      if (chunk > 0) stage.returned = {chunk - 1, t.micro};
    } else {
      need(follows(StageStep::backward), s, "weights without backward");
    }
    if (t.step == (p_.defers_weights() ? StageStep::weights : StageStep::backward)) --stage.held[c];
    stage.done[{t.chunk, t.micro}] = t.step;
    ++stage.at;
  }

  void park(PlayedStage& stage) {
    const StageTurn& t = stage.turn();
    const bool outputs = t.step == StageStep::park_output || t.step == StageStep::take_output;
    const bool to = t.step == StageStep::park_output || t.step == StageStep::park_gradient;
    Content &tensor = outputs ? stage.input : stage.gradient,
            &place = (outputs ? stage.outputs : stage.gradients).at(static_cast<std::size_t>(t.place));
    Content &from = to ? tensor : place, &into = to ? place : tensor;
    const auto s = static_cast<std::int64_t>(&stage - stages.data());
    need(from && !into, s, "moves nothing, or onto something");
    into = std::exchange(from, std::nullopt);
    ++stage.at;
  }

  bool message(const StageTurn& t) {
    const std::int64_t s = t.edge % p_.stages, r = (t.edge + 1) % p_.stages;
    PlayedStage &from = at(s), &to = at(r);
    if (from.over() || to.over() || from.turn() != to.turn()) return false;
    if (t.step != StageStep::gradient) {
      need(take(from.output, t.edge, t.micro), s, "sends another output");
      need(!to.input, r, "receives an output onto another");
      to.input = {t.edge, t.micro};
    }
    if (t.step != StageStep::output) {
      need(take(to.returned, t.edge, t.returned), r, "sends another gradient");
      // With one chunk, a stage has one tensor for both.
      need(!from.gradient && (p_.chunks > 1 || !from.returned), s, "receives a gradient onto another");
      from.gradient = {t.edge, t.returned};
    }
    ++from.at, ++to.at;
    return true;
  }

  const Pipeline p_;
  const std::int64_t last_;
  std::string fault_;
};

}  // namespace

TEST_CASE("Stages whose messages wait for one another come to an end, and each pass has what it needs") {
  for (const PipelineSchedule schedule :
       {PipelineSchedule::one_f_one_b, PipelineSchedule::gpipe, PipelineSchedule::zero_bubble})
    for (const std::int64_t stages : {2, 3, 4, 5, 7, 8, 16})
      for (const std::int64_t chunks : {1, 2, 3, 5, 23})
        for (const std::int64_t micros : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 16, 17, 34}) {
          // Seconds each; 92 layers over 4 stages of 23 chunks are a published row.
          if (stages * chunks > 48 && !(stages == 4 && chunks == 23 && micros == 8)) continue;
          CAPTURE(name_of(schedule), stages, chunks, micros);
          const Pipeline p{stages, chunks, schedule};
          PlayedStages played(p, micros);
          REQUIRE(played.play() == "");
          const StageStep last = p.defers_weights() ? StageStep::weights : StageStep::backward;
          for (std::int64_t s = 0; s < stages; ++s) {
            const PlayedStage& stage = played.stages[static_cast<std::size_t>(s)];
            REQUIRE(std::ssize(stage.done) == micros * chunks);
            REQUIRE(std::ranges::all_of(stage.done, [&](const auto& d) { return d.second == last; }));
            if (micros > 0) REQUIRE(stage.most == stage.slots);
            // BACKGROUND B6: all of them, or min(m, PP - p); what zero-bubble defers makes it min(m, PP) everywhere.
            if (schedule == PipelineSchedule::gpipe) REQUIRE(stage.most[0] == micros);
            else if (p.defers_weights() && chunks == 1) REQUIRE(stage.most[0] == std::min(micros, stages));
            else if (chunks == 1) REQUIRE(stage.most[0] == std::min(micros, stages - s));
          }
          PlayedStages forward(p, micros, PipelinePasses::forward);
          REQUIRE(forward.play() == "");
        }
}

TEST_CASE("A stage has room for a mini-batch of any size up to the largest") {
  for (const PipelinePasses which : {PipelinePasses::both_ways, PipelinePasses::forward})
    for (const std::int64_t stages : {2, 3, 4, 5, 6})
      for (const std::int64_t chunks : {1, 2, 4}) {
        const Pipeline p{.stages = stages, .chunks = chunks};
        CAPTURE(stages, chunks);
        const std::vector<StageRoom> rooms = pipeline_room(p, 1000, which), small = pipeline_room(p, 2, which);
        for (std::int64_t micros = 1; micros <= 6 * stages + 1; ++micros) {
          const std::vector<std::vector<StageTurn>> turns = pipeline_turns(p, micros, which);
          for (std::size_t s = 0; s < rooms.size(); ++s) {
            const StageRoom& room = rooms[s];
            std::vector<std::int64_t> held(room.slots.size(), 0), most = held;
            for (const StageTurn& t : turns[s]) {
              const auto c = static_cast<std::size_t>(t.chunk);
              if (t.step == StageStep::forward && which == PipelinePasses::both_ways)
                most[c] = std::max(most[c], ++held[c]);
              if (t.step == StageStep::backward) --held[c];
              if (t.place < 0) continue;
              const bool outputs = t.step == StageStep::park_output || t.step == StageStep::take_output;
              REQUIRE(t.place < (outputs ? room.parked_outputs : room.parked_gradients));
            }
            for (std::size_t c = 0; c < most.size(); ++c) {
              REQUIRE(most[c] <= room.slots[c]);
              REQUIRE(small[s].slots[c] <= room.slots[c]);
            }
          }
        }
      }
}

TEST_CASE("Interleaved stages take turns with their chunks") {
  using enum StageStep;
  const auto names_of = [](const Pipeline& p, std::int64_t stage, std::int64_t micros) {
    std::string out;
    const std::vector<std::vector<StageTurn>> turns = pipeline_turns(p, micros);
    for (const StageTurn& t : turns[static_cast<std::size_t>(stage)])
      out += fmt::format("{}{} ",
                         t.is_pass() ? pass_name(t.step, p.chunks, t.chunk, t.micro)
                                     : block_name(t.step, t.edge >= 0 ? t.edge : t.place),
                         t.step == exchange ? fmt::format("({},{})", t.micro, t.returned) : "");
    return out;
  };
  // Two micro-batches through chunks 0, 2 of the first stage and 1, 3 of the second; messages wrap at edge 1.
  CHECK(names_of({.stages = 2, .chunks = 2}, 0, 2) ==
        "forward.0.0 output.0 forward.0.1 output.1 output.0 forward.1.0 output.1 output.2 forward.1.1 exchange.2(1,0) "
        "backward.1.0 gradient.1 gradient.2 backward.1.1 gradient.1 gradient.0 backward.0.0 gradient.0 backward.0.1 ");
  const Pipeline one{.stages = 2};
  CHECK(names_of(one, 1, 3) ==
        "output.0 forward.0 backward.0 exchange.0(1,0) forward.1 backward.1 exchange.0(2,1) forward.2 backward.2 "
        "gradient.0 ");
}

TEST_CASE("The picture of a pipeline, and the share of its time that is a bubble") {
  CHECK(pipeline_diagram({.stages = 2}, 2) ==
        "  stage 0  0  1  .  .  0'    .  1'\n"
        "  stage 1  .  0  0'    1  1'    .  .\n");
  CHECK(pipeline_diagram({.stages = 2, .schedule = PipelineSchedule::gpipe}, 2) ==
        "  stage 0  0  1  .  .  .  0'    1'\n"
        "  stage 1  .  0  1  0'    1'    .  .\n");
  for (std::int64_t stages = 2; stages <= 8; ++stages)
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
      CHECK(of_ideal({.stages = stages, .chunks = 2, .schedule = PipelineSchedule::gpipe}) == Approx(theory / 2));
      CHECK(of_ideal({.stages = stages, .chunks = 2}) == Approx(theory / 2));
      CHECK(of_ideal({.stages = stages, .chunks = 3}) == Approx(theory / 3));
      CHECK(of_ideal({.stages = stages, .chunks = 4}) == Approx(theory / 4));
      // Qi et al.: forward, backward and weight gradients of one unit each, (p - 1)(F + B - W) = p - 1 units of m * 3.
      CHECK(of_ideal({.stages = stages, .schedule = PipelineSchedule::zero_bubble}) == Approx(theory / 3));
      for (const std::int64_t v : {2, 3, 4})
        CHECK(of_ideal({.stages = stages, .chunks = v, .schedule = PipelineSchedule::zero_bubble}) ==
              Approx(theory / (3.0 * static_cast<double>(v))));
    }
}

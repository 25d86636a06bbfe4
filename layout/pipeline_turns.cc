#include "layout/pipeline_turns.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <set>

#include "base/check.h"
#include "base/rounding.h"

namespace hotbunk {
namespace {

/// Plays the stages' orders of passes against each other.
class PipelinePlay {
 public:
  PipelinePlay(const Pipeline& p, std::int64_t micro_batches, PipelinePasses which)
      : p_(p), micro_batches_(micro_batches), edges_(p.stages * p.chunks - 1) {
    for (std::int64_t s = 0; s < p.stages; ++s) stages_.push_back({.passes = stage_passes(p, s, micro_batches, which)});
    for (auto& arrived : arrived_) arrived.assign(static_cast<std::size_t>(edges_ * micro_batches), false);
  }

  PlayedPipeline play() {
    for (;;) {
      while (send()) {
      }
      std::int64_t next = never;
      for (std::int64_t s = 0; s < p_.stages; ++s) {
        start(s);
        if (at(s).runs) next = std::min(next, at(s).end);
      }
      if (next == never) break;
      now_ = next;
      for (std::int64_t s = 0; s < p_.stages; ++s)
        if (at(s).runs && at(s).end == now_) finish(s);
    }
    PlayedPipeline out{{}, now_, 0.0};
    std::int64_t worked = 0;
    for (std::int64_t s = 0; s < p_.stages; ++s) {
      HB_CHECK(at(s).over() && !at(s).unsent[0] && !at(s).unsent[1], "stage {} of {} waits for ever", s, p_.stages);
      for (const PlayedTurn& t : at(s).turns) worked += t.end - t.begin;
      out.stages.push_back(std::move(at(s).turns));
    }
    if (now_ > 0) out.bubble = 1.0 - static_cast<double>(worked) / static_cast<double>(now_ * p_.stages);
    return out;
  }

 private:
  static constexpr std::int64_t never = std::numeric_limits<std::int64_t>::max();
  enum Kind : std::uint8_t { output, gradient };  // of a message
  struct Message {
    Kind kind = output;
    std::int64_t edge = 0, micro = 0;
    friend bool operator==(const Message&, const Message&) = default;
  };
  struct Stage {
    std::vector<StageTurn> passes;
    std::size_t next = 0;
    bool runs = false;  // until `end`
    std::int64_t end = 0;
    std::array<std::optional<Message>, 2> unsent{};  // by kind
    std::vector<PlayedTurn> turns{};
    bool over() const { return next == passes.size(); }
    const StageTurn& pass() const { return passes[next]; }
  };
  Stage& at(std::int64_t s) { return stages_[static_cast<std::size_t>(s)]; }
  std::vector<bool>::reference arrived(const Message& m) {
    return arrived_[m.kind][static_cast<std::size_t>(m.edge * micro_batches_ + m.micro)];
  }
  std::int64_t sender(const Message& m) const { return (m.edge + (m.kind == gradient ? 1 : 0)) % p_.stages; }
  std::int64_t receiver(const Message& m) const { return (m.edge + (m.kind == output ? 1 : 0)) % p_.stages; }

  /// What the stage's next pass needs from another stage.
  std::optional<Message> need(std::int64_t s) {
    if (at(s).over() || at(s).pass().step == StageStep::weights) return std::nullopt;
    const StageTurn& pass = at(s).pass();
    const std::int64_t chunk = pass.chunk * p_.stages + s;
    if (pass.step == StageStep::forward)
      return chunk == 0 ? std::nullopt : std::optional(Message{output, chunk - 1, pass.micro});
    return chunk == edges_ ? std::nullopt : std::optional(Message{gradient, chunk, pass.micro});
  }
  /// Whether the next pass writes the tensor that what is unsent lies in; behind the last one nothing is held back.
  bool stops(std::int64_t s, Kind kind) {
    return at(s).over() || at(s).pass().step == (kind == output ? StageStep::forward : StageStep::backward);
  }
  bool has_what_it_needs(std::int64_t s) {
    const std::optional<Message> needed = need(s);
    if (!needed || arrived(*needed)) return true;
    Stage& from = at(sender(*needed));
    return !from.runs && from.unsent[needed->kind] == needed;
  }

  /// Sends all messages whose time has come; false: there were none. Outputs from behind and gradients from the front
  /// first, so that a stage that passes on has sent before it receives.
  bool send() {
    bool sent = false;
    for (std::int64_t s = p_.stages; s-- > 0;) sent |= send(s, output);
    for (std::int64_t s = 0; s < p_.stages; ++s) sent |= send(s, gradient);
    return sent;
  }
  bool send(std::int64_t s, Kind kind) {
    Stage& from = at(s);
    if (from.runs || !from.unsent[kind]) return false;
    const Message m = *from.unsent[kind];
    const std::int64_t r = receiver(m);
    if (at(r).runs || (need(r) != m && !(stops(s, kind) && has_what_it_needs(s)))) return false;
    from.unsent[kind].reset(), arrived(m) = true;
    const Kind other = kind == output ? gradient : output;
    std::optional<Message>& back = at(r).unsent[other];
    StageTurn turn{.step = kind == output ? StageStep::output : StageStep::gradient,
                   .micro = m.micro,
                   .returned = kind == output ? -1 : m.micro,
                   .edge = m.edge};
    if (back && back->edge == m.edge) {
      turn.step = StageStep::exchange;
      (kind == output ? turn.returned : turn.micro) = back->micro;
      arrived(*back) = true, back.reset();
    }
    for (const std::int64_t side : {s, r}) at(side).turns.push_back({turn, now_, now_});
    return true;
  }

  void start(std::int64_t s) {
    Stage& stage = at(s);
    if (stage.runs || stage.over()) return;
    for (const Kind kind : {output, gradient})
      if (stage.unsent[kind] && stops(s, kind)) return;
    if (const auto needed = need(s); needed && !arrived(*needed)) return;
    const StageTurn& pass = stage.pass();
    const bool twice = pass.step == StageStep::backward && !p_.defers_weights();
    stage.end = now_ + (twice ? 2 : 1), stage.runs = true;
    stage.turns.push_back({pass, now_, stage.end});
  }

  void finish(std::int64_t s) {
    Stage& stage = at(s);
    const StageTurn& pass = stage.pass();
    const std::int64_t chunk = pass.chunk * p_.stages + s;
    if (pass.step == StageStep::forward && chunk < edges_) stage.unsent[output] = {output, chunk, pass.micro};
    if (pass.step == StageStep::backward && chunk > 0) stage.unsent[gradient] = {gradient, chunk - 1, pass.micro};
    ++stage.next, stage.runs = false;
  }

  const Pipeline& p_;
  const std::int64_t micro_batches_, edges_;
  std::int64_t now_ = 0;
  std::vector<Stage> stages_;
  std::array<std::vector<bool>, 2> arrived_;  // by kind, edge and micro-batch
};

/// Of what a stage gets of one kind: it arrives in a message, and a pass reads it.
struct Arrival {
  bool read = false;
  std::int64_t edge = 0, micro = 0;
};

/// What a turn has to do with what the stage gets: outputs of the stage before, or gradients from behind.
std::optional<Arrival> arrival_of(const Pipeline& p, std::int64_t stage, const StageTurn& t, bool outputs) {
  const std::int64_t chunk = t.chunk * p.stages + stage, last = p.stages * p.chunks - 1;
  if (t.step == StageStep::forward && outputs && chunk > 0) return Arrival{true, chunk - 1, t.micro};
  if (t.step == StageStep::backward && !outputs && chunk < last) return Arrival{true, chunk, t.micro};
  if (t.edge < 0 || (t.edge % p.stages == stage) == outputs) return std::nullopt;
  if (t.step == (outputs ? StageStep::gradient : StageStep::output)) return std::nullopt;
  return Arrival{false, t.edge, outputs ? t.micro : t.returned};
}

/// Adds the turns that park what arrives before something earlier of its kind has been read; the most at a time.
std::int64_t add_parking(const Pipeline& p, std::int64_t stage, std::vector<PlayedTurn>& turns, bool outputs) {
  std::vector<std::size_t> events;  // turns that an Arrival is of
  for (std::size_t i = 0; i < turns.size(); ++i)
    if (arrival_of(p, stage, turns[i].turn, outputs)) events.push_back(i);
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> parked;  // places, by edge and micro-batch
  std::set<std::int64_t> free;
  std::int64_t places = 0;
  std::vector<PlayedTurn> out;
  std::size_t event = 0;
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const PlayedTurn& t = turns[i];
    if (event == events.size() || events[event] != i) {
      out.push_back(t);
      continue;
    }
    ++event;
    const Arrival a = *arrival_of(p, stage, t.turn, outputs);
    const auto parking = [&](StageStep step, std::int64_t place, std::int64_t when) {
      out.push_back({{.step = step, .micro = a.micro, .place = place}, when, when});
    };
    if (a.read) {
      if (const auto found = parked.find({a.edge, a.micro}); found != parked.end()) {
        parking(outputs ? StageStep::take_output : StageStep::take_gradient, found->second, t.begin);
        free.insert(found->second), parked.erase(found);
      }
      out.push_back(t);
      continue;
    }
    out.push_back(t);
    const Arrival next = *arrival_of(p, stage, turns[events.at(event)].turn, outputs);
    if (next.read && next.edge == a.edge && next.micro == a.micro) continue;
    if (free.empty()) free.insert(places++);
    const std::int64_t place = *free.begin();
    free.erase(place), parked[{a.edge, a.micro}] = place;
    parking(outputs ? StageStep::park_output : StageStep::park_gradient, place, t.end);
  }
  turns = std::move(out);
  return places;
}

}  // namespace

std::vector<StageTurn> stage_passes(const Pipeline& p, std::int64_t stage, std::int64_t micro_batches,
                                    PipelinePasses which) {
  using enum StageStep;
  const std::int64_t filled = p.chunks == 1 ? micro_batches : round_up(micro_batches, p.stages);
  const std::int64_t passes = filled * p.chunks, row = p.stages * p.chunks;
  std::vector<StageTurn> out;
  const auto add = [&](StageStep step, std::int64_t pass) {
    const std::int64_t micro = p.chunks == 1 ? pass : pass / row * p.stages + pass % p.stages,
                       chunk = p.chunks == 1 ? 0 : pass % row / p.stages;
    if (micro < micro_batches)
      out.push_back({.step = step, .micro = micro, .chunk = step == forward ? chunk : p.chunks - 1 - chunk});
  };
  const bool ahead = which == PipelinePasses::forward || p.schedule == PipelineSchedule::gpipe;
  const std::int64_t warm_up = ahead ? passes : std::min(p.warm_up(stage), passes);
  for (std::int64_t i = 0; i < warm_up; ++i) add(forward, i);
  if (which == PipelinePasses::forward) return out;
  const std::int64_t late = std::min(stage, passes);  // weight gradients
  for (std::int64_t i = 0; i < passes; ++i) {
    if (warm_up + i < passes) add(forward, warm_up + i);
    add(backward, i);
    if (p.defers_weights() && i >= late) add(weights, i - late);
  }
  for (std::int64_t i = passes - late; p.defers_weights() && i < passes; ++i) add(weights, i);
  return out;
}

PlayedPipeline play_pipeline(const Pipeline& p, std::int64_t micro_batches, PipelinePasses which) {
  PlayedPipeline out = PipelinePlay(p, micro_batches, which).play();
  for (std::int64_t s = 0; s < p.stages; ++s)
    for (const bool outputs : {true, false}) add_parking(p, s, out.stages[static_cast<std::size_t>(s)], outputs);
  return out;
}

std::vector<std::vector<StageTurn>> pipeline_turns(const Pipeline& p, std::int64_t micro_batches,
                                                   PipelinePasses which) {
  std::vector<std::vector<StageTurn>> out;
  for (const auto& stage : play_pipeline(p, micro_batches, which).stages) {
    out.emplace_back();
    for (const PlayedTurn& t : stage) out.back().push_back(t.turn);
  }
  return out;
}

std::vector<StageRoom> pipeline_room(const Pipeline& p, std::int64_t micro_batches, PipelinePasses which) {
  const bool all = p.schedule == PipelineSchedule::gpipe, trains = which == PipelinePasses::both_ways;
  const StageStep last = p.defers_weights() ? StageStep::weights : StageStep::backward;
  std::vector<StageRoom> out;
  for (std::int64_t s = 0; s < p.stages; ++s) {
    StageRoom& room = out.emplace_back();
    room.slots.assign(static_cast<std::size_t>(p.chunks), 1);
    // Micro-batches come and go in one order, and a row of them knows nothing of the row after the next.
    std::vector<std::int64_t> held(room.slots.size(), 0);
    const std::int64_t some = all ? micro_batches : std::min(micro_batches, 2 * p.stages);
    for (const StageTurn& pass : trains ? stage_passes(p, s, some, which) : std::vector<StageTurn>{}) {
      const auto c = static_cast<std::size_t>(pass.chunk);
      if (pass.step == StageStep::forward) room.slots[c] = std::max(room.slots[c], ++held[c]);
      else if (pass.step == last) --held[c];
    }
  }
  // Nor does what is parked; that depends on how full the last row is.
  for (std::int64_t m = 1; p.chunks > 1 && m <= std::min(micro_batches, 3 * p.stages); ++m) {
    const PlayedPipeline played = play_pipeline(p, m, which);
    for (std::size_t s = 0; s < out.size(); ++s)
      for (const auto& [t, begin, end] : played.stages[s]) {
        if (t.step == StageStep::park_output) out[s].parked_outputs = std::max(out[s].parked_outputs, t.place + 1);
        if (t.step == StageStep::park_gradient)
          out[s].parked_gradients = std::max(out[s].parked_gradients, t.place + 1);
      }
  }
  return out;
}

namespace {

constexpr std::array step_names = {"forward",  "backward",    "weights",     "output",        "gradient",
                                   "exchange", "park.output", "take.output", "park.gradient", "take.gradient"};

}  // namespace

std::string pass_name(StageStep step, std::int64_t chunks, std::int64_t chunk, std::int64_t slot) {
  const char* const name = step_names.at(static_cast<std::size_t>(step));
  return chunks == 1 ? fmt::format("{}.{}", name, slot) : fmt::format("{}.{}.{}", name, chunk, slot);
}

std::string block_name(StageStep step, std::int64_t number) {
  return fmt::format("{}.{}", step_names.at(static_cast<std::size_t>(step)), number);
}

StageBlocks::StageBlocks(const std::map<std::string, std::int32_t>& numbers) {
  const auto slots = [&](std::int64_t chunks, std::int64_t chunk) {
    std::int64_t count = 0;
    while (numbers.contains(pass_name(StageStep::forward, chunks, chunk, count))) ++count;
    return count;
  };
  if (const std::int64_t count = slots(1, 0); count > 0) slots_ = {count};
  else
    for (std::int64_t c = 0; slots(2, c) > 0; ++c) slots_.push_back(slots(2, c));
}

std::string StageBlocks::name_of(const StageTurn& t) const {
  if (!t.is_pass()) return block_name(t.step, t.edge >= 0 ? t.edge : t.place);
  return pass_name(t.step, chunks(), t.chunk, t.micro % slots_[static_cast<std::size_t>(t.chunk)]);
}

}  // namespace hotbunk

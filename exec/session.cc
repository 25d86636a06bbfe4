#include "exec/session.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"

namespace hotbunk {
namespace {

/// Adds where it happened to the first failure of a call; keeps what the backend said. phase -1: between two.
Diagnostics located(Diagnostics found, const Plan& plan, Rank rank, std::int16_t phase, const std::string& block) {
  if (!found.empty()) {
    Diagnostic& first = found.front();
    const std::string where =
        phase < 0 ? "between two phases" : "phase " + plan.phases[static_cast<std::size_t>(phase)].name;
    first.notes.insert(first.notes.begin(),
                       fmt::format("rank {}, {}{}", rank, where, block.empty() ? "" : ", block " + block));
  }
  return found;
}

bool has_fetch(const Program& program, const Block& block) {
  return std::ranges::any_of(block.calls, [&](const Call& call) {
    const std::vector<Op>& ops = program.bodies[static_cast<std::size_t>(call.body)].ops;
    return std::ranges::any_of(ops, [](const Op& op) { return op.kind == OpKind::fetch; });
  });
}

}  // namespace

bool IterationEnds::arrive(std::int32_t step) {
  if (++arrived_[step] < sessions_) return false;
  arrived_.erase(step);
  return true;
}

Session::Session(const Plan& plan, Driver& driver, std::vector<std::unique_ptr<Device>> devices,
                 const RunOptions& options, IterationEnds* ends)
    : plan_(plan), driver_(driver), options_(options), ends_(ends ? *ends : alone_) {
  if (!devices.empty()) role_ = plan.role_of(devices.front()->rank());
  most_back_ = plan.most_steps_back(role_);
  for (const Program& program : plan.programs) {
    auto& phases = fetches_.emplace_back();
    for (const auto& blocks : program.phases) {
      auto& flags = phases.emplace_back();
      for (const Block& block : blocks) flags.push_back(has_fetch(program, block));
    }
  }
  for (auto& device : devices) {
    HB_CHECK(plan.role_of(device->rank()) == role_, "ranks of several roles in one session");
    SectionStates states(plan.program(device->rank()));
    seats_.push_back({.device = std::move(device), .states = std::move(states), .args = {}});
  }
}

Result<bool> Session::advance() {
  if (over_) return false;
  auto more = play_on();
  over_ = !more || !*more;
  return more;
}

Result<bool> Session::play_on() {
  if (!in_phase_) return next_phase();
  if (auto s = left_ > 0 ? play_turn() : leave_phase(); !s) return tl::unexpected(s.error());
  return true;
}

Status Session::settle() {
  for (Seat& seat : seats_)
    if (auto s = seat.device->sync(); !s) return fail(located(s.error(), plan_, seat.device->rank(), phase(), ""));
  return {};
}

std::int32_t Session::step_of(const PhaseInfo& p) const {
  const Player* const player = p.when == When::iteration ? p.player(role_) : nullptr;
  return step_ - (player ? player->steps_back : 0);
}

bool Session::runs(const PhaseInfo& p) const {
  if (p.when != when_ || p.player(role_) == nullptr) return false;
  if (p.when != When::iteration) return true;
  const std::int32_t step = step_of(p);
  return step >= options_.first_step && step <= options_.steps && p.runs_in(step, options_.first_step);
}

/// Enters the next phase that runs; past the last one goes on to the next iteration, or from there.
Result<bool> Session::next_phase() {
  for (++phase_; static_cast<std::size_t>(phase_) < plan_.phases.size(); ++phase_)
    if (runs(plan_.phases[static_cast<std::size_t>(phase_)])) {
      enter_phase();
      return true;
    }
  phase_ = -1;
  if (when_ == When::epilogue) return false;
  if (when_ == When::iteration) {
    if (auto s = end_iteration(); !s) return tl::unexpected(s.error());
    return true;
  }
  step_ = options_.first_step;
  when_ = step_ <= options_.steps ? When::iteration : When::epilogue;
  return true;
}

Status Session::end_iteration() {
  const std::int32_t ended = step_ - most_back_;  // the last part of this one has been played
  if (ended >= options_.first_step && ends_.arrive(ended)) {
    if (options_.on_step_end)
      if (auto s = options_.on_step_end(ended); !s) return s;
    if (auto s = driver_.step_ended(ended); !s) return s;
  }
  if (plan_.roles.size() == 1 && step_ < options_.steps && driver_.ends_after(step_)) options_.steps = step_;
  if (++step_ > options_.steps + most_back_) when_ = When::epilogue, step_ = options_.steps + 1;
  return {};
}

void Session::enter_phase() {
  in_phase_ = true;
  const std::int32_t step = this->step();
  if (options_.on_phase) options_.on_phase(step, phase_);
  for (Seat& seat : seats_) {
    seat.device->enter(step, phase_);
    seat.args.reset(), seat.done = false, seat.blocks_run = 0;
  }
  turn_ = 0, left_ = seats_.size();
}

Status Session::leave_phase() {
  if (auto s = settle(); !s) return s;
  for (Seat& seat : seats_) seat.device->leave(seat.blocks_run);
  in_phase_ = false;
  return {};
}

void Session::end_turn(Seat& seat, bool done) {
  seat.done = done;
  if (done) seat.args.reset(), --left_;
  turn_ = (turn_ + 1) % seats_.size();
}

Status Session::play_turn() {
  while (seats_[turn_].done) turn_ = (turn_ + 1) % seats_.size();
  Seat& seat = seats_[turn_];
  return plan_.phases[static_cast<std::size_t>(phase_)].driven ? driven_turn(seat) : undriven_turn(seat);
}

Status Session::driven_turn(Seat& seat) {
  const std::optional<Args> args = driver_.next(seat.device->rank(), step(), phase_);
  end_turn(seat, !args);
  return args ? block(seat, *args) : Status{};
}

/// Its blocks once, in order, one after the other in the same turn.
Status Session::undriven_turn(Seat& seat) {
  const auto& blocks = plan_.program(seat.device->rank()).phases[static_cast<std::size_t>(phase_)];
  if (!seat.args) seat.args = driver_.next(seat.device->rank(), step(), phase_);
  Status played;
  if (seat.args && static_cast<std::size_t>(seat.args->block) < blocks.size()) {
    played = block(seat, *seat.args);
    ++seat.args->block;
  }
  if (!seat.args || static_cast<std::size_t>(seat.args->block) >= blocks.size()) end_turn(seat, true);
  return played;
}

Status Session::block(Seat& seat, const Args& args) {
  Device& device = *seat.device;
  const Rank rank = device.rank();
  const Program& program = plan_.program(rank);
  const auto& blocks = program.phases[static_cast<std::size_t>(phase_)];
  HB_CHECK(args.block >= 0 && static_cast<std::size_t>(args.block) < blocks.size(),
           "the driver asks for block {} of {} in phase {}", args.block, blocks.size(),
           plan_.phases[static_cast<std::size_t>(phase_)].name);
  const Block& b = blocks[static_cast<std::size_t>(args.block)];
  if (seat.states.skips(b)) return {};
  seat.blocks_run += args.times;
  if (auto s = device.play(program, b, args); !s) return fail(located(s.error(), plan_, rank, phase_, b.name));
  const auto which = static_cast<std::size_t>(plan_.program_of_rank[static_cast<std::size_t>(rank)]);
  if (driver_.wants_results() &&
      fetches_[which][static_cast<std::size_t>(phase_)][static_cast<std::size_t>(args.block)])
    if (auto s = device.sync(); !s) return fail(located(s.error(), plan_, rank, phase_, b.name));
  seat.states.ran(b);
  try {
    driver_.completed(rank, args, phase_);
  } catch (const Diverged& e) {
    return explain_divergence(plan_, device, driver_, phase_, e);
  } catch (const DriverFailure& e) {
    return fail(located(e.problems(), plan_, rank, phase_, b.name));
  }
  return {};
}

}  // namespace hotbunk

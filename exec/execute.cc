#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "base/check.h"
#include "exec/backend.h"
#include "graph/section_states.h"

namespace hotbunk {
namespace {

/// Adds where it happened to the first failure of a call; keeps what the backend said.
Diagnostics located(Diagnostics found, const Plan& plan, Rank rank, std::int16_t phase, const std::string& block) {
  if (!found.empty()) {
    Diagnostic& first = found.front();
    first.notes.insert(first.notes.begin(),
                       fmt::format("rank {}, phase {}{}", rank, plan.phases[static_cast<std::size_t>(phase)].name,
                                   block.empty() ? "" : ", block " + block));
  }
  return found;
}

bool has_fetch(const Program& program, const Block& block) {
  return std::ranges::any_of(block.calls, [&](const Call& call) {
    const std::vector<Op>& ops = program.bodies[static_cast<std::size_t>(call.body)].ops;
    return std::ranges::any_of(ops, [](const Op& op) { return op.kind == OpKind::fetch; });
  });
}

class Walk {
 public:
  Walk(const Plan& plan, Driver& driver, std::vector<std::unique_ptr<Device>>& devices)
      : plan_(plan), driver_(driver), devices_(devices) {
    for (const Program& program : plan.programs) {
      auto& phases = fetches_.emplace_back();
      for (const auto& blocks : program.phases) {
        auto& flags = phases.emplace_back();
        for (const Block& block : blocks) flags.push_back(has_fetch(program, block));
      }
    }
    for (const auto& device : devices) states_.emplace_back(plan.program(device->rank()));
  }

  Status run(const RunOptions& options) {
    on_phase_ = options.on_phase;
    first_step_ = options.first_step;
    if (auto s = all(When::prologue, 0); !s) return s;
    std::int32_t step = options.first_step;
    for (bool ends = false; step <= options.steps && !ends; ++step) {
      if (auto s = all(When::iteration, step); !s) return s;
      if (options.on_step_end)
        if (auto s = options.on_step_end(step); !s) return s;
      if (auto s = driver_.step_ended(step); !s) return s;
      ends = driver_.ends_after(step);
    }
    return all(When::epilogue, step);
  }

 private:
  Status all(When when, std::int32_t step) {
    for (std::size_t p = 0; p < plan_.phases.size(); ++p)
      if (plan_.phases[p].when == when && (when != When::iteration || plan_.phases[p].runs_in(step, first_step_)))
        if (auto s = phase(static_cast<std::int16_t>(p), step); !s) return s;
    return {};
  }

  /// All local ranks take turns, a block each, so that a simulator's ranks advance together.
  Status phase(std::int16_t p, std::int32_t step) {
    if (on_phase_) on_phase_(step, p);
    for (auto& device : devices_) device->enter(step, p);
    std::vector<bool> done(devices_.size(), false);
    blocks_run_.assign(devices_.size(), 0);
    for (std::size_t left = devices_.size(); left > 0;)
      for (std::size_t d = 0; d < devices_.size(); ++d) {
        if (done[d]) continue;
        const Rank rank = devices_[d]->rank();
        const bool driven = plan_.phases[static_cast<std::size_t>(p)].driven;
        std::optional<Args> args = driver_.next(rank, step, p);
        if (args)
          if (auto s = driven ? block(d, *args, p) : all_blocks(d, *args, p); !s) return s;
        if (!args || !driven) done[d] = true, --left;
      }
    for (std::size_t d = 0; d < devices_.size(); ++d) {
      if (auto s = devices_[d]->sync(); !s) return fail(located(s.error(), plan_, devices_[d]->rank(), p, ""));
      devices_[d]->leave(blocks_run_[d]);
    }
    return {};
  }

  /// A phase that is not driven: its blocks once, in order.
  Status all_blocks(std::size_t d, Args args, std::int16_t p) {
    const auto& blocks = plan_.program(devices_[d]->rank()).phases[static_cast<std::size_t>(p)];
    for (; static_cast<std::size_t>(args.block) < blocks.size(); ++args.block)
      if (auto s = block(d, args, p); !s) return s;
    return {};
  }

  Status block(std::size_t d, const Args& args, std::int16_t p) {
    Device& device = *devices_[d];
    const Rank rank = device.rank();
    const Program& program = plan_.program(rank);
    const auto& blocks = program.phases[static_cast<std::size_t>(p)];
    HB_CHECK(args.block >= 0 && static_cast<std::size_t>(args.block) < blocks.size(),
             "the driver asks for block {} of {} in phase {}", args.block, blocks.size(),
             plan_.phases[static_cast<std::size_t>(p)].name);
    const Block& b = blocks[static_cast<std::size_t>(args.block)];
    if (states_[d].skips(b)) return {};
    ++blocks_run_[d];
    if (auto s = play(device, program, b, args); !s) return fail(located(s.error(), plan_, rank, p, b.name));
    const auto which = static_cast<std::size_t>(plan_.program_of_rank[static_cast<std::size_t>(rank)]);
    if (driver_.wants_results() && fetches_[which][static_cast<std::size_t>(p)][static_cast<std::size_t>(args.block)])
      if (auto s = device.sync(); !s) return fail(located(s.error(), plan_, rank, p, b.name));
    states_[d].ran(b);
    try {
      driver_.completed(rank, args, p);
    } catch (const Diverged& e) {
      return explain_divergence(plan_, device, driver_, p, e);
    } catch (const DriverFailure& e) {
      return fail(located(e.problems(), plan_, rank, p, b.name));
    }
    return {};
  }

  std::function<void(std::int32_t, std::int16_t)> on_phase_;
  std::int32_t first_step_ = 1;
  const Plan& plan_;
  Driver& driver_;
  std::vector<std::unique_ptr<Device>>& devices_;
  std::vector<SectionStates> states_;                    // of each device
  std::vector<std::vector<std::vector<bool>>> fetches_;  // [program][phase][block]
  std::vector<std::int64_t> blocks_run_;                 // in this phase, by device
};

Status check_supported(const Plan& plan, const Backend& backend) {
  std::map<OpKind, bool> asked;
  for (const Program& program : plan.programs)
    for (const Body& body : program.bodies)
      for (const Op& op : body.ops) {
        if (!asked.emplace(op.kind, true).second) continue;
        if (const Capability c = backend.supports(op); !c.supported)
          return fail(
              Diagnostic{.code = "E601",
                         .message = fmt::format("this backend does not execute {}: {}", name_of(op.kind), c.why),
                         .where = {},
                         .notes = {fmt::format("first asked for by '{}' of {}", op.name, body.name)},
                         .help = "choose another backend, or a layout without this op"});
      }
  return {};
}

}  // namespace

Status dispatch(Device& device, const BoundOp& op, const Args& args) {
  switch (op->kind) {
    case OpKind::alloc:
      return device.alloc(op->stream, op);
    case OpKind::free:
      return device.free(op->stream, op);
    case OpKind::map:
      return device.map(op->stream, op);
    case OpKind::unmap:
      return device.unmap(op->stream, op);
    case OpKind::feed:
    case OpKind::fetch:
    case OpKind::copy:
    case OpKind::peer_copy:
      return device.copy(op->stream, op, args);
    default:
      break;
  }
  if (is_communication(op->kind)) return device.collective(op->stream, op, args);
  return device.compute(op->stream, op, args);
}

Status play(Device& device, const Program& program, const Block& block, const Args& args) {
  Status done;
  each_step(
      program, block,
      [&](const BoundOp& op) {
        if (done) done = dispatch(device, op, args);
      },
      [&](const Mark& m) {
        if (done) done = m.kind == OpKind::record ? device.record(m.stream, m.event) : device.wait(m.stream, m.event);
      });
  return done;
}

Result<Trace> execute(const Plan& plan, Backend& backend, Driver& driver, const RunOptions& options) {
  if (auto s = check_supported(plan, backend); !s) return tl::unexpected(s.error());
  auto devices = backend.open(plan, options.local_ranks);
  if (!devices) return tl::unexpected(devices.error());
  Walk walk(plan, driver, *devices);
  if (auto s = walk.run(options); !s) return tl::unexpected(s.error());
  auto trace = backend.take_trace();
  if (trace) driver.report(*trace);
  return trace;
}

}  // namespace hotbunk

#include <fmt/format.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/check.h"
#include "exec/backend.h"
#include "exec/session.h"

namespace hotbunk {

Diagnostic unsupported(const Op& op, const Body& body, const std::string& why) {
  return {.code = "E601",
          .message = fmt::format("this backend does not execute {}: {}", name_of(op.kind), why),
          .where = {},
          .notes = {fmt::format("first asked for by '{}' of {}", op.name, body.name)},
          .help = "choose another backend, or a layout without this op"};
}

Status check_supported(const Plan& plan, const Backend& backend) {
  for (const Program& program : plan.programs)
    for (const Body& body : program.bodies)
      for (const Op& op : body.ops) {
        const bool on_host = plan.stream(op.stream).kind == StreamKind::host;
        if (const Capability c = on_host ? backend.supports_on_host(op) : backend.supports(op); !c.supported)
          return fail(unsupported(op, body, c.why));
      }
  return {};
}

namespace {

/// A session for each role of which the process plays ranks. Next is always the one whose walk is least far, so that no
/// driver and no queue holds many iterations. Where a sync waits for ranks of another role, they must be in another
/// process: only in virtual time may one session stop short of what the other has not said yet.
class Sessions {
 public:
  Sessions(const Plan& plan, Driver& driver, std::vector<std::unique_ptr<Device>> devices, const RunOptions& options) {
    std::map<std::int32_t, std::vector<std::unique_ptr<Device>>> by_role;
    for (auto& device : devices) {
      const std::int32_t role = plan.role_of(device->rank());
      by_role[role].push_back(std::move(device));
    }
    ends_ = IterationEnds(by_role.size());
    for (auto& [role, of_role] : by_role)
      sessions_.push_back(std::make_unique<Session>(plan, driver, std::move(of_role), options, &ends_));
  }

  Status play() {
    while (Session* next = least_far()) {
      auto advanced = next->advance();
      if (!advanced) return tl::unexpected(advanced.error());
    }
    return {};
  }

 private:
  Session* least_far() const {
    Session* out = nullptr;
    for (const auto& session : sessions_)
      if (!session->over() && (!out || session->walk_step() < out->walk_step())) out = session.get();
    return out;
  }

  IterationEnds ends_;
  std::vector<std::unique_ptr<Session>> sessions_;
};

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

Status Device::play(const Program& program, const Block& block, const Args& args) {
  HB_CHECK(args.times == 1, "this device plays a block once, not {} times together", args.times);
  Status done;
  each_step(
      program, block,
      [&](const BoundOp& op) {
        if (done) done = dispatch(*this, op, args);
      },
      [&](const Mark& m) {
        if (done) done = m.kind == OpKind::record ? record(m.stream, m.event) : wait(m.stream, m.event);
      });
  return done;
}

Result<Trace> execute(const Plan& plan, Backend& backend, Driver& driver, const RunOptions& options) {
  if (auto s = check_supported(plan, backend); !s) return tl::unexpected(s.error());
  auto devices = backend.open(plan, options.local_ranks);
  if (!devices) return tl::unexpected(devices.error());
  Sessions sessions(plan, driver, std::move(*devices), options);
  if (auto s = sessions.play(); !s) return tl::unexpected(s.error());
  auto trace = backend.take_trace();
  if (trace) driver.report(*trace);
  return trace;
}

}  // namespace hotbunk

// What an op keeps busy while it runs, besides its stream: who plays a plan and who prices one take it from here.
#pragma once
#include <cstdint>

#include "graph/catalogue.h"
#include "graph/plan.h"

namespace hotbunk {

enum class Occupies : std::uint8_t {
  stream,    // nothing but its stream
  host,      // the rank's host thread, where streams are threads; else nothing but its stream
  device,    // the device's compute, shared by all ranks and streams on it
  link_h2d,  // the device's link, one direction
  link_d2h,
  meeting,   // all members of its group, together
  transfer,  // who sends and who receives, together
};

inline Occupies occupies_of(const Plan& plan, const Op& op) {
  switch (op.kind) {
    case OpKind::alloc:
    case OpKind::free:
    case OpKind::record:
    case OpKind::wait:
    case OpKind::peer_copy:  // the order against the owner is kept by barriers
      return Occupies::stream;
    case OpKind::map:
    case OpKind::unmap:
      return Occupies::host;
    case OpKind::send:
    case OpKind::recv:
    case OpKind::send_recv:
      return Occupies::transfer;
    default:
      break;
  }
  if (is_communication(op.kind)) return Occupies::meeting;
  switch (plan.stream(op.stream).kind) {
    case StreamKind::to_device:
      return Occupies::link_h2d;
    case StreamKind::to_host:
      return Occupies::link_d2h;
    case StreamKind::host:
      return Occupies::stream;
    default:
      return Occupies::device;
  }
}

}  // namespace hotbunk

// A program as it is written: every call spelled out over buffers of the program. The passes (passes.h) say when
// buffers live, what waits for what, and which calls share a body; that makes a Program of it.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "graph/plan.h"

namespace hotbunk {

/// One written op, and the call of its block that it belongs to.
struct DraftOp : Op {
  std::int32_t call = 0;
  DraftOp() = default;
  explicit(false) DraftOp(Op op, std::int32_t of = 0) : Op(std::move(op)), call(of) {}
};

/// What a call of a draft is known by.
struct DraftCall {
  std::string body;  // the name of what it does
  std::string name;  // what the names of its ops and locals begin with
};

struct DraftBlock {
  std::string name;
  std::vector<DraftOp> ops;  // those of a call are neighbours
  std::vector<DraftCall> calls = {{}};
  Enters enters = Enters::nothing;
  Section section = Section::transient;
};

struct Draft {
  std::vector<Buffer> buffers;
  std::vector<BufferId> transients;  // that live from their first to their last use in a block
  std::vector<SlotLimit> slot_limits;
  std::vector<std::vector<DraftBlock>> phases;
  std::array<std::int64_t, num_sections> section_bytes{};
  std::int32_t num_events = 0;
};

}  // namespace hotbunk

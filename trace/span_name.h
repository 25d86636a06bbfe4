// What the spans of a trace are called, for those who look from a trace back at the plan.
#pragma once
#include <string>

#include "graph/bound.h"
#include "graph/catalogue.h"

namespace hotbunk {

/// Of an op that has a span of its own; of map and unmap, which a lowering gives no names: "map kv_cache".
inline std::string span_name(const BoundOp& op) {
  if (!op->name.empty() || (op->kind != OpKind::map && op->kind != OpKind::unmap)) return op.name();
  return std::string(name_of(op->kind)) + ' ' + op.section().name;
}

}  // namespace hotbunk

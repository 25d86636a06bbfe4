// Plan files: a plan as JSON (schema "hotbunk.plan-file/4") and back, the same plan bit for bit.
//
// The document is an object: schema, hash, scenario, chunk_bytes, device_capacity_bytes, host_capacity_bytes,
// overhead_bytes, groups, phases, program_of_rank, programs. What there are many of are arrays:
//   buffer  [name, dtype, elements, category, section, offset]
//   body    {name, ports, locals, ops}               ports: their number; locals: buffers
//   op      [kind, stream, name, inputs, outputs, {attrs, moves, group, buffer, section, map}]
//           (the object holds what differs from Op's defaults and is left out when empty)
//   tensor  [slot, offset_bytes, dtype, dim…]        dim: size | [size, sym, begin]
//   call    [body, name, [port…], [offset…], [mark…]]  port: buffer | [buffer, offset_bytes]; offsets: of the locals
//   mark    [before, "record" or "wait", stream, event]
//   move    [from, to], each [tensor, row_begin, row_end, col_begin, col_end, offset, pitch] and, where it is cut,
//           [who, family, count, repeat, rows, cols, pitch, last_row] behind that, in it at the end what is within a
//           piece, [family, count, repeat, rows, cols, last_row], or the runs, [begin, elements, step]
// A plan of one role, "job", names none; else there are roles: [name…], in a program its role, in a phase
// players: [[role, steps_back]…].
// And, where the plan was saved by a command, made_from: {hash, facts}, what it was made from (PlanFacts).
// Enumerators are written by name, so that a file outlives their renumbering.
#pragma once
#include <map>
#include <string>
#include <string_view>

#include "base/diagnostic.h"
#include "graph/plan.h"

namespace hotbunk {

/// What a plan was made from and does not show itself: values by name, as whoever saves it knows them.
using PlanFacts = std::map<std::string, std::string>;

/// One line of JSON. The hash in it is plan_hash(plan).
std::string plan_to_json(const Plan&, const PlanFacts& made_from = {});

/// The plan, or why the text is none: E501 not JSON (truncated), E502 a missing or wrongly typed value, E503 a value
/// out of range (an index that points nowhere, a window outside its buffer, a name that is no enumerator), E504 the
/// content does not have the hash that the file states, E505 another schema. Safe on any input: what it returns may be
/// indexed without further checks; whether it is a sensible plan is the verifier's question. `file` is for messages.
Result<Plan> plan_from_json(std::string_view text, const std::string& file);
/// The same with what it was made from; empty where the file does not say.
struct PlanFile {
  Plan plan;
  PlanFacts made_from;
};
Result<PlanFile> plan_file_from_json(std::string_view text, const std::string& file);
/// Of names and values.
std::string facts_hash(const PlanFacts&);

}  // namespace hotbunk

// The verifier: run after every pass and on every plan that is read from a file.
#pragma once
#include <string>
#include <vector>

#include "graph/plan.h"

namespace hotbunk {

/// What is wrong with a plan, one line each ("" lines never), at most `limit` of them. It proves, per program:
///  - every op has the tensors and attributes of its kind (catalogue), and its group exists;
///  - dimensions lie within the capacity of their extent, and an op has the counts of those that the device counts;
///  - buffers alive together do not overlap, and lie inside their sections;
///  - an op touches only buffers that are alive and mapped: a step while asleep is found here;
///  - an op reads only bytes that were written since their buffer was allocated, and prepacked ones only where it
///    asks for such (graph/written.h);
///  - alloc and free balance over an iteration; driven blocks that loop leave nothing behind;
///  - conflicting accesses on different streams are ordered by events, for buffers and for reused ranges;
///  - waits name events that were recorded, behind ops that the waiting one needs: no wait is there for an address;
///  - a turn of a slot limit (plan.h) waits for the one whose slot it takes;
///  - all ranks of a group issue the same communication in the same order on each stream, per block.
/// What differs between the ranks of a program is proven for one rank of each kind (boxes.h: writers_of).
std::vector<std::string> verify(const Plan&, std::size_t limit = 20);

}  // namespace hotbunk

// Passes that turn what the lowering wrote (ops in order, buffers by name) into an executable program.
#pragma once
#include <vector>

#include "graph/plan.h"

namespace hotbunk {

/// Adds alloc before the first and free after the last use in a block, for buffers the block itself does not alloc or
/// free and that are listed as transient. The free goes on the stream of the last use.
void insert_lifetimes(Program&, const std::vector<BufferId>& transients);

/// Gives every buffer of the transient section an offset: best fit over the linear order of the program, 64-byte
/// aligned. Buffers of other sections are laid out back to back in the order of their ids. Sets section_bytes,
/// chunk-aligned.
void assign_offsets(const Plan&, Program&);

/// High-water mark in bytes of the transient section in one phase (0 when it has no transients).
std::int64_t transient_high_water(const Program&, std::int16_t phase);

/// Adds record and wait ops so that every two conflicting accesses on different streams are ordered, and no more than
/// that (transitively implied ones are left out). Blocks begin and end joined on the compute stream.
void insert_dependencies(Program&);

}  // namespace hotbunk

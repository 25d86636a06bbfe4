// Passes that turn what the lowering wrote (draft.h: bodies, and calls of them in order) into an executable program.
#pragma once
#include <vector>

#include "graph/draft.h"

namespace hotbunk {

/// Adds alloc before the first and free after the last use in a block, for the draft's transients that the block itself
/// does not alloc or free. The free goes on the stream of the last use. What is kept is allocated in the first block of
/// its phase that uses it and freed in the last.
void insert_lifetimes(Draft&);

/// Lays out the buffers of all sections but the transient one back to back in the order of their ids, 64-byte aligned.
/// Sets how large these are, chunk-aligned.
void lay_out_sections(const Plan&, Draft&);

/// Adds records and waits to the calls so that every two accesses of one buffer of which one writes, and every two
/// turns of a slot limit, are ordered, and no more than that (transitively implied order is left out). Blocks begin and
/// end joined on the leading stream.
void insert_dependencies(Draft&);

/// Gives every buffer of the transient section an offset, 64-byte aligned: best fit over the linear order of the draft,
/// among the ranges whose former uses the events already put before the first use on every stream. What is kept has its
/// range to itself for the whole phase. Sets how large the section is, chunk-aligned, and transient_bytes.
void place_transients(const Plan&, Draft&);

/// The program of a draft that the passes above went over. Calls that do the same with other buffers share a body,
/// also where each has written its own: this is found by comparing. A transient that lives and dies inside one call and
/// takes no turn of a slot limit is a local of its body; all others are bound to ports.
Program assemble(Draft);

}  // namespace hotbunk

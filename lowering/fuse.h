// Ops that a device computes in one go, where a program is written with one op each: a rewrite of a call's ops.
#pragma once
#include <span>
#include <vector>

#include "graph/op.h"

namespace hotbunk {

/// Puts into each linear what stands next to it and touches nothing but it (graph/catalogue.h: fused_linear):
///   an rms_norm in front of it, which nothing else reads, with the sum that it norms;
///   a swiglu behind it, of all of its product;
///   the sum of its product and a residual stream, which the rms_norm behind it made: that norms what is there then.
/// `kept`: tensors that ops behind these read. The numbers are the same.
void fuse_linears(std::vector<Op>& ops, std::span<const Tensor> kept);

}  // namespace hotbunk

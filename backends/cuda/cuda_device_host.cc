// What a CudaDevice does with the host's memory: ops on tensors that lie there, by the CPU backend's kernels, on the
// thread of their stream; and looks at numbers there.
//
// Such a thread waits for its driver's stream, in which the waits for other streams' events are, and what it enqueues
// later, a record among it, comes behind: that is all the order there is, and no more than a feed has.
#include <algorithm>
#include <span>

#include "backends/cuda/cuda_device_stream.h"
#include "base/check.h"

namespace hotbunk::cuda {

Space CudaDevice::space_of(const BoundOp& op) const {
  const std::span operands(op->inputs.data(), op->num_operands());  // a count may lie elsewhere
  const auto is_on_host = [&](const Tensor& t) { return space_of(op, t) == Space::host; };
  const auto on_host = std::ranges::count_if(operands, is_on_host) + std::ranges::count_if(op->outputs, is_on_host);
  const auto all = std::ssize(operands) + std::ssize(op->outputs);
  HB_CHECK(on_host == 0 || on_host == all,
           "{} of the {} tensors of {} '{}' are in the host's memory, the others on the device", on_host, all,
           name_of(op->kind), op.name());
  return on_host == 0 ? Space::device : Space::host;
}

std::int64_t CudaDevice::on_host(Stream& s, const CudaCall& call) {
  s.synchronize();
  for (const Tensor& t : call.op.inputs) s.touch(call.bound, call.addresses.address(t), t.bytes(call.sizes), false);
  for (const Tensor& t : call.op.outputs) s.touch(call.bound, call.addresses.address(t), t.bytes(call.sizes), true);
  op_kernel(call.op.kind)({static_cast<const OpCall&>(call), s.on_host});
  return -1;
}

NonFinite CudaDevice::nonfinite_in(Stream& s, const OpCall& call, const Tensor& t) const {
  const std::int64_t bytes = t.bytes(call.sizes);
  const std::byte* at = call.addresses.address(t);
  if (space_of(call.bound, t) == Space::device && bytes > 0) {
    at = s.read(at, bytes);
  } else {
    s.synchronize();
    s.touch(call.bound, at, bytes, false);
  }
  return nonfinite_of(at, t.dtype, t.elements(call.sizes));
}

}  // namespace hotbunk::cuda

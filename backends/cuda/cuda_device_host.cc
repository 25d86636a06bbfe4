// What a CudaDevice does with the host's memory: ops on tensors that lie there, by the CPU backend's kernels, on the
// thread of their stream; and looks at numbers there.
//
// Such a thread waits for its driver's stream, in which the waits for other streams' events are, and what it enqueues
// later, a record among it, comes behind: that is all the order there is, and no more than a feed has.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>

#include "backends/cuda/cuda_device_stream.h"
#include "base/check.h"

namespace hotbunk::cuda {

namespace {

/// How many of an op's tensors are in the host's memory; a count may lie elsewhere.
struct Spread {
  std::int64_t on_host = 0, all = 0;
  bool is_mixed() const { return on_host != 0 && on_host != all; }
  std::string text() const {
    return fmt::format("{} of its {} tensors are in the host's memory, the others on the device", on_host, all);
  }
};

Spread spread_of(const BoundOp& op) {
  const std::span operands(op->inputs.data(), op->num_operands());
  const auto is_on_host = [&](const Tensor& t) { return op.buffer(t).space() == Space::host; };
  return {std::ranges::count_if(operands, is_on_host) + std::ranges::count_if(op->outputs, is_on_host),
          std::ssize(operands) + std::ssize(op->outputs)};
}

}  // namespace

Result<bool> computes_on_host(const Program& program, const Backend& backend) {
  bool any = false;
  std::optional<Diagnostic> refused;
  for (const auto& blocks : program.phases)
    for (const Block& block : blocks)
      each_op(program, block, [&](const BoundOp& op) {
        if (refused || !is_compute(op->kind)) return;
        const Spread spread = spread_of(op);
        const bool on_host = spread.on_host != 0;
        any = any || on_host;
        const Capability c = spread.is_mixed() ? Capability{false, spread.text()}
                             : on_host         ? backend.supports_on_host(*op)
                                               : backend.supports(*op);
        if (!c.supported) refused = unsupported(*op, op.body(), c.why);
      });
  if (refused) return fail(std::move(*refused));
  return any;
}

Space CudaDevice::space_of(const BoundOp& op) const {
  const Spread spread = spread_of(op);
  HB_CHECK(!spread.is_mixed(), "{} '{}': {}", name_of(op->kind), op.name(), spread.text());
  return spread.on_host == 0 ? Space::device : Space::host;
}

std::int64_t CudaDevice::on_host(Stream& s, const CudaCall& call) {
  s.synchronize();
  for (const Tensor& t : std::span(call.op.inputs.data(), call.op.num_operands()))
    s.touch(call.bound, call.addresses.address(t), t.bytes(call.sizes), false);
  for (const Tensor& t : call.op.outputs) s.touch(call.bound, call.addresses.address(t), t.bytes(call.sizes), true);
  const OpKernel kernel = op_kernel(call.op.kind);
  HB_CHECK(kernel, "no CPU kernel for {}", name_of(call.op.kind));
  kernel({static_cast<const OpCall&>(call), s.on_host});
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

#include "lowering/fuse.h"

#include <algorithm>
#include <map>
#include <utility>

namespace hotbunk {
namespace {

class Fusing {
 public:
  Fusing(std::vector<Op>& ops, std::span<const Tensor> kept) : ops_(ops), gone_(ops.size(), false) {
    for (const Op& op : ops)
      for (const Tensor& t : op.inputs) ++readers_[t.buffer];
    for (const Tensor& t : kept) ++readers_[t.buffer];
  }

  void run() {
    for (std::size_t i = 0; i < ops_.size(); ++i) {
      if (ops_[i].kind != OpKind::linear || has_counts(ops_[i])) continue;
      if (i > 0) take_norm(i);
      if (i + 1 < ops_.size()) take_gate(i), take_residual(i);
    }
    std::size_t i = 0;
    std::erase_if(ops_, [&](const Op&) { return gone_[i++]; });
  }

 private:
  /// Whether it has that many readers; who is behind the call counts as one.
  bool is_read(const Tensor& t, int readers) const {
    const auto found = readers_.find(t.buffer);
    return (found == readers_.end() ? 0 : found->second) == readers;
  }
  static bool adds(const Op& norm) { return norm.num_operands() > 2; }
  /// Behind its operands: what it takes would stand among them.
  static bool has_counts(const Op& op) { return op.inputs.size() > op.num_operands(); }

  void take_norm(std::size_t i) {
    Op& product = ops_[i];
    const Op& norm = ops_[i - 1];
    if (norm.kind != OpKind::rms_norm || has_counts(norm) || norm.stream != product.stream ||
        !(norm.outputs[0] == product.inputs[0]) || !is_read(norm.outputs[0], 1) || !is_read(norm.outputs[1], 0))
      return;
    product.kind = OpKind::fused_linear;
    product.inputs[0] = norm.inputs[0];
    product.inputs.push_back(norm.inputs[1]);
    if (adds(norm)) product.inputs.push_back(norm.inputs[2]), product.outputs.push_back(norm.outputs[2]);
    product.attrs.insert(product.attrs.end(), norm.attrs.begin(), norm.attrs.end());
    gone_[i - 1] = true;
  }

  void take_gate(std::size_t i) {
    Op& product = ops_[i];
    const Op& gate = ops_[i + 1];
    if (gate.kind != OpKind::swiglu || gate.stream != product.stream || !(gate.inputs[0] == product.outputs[0]) ||
        !is_read(product.outputs[0], 1) || gate.outputs[0].dtype != product.inputs[0].dtype)
      return;
    product.kind = OpKind::fused_linear;
    product.outputs[0] = gate.outputs[0];
    with(product, Attr::gate, std::int64_t{1});
    gone_[i + 1] = true;
  }

  void take_residual(std::size_t i) {
    Op &product = ops_[i], &norm = ops_[i + 1];
    if (norm.kind != OpKind::rms_norm || has_counts(norm) || norm.stream != product.stream || !adds(norm) ||
        gone_[i + 1] || product.outputs.size() > 1 || product.has(Attr::gate) || !is_read(product.outputs[0], 1))
      return;
    const Tensor &y = product.outputs[0], &sum = norm.outputs[2];
    const std::size_t own = norm.inputs[0] == y ? 0 : norm.inputs[2] == y ? 2 : 1;
    if (own == 1 || y.dtype != product.inputs[0].dtype || sum.dtype != y.dtype) return;
    product.kind = OpKind::fused_linear;
    product.inputs.push_back(norm.inputs[2 - own]);
    product.outputs[0] = sum;
    with(product, Attr::residual, std::int64_t{1});
    ++readers_[sum.buffer];
    norm.inputs = {sum, norm.inputs[1]};
    norm.outputs.pop_back();
  }

  std::vector<Op>& ops_;
  std::vector<bool> gone_;
  std::map<BufferId, int> readers_;
};

}  // namespace

void fuse_linears(std::vector<Op>& ops, std::span<const Tensor> kept) { Fusing(ops, kept).run(); }

}  // namespace hotbunk

// Layer-wise offload as PyTorch's FSDP2 does it (CPUOffloadPolicy; torch/distributed/fsdp/_fully_shard): shards of
// parameters, gradients and optimizer state live in pinned host memory. Every gather first copies its shard up, tensor
// by tensor in the dtype of the shard (FSDPParam.all_gather_inputs), and every reduction is followed by a copy down
// (foreach_reduce). The optimizer steps on the CPUs.
#include "planner/train/train_model.h"

namespace hotbunk {

/// Of one pass over `own` elements of this rank's shards; all ranks of the node copy and add at the same time.
TrainModel::HostPass TrainModel::host_pass(const TrainPoint& p, double trained, double frozen, double tensors) const {
  const StateBytes& b = setting_.state;
  const auto copies = [&](double bytes) { return tensors * cost_.node_copy_seconds(bytes / std::max(tensors, 1.0)); };
  return {.up = copies(shard_bytes(p, trained, frozen)),
          .down = copies(trained * b.grads),
          .add = cost_.host_memory_seconds(trained * (b.grads + 2.0 * b.shard_grads(p.sharding)))};
}

TrainModel::HostPass TrainModel::host_pass(const TrainPoint& p, const StageShare& held) const {
  return host_pass(p, held.own_trained(p), held.own_frozen(p), rank_tensors(p));
}

/// The optimizer's step on the CPUs, at the rate of the node's memory: the gradients once for their norm and twice to
/// be clipped, then the update.
double TrainModel::host_step_seconds(const TrainPoint& p, double own, double moments) const {
  const StateBytes& b = setting_.state;
  // Fused it reads gradient, master and moments and writes master and moments: seven passes of AdamW.
  constexpr double fused_passes = 7.0;
  const double update = own * (b.shard_grads(p.sharding) + 2.0 * b.master) + 2.0 * moments;
  double seconds = cost_.host_memory_seconds(3.0 * own * b.shard_grads(p.sharding) +
                                             update * framework_.host_step_passes.value / fused_passes);
  // Where the low-precision parameters stay on the device, gradients go down and parameters come up around the step.
  if (!p.streams_from_host())
    seconds += cost_.node_copy_seconds(own * b.grads) + cost_.node_copy_seconds(own * b.params);
  // Sums that lie on the host come up for every later micro-batch to be added to, and go down again.
  if (sums_on_host(p))
    seconds += 2.0 * static_cast<double>(p.micro_batches - 1) * cost_.node_copy_seconds(own * b.grads);
  return seconds;
}

}  // namespace hotbunk

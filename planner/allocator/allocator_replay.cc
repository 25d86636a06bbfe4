#include "planner/allocator/allocator_replay.h"

#include <algorithm>
#include <cmath>
#include <deque>

namespace hotbunk {
namespace {

using Handles = std::vector<CachingAllocator::Handle>;

/// The tensors of one layer kind under the layout's recomputation.
struct LayerTensors {
  std::vector<double> held;     // from forward to backward
  std::vector<double> rebuilt;  // by recomputation, in backward; in forward they come and go
  double transient = 0;         // gradients inside the layer while its backward runs
  double weights = 0;           // elements, gathered where parameters are sharded
};

LayerTensors tensors_of(const TrainModel& m, const TrainPoint& p, bool moe) {
  std::vector<KeptTensor> all;
  const LayerCost cost = moe ? m.moe_layer(p, &all) : m.dense_layer(p, &all);
  LayerTensors out;
  out.transient = cost.transient_bytes;
  out.weights = cost.parameters;
  if (p.recompute == Recompute::full) {
    out.held = {cost.kept_full_bytes};
    for (const KeptTensor& t : all) out.rebuilt.push_back(t.bytes);
  } else if (p.recompute == Recompute::selective && m.framework().selective_products) {
    // The input, attention's output and every second product: the input, and the rest in two.
    const double rest = cost.kept_selective_bytes - cost.kept_full_bytes;
    out.held = {cost.kept_full_bytes, rest / 2.0, rest / 2.0};
    out.rebuilt = {cost.kept_bytes - cost.kept_selective_bytes};
  } else {
    for (const KeptTensor& t : all)
      (p.recompute == Recompute::selective && t.core ? out.rebuilt : out.held).push_back(t.bytes);
  }
  return out;
}

class Step {
 public:
  Step(const TrainModel& m, const TrainPoint& p, std::int64_t stage)
      : model_(m), point_(p), stage_(stage), layers_(m.layers(p)), peak_(m.peak_bytes(p, layers_, stage)) {
    const std::int64_t dense = m.layers_of(p, stage, false), moe = m.layers_of(p, stage, true);
    kinds_.assign(static_cast<std::size_t>(dense), false);
    kinds_.resize(static_cast<std::size_t>(dense + moe), true);
    dense_ = tensors_of(m, p, false);
    if (moe > 0) moe_ = tensors_of(m, p, true);
    streams_ = p.sharding == Sharding::fsdp || p.sharding == Sharding::zero3;
    flat_ = p.sharding == Sharding::fsdp && m.framework().flat_units;
  }

  ReservedMemory run() {
    states();
    const auto flight =
        std::max<std::int64_t>(1, static_cast<std::int64_t>(std::ceil(model_.in_flight(point_, stage_))));
    // Two micro-batches of steady state show what comes back; later ones repeat them.
    const std::int64_t steps = std::min(point_.micro_batches, flight + 2);
    std::deque<std::vector<Handles>> live;
    for (std::int64_t i = 0; i < steps; ++i) {
      if (static_cast<std::int64_t>(live.size()) == flight) backward(live);
      forward(live);
      if (last()) backward(live);  // 1F1B: the last stage turns round at once
    }
    while (!live.empty()) backward(live);
    return {a_.peak_allocated_bytes(), a_.peak_reserved_bytes()};
  }

 private:
  bool last() const { return stage_ == point_.pp - 1; }
  double part(PeakTensor t) const { return peak_[static_cast<std::size_t>(t)]; }
  CachingAllocator::Handle alloc(double bytes) { return a_.allocate(static_cast<std::int64_t>(std::llround(bytes))); }
  void free(Handles& handles) {
    for (auto h : handles) a_.free(h);
    handles.clear();
  }
  const LayerTensors& kind(std::size_t layer) const { return kinds_[layer] ? moe_ : dense_; }

  /// A flat gradient buffer per stage as Megatron and ZeRO keep it, the rest by layer; library buffers.
  void states() {
    for (PeakTensor t : {PeakTensor::params, PeakTensor::master, PeakTensor::moments})
      for (std::size_t layer = 0; layer < kinds_.size(); ++layer) alloc(part(t) / static_cast<double>(kinds_.size()));
    if (streams_)
      for (std::size_t layer = 0; layer < kinds_.size(); ++layer)
        alloc(part(PeakTensor::grads) / static_cast<double>(kinds_.size()));
    else alloc(part(PeakTensor::grads));
    for (PeakTensor t : {PeakTensor::workspace, PeakTensor::weight_grads, PeakTensor::pipeline, PeakTensor::sequence})
      if (part(t) > 0) alloc(part(t));
  }

  double whole(std::size_t layer) const { return kind(layer).weights * model_.setting().state.params; }

  /// The parameters that a layer works with where they are sharded.
  Handles gather(std::size_t layer) {
    Handles out;
    if (streams_) out.push_back(alloc(whole(layer)));
    return out;
  }
  /// The flat output of a gather that was started early, before it is copied to the layer's tensors.
  void prefetch(std::size_t layer, bool any) {
    Handles next;
    if (flat_ && any && model_.setting().prefetch) next.push_back(alloc(whole(layer)));
    free(gathering_);
    gathering_ = std::move(next);
  }

  void forward(std::deque<std::vector<Handles>>& live) {
    std::vector<Handles> batch;
    Handles before;
    for (std::size_t layer = 0; layer < kinds_.size(); ++layer) {
      Handles weights = gather(layer);
      prefetch(layer + 1, layer + 1 < kinds_.size());
      free(before);  // the unit before goes when the next one is there
      before = std::move(weights);
      Handles held, passing;
      for (double bytes : kind(layer).held) held.push_back(alloc(bytes));
      for (double bytes : kind(layer).rebuilt) passing.push_back(alloc(bytes));
      free(passing);
      batch.push_back(std::move(held));
    }
    free(before);
    live.push_back(std::move(batch));
  }

  void backward(std::deque<std::vector<Handles>>& live) {
    std::vector<Handles> batch = std::move(live.front());
    live.pop_front();
    // The root unit (embedding and head) stays gathered from its forward on, its gradient until backward is over.
    Handles before, root;
    const double ends = streams_ ? model_.end_parameters(point_, layers_, stage_) : 0.0;
    const double gradient = flat_ ? (last() ? layers_.head.parameters : 0.0) : ends;
    for (double elements : {ends, gradient})
      if (elements > 0) root.push_back(alloc(elements * model_.setting().state.params));
    prefetch(kinds_.empty() ? 0 : kinds_.size() - 1, !kinds_.empty());
    if (last()) loss();
    for (std::size_t layer = kinds_.size(); layer-- > 0;) {
      Handles weights = gather(layer), work, gradients;
      prefetch(layer == 0 ? 0 : layer - 1, layer > 0);
      free(before);
      before = std::move(weights);
      for (double bytes : kind(layer).rebuilt) work.push_back(alloc(bytes));
      // Both sides of the activation, and the gradient of the layer's output and input.
      for (int i = 0; i < 3; ++i) work.push_back(alloc(kind(layer).transient / 3.0));
      if (streams_) (flat_ ? gradients : work).push_back(alloc(whole(layer)));  // gradient unsharded
      free(work);
      free(batch[layer]);
      if (!flat_) continue;
      // The reduction before is over, the layer's parameters go, its gradients are copied to the reduction's flat
      // input.
      free(reducing_);
      free(before);
      reducing_.push_back(alloc(kind(layer).weights * model_.setting().state.grads));
      free(gradients);
    }
    free(before);
    free(reducing_);
    free(root);
  }

  /// Logits in the compute dtype, then fp32 copies as long as the profile's bytes last.
  void loss() {
    Handles work;
    const double total = layers_.head.transient_bytes, per_logit = model_.framework().loss_bytes.value;
    for (double left = per_logit, next = model_.setting().element_bytes; left > 1e-9; left -= next, next = 4.0)
      work.push_back(alloc(total * std::min(next, left) / per_logit));
    free(work);
  }

  const TrainModel& model_;
  const TrainPoint point_;
  std::int64_t stage_;
  TrainModel::Layers layers_;
  PeakBytes peak_;
  std::vector<bool> kinds_;
  LayerTensors dense_, moe_;
  bool streams_ = false, flat_ = false;  // units are sharded; they move through flat buffers
  Handles gathering_, reducing_;         // flat buffers of the collectives under way
  CachingAllocator a_;
};

}  // namespace

ReservedMemory replay_step(const TrainModel& m, const TrainPoint& p, std::int64_t stage) {
  return m.divides(p) ? Step(m, p, stage).run() : ReservedMemory{};
}

ReservedMemory replay_step(const TrainModel& m, const TrainPoint& p) {
  if (!m.divides(p)) return {};
  ReservedMemory most;
  for (std::int64_t stage : {std::int64_t{0}, m.fullest_stage(p, m.layers(p)), p.pp - 1})
    if (const ReservedMemory r = replay_step(m, p, stage); r.reserved > most.reserved) most = r;
  return most;
}

}  // namespace hotbunk

#include "planner/allocator/allocator_replay.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <numeric>

namespace hotbunk {
namespace {

using Handles = std::vector<CachingAllocator::Handle>;

/// The tensors of one layer kind under the layout's recomputation.
struct LayerTensors {
  std::vector<double> held;     // from forward to backward
  std::vector<double> rebuilt;  // by recomputation, in backward; in forward they come and go
  double transient = 0;         // gradients inside the layer while its backward runs
  double weights = 0;           // elements, gathered where parameters are sharded
  double trained = 0;           // of them, those with gradients
  double working() const { return std::accumulate(rebuilt.begin(), rebuilt.end(), transient); }
};

LayerTensors tensors_of(const TrainModel& m, const TrainPoint& p, bool moe) {
  std::vector<KeptTensor> all;
  const LayerCost cost = moe ? m.moe_layer(p, &all) : m.dense_layer(p, &all);
  LayerTensors out;
  out.transient = cost.transient_bytes;
  out.weights = cost.parameters + cost.adapter_parameters;
  out.trained = m.frozen() ? cost.adapter_parameters : cost.parameters;
  if (p.recompute == Recompute::full) {
    out.held = {cost.kept_full_bytes};
    double input = cost.kept_full_bytes;  // it is there: the first of the tensors are not built again
    for (const KeptTensor& t : all) {
      const double there = std::min(input, t.bytes);
      input -= there;
      if (t.bytes > there) out.rebuilt.push_back(t.bytes - there);
    }
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
    const auto dense = static_cast<std::size_t>(m.layers_of(p, stage, false)),
               moe = static_cast<std::size_t>(m.layers_of(p, stage, true));
    dense_ = tensors_of(m, p, false);
    if (moe > 0) moe_ = tensors_of(m, p, true);
    // Backward begins with the kind of layers that needs most beside what all of them keep.
    const bool moe_last = dense == 0 || (moe > 0 && moe_.working() > dense_.working());
    kinds_.assign(moe_last ? dense : moe, !moe_last);
    kinds_.resize(dense + moe, moe_last);
    streams_ = p.sharding == Sharding::fsdp || p.sharding == Sharding::zero3;
    flat_ = p.sharding == Sharding::fsdp && m.framework().flat_units;
    stays_ = p.sharding == Sharding::fsdp && !p.reshard_after_forward;
    ends_ = m.end_parameters(p, layers_, stage);
    const LayerTensors& largest = moe > 0 && (dense == 0 || moe_.weights > dense_.weights) ? moe_ : dense_;
    unit_ = largest.weights, unit_trained_ = largest.trained;
    // Without flat buffers the root takes the place of a layer's unit, without a neighbour (TrainModel::stage_bytes).
    if (p.sharding == Sharding::fsdp)
      copies_ = 2 + (m.setting().prefetch ? 1 : 0) + (m.setting().flat_parameters ? 1 : 0);
    if (const double root = 2.0 / copies_ * ends_; !flat_ && last() && root > unit_)
      unit_ = root, unit_trained_ = m.frozen() ? 0.0 : root;
  }

  ReservedMemory run() {
    states();
    // Of chunks that are part of a micro-batch the whole ones come and go, the rest stays.
    const double in_flight = std::max(1.0, model_.in_flight(point_, stage_)), whole = std::floor(in_flight + 1e-9);
    const auto flight = static_cast<std::int64_t>(whole);
    for (std::size_t layer = 0; in_flight > whole && layer < kinds_.size(); ++layer)
      for (double bytes : kind(layer).held) alloc((in_flight - whole) * bytes);
    // Two micro-batches of steady state show what comes back; later ones repeat them.
    const std::int64_t steps = std::min(point_.micro_batches, flight + 2);
    std::deque<std::vector<Handles>> live;
    for (std::int64_t i = 0; i < steps; ++i) {
      if (static_cast<std::int64_t>(live.size()) == flight) backward(live);
      forward(live);
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

  double params() const { return model_.setting().state.params; }

  /// A flat gradient buffer per stage as Megatron and ZeRO keep it, the rest by layer; library buffers.
  void states() {
    const auto pieces = static_cast<double>(std::max<std::size_t>(1, kinds_.size()));
    const auto by_layer = [&](double bytes) {
      for (double piece = 0; piece < pieces; ++piece) alloc(bytes / pieces);
    };
    for (PeakTensor t : {PeakTensor::params, PeakTensor::master, PeakTensor::moments}) by_layer(part(t));
    if (model_.grows_gradients(point_)) grown_ = model_.price(point_, layers_).grad_bytes / pieces;
    else if (streams_) by_layer(part(PeakTensor::grads));
    else alloc(part(PeakTensor::grads));
    if (stays_) {  // gathered once, for all micro-batches
      for (std::size_t layer = 0; layer < kinds_.size(); ++layer) alloc(kind(layer).weights * params());
      alloc(ends_ * params());
    }
    staged();
    // Of embedding and head: kept from forward to backward of every micro-batch.
    if (const double kept = part(PeakTensor::ends_kept); kept > 0) alloc(kept);
    for (PeakTensor t : {PeakTensor::workspace, PeakTensor::weight_grads, PeakTensor::pipeline, PeakTensor::sequence})
      if (part(t) > 0) alloc(part(t));
  }

  /// Shards on their way from the host, two units' of them, and one's gradients on their way back.
  void staged() {
    if (!point_.streams_from_host()) return;
    double all = ends_;
    for (const bool moe : kinds_) all += (moe ? moe_ : dense_).weights;
    const double unit = (last() ? std::max(unit_, 2.0 / copies_ * ends_) : unit_) / std::max(all, 1.0);
    const TrainModel::StagedShards part = model_.staged_shards(point_, layers_, stage_);
    for (int up = 0; up < (model_.setting().prefetch ? 2 : 1); ++up) alloc(unit * part.up);
    alloc(unit * part.down);
  }

  double whole() const { return unit_ * params(); }

  /// The parameters that a layer works with where they are sharded.
  Handles gather() {
    Handles out;
    if (streams_ && !stays_) out.push_back(alloc(whole()));
    return out;
  }
  /// The flat output of a gather that was started early, before it is copied to the layer's tensors.
  void prefetch(bool any) {
    Handles next;
    if (flat_ && !stays_ && any && model_.setting().prefetch) next.push_back(alloc(whole()));
    free(gathering_);
    gathering_ = std::move(next);
  }
  /// Units and gradients around a layer's backward, or the root's at the loss, without flat buffers (states_of).
  Handles units() {
    Handles out;
    if (flat_) return out;
    const double grads = unit_trained_ * model_.setting().state.grads;
    if (point_.sharding == Sharding::zero2) out = {alloc(grads)};
    if (point_.sharding == Sharding::zero3) out = {alloc(whole()), alloc(whole()), alloc(grads)};
    if (point_.sharding == Sharding::fsdp)
      for (int i = 0; i < (stays_ ? 1 : copies_); ++i)  // the last one of them its gradient
        out.push_back(alloc(i + 1 < (stays_ ? 1 : copies_) ? whole() : unit_trained_ * params()));
    return out;
  }

  void forward(std::deque<std::vector<Handles>>& live) {
    std::vector<Handles> batch;
    Handles before;
    for (std::size_t layer = 0; layer < kinds_.size(); ++layer) {
      Handles weights = gather();
      prefetch(layer + 1 < kinds_.size());
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
    // Flat: the root (embedding and head) stays gathered from its forward on, the head's gradient until backward is
    // over.
    Handles before, root;
    const double head = last() && !model_.frozen() ? layers_.head.parameters : 0.0;
    for (double elements : {stays_ ? 0.0 : ends_, head})
      if (flat_ && elements > 0) root.push_back(alloc(elements * params()));
    prefetch(!kinds_.empty());
    if (last()) loss();
    for (std::size_t layer = kinds_.size(); layer-- > 0;) {
      Handles weights = flat_ ? gather() : Handles{}, work = units(), gradients;
      prefetch(layer > 0);
      free(before);
      before = std::move(weights);
      for (double bytes : kind(layer).rebuilt) work.push_back(alloc(bytes));
      // Both sides of the activation, and the gradient of the layer's output and input.
      for (int i = 0; i < 3; ++i) work.push_back(alloc(kind(layer).transient / 3.0));
      if (flat_) gradients.push_back(alloc(unit_trained_ * params()));  // unsharded
      // FSDP1's unit before is given back late: it is recorded on another stream.
      if (flat_ && !stays_ && model_.setting().flat_parameters) work.push_back(alloc(whole()));
      free(work);
      free(batch[layer]);
      if (!flat_) continue;
      // The reduction before is over, the layer's parameters go, its gradients are copied to the reduction's flat
      // input.
      free(reducing_);
      free(before);
      reducing_.push_back(alloc(unit_trained_ * model_.setting().state.grads));
      free(gradients);
      if (grown_ > 0.0) alloc(grown_);
    }
    free(before);
    free(reducing_);
    free(root);
  }

  /// Logits in the compute dtype, then fp32 copies as long as the profile's bytes last.
  void loss() {
    Handles work = units();
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
  bool stays_ = false;                   // what is gathered stays so
  int copies_ = 3;                       // of a unit, its gradient included
  double ends_ = 0, unit_ = 0;           // elements of embedding and head, of the largest unit
  double unit_trained_ = 0;              // of it, those with gradients
  double grown_ = 0;                     // bytes of gradients that every layer's backward leaves
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
  for (std::int64_t stage : {std::int64_t{0}, m.fullest_stage(p, m.layers(p)), p.pp - 1}) {
    const ReservedMemory r = replay_step(m, p, stage);
    most = {std::max(most.allocated, r.allocated), std::max(most.reserved, r.reserved)};
  }
  return most;
}

}  // namespace hotbunk

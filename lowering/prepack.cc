// Behind a sync, what engines do behind a load of weights: the matrices that products alone read are put in the order
// in which the device's products read them, once, so that no product of the rollout does it again.
#include <fmt/format.h>

#include <set>

#include "layout/placement.h"
#include "lowering/rollout.h"
#include "model/decoder.h"

namespace hotbunk {
namespace {

/// Who reads an engine's weights, by their names.
struct Readers {
  std::set<std::string> products, others;
  /// Of a forward whose weights have names that begin with `at`.
  void note(const Forward& f, const std::string& at) {
    for (const ForwardOp& op : f.ops())
      for (std::size_t i = 0; i < op.weights.size(); ++i)
        (op.kind == OpKind::linear && i == 0 ? products : others).insert(at + weight_of(op.weights[i]));
  }
};

}  // namespace

std::vector<bool> prepacked_weights(const Scenario& s, const RolloutState& r) {
  std::vector<bool> out(r.weights().size(), false);
  if (!s.cluster.gpu.is_cpu) return out;
  const ModelSpec model = served_model(s);
  const DecoderLayers layers(model);
  Readers readers;
  if (r.is_first()) readers.note(decoder_embedding(model).forward, "");
  for (std::int64_t l = r.layers().begin; l < r.layers().end; ++l)
    readers.note(layers.at(static_cast<int>(l), l == r.layers().begin).forward, fmt::format("layers.{}.", l));
  if (r.is_last()) {
    readers.note(decoder_end(model).forward, "");
    readers.products.insert(r.head());
  }
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = readers.products.contains(r.weights()[i].name) && !readers.others.contains(r.weights()[i].name);
  return out;
}

void lower_prepack(const Scenario& s, ProgramBuilder& b, const RolloutState& r) {
  const ModelSpec model = served_model(s);
  const DecoderLayers layers(model);
  const auto prepack = [&](int layer, std::int64_t sort, const std::string& at) {
    std::vector<Tensor> matrices;
    std::vector<std::string> names;
    for (std::size_t i = 0; i < r.weights().size(); ++i)
      if (r.weights()[i].layer == layer && r.is_prepacked(i)) {
        names.push_back("sync.prepack." + r.weights()[i].name);
        matrices.push_back(r.matrix(b, r.weights()[i].name));
      }
    if (matrices.empty()) return;
    b.call("sync.prepack", sort, "sync.prepack." + at, {matrices.begin(), matrices.end()}, [&] {
      for (std::size_t i = 0; i < matrices.size(); ++i)
        b.emit(OpKind::prepack, streams::compute, names[i], {matrices[i]}, {matrices[i]});
    });
  };
  for (std::int64_t l = r.layers().begin; l < r.layers().end; ++l)
    prepack(static_cast<int>(l), static_cast<std::int64_t>(layers.sort_of(static_cast<int>(l))),
            fmt::format("layers.{}.", l));
  prepack(-1, static_cast<std::int64_t>(DecoderLayers::num_sorts), "");
}

}  // namespace hotbunk

// What an engine makes of a model: pipeline stages, what a rank of each holds, and the sizes that its steps are priced
// by. Counts are in elements and per layer unless a name says otherwise.
#pragma once
#include <algorithm>
#include <cstdint>

#include "planner/train/layer_kinds.h"
#include "spec/scenario.h"

namespace hotbunk {

struct RolloutPoint;

/// Elements of a model by where they lie. Counted once: counting walks the layers.
struct ModelCounts {
  double parameters = 0, active = 0;      // of the whole model; active: that a token touches
  double ends = 0;                        // embedding and head, tied ones once
  double front = 0, back = 0;             // before the first layer; behind the last, without a tied head
  double tied_head = 0;                   // held once more where the last stage is not the first
  double attention = 0;                   // projections of a layer's attention
  double dense_layer = 0, moe_layer = 0;  // whole layers, attention and norms included
  double experts = 0;                     // routed ones of a moe layer
  double tensors = 0;                     // parameters by name, not elements: of the model, of a layer
  double dense_layer_tensors = 0, moe_layer_tensors = 0;
  // Weights of a layer's products, which a narrow format holds: elements, attention's among them, and tensors.
  double dense_layer_products = 0, moe_layer_products = 0;
  double dense_product_tensors = 0, moe_product_tensors = 0;
  // Adapters beside them, of the whole model: their elements, the matrices that have them, and those matrices'
  // elements.
  double adapters = 0, adapted_matrices = 0, adapted_elements = 0;
};
ModelCounts counts_of(const ModelSpec&);

/// What a stage hands to the next: hidden states and the residual stream, a slice on each tensor-parallel rank,
/// gathered where it arrives. Source: vLLM's IntermediateTensors, SGLang's PPProxyTensors (both through
/// send_tensor_dict).
inline constexpr double boundary_tensors = 2.0;

/// Layers of one pipeline stage; the whole model where there is one.
struct RolloutStage {
  double layers = 0, moe = 0;      // moe: of the layers
  bool first = true, last = true;  // with the embedding; with final norm, head and sampling
  double dense() const { return layers - moe; }
  friend bool operator==(const RolloutStage&, const RolloutStage&) = default;
};

/// Layers of stage `i` of `pp` where `pp` may not divide them. SGLang gives one more to the last stages; vLLM to those
/// before the last one, which has the head. Ours has no stages and is priced by vLLM's rule.
/// Source: get_pp_indices in both engines' distributed/utils.py.
std::int64_t stage_layers(RolloutEngine, std::int64_t layers, std::int64_t pp, std::int64_t i);

/// visit(stage, count) for every run of neighbouring stages that are alike, from the first to the last.
template <class Visit>
void each_stage(const ModelSpec& m, RolloutEngine engine, std::int64_t pp, Visit visit) {
  const std::int64_t dense = layer_kinds(m).dense;
  RolloutStage run;
  std::int64_t count = 0, before = 0;
  for (std::int64_t i = 0; i < pp; ++i) {
    const std::int64_t layers = stage_layers(engine, m.layers, pp, i);
    const std::int64_t moe = before + layers - std::clamp(dense, before, before + layers);
    const RolloutStage stage{static_cast<double>(layers), static_cast<double>(moe), i == 0, i + 1 == pp};
    if (count > 0 && !(stage == run)) visit(run, count), count = 0;
    run = stage;
    ++count, before += layers;
  }
  visit(run, count);
}

/// Context-parallel ranks that a step's tokens are divided among, of prompts, and experts with them. Those of our own
/// engine all compute all tokens: what they divide is the cache (lowering/rollout.cc).
double token_shares(RolloutEngine, const RolloutPoint&);
/// Ranks that a sequence's cache is divided among, on average over an engine's tokens. Attention groups hold tokens of
/// their own. vLLM's decode context parallelism spans the ranks of prefill context parallelism; SGLang's prefill
/// context parallelism gathers every rank a whole cache. (docs/planner-prices.md, "Stages and context parallelism of an
/// engine")
double cache_shares(RolloutEngine, const RolloutPoint&);
/// Bytes of K and V that a token costs one rank in `layers` layers, undivided among `shares`. MLA caches its latent,
/// which tensor parallelism does not split.
double cache_bytes(const ModelSpec&, const RolloutPoint&, double layers, double element, double shares);

/// Bytes that a sequence's state of linear attention costs one rank, of the mean layer: fp32, and what the convolution
/// has to see again in the activations' `element`. 0: there is none.
double state_bytes(const ModelSpec&, const RolloutPoint&, double element);

/// FLOPs of attention for one query and one key it sees, all heads of a layer. Decoding MLA attends in the latent: keys
/// of kv_lora_rank + rope, values of kv_lora_rank.
double attention_flops_per_pair(const ModelSpec&, bool decode);
/// Elements of one dense layer's MLP.
double mlp_elements(const ModelSpec&);

/// Elements on one rank of a stage: attention is held once per attention group, routed experts are split over the
/// engine's ranks of the stage that have other tokens or other columns (whole experts over ep are as many elements as
/// slices of all), the rest by tp.
double stage_elements(const ModelCounts&, RolloutEngine, const RolloutPoint&, const RolloutStage&);
/// Of these the weights of products.
double stage_products(const ModelCounts&, RolloutEngine, const RolloutPoint&, const RolloutStage&);

}  // namespace hotbunk

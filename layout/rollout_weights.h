// How one rollout tensor-parallel rank holds a decoder (model/decoder.h): which buffers, and which rectangles of which
// Hugging Face parameters fill them. Weight sync and the rollout graph both read this list.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "layout/pipeline.h"
#include "layout/shard.h"
#include "spec/model.h"

namespace hotbunk {

/// One weight buffer of one rollout rank, row-major (rows, cols); a vector is (n, 1).
/// Names: "embedding", "position_embedding", "final_norm", "final_norm_bias", "lm_head" and, per layer N, "layers.N." +
///   input_norm, input_norm_bias  (hidden, 1)             replicated; the bias where norms have one
///   qkv                       (q + 2 kv rows, hidden)    [query heads; key heads; value heads of this rank]
///   qkv_bias                  (q + 2 kv rows, 1)         where the model has it
///   sinks                     (query heads, 1)           where the model has them; of this rank's heads
///   q_norm, k_norm            (head_dim, 1)              where the model has them; replicated
///   o                         (hidden, q rows)           column slice
///   o_bias                    (hidden, 1)                where the model has it; replicated
///   attention_out_norm, mlp_out_norm  (hidden, 1)        where the model has them; replicated
///   post_norm, post_norm_bias  (hidden, 1)               as input_norm
///   gate_up                   (2 intermediate / tp, hidden)  [gate rows; up rows of this rank]
///   down                      (hidden, intermediate / tp)    column slice
/// in an MLP without a gate, in the place of gate_up:
///   up                        (intermediate / tp, hidden)    row slice
///   up_bias                   (intermediate / tp, 1)     where the model has it; row slice
///   down_bias                 (hidden, 1)                where the model has it; replicated; behind down
/// with latent attention (ModelSpec::mla), in the place of qkv:
///   q_a                       (q_lora_rank, hidden)      replicated; where queries have a latent
///   q_a_norm                  (q_lora_rank, 1)           likewise
///   q_b                       (query heads of this rank, q_lora_rank or hidden)            row slice; q without q_a
///   kv_a                      (kv_lora_rank + rope, hidden)                                replicated
///   kv_a_norm                 (kv_lora_rank, 1)          replicated
///   kv_b                      (keys and values of this rank's heads, kv_lora_rank)         row slice
/// and o has a column for each number of this rank's values;
/// and with E experts, in the place of gate_up and down, an expert's inner width being I:
///   router                    (E, hidden)                replicated
///   experts_gate_up           (E 2 I / tp, hidden)       for each expert [gate rows; up rows of this rank]
///   experts_down              (E hidden, I / tp)         for each expert its column slice
/// where n groups of ranks that follow one another have other experts each (EngineCut::experts), a rank has E / n of
/// them in the same two, and of each as many columns as a tensor-parallel group of its own size:
///   experts_gate_up           (E / n 2 I n / tp, hidden)  of expert e the place e % (E / n) in group e / (E / n)
///   experts_down              (E / n hidden, I n / tp)
///   router_bias               (E, 1)                     where the model has it; replicated
///   router_linear_bias        (E, 1)                     likewise
///   experts_gate_up_bias      (E 2 I / tp, 1)            likewise; rows as those of experts_gate_up
///   experts_down_bias         (E hidden / tp, 1)         likewise; a part of the rows of each expert; of whole ones
///   all shared_gate_up, shared_down   as gate_up and down    where there are experts that every token takes
struct LocalWeight {
  std::string name;
  std::int64_t rows = 0, cols = 0;
  int layer = -1;  // -1: embedding, final norm, head
  using Step = TensorStep;
  struct Source {
    std::string parameter;  // Hugging Face name
    Piece piece;            // rectangle of that parameter, and where it lies in this buffer
    Step step;
    std::int64_t holder = -1;  // of experts over groups of ranks: the group that has it; others have theirs there
  };
  bool of_attention = false;    // cut over the ranks that share attention (EngineCut::attention), else over all
  std::vector<Source> sources;  // they fill the buffer, except the padded rows of the vocabulary

  std::int64_t elements() const { return rows * cols; }
};

/// The query heads and key/value heads of one tensor-parallel rank under grouped-query attention.
/// kv_heads >= tp: both are cut into tp equal parts. kv_heads < tp: each KV head is held by tp / kv_heads ranks.
struct HeadRanges {
  Range query, key_value;
};
HeadRanges heads_of_rank(const ModelSpec&, std::int64_t tp, std::int64_t tp_rank);

/// How an engine's ranks share a model: over so many tensor-parallel ones, of which so many groups have other experts
/// each (1: each rank has columns of every expert; tp: whole ones), and of its pipeline's stages this one. No layers
/// and both ends: all of the model. `attention`: so many groups of ranks that follow one another share, each by itself,
/// all of what is no MLP and no expert, and use it for sequences of its own.
struct EngineCut {
  std::int64_t tp = 1, experts = 1;
  StagePart stage = {};
  std::int64_t attention = 1;
  /// Ranks that share attention and the vocabulary.
  std::int64_t attention_tp() const { return tp / attention; }
  /// Ranks that share each expert, a part of its columns each.
  std::int64_t expert_columns() const { return tp / experts; }
  bool has_layer(std::int64_t layer) const { return stage.layers.empty() || stage.has_layer(layer); }
  friend bool operator<(const EngineCut& a, const EngineCut& b) {
    return std::tie(a.tp, a.experts, a.stage, a.attention) < std::tie(b.tp, b.experts, b.stage, b.attention);
  }
};

/// Whether `model` can be served with this cut: "" or the reason, ready for a diagnostic's note.
///   intermediate % tp == 0, and for the n ranks that share attention heads % n == 0, and kv_heads % n == 0 or
///   n % kv_heads == 0; latent attention has no KV heads. tp divides by the groups of experts, and so does their
///   number; of an expert columns divide by the ranks that share it.
std::string why_not_rollout_tp(const ModelSpec&, const EngineCut&);
inline std::string why_not_rollout_tp(const ModelSpec& model, std::int64_t tp) {
  return why_not_rollout_tp(model, EngineCut{.tp = tp});
}
/// The same where so many of the ranks share each expert, and so many attention (0: all), however these are spread.
std::string why_not_tensor_parallel(const ModelSpec&, std::int64_t tp, std::int64_t expert_columns,
                                    std::int64_t attention_tp = 0);

/// Buffers in order of use: embedding, layer 0, …, final_norm, lm_head. A tied head has no buffer of its own.
/// The vocabulary is cut into tp parts of ceil(vocab / tp) rows; rows past the vocabulary belong to no source. So are
/// learned positions.
/// A tied table is on the first stage and on the last one.
/// Throws InternalError where why_not_rollout_tp gives a reason.
std::vector<LocalWeight> rollout_weights(const ModelSpec&, const EngineCut&, std::int64_t tp_rank);
inline std::vector<LocalWeight> rollout_weights(const ModelSpec& model, std::int64_t tp, std::int64_t tp_rank) {
  return rollout_weights(model, EngineCut{.tp = tp}, tp_rank);
}

}  // namespace hotbunk

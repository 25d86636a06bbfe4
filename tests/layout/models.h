// The models of the layout tests, spelled out so that their expected values can be derived beside them.
#pragma once
#include "spec/family.h"
#include "spec/model.h"

namespace hotbunk::test {

/// Qwen2.5-7B as its config.json states it: 7,615,616,512 parameters.
inline ModelSpec qwen2_5_7b() {
  ModelSpec m;
  m.name = "qwen2.5-7b";
  m.family = find_family("qwen2");
  m.hidden = 3584, m.intermediate = 18944, m.layers = 28, m.heads = 28, m.kv_heads = 4, m.head_dim = 128;
  m.vocab = 152064;
  m.qkv_bias = true;
  return m;
}

/// A Llama with grouped-query attention whose every extent differs: 7 rows of vocabulary per 2 ranks leave a remainder.
inline ModelSpec tiny_llama() {
  ModelSpec m;
  m.name = "tiny-llama";
  m.family = find_family("llama");
  m.hidden = 24, m.intermediate = 40, m.layers = 2, m.heads = 8, m.kv_heads = 2, m.head_dim = 4, m.vocab = 37;
  return m;
}

/// The Qwen3 kind: norms of queries and keys, tied head.
inline ModelSpec tiny_qwen3() {
  ModelSpec m = tiny_llama();
  m.name = "tiny-qwen3";
  m.family = find_family("qwen3");
  m.qk_norm = true;
  m.tie_embeddings = true;
  return m;
}

/// 4 experts of inner width 10.
inline ModelSpec tiny_mixtral() {
  ModelSpec m = tiny_llama();
  m.name = "tiny-mixtral";
  m.family = find_family("mixtral");
  m.moe = MoeSpec{.experts = 4, .experts_per_token = 2, .expert_intermediate = 10};
  return m;
}

/// 15 positions: 8 and 7 over 2 ranks.
inline ModelSpec tiny_gpt2() {
  ModelSpec m = tiny_llama();
  m.name = "tiny-gpt2";
  m.family = find_family("gpt2");
  m.heads = m.kv_heads = 6;
  m.max_position = 15;
  m.gated_mlp = false;
  m.tie_embeddings = m.qkv_bias = m.o_bias = m.mlp_bias = m.learned_positions = m.layer_norm = true;
  return m;
}

}  // namespace hotbunk::test

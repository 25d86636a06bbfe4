#include "model/latent_attention.h"

#include <cmath>

namespace hotbunk {

ValueId latent_attention(Forward& f, const ModelSpec& model, ValueId normed) {
  using R = ParamRole;
  constexpr double eps = 1e-6;  // transformers: DeepseekV3RMSNorm's own, whatever rms_norm_eps says
  ValueId q = 0;
  if (model.mla->q_lora_rank > 0) {
    const ValueId compressed = f.adapted(model, "q_a_proj", normed, "q_a", Width::query_latent, R::q_a_proj);
    const ValueId latent =
        f.rms_norm("q_a_norm", compressed, std::nullopt, R::q_a_norm, "q_latent", "q_a.in", 0.0, eps).normed;
    q = f.adapted(model, "q_b_proj", latent, "q", Width::queries, R::q_b_proj);
  } else {
    q = f.adapted(model, "q_proj", normed, "q", Width::queries, R::q_proj);
  }
  q = f.rope("rope", q);
  const ValueId kv = f.adapted(model, "kv_a_proj", normed, "kv_a", Width::latent_and_key, R::kv_a_proj);
  const Forward::Latent kept = f.latent_norm("kv_a_norm", kv, R::kv_a_norm, eps);
  const double scale = model.rope_scaling ? model.rope_scaling->score_scale() : 1.0;
  return f.latent_attention(model, "attention", q, kept, "attended", R::kv_b_proj,
                            {.scale = scale != 1.0 ? scale / std::sqrt(static_cast<double>(model.head_dim)) : 0.0});
}

}  // namespace hotbunk

#include <nlohmann/json.hpp>

#include "base/json.h"
#include "spec/family.h"
#include "spec/model_config.h"

namespace hotbunk {
namespace {

using nlohmann::json;

std::string_view torch_name(DType t) {
  return t == DType::bf16 ? "bfloat16" : t == DType::f16 ? "float16" : t == DType::f64 ? "float64" : "float32";
}

}  // namespace

json config_of(const ModelSpec& m, DType dtype) {
  const FamilySpec& family = family_of(m);
  json c = json::object();
  family.write(m, c);
  c["architectures"] = {family.class_name};
  c["model_type"] = family.model_type;
  c["vocab_size"] = m.vocab;
  c["tie_word_embeddings"] = m.tie_embeddings;
  c["initializer_range"] = m.init_range;
  c["dtype"] = torch_name(dtype);
  c["bos_token_id"] = m.bos_token < 0 ? json(nullptr) : json(m.bos_token);
  c["eos_token_id"] = m.eos_token < 0 ? json(nullptr) : json(m.eos_token);
  return c;
}

std::string config_text(const ModelSpec& m, DType dtype) { return json_text(config_of(m, dtype), 2) + "\n"; }

}  // namespace hotbunk

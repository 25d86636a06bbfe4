// ModelSpec from config.json: sizes against published figures, names and shapes against real checkpoints, and the
// round trip through the writer.
#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "base/file.h"
#include "spec/catalog.h"
#include "spec/family.h"
#include "spec/model_config.h"
#include "spec/safetensors.h"
#include "tests/json.h"
#include "tests/paths.h"

namespace hotbunk {
namespace {

const std::filesystem::path golden = std::filesystem::path(source_folder) / "tests/golden";

ModelSpec catalogued(const std::string& name) {
  const auto file = catalog_file("models", name);
  REQUIRE_FALSE(file.empty());
  auto model = load_model(file);
  INFO((model ? "" : render(model.error())));
  REQUIRE(model);
  return *model;
}

}  // namespace

TEST_CASE("parameter counts of the catalogue equal the published ones") {
  struct Published {
    const char* name;
    std::int64_t parameters;  // of the safetensors on the Hugging Face hub ("total parameters" of the index or page)
  };
  // Exact counts: Qwen2.5-7B is BACKGROUND I's check; Llama-2-7B, Llama-3-8B and Mixtral are the well-known totals.
  const Published exact[] = {{"qwen2.5-7b", 7615616512},
                             {"llama-2-7b", 6738415616},
                             {"llama-2-13b", 13015864320},
                             {"llama-2-70b", 68976648192},
                             {"llama-3-8b", 8030261248},
                             {"llama-3.1-8b", 8030261248},
                             {"llama-3.1-70b", 70553706496},
                             {"llama-3.1-405b", 405853388800},
                             {"llama-3.2-1b", 1235814400},
                             {"llama-3.2-3b", 3212749824},
                             {"qwen2.5-0.5b", 494032768},
                             {"qwen2.5-1.5b", 1543714304},
                             {"qwen2.5-3b", 3085938688},
                             {"qwen2.5-math-1.5b", 1543714304},
                             {"qwen2.5-math-7b", 7615616512},
                             {"deepseek-r1-distill-qwen-1.5b", 1777088000},
                             {"deepseek-r1-distill-qwen-7b", 7615616512},
                             {"qwen2.5-14b", 14770033664},
                             {"qwen2.5-32b", 32763876352},
                             {"qwen2.5-72b", 72706203648},
                             {"qwen3-0.6b", 596049920},
                             {"qwen3-1.7b", 1720574976},
                             {"qwen3-4b", 4022468096},
                             {"qwen3-4b-2507", 4022468096},
                             {"qwen3-8b", 8190735360},
                             {"qwen3-14b", 14768307200},
                             {"qwen3-32b", 32762123264},
                             {"qwen3-30b-a3b", 30532122624},
                             {"qwen3-235b-a22b", 235093634560},
                             {"mixtral-8x7b", 46702792704},
                             {"mistral-7b", 7241732096},
                             // V h + L (2 h q d + 2 h k d + 3 h f + 2 h) + h + V h: 131072, 5120, 40, 32 x 128, 8 x
                             // 128, 14336.
                             {"mistral-nemo-12b", 12247782400},
                             {"phi-3-mini", 3821079552},
                             {"phi-3-medium", 13960238080},
                             {"phi-4", 14659507200},
                             {"phi-4-mini", 3836021760},
                             {"gemma-2-2b", 2614341888},
                             {"gemma-2-9b", 9241705984},
                             {"gemma-2-27b", 27227128320},
                             {"gpt2", 124439808},
                             {"gpt2-medium", 354823168},
                             {"gpt2-large", 774030080},
                             {"gpt2-xl", 1557611200},
                             // Brown et al. 2005.14165, table 2.1: 96 layers of 12288, 50257 tokens, 2048 positions: V
                             // h + 2048 h + L (12 h^2 + 13 h) + 2 h.
                             {"gpt3-175b", 174604259328}};
  for (const auto& p : exact) {
    INFO(p.name);
    CHECK(parameter_count(catalogued(p.name)) == p.parameters);
  }
  // DeepSeek-V3 report: 671B total, 37B activated; DeepSeek-V2: 236B, 21B; Qwen3-30B: 3.3B; Qwen3-235B: 22B active.
  CHECK(double(parameter_count(catalogued("deepseek-v3"))) == Approx(671e9).epsilon(0.002));
  CHECK(double(active_parameter_count(catalogued("deepseek-v3"))) == Approx(37.5e9).epsilon(0.02));
  CHECK(double(parameter_count(catalogued("deepseek-v2"))) == Approx(236e9).epsilon(0.002));
  CHECK(double(active_parameter_count(catalogued("deepseek-v2"))) == Approx(21.4e9).epsilon(0.02));
  // Model cards: Moonlight 15.96B, 2.24B activated without embedding and head; Kimi-K2 1.03T, 32.6B activated.
  CHECK(double(parameter_count(catalogued("moonlight-16b-a3b"))) == Approx(15.96e9).epsilon(0.001));
  CHECK(double(parameter_count(catalogued("kimi-k2"))) == Approx(1.026e12).epsilon(0.001));
  CHECK(double(active_parameter_count(catalogued("kimi-k2"))) == Approx(32.6e9).epsilon(0.02));
  // GLM-4.5 report (2508.06471), table 1: 355B, 32B activated; Air 106B, 12B. Totals count the layer that predicts a
  // second token (one of 92 and of 46 more), which is not here; what is activated, neither embedding nor head.
  for (const auto& [name, total, active] :
       {std::tuple{"glm-4.5", 355e9 * 92 / 93, 32e9}, {"glm-4.5-air", 106e9, 12e9}}) {
    const ModelSpec m = catalogued(name);
    CHECK(double(parameter_count(m)) == Approx(total).epsilon(0.01));
    CHECK(double(active_parameter_count(m) - 2 * m.vocab * m.hidden) == Approx(active).epsilon(0.02));
  }
  // gpt-oss model card, table 1: 116.83B and 20.91B, 5.13B and 3.61B active (head in, embedding out).
  for (const auto& [name, total, active] :
       {std::tuple{"gpt-oss-120b", 116.83e9, 5.13e9}, {"gpt-oss-20b", 20.91e9, 3.61e9}}) {
    const ModelSpec m = catalogued(name);
    CHECK(double(parameter_count(m)) == Approx(total).epsilon(3e-4));
    CHECK(double(active_parameter_count(m) - m.vocab * m.hidden) == Approx(active).epsilon(2e-3));
  }
  CHECK(double(active_parameter_count(catalogued("qwen3-30b-a3b"))) == Approx(3.35e9).epsilon(0.02));
  CHECK(double(active_parameter_count(catalogued("qwen3-235b-a22b"))) == Approx(22.2e9).epsilon(0.02));
  CHECK(double(active_parameter_count(catalogued("mixtral-8x7b"))) == Approx(12.9e9).epsilon(0.01));
}

TEST_CASE("the closed count equals the sum over the list of parameters, and names are unique") {
  for (const auto& name : catalog_names("models")) {
    INFO(name);
    const ModelSpec model = catalogued(name);
    std::int64_t sum = 0;
    std::set<std::string> names;
    for (const auto& p : parameters_of(model)) {
      sum += p.numel();
      CHECK(names.insert(p.name).second);
    }
    CHECK(sum == parameter_count(model));
  }
}

TEST_CASE("parameters and adapters of some layers are those of all, with the others left out") {
  for (const char* name : {"qwen2.5-7b", "mixtral-8x7b", "deepseek-v2"}) {
    INFO(name);
    ModelSpec model = catalogued(name);
    model.lora.rank = 8, model.lora.targets = "all-linear";
    const LayerFilter wanted = [](int layer) { return layer == 0 || layer == 5; };
    const auto names = [&](std::vector<ParamSpec> all, bool filters) {
      if (filters) std::erase_if(all, [&](const ParamSpec& p) { return p.layer >= 0 && !wanted(p.layer); });
      std::vector<std::string> out;
      for (const ParamSpec& p : all) out.push_back(p.name);
      return out;
    };
    CHECK(names(parameters_of(model, wanted), false) == names(parameters_of(model), true));
    CHECK(names(adapters_of(model, wanted), false) == names(adapters_of(model), true));
  }
}

TEST_CASE("a GPT-2 config in its own spelling gives the published 124,439,808 parameters") {
  const auto model = model_from_text(R"({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
    "vocab_size": 50257, "n_positions": 1024})",
                                     "config.json", "gpt2");
  REQUIRE(model);
  CHECK(parameter_count(*model) == 124439808);
}

TEST_CASE("GPT-2's matrices are read turned, and q, k and v out of one tensor, under either prefix") {
  // Hidden 4, 2 heads of 2: c_attn (4, 12) holds q in columns 0…3, k in 4…7, v in 8…11.
  const auto model = model_from_text(R"({"model_type": "gpt2", "n_embd": 4, "n_layer": 1, "n_head": 2, "n_inner": 3,
    "vocab_size": 5, "n_positions": 6})",
                                     "config.json", "m");
  REQUIRE(model);
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("hotbunk-gpt2-{}", ::getpid());
  for (const std::string prefix : {"transformer.", ""}) {
    INFO(prefix);
    std::vector<TensorEntry> entries;
    std::vector<std::vector<float>> numbers;  // element i of each tensor is i
    for (const ParamSpec& p : parameters_of(*model)) {
      const StoredParameter at = stored(*model, p);
      if (at.first > 0) continue;
      entries.push_back({prefix + at.tensor.substr(12), DType::f32, at.shape});
      std::int64_t n = 1;
      for (const std::int64_t extent : at.shape) n *= extent;
      numbers.emplace_back();
      for (std::int64_t i = 0; i < n; ++i) numbers.back().push_back(static_cast<float>(i));
    }
    auto writer = SafetensorsWriter::create(folder / "model.safetensors", entries);
    REQUIRE(writer);
    for (std::size_t i = 0; i < numbers.size(); ++i) REQUIRE(writer->write(i, 0, std::as_bytes(std::span(numbers[i]))));
    REQUIRE(writer->finish());
    const auto checkpoint = Checkpoint::open(folder);
    REQUIRE(checkpoint);
    CHECK(checkpoint->check_against(*model));
    std::map<std::string, std::vector<float>> read;
    for (const ParamSpec& p : parameters_of(*model)) {
      const auto values = checkpoint->load_parameter(*model, p);
      REQUIRE(values);
      read[p.name] = *values;
    }
    const auto& k = read.at("transformer.h.0.attn.c_attn.k.weight");
    CHECK(std::vector<float>(k.begin(), k.begin() + 5) == std::vector<float>{4, 16, 28, 40, 5});  // row 0, then row 1
    CHECK(read.at("transformer.h.0.attn.c_attn.v.bias") == std::vector<float>{8, 9, 10, 11});
    // c_fc (4, 3): its row 2 is column 2.
    const auto& up = read.at("transformer.h.0.mlp.c_fc.weight");
    CHECK(std::vector<float>(up.begin() + 8, up.end()) == std::vector<float>{2, 5, 8, 11});
    CHECK(read.at("transformer.wpe.weight").at(7) == 7);
  }
  std::filesystem::remove_all(folder);
}

TEST_CASE("a config survives the writer, for every catalogued model") {
  for (const auto& name : catalog_names("models")) {
    INFO(name);
    const ModelSpec model = catalogued(name);
    const std::string text = config_text(model, DType::bf16);
    const auto again = model_from_text(text, "config.json", model.name);
    INFO(text);
    REQUIRE(again);
    CHECK(*again == model);
  }
}

TEST_CASE("transformers 4 and 5 spell one model") {
  std::size_t both = 0;
  for (const auto& entry : std::filesystem::directory_iterator(golden)) {
    const std::string name = entry.path().filename();
    if (!std::filesystem::exists(entry.path() / "config.v4.json")) continue;
    ++both;
    INFO(name);
    auto v5 = read_file(golden / name / "config.json"), v4 = read_file(golden / name / "config.v4.json");
    REQUIRE(v5);
    REQUIRE(v4);
    const auto a = model_from_text(*v5, "v5", "m"), b = model_from_text(*v4, "v4", "m");
    REQUIRE(a);
    REQUIRE(b);
    CHECK(*a == *b);
  }
  CHECK(both >= 4);
  const auto scaled = load_model(golden / "llama3-rope");
  REQUIRE(scaled);
  REQUIRE(scaled->rope_scaling);
  CHECK(scaled->rope_scaling->factor == 8.0);
  CHECK(scaled->rope_scaling->original_max_position == 32);
  CHECK(scaled->rope_theta == 500.0);
}

TEST_CASE("names and shapes are those of checkpoints written by transformers") {
  std::size_t models = 0;
  for (const auto& entry : std::filesystem::directory_iterator(golden)) {
    const std::string name = entry.path().filename();
    if (!std::filesystem::exists(entry.path() / "config.json"))
      continue;  // adapters, and others' models trained otherwise
    ++models;
    INFO(name);
    const auto model = load_model(golden / name);
    REQUIRE(model);
    CHECK(model->weights_path == (golden / name).string());
    const auto checkpoint = Checkpoint::open(golden / name);
    REQUIRE(checkpoint);
    std::set<std::string> tensors;  // of which GPT-2 packs q, k and v into one
    for (const ParamSpec& p : parameters_of(*model)) tensors.insert(stored(*model, p).tensor);
    CHECK(tensors.size() == checkpoint->tensors().size());
    const auto status = checkpoint->check_against(*model);
    INFO((status ? "" : render(status.error())));
    CHECK(status);
  }
  CHECK(models > 16);
}

namespace {

/// The golden's config with other keys; a null one is absent.
ModelSpec changed(const char* name, const nlohmann::json& keys) {
  auto text = read_file(golden / name / "config.json");
  REQUIRE(text);
  auto config = json_from<nlohmann::json>(*text);
  for (const auto& [key, value] : keys.items()) {
    if (value == "absent") config.erase(key);
    else config[key] = value;
  }
  const auto model = model_from_json(config, "m", [](std::string_view) { return SourceLocation{}; });
  INFO((model ? "" : render(model.error())));
  REQUIRE(model);
  const auto again =
      model_from_json(config_of(*model, DType::f32), "m", [](std::string_view) { return SourceLocation{}; });
  REQUIRE(again);
  CHECK(*again == *model);
  return *model;
}

std::vector<std::int64_t> windows(const ModelSpec& m) {
  std::vector<std::int64_t> out;
  for (int layer = 0; layer < m.layers; ++layer) out.push_back(m.window_of(layer));
  return out;
}

}  // namespace

TEST_CASE("yarn: the defaults of transformers") {
  const ModelSpec plain = changed("llama-yarn-bias", {});
  CHECK(plain.o_bias);
  REQUIRE(plain.rope_scaling);
  CHECK(plain.rope_scaling->beta_fast == 4.0);
  CHECK(plain.rope_scaling->attention_factor == Approx(0.1 * std::log(4.0) + 1.0));
  const auto scaling = [](nlohmann::json rope) {
    rope["rope_type"] = "yarn";
    return *changed("llama-yarn-bias", {{"rope_parameters", rope}}).rope_scaling;
  };
  const RopeScaling bare = scaling({{"original_max_position_embeddings", 32}});
  CHECK(bare.factor == 4.0);  // 128 positions of 32
  CHECK(bare.beta_fast == 32.0);
  CHECK(bare.beta_slow == 1.0);
  CHECK(bare.truncate);
  CHECK(scaling({{"factor", 8.0}}).original_max_position == 128);
  CHECK(scaling({{"factor", 8.0}, {"attention_factor", 1.5}}).attention_factor == 1.5);
  CHECK(scaling({{"factor", 8.0}, {"mscale", 0.7}, {"mscale_all_dim", 0.7}}).attention_factor == 1.0);
  CHECK_FALSE(scaling({{"factor", 8.0}, {"truncate", false}}).truncate);
}

TEST_CASE("windows: of all layers, of those that layer_types names, by the family's rule, of none") {
  using Windows = std::vector<std::int64_t>;
  CHECK(windows(changed("mistral-window", {})) == Windows{9, 9});
  CHECK(windows(changed("mistral-window", {{"sliding_window", nullptr}})) == Windows{0, 0});
  CHECK(windows(changed("mistral-window", {{"sliding_window", 128}})) ==
        Windows{0, 0});  // as long as a sequence may be
  CHECK(changed("mistral-window", {{"sliding_window", "absent"}}).sliding_window == 4096);
  CHECK(windows(changed("gemma2-tiny", {})) == Windows{8, 0, 8});
  CHECK(windows(changed("gemma2-tiny", {{"layer_types", "absent"}})) == Windows{8, 0, 8});
  CHECK(windows(changed("gemma2-tiny", {{"layer_types", {"full_attention", "full_attention", "sliding_attention"}}})) ==
        Windows{0, 0, 8});
  const auto qwen = [](nlohmann::json more) {
    more.update({{"sliding_window", 5}, {"layer_types", "absent"}});
    return windows(changed("qwen2-bias", more));
  };
  CHECK(qwen({}) == Windows{0, 0, 0});
  CHECK(qwen({{"use_sliding_window", true}}) == Windows{0, 0, 0});  // max_window_layers is 28
  CHECK(qwen({{"use_sliding_window", true}, {"max_window_layers", 1}}) == Windows{0, 5, 5});
  CHECK(windows(changed("llama-gqa", {{"sliding_window", 5}})) == Windows{0, 0});  // a key that Llama has not
}

// Not so: key-value heads are as many as query heads where transformers has a number (4 to 32), and DeepSeek is dense
// and projects queries at once where it has experts and a rank of 1536. Configs of models say these.
TEST_CASE("positions, rotation and norms that a config leaves out are as transformers has them for its family") {
  const auto read = [](const char* type, std::int64_t layers = 6) {
    const auto model = model_from_json({{"model_type", type},
                                        {"hidden_size", 64},
                                        {"intermediate_size", 96},
                                        {"num_hidden_layers", layers},
                                        {"num_attention_heads", 16},
                                        {"vocab_size", 100}},
                                       "m", [](std::string_view) { return SourceLocation{}; });
    if (!model) FAIL(render(model.error()));
    return *model;
  };
  using Numbers = std::vector<std::int64_t>;
  const auto sizes = [](const ModelSpec& m) { return Numbers{m.kv_heads, m.head_dim, m.max_position}; };
  CHECK(sizes(read("llama")) == Numbers{16, 4, 2048});
  CHECK(sizes(read("mistral")) == Numbers{16, 4, 131072});
  CHECK(sizes(read("mixtral")) == Numbers{16, 4, 131072});
  CHECK(sizes(read("qwen2")) == Numbers{16, 4, 32768});
  CHECK(sizes(read("qwen3")) == Numbers{16, 128, 32768});
  CHECK(sizes(read("qwen3_moe")) == Numbers{16, 128, 32768});
  CHECK(sizes(read("gemma2")) == Numbers{16, 256, 8192});
  CHECK(sizes(read("gemma3_text")) == Numbers{16, 256, 131072});
  CHECK(sizes(read("glm4_moe")) == Numbers{16, 4, 131072});
  CHECK(sizes(read("gpt_oss")) == Numbers{8, 64, 131072});
  CHECK(sizes(read("phi3")) == Numbers{16, 4, 4096});
  CHECK((read("phi3").rotary_dim == 0 && read("phi3").sliding_window == 0));
  CHECK(sizes(read("qwen3_5_text")) == Numbers{16, 256, 32768});
  CHECK(sizes(read("deepseek_v2")) == Numbers{16, 192, 2048});
  CHECK(sizes(read("deepseek_v3")) == Numbers{16, 192, 4096});
  CHECK(windows(read("gemma3_text")) == Numbers{4096, 4096, 4096, 4096, 4096, 0});
  CHECK(windows(read("gpt_oss", 2)) == Numbers{128, 0});
  CHECK(windows(read("mixtral", 1)) == Numbers{0});
  CHECK((read("qwen2").qkv_bias && !read("qwen2").o_bias && read("gpt_oss").o_bias && !read("llama").qkv_bias));
  const auto experts = [](const ModelSpec& m) {
    return Numbers{m.moe->experts, m.moe->experts_per_token, m.moe->expert_intermediate, m.moe->shared_experts,
                   m.moe->first_dense_layers};
  };
  CHECK(experts(read("mixtral")) == Numbers{8, 2, 96, 0, 0});
  CHECK(experts(read("qwen3_moe")) == Numbers{128, 8, 768, 0, 0});
  CHECK(experts(read("glm4_moe")) == Numbers{128, 8, 1408, 1, 1});
  CHECK(experts(read("gpt_oss")) == Numbers{128, 4, 96, 0, 0});
  CHECK(!read("deepseek_v3").moe);
  const auto thetas = [](const ModelSpec& m) { return std::vector{m.rope_theta, m.window_rope_theta, m.norm_eps}; };
  CHECK(thetas(read("llama")) == std::vector{1e4, 0.0, 1e-6});
  CHECK(thetas(read("mixtral")) == std::vector{1e6, 0.0, 1e-5});
  CHECK(thetas(read("gemma3_text")) == std::vector{1e6, 1e4, 1e-6});
  CHECK(thetas(read("gpt_oss")) == std::vector{1.5e5, 0.0, 1e-5});
  const RopeScaling yarn = read("gpt_oss").rope_scaling.value();
  CHECK((yarn.type == "yarn" && yarn.factor == 32.0 && yarn.original_max_position == 4096 && !yarn.truncate));
  CHECK(yarn.attention_factor == Approx(0.1 * std::log(32.0) + 1.0));
  CHECK(Numbers{read("glm4_moe").rotary_dim, read("qwen3_5_text").rotary_dim} == Numbers{2, 64});
  CHECK(std::vector{read("gemma2").attention_softcap, read("gemma2").logit_softcap} == std::vector{50.0, 30.0});
  CHECK(read("gemma3_text").logit_softcap == 0.0);
}

TEST_CASE("Gemma-2: what its config says and what it does not") {
  const ModelSpec m = changed("gemma2-tiny", {});
  CHECK(m.family == find_family("gemma2"));
  CHECK((m.geglu && m.output_norms && m.scaled_embedding && m.tie_embeddings));
  CHECK(m.norm_offset == 1.0);
  CHECK(m.query_scalar == 6.0);
  CHECK(m.attention_softcap == 4.0);
  CHECK(m.logit_softcap == 6.0);
  const ModelSpec uncapped =
      changed("gemma2-tiny", {{"attn_logit_softcapping", nullptr}, {"final_logit_softcapping", nullptr}});
  CHECK(uncapped.attention_softcap == 0.0);
  CHECK(uncapped.logit_softcap == 0.0);
  const ModelSpec usual =
      changed("gemma2-tiny", {{"attn_logit_softcapping", "absent"}, {"query_pre_attn_scalar", "absent"}});
  CHECK(usual.attention_softcap == 50.0);
  CHECK(usual.query_scalar == 256.0);
}

TEST_CASE("eos_token_id may be a list; the first counts") {
  auto text = read_file(golden / "llama-gqa/config.json");
  REQUIRE(text);
  auto config = json_from<nlohmann::json>(*text);
  config["eos_token_id"] = {5, 9};
  const auto model = model_from_json(config, "m", [](std::string_view) { return SourceLocation{}; });
  REQUIRE(model);
  CHECK(model->eos_token == 5);
}

TEST_CASE("a DeepSeek or GLM of dense layers alone says so to transformers, whose default is another") {
  for (const char* name : {"deepseek-v2-tiny", "deepseek-v3-tiny", "glm4-moe-tiny"}) {
    const ModelSpec dense = changed(name, {{"first_k_dense_replace", 64}});
    CHECK(!dense.moe);
    CHECK(config_of(dense, DType::f32)["first_k_dense_replace"] == dense.layers);
  }
}

TEST_CASE("GLM-4.5's heads turn in part, and queries and keys are normed where the config says so") {
  const ModelSpec tiny = changed("glm4-moe-tiny", {});
  CHECK(tiny.rotary_dim == 6);  // half of 12
  CHECK((tiny.qk_norm && tiny.qkv_bias && !tiny.o_bias));
  CHECK(!changed("glm4-moe-tiny", {{"use_qk_norm", false}}).qk_norm);
  CHECK(!changed("glm4-moe-tiny", {{"attention_bias", false}}).qkv_bias);
  // What rope_parameters say stands above the config's own; all of a head is no part.
  CHECK(changed("glm4-moe-tiny", {{"partial_rotary_factor", 1.0}}).rotary_dim == 6);
  const auto rope = nlohmann::json{{"rope_type", "default"}, {"rope_theta", 100.0}};
  CHECK(changed("glm4-moe-tiny", {{"rope_parameters", rope}, {"partial_rotary_factor", 1.0}}).rotary_dim == 0);
  CHECK(changed("glm4-moe-tiny", {{"rope_parameters", rope}}).rotary_dim == 6);  // transformers' default
  CHECK(catalogued("glm-4.5").rotary_dim == 64);
}

TEST_CASE("gpt-oss's experts are read out of one tensor, gates from even columns") {
  // 2 experts of H 3 and I 2: gate_up_proj (2, 3, 4), down_proj (2, 2, 3).
  const auto model = model_from_text(R"({"model_type": "gpt_oss", "hidden_size": 3, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 2, "num_local_experts": 2,
    "num_experts_per_tok": 1, "vocab_size": 5, "sliding_window": 4})",
                                     "config.json", "m");
  REQUIRE(model);
  CHECK((model->attention_sinks && model->o_bias && model->rope_scaling->type == "yarn" &&
         !model->rope_scaling->truncate && model->rope_theta == 150000.0));
  CHECK((model->moe->swiglu_limit == 7.0 && model->moe->swiglu_alpha == 1.702));
  CHECK(model->window_of(0) == 4);
  std::map<std::string, std::vector<std::int64_t>> where;  // elements of each parameter in its tensor
  for (const ParamSpec& p : parameters_of(*model)) {
    if (p.expert != 1) continue;
    const StoredParameter at = stored(*model, p);
    for (std::int64_t i = 0; i < p.numel(); ++i) where[p.name].push_back(at.element(i));
  }
  const std::string expert = "model.layers.0.mlp.experts.1.";
  CHECK(where[expert + "gate_proj.weight"] == std::vector<std::int64_t>{12, 16, 20, 14, 18, 22});
  CHECK(where[expert + "up_proj.weight"] == std::vector<std::int64_t>{13, 17, 21, 15, 19, 23});
  CHECK(where[expert + "down_proj.weight"] == std::vector<std::int64_t>{6, 9, 7, 10, 8, 11});
  CHECK(where[expert + "gate_proj.bias"] == std::vector<std::int64_t>{4, 6});
  CHECK(where[expert + "up_proj.bias"] == std::vector<std::int64_t>{5, 7});
  CHECK(where[expert + "down_proj.bias"] == std::vector<std::int64_t>{3, 4, 5});
}

}  // namespace hotbunk

// Decoding and prefill by llama.cpp of the model that bench/decode_step.cc runs, with random weights, in its own best
// way: the library's threads, its packed weights, one call per step for all sequences. Not part of the build:
// scripts/bench compiles it against a snapshot that the user names.
//   llama_step MODEL.gguf [--dtype fp32|bf16] [--cache fp16|fp32] [--threads 2] [--batch 1] [--flash 0|1] [--prefill
//   0|1]
// MODEL.gguf is written where it is not there. Speaks the turns of bench/rounds.h: 16 decode steps each, or with
// --prefill the prompts of one batch.
#include <gguf.h>
#include <llama.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <span>

#include "bench/rounds.h"

namespace hotbunk::bench {
namespace {

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "llama_step: %s\n", what.c_str());
  std::exit(1);
}

/// Matrices as `type`, vectors as fp32; normal with deviation 0.02 and ones.
void write_model(const std::string& path, ggml_type type) {
  const ModelSpec m = llama_46m();
  gguf_context* file = gguf_init_empty();
  const auto number = [&](const char* key, std::int64_t value) {
    gguf_set_val_u32(file, fmt::format("llama.{}", key).c_str(), static_cast<std::uint32_t>(value));
  };
  gguf_set_val_str(file, "general.architecture", "llama");
  gguf_set_val_str(file, "tokenizer.ggml.model", "no_vocab");
  number("vocab_size", m.vocab);
  number("context_length", m.max_position);
  number("embedding_length", m.hidden);
  number("feed_forward_length", m.intermediate);
  number("block_count", m.layers);
  number("attention.head_count", m.heads);
  number("attention.head_count_kv", m.kv_heads);
  number("rope.dimension_count", m.head_dim);
  gguf_set_val_f32(file, "llama.attention.layer_norm_rms_epsilon", static_cast<float>(m.norm_eps));
  ggml_context* memory = ggml_init({std::size_t{512} << 20, nullptr, false});
  std::mt19937 draw(0);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<float> values;
  const auto matrix = [&](const std::string& name, std::int64_t in, std::int64_t out) {
    ggml_tensor* t = ggml_new_tensor_2d(memory, type, in, out);
    values.resize(static_cast<std::size_t>(in * out));
    for (float& v : values) v = normal(draw);
    if (type == GGML_TYPE_BF16) ggml_fp32_to_bf16_row(values.data(), static_cast<ggml_bf16_t*>(t->data), in * out);
    else std::copy(values.begin(), values.end(), static_cast<float*>(t->data));
    ggml_set_name(t, name.c_str());
    gguf_add_tensor(file, t);
  };
  const auto ones = [&](const std::string& name) {
    ggml_tensor* t = ggml_new_tensor_1d(memory, GGML_TYPE_F32, m.hidden);
    std::fill_n(static_cast<float*>(t->data), m.hidden, 1.0f);
    ggml_set_name(t, name.c_str());
    gguf_add_tensor(file, t);
  };
  const std::int64_t heads = m.heads * m.head_dim, kv_heads = m.kv_heads * m.head_dim;
  matrix("token_embd.weight", m.hidden, m.vocab);
  for (std::int64_t i = 0; i < m.layers; ++i) {
    const auto name = [&](const char* part) { return fmt::format("blk.{}.{}.weight", i, part); };
    ones(name("attn_norm")), ones(name("ffn_norm"));
    matrix(name("attn_q"), m.hidden, heads);
    matrix(name("attn_k"), m.hidden, kv_heads), matrix(name("attn_v"), m.hidden, kv_heads);
    matrix(name("attn_output"), heads, m.hidden);
    matrix(name("ffn_gate"), m.hidden, m.intermediate), matrix(name("ffn_up"), m.hidden, m.intermediate);
    matrix(name("ffn_down"), m.intermediate, m.hidden);
  }
  ones("output_norm.weight");
  matrix("output.weight", m.hidden, m.vocab);
  const std::string part = path + ".part";  // a file that stands is whole
  if (!gguf_write_to_file(file, part.c_str(), false)) fail("cannot write " + part);
  std::filesystem::rename(part, path);
  gguf_free(file), ggml_free(memory);
}

struct Settings {
  std::string path;
  ggml_type type, cache;
  int threads, batch;
  bool flash, prefill;
};

/// One call of the library: `tokens` of each sequence, from position `from` on, logits of the last of each.
void step(llama_context* context, llama_batch& b, std::span<const std::vector<llama_token>> tokens, int from) {
  b.n_tokens = 0;
  for (std::size_t s = 0; s < tokens.size(); ++s)
    for (std::size_t i = 0; i < tokens[s].size(); ++i) {
      const int at = b.n_tokens++;
      b.token[at] = tokens[s][i];
      b.pos[at] = from + static_cast<int>(i);
      b.n_seq_id[at] = 1;
      b.seq_id[at][0] = static_cast<llama_seq_id>(s);
      b.logits[at] = i + 1 == tokens[s].size();
    }
  if (llama_decode(context, b) != 0) fail("llama_decode failed");
}

void run(const Settings& o) {
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
      },
      nullptr);
  llama_backend_init();
  if (!std::filesystem::exists(o.path)) write_model(o.path, o.type);
  llama_model_params model_params = llama_model_default_params();
  llama_model* model = llama_model_load_from_file(o.path.c_str(), model_params);
  if (model == nullptr) fail("cannot load " + o.path);
  const int prompt = o.prefill ? prefill_tokens : prompt_tokens;
  llama_context_params c = llama_context_default_params();
  c.n_seq_max = static_cast<std::uint32_t>(o.batch);
  c.n_ctx = static_cast<std::uint32_t>(o.batch * (o.prefill ? prompt : prompt + new_tokens));
  c.n_batch = static_cast<std::uint32_t>(std::max(512, o.batch * prompt));
  c.n_threads = c.n_threads_batch = o.threads;
  c.type_k = c.type_v = o.cache;
  c.flash_attn_type = o.flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  llama_context* context = llama_init_from_model(model, c);
  if (context == nullptr) fail("no context");
  llama_batch batch = llama_batch_init(static_cast<int>(c.n_batch), 0, 1);
  std::vector<std::vector<llama_token>> prompts, next(static_cast<std::size_t>(o.batch));
  for (int s = 0; s < o.batch; ++s) prompts.push_back(random_tokens(prompt, static_cast<std::uint32_t>(s)));
  Rounds rounds;
  if (o.prefill) {
    for (bool first = true;; first = false) {
      llama_memory_clear(llama_get_memory(context), true);
      step(context, batch, prompts, 0);
      if (first) rounds.ready();
      else rounds.done(std::int64_t{o.batch} * prompt);
    }
  }
  step(context, batch, prompts, 0);
  for (int done = 0; done < new_tokens - 1; ++done) {
    if (done > 0 && done % steps_per_round == 0) {
      if (done == steps_per_round) rounds.ready();
      else rounds.done(std::int64_t{o.batch} * steps_per_round);
    }
    const std::int64_t vocab = llama_46m().vocab;
    for (int s = 0; s < o.batch; ++s) {
      const float* logits = llama_get_logits_ith(context, -o.batch + s);
      next[static_cast<std::size_t>(s)] = {static_cast<llama_token>(std::max_element(logits, logits + vocab) - logits)};
    }
    step(context, batch, next, prompt + done);
  }
  rounds.done(std::int64_t{o.batch} * steps_per_round);
}

}  // namespace
}  // namespace hotbunk::bench

int main(int argc, char** argv) {
  using namespace hotbunk::bench;
  if (argc < 2) fail("which model?");
  const auto given = [&](const char* name, const char* fallback) { return option(argc - 1, argv + 1, name, fallback); };
  run({argv[1], given("--dtype", "fp32") == "bf16" ? GGML_TYPE_BF16 : GGML_TYPE_F32,
       given("--cache", "fp16") == "fp32" ? GGML_TYPE_F32 : GGML_TYPE_F16, std::stoi(given("--threads", "2")),
       std::stoi(given("--batch", "1")), given("--flash", "1") == "1", given("--prefill", "0") == "1"});
}

// generate: continues prompts with the rollout engine (prefill, paged decode, continuous batching).
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "cli/inference.h"
#include "rl/inference_driver.h"
#include "rl/sft_data.h"
#include "spec/validate.h"

namespace hotbunk {
namespace {

using Json = nlohmann::ordered_json;

struct GenerateArguments {
  InferenceOptions inference;
  GenerateOptions generate;
};

std::vector<std::int32_t> new_tokens(const TokenSequence& s) {
  return {s.tokens.begin() + s.prompt_tokens, s.tokens.end()};
}

/// `logprobs` are those of the distribution at the temperature; greedy choices report temperature 1.
Json document(const GenerateArguments& o, const std::vector<TokenSequence>& sequences) {
  Json rows = Json::array();
  for (const TokenSequence& s : sequences)
    rows.push_back(
        {{"prompt_tokens", s.prompt_tokens}, {"tokens", new_tokens(s)}, {"logprobs", as_written(s.rollout_logps)}});
  return {{"schema", "hotbunk.generate/1"},        {"model", o.inference.model}, {"dtype", o.inference.dtype},
          {"temperature", o.generate.temperature}, {"seed", o.generate.seed},    {"sequences", rows}};
}

Diagnostic no_room(const GenerateArguments& o, const ModelSpec& model) {
  return {.code = "E124",
          .message = fmt::format("--max-new-tokens {} leaves no position for a prompt", o.generate.max_new_tokens),
          .where = {},
          .notes = {fmt::format("the model's max_position_embeddings is {}", model.max_position)},
          .help = fmt::format("give at most {}", model.max_position - 1)};
}

/// Between 0 and the least temperature there is none.
ValueRule greedy_or_warm() {
  const auto fault = [](const std::string& text) -> std::string {
    const double value = std::strtod(text.c_str(), nullptr);
    return value == 0.0 || value >= least_temperature
               ? std::string()
               : fmt::format("{} is not 0 or at least {}", text, least_temperature);
  };
  return {"", fault};
}

int run(GenerateArguments o) {
  const auto model = open_model(o.inference.model);
  if (!model) return report_errors(model.error());
  const std::int64_t room = model->max_position - o.generate.max_new_tokens;
  if (room < 1) return report_errors({no_room(o, *model)});
  auto prompts = read_token_lines(o.inference.tokens, {model->vocab, room, "max_position_embeddings - max-new-tokens"});
  if (!prompts) return report_errors(prompts.error());
  o.generate.dtype = dtype_of(o.inference);
  const Scenario scenario = generate_scenario(*model, *prompts, o.generate);
  int code = exit_done;
  const auto generated = run_inference(scenario, Purpose::generate, std::move(*prompts), o.inference, code);
  if (!generated) return code;
  if (auto s = check_finite(*generated, o.inference); !s) return report_errors(s.error());
  if (o.inference.json) {
    print_document(json_text(document(o, *generated)));
    return exit_done;
  }
  for (const TokenSequence& s : *generated) fmt::print("{}\n", json_text(Json(new_tokens(s))));
  return exit_done;
}

}  // namespace

void add_generate(CommandLine& line) {
  auto o = std::make_shared<GenerateArguments>();
  const Command sub = line.add_command(
      "generate",
      "continue prompts: a JSON array of new token ids per line; ends at the model's end-of-sequence token");
  add_inference_options(sub, o->inference);
  sub.option("--max-new-tokens", o->generate.max_new_tokens, "most tokens generated per prompt (default 16)")
      .check(whole_in(1, std::int64_t{1} << 30));
  sub.option("--temperature", o->generate.temperature, "0 takes the most probable token (default 1)")
      .check(finite_in(0.0, 1e6))
      .check(greedy_or_warm());
  sub.option("--seed", o->generate.seed, "of the sampling (default 0)");
  sub.action([o] { return run(*o); });
}

}  // namespace hotbunk

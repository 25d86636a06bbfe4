// logprobs: the log-prob of every token of given sequences but the first, by the training engine's forward pass.
#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/json.h"
#include "cli/inference.h"
#include "rl/inference_driver.h"
#include "rl/sft_data.h"

namespace hotbunk {
namespace {

using Json = nlohmann::ordered_json;

Json document(const InferenceOptions& o, const std::vector<TokenSequence>& sequences) {
  Json rows = Json::array();
  for (const TokenSequence& s : sequences)
    rows.push_back({{"tokens", s.tokens.size()},
                    {"sum", std::accumulate(s.rollout_logps.begin(), s.rollout_logps.end(), 0.0)},
                    {"logprobs", as_written(s.rollout_logps)}});
  return {{"schema", "hotbunk.logprobs/1"}, {"model", o.model}, {"dtype", o.dtype}, {"sequences", rows}};
}

int run(const InferenceOptions& o) {
  const auto model = open_model(o.model);
  if (!model) return report_errors(model.error());
  auto sequences =
      read_token_lines(o.tokens, {model->vocab, model->max_position, "the model's max_position_embeddings"});
  if (!sequences) return report_errors(sequences.error());
  for (TokenSequence& s : *sequences) s.prompt_tokens = 1;  // nothing predicts the first token
  const Scenario scenario = score_scenario(*model, *sequences, dtype_of(o));
  int code = exit_done;
  const auto scored = run_inference(scenario, Purpose::score, std::move(*sequences), o, code);
  if (!scored) return code;
  if (auto s = check_finite(*scored, o); !s) return report_errors(s.error());
  if (o.json) {
    print_document(json_text(document(o, *scored)));
    return exit_done;
  }
  for (const TokenSequence& s : *scored) fmt::print("[{}]\n", fmt::join(s.rollout_logps, ","));  // fp32, shortest
  return exit_done;
}

}  // namespace

void add_logprobs(CommandLine& line) {
  auto o = std::make_shared<InferenceOptions>();
  const Command sub = line.add_command(
      "logprobs",
      "log-probs of token sequences: a JSON array per line, of n - 1 values for n tokens (the first token has none)");
  add_inference_options(sub, *o);
  sub.action([o] { return run(*o); });
}

}  // namespace hotbunk

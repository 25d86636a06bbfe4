// What `logprobs` and `generate` share: a model folder opened, one iteration run on CPU ranks, log-probs as numbers.
#pragma once
#include <string>
#include <vector>

#include "cli/command.h"
#include "lowering/lower.h"
#include "rl/passes.h"

namespace hotbunk {

struct InferenceOptions {
  std::string model, tokens, dtype = "fp32";
  std::int64_t threads = 0;
  bool json = false;
};
void add_inference_options(const Command&, InferenceOptions&);
DType dtype_of(const InferenceOptions&);

/// A folder with config.json and safetensors. Errors E10x, E40x, E41x.
Result<ModelSpec> open_model(const std::string& folder);

/// Lowers for the purpose and executes it in this process; the sequences as the driver leaves them. On failure the
/// errors are printed, and `code` holds the exit code.
std::optional<std::vector<TokenSequence>> run_inference(const Scenario&, Purpose, std::vector<TokenSequence>,
                                                        const InferenceOptions&, int& code);

/// E620 with the first sequence and token whose log-prob is NaN or infinite: no answer, and no JSON either.
Status check_finite(const std::vector<TokenSequence>&, const InferenceOptions&);

/// Each fp32 value as the double nearest to its shortest decimal text, so that JSON does not show digits it never had.
std::vector<double> as_written(const std::vector<float>&);

}  // namespace hotbunk

// What stands in a model's folder beside its weights and its config, and says how text becomes tokens and how the model
// is asked: a checkpoint carries it along as it is, so that from_pretrained, and whoever serves the model, finds it.
#pragma once
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/diagnostic.h"

namespace hotbunk {

/// Whether a file of that name is carried along: tokenizer*.json, tokenizer.model and the like, vocab.json, vocab.txt,
/// merges.txt, added_tokens.json, special_tokens_map.json, generation_config.json, chat_template.json or .jinja.
bool is_carried(std::string_view name);

struct CarriedFile {
  std::string name, bytes;
};
/// Those in a model's folder, or beside a file of weights, by name; "": none, the model was drawn at random. Read at
/// once: the folder may be gone when a run ends. E101, E102.
Result<std::vector<CarriedFile>> read_carried(const std::filesystem::path& weights);

}  // namespace hotbunk

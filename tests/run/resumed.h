// What a run in parts is held to: the run in one piece, and checkpoints that are whole.
#pragma once
#include <catch2/catch.hpp>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "rl/manifest.h"
#include "tests/json.h"
#include "tests/run/program.h"

namespace hotbunk {

/// What was computed in each step: times and bytes of memory left out.
inline std::map<std::int64_t, nlohmann::json> computed(const fs::path& folder) {
  std::map<std::int64_t, nlohmann::json> out;
  std::istringstream lines(text_of(folder / "metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json step = json_from<nlohmann::json>(line);
    nlohmann::json& kept = out[step["step"].get<std::int64_t>()];
    for (const auto& [key, value] : step.items())
      for (const char* name : {"loss", "reward", "actor/", "critic/", "rollout/logprob", "sync/"})
        if (key.starts_with(name)) kept[key] = value;
  }
  return out;
}

inline void check_weights(const fs::path& a, const fs::path& b) {
  for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
    INFO(file << " of " << b);
    CHECK(fs::exists(a / "checkpoints/final" / file));
    CHECK(text_of(a / "checkpoints/final" / file) == text_of(b / "checkpoints/final" / file));
  }
}

inline void check_same(const fs::path& a, const fs::path& b) {
  check_weights(a, b);
  for (const char* file : {"lengths.jsonl", "sync_hashes.jsonl"}) {
    INFO(file << " of " << b);
    CHECK(fs::exists(a / file) == fs::exists(b / file));
    CHECK(text_of(a / file) == text_of(b / file));
  }
  CHECK(computed(a) == computed(b));
  const nlohmann::json x = json_from<nlohmann::json>(text_of(a / "checkpoints/final/state.json")),
                       y = json_from<nlohmann::json>(text_of(b / "checkpoints/final/state.json"));
  CHECK(x == y);
}

/// Every folder among the checkpoints that does not hide is whole.
inline void check_whole(const fs::path& run) {
  std::error_code ec;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints", ec)) {
    if (entry.path().filename().string().starts_with(".")) continue;
    INFO(entry.path());
    CHECK(fs::exists(entry.path() / "manifest.json"));
    const Status whole = verify_manifest(entry.path());
    INFO((whole ? "" : render(whole.error())));
    CHECK(whole.has_value());
    CHECK(fs::exists(entry.path() / "optimizer.safetensors"));
  }
}

inline bool has_checkpoint(const fs::path& run) {
  std::error_code ec;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints", ec))
    if (!entry.path().filename().string().starts_with(".")) return true;
  return false;
}

inline std::string sets(const std::string& keys) {
  std::string out;
  std::istringstream split(keys);
  for (std::string key; split >> key;) out += " --set " + key;
  return out;
}

}  // namespace hotbunk

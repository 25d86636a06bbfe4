// What reads a config.json: one key at a time, with every mistake where it stands. Families read their keys by it
// (spec/family.h), model_config.cc those of all families.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/diagnostic.h"
#include "spec/model_config.h"

namespace hotbunk {

class ConfigReader {
 public:
  // Far above any published model, far below what overflows 64-bit byte counts.
  static constexpr std::int64_t max_width = std::int64_t{1} << 22, max_layers = 1 << 14, max_heads = 1 << 14,
                                max_vocab = std::int64_t{1} << 28, max_experts = 1 << 16,
                                max_tokens = std::int64_t{1} << 32;
  // Outside of these, angles or norms are infinite or no numbers at all.
  static constexpr double least_eps = 1e-12, least_theta = 1e-6, most_theta = 1e12, most_factor = 1e6;

  /// Both must outlive it.
  ConfigReader(const nlohmann::json& config, const KeyLocator& locate) : json_(config), locate_(locate) {}

  /// nullptr when the key is absent or null, which Hugging Face configs use alike.
  const nlohmann::json* find(std::string_view key) const;
  /// Whether the key is there, if only to say null.
  bool names(std::string_view key) const;

  /// What the key says, in [low, high]; else E410 (missing, with no fallback) or E411.
  std::int64_t integer(std::string_view key, std::optional<std::int64_t> fallback, std::int64_t low, std::int64_t high);
  double real(std::string_view key, double fallback, double low, double high);
  /// The same of a value that stands deeper.
  double checked_real(const nlohmann::json& value, std::string_view key, double fallback, double low, double high);
  bool boolean(std::string_view key, bool fallback);
  std::string text(std::string_view key, const std::string& fallback);
  /// An id, or the first of a list of ids (Llama 3.1 lists several ends of text); -1 when there is none. All of them
  /// lie in the vocabulary.
  std::int64_t token(std::string_view key, std::int64_t vocab);
  /// "layer_types": for each of the layers whether it is of type `one`, and not `other`. E411; nothing when the key is
  /// absent.
  std::optional<std::vector<bool>> layer_types(std::int64_t layers, std::string_view one, std::string_view other);

  void report(const char* code, std::string_view key, std::string message, std::vector<std::string> notes = {},
              std::string help = {});
  bool ok() const { return problems_.empty(); }
  Diagnostics take_problems() { return std::move(problems_); }
  const nlohmann::json& document() const { return json_; }

 private:
  const nlohmann::json& json_;
  const KeyLocator& locate_;
  Diagnostics problems_;
};

}  // namespace hotbunk

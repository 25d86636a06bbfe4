#include "tests/numerics/golden.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "base/file.h"
#include "base/json.h"
#include "spec/model_config.h"
#include "tests/numerics/value.h"
#include "tests/paths.h"

namespace hotbunk::test {
namespace {

const TensorView& find(const Checkpoint& file, const std::string& name) {
  const TensorView* view = file.find(name);
  if (view == nullptr) throw std::runtime_error("no tensor " + name);
  return *view;
}

std::vector<float> floats(const TensorView& view) {
  std::vector<float> out(static_cast<std::size_t>(view.numel()));
  copy_as_f32(view, 0, out);
  return out;
}

std::vector<std::int32_t> integers(const TensorView& view) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(view.numel()));
  std::memcpy(out.data(), view.data.data(), view.data.size());
  return out;
}

/// Folders whose golden.json has that key, by name; those of whole models that train have none of the keys that it may
/// be.
std::vector<std::string> goldens_with(const std::string& key) {
  std::vector<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(source_folder) + "/tests/golden")) {
    if (!std::filesystem::exists(entry.path() / "golden.json")) continue;
    const auto json = json_from<nlohmann::json>(value(read_file(entry.path() / "golden.json")));
    const bool whole = !json.contains("lora") && !json.contains("frozen") && !json.contains("router_losses");
    if (key.empty() ? whole : json.contains(key)) out.push_back(entry.path().filename());
  }
  std::ranges::sort(out);
  return out;
}

}  // namespace

const std::vector<std::string>& golden_models() {
  static const std::vector<std::string> names = goldens_with("");
  return names;
}

const std::vector<std::string>& golden_adapters() {
  static const std::vector<std::string> names = goldens_with("lora");
  return names;
}

const std::vector<std::string>& golden_frozen() {
  static const std::vector<std::string> names = goldens_with("frozen");
  return names;
}

const std::vector<std::string>& golden_router_losses() {
  static const std::vector<std::string> names = goldens_with("router_losses");
  return names;
}

Golden Golden::load(const std::string& name) {
  Golden g;
  const std::string goldens = std::string(source_folder) + "/tests/golden/";
  g.folder = goldens + name;
  const auto json = json_from<nlohmann::json>(value(read_file(g.folder + "/golden.json")));
  const bool lora = json.contains("lora"), frozen = json.contains("frozen"), routers = json.contains("router_losses");
  const std::string model = lora || frozen || routers ? goldens + json["model"].get<std::string>() : g.folder;
  g.model = value(load_model(model));
  if (frozen) g.model.frozen = fmt::format("{}", fmt::join(json["frozen"].get<std::vector<std::string>>(), "-"));
  if (lora)
    g.model.lora = {json["lora"]["rank"], json["lora"]["alpha"],
                    fmt::format("{}", fmt::join(json["lora"]["targets"].get<std::vector<std::string>>(), "-")),
                    g.folder};
  g.files_ = {value(Checkpoint::open(g.folder + "/golden.safetensors")),
              value(Checkpoint::open(lora ? g.folder + "/adapter_model.safetensors" : model + "/model.safetensors"))};
  const auto& o = json["optimizer"];
  g.optimizer = {.lr = o["lr"],
                 .beta1 = o["beta1"],
                 .beta2 = o["beta2"],
                 .eps = o["eps"],
                 .weight_decay = o["weight_decay"],
                 .max_grad_norm = o["max_grad_norm"],
                 .warmup_steps = 0};
  if (routers) g.router_aux = json["router_losses"]["aux"], g.router_z = json["router_losses"]["z"];
  g.loss = json["loss"];
  g.final_loss = json["steps"]["final_loss"];
  g.losses = json["steps"]["losses"].get<std::vector<double>>();
  g.grad_norms = json["steps"]["grad_norms"].get<std::vector<double>>();
  if (json.contains("generation")) {
    g.prompts = json["generation"]["prompts"].get<std::vector<std::vector<std::int32_t>>>();
    g.new_tokens = json["generation"]["new_tokens"].get<std::vector<std::vector<std::int32_t>>>();
  }
  g.bf16_floor = json["floors"].value("logits_bf16", 0.0);
  g.bf16_gradient_floor = json["floors"].value("grads_bf16", 0.0);
  const auto ids = integers(find(g.files_[0], "input_ids")), ends = integers(find(g.files_[0], "cu_seqlens"));
  for (std::size_t s = 0; s + 1 < ends.size(); ++s) {
    TokenSequence sequence;
    sequence.prompt_tokens = 1;
    sequence.tokens.assign(ids.begin() + ends[s], ids.begin() + ends[s + 1]);
    g.sequences.push_back(std::move(sequence));
  }
  return g;
}

std::int64_t Golden::num_tokens() const {
  std::int64_t n = 0;
  for (const TokenSequence& s : sequences) n += static_cast<std::int64_t>(s.tokens.size());
  return n;
}

std::int64_t Golden::longest_sequence() const {
  std::size_t n = 0;
  for (const TokenSequence& s : sequences) n = std::max(n, s.tokens.size());
  return static_cast<std::int64_t>(n);
}

std::vector<float> Golden::tensor(const std::string& name) const { return floats(find(files_[0], name)); }
std::vector<float> Golden::initial(const std::string& parameter) const { return floats(find(files_[1], parameter)); }

double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size() || b.empty()) return std::numeric_limits<double>::infinity();
  double difference = 0, largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i])) return std::numeric_limits<double>::infinity();
    difference = std::max(difference, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
    largest = std::max(largest, std::abs(static_cast<double>(b[i])));
  }
  return difference / largest;
}

double update_error(const std::vector<float>& a, const std::vector<float>& b, const std::vector<float>& from) {
  if (a.size() != b.size() || b.size() != from.size()) return std::numeric_limits<double>::infinity();
  double difference = 0, update = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    const double u = static_cast<double>(b[i]) - static_cast<double>(from[i]);
    difference += d * d;
    update += u * u;
  }
  return std::sqrt(difference / update);
}

}  // namespace hotbunk::test

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "base/partial_file.h"
#include "spec/safetensors.h"

namespace hotbunk {
namespace {

std::string_view safetensors_name(DType t) {
  switch (t) {
    case DType::f32:
      return "F32";
    case DType::bf16:
      return "BF16";
    case DType::f16:
      return "F16";
    case DType::f64:
      return "F64";
    case DType::i32:
      return "I32";
    case DType::i64:
      return "I64";
    case DType::u8:
      return "U8";
  }
  return "?";
}

std::int64_t bytes_of(const TensorEntry& entry) {
  std::int64_t n = size_of(entry.dtype);
  for (std::int64_t extent : entry.shape) n *= extent;
  return n;
}

}  // namespace

/// One shard at a time is written; full ones wait without their names for finish().
struct SafetensorsWriter::State {
  struct Shard {
    std::filesystem::path target;
    std::vector<TensorEntry> entries;
    std::int64_t bytes = 0;
    std::optional<PartialFile> file = std::nullopt;
  };
  std::vector<Shard> shards;
  std::map<std::string, std::string> metadata;
  std::filesystem::path index;  // empty: one file
  std::size_t at = 0;           // the shard being written
  std::int64_t left = 0;        // data bytes it still misses

  Status open_shard() {
    Shard& shard = shards[at];
    auto target = target_of_links(shard.target);
    if (!target) return fail(std::move(target.error()));
    auto opened = PartialFile::create(std::move(*target));
    if (!opened) return fail(std::move(opened.error()));
    shard.file.emplace(std::move(*opened));
    nlohmann::ordered_json header;
    if (!metadata.empty()) header["__metadata__"] = metadata;
    std::int64_t offset = 0;
    for (const auto& entry : shard.entries) {
      const std::int64_t end = offset + bytes_of(entry);
      header[entry.name] = {
          {"dtype", safetensors_name(entry.dtype)}, {"shape", entry.shape}, {"data_offsets", {offset, end}}};
      offset = end;
    }
    std::string text = header.is_null() ? "{}" : json_text(header);
    text.resize((text.size() + 7) / 8 * 8, ' ');  // data starts aligned, as the reference implementation does
    const std::uint64_t length = text.size();
    left = shard.bytes;
    if (auto ok = shard.file->write(std::as_bytes(std::span{&length, 1})); !ok) return ok;
    if (auto ok = shard.file->write(std::as_bytes(std::span{text})); !ok) return ok;
    return next_when_full();
  }

  /// Empty shards and zero-sized tensors are complete as soon as they are open.
  Status next_when_full() {
    if (left > 0) return {};
    if (auto synced = shards[at].file->sync(); !synced) return synced;
    ++at;
    return at < shards.size() ? open_shard() : Status{};
  }
};

SafetensorsWriter::SafetensorsWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter::~SafetensorsWriter() = default;

Result<SafetensorsWriter> SafetensorsWriter::create(const std::filesystem::path& target,
                                                    std::vector<TensorEntry> entries, std::int64_t max_shard_bytes,
                                                    const std::map<std::string, std::string>& metadata) {
  auto state = std::make_unique<State>();
  state->metadata = metadata;
  const bool one_file = target.extension() == ".safetensors";
  const std::filesystem::path folder = one_file ? target.parent_path() : target;

  std::set<std::string> names;
  state->shards.emplace_back();
  for (auto& entry : entries) {
    if (!names.insert(entry.name).second || entry.name == "__metadata__")
      return fail(Diagnostic{.code = "E409",
                             .message = fmt::format("tensor name \"{}\" is taken", entry.name),
                             .where = {target.string()},
                             .notes = {},
                             .help = {}});
    const std::int64_t bytes = bytes_of(entry);
    if (!one_file && !state->shards.back().entries.empty() && state->shards.back().bytes + bytes > max_shard_bytes)
      state->shards.emplace_back();
    state->shards.back().bytes += bytes;
    state->shards.back().entries.push_back(std::move(entry));
  }

  const std::size_t n = state->shards.size();
  for (std::size_t i = 0; i < n; ++i) {
    auto& shard = state->shards[i];
    shard.target = one_file ? target
                   : n == 1 ? folder / "model.safetensors"
                            : folder / fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, n);
  }
  if (n > 1) state->index = folder / "model.safetensors.index.json";
  std::error_code ec;
  if (!folder.empty()) std::filesystem::create_directories(folder, ec);
  if (auto opened = state->open_shard(); !opened) return fail(opened.error());
  return SafetensorsWriter(std::move(state));
}

Status SafetensorsWriter::write(std::span<const std::byte> bytes) {
  State& s = *state_;
  while (!bytes.empty()) {
    HB_CHECK(s.at < s.shards.size(), "{} bytes more than the entries hold", bytes.size());
    const auto n = std::min<std::size_t>(bytes.size(), static_cast<std::size_t>(s.left));
    if (auto ok = s.shards[s.at].file->write(bytes.first(n)); !ok) return ok;
    s.left -= static_cast<std::int64_t>(n);
    bytes = bytes.subspan(n);
    if (auto next = s.next_when_full(); !next) return next;
  }
  return {};
}

Status SafetensorsWriter::finish() {
  State& s = *state_;
  HB_CHECK(s.at == s.shards.size(), "{} bytes of {} were never written", s.left, s.shards[s.at].target.string());
  nlohmann::ordered_json index;
  std::int64_t total = 0;
  for (auto& shard : s.shards) {
    if (auto there = shard.file->commit(); !there) return there;
    total += shard.bytes;
  }
  if (s.index.empty()) {
    // A folder that was sharded before must not keep an index to old shards: readers prefer it.
    std::error_code ec;
    if (s.shards[0].target.filename() == "model.safetensors")
      std::filesystem::remove(s.shards[0].target.parent_path() / "model.safetensors.index.json", ec);
    return {};
  }
  index["metadata"]["total_size"] = total;
  for (const auto& shard : s.shards)
    for (const auto& entry : shard.entries) index["weight_map"][entry.name] = shard.target.filename().string();
  return write_file_atomic(s.index, json_text(index, 2) + "\n");
}

}  // namespace hotbunk

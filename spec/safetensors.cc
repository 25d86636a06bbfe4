#include "spec/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "spec/json_read.h"

namespace hotbunk {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian and mapped as it is");

constexpr std::uint64_t max_header_bytes = 100'000'000;  // the limit of the reference implementation

Diagnostic file_problem(const char* code, const std::string& file, std::string message,
                        std::vector<std::string> notes = {}, std::string help = {}) {
  return {
      .code = code, .message = std::move(message), .where = {file}, .notes = std::move(notes), .help = std::move(help)};
}

struct NamedType {
  std::string_view name;
  DType dtype;
};
constexpr NamedType known_types[] = {{"F32", DType::f32}, {"BF16", DType::bf16}, {"F16", DType::f16},
                                     {"F64", DType::f64}, {"I32", DType::i32},   {"I64", DType::i64},
                                     {"U8", DType::u8}};

/// One entry of the header, checked by itself: dtype, shape and whether the offsets hold exactly the shape.
Result<TensorView> parse_entry(const std::string& name, const json& entry, std::span<const std::byte> data,
                               const std::string& file) {
  const std::string title = fmt::format("tensor \"{}\"", name.substr(0, 200));
  if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") || !entry.contains("data_offsets"))
    return fail(file_problem("E402", file, title + ": needs dtype, shape and data_offsets"));

  TensorView view;
  view.name = name;
  const json& dtype = entry["dtype"];
  const auto known = std::find_if(std::begin(known_types), std::end(known_types), [&](const NamedType& t) {
    return dtype.is_string() && dtype.get_ref<const std::string&>() == t.name;
  });
  if (known == std::end(known_types))
    return fail(file_problem("E403", file, fmt::format("{}: dtype is {}", title, describe_json(dtype)),
                             {"this reader knows F32, BF16, F16, F64, I32, I64 and U8"}));
  view.dtype = known->dtype;

  const json& shape = entry["shape"];
  if (!shape.is_array() || shape.size() > 16)
    return fail(file_problem(
        "E404", file, fmt::format("{}: shape is {}, not a list of at most 16 sizes", title, describe_json(shape))));
  std::int64_t bytes = size_of(view.dtype);
  for (const json& extent : shape) {
    if (!extent.is_number_unsigned())
      return fail(file_problem(
          "E404", file, fmt::format("{}: a size is {}, not a non-negative integer", title, describe_json(extent))));
    const auto n = extent.get<std::uint64_t>();
    if (n > (std::uint64_t{1} << 62) || __builtin_mul_overflow(bytes, static_cast<std::int64_t>(n), &bytes))
      return fail(file_problem("E404", file, fmt::format("{}: shape {} overflows 64 bits", title, json_text(shape))));
    view.shape.push_back(static_cast<std::int64_t>(n));
  }

  const json& offsets = entry["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned())
    return fail(file_problem("E405", file, title + ": data_offsets must be two non-negative integers"));
  const auto begin = offsets[0].get<std::uint64_t>(), end = offsets[1].get<std::uint64_t>();
  if (begin > end || end > data.size())
    return fail(file_problem("E405", file,
                             fmt::format("{}: data_offsets [{}, {}] lie outside the data", title, begin, end),
                             {fmt::format("the file holds {} bytes of data after the header", data.size())},
                             "the file is truncated or its header is wrong: fetch it again"));
  if (end - begin != static_cast<std::uint64_t>(bytes))
    return fail(file_problem(
        "E404", file, fmt::format("{}: data_offsets hold {} bytes, its shape needs {}", title, end - begin, bytes),
        {fmt::format("{} of {} = {} bytes", json_text(shape), known->name, bytes)}));
  view.data = data.subspan(begin, end - begin);
  return view;
}

/// Every byte of the data belongs to exactly one tensor.
Status check_tiling(const std::vector<TensorView>& tensors, std::span<const std::byte> data, const std::string& file) {
  std::vector<const TensorView*> order;
  for (const auto& t : tensors) order.push_back(&t);
  std::sort(order.begin(), order.end(), [](const TensorView* a, const TensorView* b) {
    return std::pair(a->data.data(), a->data.size()) < std::pair(b->data.data(), b->data.size());
  });
  std::uint64_t covered = 0;
  std::string previous = "the header";
  for (const TensorView* t : order) {
    const auto begin = static_cast<std::uint64_t>(t->data.data() - data.data());
    if (begin != covered)
      return fail(
          file_problem("E405", file,
                       fmt::format("tensor \"{}\" starts at {}, {} the end of {} at {}", t->name, begin,
                                   begin < covered ? "before" : "after", previous, covered),
                       {begin < covered ? "two tensors share bytes" : "bytes between them belong to no tensor"}));
    covered = begin + t->data.size();
    previous = fmt::format("\"{}\"", t->name);
  }
  if (covered != data.size())
    return fail(file_problem("E405", file,
                             fmt::format("{} bytes after the last tensor belong to no tensor", data.size() - covered)));
  return {};
}

}  // namespace

Result<std::vector<TensorView>> parse_safetensors(std::span<const std::byte> bytes, const std::string& file) {
  if (bytes.size() < 8)
    return fail(file_problem("E401", file,
                             fmt::format("the file has {} bytes, too few for a safetensors header", bytes.size()), {},
                             "the file is truncated or no safetensors file: fetch it again"));
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), 8);
  if (header_bytes > max_header_bytes || header_bytes > bytes.size() - 8)
    return fail(
        file_problem("E401", file, fmt::format("the header claims {} bytes", header_bytes),
                     {fmt::format("the file has {} bytes after the length field; the format allows headers of {}",
                                  bytes.size() - 8, max_header_bytes)},
                     "the file is truncated or no safetensors file: fetch it again"));
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + 8, header_bytes);
  const auto data = bytes.subspan(8 + header_bytes);
  auto header = parse_json(text, file, {.max_depth = 8}, "E402", false);
  if (!header) return fail(header.error());
  if (!header->is_object())
    return fail(file_problem("E402", file, "the header is " + describe_json(*header) + ", not an object"));

  const auto shared_file = std::make_shared<const std::string>(file);
  std::vector<TensorView> tensors;
  Diagnostics problems;
  for (const auto& [name, entry] : header->items()) {
    if (name == "__metadata__") {
      if (!entry.is_object()) problems.push_back(file_problem("E402", file, "__metadata__ is no object of strings"));
      continue;
    }
    auto view = parse_entry(name, entry, data, file);
    if (view) {
      view->file = shared_file;
      tensors.push_back(std::move(*view));
    } else if (problems.size() < 20) {
      problems.insert(problems.end(), view.error().begin(), view.error().end());
    }
  }
  if (!problems.empty()) return fail(std::move(problems));
  if (auto tiled = check_tiling(tensors, data, file); !tiled) return fail(tiled.error());
  return tensors;
}

/// Read-only mapping of a whole file.
class Checkpoint::Mapping {
 public:
  static Result<std::shared_ptr<const Mapping>> open(const std::filesystem::path& path) {
    auto file = open_regular_file(path);
    if (!file) return fail(std::move(file.error()));
    auto mapping = std::make_shared<Mapping>();
    mapping->size_ = static_cast<std::size_t>(file->bytes);
    if (mapping->size_ > 0) {
      void* at = ::mmap(nullptr, mapping->size_, PROT_READ, MAP_PRIVATE, file->fd.get(), 0);
      const int error = errno;
      if (at == MAP_FAILED)
        return fail(file_problem("E101", path.string(), fmt::format("cannot map file: {}", std::strerror(error))));
      mapping->at_ = at;
    }
    return mapping;
  }
  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (at_ != nullptr) ::munmap(at_, size_);
  }
  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(at_), size_}; }

 private:
  void* at_ = nullptr;
  std::size_t size_ = 0;
};

Diagnostic no_weights(const std::filesystem::path& folder) {
  std::vector<std::string> found;
  std::error_code ec;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ec))
    if (const std::string ending = entry.path().extension().string(); ending == ".safetensors" || ending == ".bin")
      found.push_back(entry.path().filename().string());
  std::ranges::sort(found);
  std::vector<std::string> notes = {"looked for model.safetensors and model.safetensors.index.json"};
  if (!found.empty()) notes.push_back(fmt::format("the folder has {}", fmt::join(found, ", ")));
  return file_problem(
      "E420", folder.string(), "the model folder holds no weights", std::move(notes),
      "fetch the whole folder, or take another checkpoint; .bin files must be converted; to start from random "
      "weights name the file config.json itself");
}

namespace {

/// weight_map of an index file: tensor → shard's file name. Names that leave the folder are refused.
Result<std::map<std::string, std::string>> read_index(const std::filesystem::path& path) {
  const std::string file = path.string();
  auto text = read_file(path, std::int64_t{1} << 28);
  if (!text) return fail(text.error());
  auto index = parse_json(*text, file);
  if (!index) return fail(index.error());
  if (!index->is_object() || !index->contains("weight_map") || !(*index)["weight_map"].is_object())
    return fail(file_problem("E409", file, "the index has no \"weight_map\" of tensor names to file names"));
  std::map<std::string, std::string> shards;
  for (const auto& [name, shard] : (*index)["weight_map"].items()) {
    if (!shard.is_string() || shard.get_ref<const std::string&>().find('/') != std::string::npos ||
        shard.get_ref<const std::string&>().empty())
      return fail(file_problem(
          "E409", file,
          fmt::format("tensor \"{}\": {} is no name of a file beside the index", name, describe_json(shard))));
    shards[name] = shard.get<std::string>();
  }
  return shards;
}

/// The file that a folder's weights start from.
Result<std::filesystem::path> find_weights(const std::filesystem::path& path) {
  std::error_code ec;
  if (!std::filesystem::is_directory(path, ec)) return path;
  for (const char* name : {"model.safetensors.index.json", "model.safetensors"})
    if (std::filesystem::exists(path / name, ec)) return path / name;
  return fail(no_weights(path));
}

}  // namespace

Result<Checkpoint> Checkpoint::open(const std::filesystem::path& path) {
  auto weights = find_weights(path);
  if (!weights) return fail(weights.error());
  Checkpoint checkpoint;
  checkpoint.path_ = weights->string();

  std::map<std::string, std::string> index;
  std::set<std::string> files;
  const bool sharded = weights->extension() == ".json";
  if (sharded) {
    auto read = read_index(*weights);
    if (!read) return fail(read.error());
    index = std::move(*read);
    for (const auto& [name, shard] : index) files.insert((weights->parent_path() / shard).string());
  } else {
    files.insert(weights->string());
  }

  Diagnostics problems;
  for (const auto& file : files) {
    auto mapping = Mapping::open(file);
    auto tensors = mapping ? parse_safetensors((*mapping)->bytes(), file) : fail(mapping.error());
    if (!tensors) {
      problems.insert(problems.end(), tensors.error().begin(), tensors.error().end());
      continue;
    }
    checkpoint.mappings_.push_back(std::move(*mapping));
    for (auto& tensor : *tensors) {
      // The index decides which shard a name is read from; copies elsewhere are ignored, as transformers does.
      if (sharded) {
        const auto at = index.find(tensor.name);
        if (at == index.end() || (weights->parent_path() / at->second).string() != file) continue;
        index.erase(at);
      }
      checkpoint.tensors_.push_back(std::move(tensor));
    }
  }
  if (problems.empty())
    for (const auto& [name, shard] : index)
      problems.push_back(
          file_problem("E409", weights->string(), fmt::format("tensor \"{}\" is not in {}", name, shard)));
  if (!problems.empty()) return fail(std::move(problems));
  std::sort(checkpoint.tensors_.begin(), checkpoint.tensors_.end(),
            [](const TensorView& a, const TensorView& b) { return a.name < b.name; });
  return checkpoint;
}

const TensorView* Checkpoint::find(std::string_view name) const {
  const auto at = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                   [](const TensorView& t, std::string_view n) { return t.name < n; });
  return at != tensors_.end() && at->name == name ? &*at : nullptr;
}

Result<TensorView> Checkpoint::require(std::string_view name, std::span<const std::int64_t> shape) const {
  const TensorView* view = find(name);
  if (view == nullptr) {
    std::vector<std::string> names;
    for (const auto& t : tensors_) names.push_back(t.name);
    const std::string nearest = nearest_name(std::string(name), names);
    return fail(file_problem("E406", path_, fmt::format("tensor \"{}\" is missing", name),
                             {fmt::format("the checkpoint holds {} tensors", tensors_.size())},
                             nearest.empty() ? "" : fmt::format("nearest name: \"{}\"", nearest)));
  }
  if (!std::equal(shape.begin(), shape.end(), view->shape.begin(), view->shape.end()))
    return fail(file_problem("E407", *view->file,
                             fmt::format("tensor \"{}\" has shape ({}), expected ({})", name,
                                         fmt::join(view->shape, ", "), fmt::join(shape, ", ")),
                             {}, "the weights belong to another config.json"));
  return *view;
}

Result<TensorView> Checkpoint::require(const StoredParameter& stored) const {
  constexpr std::string_view base = "transformer.";
  const std::string_view name = stored.tensor;
  const bool without = find(name) == nullptr && name.starts_with(base) && find(name.substr(base.size())) != nullptr;
  if (const std::string blocks = stored.tensor + "_blocks"; find(name) == nullptr && find(blocks) != nullptr)
    return fail(file_problem("E406", path_, fmt::format("tensor \"{}\" is missing", name),
                             {fmt::format("\"{}\" has it in MXFP4, four bits for a number, which is not read", blocks)},
                             "have transformers write it in bf16: from_pretrained with Mxfp4Config(dequantize=True), "
                             "then save_pretrained"));
  return require(without ? name.substr(base.size()) : name, stored.shape);
}

Result<std::vector<float>> Checkpoint::load_parameter(const ModelSpec& model, const ParamSpec& parameter) const {
  const StoredParameter at = stored(model, parameter);
  auto view = require(at);
  if (!view) return fail(view.error());
  if (view->dtype == DType::i32 || view->dtype == DType::i64 || view->dtype == DType::u8)
    return fail(file_problem(
        "E403", *view->file,
        fmt::format("tensor \"{}\" holds {}, weights are floating point", view->name, name_of(view->dtype))));
  if (auto finite = check_finite(*view); !finite) return fail(finite.error());
  std::vector<float> values(static_cast<std::size_t>(parameter.numel()));
  copy_as_f32(*view, at, 0, values);
  return values;
}

Status Checkpoint::check_against(const ModelSpec& model) const {
  Diagnostics problems;
  for (const auto& p : parameters_of(model)) {
    if (problems.size() >= 20) break;
    const StoredParameter at = stored(model, p);
    if (at.first > 0) continue;  // behind another in one tensor
    if (auto view = require(at); !view) problems.insert(problems.end(), view.error().begin(), view.error().end());
  }
  if (!problems.empty()) return fail(std::move(problems));
  return {};
}

namespace {

float f16_to_f32(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float value = static_cast<float>(mantissa) * 0x1.0p-24f;  // subnormal: mantissa * 2^-24, exact
  return sign != 0 ? -value : value;
}

template <class T, class Convert>
void convert(const std::byte* from, std::span<float> out, Convert to_float) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    T x;
    std::memcpy(&x, from + i * sizeof(T), sizeof(T));
    out[i] = to_float(x);
  }
}

}  // namespace

void copy_as_f32(const TensorView& view, std::int64_t first, std::span<float> out) {
  HB_CHECK(first >= 0 && first <= view.numel() && static_cast<std::int64_t>(out.size()) <= view.numel() - first,
           "elements [{}, {}) of tensor {} with {}", first, first + static_cast<std::int64_t>(out.size()), view.name,
           view.numel());
  const std::byte* from = view.data.data() + first * size_of(view.dtype);
  switch (view.dtype) {
    case DType::f32:
      if (!out.empty()) std::memcpy(out.data(), from, out.size_bytes());
      return;
    case DType::bf16:
      return convert<bf16>(from, out, [](bf16 x) { return to_f32(x); });
    case DType::f16:
      return convert<std::uint16_t>(from, out, f16_to_f32);
    case DType::f64:
      return convert<double>(from, out, [](double x) { return static_cast<float>(x); });
    case DType::i32:
    case DType::i64:
    case DType::u8:
      break;
  }
  HB_CHECK(false, "tensor {} holds {}, not floating point", view.name, name_of(view.dtype));
}

void copy_as_f32(const TensorView& view, const StoredParameter& stored, std::int64_t first, std::span<float> out) {
  if (stored.in_order()) return copy_as_f32(view, stored.element(first), out);
  for (std::size_t i = 0; i < out.size(); ++i)
    copy_as_f32(view, stored.element(first + static_cast<std::int64_t>(i)), out.subspan(i, 1));
}

Status check_finite(const TensorView& view, std::int64_t begin) {
  if (view.dtype == DType::i32 || view.dtype == DType::i64 || view.dtype == DType::u8) return {};
  std::vector<float> block(static_cast<std::size_t>(std::min<std::int64_t>(view.numel(), 1 << 16)));
  for (std::int64_t first = 0; first < view.numel(); first += static_cast<std::int64_t>(block.size())) {
    const auto n = std::min<std::int64_t>(static_cast<std::int64_t>(block.size()), view.numel() - first);
    const std::span<float> values(block.data(), static_cast<std::size_t>(n));
    copy_as_f32(view, first, values);
    const auto bad = std::find_if(values.begin(), values.end(), [](float x) { return !std::isfinite(x); });
    if (bad == values.end()) continue;
    // Row-major index of the element, one number per dimension.
    std::int64_t flat = begin + first + (bad - values.begin());
    std::vector<std::int64_t> index(view.shape.size());
    for (std::size_t d = view.shape.size(); d-- > 0; flat /= view.shape[d]) index[d] = flat % view.shape[d];
    return fail(file_problem("E408", *view.file,
                             fmt::format("tensor \"{}\" holds {} at element ({})", view.name,
                                         std::isnan(*bad) ? "NaN" : "infinity", fmt::join(index, ", ")),
                             {}, "the checkpoint comes from a run that diverged: use an earlier one"));
  }
  return {};
}

}  // namespace hotbunk

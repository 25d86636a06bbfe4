#include "rl/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/check.h"
#include "base/file.h"
#include "base/rng.h"
#include "graph/slots.h"
#include "spec/model_config.h"

namespace hotbunk {
namespace {

enum class Init : std::uint8_t { normal, ones, zeros };

Init init_of(ParamRole role) {
  switch (role) {
    case ParamRole::final_norm:
    case ParamRole::input_norm:
    case ParamRole::post_norm:
    case ParamRole::q_norm:
    case ParamRole::k_norm:
    case ParamRole::q_a_norm:
    case ParamRole::kv_a_norm:
      return Init::ones;
    case ParamRole::final_norm_bias:
    case ParamRole::input_norm_bias:
    case ParamRole::post_norm_bias:
    case ParamRole::q_bias:
    case ParamRole::k_bias:
    case ParamRole::v_bias:
    case ParamRole::o_bias:
    case ParamRole::up_bias:
    case ParamRole::down_bias:
    case ParamRole::router_bias:
      return Init::zeros;
    default:
      return Init::normal;
  }
}

/// One generator call gives two normals: elements 2c and 2c + 1.
void draw_normals(std::uint64_t seed, std::uint64_t key, double deviation, std::int64_t first, std::span<float> out) {
  for (std::size_t i = 0; i < out.size();) {
    const auto element = static_cast<std::uint64_t>(first) + i;
    const auto pair = normal2(seed, RngPurpose::init, key, element / 2);
    for (std::size_t k = element % 2; k < 2 && i < out.size(); ++k) out[i++] = static_cast<float>(deviation * pair[k]);
  }
}

void store(std::span<const float> values, DType dtype, std::byte* destination) {
  if (dtype == DType::f32) {
    std::memcpy(destination, values.data(), values.size_bytes());
    return;
  }
  HB_CHECK(dtype == DType::bf16, "parameters are kept in fp32 or bf16, not {}", name_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const bf16 rounded = to_bf16(values[i]);
    std::memcpy(destination + i * sizeof rounded, &rounded, sizeof rounded);
  }
}

}  // namespace

ParameterSource::ParameterSource(const ModelSpec& model, std::int64_t seed, std::optional<Checkpoint> checkpoint)
    : checkpoint_(std::move(checkpoint)), init_range_(model.init_range), seed_(static_cast<std::uint64_t>(seed)) {
  for (ParamSpec& p : parameters_of(model)) {
    std::string name = p.name;
    parameters_.emplace(std::move(name), std::move(p));
  }
}

Result<ParameterSource> ParameterSource::open(const ModelSpec& model, std::int64_t seed) {
  if (model.weights_path.empty()) return ParameterSource(model, seed, std::nullopt);
  auto checkpoint = Checkpoint::open(model.weights_path);
  if (!checkpoint) return fail(std::move(checkpoint.error()));
  if (Status ok = checkpoint->check_against(model); !ok) return fail(std::move(ok.error()));
  for (const ParamSpec& p : parameters_of(model))
    if (Status ok = check_finite(*checkpoint->find(p.name)); !ok) return fail(std::move(ok.error()));
  return ParameterSource(model, seed, std::move(*checkpoint));
}

void ParameterSource::read_range(const std::string& name, std::int64_t first, std::span<float> out) const {
  const auto found = parameters_.find(name);
  HB_CHECK(found != parameters_.end(), "the plan loads '{}', which the model does not have", name);
  const ParamSpec& p = found->second;
  HB_CHECK(first >= 0 && first + static_cast<std::int64_t>(out.size()) <= p.numel(), "{} [{}, +{}) of {}", name, first,
           out.size(), p.numel());
  if (checkpoint_) {
    const auto tensor = checkpoint_->require(name, p.shape);
    HB_CHECK(tensor.has_value(), "'{}' was there when the checkpoint was opened", name);
    copy_as_f32(*tensor, first, out);
    return;
  }
  switch (init_of(p.role)) {
    case Init::normal:
      draw_normals(seed_, name_key(name), init_range_, first, out);
      break;
    case Init::ones:
      std::ranges::fill(out, 1.0f);
      break;
    case Init::zeros:
      std::ranges::fill(out, 0.0f);
      break;
  }
}

void ParameterSource::read(const std::string& name, std::span<const Box> boxes, DType dtype,
                           std::span<std::byte> destination) const {
  std::ranges::fill(destination, std::byte{0});
  std::vector<float> row;
  for (const Box& box : boxes) {
    row.resize(static_cast<std::size_t>(box.cols));
    for (std::int64_t i = 0; i < box.rows; ++i) {
      const std::int64_t begin = (box.dst_offset + i * box.dst_pitch) * size_of(dtype);
      HB_CHECK(begin >= 0 && begin + box.cols * size_of(dtype) <= static_cast<std::int64_t>(destination.size()),
               "a box of {} writes behind its tensor", name);
      read_range(name, box.src_offset + i * box.src_pitch, row);
      store(row, dtype, destination.data() + begin);
    }
  }
}

/// E631: readers refuse such weights, and the checkpoint that they would replace may be the last good one.
Status check_weights(const TensorEntry& entry, std::span<const std::byte> bytes) {
  const auto finite =
      check_finite(TensorView{entry.name, entry.dtype, entry.shape, bytes, std::make_shared<const std::string>()});
  if (finite) return {};
  return fail(Diagnostic{
      .code = "E631",
      .message =
          fmt::format("a checkpoint of weights that are not finite is not written: {}", finite.error().front().message),
      .where = {},
      .notes = {},
      .help = "checkpoints that were there before stay as they are; lower optimizer.lr or optimizer.max_grad_norm, or "
              "warm up (optimizer.warmup_steps)"});
}

ParameterSink::ParameterSink(SafetensorsWriter writer, std::vector<TensorEntry> entries)
    : writer_(std::move(writer)), entries_(std::move(entries)) {}

Result<ParameterSink> ParameterSink::create(const std::filesystem::path& folder, const ModelSpec& model,
                                            const Program& program, std::int16_t phase) {
  std::map<std::string, ParamSpec> parameters;
  for (const ParamSpec& p : parameters_of(model)) parameters.emplace(p.name, p);
  std::vector<TensorEntry> entries;
  for (const Block& block : program.phases[static_cast<std::size_t>(phase)])
    for (const Op& op : block.ops)
      if (op.kind == OpKind::fetch && op.integer(Attr::slot) == static_cast<std::int64_t>(Slot::exported))
        entries.push_back({op.name, op.inputs[0].dtype, parameters.at(op.name).shape});
  HB_CHECK(entries.size() == parameters.size(), "{} of {} parameters exported", entries.size(), parameters.size());
  const DType dtype = entries.front().dtype;
  // The config first: a folder whose weights have appeared is whole.
  if (Status ok = write_file_atomic(folder / "config.json", config_text(model, dtype)); !ok)
    return fail(std::move(ok.error()));
  auto writer = SafetensorsWriter::create(folder, entries);
  if (!writer) return fail(std::move(writer.error()));
  return ParameterSink(std::move(*writer), std::move(entries));
}

Status ParameterSink::take(const Op& op, std::span<const std::byte> source) {
  HB_CHECK(next_ < entries_.size() && entries_[next_].name == op.name, "'{}' out of order", op.name);
  const TensorEntry& entry = entries_[next_++];
  const std::int64_t width = size_of(entry.dtype);
  std::int64_t elements = 1;
  for (std::int64_t extent : entry.shape) elements *= extent;
  std::vector<std::byte> whole(static_cast<std::size_t>(elements * width));
  std::int64_t covered = 0;
  for (const Box& box : op.boxes)
    for (std::int64_t i = 0; i < box.rows; ++i) {
      const std::int64_t from = (box.src_offset + i * box.src_pitch) * width;
      const std::int64_t to = (box.dst_offset + i * box.dst_pitch) * width;
      const std::int64_t bytes = box.cols * width;
      HB_CHECK(from >= 0 && from + bytes <= static_cast<std::int64_t>(source.size()) && to >= 0 &&
                   to + bytes <= static_cast<std::int64_t>(whole.size()),
               "a box of {} lies outside its tensor", op.name);
      std::memcpy(whole.data() + to, source.data() + from, static_cast<std::size_t>(bytes));
      covered += box.cols;
    }
  HB_CHECK(covered == elements, "{} of {} elements of {} exported", covered, elements, op.name);
  if (auto s = check_weights(entry, whole); !s) return s;
  return writer_.write(whole);
}

Status ParameterSink::finish() {
  HB_CHECK(next_ == entries_.size(), "{} of {} parameters arrived", next_, entries_.size());
  return writer_.finish();
}

}  // namespace hotbunk

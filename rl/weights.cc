#include "rl/weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/parallel.h"
#include "base/rng.h"
#include "base/rounding.h"
#include "rl/adapter.h"
#include "rl/manifest.h"
#include "spec/parameter_roles.h"

namespace hotbunk {
namespace {

/// One generator call gives two normals: elements 2c and 2c + 1.
void draw_normals(std::uint64_t seed, std::uint64_t key, double deviation, std::int64_t first, std::span<float> out) {
  for (std::size_t i = 0; i < out.size();) {
    const auto element = static_cast<std::uint64_t>(first) + i;
    const auto pair = normal2(seed, RngPurpose::init, key, element / 2);
    for (std::size_t k = element % 2; k < 2 && i < out.size(); ++k) out[i++] = static_cast<float>(deviation * pair[k]);
  }
}

/// Uniform in [-bound, bound); one generator call gives four.
void draw_uniforms(std::uint64_t seed, std::uint64_t key, double bound, std::int64_t first, std::span<float> out) {
  for (std::size_t i = 0; i < out.size();) {
    const auto element = static_cast<std::uint64_t>(first) + i;
    const Philox4 words = random_words(seed, RngPurpose::init, key, element / 4);
    for (std::size_t k = element % 4; k < 4 && i < out.size(); ++k)
      out[i++] = static_cast<float>(bound * (2.0 * static_cast<double>(uniform24(words[k])) - 1.0));
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

/// Part of a box that one thread fills at a time; rows and columns count in the box.
struct Piece {
  const Box* box;
  std::int64_t row_begin, row_end, col_begin, col_end;
};

/// Small enough that the numbers stay in a core's cache on their way, and a draw of which costs more than a thread.
constexpr std::int64_t piece_elements = 1 << 16;

std::vector<Piece> pieces_of(std::span<const Box> boxes) {
  std::vector<Piece> out;
  for (const Box& box : boxes) {
    const std::int64_t cols = std::min(box.cols, piece_elements);
    const std::int64_t rows = std::max<std::int64_t>(1, piece_elements / std::max<std::int64_t>(1, box.cols));
    for (std::int64_t r = 0; r < box.rows; r += rows)
      for (std::int64_t c = 0; c < box.cols; c += cols)
        out.push_back({&box, r, std::min(r + rows, box.rows), c, std::min(c + cols, box.cols)});
  }
  return out;
}

void fill_zeros(std::span<std::byte> destination, Workers& workers) {
  constexpr std::size_t block = std::size_t{8} << 20;
  workers.each((destination.size() + block - 1) / block, [&](std::size_t i, int) {
    std::ranges::fill(destination.subspan(i * block, std::min(block, destination.size() - i * block)), std::byte{0});
  });
}

int useful_threads(std::size_t bytes, DType dtype, int threads) {
  return static_cast<int>(std::clamp<std::int64_t>(
      ceil_div(static_cast<std::int64_t>(bytes), piece_elements * size_of(dtype)), 1, std::max(threads, 1)));
}

/// Fills a feed's destination piece by piece; read(first, out) gives elements [first, first + out.size()) of the
/// tensor, on any of the threads.
template <class Read>
void fill_boxes(std::span<const Box> boxes, DType dtype, std::span<std::byte> destination, bool keeps, int threads,
                Read read) {
  Workers workers(useful_threads(destination.size(), dtype, threads));
  std::int64_t covered_bytes = 0;
  for (const Box& box : boxes) covered_bytes += box.elements() * size_of(dtype);
  if (!keeps && covered_bytes < std::ssize(destination)) fill_zeros(destination, workers);
  const std::vector<Piece> pieces = pieces_of(boxes);
  std::vector<std::vector<float>> rows(static_cast<std::size_t>(workers.threads()));
  workers.each(pieces.size(), [&](std::size_t p, int thread) {
    const Piece& piece = pieces[p];
    const Box& box = *piece.box;
    const std::int64_t cols = piece.col_end - piece.col_begin;
    std::vector<float>& row = rows[static_cast<std::size_t>(thread)];
    row.resize(static_cast<std::size_t>(cols));
    for (std::int64_t i = piece.row_begin; i < piece.row_end; ++i) {
      const std::int64_t begin = (box.dst_offset + i * box.dst_pitch + piece.col_begin) * size_of(dtype);
      HB_CHECK(begin >= 0 && begin + cols * size_of(dtype) <= std::ssize(destination),
               "a box writes behind its tensor: byte {} of {}", begin, destination.size());
      read(box.src_offset + i * box.src_pitch + piece.col_begin, std::span<float>(row));
      store(row, dtype, destination.data() + begin);
    }
  });
}

}  // namespace

ParameterSource::ParameterSource(const ModelSpec& model, std::int64_t seed, std::optional<Checkpoint> checkpoint,
                                 std::optional<Checkpoint> adapters)
    : checkpoint_(std::move(checkpoint)),
      adapters_(std::move(adapters)),
      init_range_(model.init_range),
      one_(static_cast<float>(1.0 - model.norm_offset)),
      seed_(static_cast<std::uint64_t>(seed)) {
  for (ParamSpec& p : parameters_of(model)) {
    std::string name = p.name;
    StoredParameter at = stored(model, p);
    parameters_.emplace(std::move(name), Parameter{std::move(p), std::move(at)});
  }
  for (ParamSpec& p : adapters_of(model)) {
    std::string name = p.name;
    StoredParameter at = stored_trained(model, p);
    parameters_.emplace(std::move(name), Parameter{std::move(p), std::move(at)});
  }
}

Result<ParameterSource> ParameterSource::open(const ModelSpec& model, std::int64_t seed) {
  std::optional<Checkpoint> adapters;
  if (model.lora.on() && !model.lora.adapter.empty()) {
    auto opened = open_adapter(model.lora.adapter, model);
    if (!opened) return fail(std::move(opened.error()));
    adapters.emplace(std::move(*opened));
  }
  if (model.weights_path.empty()) return ParameterSource(model, seed, std::nullopt, std::move(adapters));
  if (Status ok = verify_manifest(model.weights_path); !ok) return fail(std::move(ok.error()));
  auto checkpoint = Checkpoint::open(model.weights_path);
  if (!checkpoint) return fail(std::move(checkpoint.error()));
  if (Status ok = checkpoint->check_against(model); !ok) return fail(std::move(ok.error()));
  for (const ParamSpec& p : parameters_of(model)) {
    const StoredParameter at = stored(model, p);
    if (at.first > 0) continue;  // seen with what stands before it in the tensor
    if (Status ok = check_finite(*checkpoint->require(at)); !ok) return fail(std::move(ok.error()));
  }
  return ParameterSource(model, seed, std::move(*checkpoint), std::move(adapters));
}

void ParameterSource::read_range(const std::string& name, std::int64_t first, std::span<float> out) const {
  const auto found = parameters_.find(name);
  HB_CHECK(found != parameters_.end(), "the plan loads '{}', which the model does not have", name);
  const ParamSpec& p = found->second.spec;
  HB_CHECK(first >= 0 && first + static_cast<std::int64_t>(out.size()) <= p.numel(), "{} [{}, +{}) of {}", name, first,
           out.size(), p.numel());
  if (const auto& file = is_adapter(p.role) ? adapters_ : checkpoint_) {
    const auto tensor = file->require(found->second.stored);
    HB_CHECK(tensor.has_value(), "'{}' was there when the checkpoint was opened", name);
    copy_as_f32(*tensor, found->second.stored, first, out);
    return;
  }
  switch (rule_of(p.role).start) {
    case RoleStart::normal:
      draw_normals(seed_, name_key(name), init_range_, first, out);
      break;
    case RoleStart::one:
      std::ranges::fill(out, one_);
      break;
    case RoleStart::zero:
      std::ranges::fill(out, 0.0f);
      break;
    case RoleStart::uniform:
      draw_uniforms(seed_, name_key(name), 1.0 / std::sqrt(static_cast<double>(p.shape[1])), first, out);
      break;
  }
}

void ParameterSource::read(const std::string& name, std::span<const Box> boxes, DType dtype,
                           std::span<std::byte> destination, bool keeps, int threads) const {
  fill_boxes(boxes, dtype, destination, keeps, threads,
             [&](std::int64_t first, std::span<float> out) { read_range(name, first, out); });
}

Result<MomentSource> MomentSource::open(const std::filesystem::path& file, const ModelSpec& model) {
  auto checkpoint = Checkpoint::open(file);
  if (!checkpoint) return fail(std::move(checkpoint.error()));
  for (const ParamSpec& p : trained_parameters(model))
    for (Slot slot : {Slot::first_moment, Slot::second_moment}) {
      const auto moment = checkpoint->require(moment_name(p.name, slot), p.shape);
      if (!moment) return fail(moment.error());
      if (Status ok = check_finite(*moment); !ok) return fail(std::move(ok.error()));
    }
  MomentSource source;
  source.file_ = std::move(*checkpoint);
  return source;
}

void MomentSource::read(const std::string& parameter, Slot slot, std::span<const Box> boxes, DType dtype,
                        std::span<std::byte> destination, bool keeps, int threads) const {
  if (are_zeros() && !keeps) {
    Workers workers(useful_threads(destination.size(), dtype, threads));
    return fill_zeros(destination, workers);
  }
  const TensorView* tensor = file_ ? file_->find(moment_name(parameter, slot)) : nullptr;
  HB_CHECK(tensor || !file_, "the plan loads a moment of '{}', which the model does not have", parameter);
  fill_boxes(boxes, dtype, destination, keeps, threads, [&](std::int64_t first, std::span<float> out) {
    if (tensor) copy_as_f32(*tensor, first, out);
    else std::ranges::fill(out, 0.0f);
  });
}

Result<LoadSources> LoadSources::open(const Scenario& s, const std::optional<SavedCheckpoint>& from, bool opens_files) {
  if (!opens_files) return LoadSources{ParameterSource::unread(s.model), ParameterSource::unread(s.model), {}};
  ModelSpec model = s.model;
  // A checkpoint of adapters is of nothing else.
  if (from) (model.lora.on() ? model.lora.adapter : model.weights_path) = from->folder.string();
  auto parameters = ParameterSource::open(model, s.seed);
  if (!parameters) return fail(std::move(parameters.error()));
  if (!from) return LoadSources{*parameters, *parameters, {}};
  MomentSource moments;
  if (from->has_moments) {
    auto opened = MomentSource::open(from->folder / checkpoint_file::optimizer, s.model);
    if (!opened) return fail(std::move(opened.error()));
    moments = std::move(*opened);
  }
  // Nobody asks for the initial policy but a reference: without one its files need not be there any more.
  if (!s.algorithm.reference || s.model.lora.on()) return LoadSources{*parameters, *parameters, std::move(moments)};
  auto initial = ParameterSource::open(s.model, s.seed);
  if (!initial) return fail(std::move(initial.error()));
  return LoadSources{std::move(*parameters), std::move(*initial), std::move(moments)};
}

}  // namespace hotbunk

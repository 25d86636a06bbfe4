#include "rl/checkpoint.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <regex>
#include <utility>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "base/partial_file.h"
#include "graph/boxes.h"
#include "rl/adapter.h"
#include "rl/manifest.h"
#include "spec/json_read.h"
#include "spec/model_config.h"
#include "spec/safetensors.h"
#include "spec/stored_parameter.h"

namespace hotbunk {
namespace {

namespace fs = std::filesystem;

constexpr const char* state_schema = "hotbunk.training-state/1";

/// What is carried along has names that anybody's file may have: it is ours if the manifest says so. Without one a
/// checkpoint is half written or half removed, and its config, the first of its files and the last, lies beside it.
bool is_carried_by(const fs::path& folder, const std::string& name) {
  if (!is_carried(name)) return false;
  if (const auto listed = manifest_names(folder, name)) return *listed;
  std::error_code ec;
  return fs::exists(folder / checkpoint_file::config, ec) || fs::exists(folder / adapter_file::config, ec);
}

/// A file of its folder that a checkpoint may have.
bool is_our_file(const fs::path& path) {
  static const std::regex names(
      R"(config\.json|adapter_config\.json|adapter_model\.safetensors|scenario\.yaml|state\.json|manifest\.json|optimizer\.safetensors|model\.safetensors|model\.safetensors\.index\.json|model-\d{5}-of-\d{5}\.safetensors)");
  std::error_code ec;
  const std::string name = path.filename().string();
  return (std::regex_match(name, names) || is_partial_name(name) || is_carried_by(path.parent_path(), name)) &&
         fs::symlink_status(path, ec).type() == fs::file_type::regular;
}

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::error_code ec;
  std::vector<fs::path> entries;
  if (fs::symlink_status(folder, ec).type() != fs::file_type::directory) return entries;
  for (const auto& entry : fs::directory_iterator(folder, ec)) entries.push_back(entry.path());
  return entries;
}

/// False, and nothing happens, when the folder holds anything that no checkpoint has.
bool remove_if_ours_alone(const fs::path& folder) {
  return std::ranges::all_of(entries_of(folder), is_our_file) && remove_checkpoint(folder);
}

/// The checkpoint that was there goes; what its user has put beside our files moves to the one that took its place,
/// as NAME.previous where that has a file of the name.
void retire(const fs::path& old, const fs::path& folder) {
  std::error_code ec;
  for (const fs::path& path : entries_of(old)) {
    if (is_our_file(path)) continue;
    fs::path place = folder / path.filename();
    while (fs::exists(fs::symlink_status(place, ec))) place += ".previous";
    fs::rename(path, place, ec);
  }
  remove_checkpoint(old);
}

Status rename_failed(const fs::path& folder) {
  return fail(Diagnostic{.code = "E103",
                         .message = fmt::format("cannot put the checkpoint in place: {}", std::strerror(errno)),
                         .where = {folder.string()},
                         .notes = {},
                         .help = {}});
}

fs::path moved_aside(const fs::path& folder) {
  return folder.parent_path() / fmt::format(".{}.previous", folder.filename().string());
}

/// Filesystems that cannot exchange two folders (NFS): the old one is moved aside, from where sweep_checkpoints brings
/// it back if the new one does not come.
Status replace_in_two_steps(const fs::path& partial, const fs::path& folder) {
  const fs::path aside = moved_aside(folder);
  remove_checkpoint(aside);
  std::error_code ec;
  if (fs::exists(folder, ec) && ::rename(folder.c_str(), aside.c_str()) != 0) return rename_failed(folder);
  if (::rename(partial.c_str(), folder.c_str()) != 0) return rename_failed(folder);
  if (auto s = sync_folder(folder.parent_path()); !s) return s;
  retire(aside, folder);
  return {};
}

/// `partial` takes the name of `folder` in one step. What has that name and is no folder is somebody's own.
Status put_in_place(const fs::path& partial, const fs::path& folder) {
  std::error_code ec;
  if (const auto there = fs::symlink_status(folder, ec).type();
      there != fs::file_type::not_found && there != fs::file_type::directory)
    return fail(Diagnostic{.code = "E103",
                           .message = "a file has the checkpoint's name",
                           .where = {folder.string()},
                           .notes = {},
                           .help = "move it away"});
  const auto rename = [&](unsigned flags) {
    return ::renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, folder.c_str(), flags) == 0;
  };
  const bool placed = rename(RENAME_NOREPLACE);
  const bool exchanged = !placed && errno == EEXIST && rename(RENAME_EXCHANGE);
  if (!placed && !exchanged) {
    if (errno == EINVAL || errno == ENOSYS) return replace_in_two_steps(partial, folder);
    return rename_failed(folder);
  }
  if (auto s = sync_folder(folder.parent_path()); !s) return s;
  if (exchanged) retire(partial, folder);
  return {};
}

/// E631: readers refuse such weights, and the checkpoint that they would replace may be the last good one. `step`: from
/// one element to the next, in the tensor.
Status check_numbers(const TensorEntry& entry, std::int64_t first, std::int64_t step,
                     std::span<const std::byte> bytes) {
  const auto check = [&](std::int64_t from, std::span<const std::byte> some) {
    return check_finite(TensorView{entry.name, entry.dtype, entry.shape, some, std::make_shared<const std::string>()},
                        from);
  };
  Status finite = check(first, bytes);
  if (finite) return {};
  const auto width = static_cast<std::size_t>(size_of(entry.dtype));
  for (std::size_t i = 0; step > 1 && i < bytes.size() / width; ++i)
    if (finite = check(first + static_cast<std::int64_t>(i) * step, bytes.subspan(i * width, width)); !finite) break;
  return fail(Diagnostic{
      .code = "E631",
      .message =
          fmt::format("a checkpoint of weights that are not finite is not written: {}", finite.error().front().message),
      .where = {},
      .notes = {},
      .help = "checkpoints that were there before stay as they are; lower optimizer.lr or optimizer.max_grad_norm, or "
              "warm up (optimizer.warmup_steps)"});
}

nlohmann::ordered_json to_json(const TrainingState& s) {
  return {{"schema", state_schema},
          {"step", s.step},
          {"optimizer_step", s.optimizer_step},
          {"seed", s.seed},
          {"sequences_taken", s.sequences_taken},
          {"initial_weights", s.initial_weights},
          {"initial_digest", s.initial_digest},
          {"data_digest", s.data_digest},
          {"plan_hash", s.plan_hash},
          {"bf16_products", s.arithmetic.bf16_products},
          {"instruction_sets", s.arithmetic.instruction_sets}};
}

}  // namespace

std::string moment_name(const std::string& parameter, Slot slot) {
  const bool first = slot == Slot::first_moment || slot == Slot::exported_first_moment;
  return parameter + (first ? ".exp_avg" : ".exp_avg_sq");
}

namespace {

/// A tensor's weight is drawn by its name (FNV-1a, stirred as splitmix64 does), which no other tensor of a checkpoint
/// has.
ElementCount count_of(const TensorEntry& entry, std::int64_t elements) {
  std::uint64_t x = 0xcbf29ce484222325;
  for (const char c : entry.name) x = (x ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return {elements, (x ^ (x >> 31)) * static_cast<std::uint64_t>(elements)};
}

/// One set of safetensors files in the making.
struct TensorFiles {
  std::vector<TensorEntry> entries;
  std::map<std::string, std::size_t> numbers;  // of the entries, by name
  std::optional<SafetensorsWriter> writer;

  void add(TensorEntry entry) {
    numbers.emplace(entry.name, entries.size());
    entries.push_back(std::move(entry));
  }
  ElementCount elements() const {
    ElementCount all;
    for (const TensorEntry& entry : entries)
      all += count_of(entry,
                      std::accumulate(entry.shape.begin(), entry.shape.end(), std::int64_t{1}, std::multiplies<>()));
    return all;
  }
};

/// Rows and columns of a parameter, and where their elements lie in a fetched tensor.
struct ParameterBlock {
  std::int64_t row = 0, col = 0, rows = 0, cols = 0, from = 0, pitch = 0;
};

/// A box with rows of the parameter: boxes_of makes one row of those without a gap.
ParameterBlock block_of(const Box& box, std::int64_t cols) {
  ParameterBlock out{box.dst_offset / cols, box.dst_offset % cols, box.rows, box.cols, box.src_offset, box.src_pitch};
  if (box.rows == 1 && box.cols > cols && box.cols % cols == 0)
    out.rows = box.cols / cols, out.cols = cols, out.pitch = cols;
  HB_CHECK(out.col + out.cols <= cols && (box.rows == 1 || box.dst_pitch == cols),
           "a box of {} x {} elements {} apart from element {} on, of rows of {}", box.rows, box.cols, box.dst_pitch,
           box.dst_offset, cols);
  return out;
}

}  // namespace

struct CheckpointWriter::State {
  fs::path folder, partial;
  std::optional<TrainingState> training;
  bool is_first = false;  // the first rank's
  TensorFiles model, optimizer;
  std::map<std::string, StoredParameter> stored;  // by parameter; moments are stored as they are
  ElementCount taken;
  bool placed = false;

  explicit State(const CheckpointContent& of) {
    for (const ParamSpec& p : of.merged ? parameters_of(of.model) : saved_parameters(of.model)) {
      const StoredParameter& at = stored[p.name] = stored_trained(of.model, p);
      if (at.first == 0) model.add({at.tensor, of.weights, at.shape});
    }
    if (of.merged) return;
    for (const ParamSpec& p : trained_parameters(of.model))
      for (const Slot slot : {Slot::exported_first_moment, Slot::exported_second_moment})
        optimizer.add({moment_name(p.name, slot), of.moments, p.shape});
  }

  /// Where the tensors of the model are.
  fs::path weights(const CheckpointContent& of) const {
    return !of.merged && of.model.lora.on() ? partial / adapter_file::weights : partial;
  }

  /// So many elements from `first` on, `step` apart.
  Status put(TensorFiles& to, std::size_t entry, std::int64_t first, std::int64_t step,
             std::span<const std::byte> bytes) {
    if (Status ok = check_numbers(to.entries[entry], first, step, bytes); !ok) return ok;
    taken += count_of(to.entries[entry], std::ssize(bytes) / size_of(to.entries[entry].dtype));
    return to.writer->write(entry, first, step, bytes);
  }

  /// What follows one another in the tensor as it does in the parameter.
  Status put_in_order(TensorFiles& to, std::size_t entry, std::int64_t first, const Box& box,
                      std::span<const std::byte> source) {
    const std::int64_t width = size_of(to.entries[entry].dtype);
    for (std::int64_t i = 0; i < box.rows; ++i) {
      const auto row = source.subspan(static_cast<std::size_t>((box.src_offset + i * box.src_pitch) * width),
                                      static_cast<std::size_t>(box.cols * width));
      if (Status ok = put(to, entry, first + box.dst_offset + i * box.dst_pitch, 1, row); !ok) return ok;
    }
    return {};
  }

  /// What lies turned, or a step apart: along whichever of rows and columns is denser in the tensor.
  Status put_turned(TensorFiles& to, std::size_t entry, const StoredParameter& at, const Box& box,
                    std::span<const std::byte> source) {
    const ParameterBlock b = block_of(box, at.cols);
    const std::int64_t width = size_of(to.entries[entry].dtype);
    const bool down = b.cols == 1 || at.row_step < at.col_step;  // along a column
    const std::int64_t lines = down ? b.cols : b.rows, n = down ? b.rows : b.cols;
    std::vector<std::byte> line(static_cast<std::size_t>(n * width));
    for (std::int64_t j = 0; j < lines; ++j) {
      for (std::int64_t i = 0; i < n; ++i)
        std::memcpy(line.data() + i * width,
                    source.data() + (b.from + (down ? i * b.pitch + j : j * b.pitch + i)) * width,
                    static_cast<std::size_t>(width));
      const std::int64_t row = b.row + (down ? 0 : j), col = b.col + (down ? j : 0);
      if (Status ok = put(to, entry, at.element(row * at.cols + col), down ? at.row_step : at.col_step, line); !ok)
        return ok;
    }
    return {};
  }
};

CheckpointWriter::CheckpointWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}

CheckpointWriter::~CheckpointWriter() {
  if (!state_->is_first || state_->placed) return;
  state_->model.writer.reset(), state_->optimizer.writer.reset();  // they close their files
  remove_checkpoint(state_->partial);
}

Result<std::unique_ptr<CheckpointWriter>> CheckpointWriter::create(const fs::path& folder, const CheckpointContent& of,
                                                                   std::optional<TrainingState> training,
                                                                   std::span<const CarriedFile> carried) {
  auto state = std::make_unique<State>(of);
  state->folder = folder, state->is_first = true;
  state->training = std::move(training);
  std::error_code ec;
  // A folder of another process's number may be left over; what it holds is not ours to mix with.
  int number = ::getpid();
  do state->partial = folder.parent_path() / fmt::format(".{}.{}.partial", folder.filename().string(), number++);
  while (fs::exists(state->partial, ec) && !remove_if_ours_alone(state->partial));

  std::unique_ptr<CheckpointWriter> out(new CheckpointWriter(std::move(state)));
  State& s = *out->state_;
  const bool adapters = !of.merged && of.model.lora.on();
  const fs::path config = s.partial / (adapters ? adapter_file::config : checkpoint_file::config);
  const std::string said =
      adapters ? adapter_config_text(of.model, s.training->initial_weights) : config_text(of.model, of.weights);
  if (Status ok = write_file_atomic(config, said); !ok) return fail(std::move(ok.error()));
  for (const CarriedFile& file : carried)
    if (Status ok = write_file_atomic(s.partial / file.name, file.bytes); !ok) return fail(std::move(ok.error()));
  auto weights = SafetensorsWriter::create(s.weights(of), s.model.entries);
  if (!weights) return fail(std::move(weights.error()));
  s.model.writer.emplace(std::move(*weights));
  if (of.merged) return out;
  auto moments = SafetensorsWriter::create(s.partial / checkpoint_file::optimizer, s.optimizer.entries);
  if (!moments) return fail(std::move(moments.error()));
  s.optimizer.writer.emplace(std::move(*moments));
  return out;
}

Result<std::unique_ptr<CheckpointWriter>> CheckpointWriter::join(const fs::path& partial, const CheckpointContent& of) {
  auto state = std::make_unique<State>(of);
  state->partial = partial;
  auto weights = SafetensorsWriter::join(state->weights(of), state->model.entries);
  if (!weights) return fail(std::move(weights.error()));
  state->model.writer.emplace(std::move(*weights));
  if (!of.merged) {
    auto moments = SafetensorsWriter::join(partial / checkpoint_file::optimizer, state->optimizer.entries);
    if (!moments) return fail(std::move(moments.error()));
    state->optimizer.writer.emplace(std::move(*moments));
  }
  return std::unique_ptr<CheckpointWriter>(new CheckpointWriter(std::move(state)));
}

const fs::path& CheckpointWriter::partial() const { return state_->partial; }

bool CheckpointWriter::takes(const BoundOp& op) const { return state_->stored.contains(op.name()); }

Status CheckpointWriter::take(const BoundOp& op, const Places& places, std::span<const std::byte> source) {
  State& s = *state_;
  const auto slot = static_cast<Slot>(op->integer(Attr::slot));
  const std::string name = op.name();
  const bool weights = slot == Slot::exported;
  TensorFiles& files = weights ? s.model : s.optimizer;
  const StoredParameter& at = s.stored.at(name);
  const std::size_t entry = files.numbers.at(weights ? at.tensor : moment_name(name, slot));
  HB_CHECK(op->inputs[0].dtype == files.entries[entry].dtype, "{} of {} in {}", name,
           name_of(files.entries[entry].dtype), name_of(op->inputs[0].dtype));
  const std::int64_t width = size_of(files.entries[entry].dtype);
  for (const Box& box : boxes_of(*op, places)) {
    HB_CHECK((box.src_offset + (box.rows - 1) * box.src_pitch + box.cols) * width <= std::ssize(source),
             "a box of {} lies outside its tensor", name);
    const bool in_order = !weights || at.in_order();
    const Status done = in_order ? s.put_in_order(files, entry, weights ? at.first : 0, box, source)
                                 : s.put_turned(files, entry, at, box, source);
    if (!done) return done;
  }
  return {};
}

ElementCount CheckpointWriter::elements() const {
  ElementCount all = state_->model.elements();
  return all += state_->optimizer.elements();
}
ElementCount CheckpointWriter::taken() const { return state_->taken; }

Status CheckpointWriter::finish() {
  State& s = *state_;
  for (TensorFiles* files : {&s.model, &s.optimizer})
    if (files->writer)
      if (Status ok = files->writer->finish(); !ok) return ok;
  if (!s.is_first) return {};
  if (!s.training) return write_manifest(s.partial, 0);
  if (Status ok = write_file_atomic(s.partial / checkpoint_file::scenario, s.training->scenario); !ok) return ok;
  if (Status ok = write_file_atomic(s.partial / checkpoint_file::state, json_text(to_json(*s.training), 1) + "\n"); !ok)
    return ok;
  return write_manifest(s.partial, s.training->step);  // syncs the folder too
}

Status CheckpointWriter::place() {
  if (Status ok = put_in_place(state_->partial, state_->folder); !ok) return ok;
  state_->placed = true;
  return {};
}

std::vector<std::string> sweep_checkpoints(const fs::path& checkpoints) {
  static const std::regex partial(R"(\.(final|merged|step_\d+)\.\d+\.partial)"),
      aside(R"(\.(final|merged|step_\d+)\.previous)");
  std::vector<fs::path> found;
  std::error_code ec;
  for (const auto& entry : fs::directory_iterator(checkpoints, ec)) found.push_back(entry.path());
  std::vector<std::string> removed;
  for (const fs::path& path : found) {
    const std::string name = path.filename().string();
    std::smatch of;
    const bool previous = std::regex_match(name, of, aside);
    if (!previous && !std::regex_match(name, of, partial)) continue;
    const fs::path place = checkpoints / of[1].str();
    if (previous && !fs::exists(place, ec)) {
      fs::rename(path, place, ec);
      continue;
    }
    if (remove_if_ours_alone(path)) removed.push_back(name);
  }
  return removed;
}

bool remove_checkpoint(const fs::path& folder) {
  std::error_code ec;
  if (fs::symlink_status(folder, ec).type() != fs::file_type::directory) return false;
  std::vector<fs::path> files = entries_of(folder);
  std::erase_if(files, [](const fs::path& file) { return !is_our_file(file); });
  // The weights first: what is left is not to be taken for a whole one, for the manifest names them. What says that it
  // was one, and whose the other files are, goes last.
  const auto turn = [](const fs::path& file) {
    const std::string name = file.filename().string();
    if (name.starts_with("model") || name == adapter_file::weights) return 0;
    if (name == checkpoint_file::state) return 2;
    if (name == checkpoint_file::config || name == adapter_file::config) return 3;
    return name == checkpoint_file::manifest ? 4 : 1;
  };
  std::ranges::sort(files, {}, turn);
  for (const fs::path& file : files) fs::remove(file, ec);
  return fs::remove(folder, ec);  // unless somebody else has something in it
}

bool is_checkpoint(const fs::path& folder) {
  std::error_code ec;
  return fs::exists(folder / checkpoint_file::state, ec) && fs::exists(folder / checkpoint_file::scenario, ec);
}

Result<SavedCheckpoint> read_checkpoint(const fs::path& folder) {
  const fs::path path = folder / checkpoint_file::state;
  const auto text = read_file(path, std::int64_t{1} << 20);
  if (!text) return tl::unexpected(text.error());
  const auto json = parse_json(*text, path.string(), {}, "E423");
  if (!json) return tl::unexpected(json.error());
  const auto bad = [&](std::string why) {
    return fail(Diagnostic{.code = "E423",
                           .message = "the checkpoint's state is not what hotbunk writes: " + std::move(why),
                           .where = {path.string()},
                           .notes = {},
                           .help = "use another checkpoint, or start a new run from the weights: --set model=FOLDER"});
  };
  if (!json->is_object() || !json->contains("schema") || (*json)["schema"] != state_schema)
    return bad(fmt::format("its schema is not {}", state_schema));
  SavedCheckpoint out{.folder = folder, .state = {}, .has_moments = false};
  for (const auto& [key, to] : {std::pair{"step", &out.state.step},
                                {"optimizer_step", &out.state.optimizer_step},
                                {"seed", &out.state.seed},
                                {"sequences_taken", &out.state.sequences_taken}}) {
    if (!json->contains(key) || !(*json)[key].is_number_unsigned()) return bad(fmt::format("no number '{}'", key));
    *to = (*json)[key].get<std::int64_t>();
  }
  for (const auto& [key, to] : {std::pair{"initial_weights", &out.state.initial_weights},
                                {"initial_digest", &out.state.initial_digest},
                                {"data_digest", &out.state.data_digest},
                                {"plan_hash", &out.state.plan_hash}}) {
    if (!json->contains(key) || !(*json)[key].is_string()) return bad(fmt::format("no text '{}'", key));
    *to = (*json)[key].get<std::string>();
  }
  for (const auto& [key, to] : {std::pair{"bf16_products", &out.state.arithmetic.bf16_products},
                                {"instruction_sets", &out.state.arithmetic.instruction_sets}}) {
    if (!json->contains(key)) continue;  // an earlier version's says nothing of them
    if (!(*json)[key].is_string()) return bad(fmt::format("'{}' is no text", key));
    *to = (*json)[key].get<std::string>();
  }
  if (out.state.step < 1 || out.state.step > INT32_MAX) return bad(fmt::format("step {}", out.state.step));
  auto scenario = read_file(folder / checkpoint_file::scenario, std::int64_t{16} << 20);
  if (!scenario) return tl::unexpected(scenario.error());
  out.state.scenario = std::move(*scenario);
  std::error_code ec;
  out.has_moments = fs::exists(folder / checkpoint_file::optimizer, ec);
  return out;
}

}  // namespace hotbunk

#include "rl/checkpoint.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
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

/// A file of its folder that a checkpoint may have. What is carried along has names that anybody's file may have: where
/// there is a manifest, it is ours if that says so.
bool is_our_file(const fs::path& path) {
  static const std::regex names(
      R"(config\.json|adapter_config\.json|adapter_model\.safetensors|scenario\.yaml|state\.json|manifest\.json|optimizer\.safetensors|model\.safetensors|model\.safetensors\.index\.json|model-\d{5}-of-\d{5}\.safetensors)");
  std::error_code ec;
  const std::string name = path.filename().string();
  return (std::regex_match(name, names) || is_partial_name(name) ||
          (is_carried(name) && may_be_listed(path.parent_path(), name))) &&
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

/// The checkpoint that was there goes; what its user has put beside our files moves to the one that took its place.
void retire(const fs::path& old, const fs::path& folder) {
  std::error_code ec;
  for (const fs::path& path : entries_of(old))
    if (const fs::path place = folder / path.filename(); !is_our_file(path) && !fs::exists(place, ec))
      fs::rename(path, place, ec);
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

/// E631: readers refuse such weights, and the checkpoint that they would replace may be the last good one.
Status check_numbers(const TensorEntry& entry, std::span<const std::byte> bytes) {
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

nlohmann::ordered_json to_json(const TrainingState& s) {
  return {{"schema", state_schema},
          {"step", s.step},
          {"optimizer_step", s.optimizer_step},
          {"seed", s.seed},
          {"sequences_taken", s.sequences_taken},
          {"initial_weights", s.initial_weights},
          {"initial_digest", s.initial_digest},
          {"data_digest", s.data_digest},
          {"plan_hash", s.plan_hash}};
}

}  // namespace

std::string moment_name(const std::string& parameter, Slot slot) {
  const bool first = slot == Slot::first_moment || slot == Slot::exported_first_moment;
  return parameter + (first ? ".exp_avg" : ".exp_avg_sq");
}

/// One safetensors file in the making.
struct TensorStream {
  std::vector<TensorEntry> entries;
  std::optional<SafetensorsWriter> writer;
  std::size_t next = 0;
  std::vector<std::byte> whole;  // of the next tensor, as far as its parameters have come
  std::int64_t covered = 0;      // its elements that have
};

struct CheckpointWriter::State {
  fs::path folder, partial;
  std::optional<TrainingState> training;
  TensorStream model, optimizer;
  std::map<std::string, StoredParameter> stored;  // by parameter; moments are stored as they are
  bool placed = false;
};

CheckpointWriter::CheckpointWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}

CheckpointWriter::~CheckpointWriter() {
  if (state_->placed) return;
  state_->model.writer.reset(), state_->optimizer.writer.reset();  // they close their files
  remove_checkpoint(state_->partial);
}

Result<std::unique_ptr<CheckpointWriter>> CheckpointWriter::create(const fs::path& folder, const ModelSpec& model,
                                                                   const Program& program, std::int16_t phase,
                                                                   std::optional<TrainingState> training,
                                                                   std::span<const CarriedFile> carried) {
  std::map<std::string, ParamSpec> parameters;
  for (const ParamSpec& p : training ? saved_parameters(model) : parameters_of(model)) parameters.emplace(p.name, p);
  const bool adapters = training && model.lora.on();
  auto state = std::make_unique<State>();
  for (const Block& block : program.phases[static_cast<std::size_t>(phase)])
    each_op(program, block, [&](const BoundOp& op) {
      if (op->kind != OpKind::fetch) return;
      const auto slot = static_cast<Slot>(op->integer(Attr::slot));
      const bool weights = slot == Slot::exported;
      const std::string name = op.name();
      const auto found = parameters.find(name);
      if (found == parameters.end()) return;  // another writer's
      const ParamSpec& parameter = found->second;
      if (!weights) {
        state->optimizer.entries.push_back({moment_name(name, slot), op->inputs[0].dtype, parameter.shape});
        return;
      }
      const StoredParameter& at = state->stored[name] = stored_trained(model, parameter);
      if (at.first == 0) state->model.entries.push_back({at.tensor, op->inputs[0].dtype, at.shape});
    });
  HB_CHECK(state->stored.size() == parameters.size() &&
               state->optimizer.entries.size() == (training ? 2 * trained_parameters(model).size() : 0),
           "{} of {} parameters and {} of their moments exported", state->stored.size(), parameters.size(),
           state->optimizer.entries.size());
  state->folder = folder;
  state->training = std::move(training);
  std::error_code ec;
  // A folder of another process's number may be left over; what it holds is not ours to mix with.
  int number = ::getpid();
  do state->partial = folder.parent_path() / fmt::format(".{}.{}.partial", folder.filename().string(), number++);
  while (fs::exists(state->partial, ec) && !remove_if_ours_alone(state->partial));

  std::unique_ptr<CheckpointWriter> out(new CheckpointWriter(std::move(state)));
  State& s = *out->state_;
  const DType dtype = s.model.entries.front().dtype;
  const fs::path config = s.partial / (adapters ? adapter_file::config : checkpoint_file::config);
  const std::string said =
      adapters ? adapter_config_text(model, s.training->initial_weights) : config_text(model, dtype);
  if (Status ok = write_file_atomic(config, said); !ok) return fail(std::move(ok.error()));
  for (const CarriedFile& file : carried)
    if (Status ok = write_file_atomic(s.partial / file.name, file.bytes); !ok) return fail(std::move(ok.error()));
  auto weights = SafetensorsWriter::create(adapters ? s.partial / adapter_file::weights : s.partial, s.model.entries);
  if (!weights) return fail(std::move(weights.error()));
  s.model.writer.emplace(std::move(*weights));
  if (!s.training) return out;
  auto moments = SafetensorsWriter::create(s.partial / checkpoint_file::optimizer, s.optimizer.entries);
  if (!moments) return fail(std::move(moments.error()));
  s.optimizer.writer.emplace(std::move(*moments));
  return out;
}

bool CheckpointWriter::takes(const BoundOp& op) const { return state_->stored.contains(op.name()); }

Status CheckpointWriter::take(const BoundOp& op, std::span<const std::byte> source) {
  const auto slot = static_cast<Slot>(op->integer(Attr::slot));
  const std::string name = op.name();
  const bool weights = slot == Slot::exported;
  TensorStream& stream = weights ? state_->model : state_->optimizer;
  const StoredParameter* at = weights ? &state_->stored.at(name) : nullptr;
  HB_CHECK(stream.next < stream.entries.size() &&
               stream.entries[stream.next].name == (weights ? at->tensor : moment_name(name, slot)),
           "'{}' out of order", name);
  const TensorEntry& entry = stream.entries[stream.next];
  const std::int64_t width = size_of(entry.dtype);
  std::int64_t elements = 1;
  for (std::int64_t extent : entry.shape) elements *= extent;
  stream.whole.resize(static_cast<std::size_t>(elements * width));
  const auto copy = [&](std::int64_t from, std::int64_t to, std::int64_t count) {
    const std::int64_t bytes = count * width;
    HB_CHECK(from >= 0 && from * width + bytes <= static_cast<std::int64_t>(source.size()) && to >= 0 &&
                 to * width + bytes <= static_cast<std::int64_t>(stream.whole.size()),
             "a box of {} lies outside its tensor", name);
    std::memcpy(stream.whole.data() + to * width, source.data() + from * width, static_cast<std::size_t>(bytes));
    stream.covered += count;
  };
  for (const Box& box : boxes_of(*op, {}))  // from what was gathered, which is the same on every rank
    for (std::int64_t i = 0; i < box.rows; ++i) {
      const std::int64_t from = box.src_offset + i * box.src_pitch, to = box.dst_offset + i * box.dst_pitch;
      if (at == nullptr) copy(from, to, box.cols);
      else if (at->in_order()) copy(from, at->element(to), box.cols);
      else
        for (std::int64_t j = 0; j < box.cols; ++j) copy(from + j, at->element(to + j), 1);
    }
  HB_CHECK(stream.covered <= elements, "{} of {} elements of {} exported", stream.covered, elements, entry.name);
  if (stream.covered < elements) return {};  // what stands behind it in the tensor comes next
  const std::vector<std::byte> whole = std::exchange(stream.whole, {});
  stream.covered = 0, ++stream.next;
  if (Status ok = check_numbers(entry, whole); !ok) return ok;
  return stream.writer->write(whole);
}

Status CheckpointWriter::finish() {
  State& s = *state_;
  for (TensorStream* stream : {&s.model, &s.optimizer}) {
    if (!stream->writer) continue;
    HB_CHECK(stream->next == stream->entries.size(), "{} of {} tensors arrived", stream->next, stream->entries.size());
    if (Status ok = stream->writer->finish(); !ok) return ok;
  }
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
  // The manifest first: what is left of a folder is not to be taken for a whole one.
  std::ranges::sort(files, std::ranges::greater(),
                    [](const fs::path& file) { return file.filename() == checkpoint_file::manifest; });
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
  if (out.state.step < 1 || out.state.step > INT32_MAX) return bad(fmt::format("step {}", out.state.step));
  auto scenario = read_file(folder / checkpoint_file::scenario, std::int64_t{16} << 20);
  if (!scenario) return tl::unexpected(scenario.error());
  out.state.scenario = std::move(*scenario);
  std::error_code ec;
  out.has_moments = fs::exists(folder / checkpoint_file::optimizer, ec);
  return out;
}

}  // namespace hotbunk

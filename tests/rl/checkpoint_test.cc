// Checkpoints are there whole or not at all, whenever their writer is killed; what they hold is verified before it is
// believed.
#include "rl/checkpoint.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

#include "base/file.h"
#include "rl/manifest.h"
#include "rl/weights.h"
#include "spec/family.h"
#include "tests/blocks.h"
#include "tests/json.h"
#include "tests/moves.h"

using namespace hotbunk;
namespace fs = std::filesystem;

namespace {

struct Folder {
  fs::path path = fs::temp_directory_path() / fmt::format("hotbunk_checkpoint_test.{}", ::getpid());
  Folder() { fs::remove_all(path), fs::create_directories(path); }
  ~Folder() { fs::remove_all(path); }
};

ModelSpec tiny_model() {
  ModelSpec m;
  m.family = find_family("llama");
  m.hidden = 8, m.intermediate = 16, m.layers = 1, m.heads = 2, m.kv_heads = 2, m.head_dim = 4, m.vocab = 16;
  m.max_position = 32, m.tie_embeddings = true;
  return m;
}

/// A program whose only phase fetches every parameter and its moments from a tensor of its own.
Program export_program(const ModelSpec& m) {
  Program program = test::empty_program();
  std::vector<Op> ops;
  for (const ParamSpec& p : parameters_of(m))
    for (Slot slot : {Slot::exported, Slot::exported_first_moment, Slot::exported_second_moment}) {
      Op op;
      op.kind = OpKind::fetch;
      op.name = p.name;
      op.inputs = {Tensor{}};
      op.inputs[0].dtype = DType::f32;
      op.attrs = {{Attr::slot, static_cast<std::int64_t>(slot)}};
      op.moves = test::moves_of({{.src_pitch = p.numel(), .dst_pitch = p.numel(), .rows = 1, .cols = p.numel()}});
      ops.push_back(op);
    }
  program.phases = {{test::block_of(program, "export", ops)}};
  return program;
}

/// A checkpoint whose every number is `version` plus its slot.
Status write_checkpoint(const fs::path& folder, int version, const std::vector<CarriedFile>& carried = {}) {
  const ModelSpec m = tiny_model();
  const Program program = export_program(m);
  const CheckpointContent content{.model = m};
  TrainingState state;
  state.step = state.optimizer_step = version;
  state.scenario = "name: tiny\n";
  auto writer = CheckpointWriter::create(folder, content, state, carried);
  if (!writer) return tl::unexpected(writer.error());
  Status taken;
  each_op(program, program.phases[0][0], [&](const BoundOp& op) {
    const std::vector<float> values(static_cast<std::size_t>(boxes_of(*op, {})[0].cols),
                                    static_cast<float>(version * 100 + op->integer(Attr::slot)));
    if (taken) taken = (*writer)->take(op, {}, std::as_bytes(std::span(values)));
  });
  if (!taken) return taken;
  if (Status ok = (*writer)->finish(); !ok) return ok;
  return (*writer)->place();
}

/// The same fetches, each of its half of the rows; `places`: the place of the rank in family 0.
Status write_half(CheckpointWriter& writer, std::int32_t place, int version) {
  const ModelSpec m = tiny_model();
  Program program = test::empty_program();
  std::vector<Op> ops;
  for (const ParamSpec& p : parameters_of(m))
    for (Slot slot : {Slot::exported, Slot::exported_first_moment, Slot::exported_second_moment}) {
      const std::int64_t rows = p.shape[0], cols = p.numel() / rows, half = rows / 2;
      Op op;
      op.kind = OpKind::fetch, op.name = p.name, op.inputs = {Tensor{}};
      op.inputs[0].dtype = DType::f32;
      op.attrs = {{Attr::slot, static_cast<std::int64_t>(slot)}};
      Move move;
      move.from = {0, {0, half, 0, cols, 0, cols}, {}};
      move.from.parts = {.who = Holds::mine, .family = 0, .count = 2, .rows = half, .last_row = rows, .within = {}};
      move.to = {0, {0, rows, 0, cols, 0, cols}, {}};
      op.moves = {move};
      ops.push_back(op);
    }
  program.phases = {{test::block_of(program, "export", ops)}};
  Status taken;
  each_op(program, program.phases[0][0], [&](const BoundOp& op) {
    const std::vector<float> values(static_cast<std::size_t>(boxes_of(*op, {place})[0].elements()),
                                    static_cast<float>(version * 100 + op->integer(Attr::slot)));
    if (taken) taken = writer.take(op, {place}, std::as_bytes(std::span(values)));
  });
  return taken;
}

/// The step that a whole checkpoint is of; 0: it is not whole.
std::int64_t whole_step(const fs::path& folder) {
  if (!fs::exists(folder / checkpoint_file::manifest) || !verify_manifest(folder)) return 0;
  const auto read = read_checkpoint(folder);
  return read && read->has_moments ? read->state.step : 0;
}

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

/// Runs `body` in a child that is killed when its system calls have begun or ended `stops` times; false when it ended
/// before. `no_exchange`: its renameat2 says that the kernel has no such call, as NFS does of its flags.
bool killed_after(int stops, bool no_exchange, const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(7);
    ::raise(SIGSTOP);
    body();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  for (int i = 0; WIFSTOPPED(status); ++i) {
    if (i == stops) ::kill(child, SIGKILL);
#ifdef __x86_64__
    user_regs_struct registers{};
    if (no_exchange && ::ptrace(PTRACE_GETREGS, child, nullptr, &registers) == 0 &&
        registers.orig_rax == SYS_renameat2) {
      registers.orig_rax = static_cast<decltype(registers.orig_rax)>(-1);
      ::ptrace(PTRACE_SETREGS, child, nullptr, &registers);
    }
#endif
    ::ptrace(PTRACE_SYSCALL, child, nullptr, nullptr);
    ::waitpid(child, &status, 0);
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 7) throw std::runtime_error("this system does not let us trace");
  return WIFSIGNALED(status);
}

void kill_everywhere(bool no_exchange) {
  const Folder folder;
  const fs::path saved = folder.path / "saved", checkpoints = folder.path / "checkpoints";
  const fs::path place = checkpoints / "final";
  REQUIRE(write_checkpoint(saved, 1));
  std::set<std::int64_t> seen;
  int kills = 0;
  for (bool killed = true; killed; ++kills) {
    fs::remove_all(checkpoints);
    fs::create_directories(checkpoints);
    fs::copy(saved, place);
    killed = killed_after(kills, no_exchange, [&] {
      if (!write_checkpoint(place, 2)) ::_exit(8);
    });
    INFO("killed after " << kills << " stops");
    // What does not hide is whole at any moment; without an exchange there may be nothing until somebody looks.
    if (!no_exchange || fs::exists(place)) REQUIRE(whole_step(place) > 0);
    sweep_checkpoints(checkpoints);
    const std::int64_t step = whole_step(place);
    REQUIRE((step == 1 || step == 2));
    seen.insert(step);
    REQUIRE(names_in(checkpoints) == std::set<std::string>{"final"});
    if (!killed) CHECK(step == 2);
  }
  CHECK(kills > 50);
  CHECK(seen.size() == 2);
}

}  // namespace

TEST_CASE("a checkpoint's writer killed at any system call leaves the one before or the new one, whole") {
  kill_everywhere(false);
}

#ifdef __x86_64__
TEST_CASE("and so where folders cannot be exchanged") { kill_everywhere(true); }
#endif

TEST_CASE("only what is ours is swept away") {
  const Folder folder;
  const auto partial = [&](const std::string& name, const std::vector<std::string>& files) {
    for (const std::string& file : files) REQUIRE(write_file_atomic(folder.path / name / file, "x"));
    fs::create_directories(folder.path / name);
  };
  partial(".step_3.77.partial", {"config.json", ".0123456789abcdef.partial", "model-00001-of-00002.safetensors"});
  partial(".final.8.partial", {});
  partial(".step_4.77.partial", {"config.json", "notes.txt"});
  partial(".mine.77.partial", {"config.json"});
  partial("step_5", {"config.json"});
  partial(".step_6.previous", {"config.json"});
  partial("step_6", {"config.json"});
  partial(".step_7.previous", {"config.json"});
  const auto removed = sweep_checkpoints(folder.path);
  CHECK(std::set<std::string>(removed.begin(), removed.end()) ==
        std::set<std::string>{".step_3.77.partial", ".final.8.partial", ".step_6.previous"});
  CHECK(names_in(folder.path) ==
        std::set<std::string>{".step_4.77.partial", ".mine.77.partial", "step_5", "step_6", "step_7"});
  CHECK(sweep_checkpoints(folder.path / "nowhere").empty());
}

TEST_CASE("what somebody has put into a checkpoint's folder stays there when another takes its place") {
  const Folder folder;
  const fs::path place = folder.path / "final";
  REQUIRE(write_checkpoint(place, 1));
  REQUIRE(write_file_atomic(place / "notes.txt", "mine"));
  REQUIRE(write_checkpoint(place, 2));
  CHECK(whole_step(place) == 2);
  CHECK(*read_file(place / "notes.txt") == "mine");
  CHECK(names_in(folder.path) == std::set<std::string>{"final"});
}

TEST_CASE("what stands beside a model's weights comes along, and a user's file of such a name is not ours") {
  const Folder folder;
  const fs::path model = folder.path / "model", place = folder.path / "final";
  const std::vector<std::string> along = {"added_tokens.json", "chat_template.jinja",     "generation_config.json",
                                          "merges.txt",        "special_tokens_map.json", "tokenizer.json",
                                          "tokenizer.model",   "tokenizer.model.v3",      "tokenizer_config.json",
                                          "vocab.json"};
  for (const std::string& name : along) REQUIRE(write_file_atomic(model / name, "of " + name));
  for (const char* other :
       {"README.md", "config.json", "my_tokenizer.json", "model.safetensors", "onnx/tokenizer.json"})
    REQUIRE(write_file_atomic(model / other, "stays"));
  const auto carried = read_carried(model);
  REQUIRE(carried);
  std::vector<std::string> names;
  for (const CarriedFile& file : *carried) names.push_back(file.name);
  CHECK(names == along);
  CHECK(read_carried(model / "model.safetensors")->size() == along.size());
  CHECK(read_carried("")->empty());
  REQUIRE(write_checkpoint(place, 1, *carried));
  for (const std::string& name : along) CHECK(*read_file(place / name) == "of " + name);
  REQUIRE(write_file_atomic(place / "tokenizer.json", "changed"));
  const Status refused = verify_manifest(place);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().front().message.find("tokenizer.json has another size") != std::string::npos);
  // The next one has its own; of a model without any, what somebody has put there stays.
  REQUIRE(write_checkpoint(place, 2));
  CHECK(names_in(place) == std::set<std::string>{"config.json", "manifest.json", "model.safetensors",
                                                 "optimizer.safetensors", "scenario.yaml", "state.json"});
  REQUIRE(write_file_atomic(place / "tokenizer.json", "mine"));
  REQUIRE(write_checkpoint(place, 3));
  CHECK(*read_file(place / "tokenizer.json") == "mine");
  CHECK_FALSE(remove_checkpoint(place));
  CHECK(names_in(place) == std::set<std::string>{"tokenizer.json"});
  CHECK_FALSE(remove_checkpoint(place));  // nor the second time, when no manifest says that it is not ours
  CHECK(*read_file(place / "tokenizer.json") == "mine");
  const fs::path run = folder.path / "run";
  REQUIRE(write_file_atomic(run / ".step_3.77.partial/config.json", "half a checkpoint"));
  REQUIRE(write_file_atomic(run / ".step_3.77.partial/tokenizer.json", "half a checkpoint"));
  REQUIRE(write_file_atomic(run / ".step_4.77.partial/tokenizer.json", "of somebody"));
  CHECK(sweep_checkpoints(run) == std::vector<std::string>{".step_3.77.partial"});
  CHECK(*read_file(run / ".step_4.77.partial/tokenizer.json") == "of somebody");
}

TEST_CASE("a user's tokenizer stays when the next checkpoint brings one") {
  const Folder folder;
  const fs::path place = folder.path / "final";
  const std::vector<CarriedFile> carried = {{"tokenizer.json", "ours"}};
  const auto is_both = [&](const char* theirs, const char* name) {
    CHECK(*read_file(place / "tokenizer.json") == "ours");
    CHECK(*read_file(place / name) == theirs);
    CHECK(names_in(folder.path) == std::set<std::string>{"final"});
  };
  REQUIRE(write_checkpoint(place, 1));
  REQUIRE(write_file_atomic(place / "tokenizer.json", "mine"));
  REQUIRE(write_checkpoint(place, 2, carried));
  is_both("mine", "tokenizer.json.previous");
  // It goes on to each that follows; ours does not.
  REQUIRE(write_checkpoint(place, 3, carried));
  is_both("mine", "tokenizer.json.previous");
  CHECK(names_in(place).size() == 8);
  // What an overwritten run leaves: a folder with the user's file alone.
  fs::remove_all(place);
  REQUIRE(write_file_atomic(place / "tokenizer.json", "alone"));
  REQUIRE(write_checkpoint(place, 4, carried));
  is_both("alone", "tokenizer.json.previous");
  // And where a removal has been killed, at any file.
  bool killed = true;
  for (int stops = 0; killed; ++stops) {
    fs::remove_all(place);
    REQUIRE(write_checkpoint(place, 5));
    REQUIRE(write_file_atomic(place / "tokenizer.json", "mine"));
    killed = killed_after(stops, false, [&] { remove_checkpoint(place); });
    INFO("killed after " << stops << " stops");
    CHECK_FALSE(remove_checkpoint(place));
    REQUIRE(*read_file(place / "tokenizer.json") == "mine");
    REQUIRE(names_in(place).size() == 1);
  }
}

TEST_CASE("what two ranks write of their halves is what one writes, and a part that has no folder is refused") {
  const Folder folder;
  REQUIRE(write_checkpoint(folder.path / "one", 4));
  const ModelSpec m = tiny_model();
  TrainingState state;
  state.step = state.optimizer_step = 4;
  state.scenario = "name: tiny\n";
  auto first = CheckpointWriter::create(folder.path / "two", {.model = m}, state, {});
  REQUIRE(first);
  auto second = CheckpointWriter::join((*first)->partial(), {.model = m});
  REQUIRE(second);
  REQUIRE(write_half(**second, 1, 4));
  REQUIRE((*second)->finish());
  REQUIRE(write_half(**first, 0, 4));
  CHECK((*first)->taken() == (*second)->taken());
  ElementCount written = (*first)->taken();
  CHECK_FALSE(written == (*first)->elements());
  written += (*second)->taken();
  CHECK(written == (*first)->elements());
  second->reset();  // takes nothing away
  REQUIRE((*first)->finish());
  REQUIRE((*first)->place());
  CHECK(whole_step(folder.path / "two") == 4);
  for (const std::string& name : names_in(folder.path / "one"))
    CHECK(*read_file(folder.path / "one" / name) == *read_file(folder.path / "two" / name));
  auto late = CheckpointWriter::join(folder.path / ".two.1.partial", {.model = m});
  REQUIRE(late);
  const Status refused = write_half(**late, 1, 4);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().front().code == "E103");
  CHECK(refused.error().front().where.file == (folder.path / ".two.1.partial/model.safetensors").string());
}

TEST_CASE("a failed write leaves nothing behind") {
  const Folder folder;
  const fs::path place = folder.path / "final";
  const ModelSpec m = tiny_model();
  {
    auto writer = CheckpointWriter::create(place, {.model = m}, TrainingState{}, {});
    REQUIRE(writer);
    CHECK(names_in(folder.path).size() == 1);
  }
  CHECK(names_in(folder.path).empty());
}

TEST_CASE("a checkpoint that is not as it was written is refused, and the file that differs is named") {
  const Folder folder;
  const fs::path place = folder.path / "final";
  REQUIRE(write_checkpoint(place, 3));
  REQUIRE(verify_manifest(place));
  ModelSpec m = tiny_model();
  m.weights_path = place.string();
  REQUIRE(ParameterSource::open(m, 0));
  const auto manifest = json_from<nlohmann::json>(*read_file(place / "manifest.json"));
  CHECK(manifest["schema"] == "hotbunk.checkpoint/1");
  CHECK(manifest["step"] == 3);
  CHECK(manifest["scenario"] == *digest_of_file(place / "scenario.yaml"));
  for (const char* name :
       {"config.json", "model.safetensors", "optimizer.safetensors", "scenario.yaml", "state.json"}) {
    INFO(name);
    const std::string text = *read_file(place / name);
    const auto refused = [&](const std::string& why) {
      const auto opened = ParameterSource::open(m, 0);
      REQUIRE_FALSE(opened);
      CHECK(opened.error().front().code == "E421");
      CHECK(opened.error().front().message.find(std::string(name) + " " + why) != std::string::npos);
      CHECK(opened.error().front().where.file == (place / name).string());
    };
    std::string changed = text;
    changed.back() ^= 1;
    REQUIRE(write_file_atomic(place / name, changed));
    refused("holds other bytes");
    REQUIRE(write_file_atomic(place / name, text + " "));
    refused("has another size");
    fs::remove(place / name);
    if (name == std::string("optimizer.safetensors")) CHECK(verify_manifest(place));
    else refused("is missing");
    REQUIRE(write_file_atomic(place / name, text));
    REQUIRE(ParameterSource::open(m, 0));
  }
  for (const char* text : {"", "[]", "{\"schema\": \"hotbunk.checkpoint/1\"}",
                           "{\"schema\": \"hotbunk.checkpoint/1\", \"files\": [{\"name\": \"../x\", \"bytes\": 1, "
                           "\"xxh3_128\": \"\"}]}"}) {
    REQUIRE(write_file_atomic(place / "manifest.json", text));
    const Status refused = verify_manifest(place);
    REQUIRE_FALSE(refused);
    CHECK(refused.error().front().code == "E421");
  }
  fs::remove(place / "manifest.json");  // as any Hugging Face folder
  CHECK(ParameterSource::open(m, 0));
}

TEST_CASE("moments come back by parameter; without a file they are zeros") {
  const Folder folder;
  const fs::path place = folder.path / "step_2";
  REQUIRE(write_checkpoint(place, 2));
  const ModelSpec m = tiny_model();
  const auto moments = MomentSource::open(place / checkpoint_file::optimizer, m);
  REQUIRE(moments);
  const std::vector<Box> boxes = {
      {.src_offset = 3, .src_pitch = 8, .dst_offset = 1, .dst_pitch = 4, .rows = 2, .cols = 3}};
  const auto read = [&](const MomentSource& source, Slot slot) {
    std::vector<float> out(9, -1.0f);
    source.read("model.embed_tokens.weight", slot, boxes, DType::f32, std::as_writable_bytes(std::span(out)));
    return out;
  };
  const float second = 200.0f + static_cast<float>(Slot::exported_second_moment);
  CHECK(read(*moments, Slot::second_moment) ==
        std::vector<float>{0, second, second, second, 0, second, second, second, 0});
  CHECK(read(MomentSource{}, Slot::first_moment) == std::vector<float>(9, 0.0f));
  ModelSpec other = m;
  other.vocab = 17;
  const auto refused = MomentSource::open(place / checkpoint_file::optimizer, other);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().front().code == "E407");
}

TEST_CASE("a state that hotbunk did not write is refused") {
  const Folder folder;
  const fs::path place = folder.path / "final";
  REQUIRE(write_checkpoint(place, 3));
  CHECK(is_checkpoint(place));
  const auto good = read_checkpoint(place);
  REQUIRE(good);
  CHECK((good->state.step == 3 && good->state.optimizer_step == 3 && good->has_moments));
  CHECK(good->state.scenario == "name: tiny\n");
  const std::string text = *read_file(place / "state.json");
  for (const auto& [from, to] : {std::pair<std::string, std::string>{"\"step\": 3", "\"step\": 0"},
                                 {"\"step\": 3", "\"step\": -1"},
                                 {"\"step\": 3", "\"step\": 99999999999"},
                                 {"training-state/1", "training-state/9"},
                                 {"\"plan_hash\": \"\"", "\"plan_hash\": 4"},
                                 {"\"bf16_products\": \"\"", "\"bf16_products\": 5"},
                                 {"\"instruction_sets\": \"\"", "\"instruction_sets\": null"},
                                 {"{", ""}}) {
    INFO(to);
    std::string bad = text;
    bad.replace(bad.find(from), from.size(), to);
    REQUIRE(write_file_atomic(place / "state.json", bad));
    const auto refused = read_checkpoint(place);
    REQUIRE_FALSE(refused);
    CHECK(refused.error().front().code == "E423");
  }
}

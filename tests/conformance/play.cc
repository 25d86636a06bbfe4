#include "tests/conformance/play.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/json.h"
#include "exec/session.h"
#include "tests/blocks.h"
#include "trace/merge.h"
#include "trace/trace_json.h"

namespace hotbunk::conformance {
namespace {

/// Blocks once, in order; feeds what the script says, keeps what is fetched.
class Exchange final : public Driver {
 public:
  explicit Exchange(const Script& script) : script_(script) {}

  std::optional<Args> next(Rank, std::int32_t step, std::int16_t) override {
    Args args;
    args.step = step;
    args.sizes = script_.sizes;
    return args;
  }
  void feed(Rank rank, const BoundOp& bound, const Args&, std::span<std::byte> to) override {
    const std::string name = bound.name();
    if (name == script_.failing_feed) throw RuntimeFailure("the driver has no data");
    if (name == script_.held_feed) wait_for_host();
    if (const auto slow = script_.slow_feeds.find(name); slow != script_.slow_feeds.end())
      std::this_thread::sleep_for(std::chrono::milliseconds(slow->second));
    auto data = script_.feeds.find(fmt::format("{}@{}", name, rank));
    if (data == script_.feeds.end()) data = script_.feeds.find(name);
    if (data == script_.feeds.end()) throw RuntimeFailure(fmt::format("the script has no {}", name));
    HB_CHECK(data->second.size() == to.size(), "{}: {} B for {}", name, data->second.size(), to.size());
    std::ranges::copy(data->second, to.begin());
  }
  void fetch(Rank rank, const BoundOp& bound, const Args&, std::span<const std::byte> from) override {
    Bytes bytes(from.begin(), from.end());
    const std::lock_guard lock(mutex_);
    fetched_[fmt::format("{}@{}", bound.name(), rank)] = std::move(bytes);
  }
  /// Nobody wants results, so the block has been asked for and nothing more.
  void completed(Rank, const Args&, std::int16_t) override {
    std::lock_guard lock(mutex_);
    asked_ = true;
    all_asked_.notify_all();
  }
  bool wants_results() const override { return false; }
  void report(Trace&) const override {}

  const std::map<std::string, Bytes>& fetched() const { return fetched_; }

 private:
  void wait_for_host() {
    std::unique_lock lock(mutex_);
    if (!all_asked_.wait_for(lock, std::chrono::seconds(10), [&] { return asked_; }))
      throw RuntimeFailure("the host waits for what it has asked for, before it has asked for all");
  }

  const Script& script_;
  std::mutex mutex_;
  std::condition_variable all_asked_;
  bool asked_ = false;
  std::map<std::string, Bytes> fetched_;  // streams fetch at the same time
};

nlohmann::json said_of(const Result<Trace>& trace, const Exchange& driver) {
  nlohmann::json said{{"failure", ""}, {"fetched", nlohmann::json::object()}};
  if (trace) said["trace"] = trace_to_json(*trace, "");
  else said["failure"] = render(trace.error());
  for (const auto& [name, bytes] : driver.fetched()) {
    auto& list = said["fetched"][name] = nlohmann::json::array();
    for (const std::byte b : bytes) list.push_back(static_cast<int>(b));
  }
  return said;
}

/// An interpreter may refuse either way.
template <class F>
Result<Trace> caught(F&& play) {
  try {
    return play();
  } catch (const std::exception& e) {
    return fail(Diagnostic{.code = "E000", .message = e.what(), .where = {}, .notes = {}, .help = ""});
  }
}

RunOptions options_of(const Script& script, const Process& process) {
  return {.steps = script.steps, .local_ranks = process.ranks};
}

nlohmann::json play_here(Process& process, const Plan& plan, const Script& script) {
  Exchange driver(script);
  Backend& backend = process.backend(driver);
  const auto trace = caught([&] { return execute(plan, backend, driver, options_of(script, process)); });
  return said_of(trace, driver);
}

nlohmann::json play_suspended_here(Process& process, const Plan& plan, const Script& script, std::int16_t before,
                                   const std::function<void()>& meanwhile) {
  Exchange driver(script);
  Backend& backend = process.backend(driver);
  bool reached = false;
  const auto trace = caught([&]() -> Result<Trace> {
    auto devices = backend.open(plan, process.ranks);
    if (!devices) return fail(devices.error());
    RunOptions options = options_of(script, process);
    options.on_phase = [&](std::int32_t, std::int16_t phase) { reached |= phase == before; };
    Session session(plan, driver, std::move(*devices), options);
    for (bool suspended = false;;) {
      if (reached && !suspended) {
        if (auto s = session.settle(); !s) return fail(s.error());
        suspended = true;
        meanwhile();
      }
      const auto more = session.advance();
      if (!more) return fail(more.error());
      if (!*more) return backend.take_trace();
    }
  });
  HB_CHECK(!trace || reached, "phase {} never began", before);
  return said_of(trace, driver);
}

/// What processes said, together.
Played played_of(const std::vector<nlohmann::json>& processes) {
  Played out;
  std::vector<Trace> parts;
  for (const nlohmann::json& said : processes) {
    if (said.is_string()) {  // lost
      out.failures.push_back(said);
      continue;
    }
    out.failures.push_back(said["failure"]);
    for (const auto& [name, list] : said["fetched"].items())
      for (const auto& b : list) out.fetched[name].push_back(static_cast<std::byte>(b.get<int>()));
    if (!said.contains("trace")) continue;
    auto part = trace_from_json(said["trace"].get<std::string>(), "part");
    HB_CHECK(part.has_value(), "a trace that cannot be read");
    parts.push_back(std::move(part->trace));
  }
  if (out.went_well()) out.trace = merge_traces(parts);
  return out;
}

/// Of each process, the part of what it said that has this key; what it said if it was lost.
Played played_of(const std::vector<std::string>& texts, const char* key) {
  std::vector<nlohmann::json> processes;
  for (const std::string& text : texts) {
    const auto said = json_or_discarded<nlohmann::json>(text);
    processes.push_back(said.is_discarded() ? nlohmann::json(text) : said[key]);
  }
  return played_of(processes);
}

}  // namespace

bool Played::went_well() const {
  return std::ranges::all_of(failures, [](const std::string& f) { return f.empty(); });
}

std::string Played::failure() const {
  std::string all;
  for (const std::string& f : failures) all += f;
  return all;
}

Played play(const Subject& subject, const Plan& plan, const Script& script) {
  const auto texts = subject.run(plan.num_ranks(), [&](Process& process) {
    return json_text(nlohmann::json{{"all", play_here(process, plan, script)}});
  });
  return played_of(texts, "all");
}

TwoPlayed play_suspended(const Subject& subject, const Plan& plan, const Script& script, std::int16_t before,
                         const Plan& other, const Script& other_script) {
  const auto texts = subject.run(plan.num_ranks(), [&](Process& process) {
    nlohmann::json said;
    said["suspended"] = play_suspended_here(process, plan, script, before,
                                            [&] { said["other"] = play_here(process, other, other_script); });
    return json_text(said);
  });
  return {played_of(texts, "suspended"), played_of(texts, "other")};
}

namespace {

SectionId section_of(Space space) { return space == Space::device ? sections::transient : sections::host_resident; }

}  // namespace

Tensor RankProgram::tensor(const std::string& name, DType dtype, const std::vector<std::int64_t>& shape, Space space) {
  Tensor t;
  t.buffer = static_cast<BufferId>(buffers_.size());
  t.dtype = dtype;
  t.offset_bytes = guard;
  t.rank = static_cast<std::uint8_t>(shape.size());
  for (std::size_t d = 0; d < shape.size(); ++d) t.shape[d] = {shape[d]};
  const std::int64_t bytes = t.capacity_bytes() + 2 * guard;
  std::int64_t& end = end_[static_cast<std::size_t>(space)];
  buffers_.push_back({name, DType::u8, bytes, Category::activations, section_of(space), end});
  end += (bytes + 63) / 64 * 64;
  return t;
}

Tensor RankProgram::whole(const Tensor& t) const {
  Tensor all = toy::tensor(t.buffer, {buffer_of(t).elements}, DType::u8);
  return all;
}

void RankProgram::feed(const Tensor& t, StreamId stream) {
  Op o = toy::op(OpKind::feed, stream, "feed " + buffer_of(t).name);
  o.outputs = {whole(t)};
  o.attrs = {{Attr::slot, std::int64_t{t.buffer}}};
  add(std::move(o));
}

void RankProgram::fetch(const Tensor& t, StreamId stream) {
  Op o = toy::op(OpKind::fetch, stream, "fetch " + buffer_of(t).name);
  o.inputs = {whole(t)};
  o.attrs = {{Attr::slot, std::int64_t{t.buffer}}};
  add(std::move(o));
}

Program RankProgram::program() const {
  constexpr std::int64_t chunk = 4096;
  Program p = test::empty_program();
  std::vector<Op> ops, last;
  for (const Space space : {Space::device, Space::host}) {
    const std::int64_t end = end_[static_cast<std::size_t>(space)];
    if (space == Space::host && end == 0) continue;
    const std::int64_t mapped = std::max<std::int64_t>(chunk, (end + chunk - 1) / chunk * chunk);
    ops.push_back(toy::mapping(OpKind::map, section_of(space), 0, mapped));
    last.push_back(toy::mapping(OpKind::unmap, section_of(space), 0, mapped));
    p.section(section_of(space)).bytes = mapped;
  }
  for (std::size_t b = 0; b < buffers_.size(); ++b)
    ops.push_back(toy::memory(OpKind::alloc, static_cast<BufferId>(b), buffers_[b].name + "+"));
  std::vector<std::vector<Op>> phases;
  std::size_t begin = 0;
  for (const std::size_t end : phases_) {
    ops.insert(ops.end(), ops_.begin() + static_cast<std::ptrdiff_t>(begin),
               ops_.begin() + static_cast<std::ptrdiff_t>(end));
    phases.push_back(std::exchange(ops, {}));
    begin = end;
  }
  ops.insert(ops.end(), ops_.begin() + static_cast<std::ptrdiff_t>(begin), ops_.end());
  for (std::size_t b = 0; b < buffers_.size(); ++b)
    ops.push_back(toy::memory(OpKind::free, static_cast<BufferId>(b), buffers_[b].name + "-"));
  ops.insert(ops.end(), last.begin(), last.end());
  p.buffers = buffers_;
  phases.push_back(std::move(ops));
  for (const std::vector<Op>& of_phase : phases) p.phases.push_back({test::block_of(p, "only", of_phase)});
  p.num_events = 16;
  return p;
}

Plan plan_of(std::vector<Program> programs) {
  Plan plan = test::empty_plan();
  plan.scenario = "conformance";
  const std::size_t phases = programs.front().phases.size();
  for (std::size_t i = 0; i < phases; ++i)
    plan.phases.push_back({phases == 1 ? "work" : fmt::format("work {}", i), When::iteration, false});
  plan.groups = {{"world", {{}}}};
  for (Program& p : programs) {
    plan.groups[0].groups[0].push_back(plan.num_ranks());
    plan.program_of_rank.push_back(static_cast<std::int32_t>(plan.programs.size()));
    plan.programs.push_back(std::move(p));
  }
  return plan;
}

}  // namespace hotbunk::conformance

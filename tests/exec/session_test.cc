// Session: the order of a walk, and jobs that take turns on the same devices.
#include "exec/session.h"

#include <fmt/format.h>
#include <rapidcheck.h>

#include <catch2/catch.hpp>

#include "tests/toy_plan.h"

using namespace hotbunk;

namespace {

using Log = std::vector<std::string>;

/// Writes down what it is told, under its job's name; fails at the op of a name.
class Notes final : public Device {
 public:
  Notes(std::string job, Rank rank, Log& log, std::string fails_at = "")
      : job_(std::move(job)), rank_(rank), log_(log), fails_at_(std::move(fails_at)) {}

  Rank rank() const override { return rank_; }
  void enter(std::int32_t step, std::int16_t phase) override { note(fmt::format("step {} phase {}", step, phase)); }
  void leave(std::int64_t blocks) override { note(fmt::format("after {} blocks", blocks)); }
  Status alloc(StreamId, const BoundOp& op) override { return said(op); }
  Status free(StreamId, const BoundOp& op) override { return said(op); }
  Status map(StreamId, const BoundOp& op) override { return said(op); }
  Status unmap(StreamId, const BoundOp& op) override { return said(op); }
  Status compute(StreamId, const BoundOp& op, const Args&) override { return said(op); }
  Status copy(StreamId, const BoundOp& op, const Args&) override { return said(op); }
  Status collective(StreamId, const BoundOp& op, const Args&) override { return said(op); }
  Status record(StreamId, EventId) override { return {}; }
  Status wait(StreamId, EventId) override { return {}; }
  Status sync() override {
    note("sync");
    if (fails_at_ != "sync") return {};
    return fail(Diagnostic{.code = "E602", .message = "a stream failed", .where = {}, .notes = {}, .help = ""});
  }

 private:
  void note(const std::string& what) { log_.push_back(fmt::format("{}{}: {}", job_, rank_, what)); }
  Status said(const BoundOp& op) {
    note(op.name());
    if (op.name() != fails_at_) return {};
    return fail(Diagnostic{.code = "E602", .message = "out of order", .where = {}, .notes = {}, .help = ""});
  }

  std::string job_;
  Rank rank_;
  Log& log_;
  std::string fails_at_;
};

/// Blocks 0 and 1 of the driven phase, `turns` times; ends the run after a step.
class Turns : public Driver {
 public:
  explicit Turns(int turns, std::int32_t last_step = 1000) : turns_(turns), last_step_(last_step) {}
  std::optional<Args> next(Rank rank, std::int32_t step, std::int16_t phase) override {
    int& played = played_[{rank, step, phase}];
    if (phase == work_phase && played == 2 * turns_) return std::nullopt;
    Args args;
    args.step = step;
    args.block = phase == work_phase ? played++ % 2 : 0;
    return args;
  }
  void feed(Rank, const BoundOp&, const Args&, std::span<std::byte>) override {}
  void fetch(Rank, const BoundOp&, const Args&, std::span<const std::byte>) override {}
  void completed(Rank, const Args&, std::int16_t) override { ++blocks; }
  bool wants_results() const override { return false; }
  Status step_ended(std::int32_t step) override {
    steps.push_back(step);
    return {};
  }
  bool ends_after(std::int32_t step) const override { return step >= last_step_; }
  void report(Trace&) const override {}

  static constexpr std::int16_t work_phase = 1;
  std::vector<std::int32_t> steps;
  int blocks = 0;

 private:
  int turns_;
  std::int32_t last_step_;
  std::map<std::tuple<Rank, std::int32_t, std::int16_t>, int> played_;
};

/// load (prologue), work (driven, two blocks), shift (two blocks), export (epilogue); one program for all ranks.
Plan walked_plan(Rank ranks) {
  Plan plan = test::empty_plan();
  Program p = test::empty_program();
  const auto block = [&](const char* name) { return test::block_of(p, name, {toy::kernel(name)}); };
  p.phases = {{block("load")}, {block("one"), block("two")}, {block("down"), block("up")}, {block("export")}};
  plan.programs = {std::move(p)};
  plan.program_of_rank.assign(static_cast<std::size_t>(ranks), 0);
  plan.phases = {{"load", When::prologue, false},
                 {"work", When::iteration, true},
                 {"shift", When::iteration, false},
                 {"export", When::epilogue, false}};
  return plan;
}

RunOptions steps(std::int32_t last, std::int32_t first = 1) {
  RunOptions options;
  options.steps = last, options.first_step = first;
  return options;
}

/// A job on devices that write into one log.
struct Job {
  Plan plan = test::empty_plan();
  Turns driver;
  Session session;
  Job(const std::string& name, Rank ranks, int turns, const RunOptions& options, Log& log, std::string fails_at = "",
      std::int32_t last_step = 1000)
      : plan(walked_plan(ranks)),
        driver(turns, last_step),
        session(plan, driver, devices(name, ranks, log, fails_at), options) {}

  static std::vector<std::unique_ptr<Device>> devices(const std::string& name, Rank ranks, Log& log,
                                                      const std::string& fails_at) {
    std::vector<std::unique_ptr<Device>> out;
    for (Rank r = 0; r < ranks; ++r) out.push_back(std::make_unique<Notes>(name, r, log, fails_at));
    return out;
  }
  /// To its end; the failure's text, if any.
  std::string finish() {
    for (;;) {
      const auto more = session.advance();
      if (!more) return render(more.error());
      if (!*more) return "";
    }
  }
};

/// Without the waits at the ends of phases.
Log without_syncs(Log log) {
  std::erase_if(log, [](const std::string& line) { return line.ends_with(": sync"); });
  return log;
}

Log of_job(const Log& log, char name) {
  Log out;
  for (const std::string& line : log)
    if (line[0] == name) out.push_back(line);
  return out;
}

}  // namespace

TEST_CASE("a session plays prologue, iterations and epilogue; ranks take turns, a block each") {
  Log log;
  Job job("a", 2, 1, steps(1), log);
  REQUIRE(job.finish().empty());
  CHECK(without_syncs(log) == Log{"a0: step 0 phase 0",
                                  "a1: step 0 phase 0",
                                  "a0: load",
                                  "a1: load",
                                  "a0: after 1 blocks",
                                  "a1: after 1 blocks",
                                  "a0: step 1 phase 1",
                                  "a1: step 1 phase 1",
                                  "a0: one",
                                  "a1: one",
                                  "a0: two",
                                  "a1: two",
                                  "a0: after 2 blocks",
                                  "a1: after 2 blocks",
                                  "a0: step 1 phase 2",
                                  "a1: step 1 phase 2",
                                  "a0: down",
                                  "a0: up",
                                  "a1: down",
                                  "a1: up",
                                  "a0: after 2 blocks",
                                  "a1: after 2 blocks",
                                  "a0: step 2 phase 3",
                                  "a1: step 2 phase 3",
                                  "a0: export",
                                  "a1: export",
                                  "a0: after 1 blocks",
                                  "a1: after 1 blocks"});
  CHECK(job.driver.steps == std::vector<std::int32_t>{1});
  CHECK(*job.session.advance() == false);  // and stays at its end
}

TEST_CASE("a session goes on where another one stopped, and ends when its driver says so") {
  Log log;
  Job later("a", 1, 1, steps(4, 3), log);
  REQUIRE(later.finish().empty());
  CHECK(later.driver.steps == std::vector<std::int32_t>{3, 4});
  Job early("b", 1, 1, steps(9), log, "", 2);
  REQUIRE(early.finish().empty());
  CHECK(early.driver.steps == std::vector<std::int32_t>{1, 2});
  Job done("c", 1, 1, steps(4, 5), log);
  REQUIRE(done.finish().empty());
  CHECK(done.driver.steps.empty());
  CHECK(without_syncs(of_job(log, 'c')) == Log{"c0: step 0 phase 0", "c0: load", "c0: after 1 blocks",
                                               "c0: step 5 phase 3", "c0: export", "c0: after 1 blocks"});
}

TEST_CASE("a failure says rank, phase and block") {
  Log log;
  Job job("a", 1, 1, steps(1), log, "up");
  CHECK_THAT(job.finish(),
             Catch::Contains("error[E602]: out of order") && Catch::Contains("rank 0, phase shift, block up"));
}

TEST_CASE("who suspends a job waits for what it played; a failure says where that was") {
  Log log;
  Job job("a", 2, 1, steps(1), log);
  REQUIRE(job.session.settle());
  CHECK(log == Log{"a0: sync", "a1: sync"});
  Job fails("b", 1, 1, steps(1), log, "sync");
  const Status before = fails.session.settle();
  REQUIRE_FALSE(before);
  CHECK_THAT(render(before.error()), Catch::Contains("rank 0, between two phases"));
  while (fails.driver.blocks == 0) REQUIRE(*fails.session.advance());
  const Status inside = fails.session.settle();
  REQUIRE_FALSE(inside);
  CHECK_THAT(render(inside.error()), Catch::Contains("rank 0, phase load"));
  CHECK_THAT(fails.finish(), Catch::Contains("rank 0, phase load"));
  CHECK(*fails.session.advance() == false);  // a walk that failed is over
}

TEST_CASE("a job is suspended between two blocks, another one plays to its end, and the first goes on") {
  Log alone, log;
  Job reference("a", 1, 3, steps(2), alone);
  REQUIRE(reference.finish().empty());
  Job first("a", 1, 3, steps(2), log), second("b", 1, 2, steps(1), log);
  while (first.driver.blocks < 4) REQUIRE(*first.session.advance());  // in the middle of the first step's work
  CHECK(first.session.step() == 1);
  CHECK(first.session.phase() == Turns::work_phase);
  const std::size_t suspended = log.size();
  REQUIRE(second.finish().empty());
  const std::size_t resumed = log.size();
  REQUIRE(first.finish().empty());
  // Three stretches, and the suspended job's two are what it does alone.
  for (std::size_t i = suspended; i < resumed; ++i) CHECK(log[i][0] == 'b');
  CHECK(of_job(log, 'b').size() == resumed - suspended);
  CHECK(of_job(log, 'a') == alone);
}

TEST_CASE("jobs that take turns in any order each do what they do alone") {
  CHECK(rc::check("two sessions, interleaved", [] {
    const Rank ranks = *rc::gen::inRange(1, 4);
    const int turns = *rc::gen::inRange(0, 4);
    const RunOptions options = steps(*rc::gen::inRange(0, 4));
    Log alone, log;
    RC_ASSERT(Job("a", ranks, turns, options, alone).finish().empty());
    Job a("a", ranks, turns, options, log), b("b", 2, 1, steps(2), log);
    for (bool more_a = true, more_b = true; more_a || more_b;) {
      bool& more = !more_b || (more_a && *rc::gen::arbitrary<bool>()) ? more_a : more_b;
      more = *(&more == &more_a ? a : b).session.advance();
    }
    RC_ASSERT(of_job(log, 'a') == alone);
  }));
}

namespace {

/// One rank a role. work: the trainer's; shift: both, the engine's some iterations back; load and export: each.
Plan plan_of_roles(std::int32_t steps_back) {
  Plan plan = walked_plan(2);
  plan.roles = {"trainer", "engine"};
  plan.programs.push_back(plan.programs[0]);
  plan.programs[1].role = 1;
  plan.programs[1].phases[1].clear();
  plan.program_of_rank = {0, 1};
  for (PhaseInfo& p : plan.phases) p.players = {{0, 0}, {1, 0}};
  plan.phases[1].players = {{0, 0}};
  plan.phases[2].players[1].steps_back = steps_back;
  return plan;
}

/// Only which phase of which iteration began.
Log phases_of(const Log& log, const std::string& who) {
  Log out;
  for (const std::string& line : log)
    if (line.starts_with(who + ": step")) out.push_back(line.substr(who.size() + 2));
  return out;
}

}  // namespace

TEST_CASE("a role plays its phases only, each of the iteration that it is to play it of") {
  const Plan plan = plan_of_roles(2);
  Log log;
  Turns driver(1);
  const auto device = [&](Rank r) {
    std::vector<std::unique_ptr<Device>> out;
    out.push_back(std::make_unique<Notes>("a", r, log));
    return out;
  };
  std::vector<std::int32_t> ended;
  RunOptions options = steps(5, 3);
  options.on_step_end = [&](std::int32_t step) { return ended.push_back(step), Status{}; };
  IterationEnds ends(2);
  Session trainer(plan, driver, device(0), options, &ends), engine(plan, driver, device(1), options, &ends);
  const auto finish = [](Session& s) {
    for (bool more = true; more;) {
      const auto advanced = s.advance();
      REQUIRE(advanced);
      more = *advanced;
    }
  };
  finish(trainer);
  CHECK(ended.empty());  // the engine has its part to play
  finish(engine);
  CHECK(ended == std::vector<std::int32_t>{3, 4, 5});
  CHECK(driver.steps == ended);
  CHECK(phases_of(log, "a0") == Log{"step 0 phase 0", "step 3 phase 1", "step 3 phase 2", "step 4 phase 1",
                                    "step 4 phase 2", "step 5 phase 1", "step 5 phase 2", "step 6 phase 3"});
  // In its iterations 3 and 4 there is nothing two back; behind the fifth what is left.
  CHECK(phases_of(log, "a1") ==
        Log{"step 0 phase 0", "step 3 phase 2", "step 4 phase 2", "step 5 phase 2", "step 6 phase 3"});
}

TEST_CASE("a run of several roles goes on to its last iteration, whatever the driver of one of them would say") {
  const Plan plan = plan_of_roles(1);
  Log log;
  Turns driver(1, 2);
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(std::make_unique<Notes>("a", 1, log));
  Session engine(plan, driver, std::move(devices), steps(3));
  for (bool more = true; more; more = *engine.advance()) {
  }
  CHECK(phases_of(log, "a1") ==
        Log{"step 0 phase 0", "step 1 phase 2", "step 2 phase 2", "step 3 phase 2", "step 4 phase 3"});
}

TEST_CASE("sessions of one process stay together, however uneven their work") {
  const Plan plan = plan_of_roles(1);
  /// The trainer's iteration has many blocks, the engine's one.
  struct Many final : Turns {
    Many() : Turns(25) {}
    std::map<Rank, std::int32_t> at;
    std::int32_t apart = 0;
    std::optional<Args> next(Rank rank, std::int32_t step, std::int16_t phase) override {
      at[rank] = std::max(at[rank], step);
      if (at.size() == 2) apart = std::max(apart, std::abs(at[0] - at[1]));
      return Turns::next(rank, step, phase);
    }
  } driver;
  struct Quiet final : Backend {
    Log log;
    Capability supports(const Op&) const override { return {}; }
    Result<std::vector<std::unique_ptr<Device>>> open(const Plan&, std::span<const Rank> ranks) override {
      std::vector<std::unique_ptr<Device>> out;
      for (const Rank r : ranks) out.push_back(std::make_unique<Notes>("a", r, log));
      return out;
    }
    Result<Trace> take_trace() override { return Trace{}; }
  } backend;
  RunOptions options = steps(20);
  options.local_ranks = {0, 1};
  REQUIRE(execute(plan, backend, driver, options));
  CHECK(driver.at == std::map<Rank, std::int32_t>{{0, 21}, {1, 21}});
  CHECK(driver.apart <= 2);
}

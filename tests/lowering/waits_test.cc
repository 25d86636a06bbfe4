// What streams wait for in a micro-batch, counted: buffers that they share and declared slots, nothing else.
#include <fmt/format.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>
#include <map>
#include <set>

#include "graph/clock.h"
#include "graph/verify.h"
#include "lowering/lower.h"
#include "spec/loader.h"
#include "tests/paths.h"
#include "tiny.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// Waits of a block by "waiting stream < stream waited for", its borders left out.
using Waits = std::map<std::string, std::int64_t>;

Waits waits_of(const std::vector<Op>& ops) {
  Waits out;
  const std::vector<Stream> all = plan_streams(true, true, true);
  std::map<EventId, StreamId> recorded;
  std::map<StreamId, bool> begun;
  std::size_t last = ops.size();
  while (last > 0 && (ops[last - 1].kind == OpKind::wait || ops[last - 1].kind == OpKind::record)) --last;
  for (std::size_t i = 0; i < last; ++i) {
    const Op& op = ops[i];
    if (op.kind == OpKind::record && begun[op.stream]) recorded[op.event] = op.stream;
    else if (op.kind == OpKind::wait && recorded.contains(op.event))
      ++out[fmt::format("{} < {}", all[at(op.stream)].name, all[at(recorded[op.event])].name)];
    else if (op.kind != OpKind::alloc && op.kind != OpKind::free) begun[op.stream] = true;
  }
  return out;
}

/// Lets the last op of a call wait once more for what its stream has waited for in the block before; false: there are
/// no more such calls than `skipped`.
bool add_wait(Program& program, int skipped) {
  for (auto& blocks : program.phases)
    for (Block& block : blocks) {
      std::set<StreamId> begun;
      std::set<EventId> recorded;  // behind an op of the block
      std::map<StreamId, Mark> waited;
      for (Call& call : block.calls) {
        const std::vector<Op>& ops = program.bodies[static_cast<std::size_t>(call.body)].ops;
        const Op& last = ops.back();
        if (const auto found = waited.find(last.stream);
            found != waited.end() && !is_memory(last.kind) && skipped-- == 0) {
          Mark again = found->second;
          again.before = static_cast<std::int32_t>(ops.size()) - 1;
          const auto place = std::ranges::find_if(call.marks, [&](const Mark& m) { return m.before > again.before; });
          call.marks.insert(place, again);
          return true;
        }
        auto mark = call.marks.begin();
        for (std::size_t i = 0; i <= ops.size(); ++i) {
          for (; mark != call.marks.end() && static_cast<std::size_t>(mark->before) == i; ++mark)
            if (mark->kind == OpKind::wait && recorded.contains(mark->event))
              waited.insert_or_assign(mark->stream, *mark);
            else if (mark->kind == OpKind::record && begun.contains(mark->stream)) recorded.insert(mark->event);
          if (i < ops.size() && !is_memory(ops[i].kind)) begun.insert(ops[i].stream);
        }
      }
    }
  return false;
}

}  // namespace

TEST_CASE("In no shipped scenario a stream waits falsely, and where it is made to it is found") {
  int lowered_plans = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(source_folder) / "scenarios")) {
    if (entry.path().extension() != ".yaml") continue;
    CAPTURE(entry.path().string());
    const Result<Scenario> scenario = load_scenario(entry.path().string());
    REQUIRE(scenario);
    if (!why_not_lowered(*scenario).empty()) continue;  // priced only
    const Result<Plan> plan = lower(*scenario);
    REQUIRE(plan);
    CHECK(verify(*plan) == std::vector<std::string>{});
    // Where that op shares a buffer with what is waited for, the wait is a true one: another call, then.
    std::string faults;
    for (int skipped = 0; faults.empty(); ++skipped) {
      Plan spoilt = *plan;
      REQUIRE(add_wait(spoilt.programs[0], skipped));
      faults = fmt::format("{}", fmt::join(verify(spoilt), "; "));
    }
    CHECK_THAT(faults, Catch::Contains("false wait"));
    ++lowered_plans;
  }
  CHECK(lowered_plans > 40);
}

TEST_CASE("A micro-batch waits for the units it uses, the slots it takes, and nothing else") {
  // L layers. compute waits for the root, the head and for each layer, in both passes, for what it is fed (ids,
  // positions, cu_seqlens, targets, and one for the four vectors of the loss, fed in order); reduce for the gradients
  // of each unit, d2h for log-probs. By slots: a layer, and the head behind the last, is gathered when what was
  // gathered `prefetch` + 1 before has computed, and gradients of a layer are written when those of the one before are
  // on their way.
  for (const int L : {3, 7})
    for (const int prefetch : {0, 1})
      for (const char* recompute : {"none", "selective", "full"}) {
        INFO(L << " layers, prefetch " << prefetch << ", recompute " << recompute);
        const Plan plan =
            lowered(tiny(4, 2,
                         {fmt::format("model.num_hidden_layers={}", L), fmt::format("train.prefetch={}", prefetch),
                          fmt::format("train.recompute={}", recompute)}));
        CHECK(waits_of(ops_of(plan, 0, "train", "micro")) == Waits{{"compute < gather", 2 + 2 * L},
                                                                   {"compute < h2d", 5},
                                                                   {"compute < reduce", L - 1},
                                                                   {"gather < compute", 2 * L + 1 - (prefetch + 1)},
                                                                   {"reduce < compute", L + 2}});
        CHECK(waits_of(ops_of(plan, 0, "old_logprobs", "micro")) ==
              Waits{{"compute < gather", 2 + L},
                    {"compute < h2d", 4},
                    {"d2h < compute", 1},
                    {"gather < compute", L + 1 - (prefetch + 1)}});
      }
  // Units that stay whole have no limit: nothing holds the gathers.
  const Plan plan = lowered(tiny(4, 2, {"train.reshard_after_forward=false"}));
  CHECK(waits_of(ops_of(plan, 0, "train", "micro")) == Waits{{"compute < gather", 2 + layers},
                                                             {"compute < h2d", 5},
                                                             {"compute < reduce", layers - 1},
                                                             {"reduce < compute", layers + 2}});
}

TEST_CASE("A ring's exchanges wait for the rank's own keys alone, and each step of attention for its own exchange") {
  for (const int ranks : {2, 4}) {
    const Plan plan = lowered(tiny(4, 2, {fmt::format("train.layout={{dp: {}, cp: {}}}", 4 / ranks, ranks)}));
    const std::vector<Op> ops = ops_of(plan, 0, "old_logprobs", "micro");
    CHECK(waits_of(ops) == Waits{{"compute < context", (ranks - 1) * layers},
                                 {"compute < gather", 2 + layers},
                                 {"compute < h2d", 4},
                                 {"context < compute", layers},
                                 {"d2h < compute", 1},
                                 {"gather < compute", layers - 1}});
    // What step i + 1 needs is on its way before step i computes.
    int exchanged = 0, attended = 0;
    for (const Op& op : ops) {
      if (op.kind == OpKind::send_recv) ++exchanged;
      if (op.kind != OpKind::context_attention) continue;
      const int step = attended % ranks;
      CHECK(exchanged == attended / ranks * (ranks - 1) + std::min(step + 1, ranks - 1));
      ++attended;
    }
    CHECK(attended == ranks * layers);
  }
}

TEST_CASE("The 7B scenario waits 175 times in a micro-batch; 196 waits for addresses are gone") {
  const auto s = load_scenario(std::string(source_folder) + "/scenarios/qwen2.5-7b-fsdp8.yaml", {});
  REQUIRE(s.has_value());
  const Plan plan = lowered(*s);
  CHECK(waits_of(ops_of(plan, 0, "train", "micro")) == Waits{{"compute < gather", 58},
                                                             {"compute < h2d", 5},
                                                             {"compute < reduce", 27},
                                                             {"gather < compute", 55},
                                                             {"reduce < compute", 30}});
  CHECK(verify(plan) == std::vector<std::string>{});
}

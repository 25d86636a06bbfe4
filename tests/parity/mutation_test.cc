// The promises must bite: every kind of op in every phase of a small plan, dropped, doubled or altered in the plan that
// one side sees, is found by the verifier or by comparing that side with a run of the true plan.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <cstdio>
#include <functional>
#include <map>
#include <set>
#include <string_view>

#include "backends/cpu_gloo/arena.h"
#include "base/check.h"
#include "graph/catalogue.h"
#include "tests/blocks.h"
#include "tests/parity/harness.h"

using namespace hotbunk;
using namespace hotbunk::testing;

namespace {

struct Place {
  std::size_t phase = 0;
  std::string block;    // stages of a pipeline may have blocks that others lack
  std::size_t nth = 0;  // op of its kind in the block
  OpKind kind{};
  friend auto operator<=>(const Place&, const Place&) = default;
};

/// Changes the ops of a block, given where the op stands; false: there is nothing to change.
using Change = std::function<bool(const Plan&, std::vector<Op>&, std::size_t at)>;

/// The same change in every program that has the block: ranks that differ would be found too easily.
bool apply(Plan& plan, const Place& p, const Change& change) {
  bool changed = false;
  for (Program& program : plan.programs) {
    auto& blocks = program.phases[p.phase];
    const auto block = std::ranges::find(blocks, p.block, &Block::name);
    if (block == blocks.end()) continue;
    test::EditedOps ops(program, *block);
    std::size_t seen = 0;
    for (std::size_t i = 0; i < ops.size(); ++i)
      if (ops[i].kind == p.kind && seen++ == p.nth) {
        changed |= change(plan, ops, i);
        break;
      }
  }
  return changed;
}

/// Moves of a feed or an export speak to the driver: no device looks at them, no byte depends on them (tests/numerics
/// compares what they fill).
bool moves_bytes(const Op& op) { return !op.moves.empty() && op.kind != OpKind::feed && op.kind != OpKind::fetch; }

/// The first and the middle op of every kind in every block.
std::vector<Place> places(const Plan& plan) {
  std::set<Place> out;
  for (const Program& program : plan.programs)
    for (std::size_t p = 0; p < program.phases.size(); ++p)
      for (const Block& block : program.phases[p]) {
        std::map<OpKind, std::size_t> count;
        for (const Op& op : test::ops_of(program, block)) ++count[op.kind];
        for (const auto& [kind, n] : count)
          for (std::size_t nth : std::set<std::size_t>{0, n / 2}) out.insert({p, block.name, nth, kind});
      }
  return {out.begin(), out.end()};
}

const std::vector<std::pair<const char*, Change>>& changes() {
  static const std::vector<std::pair<const char*, Change>> all = {
      {"dropped",
       [](const Plan&, std::vector<Op>& ops, std::size_t at) {
         ops.erase(ops.begin() + static_cast<std::ptrdiff_t>(at));
         return true;
       }},
      {"doubled",
       [](const Plan&, std::vector<Op>& ops, std::size_t at) {
         const Op op = ops[at];
         // Equivalent: the second record of an event follows nothing new, the second wait finds it done.
         if (op.kind == OpKind::record || op.kind == OpKind::wait) return false;
         ops.insert(ops.begin() + static_cast<std::ptrdiff_t>(at), op);
         return true;
       }},
      {"a chunk less",
       [](const Plan& plan, std::vector<Op>& ops, std::size_t at) {
         if (ops[at].kind != OpKind::map && ops[at].kind != OpKind::unmap) return false;
         ops[at].map_end -= plan.chunk_bytes;
         return true;
       }},
      {"in another group",
       [](const Plan& plan, std::vector<Op>& ops, std::size_t at) {
         if (ops[at].group < 0) return false;
         ops[at].group = (ops[at].group + 1) % static_cast<GroupId>(plan.groups.size());
         return true;
       }},
      {"a move less",
       [](const Plan&, std::vector<Op>& ops, std::size_t at) {
         if (!moves_bytes(ops[at])) return false;
         ops[at].moves.pop_back();
         return true;
       }},
      {"a rank's part less",
       [](const Plan&, std::vector<Op>& ops, std::size_t at) {
         if (!moves_bytes(ops[at])) return false;
         for (Move& m : ops[at].moves)
           for (Side* side : {&m.from, &m.to})
             if (const Holds who = side->parts.who; who == Holds::every || who == Holds::peers)
               return --side->parts.count > 0;
         return false;
       }},
      {"a move out of its tensor",
       [](const Plan&, std::vector<Op>& ops, std::size_t at) {
         if (!moves_bytes(ops[at])) return false;
         Side& from = ops[at].moves.back().from;
         from.piece.offset = ops[at].inputs[static_cast<std::size_t>(from.tensor)].capacity();
         return true;
       }},
      {"its first output an element shorter",
       [](const Plan&, std::vector<Op>& ops, std::size_t at) {
         if (ops[at].outputs.empty() || ops[at].kind == OpKind::barrier) return false;  // a barrier moves nothing
         Tensor& t = ops[at].outputs[0];
         if (t.rank == 0 || t.shape[0].extent != fixed_extent || t.shape[0].size < 2) return false;
         --t.shape[0].size;
         return true;
       }},
  };
  return all;
}

std::size_t record_of(const std::vector<Op>& ops, EventId event) {
  std::size_t i = 0;
  while (i < ops.size() && !(ops[i].kind == OpKind::record && ops[i].event == event)) ++i;
  return i;
}

/// Whether what is done by record `at` includes what is done by record `earlier`: by the order of one stream, or
/// through the waits that stand before it on its stream.
bool covers(const std::vector<Op>& ops, std::size_t at, std::size_t earlier) {
  if (at >= ops.size() || at < earlier) return false;
  if (ops[at].stream == ops[earlier].stream) return true;
  for (std::size_t i = 0; i < at; ++i)
    if (ops[i].kind == OpKind::wait && ops[i].stream == ops[at].stream &&
        covers(ops, record_of(ops, ops[i].event), earlier))
      return true;
  return false;
}

/// A wait that the others imply: before its stream does anything, it also waits for what includes it. Blocks begin with
/// such waits for every stream that they use (insert_dependencies).
bool implied(const std::vector<Op>& ops, std::size_t at) {
  const std::size_t mine = record_of(ops, ops[at].event);
  if (mine == ops.size()) return false;
  for (std::size_t i = at + 1; i < ops.size(); ++i) {
    if (ops[i].stream != ops[at].stream || ops[i].kind == OpKind::alloc || ops[i].kind == OpKind::free) continue;
    if (ops[i].kind != OpKind::wait) return false;
    if (covers(ops, record_of(ops, ops[i].event), mine)) return true;
  }
  return true;  // the stream does nothing more
}

/// Mutants that do what the plan does, and one that only a run with sync.verify finds.
bool equivalent(const Op& op, const std::vector<Op>& ops, std::size_t at, std::string_view what) {
  if (op.kind == OpKind::wait && what == "dropped") return implied(ops, at);
  // kv_write finds its rows by slots: the extent of the window into the pool is nobody's operand.
  if (op.kind == OpKind::kv_write && what.ends_with("shorter")) return true;
  // The last rows of a unit's parameters may be padding, which nothing is copied to; and a bucket may hold the first
  // experts of a stack alone.
  if ((op.kind == OpKind::copy_boxes || op.kind == OpKind::peer_copy) &&
      what == "its first output an element shorter") {
    std::int64_t end = 0;
    for (const int place : {0, 1})
      for (const Box& b : boxes_of(op, Places(16, place)))
        if (b.output == 0) end = std::max(end, b.dst_offset + (b.rows - 1) * b.dst_pitch + b.cols);
    return end < op.outputs[0].capacity_bytes() / size_of(op.outputs[0].dtype);
  }
  // Where all ranks are one engine's, or share each layer, all families are the same group.
  if (op.has(Attr::vocab_stride) && what == "in another group") return true;
  // What a rank copies from its own part is no traffic, and under sleep_level=1 the bytes hold what slept.
  // state_test.cc shows who finds it: with sleep_level=2 the verifier, with sync.verify the run.
  if (op.kind != OpKind::peer_copy || what != "a move less") return false;
  Op last = op;
  last.moves = {op.moves.back()};
  return payload_bytes(last, {}, Places(16, 0)) == 0 && payload_bytes(last, {}, Places(16, 1)) == 0;
}

/// "" when the mutant survives; else who found it.
std::string killer(const Outcome& o, const Plan& mutant) {
  try {
    const std::string found = complaint(o, mutant);
    return found.substr(0, found.find(':'));
  } catch (const InternalError&) {
    return "simulation";  // an internal check of it
  }
}

}  // namespace

namespace {

/// Runs a plan, then each mutant of it with a change in one of these phases (none given: in any): what nobody finds.
auto mutants_of_phases(std::set<std::string> phases, std::size_t least_kinds, int least) {
  return [=](const Outcome& o) -> std::string {
    if (auto bad = complaint(o, o.plan); !bad.empty()) return bad;
    std::map<std::string, int> killed;
    std::set<OpKind> kinds;
    std::string survivors;
    for (const Place& place : places(o.plan))
      for (const auto& [what, change] : changes()) {
        if (!phases.empty() && !phases.contains(o.plan.phases[place.phase].name)) continue;
        Plan mutant = o.plan;
        bool same = false;
        const Change unless_equivalent = [&, what = what, &change = change](const Plan& plan, std::vector<Op>& ops,
                                                                            std::size_t at) {
          same |= equivalent(ops[at], ops, at, what);
          return change(plan, ops, at);
        };
        if (!apply(mutant, place, unless_equivalent)) continue;
        kinds.insert(place.kind);
        const std::string by = killer(o, mutant);
        ++killed[by.empty() && same ? "equivalent" : by];
        if (by.empty() && !same)
          survivors += fmt::format("\n  {} {} of phase {}, block {}: {}", name_of(place.kind), place.nth,
                                   o.plan.phases[place.phase].name, place.block, what);
      }
    int all = 0;
    for (const auto& [by, n] : killed) all += n;
    std::fprintf(
        stderr,
        "%d mutants of %zu kinds of ops: verifier %d, simulation %d, comparison %d, equivalent %d, survivors %d\n", all,
        kinds.size(), killed["verifier"], killed["simulation"], killed["comparison"], killed["equivalent"], killed[""]);
    if (kinds.size() < least_kinds || all < least) return fmt::format("only {} mutants of {} kinds", all, kinds.size());
    return survivors;
  };
}

}  // namespace

TEST_CASE("every kind of op, dropped, doubled or altered, is found") {
  const Scenario s = tiny_scenario(
      2, 2,
      {"steps=1", "checkpoint_every=1", "algorithm.reference=true", "algorithm.kl_coef=0.1", "sync.verify=true",
       "rollout.sleep_level=1", "train.recompute=selective", "train.precision.params=bf16"});
  // All that a dense GRPO iteration has; a kind that joins it joins the test.
  CHECK(run_cases(2, {{"mutants", s}}, mutants_of_phases({}, 40, 500)) == "");
}

TEST_CASE("and so where parameters are whole, gradients are reduced once a step, and shards have copies") {
  const Scenario s = tiny_scenario(4, 1,
                                   {"steps=1", "train.engine=zero1", "train.layout.fsdp=2", "sync.verify=true",
                                    "train.precision.params=bf16", "model.num_hidden_layers=1"});
  CHECK(run_cases(4, {{"mutants", s}}, mutants_of_phases({"load", "sync", "train"}, 25, 200)) == "");
}

TEST_CASE("and so where layers, and the tokens between them, are cut over ranks that share KV heads") {
  const Scenario s = tiny_scenario(4, 2,
                                   {"steps=1", "train.layout.dp=1", "train.layout.tp=4", "train.layout.sp=true",
                                    "sync.verify=true", "train.precision.params=bf16", "model.num_hidden_layers=1"});
  CHECK(run_cases(4, {{"mutants", s}}, mutants_of_phases({"load", "sync", "train"}, 25, 200)) == "");
}

TEST_CASE("and so where stages pass micro-batches on, and two of them have one table") {
  const Scenario s = tiny_scenario(2, 2,
                                   {"steps=1", "train.layout.dp=1", "train.layout.pp=2", "train.pipeline_split=[1, 1]",
                                    "sync.verify=true", "train.precision.params=bf16", "model.num_hidden_layers=2",
                                    "model.tie_word_embeddings=true", "train.micro_batch_tokens=24"});
  CHECK(run_cases(2, {{"mutants", s}}, mutants_of_phases({"load", "sync", "train"}, 25, 200)) == "");
}

TEST_CASE("and so where tokens are routed to experts") {
  const Scenario s =
      tiny_scenario(2, 2,
                    {"steps=1", "sync.verify=true", "train.precision.params=bf16", "model.num_hidden_layers=1",
                     "model.model_type=mixtral", "model.architectures=[MixtralForCausalLM]",
                     "model.num_local_experts=3", "model.num_experts_per_tok=2", "train.router_aux_loss_coef=0.1"});
  CHECK(run_cases(2, {{"mutants", s}}, mutants_of_phases({"load", "sync", "train", "rollout"}, 40, 300)) == "");
}

namespace {

/// Once, when phase `where` begins, calls `tamper` with the device arena and where buffer `name` lies in it.
using Tamper = std::function<void(Arena&, std::int64_t offset, std::int64_t bytes)>;
Case tampered(const Scenario& s, const std::string& where, const std::string& name, const Tamper& tamper) {
  return {"tampered", s, {}, [=, done = false](const CpuBackend& b, std::int32_t, const std::string& phase) mutable {
            if (done || phase != where) return std::string();
            const auto bytes = b.peek(name);
            if (bytes.empty()) return "no buffer " + name;
            Arena& arena = b.device_arena();
            done = true;
            tamper(arena, bytes.data() - arena.base(), static_cast<std::int64_t>(bytes.size()));
            return std::string();
          }};
}

}  // namespace

TEST_CASE("what a run measures is what its arena booked: books that are wrong in one place differ from the plan") {
  const Scenario s = tiny_scenario(2, 1, {"steps=1"});
  const std::string shard = "train.root.shard";
  const auto differs = [](const Outcome& o) -> std::string {
    const std::string found = complaint(o, o.plan);
    for (const char* line : {"share of the phase's peak of params", "share of the phase's peak of kv_cache"})
      if (found.find(line) == found.npos) return fmt::format("'{}' is not in: {}", line, found);
    return "";
  };
  const auto other_category = [](Arena& arena, std::int64_t offset, std::int64_t bytes) {
    arena.free(offset, bytes);
    arena.alloc(offset, bytes, static_cast<int>(Category::kv_cache), "the same bytes under another name");
  };
  CHECK(run_cases(2, {tampered(s, "train", shard, other_category)}, differs) == "");

  const auto equal = [](const Outcome& o) { return complaint(o, o.plan); };  // the control: looking changes nothing
  const auto nothing = [](Arena&, std::int64_t, std::int64_t) {};
  CHECK(run_cases(2, {tampered(s, "train", shard, nothing)}, equal) == "");
}

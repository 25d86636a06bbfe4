// FSDP2's traffic of one micro-batch in closed form.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <map>

#include "graph/catalogue.h"
#include "layout/train_weights.h"
#include "spec/loader.h"
#include "tests/paths.h"
#include "tiny.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

struct Traffic {
  std::int64_t calls = 0, payload = 0, padding = 0;
  friend bool operator==(const Traffic&, const Traffic&) = default;
};

Traffic traffic(const Plan& plan, Rank rank, std::string_view phase, OpKind kind) {
  Traffic t;
  for (const Op& op : ops_of(plan, rank, phase, "micro"))
    if (op.kind == kind) {
      ++t.calls;
      t.payload += payload_bytes(op, {.tokens = 1, .seqs = 1, .attention_pairs = 1}, places_of(plan, 0));
      t.padding += op.integer(Attr::padding_bytes, 0);
    }
  return t;
}

}  // namespace

TEST_CASE("A micro-batch gathers the root and the head once and a layer twice, once when it is not resharded") {
  // Padding of all ranks' shards together, in elements. 3 ranks: 40 rows of gate and of up become 42, of 24 columns
  // each; 24, 12 and 33 rows divide. 4 ranks: 33 rows of embedding and head become 36.
  const std::map<int, std::pair<std::int64_t, std::int64_t>> ends_and_layer = {
      {2, {2 * 24, 0}}, {3, {0, 2 * 2 * 24}}, {4, {2 * 3 * 24, 0}}};
  for (const auto& [world, pad] : ends_and_layer)
    for (bool reshard : {true, false})
      for (const auto& [precision, size] : {std::pair{"fp32", 4}, std::pair{"bf16", 2}}) {
        INFO(world << " ranks, reshard " << reshard << ", " << precision);
        const Scenario s = tiny(world, 1,
                                {fmt::format("train.reshard_after_forward={}", reshard),
                                 fmt::format("train.precision.params={}", precision)});
        const auto units = train_units(s.model, 1, world, 0);
        REQUIRE(units[0].padding_elements() + units[1].padding_elements() == pad.first);
        REQUIRE(units[2].padding_elements() == pad.second);
        const Plan plan = lowered(s);
        const std::int64_t runs = reshard ? 2 : 1;
        for (Rank r = 0; r < world; ++r) {
          CHECK(traffic(plan, r, "train", OpKind::all_gather) ==
                Traffic{2 + runs * layers, (root_elements + head_elements + runs * layers * layer_elements) * size,
                        (pad.first + runs * layers * pad.second) * size});
          // Gradients are reduced in fp32, each unit once.
          CHECK(traffic(plan, r, "train", OpKind::reduce_scatter) ==
                Traffic{2 + layers, (root_elements + head_elements + layers * layer_elements) * 4,
                        (pad.first + layers * pad.second) * 4});
          // A pass without gradients gathers each unit once.
          CHECK(traffic(plan, r, "old_logprobs", OpKind::all_gather) ==
                Traffic{2 + layers, (root_elements + head_elements + layers * layer_elements) * size,
                        (pad.first + layers * pad.second) * size});
        }
      }
}

TEST_CASE("Large parameters of which all ranks have as many rows are gathered and reduced by themselves, uncopied") {
  // A layer: norms of 24; q and o 24 x 24, k and v 12 x 24; gate, up and down of 40 x 24. Over 2 ranks each of the last
  // three has 480 elements a rank; over 3 nothing but gate and up is uneven, 14 rows of room on each rank.
  struct Case {
    int world, least;
    std::int64_t collectives, copied;  // of a layer
  };
  for (const auto& [world, least, collectives, copied] : {Case{2, 0, 1, layer_elements},
                                                          {2, 481, 1, layer_elements},
                                                          {2, 480, 4, layer_elements - 3 * 40 * 24},
                                                          {2, 200, 6 + 2, 24 + 24 * 24 + 24},
                                                          {3, 1, 7 + 1, 2 * 3 * 14 * 24}}) {
    INFO(world << " ranks, from " << least);
    const Plan plan = lowered(tiny(world, 1, {fmt::format("train.in_place_elements={}", least)}));
    std::map<OpKind, std::int64_t> calls, payload;
    for (const Op& op : ops_of(plan, 0, "train", "micro")) {
      if (op.name.find("layers.1.") == std::string::npos || op.name.find("backward") != std::string::npos) continue;
      if (op.name.ends_with(".copy_out")) CHECK(op.inputs[0].shape[0].size == copied);
      if (op.name.ends_with(".copy_in")) CHECK(op.outputs[0].shape[0].size == copied);
      if (op.kind != OpKind::all_gather && op.kind != OpKind::reduce_scatter) continue;
      ++calls[op.kind], payload[op.kind] += payload_bytes(op, {}, places_of(plan, 0));
    }
    for (const OpKind kind : {OpKind::all_gather, OpKind::reduce_scatter}) {
      CHECK(calls[kind] == collectives);
      CHECK(payload[kind] == layer_elements * 4);
    }
  }
}

TEST_CASE("No two collectives of a unit have one name, whatever lies in place") {
  for (const char* name : {"demo", "gpt2-cpu", "mixtral-cpu", "gpt-oss-cpu", "deepseek-cpu", "hybrid-shards-cpu"})
    for (const int least : {1, 1000}) {
      INFO(name << ", from " << least);
      const auto s = load_scenario(fmt::format("{}/scenarios/{}.yaml", source_folder, name),
                                   {fmt::format("train.in_place_elements={}", least)});
      REQUIRE(s.has_value());
      const Plan plan = lowered(*s);
      for (const Program& program : plan.programs)
        for (const Body& body : program.bodies) {
          if (body.name.find("gather") == body.name.npos && body.name.find("reduce") == body.name.npos) continue;
          std::map<std::string, int> names;
          for (const Op& op : body.ops)
            if (op.kind == OpKind::all_gather || op.kind == OpKind::reduce_scatter) ++names[op.name];
          for (const auto& [op, times] : names) CHECK(fmt::format("{} {}", op, times) == op + " 1");
        }
    }
}

TEST_CASE("Resharded to a smaller mesh, backward gathers among few what they kept, and each keeps as much") {
  // 5 of 15 ranks, in whose flat parts of 932 elements 4,656 leave 4 of padding; 2 of 4, where nothing is padded.
  for (const auto& [world, few, part, pad] : {std::tuple{15, 5, 932, 4}, {4, 2, 2328, 0}})
    for (const auto& [precision, size] : {std::pair{"fp32", 4}, std::pair{"bf16", 2}}) {
      INFO(few << " of " << world << " ranks, " << precision);
      const Scenario s = tiny(
          world, 1,
          {fmt::format("train.reshard_after_forward={}", few), fmt::format("train.precision.params={}", precision)});
      const Plan plan = lowered(s);
      for (Rank r = 0; r < world; ++r) {
        std::map<GroupId, Traffic> of;
        for (const Op& op : ops_of(plan, r, "train", "micro"))
          if (op.kind == OpKind::all_gather) {
            Traffic& t = of[op.group];
            ++t.calls, t.payload += payload_bytes(op, {}, places_of(plan, r));
            t.padding += op.integer(Attr::padding_bytes, 0);
          }
        REQUIRE(of.size() == 2);
        CHECK(of.begin()->second.calls == 2 + layers);
        CHECK(of.begin()->second.payload == (root_elements + head_elements + layers * layer_elements) * size);
        CHECK(of.rbegin()->second == Traffic{layers, layers * layer_elements * size, layers * pad * size});
        const GroupFamily& family = plan.groups[static_cast<std::size_t>(of.rbegin()->first)];
        CHECK(family.name == "reshard");
        const std::vector<Rank>& group = plan.group_of(of.rbegin()->first, r);
        CHECK(std::ssize(group) == few);
        CHECK(group.front() == r / few * few);
      }
      int kept = 0;
      for (const Buffer& b : plan.program(0).buffers)
        if (b.name.ends_with(".kept")) {
          ++kept;
          CHECK(b.elements == part);
          CHECK(b.bytes() == part * size);
        }
      CHECK(kept == layers);
    }
}

TEST_CASE("One rank talks to nobody and gathers nothing") {
  const Plan plan = lowered(tiny(1, 1));
  for (const auto& blocks : plan.program(0).phases)
    for (const Block& block : blocks)
      for (const Op& op : ops_of(plan.program(0), block))
        CHECK(payload_bytes(op, {}, places_of(plan, 0)) == 0);  // its sync is a copy from itself
}

TEST_CASE("Gathers run ahead on their own stream, reduces on theirs") {
  const Plan plan = lowered(tiny(2, 1));
  for (const Op& op : ops_of(plan, 0, "train", "micro")) {
    if (op.kind == OpKind::all_gather) CHECK(op.stream == streams::gather);
    if (op.kind == OpKind::reduce_scatter) CHECK(op.stream == streams::reduce);
    if (is_compute(op.kind) && op.kind != OpKind::add) CHECK(op.stream == streams::compute);
  }
}

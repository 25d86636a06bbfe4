// Weight sync evaluated element by element: every element of every shard carries its own number, and every element of
// every rollout weight must end up with the number that layout/rollout_weights says belongs there, written once.
#include <fmt/format.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <set>

#include "graph/boxes.h"
#include "layout/rollout_weights.h"
#include "layout/scenario_layout.h"
#include "layout/train_weights.h"
#include "lowering/rollout.h"
#include "tiny.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

using Values = std::vector<std::int64_t>;
constexpr std::int64_t unwritten = -2, padding = -1;

struct Bases {
  std::map<std::string, std::int64_t> of;
  explicit Bases(const ModelSpec& model) {
    std::int64_t next = 0;
    for (const ParamSpec& p : parameters_of(model)) of[p.name] = next, next += p.numel();
  }
};

/// What one rank's shard buffers hold, by buffer name.
std::map<std::string, Values> shards(const ModelSpec& model, const Bases& bases, int world, int rank) {
  std::map<std::string, Values> out;
  for (const ShardedUnit& unit : train_units(model, 1, world, rank)) {
    Values& v = out["train." + unit.name + ".shard"];
    v.assign(static_cast<std::size_t>(unit.shard_elements), padding);
    for (const UnitParam& p : unit.params)
      for (std::int64_t i = 0; i < p.owned_elements(); ++i)
        v[static_cast<std::size_t>(p.shard_offset + i)] = bases.of.at(p.parameter) + p.shard.begin * p.cols + i;
  }
  return out;
}

template <class F>
void for_each_element(const Box& b, F&& f) {
  for (std::int64_t i = 0; i < b.rows; ++i)
    for (std::int64_t j = 0; j < b.cols; ++j)
      f(static_cast<std::size_t>(b.src_offset + i * b.src_pitch + j),
        static_cast<std::size_t>(b.dst_offset + i * b.dst_pitch + j));
}

struct Synced {
  std::map<std::string, Values> weights;
  std::int64_t writes_too_many = 0;
  std::int64_t hashed = 0, hashed_shard = 0, mismatches = 0;  // elements; those hashed under another name or index
};

const std::string& name_of_buffer(const Program& p, const Tensor& t) {
  return p.buffers[static_cast<std::size_t>(t.buffer)].name;
}

/// The sync phase of every rank, evaluated. Packs first: a bucket's readers wait for all of its writers.
std::vector<Synced> evaluate(const Plan& plan, const ModelSpec& model) {
  const Bases bases(model);
  const int world = plan.num_ranks();
  std::vector<std::map<std::string, Values>> parts(static_cast<std::size_t>(world)), all_shards;
  for (int r = 0; r < world; ++r) {
    const auto& shard = all_shards.emplace_back(shards(model, bases, world, r));
    for (const Op& op : ops_of(plan, r, "sync", "sync")) {
      if (op.kind != OpKind::copy_boxes || !op.name.ends_with("pack") || op.name.ends_with("unpack")) continue;
      Values& part = parts[static_cast<std::size_t>(r)][op.name.substr(0, op.name.size() - 4)];
      part.assign(static_cast<std::size_t>(op.outputs[0].capacity()), padding);
      for (const Box& box : boxes_of(op, places_of(plan, r))) {
        const Values& from = shard.at(name_of_buffer(plan.program(r), op.inputs[static_cast<std::size_t>(box.input)]));
        for_each_element(box, [&](auto s, auto d) { part.at(d) = from.at(s); });
      }
    }
  }
  const auto all_parts = [&](const std::string& bucket) {
    Values whole;
    for (auto& of_rank : parts) whole.insert(whole.end(), of_rank.at(bucket).begin(), of_rank.at(bucket).end());
    return whole;
  };
  std::vector<Synced> out(static_cast<std::size_t>(world));
  for (int r = 0; r < world; ++r) {
    const Program& program = plan.program(r);
    Synced& mine = out[static_cast<std::size_t>(r)];
    for (const Buffer& b : program.buffers)
      if (b.section == sections::rollout_weights)
        mine.weights[b.name].assign(static_cast<std::size_t>(b.elements), unwritten);
    const auto write = [&](const Tensor& t, std::size_t element, std::int64_t value) {
      std::int64_t& to = mine.weights.at(name_of_buffer(program, t)).at(element);
      if (to != unwritten && to != padding) ++mine.writes_too_many;
      to = value;
    };
    // Before the slices arrive: on some ranks they fill it.
    const auto zeroed = [&](const Tensor& t, std::size_t element) {
      std::int64_t& to = mine.weights.at(name_of_buffer(program, t)).at(element);
      if (to != unwritten) ++mine.writes_too_many;
      to = padding;
    };
    for (const Op& op : ops_of(plan, r, "sync", "sync")) {
      const std::string bucket = op.name.substr(0, op.name.rfind('.') + 1);
      const bool unpacks = op.kind == OpKind::copy_boxes && op.name.ends_with("unpack");
      if (op.kind == OpKind::zero && op.name.starts_with("sync.padding."))
        for (std::int64_t i = 0; i < op.outputs[0].capacity(); ++i)
          zeroed(op.outputs[0], static_cast<std::size_t>(op.outputs[0].offset_bytes / 4 + i));
      if (op.kind == OpKind::hash_boxes) {
        for (const Box& box : boxes_of(op, places_of(plan, r))) {
          const std::string& from = name_of_buffer(program, op.inputs[static_cast<std::size_t>(box.input)]);
          const bool rollout = mine.weights.contains(from);
          const Values& values = rollout ? mine.weights.at(from) : all_shards[static_cast<std::size_t>(r)].at(from);
          for_each_element(box, [&](auto s, auto index) {
            ++(rollout ? mine.hashed : mine.hashed_shard);
            if (values.at(s) != bases.of.at(op.name) + static_cast<std::int64_t>(index)) ++mine.mismatches;
          });
        }
        continue;
      }
      if (!unpacks && op.kind != OpKind::peer_copy) continue;
      const Values whole = op.kind == OpKind::peer_copy ? Values{} : all_parts(bucket);
      for (const Box& box : boxes_of(op, places_of(plan, r))) {
        const Values& from = op.kind == OpKind::peer_copy
                                 ? parts[static_cast<std::size_t>(box.peer < 0 ? r : box.peer)].at(bucket)
                                 : whole;
        for_each_element(
            box, [&](auto s, auto d) { write(op.outputs[static_cast<std::size_t>(box.output)], d, from.at(s)); });
      }
    }
  }
  return out;
}

/// What the rollout weights of one rank should hold.
std::map<std::string, Values> wanted(const Scenario& s, int rank) {
  const Bases bases(s.model);
  std::map<std::string, std::int64_t> cols;
  for (const ParamSpec& p : parameters_of(s.model)) cols[p.name] = p.shape.size() == 2 ? p.shape[1] : 1;
  std::map<std::string, Values> out;
  const std::int64_t tp = s.rollout.layout.tp, place = engine_seat(s.rollout.layout, rank).place,
                     group = place % tp / (tp / s.rollout.layout.ep);  // of those that have other experts
  for (const LocalWeight& w :
       rollout_weights(s.model, engine_cuts(s)[static_cast<std::size_t>(place / tp)], place % tp)) {
    Values& v = out["rollout." + w.name];
    v.assign(static_cast<std::size_t>(w.elements()), padding);
    for (const auto& [parameter, p, step, holder] : w.sources)
      for (std::int64_t r = p.row_begin; r < p.row_end && (holder < 0 || holder == group); ++r)
        for (std::int64_t c = p.col_begin; c < p.col_end; ++c)
          v.at(static_cast<std::size_t>(p.offset + (r - p.row_begin) * p.pitch + c - p.col_begin)) =
              bases.of.at(parameter) + r * cols.at(parameter) + c;
  }
  return out;
}

}  // namespace

namespace {

void check_arrivals(const Scenario& s) {
  const std::vector<Synced> synced = evaluate(lowered(s), s.model);
  std::int64_t hashed_shards = 0;
  for (int r = 0; r < static_cast<int>(synced.size()); ++r) {
    const Synced& mine = synced[static_cast<std::size_t>(r)];
    const auto expected = wanted(s, r);
    CHECK(mine.weights == expected);
    CHECK(mine.writes_too_many == 0);
    // The check at run time looks at every element that a parameter fills.
    std::int64_t filled = 0;
    for (const auto& [name, values] : expected)
      filled += std::count_if(values.begin(), values.end(), [](auto v) { return v != padding; });
    CHECK(mine.hashed == filled);
    CHECK(mine.mismatches == 0);
    hashed_shards += mine.hashed_shard;
  }
  CHECK(hashed_shards == parameter_count(s.model));
}

}  // namespace

TEST_CASE("Every element of every rollout weight arrives once, from the shard that owns it") {
  for (const auto& [world, tp] : std::vector<std::pair<int, int>>{{1, 1}, {2, 2}, {3, 1}, {4, 1}, {4, 2}, {4, 4}})
    for (const char* transport : {"ipc", "collective"})
      for (const char* order : {"contiguous", "strided"})
        for (const char* bucket : {"0.001", "0.008", "1"}) {
          INFO(world << " ranks, tp " << tp << ", " << transport << ", " << order << ", bucket " << bucket << " MiB");
          check_arrivals(tiny(world, tp,
                              {fmt::format("sync.transport={}", transport), fmt::format("sync.bucket_mib={}", bucket),
                               fmt::format("rollout.layout.order={}", order), "sync.verify=true"}));
        }
}

TEST_CASE(
    "and so where engines have whole experts, columns of some, attention of their own, stages, or several of these") {
  struct Way {
    int tp, ep, pp;
    bool tied = false;
    int attention_dp = 1;
  };
  for (const Way way : {Way{2, 2, 1},
                        {4, 4, 1},
                        {1, 1, 3},
                        {2, 1, 3, true},
                        {2, 2, 3},
                        {4, 2, 1},
                        {4, 2, 3},
                        {4, 2, 1, true, 2},
                        {4, 1, 1, false, 4},
                        {4, 2, 3, true, 2}})
    for (const char* transport : {"ipc", "collective"})
      for (const char* order : {"contiguous", "strided"})
        for (const char* bucket : {"0.001", "1"}) {
          CAPTURE(way.tp, way.ep, way.pp, way.attention_dp, transport, order, bucket);
          const int world = way.tp * way.pp * 2;
          check_arrivals(
              tiny(world, way.tp,
                   {fmt::format("sync.transport={}", transport), fmt::format("sync.bucket_mib={}", bucket),
                    fmt::format("rollout.layout.order={}", order), "sync.verify=true",
                    fmt::format("rollout.layout.ep={}", way.ep), fmt::format("rollout.layout.pp={}", way.pp),
                    fmt::format("rollout.layout.attention_dp={}", way.attention_dp), "rollout.kv_cache_tokens=80",
                    "rollout.layout.dp=2", fmt::format("model.tie_word_embeddings={}", way.tied),
                    "cluster.device_memory_mib=2", "model.model_type=mixtral", "model.num_local_experts=4",
                    "model.num_experts_per_tok=2", "model.architectures=[MixtralForCausalLM]"}));
        }
}

TEST_CASE("What training pads a vocabulary by is no part of what a sync brings") {
  // 33 rows of 24 twice, in padded rows of shards; norms are on every tensor-parallel rank: each sends its own.
  const std::int64_t norms = (2 * layers + 1) * 24;
  for (const int tp : {1, 2})
    for (const int multiple : {0, 7, 64, 4096}) {
      CAPTURE(tp, multiple);
      const Scenario s =
          tiny(4, 1,
               {"sync.transport=collective", fmt::format("train.layout={{dp: {}, tp: {}}}", 4 / tp, tp),
                fmt::format("train.make_vocab_size_divisible_by={}", multiple), "cluster.device_memory_mib=16"});
      const Plan plan = lowered(s);
      std::int64_t payload = 0, sent = 0;
      for (const Op& op : ops_of(plan, 0, "sync", "sync")) {
        if (op.kind != OpKind::all_gather) continue;
        payload += payload_bytes(op, Sizes{}, places_of(plan, 0));
        sent += op.outputs[0].capacity_bytes();
      }
      CHECK(payload == 4 * (parameter_count(s.model) + (tp - 1) * norms));
      // At most as if each of the 4 ranks had all rows of both tables, which the first one has for large multiples.
      CHECK(sent <= payload + 4 * 4 * 2 * 33 * 24);
    }
}

TEST_CASE("A bucket is no larger than it may be, except for a single row; a large parameter spreads over several") {
  for (int world : {1, 3, 4})
    for (std::int64_t bytes : {100, 1048, 8388}) {
      Scenario s = tiny(world, 1);
      s.sync.bucket_bytes = bytes;  // smaller than a scenario file may ask for: less than one row of all ranks
      const Plan plan = lowered(s);
      std::set<std::string> with_embedding;
      std::int64_t elements = 0;
      for (const Op& op : ops_of(plan, 0, "sync", "sync")) {
        if (op.kind != OpKind::copy_boxes) continue;
        const std::int64_t bucket = op.outputs[0].capacity_bytes() * world;
        const std::vector<Box> boxes = boxes_of(op, places_of(plan, 0));
        const bool one_row = boxes.size() == 1 && (boxes[0].cols == 24 || boxes[0].cols == 40);
        INFO(op.name << ": " << bucket << " of " << bytes);
        CHECK((bucket <= bytes || one_row));
        elements += op.outputs[0].capacity();
        // The embedding is the root's first parameter: ceil(33 / world) rows of 24.
        for (const Box& b : boxes)
          if (name_of_buffer(plan.program(0), op.inputs[static_cast<std::size_t>(b.input)]) == "train.root.shard" &&
              b.src_offset < (33 + world - 1) / world * 24)
            with_embedding.insert(op.name);
      }
      std::int64_t all = 0;
      for (const ShardedUnit& u : train_units(tiny(world, 1).model, 1, world, 0)) all += u.shard_elements;
      CHECK(elements == all);
      CHECK((with_embedding.size() > 1) == (bytes < 33 * 24 * 4));
    }
}

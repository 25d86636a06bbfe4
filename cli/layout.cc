// layout: which rank holds what, in training and in the engines, on which GPU.
#include "layout/layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "base/json.h"
#include "base/printable.h"
#include "cli/command.h"
#include "cli/streams.h"
#include "layout/devices.h"
#include "layout/expert_copies.h"
#include "layout/pipeline_diagram.h"
#include "layout/rollout_weights.h"
#include "layout/scenario_layout.h"
#include "layout/train_mesh.h"
#include "lowering/rollout.h"
#include "lowering/sample_rows.h"
#include "spec/expert_rounds.h"
#include "spec/loader.h"
#include "spec/names.h"
#include "trace/text_table.h"

namespace hotbunk {
namespace {

using Json = nlohmann::ordered_json;
constexpr std::int64_t most_rows = 64;  // of the table; --json has every rank
/// Names of the expert mesh's axes: edp has the ranks that hold the same experts.
constexpr std::pair<const char*, const char*> expert_axes[] = {{"ep", "ep"}, {"etp", "etp"}, {"edp", "dp"}};

struct Options {
  ScenarioOptions scenario;
  std::int64_t rank = -1;
};

/// A scenario's two layouts and the place of every rank. Ranks of engines that have GPUs of their own come behind the
/// trainer's.
class Seats {
 public:
  Seats(const Scenario& s, TrainHoldings train, Layout engines)
      : s_(s),
        train_(std::move(train)),
        engines_(std::move(engines)),
        first_engine_rank_(s.placement == PlacementMode::disaggregated ? train_.dense().size() : 0) {}

  std::int64_t ranks() const {
    return std::max(train_.dense().size(), rolls_out() ? first_engine_rank_ + s_.rollout.layout.ranks() : 0);
  }
  bool rolls_out() const { return s_.algorithm.name != AlgorithmName::sft; }
  bool trains(std::int64_t r) const { return r < train_.dense().size(); }
  bool serves(std::int64_t r) const {
    return rolls_out() && r >= first_engine_rank_ && r < first_engine_rank_ + s_.rollout.layout.ranks();
  }
  std::int64_t in_engines(std::int64_t r) const { return r - first_engine_rank_; }

  Json place(std::int64_t r) const {
    const std::int64_t per_node = std::max<std::int64_t>(1, s_.cluster.ranks_per_node());
    return {{"rank", r}, {"node", r / per_node}, {"gpu", r % per_node / std::max<std::int64_t>(1, per_device())}};
  }

  Json training(std::int64_t r) const {
    Json coordinates = Json::object(), groups = Json::object(), layers = Json::array();
    for (const MeshAxis& axis : train_.dense().axes()) coordinates[axis.name] = train_.dense().coordinate(r, axis.name);
    if (is_moe())
      for (const auto& [name, axis] : expert_axes) coordinates[name] = train_.expert().coordinate(r, axis);
    for (const MeshAxis& axis : train_.dense().axes())
      if (axis.size > 1) groups[axis.name] = train_.dense().group_of(r, {axis.name});
    if (is_moe())
      for (const auto& [name, axis] : expert_axes)
        if (train_.expert().extent(axis) > 1) groups[name] = train_.expert().group_of(r, {axis});
    if (train_.shards() > 1) {
      groups["shard"] = train_.shard_group(r);
      if (const auto replicas = train_.replicas(r); replicas.size() > 1) groups["replicate"] = replicas;
    }
    for (const StageChunk& c : train_.chunks_of(r)) layers.push_back({c.layers.begin, c.layers.end});
    Json out = {{"coordinates", coordinates}, {"groups", groups}, {"layers", layers}};
    if (train_.shards() > 1) out["shard"] = {train_.shard_of(r), train_.shards()};
    add_heads(out, s_.train.layout.tp, train_.dense().coordinate(r, "tp"));
    if (is_moe()) {
      const Range e = even_range(s_.model.moe->experts, s_.train.layout.ep, train_.expert().coordinate(r, "ep"));
      out["experts"] = {e.begin, e.end};
    }
    out["parameters"] = train_.elements(r);
    return out;
  }

  Json engine(std::int64_t r) const {
    const EngineSeat seat = engine_seat(s_.rollout.layout, in_engines(r));
    const RolloutLayout& l = s_.rollout.layout;
    const Range layers = engine_stage_layers(s_, engine_stage(l, in_engines(r)));
    Json groups = Json::object();
    const auto add_group = [&](const Mesh& mesh, const char* axis) {
      if (mesh.extent(axis) < 2) return;
      std::vector<std::int64_t> members = mesh.group_of(in_engines(r), {axis});
      for (std::int64_t& member : members) member += first_engine_rank_;
      groups[axis] = members;
    };
    for (const MeshAxis& axis : engines_.dense.axes())
      if (axis.name != "dp") add_group(engines_.dense, axis.name.c_str());
    Json out = {
        {"engine", seat.engine}, {"place", seat.place}, {"groups", {}}, {"layers", {{layers.begin, layers.end}}}};
    if (is_moe()) {
      add_group(engines_.expert, "ep");
      const Range e = even_range(s_.model.moe->experts, l.ep, engines_.expert.coordinate(in_engines(r), "ep"));
      out["experts"] = {e.begin, e.end};
    }
    out["groups"] = groups;
    if (l.cp > 1) out["cp"] = seat.place / l.tp % l.cp;
    const std::int64_t sharers = l.tp / l.attention_dp;
    if (l.attention_dp > 1) out["attention_dp"] = seat.place % l.tp / sharers;
    add_heads(out, sharers, seat.place % sharers);
    std::int64_t elements = 0;
    for (const ParamSpec& p : parameters_of(s_.model)) elements += of_engine(p, r).elements();
    out["parameters"] = elements;
    return out;
  }

  Json rectangles(std::int64_t r) const {
    const auto box = [](const Rectangle& b) -> Json {
      if (b.elements() == 0) return nullptr;
      return {b.rows.begin, b.rows.end, b.cols.begin, b.cols.end};
    };
    const auto boxes = [&](const std::vector<Rectangle>& all) -> Json {  // several: runs of a flat unit
      if (all.size() < 2) return all.empty() ? Json(nullptr) : box(all.front());
      Json list = Json::array();
      for (const Rectangle& b : all) list.push_back(box(b));
      return list;
    };
    Json out = Json::array();
    for (const ParamSpec& p : parameters_of(s_.model)) {
      Json line = {{"parameter", p.name}, {"shape", p.shape}};
      if (trains(r)) line["training"] = boxes(train_.held(p, r));
      if (serves(r)) line["engine"] = box(of_engine(p, r));
      out.push_back(std::move(line));
    }
    return out;
  }

 private:
  bool is_moe() const { return s_.model.moe && s_.model.moe->experts > 0; }
  std::int64_t per_device() const {
    return std::max<std::int64_t>(1, s_.cluster.ranks_per_node() / std::max<std::int64_t>(1, s_.cluster.gpus_per_node));
  }
  Rectangle of_engine(const ParamSpec& p, std::int64_t r) const {
    return held_by(engines_, s_.model, p, in_engines(r));
  }
  /// Query and KV heads of a tensor-parallel place; a latent KV cache has none to cut.
  void add_heads(Json& out, std::int64_t tp, std::int64_t place) const {
    if (s_.model.heads % tp != 0) return;
    if (s_.model.mla) {
      const Range query = even_range(s_.model.heads, tp, place);
      out["heads"] = {query.begin, query.end};
      return;
    }
    const HeadRanges heads = heads_of_rank(s_.model, tp, place);
    out["heads"] = {heads.query.begin, heads.query.end};
    out["kv_heads"] = {heads.key_value.begin, heads.key_value.end};
  }

  const Scenario& s_;
  TrainHoldings train_;
  Layout engines_;
  std::int64_t first_engine_rank_ = 0;
};

std::string span_of(const Json& range) {
  return fmt::format("{}-{}", range[0].get<std::int64_t>(), range[1].get<std::int64_t>() - 1);
}

std::string cell(const Json& part, const char* key) {
  return part.contains(key) ? span_of(part[key]) : std::string("-");
}

std::string table_of(const Json& ranks) {
  // Where all ranks of an engine have the same, these columns would say nothing.
  const auto cut_by = [&](const char* axis) {
    return std::ranges::any_of(
        ranks, [&](const Json& r) { return r.contains("engine") && r["engine"]["groups"].contains(axis); });
  };
  const bool layers_differ = cut_by("pp"), experts_differ = cut_by("ep");
  std::vector<std::string> columns = {"rank", "node.gpu", "training",   "layers", "heads",
                                      "KV",   "experts",  "parameters", "engine"};
  if (layers_differ) columns.emplace_back("layers");
  columns.insert(columns.end(), {"heads", "KV"});
  if (experts_differ) columns.emplace_back("experts");
  columns.emplace_back("parameters");
  const std::size_t of_engine = columns.size() - 8;
  TextTable table(std::move(columns), 3);
  for (const Json& r : ranks) {
    std::vector<std::string> row = {std::to_string(r["rank"].get<std::int64_t>()),
                                    fmt::format("{}.{}", r["node"].get<std::int64_t>(), r["gpu"].get<std::int64_t>())};
    if (r.contains("training")) {
      const Json& t = r["training"];
      std::vector<std::string> where, layers;
      for (const auto& [axis, place] : t["coordinates"].items())
        if (t["groups"].contains(axis)) where.push_back(fmt::format("{} {}", axis, place.get<std::int64_t>()));
      if (t.contains("shard"))
        where.push_back(
            fmt::format("shard {} of {}", t["shard"][0].get<std::int64_t>(), t["shard"][1].get<std::int64_t>()));
      for (const Json& chunk : t["layers"]) layers.push_back(span_of(chunk));
      row.insert(row.end(),
                 {fmt::format("{}", fmt::join(where, " ")), fmt::format("{}", fmt::join(layers, " ")), cell(t, "heads"),
                  cell(t, "kv_heads"), cell(t, "experts"), format_count(t["parameters"].get<std::int64_t>())});
    } else {
      row.insert(row.end(), 6, "-");
    }
    if (r.contains("engine")) {
      const Json& e = r["engine"];
      std::string seat = fmt::format("{}.{}", e["engine"].get<std::int64_t>(), e["place"].get<std::int64_t>());
      for (const char* axis : {"cp", "attention_dp"})
        if (e.contains(axis)) seat += fmt::format(" {} {}", axis, e[axis].get<std::int64_t>());
      row.push_back(seat);
      if (layers_differ) row.push_back(span_of(e["layers"][0]));
      row.insert(row.end(), {cell(e, "heads"), cell(e, "kv_heads")});
      if (experts_differ) row.push_back(cell(e, "experts"));
      row.push_back(format_count(e["parameters"].get<std::int64_t>()));
    } else {
      row.insert(row.end(), of_engine, "-");
    }
    table.add(std::move(row));
  }
  return table.str();
}

std::string rectangles_text(const Json& rectangles) {
  TextTable table({"parameter", "shape", "training", "engine"}, 4);
  const auto one = [](const Json& b) {
    return fmt::format("[{}:{}, {}:{}]", b[0].get<std::int64_t>(), b[1].get<std::int64_t>(), b[2].get<std::int64_t>(),
                       b[3].get<std::int64_t>());
  };
  const auto box = [&](const Json& line, const char* key) {
    if (!line.contains(key) || line[key].is_null()) return std::string("-");
    if (!line[key][0].is_array()) return one(line[key]);
    std::string all;
    for (const Json& b : line[key]) all += (all.empty() ? "" : " ") + one(b);
    return all;
  };
  for (const Json& line : rectangles)
    table.add({line["parameter"].get<std::string>(),
               fmt::format("{}", fmt::join(line["shape"].get<std::vector<std::int64_t>>(), " x ")),
               box(line, "training"), box(line, "engine")});
  return table.str();
}

/// Enough micro-batches to see a pipeline fill, run and drain.
std::int64_t shown_micro_batches(const Scenario& s) { return std::min(most_micro_batches(s), 2 * s.train.layout.pp); }

/// What travels to experts of other data ranks, and what the two ways of it cost.
Json dispatch_of(const Scenario& s) {
  const DispatchSeconds cost = dispatch_seconds(s);
  return {{"chosen", name_of(chosen_dispatch(s))},
          {"rows_of_token", rows_sent_of_token(s)},
          {"copies_of_token", expected_copies(*s.model.moe, expert_mesh(s))},
          {"per_expert_s", cost.per_expert},
          {"per_rank_s", cost.per_rank}};
}

std::string dispatch_text(const Json& d) {
  return fmt::format(
      "Tokens go to experts {}: of each {} rows ({} a layer) or {:.3f} copies ({}), if choices are even\n",
      d["chosen"].get<std::string>(), d["rows_of_token"].get<std::int64_t>(),
      format_seconds(d["per_expert_s"].get<double>()), d["copies_of_token"].get<double>(),
      format_seconds(d["per_rank_s"].get<double>()));
}

int run(const Options& o) {
  const auto loaded = load_chosen(o.scenario);
  if (!loaded) return report_errors(loaded.error());
  const Scenario* const scenario = &loaded->scenario;
  auto train = TrainHoldings::of(*scenario);
  if (!train) return report_errors(train.error());
  auto engines = engine_layout(*scenario);
  if (!engines) return report_errors(engines.error());
  const Seats seats(*scenario, std::move(*train), std::move(*engines));
  if (o.rank >= seats.ranks())
    return report_errors({{.code = "E143",
                           .message = fmt::format("--rank {}: there are ranks 0 to {}", o.rank, seats.ranks() - 1),
                           .where = {},
                           .notes = {},
                           .help = "name one of them"}});
  const bool all = o.scenario.json || seats.ranks() <= most_rows;
  Json doc = {{"schema", "hotbunk.layout/1"}, {"scenario", scenario->name}, {"ranks", Json::array()}};
  for (std::int64_t r = 0; r < seats.ranks(); ++r) {
    if (o.rank >= 0 ? r != o.rank : !all && r >= most_rows) continue;
    Json one = seats.place(r);
    if (seats.trains(r)) one["training"] = seats.training(r);
    if (seats.serves(r)) one["engine"] = seats.engine(r);
    if (o.rank >= 0) one["rectangles"] = seats.rectangles(r);
    doc["ranks"].push_back(std::move(one));
  }
  const Pipeline pipeline = pipeline_of(*scenario);
  const std::int64_t shown = shown_micro_batches(*scenario);
  if (pipeline.stages > 1)
    doc["pipeline"] = {{"schedule", name_of(pipeline.schedule)},
                       {"stages", pipeline.stages},
                       {"chunks", pipeline.chunks},
                       {"micro_batches", shown},
                       {"bubble", play_pipeline(pipeline, shown).bubble}};
  const bool spreads =
      scenario->train.expert_dispatch != ExpertDispatch::per_expert && expert_rounds(*scenario).most > 0;
  if (spreads) doc["expert_dispatch"] = dispatch_of(*scenario);
  if (loaded->exchange) doc["context_exchange"] = json_from<Json>(to_json(*loaded->exchange));
  if (o.scenario.json) {
    print_document(json_text(doc, 2));
    return exit_done;
  }
  std::string text = fmt::format("{}: {} ranks\n{}", scenario->name, seats.ranks(), table_of(doc["ranks"]));
  if (!all && o.rank < 0) text += fmt::format("  … {} more: --json, or --rank R\n", seats.ranks() - most_rows);
  if (spreads) text += dispatch_text(doc["expert_dispatch"]);
  if (loaded->exchange) text += fmt::format("Keys and values come by {}\n", render(*loaded->exchange));
  if (pipeline.stages > 1 && o.rank < 0)
    text += fmt::format(
        "\nPasses of {} micro-batches through equal stages ({}): 0 forward, 0' backward{}, . waits, {:.0f} % of the "
        "time\n{}",
        shown, name_of(pipeline.schedule), pipeline.defers_weights() ? ", 0\" gradients of weights" : "",
        100.0 * doc["pipeline"]["bubble"].get<double>(), pipeline_diagram(pipeline, shown));
  if (o.rank >= 0) {
    const Json& one = doc["ranks"][0];
    for (const auto& [part, words] : {std::pair{"training", "group"}, {"engine", "group of the engine"}})
      if (one.contains(part))
        for (const auto& [axis, members] : one[part]["groups"].items())
          text += fmt::format("  {} {}: {}\n", words, axis, fmt::join(members.get<std::vector<std::int64_t>>(), " "));
    text += "\nWhat it holds, as [rows, columns] of each parameter; training: between its steps\n" +
            rectangles_text(one["rectangles"]);
  }
  fmt::print("{}", printable(text));
  flush_output();
  say_next("plan", o.scenario);
  return exit_done;
}

}  // namespace

void add_layout(CommandLine& line) {
  auto o = std::make_shared<Options>();
  const Command sub = line.add_command("layout", "which rank holds what: stages, heads, experts, parameters, GPUs");
  add_scenario_options(sub, o->scenario);
  sub.option("--rank", o->rank, "one rank alone, with its rectangle of every parameter").check(whole_from(0));
  sub.action([o] { return run(*o); });
}

}  // namespace hotbunk

// `hotbunk layout` says of every rank what the lowered plan gives it.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <map>
#include <tuple>

#include "graph/bound.h"
#include "graph/boxes.h"
#include "layout/scenario_layout.h"
#include "lowering/lower.h"
#include "tests/lowering/tiny.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// By parameter, the elements of the logical tensor that a rank reads when it loads its trained weights.
std::map<std::string, std::vector<bool>> loaded(const Plan& plan, Rank rank, const ModelSpec& model) {
  std::map<std::string, std::vector<bool>> out;
  for (const ParamSpec& p : parameters_of(model)) out[p.name].resize(static_cast<std::size_t>(p.numel()));
  const Places places = places_of(plan, rank);
  const Program& program = plan.program(rank);
  for (const Block& block : program.phases[static_cast<std::size_t>(plan.phase_index("load"))])
    each_op(program, block, [&](const BoundOp& op) {
      if (op->kind != OpKind::feed || op.buffer(op->outputs[0]).section_name() != "train_params") return;
      for (const Box& b : boxes_of(*op, places))
        for (std::int64_t i = 0; i < b.rows; ++i)
          for (std::int64_t j = 0; j < b.cols; ++j)
            out.at(op.name())[static_cast<std::size_t>(b.src_offset + i * b.src_pitch + j)] = true;
    });
  return out;
}

}  // namespace

TEST_CASE("`hotbunk layout` has columns of experts where tensor parallelism is, whatever stands before it") {
  for (const char* layout :
       {"dp: 1, cp: 2, tp: 2, etp: 2, order: cp-tp-ep-dp-pp", "dp: 2, tp: 2, etp: 2, order: dp-tp-cp-ep-pp",
        "dp: 1, cp: 2, tp: 2, etp: 2, order: dp-tp-cp-ep-pp"}) {
    CAPTURE(layout);
    const Scenario s =
        tiny(4, 2,
             {fmt::format("train.layout={{{}}}", layout), "model.model_type=mixtral",
              "model.architectures=[MixtralForCausalLM]", "model.num_local_experts=4", "model.num_experts_per_tok=2"});
    const TrainHoldings holdings = TrainHoldings::of(s).value();
    for (Rank rank = 0; rank < 4; ++rank)
      CHECK(holdings.expert().coordinate(rank, "etp") == holdings.dense().coordinate(rank, "tp"));
  }
}

TEST_CASE("what `hotbunk layout` says a rank holds is what it loads") {
  for (const char* engine : {"fsdp2", "fsdp1", "ddp"})
    for (const auto& [dp, tp, fsdp, ep, etp] : {std::tuple{4, 1, -1, 0, 1},
                                                {2, 2, -1, 0, 1},
                                                {1, 4, -1, 0, 1},
                                                {4, 1, 2, 0, 1},
                                                {2, 2, 1, 0, 1},
                                                {2, 2, -1, 1, 2},  // with experts, of which each rank has a part
                                                {2, 2, -1, 2, 1},  // and whole ones
                                                {1, 4, -1, 4, 1},
                                                {1, 4, -1, 2, 2},  // parts of some
                                                {2, 2, -1, 1, 1},  // all, on each rank
                                                {2, 2, 1, 1, 1},
                                                {1, 4, -1, 1, 2},  // parts of all on every other one
                                                {1, 4, -1, 2, 1}}) {
      if (std::string(engine) == "ddp" && fsdp != -1) continue;
      CAPTURE(engine, dp, tp, fsdp, ep, etp);
      std::vector<std::string> sets = {fmt::format("train.engine={}", engine), fmt::format("train.layout.dp={}", dp),
                                       fmt::format("train.layout.tp={}", tp),
                                       fmt::format("train.layout.fsdp={}", fsdp)};
      if (ep > 0)
        sets.insert(sets.end(), {fmt::format("train.layout.ep={}", ep), fmt::format("train.layout.etp={}", etp),
                                 fmt::format("train.layout.sp={}", tp > 1), "model.model_type=mixtral",
                                 "model.architectures=[MixtralForCausalLM]", "model.num_local_experts=4",
                                 "model.num_experts_per_tok=2"});
      const Scenario s = tiny(4, 2, sets);
      const Plan plan = lower(s).value();
      const TrainHoldings holdings = TrainHoldings::of(s).value();
      for (Rank rank = 0; rank < 4; ++rank) {
        const auto found = loaded(plan, rank, s.model);
        std::int64_t all = 0;
        for (const ParamSpec& p : parameters_of(s.model)) {
          CAPTURE(rank, p.name);
          const Rectangle whole_box = whole(p);
          std::vector<bool> said(static_cast<std::size_t>(p.numel()));
          for (const Rectangle& box : holdings.held(p, rank)) {
            for (std::int64_t r = box.rows.begin; r < box.rows.end; ++r)
              for (std::int64_t c = box.cols.begin; c < box.cols.end; ++c)
                said[static_cast<std::size_t>(r * whole_box.cols.size() + c)] = true;
            all += box.elements();
          }
          // Where parameters are whole and the optimizer has a master copy, both are loaded.
          CHECK(said == found.at(p.name));
        }
        CHECK(holdings.elements(rank) == all);
      }
    }
}

// The answer of `plan`: which layouts of the same GPUs are best, where the scenario's own stands, why the winner wins,
// which better ones nearly fit, and the --set flags that select each.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "planner/answers/answers.h"

namespace hotbunk {

/// The scenario with the point's layout, shifts and sync written into it.
Scenario with_point(Scenario, const RlPoint&);
/// The same of a scenario whose point, rl_point_of() it, is known to be `own`.
Scenario with_point(Scenario, const RlPoint& own, const RlPoint&);

/// "train.layout.dp=4", …: what --set needs to turn the scenario into `with_point`; empty for its own point. From the
/// table of keys, so that the loader takes what is printed.
std::vector<std::string> flags_of(const Scenario&, const RlPoint&);
/// "a.b.c=value" of every key in which the second differs.
std::vector<std::string> flags_between(const Scenario&, const Scenario&);

struct ChoiceOptions {
  Objective objective = Objective::seconds;
  // Fraction of device memory left free; unset: the error of predicted bytes (memory_error), 0 where plans count them.
  std::optional<double> headroom{};
  std::size_t top = 5;      // rows
  std::int64_t budget = 0;  // prices, 0: all; with one, of a lowered scenario the promising cuts alone
  bool front = true;        // Choices::pareto, too
};

struct ChoiceRow {
  std::string profile;  // of the system's other trainer; empty: the scenario's own
  RlPoint point;
  RlPrice price;
  bool own = false;                 // the scenario's layout
  std::int64_t gpus = 0;            // a critic's own among them
  double tokens_per_gpu = 0;        // per second
  double gpu_hours = 0, money = 0;  // per million samples; money 0: no price is known
  std::vector<std::string> flags;
  double bytes_over = 0;  // of what does not fit, at its fullest moment
  std::string moment;     // the fullest, or "host"
  Verdict verdict = Verdict::fits;
};

struct Choices {
  ChoiceOptions options;
  std::vector<ChoiceRow> rows;        // best first, the scenario's own in its place (last when it does not fit)
  std::vector<ChoiceRow> infeasible;  // better than the best row, the nearest to fitting first
  std::vector<ChoiceRow> pareto;      // seconds against the fullest moment
  std::int64_t points = 0, priced = 0, feasible = 0;
  bool complete = true;
  double gap = 0;
  double limit_bytes = 0;
  std::string framework;                 // whose profile
  std::optional<Sourced> seconds_error;  // of an iteration, by what was measured; nullopt: nothing was
  std::string reason;                    // why no row fits
  bool lowered = false;                  // the rows execute here, and their bytes are their plans', mapped
  std::vector<TrainCut> cuts;            // then: of training, that were searched; empty: all
  std::string other_trainer;             // whose layouts are ranked with the scenario's, a profile; empty: nobody's
  std::vector<ChoiceRow> beyond;  // then: the best of all that is priced, if better than the rows; it does not execute
};
/// E262 when money is asked for and no price is known.
Result<Choices> choose(const ScenarioPricer&, const ChoiceOptions&);
/// The same with the layouts of the system's other trainer, FSDP beside Megatron (verl, slime), in one ranking. A
/// lowered scenario has none: what executes has one trainer.
Result<Choices> choose_trainer(const ScenarioPricer&, const ChoiceOptions&);
/// The scenario under the other profile of its system, every rank a data rank; nullopt: there is none, or it is not
/// legal.
std::optional<Scenario> with_other_trainer(const Scenario&);
std::string describe(const ChoiceRow&);
std::string render(const Choices&);
std::string to_json(const Choices&);

/// "seconds", "money", …: --objective's word. E262 with the list.
Result<Objective> objective_named(const std::string&);

}  // namespace hotbunk

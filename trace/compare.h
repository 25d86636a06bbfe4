// Two traces of one plan side by side: bytes and calls must be equal (P1, P2), times come with their error (P6).
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "trace/trace.h"

namespace hotbunk {

/// One number that differs. `what` says which: "live peak of params", "all_gather over fsdp: calls".
struct Difference {
  Rank rank = 0;           // -1: all together
  std::int32_t step = -1;  // -1: over all steps
  std::string phase;       // "": over all phases
  std::string what;
  std::int64_t a = 0, b = 0;
};

/// One phase of one step; seconds that a rank spends in it, mean over ranks.
struct TimeRow {
  std::int32_t step = 0;
  std::string phase;
  double a_s = 0.0, b_s = 0.0;
  double error = 0.0;  // (a - b) / b: positive when a says longer; 0 when b is 0
};

/// One phase over all steps.
struct TimeTotal {
  std::string phase;
  std::int64_t times = 0;       // of b
  double a_s = 0.0, b_s = 0.0;  // seconds of a rank, mean over ranks; a's for as many times as b has
};

/// Rounds in which rows came to experts (Attr::rounds), in one phase, of the steps that both sides kept spans of. How
/// many it takes is the routers' affair and no difference: those that nobody needs are called, and send nothing.
struct RoundsRow {
  std::string phase;
  std::int64_t planned = 0;    // of one exchange of all rows, there or back
  std::int64_t exchanges = 0;  // of b, of all layers, micro-batches and groups
  std::int64_t a = 0, b = 0;   // rounds that had rows, of all exchanges together
  friend bool operator==(const RoundsRow&, const RoundsRow&) = default;
};

struct Comparison {
  std::string a_source, b_source;  // "simulated", "measured"
  bool equal = false;              // no differences: every byte and every call
  std::int64_t numbers_compared = 0;
  std::vector<Difference> differences;
  std::vector<TimeRow> times;     // of the steps that both have rows of
  std::vector<TimeTotal> totals;  // over all steps, in order of time
  std::vector<RoundsRow> rounds;  // in the order of the plan's phases; nothing where rows come at once
  double mean_error = 0.0;        // of |error| of the phases' totals over steps, each weighted by its share of b
  double max_error = 0.0;         // of the same, over phases that take at least 1 % of b's time
  double iteration_error = 0.0;   // of the sum of all phases' seconds, signed
};

/// Memory: for every rank and space, the live and mapped peaks and what stays at the end; per category except overhead
/// the peak and its share at the peak; the same per phase: over all steps. Traffic: for every rank, phase, group and op
/// the calls, payload, padding and wire bytes (but of what routers share out between the wires) over all steps, and in
/// each step that both sides have rows of. Visits: likewise, how often each phase was entered and the blocks run. Ops:
/// for every rank, step, phase and kind how many ran and the bytes they read and wrote, of rows that the device counts
/// all ranks together, in the steps that both sides kept spans of. Both traces must be of `plan` (trace_fits_plan).
Comparison compare_traces(const Plan&, const Trace& a, const Trace& b);

/// Schema "hotbunk.compare/1".
nlohmann::ordered_json comparison_to_json(const Comparison&);

/// Verdict, differences (the first 40, then how many more) and the table of times.
std::string render_comparison(const Comparison&, bool colour);
/// Its parts, for who shows the times in a table of its own: verdict and differences; the line below the table.
std::string render_verdict(const Comparison&, bool colour);
std::string render_time_error(const Comparison&);
/// "+4.2 %", or "-" where nothing was measured.
std::string error_text(const TimeTotal&);

}  // namespace hotbunk

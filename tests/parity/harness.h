// Runs scenarios on forked CPU ranks and beside them in the simulator; shared by the parity tests.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "backends/cpu_gloo/cpu_backend.h"
#include "exec/lengths.h"
#include "graph/plan.h"
#include "spec/scenario.h"
#include "trace/trace.h"

namespace hotbunk::testing {

/// A tiny model with uneven shards: vocabulary 33 over 2 and 4 ranks, GQA with 2 KV heads; task "reverse" with 3
/// digits.
Scenario tiny_scenario(int world, int tp, const std::vector<std::string>& sets = {});

/// The same with matrices that have a packed order in fp32 and in bf16, where the machine knows one: 64 columns, and
/// over two ranks 32 rows at least. Of the tiny ones AVX-512 packs none.
std::string packable_model(bool tied = false);

/// Whether the plan prepacks a matrix whose elements really move: by its shape, on this machine.
bool packs(const Plan&);

/// A buffer of a rank with its elements where the layout has them, once the plan's phases have come past what prepacks
/// it, if anything does: in a copy, put back into rows. `moved`: they lay elsewhere.
struct Rows {
  std::vector<std::byte> bytes;
  bool moved = false;
};
Rows rows_of(const CpuBackend&, const Plan&, const std::string& buffer);

struct Case {
  std::string name;
  Scenario scenario;
  /// Changes the plan before it is executed; empty: none.
  std::function<void(Plan&)> mutate = {};
  /// Called on every rank before each phase, when all that came before is done; "" or what is wrong.
  std::function<std::string(const CpuBackend&, std::int32_t step, const std::string& phase)> before_phase = {};
  /// Not empty: every rank is to stop with an error that contains it. The world is then good for nothing more.
  std::string fails_with = {};
  /// Called on every rank when all is done, with a hash of what its Driver fed, whose order does not count: samples'
  /// tokens among it. "" or what is wrong.
  std::function<std::string(std::uint64_t fed)> all_fed = {};
};

/// One case, executed: the trace of all ranks and the lengths that its samples had.
struct Outcome {
  const Case& job;
  const Plan& plan;
  const Trace& measured;
  const std::vector<SampleLengths>& lengths;
};
/// Looks at an outcome on rank 0; "" or what is wrong.
using Check = std::function<std::string(const Outcome&)>;

/// Launches one world of `ranks` processes that executes all cases in turn. "" or the first complaint.
std::string run_cases(int ranks, const std::vector<Case>&, const Check&, CpuOptions = {});

/// Simulates `plan` with the outcome's lengths.
Result<Trace> simulate(const Outcome&, const Plan& plan);

/// Simulates `plan`, which may not be the plan that was executed, with the outcome's lengths, and compares. "" when the
/// verifier accepts the plan and every byte and call is equal; else the first fault or difference.
std::string complaint(const Outcome&, const Plan& plan);

}  // namespace hotbunk::testing

// The programs of all ranks. Most of what ranks do does not depend on which rank it is: it is written once and shared
// (base/shared_vector.h), in memory and in every later pass, check and hash.
#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include "graph/plan.h"
#include "lowering/builder.h"
#include "lowering/lower.h"

namespace hotbunk {

/// Whether ranks serve rollout engines.
bool rolls_out(const Scenario&, Purpose);

/// One rank's program as it is written, before the passes.
struct WrittenRank {
  /// Where in the builder each phase's part lies, and whether every rank has the same.
  struct Part {
    ProgramBuilder::Mark begin, end;
    bool of_all_ranks = false;
  };
  ProgramBuilder builder;
  std::vector<Part> parts;   // [phase]
  std::int64_t tp_rank = 0;  // in its engine
};

/// The programs of a plan's ranks, finished.
class RankPrograms {
 public:
  /// The scenario and the plan, whose phases and ranks are known, outlive it.
  RankPrograms(const Scenario&, const Plan&, Purpose, std::int64_t kv_blocks);

  /// Those of ranks [begin, end), side by side; they share with one another's of earlier calls.
  std::vector<Program> lower(std::int64_t begin, std::int64_t end);
  /// A rank's, all of it written for this rank: what the shared ones must equal.
  Program lower_alone(std::int64_t rank) const;

 private:
  struct Lowered {
    WrittenRank written;
    Program finished;
  };
  WrittenRank write(std::int64_t rank, const WrittenRank* like) const;
  Lowered finish_whole(WrittenRank) const;
  Lowered lower_rank(std::int64_t rank) const;
  std::int64_t tp_rank_of(std::int64_t rank) const;

  const Scenario& scenario_;
  const Plan& plan_;
  Purpose purpose_;
  std::int64_t kv_blocks_;
  std::map<std::int64_t, Lowered> by_tp_rank_;  // the first rank of each
};

}  // namespace hotbunk

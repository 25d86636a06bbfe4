#include "lowering/rank_programs.h"

#include <algorithm>
#include <optional>

#include "base/parallel.h"
#include "graph/same_but_boxes.h"
#include "lowering/rollout.h"

namespace hotbunk {
namespace {

/// What the lowering of a phase reads of the rank, beside buffers and their ids: ranks that are alike in it are given
/// the same ops.
enum class Reads : std::uint8_t {
  nothing,
  seat,  // which slice of the rollout's weights is its own
  rows   // which rows of the parameters are its own
};

}  // namespace

bool rolls_out(const Scenario& s, Purpose purpose) {
  return purpose == Purpose::generate || (purpose == Purpose::job && s.algorithm.name != AlgorithmName::sft);
}

RankPrograms::RankPrograms(const Scenario& s, const Plan& plan, Purpose purpose, std::int64_t kv_blocks)
    : scenario_(s), plan_(plan), purpose_(purpose), kv_blocks_(kv_blocks) {}

std::int64_t RankPrograms::tp_rank_of(std::int64_t rank) const {
  return rolls_out(scenario_, purpose_) ? engine_seat(scenario_.rollout.layout, rank).tp_rank : 0;
}

/// `like`: the parts in which the two ranks are alike are its own.
WrittenRank RankPrograms::write(std::int64_t rank, const WrittenRank* like) const {
  using enum Reads;
  const Scenario& s = scenario_;
  WrittenRank out{ProgramBuilder(plan_.phases.size()), std::vector<WrittenRank::Part>(plan_.phases.size()),
                  tp_rank_of(rank)};
  ProgramBuilder& b = out.builder;
  const auto on = [&](const char* name, Reads reads, auto&& emit) {
    const std::int32_t phase = plan_.phase_index(name);
    if (phase < 0) return;
    WrittenRank::Part& part = out.parts[static_cast<std::size_t>(phase)];
    part = {.begin = b.mark(), .end = {}, .of_all_ranks = reads == nothing};
    if (like && (reads == nothing || (reads == seat && like->tp_rank == out.tp_rank)) &&
        like->parts[static_cast<std::size_t>(phase)].begin == part.begin)
      b.take(like->builder, phase, part.begin, like->parts[static_cast<std::size_t>(phase)].end);
    else emit(phase);
    part.end = b.mark();
  };
  const std::int64_t world = plan_.num_ranks();
  const TrainState train(s, b, world, rank, purpose_ == Purpose::job);
  on("load", rows, [&](auto p) { lower_load(b, train, p); });
  on("train", nothing, [&](auto p) { lower_train(s, b, train, p); });
  on("reference", nothing, [&](auto p) { lower_log_probs(s, b, train, p, Weights::reference, "reference."); });
  on("old_logprobs", nothing, [&](auto p) { lower_log_probs(s, b, train, p, Weights::trained, "old."); });
  on("checkpoint", nothing, [&](auto p) { lower_export(b, train, p, "checkpoint."); });
  on("export", nothing, [&](auto p) { lower_export(b, train, p, "export."); });
  on("sleep_optimizer", nothing, [&](auto p) { lower_sleep_optimizer(b, train, p); });
  on("sleep_train", nothing, [&](auto p) { lower_sleep_params(b, train, p); });
  on("wake_train", nothing, [&](auto p) { lower_wake_train(b, train, p); });
  if (!rolls_out(s, purpose_)) return out;
  const RolloutState rollout(s, b, rank, kv_blocks_);
  on("start_rollout", nothing, [&](auto p) { lower_start_rollout(s, b, rollout, p); });
  on("wake_rollout", nothing, [&](auto p) { lower_wake_rollout(s, b, rollout, p); });
  on("sync", rows, [&](auto p) { lower_sync(s, b, train, rollout, rank, p); });
  on("wake_kv", nothing, [&](auto p) { lower_wake_kv(b, rollout, p); });
  on("rollout", seat, [&](auto p) { lower_rollout(s, b, rollout, p); });
  on("sleep_rollout", nothing, [&](auto p) { lower_sleep_rollout(s, b, rollout, p); });
  on("exchange", nothing, [&](auto p) { lower_exchange(s, b, world, p); });
  return out;
}

RankPrograms::Lowered RankPrograms::finish_whole(WrittenRank written) const {
  const bool nothing_sleeps = scenario_.train.offload != Offload::sleep && !scenario_.rollout.sleep;
  ProgramBuilder& b = written.builder;
  Program all = b.program();
  // What all ranks have alike nobody compares before the passes: these may then work on the only copy.
  for (std::size_t p = 0; p < written.parts.size(); ++p)
    if (written.parts[p].of_all_ranks) b.program().phases[p].clear();
  Program finished = finish(plan_, std::move(all), b.transients(), nothing_sleeps);
  return {std::move(written), std::move(finished)};
}

RankPrograms::Lowered RankPrograms::lower_rank(std::int64_t rank) const {
  if (by_tp_rank_.empty()) return finish_whole(write(rank, nullptr));
  const auto mate = by_tp_rank_.find(tp_rank_of(rank));
  const Lowered& like = mate == by_tp_rank_.end() ? by_tp_rank_.begin()->second : mate->second;
  const Program& theirs = like.written.builder.program();
  WrittenRank written = write(rank, &like.written);
  Program& mine = written.builder.program();
  // Parts that were taken hold for buffers as they are there: a slice of another size is a plan of its own.
  const bool same_buffers =
      mine.buffers == theirs.buffers && written.builder.transients() == like.written.builder.transients();
  if (!same_buffers || !same_but_boxes(theirs, mine)) return finish_whole(write(rank, nullptr));
  mine.buffers = theirs.buffers;
  Program finished = finish_like(theirs, like.finished, mine);
  return {std::move(written), std::move(finished)};
}

std::vector<Program> RankPrograms::lower(std::int64_t begin, std::int64_t end) {
  std::vector<std::optional<Lowered>> lowered(static_cast<std::size_t>(end - begin));
  in_parallel(lowered.size(), [&](std::size_t i) { lowered[i] = lower_rank(begin + static_cast<std::int64_t>(i)); });
  std::vector<Program> out;
  for (std::size_t i = 0; i < lowered.size(); ++i) {
    out.push_back(lowered[i]->finished);
    by_tp_rank_.try_emplace(tp_rank_of(begin + static_cast<std::int64_t>(i)), std::move(*lowered[i]));
  }
  return out;
}

Program RankPrograms::lower_alone(std::int64_t rank) const { return finish_whole(write(rank, nullptr)).finished; }

}  // namespace hotbunk

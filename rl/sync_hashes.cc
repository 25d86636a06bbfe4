#include "rl/sync_hashes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/hash.h"
#include "base/json.h"
#include "graph/bound.h"

namespace hotbunk {
namespace {

std::string hex(std::uint64_t hash) { return fmt::format("{:016x}", hash); }

/// Where the elements lie in the tensor, not where a rank keeps them.
std::vector<Box> extent_of(const Op& op, const Places& places) {
  std::vector<Box> out;
  for (const Box& b : boxes_of(op, places))
    out.push_back({.dst_offset = b.dst_offset, .dst_pitch = b.dst_pitch, .rows = b.rows, .cols = b.cols});
  return out;
}

}  // namespace

bool SyncPayload::fetch(Slot slot, std::span<const std::byte> source) {
  if (slot != Slot::sync_hashes) return false;
  sums.resize(source.size() / sizeof(std::uint64_t));
  std::memcpy(sums.data(), source.data(), source.size());
  return true;
}

SyncHashes::SyncHashes(const Plan& plan) : num_ranks_(static_cast<std::size_t>(plan.num_ranks())) {
  const std::int32_t sync = plan.phase_index("sync");
  // An engine's ranks: of all its stages, where it has several.
  const GroupId tp = plan.family_index("tp"), staged = plan.family_index("engines");
  if (sync < 0 || tp < 0) return;
  const auto& groups_of = [&](GroupId family) { return plan.groups[static_cast<std::size_t>(family)].groups; };
  const auto& engines = staged >= 0 && !groups_of(staged).empty() ? groups_of(staged) : groups_of(tp);
  for (Rank r = 0; r < plan.num_ranks(); ++r) {
    const Program& program = plan.program(r);
    const Places places = places_of(plan, r);
    const auto has_rank = [r](const std::vector<Rank>& e) { return std::ranges::find(e, r) != e.end(); };
    const auto engine = static_cast<std::size_t>(std::ranges::find_if(engines, has_rank) - engines.begin());
    for (const Block& block : program.phases[static_cast<std::size_t>(sync)])
      each_op(program, block, [&](const BoundOp& op) {
        if (op->kind != OpKind::hash_boxes) return;
        std::vector<Box> extent = extent_of(*op, places);
        if (extent.empty()) return;  // more ranks than rows: this one holds none
        const hotbunk::Tensor& sum = op->outputs[0];
        sums_per_rank_ = static_cast<std::size_t>(op.buffer(sum).buffer->elements);
        Tensor& tensor = tensors_[op.name()];
        tensor.engines.resize(engines.size());
        Part part{r, static_cast<std::size_t>(op.offset_in_buffer(sum)) / sizeof(std::uint64_t), std::move(extent)};
        if (op.buffer(op->inputs[0]).section_name() == "rollout_weights")
          tensor.engines.at(engine).push_back(std::move(part));
        // A sync from the host adds a rank's rows to one sum bucket by bucket.
        else if (std::ranges::none_of(tensor.trained, [&](const Part& p) { return p.rank == r && p.sum == part.sum; }))
          tensor.trained.push_back(std::move(part));
      });
  }
}

SyncHashes::Verdict SyncHashes::judge(std::span<const std::uint64_t> sums) const {
  HB_CHECK(sums.size() == num_ranks_ * sums_per_rank_, "{} sums of {} ranks with {} each", sums.size(), num_ranks_,
           sums_per_rank_);
  Verdict verdict;
  for (const auto& [name, tensor] : tensors_) {
    const std::uint64_t trained = hash_of(name, tensor.trained, sums, verdict.differences).first;
    verdict.trained[name] = trained;
    for (const auto& parts : tensor.engines)
      if (const auto [rollout, ranks] = hash_of(name, parts, sums, verdict.differences); rollout != trained)
        verdict.differences.push_back(fmt::format("'{}' on rank{} {}: trained {}, rollout {}", name,
                                                  ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "), hex(trained),
                                                  hex(rollout)));
  }
  return verdict;
}

std::pair<std::uint64_t, std::vector<Rank>> SyncHashes::hash_of(const std::string& name, const std::vector<Part>& parts,
                                                                std::span<const std::uint64_t> sums,
                                                                std::vector<std::string>& differences) const {
  std::vector<const Part*> distinct;
  std::vector<Rank> ranks;
  std::uint64_t hash = 0;
  for (const Part& p : parts) {
    const auto same = std::ranges::find_if(distinct, [&](const Part* q) { return q->extent == p.extent; });
    if (same == distinct.end()) {
      distinct.push_back(&p);
      ranks.push_back(p.rank);
      hash += at(p, sums);
    } else if (at(p, sums) != at(**same, sums)) {
      differences.push_back(
          fmt::format("'{}': rank {} holds the same part as rank {}, but its hash is {} there and {} here", name,
                      p.rank, (*same)->rank, hex(at(**same, sums)), hex(at(p, sums))));
    }
  }
  return {hash, ranks};
}

std::string chained_digest(const std::string& before, const TensorHashes& hashes) {
  std::string text = before;
  for (const auto& [name, hash] : hashes) text += fmt::format("\n{} {}", name, hex(hash));
  return hash_text(text);
}

std::string sync_line(std::int32_t step, DType dtype, const std::string& digest, const TensorHashes& hashes,
                      bool with_tensors) {
  nlohmann::ordered_json line = {{"step", step}, {"dtype", name_of(dtype)}, {"digest", digest}};
  if (with_tensors) {
    line["tensors"] = nlohmann::ordered_json::object();
    for (const auto& [name, hash] : hashes) line["tensors"][name] = hex(hash);
  }
  return json_text(line);
}

}  // namespace hotbunk

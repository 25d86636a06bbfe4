#include "exec/length_driver.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/numbers.h"

namespace hotbunk {

Result<std::unique_ptr<LengthDriver>> LengthDriver::create(const Plan& plan, const Scenario& scenario,
                                                           std::optional<std::vector<SampleLengths>> recorded,
                                                           std::int32_t first_step) {
  if (!recorded) return create(plan, scenario, [scenario](std::int32_t step) { return draw_lengths(scenario, step); });
  if (Status ok = check_recorded(scenario, *recorded, first_step); !ok) return fail(std::move(ok.error()));
  return create(plan, scenario,
                [all = std::move(*recorded)](std::int32_t step) { return all[static_cast<std::size_t>(step - 1)]; });
}

Result<std::unique_ptr<LengthDriver>> LengthDriver::create(const Plan& plan, const Scenario& scenario,
                                                           StepLengths recorded) {
  if (Diagnostics problems = check_lengths(scenario, kv_blocks_of(plan)); !problems.empty())
    return fail(std::move(problems));
  return std::unique_ptr<LengthDriver>(new LengthDriver(plan, scenario, std::move(recorded)));
}

LengthDriver::LengthDriver(const Plan& plan, const Scenario& scenario, StepLengths source)
    : IterationDriver(plan, scenario), source_(std::move(source)) {}

const SampleLengths& LengthDriver::lengths(std::int32_t step) {
  if (step_ != step) lengths_ = source_(step), step_ = step;
  return lengths_;
}

std::vector<std::int64_t> LengthDriver::prompt_tokens(std::int32_t step) {
  const auto& by_sample = lengths(step).prompt_tokens;
  const auto per_prompt = by_sample.size() / static_cast<std::size_t>(scenario().algorithm.prompts);
  std::vector<std::int64_t> by_prompt;
  for (std::size_t i = 0; i < by_sample.size(); i += per_prompt) by_prompt.push_back(by_sample[i]);
  return by_prompt;
}

std::vector<std::int32_t> LengthDriver::rank_classes(std::int32_t first, std::int32_t last) {
  std::vector<std::int32_t> classes(static_cast<std::size_t>(plan().num_ranks()), 0);
  const bool rolls_out = kv_blocks_of(plan()) > 0;
  for (std::int32_t step = first; step <= last; ++step) {
    const SampleLengths drawn = lengths(step);
    Numbers<std::vector<std::int64_t>> data;  // 0: none
    data({});
    std::vector<std::int32_t> of_engine, of_share(static_cast<std::size_t>(scenario().train.layout.dp));
    if (rolls_out) {
      const auto groups = samples_of_engines(prompt_tokens(step));
      const auto add = [&](std::size_t group, std::vector<std::int64_t>& tokens) {
        for (const std::int64_t i : groups[group])
          for (const auto* all : {&drawn.prompt_tokens, &drawn.response_tokens})
            tokens.push_back((*all)[static_cast<std::size_t>(i)]);
      };
      const auto each = static_cast<std::size_t>(groups_per_engine());
      for (std::size_t group = 0; group < groups.size(); ++group) {
        std::vector<std::int64_t> tokens;
        add(group, tokens);
        // Groups of an engine step together.
        for (std::size_t other = group / each * each; each > 1 && other < (group / each + 1) * each; ++other)
          tokens.push_back(-1), add(other, tokens);
        of_engine.push_back(data(std::move(tokens)));
      }
    }
    const std::vector<MiniBatch> batches = mini_batches_of(drawn);
    for (std::size_t share = 0; share < of_share.size(); ++share) {
      std::vector<std::int64_t> sizes;
      for (const MiniBatch& mini : batches)
        for (const MicroBatch& micro : mini.ranks[share])
          for (const std::int64_t n : {micro.sizes.tokens, micro.sizes.seqs, micro.sizes.attention_pairs})
            sizes.push_back(n);
      of_share[share] = data(std::move(sizes));
    }
    Numbers<std::array<std::int32_t, 3>> finer;
    for (Rank r = 0; r < plan().num_ranks(); ++r) {
      const bool engine = rolls_out && r >= first_engine_rank(), trains = r < num_train_ranks();
      std::int32_t& mine = classes[static_cast<std::size_t>(r)];
      mine = finer({mine, engine ? of_engine.at(static_cast<std::size_t>(group_of(r))) : 0,
                    trains ? of_share.at(share_of(r)) : 0});
    }
  }
  return classes;
}

void LengthDriver::feed(Rank, const BoundOp&, const Args&, std::span<std::byte> destination) {
  std::ranges::fill(destination, std::byte{0});
}

}  // namespace hotbunk

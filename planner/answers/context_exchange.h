// How context-parallel ranks get each other's keys and values where the scenario leaves it to cost
// (train.context_exchange: auto): by the plan of either way, as `plan` prices it.
#pragma once
#include <filesystem>
#include <optional>
#include <string>

#include "spec/scenario.h"

namespace hotbunk {

struct ExchangeChoice {
  ContextExchange chosen = ContextExchange::ring;
  struct Way {
    std::optional<double> seconds;  // of an iteration's optimizer steps and log-prob passes; none: it has no plan
    bool fits = false;
  };
  Way ring, all_gather;
};
/// The way that fits, of two that do the faster one; the ring where neither does, for it takes less memory, or where
/// both take as long. nullopt: the scenario says which, has no context parallelism, or neither way a plan (where its
/// framework's own is priced, or what is asked of the scenario says why). Both plans are lowered for it.
std::optional<ExchangeChoice> choose_context_exchange(const Scenario&, const std::filesystem::path& catalogue);

/// "all-gather, 12.1 ms of an iteration's training (ring: 13.4 ms)"; a way that does not fit, or neither, is said.
std::string render(const ExchangeChoice&);
/// {chosen, ring: {training_s, fits}, all_gather: …}; null seconds: no plan.
std::string to_json(const ExchangeChoice&);

}  // namespace hotbunk

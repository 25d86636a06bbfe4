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
    double seconds = 0;  // of an iteration's optimizer steps and log-prob passes
    bool fits = false;
  };
  Way ring, all_gather;
};
/// The way that fits, of two that do the faster one; the ring where neither does, for it takes less memory, or where
/// both take as long. nullopt: the scenario says which, has no context parallelism, or no plan (then its framework's
/// own is priced). Both plans are lowered for it.
std::optional<ExchangeChoice> choose_context_exchange(const Scenario&, const std::filesystem::path& catalogue);

/// "all-gather, 12.1 ms of an iteration's training (ring: 13.4 ms)"; of a way that does not fit it says so.
std::string render(const ExchangeChoice&);
/// {chosen, ring: {seconds, fits}, all-gather: …}.
std::string to_json(const ExchangeChoice&);

}  // namespace hotbunk

#include "planner/answers/context_exchange.h"

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/format.h"
#include "base/json.h"
#include "planner/answers/answers.h"
#include "planner/answers/plan_answer.h"
#include "spec/names.h"
#include "spec/validate.h"

namespace hotbunk {
namespace {

ExchangeChoice::Way price_of(Scenario s, ContextExchange exchange, const CostModel& cost) {
  s.train.context_exchange = exchange;
  RlPrice price;
  if (!use_plan(s, cost, price)) return {};
  double seconds = 0.0;
  for (const RlPhase phase : {RlPhase::reference, RlPhase::old_logprobs, RlPhase::train})
    seconds += price.seconds[static_cast<std::size_t>(phase)];
  return {.seconds = seconds, .fits = price.fits};
}

}  // namespace

std::optional<ExchangeChoice> choose_context_exchange(const Scenario& s, const std::filesystem::path& catalogue) {
  if (s.train.context_exchange != ContextExchange::automatic || s.train.layout.cp == 1) return std::nullopt;
  if (!unsupported_to_execute(s).empty()) return std::nullopt;
  const auto pricer = ScenarioPricer::make(s, catalogue);
  if (!pricer) return std::nullopt;
  const CostModel& cost = (*pricer)->train().cost();
  ExchangeChoice out{.chosen = ContextExchange::ring,
                     .ring = price_of(s, ContextExchange::ring, cost),
                     .all_gather = price_of(s, ContextExchange::all_gather, cost)};
  const auto& [chosen, ring, gathered] = out;
  if (!ring.seconds && !gathered.seconds) return std::nullopt;
  if (!ring.seconds || (gathered.fits && (!ring.fits || *gathered.seconds < *ring.seconds)))
    out.chosen = ContextExchange::all_gather;
  return out;
}

std::string to_json(const ExchangeChoice& c) {
  const auto way = [](const ExchangeChoice::Way& w) {
    nlohmann::ordered_json out = {{"training_s", nullptr}, {"fits", w.fits}};
    if (w.seconds) out["training_s"] = *w.seconds;
    return out;
  };
  return json_text(
      nlohmann::ordered_json{{"chosen", name_of(c.chosen)}, {"ring", way(c.ring)}, {"all_gather", way(c.all_gather)}});
}

std::string render(const ExchangeChoice& c) {
  const bool gathers = c.chosen == ContextExchange::all_gather;
  const ExchangeChoice::Way &way = gathers ? c.all_gather : c.ring, &other = gathers ? c.ring : c.all_gather;
  const auto seconds = [](const ExchangeChoice::Way& w) { return w.seconds ? format_seconds(*w.seconds) : "no plan"; };
  return fmt::format("{}, {} of an iteration's training ({}: {}{}){}", name_of(c.chosen), seconds(way),
                     name_of(gathers ? ContextExchange::ring : ContextExchange::all_gather), seconds(other),
                     way.fits && other.seconds && !other.fits ? ", which does not fit" : "",
                     way.fits ? "" : "; neither fits");
}

}  // namespace hotbunk

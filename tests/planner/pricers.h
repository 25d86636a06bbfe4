// Pricers of scenarios that tests write out.
#pragma once
#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "planner/answers/answers.h"
#include "spec/catalog.h"
#include "spec/loader.h"

namespace hotbunk {

// Each fails the test with the diagnostics where there is none.

inline Scenario scenario_of_text(const std::string& text, const std::vector<std::string>& sets = {}) {
  auto s = load_scenario_text(text, "test.yaml", sets);
  if (!s) FAIL(render(s.error()));
  return *s;
}

inline std::unique_ptr<ScenarioPricer> pricer_for(const Scenario& s) {
  auto pricer = ScenarioPricer::make(s, catalog_root());
  if (!pricer) FAIL(render(pricer.error()));
  return std::move(*pricer);
}

inline std::unique_ptr<ScenarioPricer> pricer_of_text(const std::string& text,
                                                      const std::vector<std::string>& sets = {}) {
  return pricer_for(scenario_of_text(text, sets));
}

}  // namespace hotbunk

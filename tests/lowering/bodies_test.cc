// Bodies that calls share are what each call would have written.
#include <rapidcheck.h>

#include <catch2/catch.hpp>

#include "lowering/lower.h"
#include "spec/loader.h"
#include "tests/drawn_scenario.h"

using namespace hotbunk;

TEST_CASE("A plan of shared bodies is the plan of calls that are written one by one") {
  std::int64_t plans = 0, calls = 0, bodies = 0;
  CHECK(rc::check("written once = written each time", [&] {
    const std::string text = testing::draw_scenario();
    RC_LOG(text);
    const auto s = load_scenario_text(text, "drawn.yaml", {});
    RC_ASSERT(s.has_value());
    for (const Purpose purpose : {Purpose::job, Purpose::score, Purpose::generate}) {
      const Result<Plan> shared = lower(*s, purpose), written = lower_call_by_call(*s, purpose);
      RC_ASSERT(shared.has_value() == written.has_value());
      if (!shared) continue;
      RC_ASSERT(*shared == *written);
      ++plans, bodies += std::ssize(shared->programs[0].bodies);
      for (const auto& blocks : shared->programs[0].phases)
        for (const Block& block : blocks) calls += std::ssize(block.calls);
    }
  }));
  CHECK(plans > 100);
  CHECK(2 * calls > 3 * bodies);  // few layers
}

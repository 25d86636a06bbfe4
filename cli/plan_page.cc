#include "cli/plan_page.h"

#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/json.h"
#include "planner/answers/lint.h"
#include "planner/answers/stated_error.h"
#include "reports/html.h"
#include "spec/catalog.h"

namespace hotbunk {

Status write_plan_page(const std::string& file, const ScenarioPricer& pricer, const Explanation& e,
                       const Choices& choices, const std::vector<std::string>& not_lowered) {
  using Json = nlohmann::ordered_json;
  const Scenario& s = pricer.scenario();
  Json what_if = Json::array();
  if (!e.unpriced) {
    const auto numbers = sensitivity(s, catalog_root());
    if (!numbers) return fail(numbers.error());
    what_if = json_from<Json>(to_json(*numbers));
  }
  const Json data = {{"scenario", s.name},
                     {"ranks", s.cluster.ranks()},
                     {"verdict", name_of(e.unpriced ? Verdict::no : e.verdict.verdict)},
                     {"seconds_error", error_text(e.seconds_error)},
                     {"why_not_lowered", not_lowered},
                     {"findings", json_from<Json>(to_json(s.name, lint_beside(pricer, e)))["findings"]},
                     {"provenance", Json::array({Json::array({"hotbunk", HOTBUNK_VERSION})})},
                     {"explanation", json_from<Json>(to_json(e))},
                     {"search", json_from<Json>(to_json(choices))},
                     {"sensitivity", what_if}};
  return write_file_atomic(file, html_plan(data));
}

}  // namespace hotbunk

#include "planner/answers/remedies.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "base/format.h"
#include "base/shell_quoted.h"
#include "lowering/lower.h"
#include "planner/answers/choices.h"
#include "planner/answers/levers.h"
#include "planner/answers/plan_answer.h"

namespace hotbunk {
namespace {

class Remedies {
 public:
  Remedies(const ScenarioPricer& s, const RlPoint& own)
      : s_(s), own_(own), lowered_(why_not_lowered(s.scenario()).empty()) {}

  std::optional<Lever> find() {
    for (const auto& [name, point] : neighbours(s_, own_)) consider(name, point);
    fractions(own_);
    engines();
    if (best_ || lowered_) return std::move(best_);
    for (const auto& [name, point] : neighbours(s_, own_))
      for (const auto& [second, both] : neighbours(s_, point)) consider(name + ", " + second, both);
    return std::move(best_);
  }

 private:
  /// What `explain` of its flags says: by its plan where the scenario is lowered.
  bool fits(const RlPoint& p, RlPrice& price) const {
    if (s_.why_unpriced(p)) return false;
    price = s_.price(p);
    if (lowered_ && !use_plan_at(s_.scenario(), p, s_.train().cost(), price)) return false;
    return price.iteration_seconds > 0 && price.fits;
  }

  bool consider(const std::string& name, const RlPoint& p) {
    RlPrice price;
    if (!fits(p, price)) return false;
    if (!best_ || price.iteration_seconds < best_->seconds)
      best_ = Lever{name, p, price.iteration_seconds, price.peak_bytes(), true, flags_of(s_.scenario(), p)};
    return true;
  }

  /// The nearest shares of the device that fit, below and above.
  void fractions(const RlPoint& from) {
    if (!from.samples()) return;
    const int own = static_cast<int>(std::lround(100.0 * from.rollout.memory_fraction)), step = lowered_ ? 10 : 1;
    for (const int direction : {-1, 1})
      for (int at = own + direction * step; at >= 5 && at <= 98; at += direction * step) {
        RlPoint p = from;
        p.rollout.memory_fraction = at / 100.0;
        if (is_launched(s_, own_, p) &&
            consider(fmt::format("rollout.memory_fraction = {}", p.rollout.memory_fraction), p))
          break;
      }
  }

  /// Wider engines, which hold fewer weights a rank.
  void engines() {
    RlPoint p = own_;
    while (p.samples() && p.rollout.engines % 2 == 0) {
      p.rollout.tp *= 2, p.rollout.engines /= 2;
      if (!is_launched(s_, own_, p)) break;
      consider(fmt::format("rollout.layout.tp = {}", p.rollout.tp), p);
      if (!lowered_) fractions(p);
    }
  }

  const ScenarioPricer& s_;
  const RlPoint own_;
  const bool lowered_;
  std::optional<Lever> best_;
};

}  // namespace

std::optional<Lever> remedy_of(const ScenarioPricer& s, const RlPoint& p) { return Remedies(s, p).find(); }

std::string remedy_text(const ScenarioPricer& s, const RlPoint& p) { return remedy_text(remedy_of(s, p)); }

std::string remedy_text(const std::optional<Lever>& found) {
  if (!found) return "no change of one key cures it; `hotbunk plan` searches all layouts";
  std::string flags;
  for (const std::string& f : found->flags) flags += (flags.empty() ? "--set " : " --set ") + shell_quoted(f);
  return fmt::format("{}: {} of a device", flags, format_bytes(found->bytes));
}

std::string remedy_text(const Scenario& scenario, const std::filesystem::path& catalogue) {
  const auto pricer = ScenarioPricer::make(scenario, catalogue);
  return pricer ? remedy_text(**pricer, (*pricer)->point()) : "";
}

}  // namespace hotbunk

// What takes more than one key of another system to say: batches, lengths, placement, stages, offload. A table gives
// keys their roles; a rule reads roles and writes scenario keys, and writes roles back from a scenario.
#pragma once
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/diagnostic.h"
#include "spec/scenario.h"

namespace hotbunk {

/// A value that a launch gives a role, given or by the release's default.
struct RoleValue {
  std::string value;  // as the system means it
  std::string said;   // "trainer.nnodes=4 (run.sh:12)", for comments and messages
  SourceLocation where;
  bool given = false;
};

/// A key of the scenario that is being written.
struct ScenarioLine {
  std::string key, value, comment;
  SourceLocation where;  // of what it comes from
};

/// What rules read and write on the way in.
class RuleInput {
 public:
  std::map<std::string, RoleValue> roles;  // none of them null
  std::vector<ScenarioLine> lines;
  Diagnostics problems;
  std::optional<ModelSpec> model;
  std::string folder;                         // where relative paths of a model start
  std::string launch;                         // what the launch is called: its file's name
  std::map<std::string, std::string> chosen;  // scenario keys that the user sets: rules ask, and do not write over them

  const RoleValue* find(const std::string& role) const;
  /// A whole number or a fraction; none where the role is unset; E152 where it is no number.
  std::optional<double> number(const std::string& role);
  bool is_true(const std::string& role) const;
  SourceLocation where(const std::string& role) const;
  /// The scenario is SFT so far: there is no rollout.
  bool trains_only() const;
  /// "trainer.nnodes=4 (run.sh:12)", "" of what is unset.
  std::string said(const std::string& role) const;
  void set(const std::string& key, std::string value, std::string comment, SourceLocation where = {});
  void set(const std::string& key, double value, std::string comment, SourceLocation where = {});
  /// What the scenario has so far under a key of numbers, or the scenario's own default.
  double scenario_number(const std::string& key) const;
  std::string scenario_text(const std::string& key) const;
  /// E151: keys that contradict each other.
  void contradict(const std::string& role, std::string message, std::vector<std::string> notes, std::string help);
};

/// What rules write on the way out: roles, for the keys of one system.
class RuleOutput {
 public:
  RuleOutput(const Scenario& s, bool has_sizes) : scenario(s), spells_sizes(has_sizes) {}
  const Scenario& scenario;
  bool spells_sizes;  // the system's launches say a model's sizes
  std::map<std::string, std::string> roles;
  std::vector<std::pair<std::string, std::string>> beside;  // arguments that the system needs with a role

  void give(const std::string& role, std::string value) { roles[role] = std::move(value); }
  void give(const std::string& role, double value);
  void give(const std::string& role, bool value) { give(role, std::string(value ? "true" : "false")); }
};

struct LaunchRule {
  const char* name;
  std::vector<std::string> roles;  // that it reads
  /// That it writes, each with the roles of which a system needs one to say it.
  std::vector<std::pair<std::string, std::vector<std::string>>> scenario_keys;
  void (*read)(RuleInput&);
  void (*write)(RuleOutput&);
};

/// In the order in which they run.
std::span<const LaunchRule> launch_rules();
bool is_launch_role(const std::string& role);

}  // namespace hotbunk

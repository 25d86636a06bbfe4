// What a launch of another system sets: their keys and values with the place of each. Four forms become one list.
#pragma once
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/diagnostic.h"
#include "interop/shell_script.h"
#include "spec/yaml_tree.h"

namespace hotbunk {

/// One key of another system with its value as text: "true", "1e-6", "[0.9, 0.95]", "" of a bare flag.
struct Setting {
  std::string key, value;
  SourceLocation where;
  std::vector<std::string> undefined;  // of the value: variables that nothing sets
  bool bare = false;                   // a flag without a value
};
using Settings = std::vector<Setting>;

/// The value as the systems mean it: True → true, None → null, quotes taken off.
std::string plain_value(std::string text);

/// The whole text as a finite number.
std::optional<double> number_of(std::string_view text);

/// Hydra's overrides: key=value, +key=value, ++key=value. Words of another form are left out; --config-name and
/// --config-path are keys of their own. A later one wins.
Settings hydra_settings(const ShellCommand&);

/// argparse's flags: --key value…, --key=value, --key. Several values become a list. A later one wins.
Settings flag_settings(const ShellCommand&);

/// "${MODEL_ARGS[@]}" that nothing sets: words of its own, if any, never the value of what stands before it.
bool is_unset_array(const ShellWord&);

/// A YAML file as dotted keys, over the file that its `defaults` names (a path from its folder, whose own defaults come
/// first; other entries of a list are names of the system's configs, which its release's defaults stand for).
/// E101, E201 as parse_yaml; E155: files that name each other.
Result<Settings> yaml_settings(const std::filesystem::path&);

/// The TOML that torchtitan writes: [section], key = value with numbers, texts, booleans and lists. E201 with the line
/// of what is none of these.
Result<Settings> toml_settings(const std::filesystem::path&);

/// `more` over `base`: a map under a key that is now a value goes, and the value under a key that is now a map.
void override_settings(Settings& base, const Settings& more);

/// OmegaConf's ${a.b}, ${.b}, ${oc.select:a.b,0}, ${oc.env:A,0} and ${mul:a,b} (add, sub, div, max, min), each by what
/// it refers to. What does not resolve stays as it is written, and is named as undefined.
void resolve_interpolations(Settings&);

}  // namespace hotbunk

// What stands beside a framework's own numbers in its profile: what its launches can say, and the engines that it runs.
#pragma once
#include <filesystem>

#include "planner/cost/framework.h"
#include "spec/yaml_tree.h"

namespace hotbunk {

/// The table `can` of a framework profile. E205 with file, line and key on anything unknown, or without a source.
void read_capabilities(const YamlNode& table, Capabilities&, Diagnostics& errors);

/// The frame with the catalogue's engines (scenarios/catalog/engines). E101, E201, E205.
Result<FrameworkProfile> with_engines(Result<FrameworkProfile>, const std::filesystem::path& catalogue);

}  // namespace hotbunk

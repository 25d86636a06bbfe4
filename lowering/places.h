// The streams and sections of the plans that lower() writes, by name. Interpreters know them from the plan alone.
#pragma once
#include <vector>

#include "graph/plan.h"

namespace hotbunk {

/// Indices into plan_streams().
namespace streams {
inline constexpr StreamId compute{0};
inline constexpr StreamId gather{1};    // parameters, for forward and backward
inline constexpr StreamId reduce{2};    // gradients
inline constexpr StreamId tensor{3};    // between ranks that share a layer
inline constexpr StreamId control{4};   // norms, counts and barriers
inline constexpr StreamId h2d{5};       // from host memory
inline constexpr StreamId d2h{6};       // to host memory
inline constexpr StreamId host{7};      // feeds and fetches
inline constexpr StreamId replicas{8};  // gradients between copies of the shards, where there are several
inline constexpr StreamId pipeline{9};  // between stages
inline constexpr StreamId context{10};  // keys and values, between context-parallel ranks
}  // namespace streams

/// All up to the last that a plan uses: `replicates`: up to that between replicas. `passes_on`: up to that between
/// stages. `shares_context`: all.
inline std::vector<Stream> plan_streams(bool replicates = false, bool passes_on = false, bool shares_context = false) {
  std::vector<Stream> out{{"compute", StreamKind::compute},       {"gather", StreamKind::communication},
                          {"reduce", StreamKind::communication},  {"tensor", StreamKind::communication},
                          {"control", StreamKind::communication}, {"h2d", StreamKind::to_device},
                          {"d2h", StreamKind::to_host},           {"host", StreamKind::host}};
  if (replicates || passes_on || shares_context) out.push_back({"replicas", StreamKind::communication});
  if (passes_on || shares_context) out.push_back({"pipeline", StreamKind::communication});
  if (shares_context) out.push_back({"context", StreamKind::communication});
  return out;
}

/// Indices into program_sections().
namespace sections {
inline constexpr SectionId transient = transient_section;
inline constexpr SectionId train_params{1};
inline constexpr SectionId train_optimizer{2};
inline constexpr SectionId train_reference{3};
inline constexpr SectionId rollout_weights{4};
inline constexpr SectionId kv_cache{5};
inline constexpr SectionId host_params{6};
inline constexpr SectionId host_optimizer{7};
inline constexpr SectionId host_reference{8};
inline constexpr SectionId host_weights{9};
inline constexpr SectionId host_resident{10};  // what never leaves the host
}  // namespace sections

/// Empty ones; the passes say how large they are.
inline std::vector<Section> program_sections() {
  return {{"transient", Space::device},       {"train_params", Space::device},    {"train_optimizer", Space::device},
          {"train_reference", Space::device}, {"rollout_weights", Space::device}, {"kv_cache", Space::device},
          {"host_params", Space::host},       {"host_optimizer", Space::host},    {"host_reference", Space::host},
          {"host_weights", Space::host},      {"host_resident", Space::host}};
}

}  // namespace hotbunk

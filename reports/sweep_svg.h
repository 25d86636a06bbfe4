// The picture of a sweep: one SVG file that any browser or document shows.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "planner/answers/answers.h"

namespace hotbunk {

/// One axis: seconds of an iteration and peak memory over its values, with the capacity line. Several: a heat map of
/// seconds, the last axis across, all others down, peak memory written in. Points that do not fit are crossed out,
/// those that are no layout are grey, the fastest that fits is framed. Rows as `sweep` returns them, at least one.
std::string sweep_svg(const std::string& title, std::span<const SweepAxis>, std::span<const SweepRow>);

}  // namespace hotbunk

// One colour per memory category in every picture, distinguishable with any colour vision: the set of Okabe and Ito,
// "Color Universal Design" (2008), with grey for what lies outside the arena.
#pragma once
#include <array>
#include <string_view>

#include "graph/plan.h"

namespace hotbunk {

/// By Category.
inline constexpr std::array<std::string_view, num_categories> category_colours = {
    "#0072B2",  // params: blue
    "#56B4E9",  // grads: sky blue
    "#009E73",  // optimizer: bluish green
    "#E69F00",  // activations: orange
    "#CC79A7",  // kv_cache: reddish purple
    "#D55E00",  // communication: vermilion
    "#F0E442",  // workspace: yellow
    "#999999",  // overhead: grey
};

/// By StreamId: a stream wears the colour of what it mostly moves.
inline constexpr std::array<std::string_view, num_streams> stream_colours = {
    "#0072B2",  // compute
    "#D55E00",  // gather
    "#E69F00",  // reduce
    "#CC79A7",  // tensor
    "#999999",  // control
    "#009E73",  // h2d
    "#56B4E9",  // d2h
    "#B8A800",  // host
};

}  // namespace hotbunk

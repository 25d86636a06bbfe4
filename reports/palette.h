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

/// Of a plan's streams, in their order; beyond these, from the first again.
inline constexpr std::array<std::string_view, 8> stream_colours = {
    "#0072B2",  // blue
    "#D55E00",  // vermilion
    "#E69F00",  // orange
    "#CC79A7",  // reddish purple
    "#999999",  // grey
    "#009E73",  // bluish green
    "#56B4E9",  // sky blue
    "#B8A800",  // dark yellow
};

}  // namespace hotbunk

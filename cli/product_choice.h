// Which paths a run's products of bf16 take on CPU ranks (kernels/product_paths.h): those that a variable names, those
// of the checkpoint that the run goes on from, or what is measured as it begins.
#pragma once
#include <optional>
#include <string>

#include "backends/cpu_gloo/kernels/product_paths.h"
#include "base/diagnostic.h"
#include "runtime/launch.h"

namespace hotbunk {

/// "measure" (as without it), "rule", or what run.json says of a run: kernels::text_of. The launcher of local ranks
/// hands its choice on in it.
inline constexpr const char* bf16_products_variable = "HOTBUNK_BF16_PRODUCTS";

struct ProductsAsked {
  std::optional<kernels::ProductPaths> fixed;
  bool measure = false;  // even where a checkpoint says what its run had
};

/// E709: the variable says what is none of these, or what a machine of this unit lacks.
Result<ProductsAsked> products_asked(const EnvLookup&, kernels::Bf16Products unit);

/// `recorded`: a checkpoint's text, "" without one; it is taken where this machine can do it. Measures, some 100 ms,
/// only where nothing else decides.
kernels::ProductPaths products_of_run(const ProductsAsked&, const std::string& recorded);

}  // namespace hotbunk

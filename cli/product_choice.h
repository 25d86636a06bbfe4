// Which paths a run's products of bf16 take on CPU ranks (kernels/product_paths.h): those that a variable names, those
// of the checkpoint that the run goes on from, or what is measured as it begins.
#pragma once
#include <optional>
#include <string>

#include "backends/cpu_gloo/kernels/product_paths.h"
#include "base/diagnostic.h"
#include "runtime/launch.h"
#include "runtime/world.h"
#include "spec/scenario.h"

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

/// Whether a run has products of bf16: of training or of rollout.
bool has_bf16(const Scenario&);

/// `recorded`: a checkpoint's text, "" without one; it is taken where this machine can do it. Measures, some 55 ms of
/// CPU time, only where nothing else decides.
kernels::ProductPaths products_of_run(const ProductsAsked&, const std::string& recorded);

/// Before ranks are started: it is measured once, alone on the machine. The rule where a run has no products of bf16,
/// or `first` is false: a rank that takes rank 0's. `recorded` as of products_of_run.
kernels::ProductPaths choose_products(const ProductsAsked&, const std::string& recorded, const Scenario&, bool first);

/// Of a rank, in front of check_agreement. Ranks that somebody else started take rank 0's choice: measured by each for
/// itself, it could be two. Rank 0 says how it forms products, the others wait for that, unless the variable names
/// theirs or theirs form none of bf16 on a CPU (`listens` false). A machine that cannot follow keeps its own, and
/// check_agreement refuses it.
void share_products(World&, const std::string& of_this_rank, bool listens, kernels::ProductPaths&);

}  // namespace hotbunk

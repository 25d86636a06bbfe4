#include "cli/product_choice.h"

#include <fmt/format.h>

namespace hotbunk {

Result<ProductsAsked> products_asked(const EnvLookup& env, kernels::Bf16Products unit) {
  const auto said = env(bf16_products_variable);
  if (!said || said->empty()) return ProductsAsked{};
  if (*said == "measure") return ProductsAsked{.fixed = std::nullopt, .measure = true};
  if (*said == "rule") return ProductsAsked{.fixed = kernels::rule_of_machine()};
  if (const auto paths = kernels::paths_of(*said, unit)) return ProductsAsked{.fixed = *paths};
  return fail(Diagnostic{
      .code = "E709",
      .message = fmt::format("{} = \"{}\" is no way to form products of bf16 here", bf16_products_variable, *said),
      .where = {},
      .notes = {fmt::format("this machine's unit: {}; its rule: {}",
                            unit == kernels::Bf16Products::widened ? "none" : name_of(unit),
                            kernels::text_of(kernels::rule_of_machine(), unit))},
      .help = "set it to measure, rule, or what run.json says as bf16_products of a run on such a machine (`hotbunk "
              "doctor` has the words), or unset it"});
}

kernels::ProductPaths products_of_run(const ProductsAsked& asked, const std::string& recorded) {
  if (asked.fixed) return *asked.fixed;
  if (!asked.measure)
    if (const auto paths = kernels::paths_of(recorded, kernels::bf16_unit())) return *paths;
  return kernels::choose(kernels::rule_of_machine(), kernels::measure_product_paths());
}

}  // namespace hotbunk

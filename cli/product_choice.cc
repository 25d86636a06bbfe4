#include "cli/product_choice.h"

#include <fmt/format.h>

#include "base/printable.h"

namespace hotbunk {
namespace {

constexpr const char* products_key = "bf16 products";  // of the store

}  // namespace

Result<ProductsAsked> products_asked(const EnvLookup& env, kernels::Bf16Products unit) {
  const auto said = env(bf16_products_variable);
  if (!said || said->empty()) return ProductsAsked{};
  if (*said == "measure") return ProductsAsked{.fixed = std::nullopt, .measure = true};
  if (*said == "rule") return ProductsAsked{.fixed = kernels::rule_of_machine()};
  if (const auto paths = kernels::paths_of(*said, unit)) return ProductsAsked{.fixed = *paths};
  return fail(Diagnostic{
      .code = "E709",
      .message = fmt::format("{} = \"{}\" is no way to form products of bf16 here", bf16_products_variable,
                             printable_line(*said)),
      .where = {},
      .notes = {fmt::format("this machine's unit: {}; its rule: {}",
                            unit == kernels::Bf16Products::widened ? "none" : name_of(unit),
                            kernels::text_of(kernels::rule_of_machine(), unit))},
      .help = "set it to measure, rule, or what run.json says as bf16_products of a run on such a machine (`hotbunk "
              "doctor` has the words), or unset it"});
}

bool has_bf16(const Scenario& s) {
  return s.train.precision.params == DType::bf16 ||
         (s.algorithm.name != AlgorithmName::sft && s.rollout.dtype == DType::bf16);
}

kernels::ProductPaths products_of_run(const ProductsAsked& asked, const std::string& recorded) {
  if (asked.fixed) return *asked.fixed;
  if (!asked.measure)
    if (const auto paths = kernels::paths_of(recorded, kernels::bf16_unit())) return *paths;
  return kernels::choose(kernels::rule_of_machine(), kernels::measure_product_paths());
}

kernels::ProductPaths choose_products(const ProductsAsked& asked, const std::string& recorded, const Scenario& s,
                                      bool first) {
  if (!has_bf16(s) || (!first && !asked.fixed)) return kernels::rule_of_machine();
  return products_of_run(asked, recorded);
}

void share_products(World& world, const std::string& of_this_rank, bool listens, kernels::ProductPaths& products) {
  if (world.size() == 1) return;
  if (world.rank() == 0) return world.set(products_key, of_this_rank);
  if (!listens) return;
  if (const auto paths = kernels::paths_of(world.get(products_key, {0}), kernels::bf16_unit())) products = *paths;
}

}  // namespace hotbunk

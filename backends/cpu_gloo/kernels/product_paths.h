// Which path multiplies bf16, by the shape of the product: a rule of the machine, or what was measured when a run
// began. fp32 has no choice: forward it is our own row-invariant kernel, whose log-probs are the rollout's to the bit
// (P5), and its gradients are oneDNN's.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hotbunk::kernels {

/// Instructions that multiply bf16; `widened`: none, it is fp32's that do.
enum class Bf16Products : std::uint8_t { amx, avx512_bf16, widened };
std::string_view name_of(Bf16Products);  // "AMX tiles", "AVX512_BF16", "widened to fp32"

/// The CPU's unit for bf16, through oneDNN, fast or not: AMX where the kernel grants it; `widened` where it has none.
/// `ONEDNN_MAX_CPU_ISA` (oneDNN's own variable) lowers it: AVX512_CORE has neither AMX nor AVX512_BF16.
Bf16Products bf16_unit();
/// The same of a CPU with the features of `isa`, bits as of a dnnl_cpu_isa_t.
Bf16Products unit_of_isa(unsigned isa);

/// The rule of this machine, whatever the shape and without a measurement.
///   AMX            where the CPU has it: 8 to 15 times fp32's rate
///   AVX512_BF16    on AMD's cores, where it has twice fp32's rate. Intel's without AMX have half of it
///                  (docs/benchmarks.md)
///   widened        everywhere else. Where a CPU has no bf16 instruction at all, oneDNN's kernel of AVX-512 reaches a
///                  third of fp32's rate
Bf16Products bf16_products();

/// Products that take one path. Forward by the rows of x (T): up to kSkinnyRows (gemm.h), decode of a small batch; up
/// to kSomeRows, decode of a large one; more, prefill and training. Gradients of weights and of inputs are a class.
enum class ProductClass : std::uint8_t { few_rows, some_rows, many_rows, gradients };
inline constexpr std::array kProductClasses{ProductClass::few_rows, ProductClass::some_rows, ProductClass::many_rows,
                                            ProductClass::gradients};
inline constexpr std::int64_t kSomeRows = 128;
std::string_view name_of(ProductClass);  // "few rows", …

/// Of a forward product.
ProductClass class_of_rows(std::int64_t T);

/// Who forms products of bf16. Sums are fp32 on each.
enum class ProductPath : std::uint8_t {
  own,   // our kernels: weights widened in registers, block by block or strip by strip, forward (row_gemm.h,
         // packed_gemm.h) row-invariant; of gradients both operands, strip by strip (gradient_gemm.h)
  unit,  // oneDNN on bf16_unit(), from rows or from packed pairs (prepack.h); not row-invariant
  wide,  // oneDNN in fp32, both operands widened before; not row-invariant. Of packed weights, which it cannot read,
         // ours
};

std::string_view name_of(ProductPath, Bf16Products unit);  // "own kernels", the unit's name, "oneDNN in fp32"

/// The path of every class.
struct ProductPaths {
  std::array<ProductPath, kProductClasses.size()> by_class{};
  ProductPath& operator[](ProductClass c) { return by_class[static_cast<std::size_t>(c)]; }
  ProductPath operator[](ProductClass c) const { return by_class[static_cast<std::size_t>(c)]; }
  bool operator==(const ProductPaths&) const = default;
};

/// Of few rows ours; of others and of gradients the unit, or where bf16 is widened ours.
ProductPaths rule_of(Bf16Products);
/// rule_of(bf16_products()): what every kernel takes that was told nothing else.
ProductPaths rule_of_machine();

/// What can multiply a class on a machine of this unit.
std::vector<ProductPath> candidates(ProductClass, Bf16Products unit);

/// "AMX tiles" where paths are those of the rule of a unit, "widened to fp32" likewise; else how they differ from it:
/// "AVX512_BF16; many rows: own kernels; gradients: oneDNN in fp32". One text for equal paths on every machine, for
/// run.json, run_hash, checkpoints and ranks that compare.
std::string text_of(const ProductPaths&, Bf16Products unit);

/// The reverse; nothing where the text is none that text_of() gives, or a machine of this unit lacks what it names.
std::optional<ProductPaths> paths_of(std::string_view text, Bf16Products unit);

/// Those of them that a run measures: `wide` of some rows only where no forward class of the rule is the unit's. Else
/// weights are packed in pairs (prepack.h), of which `wide` is our own kernel.
std::vector<ProductPath> measured_candidates(ProductClass, Bf16Products unit, const ProductPaths& rule);

/// One candidate's measured rate on one thread.
struct PathRate {
  ProductPath path{};
  double gflop_s = 0.0;  // 10^9 multiplications and additions per second of CPU time
};
struct ProductRates {
  std::array<std::vector<PathRate>, kProductClasses.size()> by_class{};  // empty: nothing to choose by
  std::vector<PathRate>& operator[](ProductClass c) { return by_class[static_cast<std::size_t>(c)]; }
  const std::vector<PathRate>& operator[](ProductClass c) const { return by_class[static_cast<std::size_t>(c)]; }
};

/// How much faster than the rule's another path must be: noise of a start should not decide, so that two starts of a
/// run agree. Ratios that matter are 2 and more (docs/benchmarks.md). Gradients are more than half of a training step,
/// no path of theirs costs row-invariance, and bf16 is to be no slower than fp32, whose gradients are `wide` without
/// the widening.
constexpr double worth_leaving_rule(ProductClass c) { return c == ProductClass::gradients ? 1.05 : 1.25; }

/// Of paths that took `seconds` of CPU time, each for `flops`. Empty where one took less than `least`: a clock that
/// ticks as slowly tells nothing apart.
std::vector<PathRate> rates_of(const std::vector<ProductPath>&, const std::vector<double>& seconds, double flops,
                               double least);

/// Whether the fastest path but the rule's is within a tenth of what it takes to leave the rule, on either side: what
/// starts on M scatter by (docs/benchmarks.md). Not where the rule's path or any other has no rate.
bool hangs_by_little(ProductClass, const std::vector<PathRate>&, ProductPath rule);

/// Of each class the rule's path, or the fastest where it has at least worth_leaving_rule times that rate. A class
/// without rates keeps the rule. `wide` of some rows is not taken beside a forward class that is the unit's
/// (measured_candidates).
ProductPaths choose(const ProductPaths& rule, const ProductRates&);

/// The measured candidates of this machine on a shape of each class, weights packed as beside the rule's other paths:
/// rounds in turn, the best of each, and more of them where a choice hangs by little (hangs_by_little). Some 55 ms of
/// CPU time, oneDNN's first kernels included, or more then. On the calling thread alone, whatever OpenMP's number of
/// threads is, and that stays as it was: a process that forks ranks may call it.
ProductRates measure_product_paths();

}  // namespace hotbunk::kernels

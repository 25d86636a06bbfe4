#include "backends/cpu_gloo/kernels/product_paths.h"

#include <fmt/format.h>
#include <omp.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <functional>
#include <limits>
#include <oneapi/dnnl/dnnl.hpp>

#include "backends/cpu_gloo/kernels/gemm.h"
#include "backends/cpu_gloo/kernels/prepack.h"

namespace hotbunk::kernels {
namespace {

bool any_takes(const ProductPaths& paths, ProductPath path) { return std::ranges::count(paths.by_class, path) > 0; }

/// Whether weights are packed in pairs, as packed_order (prepack.h) has it of shapes that allow it.
bool packs_for_unit(const ProductPaths& paths) {
  using enum ProductClass;
  return std::ranges::any_of(std::array{few_rows, some_rows, many_rows},
                             [&](ProductClass c) { return paths[c] == ProductPath::unit; });
}

ProductPaths with(ProductPaths paths, ProductClass c, ProductPath path) {
  paths[c] = path;
  return paths;
}

// --- measuring ------------------------------------------------------------------------------------------------------

/// Seconds of CPU time below which the clock's ticks count.
double least_seconds() {
  timespec tick{};
  clock_getres(CLOCK_THREAD_CPUTIME_ID, &tick);
  return 20.0 * (static_cast<double>(tick.tv_sec) + 1e-9 * static_cast<double>(tick.tv_nsec));
}

/// Of the calling thread: what other programs take of its core is not in it.
double cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// A shape of each class, of which a product takes around a millisecond. Of few rows, which are 1 to 16, the geometric
/// mean.
struct Shape {
  std::int64_t T, N, K;
};
constexpr Shape shape_of(ProductClass c) {
  switch (c) {
    case ProductClass::few_rows:
      return {4, 2048, 1024};
    case ProductClass::some_rows:
      return {64, 1024, 1024};
    case ProductClass::many_rows:
      return {256, 512, 1024};
    case ProductClass::gradients:
      break;
  }
  return {256, 768, 512};
}

struct alignas(64) Line {
  std::array<bf16, 32> values;
};

/// Room for n values, which lies as a plan's buffers do.
std::vector<Line> room_for(std::int64_t n) { return std::vector<Line>(static_cast<std::size_t>(n + 31) / 32); }

/// Values in [-0.5, 0.5), the same in every line.
std::vector<Line> some_values(std::int64_t n) {
  Line line{};
  for (std::size_t i = 0; i < line.values.size(); ++i)
    line.values[i] = to_bf16(static_cast<float>(i * 7919 % 1000) * 1e-3f - 0.5f);
  std::vector<Line> out = room_for(n);
  std::ranges::fill(out, line);
  return out;
}

/// A class's products by one of its paths, over operands of its own; what other classes take decides with it how
/// weights are packed.
class Candidate {
 public:
  Candidate(ProductClass c, const ProductPaths& paths)
      : shape_(shape_of(c)),
        gradients_(c == ProductClass::gradients),
        packed_(c == ProductClass::few_rows || c == ProductClass::some_rows),  // as an engine has them
        ctx_(1, paths),
        x_(some_values(shape_.T * shape_.K)),
        w_(some_values(shape_.N * shape_.K)),
        dy_(some_values(gradients_ ? shape_.T * shape_.N : 0)),
        out_(room_for(2 * std::max({shape_.T * shape_.N, shape_.T * shape_.K, shape_.N * shape_.K}))) {  // of fp32
    if (packed_) prepack(ctx_, w_.data(), DType::bf16, shape_.N, shape_.K);
  }

  double flops() const {
    return static_cast<double>(shape_.T * shape_.N) * static_cast<double>(shape_.K) * (gradients_ ? 4.0 : 2.0);
  }
  /// Decode reads its weights from memory, which levels what the caches tell apart: on Zen 5 4 rows take half the time
  /// on the unit where weights lie in the cache, and no less where they do not.
  void forget_weights() {
#if defined(__x86_64__)
    if (!packed_) return;
    for (const Line& line : w_) _mm_clflush(&line);
    _mm_mfence();
#endif
  }
  void run() {
    const auto& [T, N, K] = shape_;
    const ConstMatrix x{x_.data(), DType::bf16, K}, w{w_.data(), DType::bf16, K}, dy{dy_.data(), DType::bf16, N};
    if (gradients_) {
      linear_dgrad(ctx_, dy, w, {out_.data(), DType::bf16, K}, T, N, K, Write::overwrite);
      linear_wgrad(ctx_, dy, x, {out_.data(), DType::f32, K}, T, N, K, Write::overwrite);
    } else {
      linear_forward(ctx_, x, w, {}, {out_.data(), DType::bf16, N}, T, N, K, Write::overwrite,
                     packed_ ? WeightOrder::prepacked : WeightOrder::rows);
    }
  }

 private:
  Shape shape_;
  bool gradients_, packed_;
  KernelContext ctx_;
  std::vector<Line> x_, w_, dy_, out_;
};

constexpr int kLeastRounds = 2, kMostRounds = 5, kDoubtfulRounds = 12;  // the last where a choice hangs by little
constexpr double kClassSeconds = 0.01;  // behind the first round, which makes oneDNN's kernels: then only doubt goes on

std::vector<PathRate> measure(ProductClass c, const std::vector<ProductPath>& paths, const ProductPaths& rule) {
  std::vector<Candidate> candidates;
  for (const ProductPath path : paths) candidates.emplace_back(c, with(rule, c, path)).run();
  std::vector<double> best(paths.size(), std::numeric_limits<double>::infinity());
  const auto doubtful = [&] {
    return hangs_by_little(c, rates_of(paths, best, candidates.front().flops(), 0.0), rule[c]);
  };
  const double begin = cpu_seconds();
  const auto go_on = [&](int round) {
    if (round < kLeastRounds) return true;
    return (round < kMostRounds && cpu_seconds() - begin < kClassSeconds) || (round < kDoubtfulRounds && doubtful());
  };
  for (int round = 0; go_on(round); ++round)
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      candidates[i].forget_weights();
      const double before = cpu_seconds();
      candidates[i].run();
      best[i] = std::min(best[i], cpu_seconds() - before);
    }
  return rates_of(paths, best, candidates.front().flops(), least_seconds());
}

}  // namespace

std::string_view name_of(Bf16Products p) {
  constexpr std::string_view names[] = {"AMX tiles", "AVX512_BF16", "widened to fp32"};
  return names[static_cast<std::size_t>(p)];
}

std::string_view name_of(ProductClass c) {
  constexpr std::string_view names[] = {"few rows", "some rows", "many rows", "gradients"};
  return names[static_cast<std::size_t>(c)];
}

std::string_view name_of(ProductPath path, Bf16Products unit) {
  switch (path) {
    case ProductPath::own:
      return "own kernels";
    case ProductPath::unit:
      return name_of(unit);
    case ProductPath::wide:
      break;
  }
  return "oneDNN in fp32";
}

Bf16Products bf16_unit() { return unit_of_isa(static_cast<unsigned>(dnnl::get_effective_cpu_isa())); }

Bf16Products unit_of_isa(unsigned isa) {
  // Not by order: oneDNN's AVX2_VNNI is a greater number than its AMX.
  const auto has = [isa](dnnl::cpu_isa set) {
    return (isa & static_cast<unsigned>(set)) == static_cast<unsigned>(set);
  };
  if (has(dnnl::cpu_isa::avx512_core_amx)) return Bf16Products::amx;
  return has(dnnl::cpu_isa::avx512_core_bf16) ? Bf16Products::avx512_bf16 : Bf16Products::widened;
}

Bf16Products bf16_products() {
  const Bf16Products unit = bf16_unit();
#if defined(__x86_64__)
  if (unit == Bf16Products::avx512_bf16 && !__builtin_cpu_is("amd")) return Bf16Products::widened;
#endif
  return unit;
}

ProductClass class_of_rows(std::int64_t T) {
  return T <= kSkinnyRows ? ProductClass::few_rows : T <= kSomeRows ? ProductClass::some_rows : ProductClass::many_rows;
}

ProductPaths rule_of(Bf16Products products) {
  using enum ProductPath;
  return products == Bf16Products::widened ? ProductPaths{{own, own, own, own}} : ProductPaths{{own, unit, unit, unit}};
}

ProductPaths rule_of_machine() { return rule_of(bf16_products()); }

std::vector<ProductPath> candidates(ProductClass c, Bf16Products unit) {
  std::vector<ProductPath> out{ProductPath::own};
  if (unit != Bf16Products::widened) out.push_back(ProductPath::unit);
  if (c != ProductClass::few_rows) out.push_back(ProductPath::wide);  // widening costs more than the product there
  return out;
}

std::vector<ProductPath> measured_candidates(ProductClass c, Bf16Products unit, const ProductPaths& rule) {
  std::vector<ProductPath> out = candidates(c, unit);
  if (c == ProductClass::some_rows && packs_for_unit(rule)) std::erase(out, ProductPath::wide);
  return out;
}

std::vector<PathRate> rates_of(const std::vector<ProductPath>& paths, const std::vector<double>& seconds, double flops,
                               double least) {
  std::vector<PathRate> out;
  if (std::ranges::any_of(seconds, [least](double s) { return s <= 0.0 || s < least; })) return out;
  for (std::size_t i = 0; i < paths.size(); ++i) out.push_back({paths[i], flops * 1e-9 / seconds[i]});
  return out;
}

std::string text_of(const ProductPaths& paths, Bf16Products unit) {
  const Bf16Products head = any_takes(paths, ProductPath::unit) ? unit : Bf16Products::widened;
  std::string out(name_of(head));
  for (const ProductClass c : kProductClasses)
    if (paths[c] != rule_of(head)[c]) out += fmt::format("; {}: {}", name_of(c), name_of(paths[c], unit));
  return out;
}

std::optional<ProductPaths> paths_of(std::string_view text, Bf16Products unit) {
  // There are few: a text is that of one of them, or of none.
  ProductPaths paths;
  std::optional<ProductPaths> found;
  const std::function<void(std::size_t)> try_from = [&](std::size_t at) {
    if (at == kProductClasses.size()) {
      if (text_of(paths, unit) == text) found = paths;
      return;
    }
    for (const ProductPath path : candidates(kProductClasses[at], unit)) {
      paths[kProductClasses[at]] = path;
      try_from(at + 1);
    }
  };
  try_from(0);
  return found;
}

bool hangs_by_little(ProductClass c, const std::vector<PathRate>& rates, ProductPath rule) {
  double of_rule = 0.0, of_another = 0.0;
  for (const PathRate& rate : rates)
    if (rate.path == rule) of_rule = rate.gflop_s;
    else of_another = std::max(of_another, rate.gflop_s);
  if (of_rule == 0.0 || of_another == 0.0) return false;
  const double line = worth_leaving_rule(c) * of_rule;
  return of_another > line / 1.1 && of_another < line * 1.1;
}

ProductPaths choose(const ProductPaths& rule, const ProductRates& rates) {
  using enum ProductClass;
  const auto chosen = [&rule](ProductClass c, const std::vector<PathRate>& of_class) {
    const auto ruled = std::ranges::find(of_class, rule[c], &PathRate::path);
    if (ruled == of_class.end()) return rule[c];
    const auto best = std::ranges::max_element(of_class, {}, &PathRate::gflop_s);
    return best->gflop_s >= worth_leaving_rule(c) * ruled->gflop_s ? best->path : rule[c];
  };
  ProductPaths out;
  for (const ProductClass c : kProductClasses) out[c] = chosen(c, rates[c]);
  if (out[some_rows] == ProductPath::wide && packs_for_unit(out)) {
    std::vector<PathRate> of_pairs = rates[some_rows];
    std::erase_if(of_pairs, [](const PathRate& rate) { return rate.path == ProductPath::wide; });
    out[some_rows] = chosen(some_rows, of_pairs);
  }
  return out;
}

ProductRates measure_product_paths() {
  const int threads = omp_get_max_threads();  // which kernels on one thread would leave at 1
  const Bf16Products unit = bf16_unit();
  const ProductPaths rule = rule_of_machine();
  ProductRates out;
  for (const ProductClass c : kProductClasses)
    if (const auto paths = measured_candidates(c, unit, rule); paths.size() > 1)  // else there is nothing to choose
      out[c] = measure(c, paths, rule);
  omp_set_num_threads(threads);
  return out;
}

}  // namespace hotbunk::kernels

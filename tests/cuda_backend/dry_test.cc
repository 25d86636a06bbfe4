// Dry performance: what each hot kernel asks for, counted by the executor, beside what the op catalogue says that the
// op moves and computes. docs/dry-performance.md has the table that this prints with -s.
#include <fmt/format.h>

#include <bit>
#include <catch2/catch.hpp>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "backends/cuda/fake/fake_driver.h"
#include "backends/cuda/op_launches.h"
#include "backends/cuda/staging.h"
#include "graph/catalogue.h"
#include "tests/cuda_backend/dry_kernels.h"
#include "tests/toy_plan.h"

namespace hotbunk::dry_test {
namespace {

using namespace cuda;

class Placed final : public Addresses {
 public:
  std::byte* address(const Tensor& t) const override { return reinterpret_cast<std::byte*>(at.at(t.buffer)); }
  std::map<BufferId, CUdeviceptr> at;
};

struct Row {
  double asked, touched, catalogue, flops, catalogue_flops, sectors, banks;
};

Row measure(const Hot& hot) {
  static const auto modules = std::make_shared<PtxModules>();  // parsed once for all kernels
  FakeDriver fake({.memory_bytes = std::int64_t{256} << 20, .modules = modules, .count_traffic = true});
  const Context context(fake.table());
  const OwnedStream stream(context);
  const Launcher launch(context, stream.handle());
  Staging staging(context, stream.handle());
  Program program;
  Op op = toy::op(hot.kind, streams::compute, hot.name);
  op.attrs = hot.attrs, op.moves = hot.moves;
  if (op.has(Attr::ranks) || op.has(Attr::vocab_stride) || op.kind == OpKind::expert_arrivals ||
      op.kind == OpKind::copy_arrivals)
    op.group = 0;
  Placed placed;
  std::vector<std::unique_ptr<DeviceBlock>> blocks;
  const auto put = [&](const Operand& o, bool fill) {
    Tensor t;
    t.buffer = static_cast<BufferId>(placed.at.size());
    t.dtype = o.dtype, t.rank = static_cast<int>(o.shape.size());
    std::int64_t n = 1;
    for (std::size_t i = 0; i < o.shape.size(); ++i) t.shape[i] = Dim{o.shape[i]}, n *= o.shape[i];
    blocks.push_back(std::make_unique<DeviceBlock>(context, std::max<std::int64_t>(n * size_of(o.dtype), 1)));
    placed.at[t.buffer] = blocks.back()->address();
    if (!fill) return t;
    std::byte* here = staging.take(n * size_of(o.dtype));
    for (std::int64_t i = 0; i < n; ++i) {
      if (o.dtype == DType::i64) {
        std::memset(here + 8 * i, 0, 8);
      } else if (o.dtype == DType::i32) {
        const auto v = static_cast<std::int32_t>(o.integer ? o.integer(i) : i % 7);
        std::memcpy(here + 4 * i, &v, 4);
      } else {
        const float v = static_cast<float>(i * 7 % 11 - 5) / 8;
        const auto bits = std::bit_cast<std::uint32_t>(v);
        const auto half = static_cast<std::uint16_t>(bits >> 16);
        if (o.dtype == DType::bf16) std::memcpy(here + 2 * i, &half, 2);
        else std::memcpy(here + 4 * i, &bits, 4);
      }
    }
    HB_CUDA(context.driver(), cuMemcpyHtoDAsync(blocks.back()->address(), here,
                                                static_cast<std::size_t>(n * size_of(o.dtype)), stream.handle()));
    staging.in_use();
    return t;
  };
  for (const Operand& o : hot.inputs) op.inputs.push_back(put(o, true));
  for (const Operand& o : hot.outputs) op.outputs.push_back(put(o, hot.reads_outputs));
  Body body;
  body.ops = {op};
  program.bodies = {body};
  const Op& placed_op = program.bodies[0].ops[0];
  const Places places = {0};
  const OpTables tables(context, program, places);
  const DeviceBlock scratch(context, std::max<std::int64_t>(scratch_bytes(placed_op), 1));
  const Sizes sizes{T, 1, T * T};
  const Call call;
  const BoundOp bound{&program, nullptr, &call, &placed_op};
  const auto before = fake.kernel_counts();
  op_launch(hot.kind)({{placed, placed_op, sizes, places, bound}, launch, tables, scratch.address()});
  HB_CUDA(context.driver(), cuStreamSynchronize(stream.handle()));
  REQUIRE(fake.findings().empty());
  Row r{};
  std::int64_t requests = 0, wavefronts = 0, sectors = 0, asked = 0;
  for (const auto& [name, c] : fake.kernel_counts()) {
    REQUIRE(!before.contains(name));
    r.touched += static_cast<double>(c.touched_bytes);
    r.flops += static_cast<double>(c.counters.flops);
    asked += c.counters.global_read_bytes + c.counters.global_written_bytes;
    sectors += c.counters.global_sectors;
    requests += c.counters.shared_requests, wavefronts += c.counters.shared_wavefronts;
  }
  r.asked = static_cast<double>(asked);
  r.catalogue = static_cast<double>(op_bytes(placed_op, sizes, places));
  r.catalogue_flops = op_flops(placed_op, sizes);
  r.sectors = sectors > 0 ? r.asked / (32.0 * static_cast<double>(sectors)) : 1.0;
  r.banks = requests > 0 ? static_cast<double>(wavefronts) / static_cast<double>(requests) : 0.0;
  return r;
}

}  // namespace

TEST_CASE("streaming kernels touch what the catalogue says, in whole sectors", "[dry]") {
  std::string table = fmt::format("{:<28} {:<5} {:>9} {:>9} {:>9} {:>7} {:>7} {:>8} {:>7} {:>7}\n", "op", "dtype",
                                  "asked", "touched", "catalogue", "asked/", "touch./", "sectors", "banks", "flops/");
  std::set<OpKind> kinds;
  for (const DType x : {DType::f32, DType::bf16})
    for (const Hot& hot : hot_kernels(x)) {
      INFO(hot.name << " in " << name_of(x));
      kinds.insert(hot.kind);
      const Row r = measure(hot);
      table += fmt::format("{:<28} {:<5} {:>9.0f} {:>9.0f} {:>9.0f} {:>7.2f} {:>7.2f} {:>8.2f} {:>7.2f} {:>7.2f}\n",
                           hot.name, name_of(x), r.asked, r.touched, r.catalogue, r.asked / r.catalogue,
                           r.touched / r.catalogue, r.sectors, r.banks,
                           r.catalogue_flops > 0 ? r.flops / r.catalogue_flops : 0.0);
      const Limits& limits = limits_of(hot.name);
      CHECK(r.touched <= limits.touched * r.catalogue);
      CHECK(r.asked <= limits.asked * r.catalogue);
      CHECK(r.sectors >= limits.sectors);
      if (limits.flops > 0.0) CHECK(r.flops <= limits.flops * r.catalogue_flops);
    }
  INFO(table);
  for (int kind = 0; kind < num_op_kinds; ++kind) {
    const auto of = static_cast<OpKind>(kind);
    // Nothing, a fill, the kernel of rope, three numbers, and kernels of other rows one behind the other.
    if (of == OpKind::prepack || of == OpKind::zero || of == OpKind::rope_backward || of == OpKind::clip_coefficient ||
        of == OpKind::fused_linear)
      continue;
    INFO(name_of(of) << " has a kernel, and no row");
    if (op_launch(of) != nullptr) CHECK(kinds.contains(of));
  }
}

}  // namespace hotbunk::dry_test

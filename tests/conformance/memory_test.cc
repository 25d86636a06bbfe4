// Memory: what is mapped and live is counted alike by all; what does not fit, or does not balance, is refused.
#include <fmt/format.h>

#include <catch2/catch.hpp>

#include "tests/conformance/play.h"

namespace hotbunk::conformance {
namespace {

using toy::mapping;
using toy::memory;

Buffer buffer(std::string name, std::int64_t bytes, Category category, SectionId section, std::int64_t offset) {
  return {std::move(name), DType::u8, bytes, category, section, offset};
}

/// One rank, phase "work", a transient section of 16 KiB.
Plan with_buffers(std::vector<Op> ops, std::vector<Buffer> buffers) {
  Plan plan = toy::plan_of({std::move(ops)});
  plan.programs[0].buffers = std::move(buffers);
  for (const SectionId s : {sections::transient, sections::train_params, sections::host_params})
    plan.programs[0].section(s).bytes = 16384;
  return plan;
}

Op map(SectionId s, std::int64_t end) { return mapping(OpKind::map, s, 0, end); }
Op unmap(SectionId s, std::int64_t end) { return mapping(OpKind::unmap, s, 0, end); }

}  // namespace

TEST_CASE("peaks by category, by phase, over steps, on both sides; mapped in chunks") {
  // Sizes in bytes. Phase one: params 1000 stay; phase two: activations 3000 and workspace 500 come and go, one after
  // the other; on the host 100 stays from phase two of step 1 on.
  Plan plan =
      toy::plan_of({"load", "train"},
                   {{{map(sections::train_params, 4096), memory(OpKind::alloc, 0, "p")},
                     {map(sections::transient, 8192), memory(OpKind::alloc, 1, "a"), memory(OpKind::free, 1, "a"),
                      memory(OpKind::alloc, 2, "w"), memory(OpKind::free, 2, "w"), unmap(sections::transient, 8192),
                      map(sections::host_params, 4096), memory(OpKind::alloc, 3, "h"), memory(OpKind::free, 3, "h"),
                      unmap(sections::host_params, 4096)}}});
  plan.phases[0].when = When::prologue;
  plan.programs[0].buffers = {buffer("p", 1000, Category::params, sections::train_params, 0),
                              buffer("a", 3000, Category::activations, sections::transient, 0),
                              buffer("w", 500, Category::workspace, sections::transient, 0),
                              buffer("h", 100, Category::optimizer, sections::host_params, 64)};
  for (const SectionId s : {sections::transient, sections::train_params, sections::host_params})
    plan.programs[0].section(s).bytes = 8192;
  for (const auto& subject : subjects()) {
    INFO(subject->name());
    const Played played = play(*subject, plan, {.steps = 3});
    REQUIRE_THAT(played.failure(), Catch::Equals(""));
    REQUIRE(played.trace.memory.size() == 1);
    const SpaceMemory& device = played.trace.memory[0].device;
    CHECK(device.peak_bytes == 4000);
    CHECK(device.mapped_peak_bytes == 4096 + 8192);
    CHECK(device.peak_step == 1);
    CHECK(device.peak_phase == 1);
    CategoryBytes at_peak{};
    at_peak[static_cast<std::size_t>(Category::params)] = 1000;
    at_peak[static_cast<std::size_t>(Category::activations)] = 3000;
    CHECK(device.at_peak == at_peak);
    CategoryBytes peaks = at_peak;
    peaks[static_cast<std::size_t>(Category::workspace)] = 500;
    CHECK(device.category_peaks == peaks);
    REQUIRE(device.phase_peaks.size() == 2);
    CHECK(device.phase_peaks.at(0).peak_bytes == 1000);
    CHECK(device.phase_peaks.at(0).mapped_peak_bytes == 4096);
    CHECK(device.phase_peaks.at(1).peak_bytes == 4000);
    CHECK(device.phase_peaks.at(1).by_category == at_peak);
    CHECK(device.end_live_bytes == 1000);
    CHECK(device.end_mapped_bytes == 4096);
    const SpaceMemory& host = played.trace.memory[0].host;
    CHECK(host.peak_bytes == 100);
    CHECK(host.mapped_peak_bytes == 4096);
    CHECK(host.end_live_bytes == 0);
  }
}

TEST_CASE("a capacity holds to the byte: one less is refused, in the same words by all") {
  const std::vector<Op> ops = {map(sections::train_params, 8192), memory(OpKind::alloc, 0, "w"),
                               map(sections::transient, 12288)};
  const std::vector<Buffer> buffers = {buffer("w", 8000, Category::params, sections::train_params, 0)};
  for (const auto& subject : subjects()) {
    INFO(subject->name());
    Plan plan = with_buffers(ops, buffers);
    plan.overhead_bytes = 1000;
    plan.device_capacity_bytes = 8192 + 12288 + 1000;
    CHECK_THAT(play(*subject, plan).failure(), Catch::Equals(""));
    --plan.device_capacity_bytes;
    CHECK_THAT(play(*subject, plan).failure(),
               Catch::Contains("error[E301]: the plan does not fit: rank 0 needs 21.0 KiB of 21.0 KiB on the device in "
                               "phase work\n") &&
                   Catch::Contains("= note: step 1, op 'arena' maps 12.0 KiB (12288 B) of transient\n"
                                   "   = note: mapped 8192 + asked 12288 + overhead 1000 = 21480 B, capacity 21479 B: "
                                   "1 B too much\n"
                                   "   = note: large: 'w' (params, train_params) 7.8 KiB (8000 B)\n"
                                   "   = help: make those smaller"));
    plan.device_capacity_bytes = plan.overhead_bytes;  // nothing is left
    CHECK_THAT(play(*subject, plan).failure(),
               Catch::Contains("mapped 0 + asked 8192 + overhead 1000 = 9192 B, capacity 1000 B: 8192 B too much"));

    // The host has a capacity of its own, without the device's overhead.
    Plan host = with_buffers({map(sections::host_params, 8192)}, {});
    host.overhead_bytes = 1 << 20;
    host.host_capacity_bytes = 8192;
    CHECK_THAT(play(*subject, host).failure(), Catch::Equals(""));
    host.host_capacity_bytes = 8191;
    CHECK_THAT(play(*subject, host).failure(),
               Catch::Contains("error[E301]: the plan does not fit: rank 0 needs 8.0 KiB of 8.0 KiB on the host in "
                               "phase work\n") &&
                   Catch::Contains("mapped 0 + asked 8192 + overhead 0 = 8192 B, capacity 8191 B: 1 B too much") &&
                   Catch::Contains("= help: raise cluster.host_memory_gib"));
  }
}

TEST_CASE("memory that is not mapped is not used, and books that do not balance are refused by name") {
  const auto mapped = map(sections::transient, 4096), unmapped = unmap(sections::transient, 4096);
  const auto alloc = memory(OpKind::alloc, 0, "window+"), free = memory(OpKind::free, 0, "window-");
  const std::vector<Buffer> buffers = {buffer("window", 400, Category::activations, sections::transient, 0)};
  struct Case {
    const char* what;
    std::vector<Op> ops;
    const char* names;  // stands in the refusal
  };
  const std::vector<Case> refused = {
      {"a buffer on nothing", {alloc}, "window"},
      {"after the unmap", {mapped, unmapped, alloc}, "window"},
      {"live twice", {mapped, alloc, alloc}, "window"},
      {"freed twice", {mapped, alloc, free, free}, "window"},
      {"freed before it lives", {mapped, free}, "window"},
      {"mapped twice", {mapped, mapped}, "mapped"},
      {"unmapped before it is mapped", {unmapped}, "mapped"},
      {"unmapped twice", {mapped, unmapped, unmapped}, "mapped"},
      {"unmapped under a live buffer", {mapped, alloc, unmapped}, "window"},
      {"a range of no chunks", {mapping(OpKind::map, sections::transient, 0, 100)}, "chunks"},
  };
  for (const auto& subject : subjects()) {
    for (const Case& c : refused) {
      INFO(subject->name() << ": " << c.what);
      const std::string found = play(*subject, with_buffers(c.ops, buffers)).failure();
      CHECK_THAT(found, Catch::Contains(c.names));
    }
    INFO(subject->name());
    CHECK_THAT(play(*subject, with_buffers({mapped, alloc, free, unmapped, mapped, alloc}, buffers)).failure(),
               Catch::Equals(""));
  }
}

TEST_CASE("what is mapped keeps its contents while others come and go") {
  RankProgram p;
  const Tensor x = p.tensor("x", DType::u8, {4096});
  p.feed(x);
  p.add(map(sections::kv_cache, 8192));
  p.add(unmap(sections::kv_cache, 8192));
  p.fetch(x);
  for (const auto& subject : subjects()) {
    INFO(subject->name());
    Plan plan = plan_of(p);
    plan.programs[0].section(sections::kv_cache).bytes = 8192;
    const Bytes data(static_cast<std::size_t>(p.buffer_of(x).elements), std::byte{42});
    const Played played = play(*subject, plan, {.feeds = {{"feed x", data}}});
    REQUIRE_THAT(played.failure(), Catch::Equals(""));
    if (subject->has_values()) CHECK(played.fetched.at("fetch x@0") == data);
    CHECK(played.trace.memory[0].device.mapped_peak_bytes == 8192 + 8192);  // 4,096 B and its guards take two chunks
    CHECK(played.trace.memory[0].device.end_mapped_bytes == 0);
  }
}

}  // namespace hotbunk::conformance

#include "backends/cpu_gloo/cpu_backend.h"

#include <fmt/format.h>

#include <utility>

#include "backends/cpu_gloo/arena.h"
#include "backends/cpu_gloo/cpu_device.h"
#include "backends/cpu_gloo/kernels/context.h"
#include "backends/cpu_gloo/op_kernels.h"
#include "base/check.h"
#include "runtime/plan_communicators.h"

namespace hotbunk {
namespace {

/// "" when every rank that the plan's peer copies read from shares memory with its reader; else why not. The same
/// answer on every rank.
std::string why_no_peer_memory(const Plan& plan, const CpuWorld& world) {
  return world.size() > 1 && reads_peers(plan) ? world.why_no_sharing() : "";
}

}  // namespace

CpuBackend::CpuBackend(CpuWorld& world, Driver& driver, CpuOptions options)
    : world_(world), driver_(driver), options_(std::move(options)) {}
CpuBackend::~CpuBackend() = default;

Capability CpuBackend::supports(const Op& op) const { return kernels_support(op); }

Result<std::vector<std::unique_ptr<Device>>> CpuBackend::open(const Plan& plan, std::span<const Rank> local) {
  HB_CHECK(local.size() == 1 && local[0] == world_.rank(), "a CPU process plays one rank, its own");
  if (world_.size() != plan.num_ranks())
    return fail(Diagnostic{.code = "E704",
                           .message = fmt::format("the plan has {} ranks, but {} processes were launched",
                                                  plan.num_ranks(), world_.size()),
                           .where = {},
                           .notes = {},
                           .help = fmt::format("launch {} processes, or change train.layout", plan.num_ranks())});
  if (const std::string why = why_no_peer_memory(plan, world_); !why.empty())
    return fail(Diagnostic{.code = "E706",
                           .message = "sync.transport ipc reads other ranks' memory, but they share none: " + why,
                           .where = {},
                           .notes = {},
                           .help = "set sync.transport to collective, which works between hosts"});
  try {
    kernels::check_team(options_.compute_threads);
    auto device = std::make_unique<CpuDevice>(plan, local[0], world_, &driver_, options_);
    device_ = device.get();
    memory_ = device->arena();
    std::vector<std::unique_ptr<Device>> out;
    out.push_back(std::move(device));
    return out;
  } catch (const RuntimeFailure& e) {
    return fail(Diagnostic{.code = "E602",
                           .message = e.what(),
                           .where = {},
                           .notes = {"while opening the plan's arenas and communicators"},
                           .help = "`hotbunk doctor` tries memory, sockets and threads of this machine"});
  }
}

Result<Trace> CpuBackend::take_trace() {
  HB_CHECK(device_, "open() comes first");
  return device_->take_trace();
}

std::vector<TimedOp> CpuBackend::timings() const {
  HB_CHECK(device_, "open() comes first");
  return device_->measured().timings();
}

std::vector<HostStretch> CpuBackend::host_times() const {
  HB_CHECK(device_, "open() comes first");
  return device_->measured().host_times();
}

std::vector<PhaseSpan> CpuBackend::stays(std::int32_t step) const {
  HB_CHECK(device_, "open() comes first");
  return device_->measured().stays(step);
}

RankMemory CpuBackend::memory_so_far() {
  HB_CHECK(device_, "open() comes first");
  return device_->memory().measured();
}

std::span<const std::byte> CpuBackend::peek(std::string_view name) const {
  HB_CHECK(device_, "open() comes first");
  for (const Buffer& b : device_->program().buffers)
    if (b.name == name && device_->memory().is_mapped(b))
      return {device_->memory().address(b), static_cast<std::size_t>(b.bytes())};
  return {};
}

std::int64_t CpuBackend::resident_bytes() const { return memory_->resident_bytes(); }
std::int64_t CpuBackend::mapped_bytes() const { return memory_->counters().mapped; }

}  // namespace hotbunk

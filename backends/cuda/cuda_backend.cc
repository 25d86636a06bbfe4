#include "backends/cuda/cuda_backend.h"

#include <fmt/format.h>

#include <utility>

#include "backends/cpu_gloo/op_kernels.h"
#include "backends/cuda/cuda_device.h"
#include "base/check.h"
#include "graph/catalogue.h"

namespace hotbunk::cuda {

CudaBackend::CudaBackend(CudaWorld& world, hotbunk::Driver& driver, CudaOptions options)
    : world_(world), driver_(driver), options_(std::move(options)) {}
CudaBackend::~CudaBackend() = default;

Capability CudaBackend::supports(const Op& op) const {
  if (op.is_priced()) return {false, "it is a priced block: what another framework does there is not written op by op"};
  if (op.hands_over()) return {false, "what roles hand over without meeting is played in virtual time only"};
  if (is_communication(op.kind)) return {};
  const bool built_in = is_memory(op.kind) || is_event(op.kind) || op.kind == OpKind::feed ||
                        op.kind == OpKind::fetch || op.kind == OpKind::copy;
  if (!built_in && !op_launch(op.kind)) return {false, "no CUDA kernel is registered for it"};
  std::string why = why_unsupported(op);
  return {why.empty(), std::move(why)};
}

Capability CudaBackend::supports_on_host(const Op& op) const { return kernels_support(op); }

Result<std::vector<std::unique_ptr<Device>>> CudaBackend::open(const Plan& plan, std::span<const Rank> local) {
  HB_CHECK(local.size() == 1 && local[0] == world_.rank(), "a CUDA backend plays one rank, its own");
  if (world_.size() != plan.num_ranks())
    return fail(Diagnostic{
        .code = "E704",
        .message = fmt::format("the plan has {} ranks, but {} were launched", plan.num_ranks(), world_.size()),
        .where = {},
        .notes = {},
        .help = fmt::format("launch {} ranks, or change train.layout", plan.num_ranks())});
  const bool shares = world_.over_processes() && world_.size() > 1 && reads_peers(plan);
  if (const std::string why = shares ? world_.why_no_sharing() : ""; !why.empty())
    return fail(Diagnostic{.code = "E706",
                           .message = "the ranks cannot read each other's device memory: " + why,
                           .where = {},
                           .notes = {"sync.transport is ipc, whose ranks read weights where their peers keep them"},
                           .help = "set sync.transport to collective"});
  const Result<bool> on_host = computes_on_host(plan.program(local[0]), *this);
  if (!on_host) return fail(on_host.error());
  try {
    if (*on_host) kernels::check_team(options_.host_threads);
    world_.context().make_current();
    auto device = std::make_unique<CudaDevice>(plan, local[0], world_, &driver_, options_,
                                               shares ? &world_.share_memory() : nullptr);
    device_ = device.get();
    memory_ = device->arena();
    std::vector<std::unique_ptr<Device>> out;
    out.push_back(std::move(device));
    return out;
  } catch (const RuntimeFailure& e) {
    return fail(Diagnostic{
        .code = "E602",
        .message = e.what(),
        .where = {},
        .notes = {fmt::format("rank {}, while opening the plan's arenas, tables and communicators", world_.rank())},
        .help = "`hotbunk doctor` says what the driver is and what memory is free"});
  }
}

Result<Trace> CudaBackend::take_trace() {
  HB_CHECK(device_, "open() comes first");
  timings_ = device_->timings();  // the device may end with the trace
  choices_ = device_->library_choices();
  return device_->take_trace();
}
std::vector<PhaseSpan> CudaBackend::stays(std::int32_t step) const {
  HB_CHECK(device_, "open() comes first");
  return device_->measured().stays(step);
}
RankMemory CudaBackend::memory_so_far() {
  HB_CHECK(device_, "open() comes first");
  return device_->memory().measured();
}

std::int64_t CudaBackend::physical_bytes() const { return memory_->physical_bytes(); }
std::int64_t CudaBackend::mapped_bytes() const { return memory_->counters().mapped; }

std::vector<std::byte> CudaBackend::read(std::string_view name) const {
  HB_CHECK(device_, "open() comes first");
  const Driver& d = world_.context().driver();
  for (const Buffer& b : device_->program().buffers) {
    if (b.name != name || !device_->memory().is_mapped(b)) continue;
    std::vector<std::byte> out(static_cast<std::size_t>(b.bytes()));
    const OwnedStream stream(world_.context());
    Staging staging(world_.context(), stream.handle());
    std::byte* here = staging.take(b.bytes());
    HB_CUDA(d, cuMemcpyDtoHAsync(here, reinterpret_cast<CUdeviceptr>(device_->memory().address(b)), out.size(),
                                 stream.handle()));
    HB_CUDA(d, cuStreamSynchronize(stream.handle()));
    std::copy_n(here, out.size(), out.begin());
    return out;
  }
  return {};
}

}  // namespace hotbunk::cuda

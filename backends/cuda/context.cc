#include "backends/cuda/context.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "backends/cuda/kernels/kernels.h"
#include "backends/cuda/nvtx.h"
#include "base/check.h"

namespace hotbunk::cuda {
namespace {

/// Every file of kernels/, and how its kernels begin: a name belongs to the file of the longest prefix that fits.
struct KernelFile {
  const char* file;
  const char* prefix;
};
constexpr std::array kernel_files = {
    KernelFile{"activations", "swiglu_"},
    KernelFile{"activations", "geglu_"},
    KernelFile{"activations", "clamped_swiglu_"},
    KernelFile{"activations", "gelu_"},
    KernelFile{"attention", "attention_"},
    KernelFile{"attention", "kv_write_"},
    KernelFile{"attention", "paged_attention_"},
    KernelFile{"attention", "clear_idle_rows_"},
    KernelFile{"attention_tiled", "tiled_"},
    KernelFile{"boxes", "copy_boxes_"},
    KernelFile{"boxes", "move_boxes_"},
    KernelFile{"boxes", "hash_boxes_"},
    KernelFile{"context", "context_attention_"},
    KernelFile{"context", "take_kv_"},
    KernelFile{"context", "merge_qkv_"},
    KernelFile{"elementwise", "add_"},
    KernelFile{"elementwise", "cast_"},
    KernelFile{"elementwise", "scale_"},
    KernelFile{"elementwise", "add_bias_"},
    KernelFile{"elementwise", "softcap"},
    KernelFile{"elementwise", "differing_halves"},
    KernelFile{"elementwise", "gather_rows_"},
    KernelFile{"elementwise", "column_parts_"},
    KernelFile{"elementwise", "column_sums_"},
    KernelFile{"elementwise", "sum_ranks_"},
    KernelFile{"elementwise", "max_ranks_"},
    KernelFile{"embedding", "embedding_"},
    KernelFile{"experts", "route_"},
    KernelFile{"experts", "expert_"},
    KernelFile{"experts", "own_"},
    KernelFile{"experts", "copy_sort"},
    KernelFile{"experts", "copy_arrivals"},
    KernelFile{"experts", "dispatch_"},
    KernelFile{"experts", "combine_"},
    KernelFile{"grouped", "grouped_matmul_nt_bf16"},
    KernelFile{"grouped", "grouped_matmul_nn_bf16"},
    KernelFile{"grouped", "grouped_matmul_tn_bf16_"},
    KernelFile{"grouped", "grouped_bias_bf16_"},
    KernelFile{"grouped_f32", "grouped_matmul_nt_f32"},
    KernelFile{"grouped_f32", "grouped_matmul_nn_f32"},
    KernelFile{"grouped_f32", "grouped_matmul_tn_f32_"},
    KernelFile{"grouped_f32", "grouped_bias_f32_"},
    KernelFile{"heads", "split_heads_"},
    KernelFile{"heads", "merge_heads_"},
    KernelFile{"latent", "latent_"},
    KernelFile{"layer_norm", "layer_norm_"},
    KernelFile{"lora", "lora_merge_"},
    KernelFile{"loss", "log_prob"},
    KernelFile{"loss", "token_loss"},
    KernelFile{"loss", "vocab_"},
    KernelFile{"loss", "sample"},
    KernelFile{"matmul", "matmul_nt_bf16_"},
    KernelFile{"matmul_nt", "matmul_nt_bf16_bf16_"},
    KernelFile{"matmul_nt", "matmul_nt_bf16_f32_"},
    KernelFile{"matmul", "matmul_nn_bf16_"},
    KernelFile{"matmul", "matmul_tn_bf16_"},
    KernelFile{"matmul_f32", "matmul_nt_f32_"},
    KernelFile{"matmul_f32", "matmul_nn_f32_"},
    KernelFile{"matmul_f32", "matmul_tn_f32_"},
    KernelFile{"norm", "rms_norm_"},
    KernelFile{"norm", "qk_norm_"},
    KernelFile{"optimizer", "sum_squares_"},
    KernelFile{"optimizer", "clip_coefficient"},
    KernelFile{"optimizer", "adamw_"},
    KernelFile{"rope", "rope_"},
    KernelFile{"router_loss", "router_loss_"},
    KernelFile{"router_loss", "expert_counts"},
    KernelFile{"sinks", "attention_sinks_"},
};

CUmemAllocationProp memory_of(CUdevice device) {
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.location.id = device;
  return p;
}

}  // namespace

std::vector<std::string> kernel_file_names() {
  std::vector<std::string> out;
  for (const KernelFile& f : kernel_files)
    if (std::ranges::find(out, f.file) == out.end()) out.emplace_back(f.file);
  return out;
}

void check(const Driver& driver, CUresult result, const char* expression) {
  if (result == CUDA_SUCCESS) return;
  const char *name = nullptr, *text = nullptr;
  driver.cuGetErrorName(result, &name);
  driver.cuGetErrorString(result, &text);
  throw RuntimeFailure(fmt::format("{}: {} ({})", expression,
                                   name != nullptr ? name : fmt::format("error {}", static_cast<int>(result)),
                                   text != nullptr ? text : "no text"));
}

Context::Context(Driver driver, int ordinal) : driver_(driver) {
  find_profiler();
  HB_CUDA(driver_, cuInit(0));
  HB_CUDA(driver_, cuDeviceGet(&device_, ordinal));
  int managed = 0;
  HB_CUDA(driver_, cuDeviceGetAttribute(&managed, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device_));
  if (managed == 0)
    throw RuntimeFailure(
        "the device does not support virtual memory management, by which a sleeping side returns its "
        "memory and keeps its addresses");
  HB_CUDA(driver_, cuDevicePrimaryCtxRetain(&context_, device_));
  make_current();
  const CUmemAllocationProp memory = memory_of(device_);
  std::size_t bytes = 0;
  HB_CUDA(driver_, cuMemGetAllocationGranularity(&bytes, &memory, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  granularity_bytes_ = static_cast<std::int64_t>(bytes);
  int exports = 0;
  HB_CUDA(driver_,
          cuDeviceGetAttribute(&exports, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device_));
  exports_memory_ = exports != 0;
  int reaches = 0;
  HB_CUDA(driver_,
          cuDeviceGetAttribute(&reaches, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device_));
  reaches_network_ = reaches != 0;
  HB_CUDA(driver_, cuDeviceGetAttribute(&multiprocessors_, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device_));
  int major = 0, minor = 0;
  HB_CUDA(driver_, cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device_));
  HB_CUDA(driver_, cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device_));
  compute_capability_ = 10 * major + minor;
  load_kernels();
}

Context::~Context() {
  for (const auto& [file, library] : libraries_) driver_.cuLibraryUnload(library);
  if (context_ != nullptr) driver_.cuDevicePrimaryCtxRelease(device_);
}

void Context::load_kernels() {
  for (const std::string& file : kernel_file_names()) {
    const std::string text(kernel_ptx(file));  // cuLibraryLoadData wants it to end in a zero
    HB_CHECK(!text.empty(), "no PTX of kernels/{}.cu is compiled in", file);
    HB_CUDA(driver_, cuLibraryLoadData(&libraries_[file], text.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  }
}

std::string Context::device_name() const {
  std::array<char, 256> name{};
  HB_CUDA(driver_, cuDeviceGetName(name.data(), static_cast<int>(name.size()), device_));
  return name.data();
}

void Context::make_current() const { HB_CUDA(driver_, cuCtxSetCurrent(context_)); }

CUkernel Context::kernel(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  if (const auto it = kernels_.find(name); it != kernels_.end()) return it->second;
  const KernelFile* best = nullptr;
  for (const KernelFile& f : kernel_files)
    if (name.starts_with(f.prefix) &&
        (best == nullptr || std::string_view(f.prefix).size() > std::string_view(best->prefix).size()))
      best = &f;
  HB_CHECK(best != nullptr, "no kernel file for '{}'", name);
  CUkernel kernel = nullptr;
  const std::string text(name);
  HB_CUDA(driver_, cuLibraryGetKernel(&kernel, libraries_.at(best->file), text.c_str()));
  kernels_.emplace(text, kernel);
  return kernel;
}

void map_memory(const Context& context, CUdeviceptr address, std::int64_t bytes, bool shareable) {
  CUmemAllocationProp memory = memory_of(context.device());
  if (shareable && context.exports_memory()) memory.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  if (shareable && context.reaches_network()) memory.allocFlags.gpuDirectRDMACapable = 1;
  const auto size = static_cast<std::size_t>(bytes);
  CUmemGenericAllocationHandle physical{};
  HB_CUDA(context.driver(), cuMemCreate(&physical, size, &memory, 0));
  map_handle(context, address, bytes, physical);
}

void map_handle(const Context& context, CUdeviceptr address, std::int64_t bytes,
                CUmemGenericAllocationHandle physical) {
  const Driver& d = context.driver();
  const auto size = static_cast<std::size_t>(bytes);
  const CUresult mapped = d.cuMemMap(address, size, 0, physical, 0);
  d.cuMemRelease(physical);  // it lives as long as it is mapped
  check(d, mapped, "cuMemMap(address, size, 0, physical, 0)");
  CUmemAccessDesc access{};
  access.location = memory_of(context.device()).location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (const CUresult r = d.cuMemSetAccess(address, size, &access, 1); r != CUDA_SUCCESS) {
    d.cuMemUnmap(address, size);
    check(d, r, "cuMemSetAccess(address, size, &access, 1)");
  }
}

void unmap_memory(const Context& context, CUdeviceptr address, std::int64_t bytes) {
  const Driver& d = context.driver();
  HB_CUDA(d, cuMemUnmap(address, static_cast<std::size_t>(bytes)));
}

OwnedStream::OwnedStream(const Context& context) : context_(context) {
  HB_CUDA(context.driver(), cuStreamCreate(&handle_, CU_STREAM_NON_BLOCKING));
}
OwnedStream::~OwnedStream() { context_.driver().cuStreamDestroy(handle_); }

DeviceBlock::DeviceBlock(const Context& context, std::int64_t bytes, bool shareable)
    : context_(context),
      bytes_((bytes + context.granularity_bytes() - 1) / context.granularity_bytes() * context.granularity_bytes()) {
  if (bytes_ == 0) return;
  const Driver& d = context.driver();
  HB_CUDA(d, cuMemAddressReserve(&address_, static_cast<std::size_t>(bytes_), 0, 0, 0));
  try {
    map_memory(context, address_, bytes_, shareable);
  } catch (...) {
    d.cuMemAddressFree(address_, static_cast<std::size_t>(bytes_));
    throw;
  }
}

DeviceBlock::~DeviceBlock() {
  if (bytes_ == 0) return;
  const Driver& d = context_.driver();
  // Addresses at which memory stayed are not given back: freeing them is an error of the whole context.
  if (d.cuMemUnmap(address_, static_cast<std::size_t>(bytes_)) != CUDA_SUCCESS) return;
  d.cuMemAddressFree(address_, static_cast<std::size_t>(bytes_));
}

}  // namespace hotbunk::cuda

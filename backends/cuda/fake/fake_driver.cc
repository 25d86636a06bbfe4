// What the double knows of itself: findings, faults, calls, modules.
#include "backends/cuda/fake/fake_driver.h"

#include "base/check.h"

namespace hotbunk::cuda {

std::shared_ptr<const ptx::Module> PtxModules::parsed(const std::string& text) {
  const std::lock_guard lock(mutex_);
  auto& known = modules_[text];
  if (!known) known = std::make_shared<const ptx::Module>(ptx::parse(text));
  return known;
}

CUresult FakeDriver::found(std::string what) {
  findings_.push_back(std::move(what));
  return sticky_ = CUDA_ERROR_LAUNCH_FAILED;
}

std::vector<std::string> FakeDriver::findings() const {
  const std::lock_guard lock(mutex_);
  return findings_;
}

std::map<std::string, FakeDriver::KernelCounts> FakeDriver::kernel_counts() const {
  const std::lock_guard lock(mutex_);
  return kernel_counts_;
}

std::int64_t FakeDriver::faults_met() const {
  const std::lock_guard lock(mutex_);
  return faults_met_;
}

std::map<std::string, std::int64_t> FakeDriver::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

void FakeDriver::put_fault(const std::string& entry, std::int64_t nth, Fault fault) {
  const std::lock_guard lock(mutex_);
  faults_[entry][calls_[entry] + nth] = fault;
}
void FakeDriver::fail_call(const std::string& entry, std::int64_t nth, CUresult error) {
  put_fault(entry, nth, {.error = error});
}
void FakeDriver::hang_call(const std::string& entry, std::int64_t nth) { put_fault(entry, nth, {.hangs = true}); }
void FakeDriver::fail_call_later(const std::string& entry, std::int64_t nth) { put_fault(entry, nth, {.later = true}); }

std::optional<FakeDriver::Fault> FakeDriver::fault_at(const std::string& entry, std::unique_lock<std::mutex>& lock) {
  const std::int64_t nth = ++calls_[entry];
  const auto at = faults_.find(entry);
  if (at == faults_.end() || !at->second.contains(nth)) return {};
  ++faults_met_;
  Fault fault = at->second.at(nth);
  if (!fault.hangs) return fault;
  ++hanging_;
  gone_.wait(lock, [&] { return going_; });
  --hanging_;
  gone_.notify_all();
  fault.error = CUDA_ERROR_DEINITIALIZED;
  return fault;
}

CUresult FakeDriver::met(const std::string& entry, std::unique_lock<std::mutex>& lock) {
  const auto fault = fault_at(entry, lock);
  return fault ? fault->error : sticky_;
}

CUresult FakeDriver::other_call(const std::string& entry) {
  std::unique_lock lock(mutex_);
  return met(entry, lock);
}

FakeDriver::Fate FakeDriver::fate_of_call(const std::string& entry) {
  std::unique_lock lock(mutex_);
  const auto fault = fault_at(entry, lock);
  if (!fault) return Fate::goes_on;
  return fault->later ? Fate::fails_later : Fate::fails;
}

std::vector<FakeDriver::Touch> FakeDriver::launched(const KernelHandle& kernel, const ptx::Launch& launch) {
  const auto library = libraries_.find(kernel.library);
  if (library == libraries_.end()) throw RuntimeFailure("its library was unloaded before it ran");
  KernelCounts& counts = kernel_counts_[kernel.name];
  counts.counters += library->second.machine->launch(kernel.name, launch);
  ++counts.launches;
  std::vector<Touch> out;
  for (const auto& t : memory_.take_touched()) {
    out.push_back({t.begin, t.end, t.write});
    counts.touched_bytes += static_cast<std::int64_t>(t.end - t.begin);
  }
  return out;
}

bool FakeDriver::has_entry(const std::string& name) {
#define HB_CUDA_NAMED(entry) \
  if (name == #entry) return true;
  HB_CUDA_ENTRIES(HB_CUDA_NAMED)
#undef HB_CUDA_NAMED
  return false;
}

}  // namespace hotbunk::cuda

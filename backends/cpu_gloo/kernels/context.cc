#include "backends/cpu_gloo/kernels/context.h"

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <new>

#include "backends/cpu_gloo/kernels/onednn.h"
#include "base/check.h"
#include "base/limits.h"

namespace hotbunk::kernels {

int most_team_threads() { return omp_get_thread_limit(); }

void check_team(int threads) {
  if (const int most = most_team_threads(); most < threads)
    throw RuntimeFailure(
        fmt::format("OMP_THREAD_LIMIT allows a team of {}, and {} threads are to compute: unset it, or ask for fewer",
                    most, threads));
  check_threads(threads);  // OpenMP ends the process where it gets none
}

void ask_for_whole_teams() {
  omp_set_dynamic(0);
  omp_set_max_active_levels(std::max(1, omp_get_max_active_levels()));
}

struct KernelContext::Slot {
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(void* p) const { ::operator delete(p, kAlign); }
  };
  std::unique_ptr<void, Free> data;
  std::size_t bytes = 0;
};

KernelContext::KernelContext(int num_threads, const ProductPaths& paths)
    : num_threads_(num_threads),
      product_paths_(paths),
      slots_(std::make_unique<Slot[]>(kNumSlots)),
      onednn_(std::make_unique<Onednn>()) {
  HB_CHECK(num_threads >= 1, "num_threads = {}", num_threads);
}
KernelContext::~KernelContext() = default;
KernelContext::KernelContext(KernelContext&&) noexcept = default;
KernelContext& KernelContext::operator=(KernelContext&&) noexcept = default;

void* KernelContext::scratch(int slot, std::size_t bytes) {
  HB_CHECK(slot >= 0 && slot < kNumSlots, "scratch slot {}", slot);
  Slot& s = slots_[static_cast<std::size_t>(slot)];
  if (s.bytes < bytes) {
    s.data.reset();  // before the new one: never both at once
    s.bytes = 0;
    s.data.reset(::operator new(bytes, Slot::kAlign));
    s.bytes = bytes;
  }
  return s.data.get();
}

std::size_t KernelContext::scratch_bytes() const {
  std::size_t total = 0;
  for (int i = 0; i < kNumSlots; ++i) total += slots_[static_cast<std::size_t>(i)].bytes;
  return total;
}

void KernelContext::release() {
  slots_ = std::make_unique<Slot[]>(kNumSlots);
  onednn_ = std::make_unique<Onednn>();
}

KernelContext::Onednn& KernelContext::onednn() { return *onednn_; }

}  // namespace hotbunk::kernels

// A double of cuDNN on the double of the driver: the entry points of dnn_table.h. It knows nothing of attention: an
// operation graph is played op by op over the device's memory (dnn_player.h), so a graph that is put together wrongly
// gives wrong numbers. As the real one it checks what a descriptor is given, offers an engine of the best kind that has
// other bits each time before one that has not, and needs a workspace.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/cuda/dnn_table.h"
#include "backends/cuda/fake/fake_driver.h"

namespace hotbunk::cuda {

struct DnnDouble;  // a descriptor (fake_dnn.cc)

class FakeDnn {
 public:
  /// C entry points know no object: at most one per process is alive at a time. The driver's double outlives it, counts
  /// its calls, and has its faults (FakeDriver::fail_call).
  explicit FakeDnn(FakeDriver&);
  ~FakeDnn();
  FakeDnn(const FakeDnn&) = delete;
  FakeDnn& operator=(const FakeDnn&) = delete;

  static Dnn table();
  static bool has_entry(const std::string& name);
  /// From now on no engine is found; or none that has the same bits each time.
  void know_nothing() { known_ = Known::nothing; }
  void know_other_bits_only() { known_ = Known::other_bits; }
  /// Descriptors that nobody has destroyed.
  std::size_t alive() const;

  struct Entries;

 private:
  friend struct Entries;
  enum class Known : std::uint8_t { all, other_bits, nothing };

  FakeDriver& driver_;
  mutable std::mutex mutex_;
  Known known_ = Known::all;
  std::string last_error_;
  std::map<DnnDescriptor, std::unique_ptr<DnnDouble>> descriptors_;
  std::map<DnnHandle, CUstream> handles_;
  std::int64_t made_ = 0;
};

}  // namespace hotbunk::cuda

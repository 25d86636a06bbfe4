// The memory of one rank's program: an arena for the device and one for the host, with the sections one after the
// other.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "backends/cpu_gloo/arena.h"
#include "backends/cpu_gloo/op_kernels.h"

namespace hotbunk {

/// Where each section of a program begins in its arena.
std::array<std::int64_t, num_sections> section_bases(const Program&);

class ProgramMemory final : public Addresses {
 public:
  /// shared: ranks of this host can read the device arena.
  ProgramMemory(const Plan&, const Program&, bool shared);

  std::byte* address(const Tensor&) const override;
  std::byte* address(const Buffer&) const;
  bool is_mapped(const Buffer&) const;
  /// Shared with the backend: peers and the world know the device arena until the world is left.
  const std::shared_ptr<Arena>& device() const { return device_; }

  void alloc(const Buffer&);
  void free(const Buffer&);
  void poison(const Buffer&);
  /// Both return how many more bytes are mapped than before. `who` stands in the error.
  std::int64_t map(const Op&, std::string_view who);
  std::int64_t unmap(const Op&);

 private:
  Arena& arena(Section s) const { return space_of(s) == Space::device ? *device_ : *host_; }
  std::int64_t base(Section s) const { return bases_[static_cast<std::size_t>(s)]; }

  const Program& program_;
  const std::array<std::int64_t, num_sections> bases_;
  const std::shared_ptr<Arena> device_;
  const std::unique_ptr<Arena> host_;
};

}  // namespace hotbunk

// What of this machine a CUDA run depends on, for `doctor`.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "backends/cuda/driver.h"

namespace hotbunk::cuda {

/// A line per device: "0: NAME, 79.6 GiB, sm_90, 132 SMs, up to 1980 MHz (memory 2619 MHz)"; the driver's reason where
/// it cannot say.
std::vector<std::string> device_lines(const Driver&);
/// Whether each device reaches the memory of every other one: "all 8 reach one another", "0 does not reach 3, …", ""
/// for fewer than two.
std::string peer_access_text(const Driver&);
/// The InfiniBand (or RoCE) ports below `root`: "mlx5_0 port 1: 4: ACTIVE, 400 Gb/sec (4X NDR)", …, or "none".
std::string infiniband_text(const std::filesystem::path& root = "/sys/class/infiniband");

}  // namespace hotbunk::cuda

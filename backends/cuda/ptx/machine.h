// Executes the kernels of a module as PTX says: blocks one after another, the warps of a block in turn, the lanes of a
// warp in lock step where they agree. What would be undefined on a GPU is a Finding here, with instruction, block and
// threads named.
//
// Arithmetic is IEEE 754 with the rounding that the instruction names. `.approx` functions return the float nearest to
// the exact result (hardware: within 2 ulp). mma: exact products, summed in double, rounded once to f32.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "backends/cuda/ptx/module.h"

namespace hotbunk::ptx {

enum class Check : std::uint8_t {
  out_of_bounds,   // no allocation there, or beyond its end
  misaligned,      // address no multiple of the access's size
  uninitialised,   // read of a byte that nothing wrote
  in_flight,       // read of a byte that an asynchronous copy has not been waited for
  shared_race,     // two threads, one writes, no barrier between
  barrier,         // a barrier that not all threads of the block reach
  warp_operation,  // a shuffle, vote or ldmatrix that not all named lanes reach together
  trap,            // the kernel gives up
  launch,          // more threads or shared memory than there is, parameters that do not match
};
std::string_view name_of(Check);

class Finding : public std::runtime_error {
 public:
  Finding(Check check, const std::string& what) : std::runtime_error(what), check_(check) {}
  Check check() const { return check_; }

 private:
  Check check_;
};

/// What is allocated in device memory, and which of its bytes were written. Addresses are the host's own.
class DeviceMemory {
 public:
  void add(std::uint64_t begin, std::int64_t bytes, std::string name, bool written);
  /// The allocation that begins there; internal fault when there is none.
  void remove(std::uint64_t begin);
  void mark_written(std::uint64_t address, std::int64_t bytes);
  /// Every byte of an allocation becomes unwritten again.
  void forget(std::uint64_t begin);

  /// Keeps which words of four bytes launches touch, until it is asked.
  void watch() { watching_ = true; }
  bool watching() const { return watching_; }
  struct Touched {
    std::uint64_t begin = 0, end = 0;
    bool write = false;
  };
  /// Since the last time; runs of words that were only read, and of words that were written. A run begins and ends on
  /// halves of words: tensors of two-byte numbers may meet in the middle of one.
  std::vector<Touched> take_touched();

  struct Range {
    void touch(std::uint64_t first, int count, bool write) {
      if (touched.empty()) touched.resize(static_cast<std::size_t>((bytes + 3) / 4));
      const std::uint64_t end = first + static_cast<std::uint64_t>(count);
      const std::uint64_t begin_word = first / 4, end_word = (end + 3) / 4;
      for (std::uint64_t word = begin_word; word < end_word; ++word) {
        const std::uint64_t middle = 4 * word + 2;
        touched[word] |= (write ? 2 : 1) | (first < middle ? 4 : 0) | (end > middle ? 8 : 0);
      }
      touched_begin = std::min(touched_begin, begin_word);
      touched_end = std::max(touched_end, end_word);
    }
    /// Whether all of these bytes were written.
    bool is_written(std::size_t first, std::size_t count) const {
      return all_written || std::find(written.begin() + static_cast<std::ptrdiff_t>(first),
                                      written.begin() + static_cast<std::ptrdiff_t>(first + count),
                                      std::uint8_t{0}) == written.begin() + static_cast<std::ptrdiff_t>(first + count);
    }
    std::vector<std::uint8_t>
        touched;  // by word: 1 read, 2 written, 4 its first half, 8 its second; empty until one is
    std::uint64_t touched_begin = ~std::uint64_t{0}, touched_end = 0;  // outside of these none is
    std::uint64_t begin = 0;
    std::int64_t bytes = 0;
    std::string name;
    std::vector<std::uint8_t> written;  // by byte; empty where all is
    bool all_written = false;
  };
  /// The allocation that holds the address, or nullptr.
  Range* find(std::uint64_t address);
  /// "'x' (4096 bytes) + 4100" or "no allocation".
  std::string describe(std::uint64_t address);

 private:
  std::map<std::uint64_t, Range> ranges_;  // by begin
  bool watching_ = false;
};

struct Dim3 {
  std::uint32_t x = 1, y = 1, z = 1;
  std::int64_t count() const { return std::int64_t{x} * y * z; }
};

/// What a launch did, counted exactly.
struct Counters {
  std::int64_t instructions = 0;  // of warps
  std::int64_t thread_instructions = 0;
  std::int64_t global_read_bytes = 0, global_written_bytes = 0;  // asked for by lanes
  std::int64_t global_requests = 0, global_sectors = 0;          // of warps; 32-byte sectors that they touch
  std::int64_t shared_requests = 0, shared_wavefronts = 0;       // of warps; passes over 32 banks of 4 bytes
  std::int64_t flops = 0;                                        // of float instructions and mma
  std::int64_t barriers = 0;

  Counters& operator+=(const Counters&);
};

struct Launch {
  Dim3 grid, block;
  std::int64_t dynamic_shared_bytes = 0;
  std::span<const std::byte> parameters;  // laid out as the kernel's
  bool count_traffic = true;              // bytes, sectors and passes over banks, which cost time to count
};

struct Block;

/// One launch at a time.
class Machine {
 public:
  /// Loads the module: its variables get device memory. Both outlive the machine.
  Machine(const Module&, DeviceMemory&);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  /// Runs a whole grid. Throws Finding; UnknownPtx where the module has no such kernel.
  Counters launch(std::string_view kernel, const Launch&);

 private:
  const Module& module_;
  DeviceMemory& memory_;
  std::vector<std::uint8_t> data_;  // the module's variables
  std::unique_ptr<Block> block_;    // the one that runs; what it has of memory stays for the next
};

}  // namespace hotbunk::ptx

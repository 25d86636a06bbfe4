#include "backends/cuda/ptx/machine.h"

#include <fmt/format.h>

#include <algorithm>

#include "backends/cuda/ptx/warp.h"
#include "base/check.h"

namespace hotbunk::ptx {
namespace {

std::uint32_t special_value(const Block& b, Special s, std::int32_t thread) {
  const auto x = static_cast<std::uint32_t>(thread) % b.dim.x,
             y = static_cast<std::uint32_t>(thread) / b.dim.x % b.dim.y,
             z = static_cast<std::uint32_t>(thread) / (b.dim.x * b.dim.y);
  const std::uint32_t lane = static_cast<std::uint32_t>(thread) % lanes;
  switch (s) {
    case Special::tid_x:
      return x;
    case Special::tid_y:
      return y;
    case Special::tid_z:
      return z;
    case Special::ntid_x:
      return b.dim.x;
    case Special::ntid_y:
      return b.dim.y;
    case Special::ntid_z:
      return b.dim.z;
    case Special::ctaid_x:
      return b.index.x;
    case Special::ctaid_y:
      return b.index.y;
    case Special::ctaid_z:
      return b.index.z;
    case Special::nctaid_x:
      return b.grid.x;
    case Special::nctaid_y:
      return b.grid.y;
    case Special::nctaid_z:
      return b.grid.z;
    case Special::laneid:
      return lane;
    case Special::warpid:
      return static_cast<std::uint32_t>(thread) / lanes;
    case Special::lanemask_eq:
      return 1u << lane;
    case Special::lanemask_lt:
      return (1u << lane) - 1;
    case Special::lanemask_le:
      return ((1u << lane) - 1) | 1u << lane;
    case Special::lanemask_gt:
      return ~(((1u << lane) - 1) | 1u << lane);
    case Special::lanemask_ge:
      return ~((1u << lane) - 1);
    case Special::clock:
      return 0;
  }
  return 0;
}

/// Lanes that are not at the smallest position wait until the others reach theirs: structured code reconverges where
/// its branches meet. Needed where the active lanes have come to a waiting one's position, or none is active.
void gather_lanes(Warp& w) {
  if (w.active != 0) each_lane(w.active, [&](int l) { w.lane_pc[static_cast<std::size_t>(l)] = w.pc; });
  const std::uint32_t live = w.live();
  std::int32_t lowest = nobody_waits;
  each_lane(live, [&](int l) { lowest = std::min(lowest, w.lane_pc[static_cast<std::size_t>(l)]); });
  w.active = 0;
  w.lowest_waiting = nobody_waits;
  each_lane(live, [&](int l) {
    const std::int32_t at = w.lane_pc[static_cast<std::size_t>(l)];
    if (at == lowest) w.active |= 1u << l;
    else w.lowest_waiting = std::min(w.lowest_waiting, at);
  });
  w.pc = lowest;
}

void branch(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint32_t stay = w.active & ~mask;
  if (stay == 0) {
    w.pc = i.target;
    return;
  }
  each_lane(mask, [&](int l) { w.lane_pc[static_cast<std::size_t>(l)] = i.target; });
  w.lowest_waiting = std::min(w.lowest_waiting, i.target);
  w.active = stay;
  ++w.pc;
}

void leave(Warp& w, std::uint32_t mask) {
  w.exited |= mask;
  w.active &= ~mask;
  ++w.pc;
}

void arrive(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (i.num_sources > 0) throw UnknownPtx(fmt::format("{}: a barrier of some of the threads", w.block->at(i)));
  if (mask != w.live())
    throw Finding(Check::barrier,
                  fmt::format("{}: {}, warp {}: lanes {:#010x} arrive, lanes {:#010x} are elsewhere",
                              name_of(Check::barrier), w.block->at(i), w.index, mask, w.live() & ~mask));
  w.at_barrier = true;
  w.barrier_line = i.line;
  w.barrier_id = i.immediate;
  ++w.pc;
}

void run_one(Warp& w, const Instruction& i, std::uint32_t mask) {
  switch (i.opcode) {
    case Opcode::cvt:
    case Opcode::cvt_pack:
      return run_convert(w, i, mask);
    case Opcode::ld:
    case Opcode::st:
    case Opcode::atom:
    case Opcode::red:
    case Opcode::cp_async:
    case Opcode::cp_async_commit:
    case Opcode::cp_async_wait:
    case Opcode::cvta:
    case Opcode::cvta_to:
    case Opcode::fence:
    case Opcode::prefetch:
      return run_memory(w, i, mask);
    case Opcode::shfl:
    case Opcode::vote:
    case Opcode::match:
    case Opcode::redux:
    case Opcode::bar_warp:
    case Opcode::activemask:
      return run_warp(w, i, mask);
    case Opcode::ldmatrix:
    case Opcode::mma:
      return run_matrix(w, i, mask);
    default:
      return run_arithmetic(w, i, mask);
  }
}

std::uint32_t guarded_lanes(Warp& w, const Instruction& i) {
  if (!i.guarded) return w.active;
  const std::uint64_t* p = w.slot(i.guard);
  std::uint32_t mask = 0;
  each_lane(w.active, [&](int l) {
    if ((p[l] != 0) != i.guard_negated) mask |= 1u << l;
  });
  return mask;
}

/// Runs a warp until it waits at a barrier or all its threads have left.
void run(Warp& w) {
  const auto& code = w.block->kernel->code;
  Counters& c = *w.block->counters;
  while (w.live() != 0 && !w.at_barrier) {
    if (w.pc >= w.lowest_waiting || w.active == 0) gather_lanes(w);
    const Instruction& i = code[static_cast<std::size_t>(w.pc)];
    const std::uint32_t mask = guarded_lanes(w, i);
    ++c.instructions;
    c.thread_instructions += std::popcount(mask);
    if (mask == 0) {
      ++w.pc;
      continue;
    }
    if (i.opcode == Opcode::bra) branch(w, i, mask);
    else if (i.opcode == Opcode::ret) leave(w, mask);
    else if (i.opcode == Opcode::bar_sync) arrive(w, i, mask);
    else if (i.opcode == Opcode::trap)
      throw Finding(Check::trap, fmt::format("{}: {}, warp {}", name_of(Check::trap), w.block->at(i), w.index));
    else {
      run_one(w, i, mask);
      ++w.pc;
    }
  }
}

/// All warps stand at one barrier, or some have left and the others wait for them for ever.
void release(Block& b) {
  const Warp* first = nullptr;
  for (const Warp& w : b.warps) {
    if (!w.at_barrier) continue;
    if (first == nullptr) first = &w;
    if (w.barrier_id != first->barrier_id) {
      Instruction here, there;
      here.line = w.barrier_line, there.line = first->barrier_line;
      throw Finding(Check::barrier, fmt::format("{}: warp {} waits at {}, warp {} at {}", name_of(Check::barrier),
                                                w.index, b.at(here), first->index, b.at(there)));
    }
  }
  for (Warp& w : b.warps) w.at_barrier = false;
  ++b.barriers;
  ++b.counters->barriers;
}

void prepare(Block& b, Warp& w, std::int32_t index, const std::vector<std::uint8_t>& data) {
  const Kernel& k = *b.kernel;
  const std::int64_t left = b.dim.count() - std::int64_t{index} * lanes;
  w.block = &b;
  w.index = index;
  w.present = left >= lanes ? all_lanes : (1u << left) - 1;
  w.exited = 0;
  w.active = w.present;
  w.pc = 0;
  w.lowest_waiting = nobody_waits;
  w.at_barrier = false;
  w.syncs = 0;
  w.copies.clear();
  w.open_copies.clear();
  const auto registers = static_cast<std::size_t>(k.num_slots) * lanes;
  if (w.registers.size() < registers) w.registers.resize(registers);
  w.local.assign(static_cast<std::size_t>(k.local_bytes) * lanes, 0xcd);
  for (const auto& [s, bits] : k.constants) std::fill_n(w.slot(s), lanes, bits);
  for (const auto& [s, offset] : k.globals)
    std::fill_n(w.slot(s), lanes, reinterpret_cast<std::uint64_t>(data.data()) + static_cast<std::uint64_t>(offset));
  for (const auto& [s, special] : k.specials)
    for (int l = 0; l < lanes; ++l) w.slot(s)[l] = special_value(b, special, index * lanes + l);
}

void run_block(Block& b, const std::vector<std::uint8_t>& data) {
  std::fill(b.shared.begin(), b.shared.end(), std::uint8_t{0xcd});
  if (++b.number == 0) {  // numbers begin again
    std::fill(b.shadow.begin(), b.shadow.end(), SharedShadow{});
    b.number = 1;
  }
  b.barriers = 0;
  for (std::size_t n = 0; n < b.warps.size(); ++n) prepare(b, b.warps[n], static_cast<std::int32_t>(n), data);
  for (;;) {
    bool waiting = false;
    for (Warp& w : b.warps) {
      run(w);
      waiting |= w.at_barrier;
    }
    if (!waiting) break;
    release(b);
  }
}

void check_launch(const Kernel& k, const Launch& l) {
  const auto refuse = [&](const std::string& why) {
    throw Finding(Check::launch, fmt::format("{}: kernel {}: {}", name_of(Check::launch), k.name, why));
  };
  if (l.block.count() < 1 || l.block.count() > k.max_threads)
    refuse(fmt::format("{} threads in a block, 1 to {} are possible", l.block.count(), k.max_threads));
  if (l.grid.count() < 1) refuse("an empty grid");
  if (l.grid.y > 65535 || l.grid.z > 65535)
    refuse(fmt::format("a grid of {} x {} x {}: y and z end at 65535", l.grid.x, l.grid.y, l.grid.z));
  if (k.shared_bytes + l.dynamic_shared_bytes > max_shared_bytes)
    refuse(fmt::format("{} + {} bytes of shared memory, {} are there", k.shared_bytes, l.dynamic_shared_bytes,
                       max_shared_bytes));
  if (static_cast<std::int64_t>(l.parameters.size()) != k.parameter_bytes)
    refuse(fmt::format("{} bytes of parameters, it takes {}", l.parameters.size(), k.parameter_bytes));
}

}  // namespace

std::string Block::at(const Instruction& i) const {
  const auto line = static_cast<std::size_t>(i.line);
  std::string_view text = line > 0 && line <= module->lines.size() ? std::string_view(module->lines[line - 1]) : "";
  while (!text.empty() && (text.front() == '\t' || text.front() == ' ')) text.remove_prefix(1);
  return fmt::format("kernel {}, line {} '{}', block ({},{},{})", kernel->name, i.line, text, index.x, index.y,
                     index.z);
}

std::string Block::thread_name(std::int32_t thread) const {
  const auto t = static_cast<std::uint32_t>(thread);
  return fmt::format("({},{},{})", t % dim.x, t / dim.x % dim.y, t / (dim.x * dim.y));
}

std::string_view name_of(Check check) {
  switch (check) {
    case Check::out_of_bounds:
      return "out of bounds";
    case Check::misaligned:
      return "misaligned";
    case Check::uninitialised:
      return "uninitialised";
    case Check::in_flight:
      return "copy in flight";
    case Check::shared_race:
      return "shared-memory race";
    case Check::barrier:
      return "divergent barrier";
    case Check::warp_operation:
      return "divergent warp operation";
    case Check::trap:
      return "trap";
    case Check::launch:
      return "launch";
  }
  return "";
}

void DeviceMemory::add(std::uint64_t begin, std::int64_t bytes, std::string name, bool written) {
  Range r;
  r.begin = begin;
  r.bytes = bytes;
  r.name = std::move(name);
  r.all_written = written;
  if (!written) r.written.resize(static_cast<std::size_t>(bytes));
  ranges_[begin] = std::move(r);
}

void DeviceMemory::remove(std::uint64_t begin) {
  HB_CHECK(ranges_.erase(begin) == 1, "no allocation begins at {:#x}", begin);
}

DeviceMemory::Range* DeviceMemory::find(std::uint64_t address) {
  auto it = ranges_.upper_bound(address);
  if (it == ranges_.begin()) return nullptr;
  --it;
  return address < it->second.begin + static_cast<std::uint64_t>(it->second.bytes) ? &it->second : nullptr;
}

void DeviceMemory::mark_written(std::uint64_t address, std::int64_t bytes) {
  Range* r = find(address);
  HB_CHECK(
      r != nullptr && address + static_cast<std::uint64_t>(bytes) <= r->begin + static_cast<std::uint64_t>(r->bytes),
      "{} bytes at {}", bytes, describe(address));
  if (r->all_written) return;
  if (address == r->begin && bytes == r->bytes) r->all_written = true;
  else std::fill_n(r->written.begin() + static_cast<std::ptrdiff_t>(address - r->begin), bytes, std::uint8_t{1});
}

void DeviceMemory::forget(std::uint64_t begin) {
  Range& r = ranges_.at(begin);
  r.all_written = false;
  r.written.assign(static_cast<std::size_t>(r.bytes), 0);
}

std::vector<DeviceMemory::Touched> DeviceMemory::take_touched() {
  std::vector<Touched> out;
  for (auto& [begin, r] : ranges_) {
    if (r.touched_begin >= r.touched_end) continue;
    for (std::size_t w = r.touched_begin; w < r.touched_end;) {
      const std::uint8_t how = r.touched[w];
      const std::size_t from = w;
      while (w < r.touched_end && (r.touched[w] & 2) == (how & 2) && (r.touched[w] != 0) == (how != 0)) ++w;
      if (how == 0) continue;
      const std::uint64_t first = 4 * from + ((how & 4) != 0 ? 0 : 2),
                          last = 4 * w - ((r.touched[w - 1] & 8) != 0 ? 0 : 2);
      out.push_back({begin + first, begin + std::min(last, static_cast<std::uint64_t>(r.bytes)), (how & 2) != 0});
    }
    std::fill(r.touched.begin() + static_cast<std::ptrdiff_t>(r.touched_begin),
              r.touched.begin() + static_cast<std::ptrdiff_t>(r.touched_end), std::uint8_t{0});
    r.touched_begin = ~std::uint64_t{0}, r.touched_end = 0;
  }
  return out;
}

std::string DeviceMemory::describe(std::uint64_t address) {
  auto it = ranges_.upper_bound(address);
  if (it == ranges_.begin()) return fmt::format("{:#x}: no allocation", address);
  const Range& r = std::prev(it)->second;
  return fmt::format("'{}' ({} bytes) + {}", r.name, r.bytes, address - r.begin);
}

Machine::Machine(const Module& module, DeviceMemory& memory) : module_(module), memory_(memory), data_(module.data) {
  if (!data_.empty())
    memory_.add(reinterpret_cast<std::uint64_t>(data_.data()), static_cast<std::int64_t>(data_.size()), "module data",
                true);
}

Machine::~Machine() {
  if (!data_.empty()) memory_.remove(reinterpret_cast<std::uint64_t>(data_.data()));
}

Counters Machine::launch(std::string_view name, const Launch& launch) {
  const auto it = module_.kernels.find(name);
  if (it == module_.kernels.end()) throw UnknownPtx(fmt::format("the module has no kernel '{}'", name));
  const Kernel& kernel = it->second;
  check_launch(kernel, launch);
  Counters counters;
  if (!block_) block_ = std::make_unique<Block>();
  Block& b = *block_;
  b.kernel = &kernel;
  b.module = &module_;
  b.memory = &memory_;
  b.counters = &counters;
  b.count_traffic = launch.count_traffic;
  b.parameters = launch.parameters.data();
  b.grid = launch.grid;
  b.dim = launch.block;
  const std::int64_t shared = (kernel.shared_bytes + 15) / 16 * 16 + launch.dynamic_shared_bytes;
  b.shared.resize(static_cast<std::size_t>(shared));
  b.shadow.resize(std::max(b.shadow.size(), static_cast<std::size_t>((shared + 1) / 2)));
  const auto warps = static_cast<std::size_t>((launch.block.count() + lanes - 1) / lanes);
  b.all_warps.resize(std::max(b.all_warps.size(), warps));
  b.warps = std::span(b.all_warps).first(warps);
  for (b.index.z = 0; b.index.z < b.grid.z; ++b.index.z)
    for (b.index.y = 0; b.index.y < b.grid.y; ++b.index.y)
      for (b.index.x = 0; b.index.x < b.grid.x; ++b.index.x) run_block(b, data_);
  return counters;
}

Counters& Counters::operator+=(const Counters& o) {
  instructions += o.instructions, thread_instructions += o.thread_instructions;
  global_read_bytes += o.global_read_bytes, global_written_bytes += o.global_written_bytes;
  global_requests += o.global_requests, global_sectors += o.global_sectors;
  shared_requests += o.shared_requests, shared_wavefronts += o.shared_wavefronts;
  flops += o.flops, barriers += o.barriers;
  return *this;
}

}  // namespace hotbunk::ptx

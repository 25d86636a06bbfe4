// What a CudaDevice moves: copies between host and device, feeds and fetches through staging, reads of peers.
#include <cstring>

#include "backends/cuda/cuda_device_stream.h"
#include "base/check.h"

namespace hotbunk::cuda {

Status CudaDevice::copy(StreamId id, const BoundOp& op, const Args& args) {
  switch (op->kind) {
    case OpKind::feed:
      return enqueue(id, op, args, [this, args](Stream& s, const CudaCall& call) { return feed(s, call, args); });
    case OpKind::fetch:
      return enqueue(id, op, args, [this, args](Stream& s, const CudaCall& call) { return fetch(s, call, args); });
    case OpKind::peer_copy:
      return enqueue(id, op, args, [this, phase = record_.where().phase](Stream& s, const CudaCall& call) {
        return peer_copy(s, call, phase);
      });
    default:
      return enqueue(id, op, args, [this](Stream& s, const CudaCall& call) { return copy_between(s, call); });
  }
}

std::int64_t CudaDevice::feed(Stream& s, const CudaCall& call, const Args& args) {
  const Tensor& t = call.op.outputs[0];
  const std::int64_t bytes = t.bytes(call.sizes);
  const auto size = static_cast<std::size_t>(bytes);
  std::byte* to = call.addresses.address(t);
  if (space_of(call.bound, t) == Space::host) {
    s.synchronize();
    s.touch(call.bound, to, bytes, true);
    driver_->feed(rank_, call.bound, args, {to, size});
    return -1;
  }
  if (driver_->feeds_zeros(rank_, call.bound)) {
    s.launch.fill(address_of(to), 0, bytes);
    return -1;
  }
  std::byte* staged = s.staging.take(bytes);
  if (call.op.moves.empty()) std::memset(staged, 0, size);       // a driver need not fill all of it
  if (call.op.integer(Attr::accumulate, 0) != 0 && bytes > 0) {  // what it does not fill stays
    HB_CUDA(s.launch.driver(), cuMemcpyDtoHAsync(staged, address_of(to), size, s.launch.stream()));
    s.synchronize();
  }
  driver_->feed(rank_, call.bound, args, {staged, size});
  if (bytes == 0) return -1;
  HB_CUDA(s.launch.driver(), cuMemcpyHtoDAsync(address_of(to), staged, size, s.launch.stream()));
  s.staging.in_use();
  return -1;
}

std::int64_t CudaDevice::fetch(Stream& s, const CudaCall& call, const Args& args) {
  const Tensor& t = call.op.inputs[0];
  const std::int64_t bytes = t.bytes(call.sizes);
  const auto size = static_cast<std::size_t>(bytes);
  std::byte* from = call.addresses.address(t);
  if (space_of(call.bound, t) == Space::device) {
    std::byte* staged = s.staging.take(bytes);
    if (bytes > 0) HB_CUDA(s.launch.driver(), cuMemcpyDtoHAsync(staged, address_of(from), size, s.launch.stream()));
    from = staged;
  }
  s.synchronize();
  if (space_of(call.bound, t) == Space::host) s.touch(call.bound, from, bytes, false);
  driver_->fetch(rank_, call.bound, args, {from, size});
  return -1;
}

std::int64_t CudaDevice::copy_between(Stream& s, const CudaCall& call) {
  const Tensor &from = call.op.inputs[0], &to = call.op.outputs[0];
  const std::int64_t bytes = from.bytes(call.sizes);
  if (bytes == 0) return -1;
  const auto size = static_cast<std::size_t>(bytes);
  std::byte *source = call.addresses.address(from), *target = call.addresses.address(to);
  const bool from_host = space_of(call.bound, from) == Space::host, to_host = space_of(call.bound, to) == Space::host;
  const Driver& d = s.launch.driver();
  if (from_host && to_host) {
    s.synchronize();
    s.touch(call.bound, source, bytes, false);
    s.touch(call.bound, target, bytes, true);
    std::memmove(target, source, size);
  } else if (from_host) {
    HB_CUDA(d, cuMemcpyHtoDAsync(address_of(target), source, size, s.launch.stream()));
  } else if (to_host) {
    HB_CUDA(d, cuMemcpyDtoHAsync(target, address_of(source), size, s.launch.stream()));
  } else {
    s.launch.copy(address_of(target), address_of(source), bytes);
  }
  return -1;
}

std::int64_t CudaDevice::peer_copy(Stream& s, const CudaCall& call, std::int16_t phase) {
  const DType dtype = call.op.inputs[0].dtype;
  const std::span<const BoxRun> runs = tables_.boxes(call.op);
  std::size_t run = 0;
  std::int64_t in_run = 0;
  const CUstream stream = s.launch.stream();
  const auto read = [&] {
    return communicators_->peer_copy(
        call, phase,
        [this, stream](int peer, std::int64_t offset, std::int64_t bytes) -> const std::byte* {
          if (peers_ != nullptr)
            return reinterpret_cast<const std::byte*>(
                peers_->begin_reading(options_.scope, peer, offset, bytes, stream));
          const std::byte* base = world_.local().arena(options_.scope, peer);
          return base == nullptr ? nullptr : base + offset;
        },
        [&](const std::byte* from, const Box& b) {  // in the order of the tables
          const Tensor& to = call.op.outputs[static_cast<std::size_t>(b.output)];
          copy_boxes(s.launch, address_of(from), dtype, address_of(call.addresses.address(to)), to.dtype, runs[run],
                     in_run, 1);
          if (++in_run == runs[run].boxes) ++run, in_run = 0;
        });
  };
  if (peers_ == nullptr) return read();
  // The barrier that lets this rank read is behind it on the device, where a peer's addresses would do. But what a peer
  // has mapped the host must ask for, and only when all have come to the barrier it is there.
  s.synchronize();
  std::int64_t bytes = 0;
  try {
    bytes = read();
  } catch (...) {
    try {
      peers_->done_reading(stream);  // an owner may be waiting for it
    } catch (const RuntimeFailure&) {
      // What failed first is what is said.
    }
    throw;
  }
  peers_->done_reading(stream);
  return bytes;
}

}  // namespace hotbunk::cuda

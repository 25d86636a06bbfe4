#include "backends/cuda/many_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "backends/cuda/kernels/many.h"
#include "base/check.h"

namespace hotbunk::cuda {
namespace {

constexpr int threads = 256;

CUdeviceptr at(const OpCall& c, const Tensor& t) { return reinterpret_cast<CUdeviceptr>(c.addresses.address(t)); }
float* floats(const OpCall& c, const Tensor& t) { return reinterpret_cast<float*>(c.addresses.address(t)); }

/// Bytes [begin, end) of a tensor's part of memory.
std::pair<CUdeviceptr, CUdeviceptr> bytes_of(const OpCall& c, const Tensor& t) {
  return {at(c, t), at(c, t) + static_cast<CUdeviceptr>(t.bytes(c.sizes))};
}
bool overlap(const OpCall& a, const Tensor& x, const OpCall& b, const Tensor& y) {
  const auto [x_begin, x_end] = bytes_of(a, x);
  const auto [y_begin, y_end] = bytes_of(b, y);
  return x_begin < y_end && y_begin < x_end;
}
/// Whether `a` writes what `b` reads or writes.
bool disturbs(const OpCall& a, const OpCall& b) {
  return std::ranges::any_of(a.op.outputs, [&](const Tensor& x) {
    const auto meets = [&](const Tensor& y) { return overlap(a, x, b, y); };
    return std::ranges::any_of(b.op.inputs, meets) || std::ranges::any_of(b.op.outputs, meets);
  });
}

/// By the gradients' dtype.
std::string kernel_of(const char* kernel, const OpCall& c) {
  return fmt::format("{}_{}", kernel, kernel_dtype(c.op.inputs[0].dtype));
}

bool same_step(const OpCall& a, const OpCall& b) {
  const auto same = [&](Attr x) { return a.op.real(x) == b.op.real(x); };
  return at(a, a.op.inputs[1]) == at(b, b.op.inputs[1]) && at(a, a.op.inputs[2]) == at(b, b.op.inputs[2]) &&
         same(Attr::beta1) && same(Attr::beta2) && same(Attr::eps) && same(Attr::weight_decay);
}

/// Tensors in order, with so many blocks each; those without elements have none.
template <class Blocks>
ManyTensors many_of(std::span<const OpCall> ops, Blocks&& blocks) {
  HB_CHECK(std::ssize(ops) <= most_tensors, "{} tensors in one launch", ops.size());
  ManyTensors out{};
  out.count = static_cast<std::int32_t>(ops.size());
  std::int64_t next = 0;
  for (std::size_t i = 0; i < ops.size(); ++i) {
    out.n[i] = ops[i].op.inputs[0].elements(ops[i].sizes);
    out.first_block[i] = static_cast<std::int32_t>(next);
    next += blocks(out.n[i]);
    HB_CHECK(next <= INT32_MAX, "{} blocks in one launch", next);
  }
  out.first_block[ops.size()] = static_cast<std::int32_t>(next);
  return out;
}

}  // namespace

bool is_joined(OpKind kind) { return kind == OpKind::adamw || kind == OpKind::sum_squares; }

bool joins(std::span<const OpCall> ops, const OpCall& next) {
  const OpCall& first = ops.front();
  if (std::ssize(ops) >= most_tensors || next.op.kind != first.op.kind) return false;
  if (next.op.inputs[0].dtype != first.op.inputs[0].dtype) return false;
  if (next.op.kind == OpKind::sum_squares)  // into the same number, to what is there
    return next.op.integer(Attr::accumulate, 0) != 0 &&
           at(next, next.op.outputs[0]) == at(first, first.op.outputs[0]) &&
           std::ranges::none_of(ops,
                                [&](const OpCall& c) { return overlap(c, c.op.outputs[0], next, next.op.inputs[0]); });
  return same_step(first, next) &&
         std::ranges::none_of(ops, [&](const OpCall& c) { return disturbs(c, next) || disturbs(next, c); });
}

void launch_steps(std::span<const OpCall> ops, const Launcher& launch) {
  SteppedTensors tensors{};
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const OpCall& c = ops[i];
    tensors.g[i] = c.addresses.address(c.op.inputs[0]);
    tensors.p[i] = floats(c, c.op.outputs[0]);
    tensors.m[i] = floats(c, c.op.outputs[1]);
    tensors.v[i] = floats(c, c.op.outputs[2]);
  }
  tensors.many = many_of(ops, [](std::int64_t n) { return blocks_of(n, stepped_by_block); });
  const OpCall& c = ops.front();
  const auto real = [&](Attr a) { return static_cast<float>(c.op.real(a)); };
  launch(kernel_of("adamw", c), {tensors.many.first_block[ops.size()]}, threads, tensors, at(c, c.op.inputs[1]),
         at(c, c.op.inputs[2]), real(Attr::beta1), real(Attr::beta2), real(Attr::eps), real(Attr::weight_decay));
}

void launch_sums(std::span<const OpCall> ops, const Launcher& launch, CUdeviceptr scratch) {
  SquaredTensors tensors{};
  for (std::size_t i = 0; i < ops.size(); ++i) tensors.x[i] = ops[i].addresses.address(ops[i].op.inputs[0]);
  tensors.many =
      many_of(ops, [](std::int64_t n) { return std::min<std::int64_t>(squared_by_blocks, blocks_of(n, threads)); });
  const OpCall& c = ops.front();
  launch(kernel_of("sum_squares_partial", c), {tensors.many.first_block[ops.size()]}, threads, tensors, scratch);
  launch("sum_squares_finish", {1}, threads, tensors.many, scratch, at(c, c.op.outputs[0]),
         c.op.integer(Attr::accumulate, 0) != 0 ? 1 : 0);
}

void launch_together(std::span<const OpCall> ops, const Launcher& launch, CUdeviceptr scratch) {
  if (ops.front().op.kind == OpKind::adamw) launch_steps(ops, launch);
  else launch_sums(ops, launch, scratch);
}

std::int64_t sums_scratch_bytes() {
  return std::int64_t{most_tensors} * squared_by_blocks * static_cast<std::int64_t>(sizeof(double));
}

}  // namespace hotbunk::cuda

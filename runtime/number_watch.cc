#include "runtime/number_watch.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <span>

#include "base/dtype.h"
#include "graph/print.h"
#include "runtime/gather.h"

namespace hotbunk {
namespace {

bool makes_numbers(OpKind kind) {
  return kind == OpKind::reduce_scatter || kind == OpKind::all_reduce ||
         (is_compute(kind) && kind != OpKind::kv_write && kind != OpKind::latent_write &&
          kind != OpKind::prepack);  // which only move
}

std::string bad_elements(const OpCall& call, const Tensor& t, const FindNonFinite& find) {
  if (t.dtype != DType::f32 && t.dtype != DType::bf16) return "";
  const NonFinite found = find(call, t);
  if (found.count == 0) return "";
  return fmt::format("{} NaN or infinite elements, the first at index {} of '{}'", found.count, found.first,
                     call.bound.buffer(t).name());
}

/// Inputs that were bad before the op ran, as what the driver fed: no op of a plan made those.
std::string bad_inputs(const OpCall& call, const FindNonFinite& find) {
  std::string out;
  for (const Tensor& t : call.op.inputs) {
    const auto same = [&](const Tensor& o) { return o.buffer == t.buffer; };
    if (std::ranges::any_of(call.op.outputs, same)) continue;
    if (const std::string bad = bad_elements(call, t, find); !bad.empty()) out += "; among its inputs " + bad;
  }
  return out;
}

}  // namespace

NonFinite nonfinite_of(const std::byte* data, DType dtype, std::int64_t n) {
  NonFinite found;
  const auto look = [&](std::int64_t i, bool finite) {
    if (finite) return;
    if (found.count++ == 0) found.first = i;
  };
  for (std::int64_t i = 0; i < n; ++i) {
    if (dtype == DType::f32) {
      float x = 0;
      std::memcpy(&x, data + i * 4, sizeof x);
      look(i, std::isfinite(x));
    } else {
      bf16 x;
      std::memcpy(&x, data + i * 2, sizeof x);
      look(i, std::isfinite(to_f32(x)));
    }
  }
  return found;
}

std::string bad_output(const OpCall& call, const FindNonFinite& find) {
  const OpKind kind = call.op.kind;
  if (!makes_numbers(kind)) return "";
  // Log-sum-exps of an engine's attention are -inf where a rank holds no key that the query sees, and of all ranks'
  // together in a row of nobody (attention_dp); what was attended says whether they are sound.
  const bool of_ranks = kind == OpKind::attention_sinks && call.op.inputs[2].rank == 3;
  const bool of_pool = kind == OpKind::paged_attention || kind == OpKind::latent_attention || of_ranks;
  for (const Tensor& t : std::span(call.op.outputs).first(of_pool ? 1 : call.op.outputs.size()))
    if (std::string bad = bad_elements(call, t, find); !bad.empty()) return bad;
  return "";
}

std::optional<BadOutput> NumberWatch::next(Rank rank, const BoundOp& op) {
  if (!watching_) return std::nullopt;
  // The optimizer that was refused left its state alone: what is bad in it was bad before the mini-batch.
  const std::int64_t block = op->kind == OpKind::adamw ? BadOutput::before_all : block_;
  return BadOutput{.block = block, .op = ops_++, .rank = rank, .kind = op->kind, .label = label_of(op), .what = {}};
}

void NumberWatch::look(BadOutput place, const OpCall& call, const FindNonFinite& find) {
  {
    std::lock_guard lock(mutex_);
    if (first_ && *first_ < place) return;
  }
  place.what = bad_output(call, find);
  if (place.what.empty()) return;
  if (place.block != BadOutput::before_all) place.what += bad_inputs(call, find);
  std::lock_guard lock(mutex_);
  if (!first_ || place < *first_) first_ = std::move(place);
}

std::optional<BadOutput> NumberWatch::first(World& world, const std::string& name) const {
  nlohmann::json mine = nullptr;
  if (first_)
    mine = {first_->block, first_->op, first_->rank, static_cast<int>(first_->kind), first_->label, first_->what};
  std::optional<BadOutput> out;
  for (const std::string& text : gather_strings(world, name, mine.dump())) {
    const auto row = nlohmann::json::parse(text);
    if (row.is_null()) continue;
    BadOutput bad{row[0], row[1], row[2], static_cast<OpKind>(row[3].get<int>()), row[4], row[5]};
    if (!out || bad < *out) out = std::move(bad);
  }
  return out;
}

}  // namespace hotbunk

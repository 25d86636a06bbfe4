#include "backends/cuda/fake/dnn_player.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "backends/cuda/dnn_table.h"
#include "base/check.h"

namespace hotbunk::cuda {
namespace {

using Index = std::array<std::int64_t, 4>;
using Numbers = std::vector<float>;  // of a tensor, its last dimension side by side

float rounded(int type, float v) {
  if (type != dnn::type_bf16 || std::isnan(v)) return v;
  const auto bits = std::bit_cast<std::uint32_t>(v);
  return std::bit_cast<float>((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

std::int64_t bytes_of(int type) { return type == dnn::type_bf16 ? 2 : type == dnn::type_boolean ? 1 : 4; }

std::int64_t place(const DnnTensorDouble& t, const Index& i) {
  return ((i[0] * t.dims[1] + i[1]) * t.dims[2] + i[2]) * t.dims[3] + i[3];
}

template <class Body>
void each_index(const DnnTensorDouble& t, Body&& body) {
  Index i{};
  for (i[0] = 0; i[0] < t.dims[0]; ++i[0])
    for (i[1] = 0; i[1] < t.dims[1]; ++i[1])
      for (i[2] = 0; i[2] < t.dims[2]; ++i[2])
        for (i[3] = 0; i[3] < t.dims[3]; ++i[3]) body(i);
}

/// Dimensions of one element stand for all of them.
float spread(const DnnTensorDouble& t, const Numbers& n, Index i) {
  for (std::size_t d = 0; d < 4; ++d)
    if (t.dims[d] == 1) i[d] = 0;
  return n[static_cast<std::size_t>(place(t, i))];
}

float combined(int mode, float x, float b) {
  switch (mode) {
    case dnn::mode_add:
      return x + b;
    case dnn::mode_mul:
      return x * b;
    case dnn::mode_sub:
      return x - b;
    case dnn::mode_exp:
      return std::exp(x);
    case dnn::mode_greater:
      return x > b ? 1.0f : 0.0f;
    case dnn::mode_greater_equal:
      return x >= b ? 1.0f : 0.0f;
    case dnn::mode_less:
      return x < b ? 1.0f : 0.0f;
    case dnn::mode_and:
      return x != 0.0f && b != 0.0f ? 1.0f : 0.0f;
    default:
      throw RuntimeFailure(fmt::format("pointwise mode {} is not played", mode));
  }
}

class Player {
 public:
  Player(FakeDriver& driver, const DnnGraphDouble& graph, const std::map<std::int64_t, CUdeviceptr>& addresses,
         const std::map<std::int64_t, float>& values)
      : driver_(driver), graph_(graph), addresses_(addresses), values_(values) {}

  std::vector<FakeDriver::Touch> play() {
    for (const DnnOpDouble& op : graph_.ops) {
      Numbers y = op.kind == dnn::pointwise_op   ? pointwise(op)
                  : op.kind == dnn::matmul_op    ? product(op)
                  : op.kind == dnn::reduction_op ? sum(op)
                                                 : reshaped(op);
      for (float& v : y) v = rounded(tensor(op.y).type, v);
      if (!tensor(op.y).is_virtual) write(tensor(op.y), y);
      numbers_[op.y] = std::move(y);
    }
    return std::move(touched_);
  }

 private:
  const DnnTensorDouble& tensor(std::int64_t id) const { return graph_.tensors.at(id); }

  const Numbers& of(std::int64_t id) {
    if (const auto known = numbers_.find(id); known != numbers_.end()) return known->second;
    const DnnTensorDouble& t = tensor(id);
    if (t.by_value) return numbers_[id] = {values_.at(id)};
    return numbers_[id] = read(t);
  }

  void touch(CUdeviceptr begin, std::int64_t bytes, bool write) {
    const auto size = static_cast<std::size_t>(bytes);
    if (const std::string why = driver_.why_no_device_memory(begin, size); !why.empty()) throw RuntimeFailure(why);
    if (!write && !driver_.was_written(begin, size))
      throw RuntimeFailure(fmt::format("reads {} B at {:#x}, not all of which were written", bytes, begin));
    touched_.push_back({begin, begin + static_cast<CUdeviceptr>(bytes), write});
  }

  std::int64_t offset(const DnnTensorDouble& t, std::int64_t part) {
    return static_cast<std::int64_t>(of(t.ragged)[static_cast<std::size_t>(part)]);
  }
  /// The dimension along which a ragged tensor's rows lie, and how many each part has.
  static std::size_t row_dimension(const DnnTensorDouble& t) {
    return t.dims[2] > 1 && t.strides[2] >= t.strides[3] ? 2 : 3;
  }
  std::int64_t rows(const DnnTensorDouble& t, std::int64_t part) {
    const std::size_t d = row_dimension(t);
    if (t.ragged == 0) return t.dims[d];
    const std::int64_t n = (offset(t, part + 1) - offset(t, part)) / t.strides[d];
    if (n > t.dims[d])
      throw RuntimeFailure(fmt::format("a sequence of {} rows, and the graph is for {}", n, t.dims[d]));
    return n;
  }
  CUdeviceptr address(const DnnTensorDouble& t, const Index& i) {
    std::int64_t at = t.ragged != 0 ? offset(t, i[0]) : i[0] * t.strides[0];
    for (std::size_t d = 1; d < 4; ++d) at += i[d] * t.strides[d];
    return addresses_.at(t.id) + static_cast<CUdeviceptr>(at * bytes_of(t.type));
  }
  /// Runs of elements that lie side by side, of the parts that are there.
  template <class Body>
  void each_run(const DnnTensorDouble& t, Body&& body) {
    const std::size_t row = row_dimension(t), inner = t.strides[3] == 1 ? 3 : 2, other = inner == 3 ? 2 : 3;
    const bool along = row == inner;  // rows lie side by side, as offsets and lengths do
    Index i{};
    for (i[0] = 0; i[0] < t.dims[0]; ++i[0])
      for (i[1] = 0; i[1] < t.dims[1]; ++i[1]) {
        const std::int64_t here = rows(t, i[0]);
        for (i[other] = 0; i[other] < (along ? t.dims[other] : here); ++i[other]) {
          i[inner] = 0;
          const std::int64_t n = along ? here : t.dims[inner];
          if (n > 0) body(i, inner, n);
        }
      }
  }

  Numbers read(const DnnTensorDouble& t) {
    Numbers out(static_cast<std::size_t>(t.elements()), std::numeric_limits<float>::quiet_NaN());
    each_run(t, [&](Index i, std::size_t inner, std::int64_t n) {
      const CUdeviceptr from = address(t, i);
      touch(from, n * bytes_of(t.type), false);
      const auto* bytes = reinterpret_cast<const std::byte*>(from);
      for (i[inner] = 0; i[inner] < n; ++i[inner], bytes += bytes_of(t.type)) {
        float v = 0;
        if (t.type == dnn::type_f32) std::memcpy(&v, bytes, 4);
        else if (t.type == dnn::type_bf16) {
          std::uint16_t half;
          std::memcpy(&half, bytes, 2);
          v = std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16);
        } else {
          std::int32_t whole;
          std::memcpy(&whole, bytes, 4);
          v = static_cast<float>(whole);
          if (static_cast<std::int32_t>(v) != whole) throw RuntimeFailure("an offset beyond what is played");
        }
        out[static_cast<std::size_t>(place(t, i))] = v;
      }
    });
    return out;
  }

  void write(const DnnTensorDouble& t, const Numbers& numbers) {
    each_run(t, [&](Index i, std::size_t inner, std::int64_t n) {
      const CUdeviceptr to = address(t, i);
      touch(to, n * bytes_of(t.type), true);
      auto* bytes = reinterpret_cast<std::byte*>(to);
      for (i[inner] = 0; i[inner] < n; ++i[inner], bytes += bytes_of(t.type)) {
        const auto bits = std::bit_cast<std::uint32_t>(numbers[static_cast<std::size_t>(place(t, i))]);
        const auto half = static_cast<std::uint16_t>(bits >> 16);
        if (t.type == dnn::type_f32) std::memcpy(bytes, &bits, 4);
        else std::memcpy(bytes, &half, 2);
      }
      driver_.mark_written(to, static_cast<std::size_t>(n * bytes_of(t.type)));
    });
  }

  Numbers pointwise(const DnnOpDouble& op) {
    const DnnTensorDouble &x = tensor(op.x), &y = tensor(op.y);
    Numbers out(static_cast<std::size_t>(y.elements()));
    const Numbers& from = of(op.x);
    const Numbers *by = op.b != 0 ? &of(op.b) : nullptr, *where = op.t != 0 ? &of(op.t) : nullptr;
    each_index(y, [&](const Index& i) {
      float& to = out[static_cast<std::size_t>(place(y, i))];
      if (op.mode == dnn::mode_index) to = static_cast<float>(i[static_cast<std::size_t>(op.axis)]);
      else if (op.mode == dnn::mode_select)
        to = spread(tensor(op.t), *where, i) != 0.0f ? spread(x, from, i) : spread(tensor(op.b), *by, i);
      else to = combined(op.mode, spread(x, from, i), by != nullptr ? spread(tensor(op.b), *by, i) : 0.0f);
    });
    return out;
  }

  std::int64_t override_of(std::int64_t id, std::int64_t part, std::int64_t otherwise) {
    if (id == 0) return otherwise;
    const auto n = static_cast<std::int64_t>(of(id)[static_cast<std::size_t>(part)]);
    if (n > otherwise) throw RuntimeFailure(fmt::format("{} rows of a product of {}", n, otherwise));
    return n;
  }

  Numbers product(const DnnOpDouble& op) {
    const DnnTensorDouble &a = tensor(op.x), &b = tensor(op.b), &c = tensor(op.y);
    Numbers out(static_cast<std::size_t>(c.elements()), 0.0f);
    const Numbers &left = of(op.x), &right = of(op.b);
    const std::int64_t sharing = c.dims[1] / b.dims[1];
    const bool in_halves = b.type == dnn::type_bf16;  // then both are, as tensor cores take them
    for (std::int64_t part = 0; part < c.dims[0]; ++part) {
      const std::int64_t M = override_of(op.rows, part, c.dims[2]), N = override_of(op.columns, part, c.dims[3]),
                         K = override_of(op.depth, part, a.dims[3]);
      for (std::int64_t head = 0; head < c.dims[1]; ++head)
        for (std::int64_t m = 0; m < M; ++m)
          for (std::int64_t k = 0; k < K; ++k) {
            float x = left[static_cast<std::size_t>(place(a, {part, head, m, k}))];
            if (in_halves) x = rounded(dnn::type_bf16, x);
            const std::int64_t from = place(b, {part, head / sharing, k, 0}), to = place(c, {part, head, m, 0});
            for (std::int64_t n = 0; n < N; ++n)
              out[static_cast<std::size_t>(to + n)] += x * right[static_cast<std::size_t>(from + n)];
          }
    }
    return out;
  }

  Numbers sum(const DnnOpDouble& op) {
    const DnnTensorDouble &x = tensor(op.x), &y = tensor(op.y);
    Numbers out(static_cast<std::size_t>(y.elements()), 0.0f);
    const Numbers& from = of(op.x);
    each_index(x, [&](const Index& i) {
      Index to;
      for (std::size_t d = 0; d < 4; ++d) to[d] = i[d] / (x.dims[d] / y.dims[d]);
      out[static_cast<std::size_t>(place(y, to))] += from[static_cast<std::size_t>(place(x, i))];
    });
    return out;
  }

  /// The last two dimensions are y's: as x's, or exchanged where the strides are.
  Numbers reshaped(const DnnOpDouble& op) {
    const DnnTensorDouble &x = tensor(op.x), &y = tensor(op.y);
    const bool exchanged = (x.strides[2] >= x.strides[3]) != (y.strides[2] >= y.strides[3]);
    Numbers out(static_cast<std::size_t>(y.elements()));
    const Numbers& from = of(op.x);
    each_index(y, [&](const Index& i) {
      const Index at = exchanged ? Index{i[0], i[1], i[3], i[2]} : i;
      out[static_cast<std::size_t>(place(y, i))] = from[static_cast<std::size_t>(place(x, at))];
    });
    return out;
  }

  FakeDriver& driver_;
  const DnnGraphDouble& graph_;
  const std::map<std::int64_t, CUdeviceptr>& addresses_;
  const std::map<std::int64_t, float>& values_;
  std::map<std::int64_t, Numbers> numbers_;
  std::vector<FakeDriver::Touch> touched_;
};

bool spreads(const DnnTensorDouble& from, const DnnTensorDouble& to) {
  for (std::size_t d = 0; d < 4; ++d)
    if (from.dims[d] != to.dims[d] && from.dims[d] != 1) return false;
  return true;
}

/// "" or why an op's tensors do not fit together.
std::string why_unfit(const DnnOpDouble& op, const DnnTensorDouble& x, const DnnTensorDouble* b,
                      const DnnTensorDouble* t, const DnnTensorDouble& y) {
  switch (op.kind) {
    case dnn::pointwise_op: {
      const bool select = op.mode == dnn::mode_select, alone = op.mode == dnn::mode_exp || op.mode == dnn::mode_index;
      if ((b == nullptr) != alone || (t != nullptr) != select) return "a pointwise op has other inputs";
      if ((op.mode == dnn::mode_index) != (op.axis >= 0) || op.axis > 3) return "an axis of an op that has none";
      if (!spreads(x, y) || (b != nullptr && !spreads(*b, y)) || (t != nullptr && !spreads(*t, y)))
        return "a pointwise op of other shapes";
      return "";
    }
    case dnn::matmul_op:
      if (b == nullptr) return "a product of one matrix";
      if (x.dims[0] != y.dims[0] || b->dims[0] != y.dims[0] || x.dims[1] != y.dims[1] || y.dims[1] % b->dims[1] != 0 ||
          x.dims[2] != y.dims[2] || b->dims[3] != y.dims[3] || x.dims[3] != b->dims[2])
        return fmt::format("a product of {} and {} is not {}", fmt::join(x.dims, "x"), fmt::join(b->dims, "x"),
                           fmt::join(y.dims, "x"));
      return "";
    case dnn::reduction_op:
      for (std::size_t d = 0; d < 4; ++d)
        if (x.dims[d] % y.dims[d] != 0) return "a sum over no whole parts";
      return "";
    default: {
      const bool exchanged = (x.strides[2] >= x.strides[3]) != (y.strides[2] >= y.strides[3]);
      const std::array<std::int64_t, 4> seen = {x.dims[0], x.dims[1], x.dims[exchanged ? 3 : 2],
                                                x.dims[exchanged ? 2 : 3]};
      return seen == y.dims ? "" : "a reshape to other dimensions";
    }
  }
}

}  // namespace

std::string DnnGraphDouble::why_wrong() const {
  std::set<std::int64_t> made;
  for (const DnnOpDouble& op : ops) {
    for (const std::int64_t id : {op.x, op.b, op.t, op.rows, op.columns, op.depth}) {
      if (id == 0) continue;
      if (tensors.at(id).is_virtual && !made.contains(id))
        return fmt::format("tensor {} is read before it is made", id);
    }
    if (!made.insert(op.y).second) return fmt::format("tensor {} is made twice", op.y);
    const auto* b = op.b != 0 ? &tensors.at(op.b) : nullptr;
    const auto* t = op.t != 0 ? &tensors.at(op.t) : nullptr;
    if (std::string why = why_unfit(op, tensors.at(op.x), b, t, tensors.at(op.y)); !why.empty()) return why;
  }
  return ops.empty() ? "no ops" : "";
}

std::int64_t DnnGraphDouble::workspace_bytes() const {
  std::int64_t most = 0;
  for (const auto& [id, t] : tensors)
    if (t.is_virtual) most = std::max(most, 2 * t.elements());
  return most;
}

std::vector<FakeDriver::Touch> play_graph(FakeDriver& driver, const DnnGraphDouble& graph,
                                          const std::map<std::int64_t, CUdeviceptr>& addresses,
                                          const std::map<std::int64_t, float>& values) {
  return Player(driver, graph, addresses, values).play();
}

}  // namespace hotbunk::cuda

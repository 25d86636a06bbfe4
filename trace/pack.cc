#include <fmt/format.h>

#include <concepts>
#include <cstring>
#include <ranges>
#include <type_traits>

#include "base/check.h"
#include "trace/merge.h"

namespace hotbunk {
namespace {

template <class T, class Struct>
concept is = std::same_as<std::remove_const_t<T>, Struct>;

// The fields of each struct whose bytes are not all there is of it, once for both directions. By structured bindings:
// one that is added and forgotten here does not compile.
void each_field(auto& coder, is<Durations> auto& durations) {
  auto& [times, total, shortest, longest, longest_step, counts] = durations;
  coder(times, total, shortest, longest, longest_step, counts);
}
void each_field(auto& coder, is<SpaceMemory> auto& memory) {
  auto& [peak, mapped, step, phase, at_peak, category_peaks, phase_peaks, end_live, end_mapped] = memory;
  coder(peak, mapped, step, phase, at_peak, category_peaks, phase_peaks, end_live, end_mapped);
}
void each_field(auto& coder, is<RankMemory> auto& memory) {
  auto& [device, host] = memory;
  coder(device, host);
}
void each_field(auto& coder, is<PhaseTotal> auto& total) {
  auto& [rank, phase, blocks, waiting, stays] = total;
  coder(rank, phase, blocks, waiting, stays);
}
void each_field(auto& coder, is<StepMetrics> auto& metrics) {
  auto& [step, values] = metrics;
  coder(step, values);
}
void each_field(auto& coder, is<LinkTraffic> auto& link) {
  auto& [name, kind, links, capacity, bytes, busy, full, peak] = link;
  coder(name, kind, links, capacity, bytes, busy, full, peak);
}
void each_field(auto& coder, is<Trace> auto& trace) {
  auto& [source, players, streams, names, spans, events, phases, phase_totals, memory, traffic, traffic_totals, metrics,
         links, trained_tokens, model_flops] = trace;
  coder(source, players, streams, names, spans, events, phases, phase_totals, memory, traffic, traffic_totals, metrics,
        links, trained_tokens, model_flops);
}

/// Its bytes are all there is of it.
template <class T>
concept plain = std::is_trivially_copyable_v<T> && !std::is_pointer_v<T> && !std::ranges::view<std::remove_const_t<T>>;
template <class T>
concept keyed = requires {
  typename T::mapped_type;
};
template <class T>
concept listed = requires(T& list) {
  list.data();
};

class Packer {
 public:
  template <class... T>
  void operator()(T&... values) {
    (one(values), ...);
  }
  std::string out;

 private:
  void bytes(const void* from, std::size_t num) { out.append(static_cast<const char*>(from), num); }

  template <class T>
  void one(T& value) {
    if constexpr (plain<T>) {
      bytes(&value, sizeof value);
    } else if constexpr (keyed<T>) {
      size(value.size());
      for (auto& [key, mapped] : value) one(key), one(mapped);
    } else if constexpr (listed<T>) {
      size(value.size());
      if constexpr (plain<typename T::value_type>) bytes(value.data(), value.size() * sizeof(typename T::value_type));
      else
        for (auto& element : value) one(element);
    } else {
      each_field(*this, value);
    }
  }
  void size(std::size_t num) { bytes(&num, sizeof num); }
};

class Unpacker {
 public:
  explicit Unpacker(std::string_view packed) : rest_(packed) {}
  template <class... T>
  void operator()(T&... values) {
    (one(values), ...);
  }
  bool done() const { return rest_.empty(); }

 private:
  void bytes(void* to, std::size_t num) {
    HB_CHECK(num <= rest_.size(), "a packed trace is cut short: {} bytes of {} are left", rest_.size(), num);
    if (num > 0) std::memcpy(to, rest_.data(), num);
    rest_.remove_prefix(num);
  }

  template <class T>
  void one(T& value) {
    if constexpr (plain<T>) {
      bytes(&value, sizeof value);
    } else if constexpr (keyed<T>) {
      for (std::size_t left = size(1); left > 0; --left) {
        typename T::key_type key{};
        one(key);
        one(value.try_emplace(value.end(), std::move(key))->second);
      }
    } else if constexpr (listed<T>) {
      constexpr std::size_t least = plain<typename T::value_type> ? sizeof(typename T::value_type) : 1;
      value.resize(size(least));
      if constexpr (plain<typename T::value_type>) bytes(value.data(), value.size() * sizeof(typename T::value_type));
      else
        for (auto& element : value) one(element);
    } else {
      each_field(*this, value);
    }
  }
  /// Of elements that take at least so many bytes each.
  std::size_t size(std::size_t least) {
    std::size_t num = 0;
    bytes(&num, sizeof num);
    HB_CHECK(num <= rest_.size() / least, "a packed trace says {} rows, and {} bytes are left", num, rest_.size());
    return num;
  }

  std::string_view rest_;
};

/// What two builds that lay traces out differently would not both say.
std::string layout_of_traces() {
  return fmt::format("hotbunk " HOTBUNK_VERSION ": {} {} {} {} {} {} {} {}", sizeof(Span), sizeof(MemoryEvent),
                     sizeof(PhaseSpan), sizeof(SpaceMemory), sizeof(TrafficKey), sizeof(TrafficCount), num_op_kinds,
                     num_categories);
}

}  // namespace

std::string pack_trace(const Trace& trace) {
  Packer pack;
  const std::string layout = layout_of_traces();
  pack(layout);
  each_field(pack, trace);
  return std::move(pack.out);
}

Trace unpack_trace(std::string_view packed) {
  Unpacker unpack(packed);
  std::string layout;
  unpack(layout);
  HB_CHECK(layout == layout_of_traces(), "it is of another build of hotbunk ({})", layout);
  Trace trace;
  each_field(unpack, trace);
  HB_CHECK(unpack.done(), "a packed trace has more than its fields");
  return trace;
}

}  // namespace hotbunk

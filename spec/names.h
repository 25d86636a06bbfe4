// How scenario files spell the choices: one table per enum, in the order of its values.
#pragma once
#include <array>
#include <cstddef>
#include <string_view>

#include "spec/scenario.h"

namespace hotbunk {

template <class E>
struct EnumNames;

template <>
struct EnumNames<PlacementMode> {
  static constexpr std::array<std::string_view, 2> names{"colocated", "disaggregated"};
};
template <>
struct EnumNames<TrainEngine> {
  static constexpr std::array<std::string_view, 6> names{"ddp", "zero1", "zero2", "fsdp1", "fsdp2", "megatron"};
};
template <>
struct EnumNames<Recompute> {
  static constexpr std::array<std::string_view, 3> names{"none", "selective", "full"};
};
template <>
struct EnumNames<Offload> {
  static constexpr std::array<std::string_view, 3> names{"none", "sleep", "layerwise"};
};
template <>
struct EnumNames<Padding> {
  static constexpr std::array<std::string_view, 3> names{"none", "micro-batch", "batch"};
};
template <>
struct EnumNames<WrapPolicy> {
  static constexpr std::array<std::string_view, 3> names{"layer", "size", "names"};
};
template <>
struct EnumNames<RolloutEngine> {
  static constexpr std::array<std::string_view, 3> names{"hotbunk", "sglang", "vllm"};
};
template <>
struct EnumNames<RankOrder> {
  static constexpr std::array<std::string_view, 3> names{"contiguous", "strided", "auto"};
};
template <>
struct EnumNames<SyncMode> {
  static constexpr std::array<std::string_view, 4> names{"bucketed", "stream", "broadcast", "direct"};
};
template <>
struct EnumNames<ContextExchange> {
  static constexpr std::array<std::string_view, 3> names{"auto", "ring", "all-gather"};
};
template <>
struct EnumNames<ExpertDispatch> {
  static constexpr std::array<std::string_view, 3> names{"per-expert", "per-rank", "auto"};
};
template <>
struct EnumNames<SyncTransport> {
  static constexpr std::array<std::string_view, 2> names{"ipc", "collective"};
};
template <>
struct EnumNames<AlgorithmName> {
  static constexpr std::array<std::string_view, 3> names{"grpo", "ppo", "sft"};
};
template <>
struct EnumNames<NetworkTopology> {
  static constexpr std::array<std::string_view, 3> names{"leaf", "rail-optimized", "rail-only"};
};
template <>
struct EnumNames<OptimizerName> {
  static constexpr std::array<std::string_view, 6> names{"adamw", "adamw-8bit", "adamw-4bit",
                                                         "sgd",   "adafactor",  "muon"};
};
template <>
struct EnumNames<LengthDistribution> {
  static constexpr std::array<std::string_view, 3> names{"fixed", "uniform", "lognormal"};
};

template <>
struct EnumNames<LinkKind> {
  static constexpr std::array<std::string_view, 3> names{"network", "nvlink", "pcie"};
};

/// "fsdp2", "colocated", …: the word of a scenario file for a value.
template <class E>
requires requires { EnumNames<E>::names; }
constexpr std::string_view name_of(E value) { return EnumNames<E>::names[static_cast<std::size_t>(value)]; }

}  // namespace hotbunk

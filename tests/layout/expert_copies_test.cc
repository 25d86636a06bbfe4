#include "layout/expert_copies.h"

#include <catch2/catch.hpp>
#include <utility>

namespace hotbunk {
namespace {

/// 8 data ranks with 8 of 64 experts each, of which a token takes 8, on one node: in bf16, 16 KiB a row.
Scenario eight_ranks() {
  Scenario s;
  s.model.hidden = 8192;
  s.model.moe = MoeSpec{
      .experts = 64, .experts_per_token = 8, .expert_intermediate = 64, .shared_experts = 0, .first_dense_layers = 0};
  s.train.layout.dp = s.train.layout.ep = 8;
  s.train.layout.order = "tp-cp-ep-dp-pp";
  s.train.precision.params = DType::bf16;
  s.train.micro_batch_tokens = 4096;
  s.train.expert_dispatch = ExpertDispatch::automatic;
  s.cluster.nodes = 2, s.cluster.gpus_per_node = 8;
  s.cluster.gpu.nvlink_bandwidth.value = 400e9, s.cluster.nvlink_latency.value = 1e-6;
  s.cluster.network_bandwidth.value = 50e9, s.cluster.network_latency.value = 5e-6;
  return s;
}

}  // namespace

TEST_CASE("copies of tokens are chosen where they cost less than rows, by the links of the ranks that have experts") {
  Scenario s = eight_ranks();
  // A token misses a rank's 8 experts with C(56, 8) / C(64, 8).
  double missed = 1.0;
  for (int i = 0; i < 8; ++i) missed *= (56.0 - i) / (64.0 - i);
  const double copies = 8 * (1 - missed);
  CHECK(expected_parts(*s.model.moe, 8) == Approx(copies));
  const auto expected = [&](double T, double bandwidth, double latency) {
    const double leaving = 7.0 / 8 / bandwidth;
    // There and back; what says which copies go, once.
    return std::pair{2 * latency + 2 * 16384 * T * 8 * leaving,
                     4 * latency + (2 * 16384 * T * copies + 4 * T * 8 + 4 * 8 * 9) * leaving};
  };
  const auto check = [&](double T, double bandwidth, double latency, ExpertDispatch dispatch) {
    CAPTURE(T, bandwidth);
    s.train.micro_batch_tokens = static_cast<std::int64_t>(T);
    const DispatchSeconds cost = dispatch_seconds(s);
    CHECK(cost.per_expert == Approx(expected(T, bandwidth, latency).first));
    CHECK(cost.per_rank == Approx(expected(T, bandwidth, latency).second));
    CHECK(chosen_dispatch(s) == dispatch);
  };
  check(4096, 400e9, 1e-6, ExpertDispatch::per_rank);
  check(8, 400e9, 1e-6, ExpertDispatch::per_expert);  // 2 us of latency are more than what is saved
  s.cluster.gpus_per_node = 4;
  check(4096, 50e9, 5e-6, ExpertDispatch::per_rank);
  // Tensor-parallel places are nearer: 8 data ranks of 2 places are 16 ranks.
  s.cluster.gpus_per_node = 8, s.train.layout.tp = s.train.layout.etp = 2;
  check(4096, 50e9, 5e-6, ExpertDispatch::per_rank);
  s.cluster.gpus_per_node = 16;
  check(4096, 400e9, 1e-6, ExpertDispatch::per_rank);
  CHECK(expert_copies(s).sent_most == 4096 * 8);
  CHECK(expert_copies(s).came_most == 8 * 4096);
  CHECK(expert_copies(s).of_token == Approx(copies));
}

TEST_CASE("of several groups that spread experts the one with the slowest link counts") {
  Scenario s = eight_ranks();
  s.train.layout.ep = 4;
  const auto rows = [](double bandwidth, double latency) {
    return 2 * (latency + 16384.0 * 4096 * 8 * 3 / 4 / bandwidth);
  };
  CHECK(dispatch_seconds(s).per_expert == Approx(rows(400e9, 1e-6)));
  s.cluster.gpus_per_node = 6;  // ranks 0 to 3 are on one node, 4 to 7 on two
  CHECK(dispatch_seconds(s).per_expert == Approx(rows(50e9, 5e-6)));
  s.cluster.gpus_per_node = 4;
  CHECK(dispatch_seconds(s).per_expert == Approx(rows(400e9, 1e-6)));
}

TEST_CASE("where every rank has one expert, and where copies are refused, rows travel") {
  Scenario s = eight_ranks();
  CHECK(chosen_dispatch(s) == ExpertDispatch::per_rank);
  s.model.moe->experts = 8, s.model.moe->experts_per_token = 2;  // as many copies as rows
  CHECK(chosen_dispatch(s) == ExpertDispatch::per_expert);
  CHECK(expert_copies(s).sent_most == 0);
  s = eight_ranks(), s.train.expert_capacity = 0.5;
  CHECK(chosen_dispatch(s) == ExpertDispatch::per_expert);
  s = eight_ranks(), s.train.layout.dp = 4, s.train.layout.tp = 2;  // whole experts over tensor-parallel places
  CHECK(chosen_dispatch(s) == ExpertDispatch::per_expert);
  s = eight_ranks(), s.train.layout.ep = 1;
  CHECK(chosen_dispatch(s) == ExpertDispatch::per_expert);
  s = eight_ranks(), s.train.expert_dispatch = ExpertDispatch::per_expert;
  CHECK(expert_copies(s).sent_most == 0);
}

}  // namespace hotbunk

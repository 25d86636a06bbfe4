#include "layout/reshard.h"

#include <rapidcheck.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>

#include "base/check.h"
#include "layout/layout.h"
#include "layout/rollout_weights.h"
#include "layout/train_weights.h"
#include "models.h"

using namespace hotbunk;

namespace {

std::vector<TensorMove> model_moves(const ModelSpec& model, const Layout& from, const Layout& to) {
  std::vector<TensorMove> moves;
  for (const ParamSpec& parameter : parameters_of(model)) {
    moves.push_back({parameter.name, holdings(from, model, parameter), holdings(to, model, parameter)});
  }
  return moves;
}

double gib_of_bf16(std::int64_t elements) { return static_cast<double>(elements) * 2 / (1LL << 30); }

bool inside(const std::vector<Rectangle>& boxes, std::int64_t row, std::int64_t col) {
  return std::any_of(boxes.begin(), boxes.end(), [&](const Rectangle& b) {
    return b.rows.begin <= row && row < b.rows.end && b.cols.begin <= col && col < b.cols.end;
  });
}

Range random_range(std::int64_t extent) {
  const std::int64_t a = *rc::gen::inRange<std::int64_t>(0, extent + 1),
                     b = *rc::gen::inRange<std::int64_t>(0, extent + 1);
  return {std::min(a, b), std::max(a, b)};
}

// Rows cut over the ranks, so that everything is held, and a few more rectangles at random.
TensorMove random_move(std::int64_t ranks, std::int64_t rows, std::int64_t cols) {
  TensorMove move{"w", {}, {}};
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    move.have.push_back({{chunk_range(rows, ranks, rank), {0, cols}}});
    move.need.emplace_back();
    for (auto* boxes : {&move.have.back(), &move.need.back()}) {
      for (int n = *rc::gen::inRange(0, 3); n > 0; --n) boxes->push_back({random_range(rows), random_range(cols)});
    }
  }
  return move;
}

}  // namespace

TEST_CASE("One tensor by hand") {
  // 4 x 4. Rank 0 holds rows 0..2, rank 1 rows 2..4; rank 0 needs the left half, rank 1 the right half.
  const TensorMove move{"w", {{{{0, 2}, {0, 4}}}, {{{2, 4}, {0, 4}}}}, {{{{0, 4}, {0, 2}}}, {{{0, 4}, {2, 4}}}}};
  const Reshard result = reshard(std::vector{move});
  CHECK(result.tensors.at(0).transfers == std::vector<Transfer>{{0, 1, {{0, 2}, {2, 4}}}, {1, 0, {{2, 4}, {0, 2}}}});
  CHECK(result.sent == std::vector<std::int64_t>{4, 4});
  CHECK(result.received == std::vector<std::int64_t>{4, 4});
}

TEST_CASE("Of several holders the nearest sends, and of these the one that sent least") {
  // Ranks 0, 1 on node 0 and 2, 3 on node 1. Ranks 0 and 2 hold the tensor; 1 and 3 need it: each from its own node.
  const std::vector<Rectangle> all = {{{0, 4}, {0, 4}}};
  const Reshard near = reshard(std::vector<TensorMove>{{"w", {all, {}, all, {}}, {{}, all, {}, all}}}, 2);
  CHECK(near.sent == std::vector<std::int64_t>{16, 0, 16, 0});
  // One node: ranks 0 and 1 hold, 2 and 3 need: rank 0 serves rank 2, then rank 1, having sent less, serves rank 3.
  const Reshard shared = reshard(std::vector<TensorMove>{{"w", {all, all, {}, {}}, {{}, {}, all, all}}});
  CHECK(shared.sent == std::vector<std::int64_t>{16, 16, 0, 0});
}

TEST_CASE("What nobody holds is an internal fault that names tensor and rank") {
  const std::vector<TensorMove> moves = {{"w", {{}, {}}, {{{{0, 1}, {0, 1}}}, {}}}};
  CHECK_THROWS_WITH(reshard(moves), Catch::Contains("rank 0 needs a part of w that no rank holds"));
}

TEST_CASE("Reshard equals brute force, element by element") {
  REQUIRE(rc::check("oracle", [] {
    const std::int64_t ranks = *rc::gen::inRange(1, 6), rows = *rc::gen::inRange(1, 12), cols = *rc::gen::inRange(1, 9);
    const std::int64_t per_node = *rc::gen::inRange(0, 4);
    const TensorMove move = random_move(ranks, rows, cols);
    const Reshard result = reshard(std::vector{move}, per_node);
    const auto same_node = [&](std::int64_t a, std::int64_t b) {
      return per_node == 0 || a / per_node == b / per_node;
    };
    std::vector<std::int64_t> sent(static_cast<std::size_t>(ranks), 0), received = sent;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        std::vector<int> delivered(static_cast<std::size_t>(ranks), 0);
        for (const Transfer& t : result.tensors.at(0).transfers) {
          if (!inside({t.box}, r, c)) continue;
          const auto source = static_cast<std::size_t>(t.source), destination = static_cast<std::size_t>(t.destination);
          RC_ASSERT(inside(move.have[source], r, c));
          ++delivered[destination], ++sent[source], ++received[destination];
          if (same_node(t.source, t.destination)) continue;
          for (std::int64_t other = 0; other < ranks; ++other) {  // nobody near could have sent it
            RC_ASSERT(!same_node(other, t.destination) || !inside(move.have[static_cast<std::size_t>(other)], r, c));
          }
        }
        for (std::size_t rank = 0; rank < static_cast<std::size_t>(ranks); ++rank) {
          RC_ASSERT(delivered[rank] == (inside(move.need[rank], r, c) && !inside(move.have[rank], r, c) ? 1 : 0));
        }
      }
    }
    RC_ASSERT(result.sent == sent);
    RC_ASSERT(result.received == received);
  }));
}

TEST_CASE("Carried out on real buffers, FSDP shards become the rollout's packed weights") {
  REQUIRE(rc::check("buffers", [] {
    ModelSpec model = *rc::gen::element(test::tiny_llama(), test::tiny_qwen3());
    model.qkv_bias = *rc::gen::arbitrary<bool>();
    const std::int64_t tp = *rc::gen::element(1, 2, 4, 8), engines = *rc::gen::inRange(1, 3), world = tp * engines;
    const auto moves = model_moves(model, fsdp_layout(world), rollout_layout(tp, engines));
    const Reshard result = reshard(moves);
    std::map<std::string, std::size_t> tensor;
    for (std::size_t i = 0; i < moves.size(); ++i) tensor[moves[i].name] = i;
    const auto value = [](std::size_t index, std::int64_t row, std::int64_t col) {
      return static_cast<std::int64_t>(index) * 1'000'000 + row * 1'000 + col;
    };
    for (std::int64_t rank = 0; rank < world; ++rank) {
      for (const LocalWeight& weight : rollout_weights(model, tp, rank % tp)) {
        std::vector<std::int64_t> buffer(static_cast<std::size_t>(weight.elements()), -1);
        const auto fill = [&](const LocalWeight::Source& source, const Rectangle& box) {
          const Piece part = cut(source.piece, box);
          for (std::int64_t r = part.row_begin; r < part.row_end; ++r)
            for (std::int64_t c = part.col_begin; c < part.col_end; ++c)
              buffer.at(static_cast<std::size_t>(part.offset + (r - part.row_begin) * part.pitch + c -
                                                 part.col_begin)) = value(tensor.at(source.parameter), r, c);
        };
        for (const LocalWeight::Source& source : weight.sources) {
          const std::size_t index = tensor.at(source.parameter);
          const Rectangle wanted = box_of(source.piece);
          for (const Rectangle& own : moves[index].have[static_cast<std::size_t>(rank)]) {
            const Rectangle both{
                {std::max(own.rows.begin, wanted.rows.begin), std::min(own.rows.end, wanted.rows.end)},
                {std::max(own.cols.begin, wanted.cols.begin), std::min(own.cols.end, wanted.cols.end)}};
            if (both.rows.size() > 0 && both.cols.size() > 0) fill(source, both);
          }
          for (const Transfer& t : result.tensors[index].transfers)
            if (t.destination == rank) fill(source, t.box);
        }
        for (const LocalWeight::Source& source : weight.sources) {
          const Piece& p = source.piece;
          for (std::int64_t r = p.row_begin; r < p.row_end; ++r)
            for (std::int64_t c = p.col_begin; c < p.col_end; ++c)
              RC_ASSERT(buffer.at(static_cast<std::size_t>(p.offset + (r - p.row_begin) * p.pitch + c - p.col_begin)) ==
                        value(tensor.at(source.parameter), r, c));
        }
      }
    }
  }));
}

TEST_CASE("BACKGROUND I: Qwen2.5-7B from FSDP over 8 to rollout TP4 x 2, bf16") {
  const ModelSpec model = test::qwen2_5_7b();
  const Layout train = fsdp_layout(8);

  // Gather-all: every rank ends with all 7,615,616,512 parameters; every extent divides by 8, so it misses 7/8 of them.
  const Layout everything{Mesh({{"dp", 8}}), Mesh({{"dp", 8}}), {}, 1};
  const Reshard gathered = reshard(model_moves(model, train, everything));
  for (std::int64_t received : gathered.received) CHECK(gib_of_bf16(received) == Approx(12.41).margin(0.005));

  // Direct, tp = rank mod 4: a rank needs a quarter, of which it holds much or little by where its shard lies.
  const Reshard contiguous = reshard(model_moves(model, train, rollout_layout(4, 2)));
  const std::int64_t worst = *std::max_element(contiguous.received.begin(), contiguous.received.end());
  CHECK(gib_of_bf16(worst) == Approx(3.41).margin(0.005));

  // Direct, tp = rank div 2: rank r's rows [r/8, (r+1)/8) lie inside its quarter [(r div 2)/4, …).
  const Reshard strided = reshard(model_moves(model, train, rollout_layout(4, 2, EngineOrder::strided)));
  for (std::int64_t received : strided.received) CHECK(gib_of_bf16(received) == Approx(2.17).margin(0.005));
}

#include "layout/pipeline.h"

#include <rapidcheck.h>

#include <catch2/catch.hpp>

#include "layout/devices.h"
#include "layout/sequence.h"
#include "layout/train_mesh.h"

using namespace hotbunk;

namespace {

PipelineSplit split(std::int64_t layers, std::int64_t stages, std::int64_t chunks = 1) {
  PipelineSplit s;
  s.layers = layers, s.stages = stages, s.chunks = chunks;
  return s;
}

Range layers_of(const std::vector<StageChunk>& chunks, std::int64_t stage, std::int64_t chunk = 0) {
  for (const StageChunk& c : chunks)
    if (c.stage == stage && c.chunk == chunk) return c.layers;
  return {-1, -1};
}

}  // namespace

TEST_CASE("BACKGROUND B7: virtual stages of L 32, PP 4, VPP 2") {
  // Eight virtual stages of 4 layers; chunk c of stage p starts at c * 16 + p * 4.
  const auto chunks = split_pipeline(split(32, 4, 2)).value();
  CHECK(layers_of(chunks, 0, 0) == Range{0, 4});
  CHECK(layers_of(chunks, 0, 1) == Range{16, 20});
  CHECK(layers_of(chunks, 1, 0) == Range{4, 8});
  CHECK(layers_of(chunks, 1, 1) == Range{20, 24});
}

TEST_CASE("BACKGROUND B7: uneven L 40, PP 4, first 8, last 8: 0-7, 8-19, 20-31, 32-39") {
  PipelineSplit s = split(40, 4);
  s.first = 8, s.last = 8;
  const auto chunks = split_pipeline(s).value();
  CHECK(layers_of(chunks, 0) == Range{0, 8});
  CHECK(layers_of(chunks, 1) == Range{8, 20});
  CHECK(layers_of(chunks, 2) == Range{20, 32});
  CHECK(layers_of(chunks, 3) == Range{32, 40});
}

TEST_CASE("BACKGROUND I: VPP with only the last stage uneven (PP4 VPP2 L30 last 6) tiles, where 0, 0, 4, 8 does not") {
  // (30 - 6) / 3 = 8 layers on each of the first stages, 4 per chunk; 3 per chunk on the last. Chunk 0 starts at
  // 0, 4, 8, 12, chunk 1 at 15, 19, 23, 27.
  PipelineSplit s = split(30, 4, 2);
  s.last = 6;
  const auto chunks = split_pipeline(s).value();
  const std::vector<std::int64_t> begins = {0, 4, 8, 12, 15, 19, 23, 27};
  REQUIRE(chunks.size() == begins.size());
  for (std::size_t i = 0; i < chunks.size(); ++i) CHECK(chunks[i].layers.begin == begins[i]);
  CHECK(chunks.back().layers.end == 30);
}

TEST_CASE("Embedding and loss count as one layer each") {
  // 30 layers + 2 = 32 over 4: 8 each, so the first and the last stage hold 7.
  PipelineSplit s = split(30, 4);
  s.account_for_embedding = s.account_for_loss = true;
  const auto chunks = split_pipeline(s).value();
  CHECK(layers_of(chunks, 0) == Range{0, 7});
  CHECK(layers_of(chunks, 1) == Range{7, 15});
  CHECK(layers_of(chunks, 3) == Range{23, 30});
}

TEST_CASE("A scenario's keys split the layers as Megatron's options do") {
  Scenario s;
  s.model.layers = 30, s.train.layout.pp = 4;
  const auto layers = [&] {
    std::vector<std::int64_t> out;
    const auto stages = train_stages(s);
    REQUIRE(stages);
    for (const StageChunk& c : *stages) out.push_back(c.layers.size());
    return out;
  };
  using Layers = std::vector<std::int64_t>;
  s.train.account_for_embedding = s.train.account_for_loss = true;
  CHECK(layers() == Layers{7, 8, 8, 7});
  CHECK(split_layers(s) == layers());
  set_split(s.train, {});
  CHECK(is_even(s.train));
  CHECK(split_layers(s).empty());
  s.train.last_stage_layers = 6;
  CHECK(layers() == Layers{8, 8, 8, 6});
  s.train.layout.vpp = 2;  // 4 layers of each chunk, 3 of the last stage's
  CHECK(layers() == Layers{4, 4, 4, 3, 4, 4, 4, 3});
  s.train.first_stage_layers = 4;
  CHECK(layers() == Layers{2, 5, 5, 3, 2, 5, 5, 3});
  s.train.first_stage_layers = 5;  // 5 over two chunks
  CHECK_FALSE(train_stages(s).has_value());
}

TEST_CASE("A list per stage, with an empty stage if wished") {
  PipelineSplit s = split(10, 3);
  s.custom = {7, 0, 3};
  const auto chunks = split_pipeline(s).value();
  CHECK(layers_of(chunks, 1).size() == 0);
  CHECK(layers_of(chunks, 2) == Range{7, 10});
}

TEST_CASE("Splits that cannot be say why") {
  const auto note = [](const PipelineSplit& s) { return split_pipeline(s).error().at(0).notes.at(0); };
  CHECK(note(split(30, 4)) == "30 layers + 0 for embedding and loss = 30; 4 stages x 1 chunks = 4");
  PipelineSplit s = split(10, 3);
  s.custom = {5, 4};
  CHECK(note(s) == "2 entries [5, 4] with 9 layers in all; wanted: 3 stages x 1 chunks = 3 entries, 10 layers");
  s.custom = {11, -4, 3};
  CHECK(note(s) == "virtual stage 1 of [11, -4, 3]");
  s = split(10, 2);
  s.first = 4, s.last = 5;
  CHECK(note(s) == "10 layers - 4 first - 5 last = 1 for 0 stages of 1 chunks");
  s.account_for_loss = true;
  CHECK(note(s) ==
        "train.num_layers_in_first/last_pipeline_stage, train.account_for_embedding/loss_in_pipeline_split and "
        "train.pipeline_split exclude one another");
  CHECK(note(split(4, 0)) == "4 layers, 0 stages, 1 chunks");
}

TEST_CASE("Whatever is asked for, the chunks tile the layers or the split is refused") {
  REQUIRE(rc::check("tiling", [] {
    PipelineSplit s = split(*rc::gen::inRange(1, 60), *rc::gen::inRange(1, 6), *rc::gen::inRange(1, 4));
    if (*rc::gen::arbitrary<bool>()) s.first = *rc::gen::inRange(0, 12);
    if (*rc::gen::arbitrary<bool>()) s.last = *rc::gen::inRange(0, 12);
    if (!s.first && !s.last) s.account_for_embedding = *rc::gen::arbitrary<bool>();
    if (!s.first && !s.last) s.account_for_loss = *rc::gen::arbitrary<bool>();
    const auto chunks = split_pipeline(s);
    RC_PRE(chunks.has_value());
    std::int64_t next = 0;
    for (std::size_t i = 0; i < chunks->size(); ++i) {
      const StageChunk& chunk = (*chunks)[i];
      RC_ASSERT(chunk.chunk * s.stages + chunk.stage == static_cast<std::int64_t>(i));
      RC_ASSERT(chunk.layers.begin == next);
      RC_ASSERT(chunk.layers.size() >= 0);
      next = chunk.layers.end;
    }
    RC_ASSERT(next == s.layers);
  }));
}

TEST_CASE("BACKGROUND B5, C1, B10, E6: the sequence dimension and GPU ids") {
  CHECK(sequence_padded_tokens(1000, 4) == 1000);
  CHECK(sequence_padded_tokens(1001, 4) == 1004);

  CHECK(ulysses_kv_repeat(8, 4) == 1);
  CHECK(ulysses_kv_repeat(8, 16) == 2);
  CHECK(why_not_ulysses(32, 8, 16).empty());
  CHECK(why_not_ulysses(28, 4, 8) == "28 attention heads do not divide over 8 sequence ranks");
  CHECK(why_not_ulysses(24, 6, 4) == "6 key/value heads neither divide over 4 sequence ranks nor divide them");

  // 16 tokens over 2 ranks: chunks of 4; rank 0 holds chunks 0 and 3, rank 1 holds 1 and 2.
  CHECK(zigzag_chunks(16, 2, 0) == std::array<Range, 2>{Range{0, 4}, Range{12, 16}});
  CHECK(zigzag_chunks(16, 2, 1) == std::array<Range, 2>{Range{4, 8}, Range{8, 12}});

  // Engines of 4 GPUs on nodes of 8: 0, 4, 0, …; of 16 GPUs: g = 8, always at 0. Behind 12 training GPUs: 4, 0.
  CHECK(engine_base_gpu(1, 4, 8) == 4);
  CHECK(engine_base_gpu(2, 4, 8) == 0);
  CHECK(engine_base_gpu(3, 16, 8) == 0);
  CHECK(engine_base_gpu(0, 4, 8, 12) == 4);
  CHECK(engine_base_gpu(1, 4, 8, 12) == 0);
}

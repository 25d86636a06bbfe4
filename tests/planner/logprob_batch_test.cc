// Passes that only score in micro-batches of their own, and what fills micro-batches and vocabularies up.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "planner/answers/link_bytes.h"
#include "tests/planner/played.h"
#include "tests/planner/pricers.h"

namespace hotbunk {
namespace {

using Sets = std::vector<std::string>;

std::string eight_gpus_with(const std::string& train) {
  return "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}\n" + train +
         "rollout: {engine: vllm, layout: {tp: 2, dp: 4}}\n"
         "algorithm: {prompts: 64, samples_per_prompt: 8, mini_batches: 2, reference: true}\n"
         "workload: {prompt_tokens: {mean: 512, max: 512, distribution: fixed}, response_tokens: {mean: 1536, max: "
         "1536, distribution: fixed}}\n";
}

const std::string sharded_text =
    eight_gpus_with("profile: verl-fsdp\ntrain: {engine: fsdp2, layout: {dp: 8}, micro_batch_tokens: 4096}\n");
const std::string staged_text = eight_gpus_with(
    "profile: slime-megatron\ntrain: {engine: megatron, layout: {dp: 2, pp: 4}, micro_batch_tokens: 4096}\n");

RlPrice logprob_price(const std::string& text, const Sets& sets) {
  const auto s = pricer_of_text(text, sets);
  return s->price(s->point());
}
double phase_seconds(const RlPrice& p, RlPhase phase) { return p.seconds[static_cast<std::size_t>(phase)]; }

}  // namespace

TEST_CASE("log-prob passes of training's batch cost what they cost without one of their own") {
  for (const std::string& text : {sharded_text, staged_text})
    for (const Sets& sets :
         {Sets{"train.logprob_micro_batch_tokens=4096"}, Sets{"train.logprob_micro_batch_sequences=2"}}) {
      INFO(sets[0]);
      const RlPrice own = logprob_price(text, sets), none = logprob_price(text, {});
      CHECK(own.seconds == none.seconds);
      CHECK(own.train_bytes == none.train_bytes);
    }
}

TEST_CASE("what the driving process does with samples: by padded tokens behind old log-probs, by samples in the rest") {
  const auto s = pricer_of_text(sharded_text);
  const FrameworkProfile& f = s->train().framework();
  REQUIRE((f.logprob_token_seconds.value > 0 && f.sample_seconds.value > 0));
  const RlPrice own = logprob_price(sharded_text, {});
  // 64 x 8 samples, padded to 512 + 1,536 tokens.
  const double driver = 512 * 2048 * f.logprob_token_seconds.value;
  const RlModel::Scoring by = s->rl().scoring(s->point().train, s->train().layers(s->point().train));
  CHECK(phase_seconds(own, RlPhase::old_logprobs) ==
        Approx(2 * s->rl().forward_seconds(by, true).total() + driver).epsilon(1e-9));
  CHECK(phase_seconds(own, RlPhase::framework) == Approx(512 * f.sample_seconds.value));
  // Longer samples that nobody draws: the pass is the same, the padding is not.
  const RlPrice padded = logprob_price(sharded_text, {"workload.response_tokens={mean: 1536, max: 3584, cv: 0}"});
  CHECK(phase_seconds(padded, RlPhase::old_logprobs) - phase_seconds(own, RlPhase::old_logprobs) ==
        Approx(512 * 2048 * f.logprob_token_seconds.value).epsilon(0.05));
  CHECK(phase_seconds(padded, RlPhase::framework) == phase_seconds(own, RlPhase::framework));
  // Played, it takes as long.
  for (const std::string& text :
       {sharded_text, eight_gpus_with("profile: verl-megatron\ntrain: {engine: megatron, "
                                      "layout: {dp: 2, pp: 4}, micro_batch_tokens: 4096}\n")}) {
    const auto p = pricer_of_text(text);
    const auto job = priced_job(*p);
    REQUIRE(job.has_value());
    const Played played = play(*job, p->train().cost());
    const RlPrice price = p->price(p->point());
    for (const RlPhase phase : {RlPhase::old_logprobs, RlPhase::framework})
      CHECK(played.seconds[static_cast<std::size_t>(phase)] == Approx(phase_seconds(price, phase)).epsilon(0.03));
  }
}

TEST_CASE("a log-prob batch of its own: fewer, fuller passes hold more and gather units less often") {
  const Sets large = {"train.logprob_micro_batch_tokens=16384"};
  const auto s = pricer_of_text(sharded_text, large);
  const TrainPoint p = s->point().train;
  CHECK((p.micro_batch == 2 && p.micro_batches == 16));  // 32 sequences of 2,048 tokens a rank and step
  const RlModel::Scoring by = s->rl().scoring(p, s->train().layers(p));
  CHECK((by.point.micro_batch == 8 && by.point.micro_batches == 4));
  const RlPrice own = logprob_price(sharded_text, large), none = logprob_price(sharded_text, {});
  CHECK(phase_seconds(own, RlPhase::train) == phase_seconds(none, RlPhase::train));
  CHECK(phase_seconds(own, RlPhase::old_logprobs) < phase_seconds(none, RlPhase::old_logprobs));
  CHECK(phase_seconds(own, RlPhase::reference) < phase_seconds(none, RlPhase::reference));
  // Logits: bytes of a token's, of which their gradient is none here, of 12,288 tokens more; and as many of the stream.
  const TrainSide more = s->rl().parts(s->point()).train, less = [&] {
    const auto q = pricer_of_text(sharded_text);
    return q->rl().parts(q->point()).train;
  }();
  const double vocab = 152064, added = 12288.0 * ((s->train().framework().loss_bytes.value - 2.0) * vocab + 2 * 3584.0);
  CHECK(more.old_work - less.old_work == Approx(added).epsilon(1e-6));
  CHECK(more.total_bytes == less.total_bytes);  // of a training step
  CHECK(own.train_bytes >= none.train_bytes);
}

TEST_CASE("a log-prob batch of its own decides where memory is short") {
  // The same training; a pass that scores all of a rank's 256 sequences at once holds the logits of 524,288 tokens.
  const Sets small = {"algorithm.prompts=512"}, large = {small[0], "train.logprob_micro_batch_tokens=524288"};
  const RlPrice roomy = logprob_price(sharded_text, small), wide = logprob_price(sharded_text, large);
  CHECK(roomy.fits);
  CHECK_FALSE(wide.fits);
  CHECK(wide.train_bytes > roomy.train_bytes + 80e9);
  CHECK(wide.rollout_bytes == roomy.rollout_bytes);
}

TEST_CASE("simulated log-prob passes take their own micro-batches") {
  for (const std::string& text : {sharded_text, staged_text})
    for (const std::string tokens : {"2048", "8192", "16384"}) {
      INFO(text << tokens);
      const auto s = pricer_of_text(text, {"train.logprob_micro_batch_tokens=" + tokens});
      const auto job = priced_job(*s);
      if (!job) FAIL(render(job.error()));
      const Played played = play(*job, s->train().cost());
      const RlPrice price = s->price(s->point());
      for (const RlPhase phase : {RlPhase::old_logprobs, RlPhase::reference, RlPhase::train}) {
        INFO(name_of(phase));
        CHECK(played.seconds[static_cast<std::size_t>(phase)] == Approx(phase_seconds(price, phase)).epsilon(0.02));
      }
    }
}

TEST_CASE("traffic of log-prob passes is that of their own micro-batches") {
  const auto gathered = [](const Sets& sets) {
    const auto s = pricer_of_text(sharded_text, sets);
    const RlModel::Parts parts = s->rl().parts(s->point());
    const TrainPrice train = s->train().price(s->point().train);
    double out = 0.0;
    for (const LinkUse& use : link_bytes(s->rl(), s->point(), train, parts.rollout, true))
      if (use.phase == RlPhase::old_logprobs && use.what == "dp parameters") out += use.node_wire;
    return out;
  };
  CHECK(gathered({"train.logprob_micro_batch_tokens=16384"}) == Approx(gathered({}) / 4.0));
}

TEST_CASE("a vocabulary is padded as the framework pads it") {
  const auto rows = [](const std::string& profile, std::int64_t tp) {
    const auto s =
        pricer_of_text(eight_gpus_with(fmt::format(
                           "profile: {}\ntrain: {{engine: megatron, layout: {{dp: {}, tp: {}}}, micro_batch_tokens: "
                           "4096}}\n",
                           profile, 8 / tp, tp)),
                       {"model=llama-3.1-8b"});
    const TrainPoint p = s->point().train;
    const double head = s->train().head(p).parameters, norm = 4096.0;
    CHECK(head == Approx(s->train().vocab_rows(p) * 4096.0 + norm));
    return s->train().vocab_rows(p);
  };
  // 128,256 = 1,002 x 128. Over 4 ranks Megatron pads to 251 x 512 = 128,512; mbridge leaves the rows as they are.
  CHECK(rows("slime-megatron", 1) == 128256);
  CHECK(rows("slime-megatron", 4) == 128512 / 4);
  CHECK(rows("verl-megatron", 4) == 128256 / 4);
}

TEST_CASE("micro-batches are filled up as the framework fills them") {
  const auto padding = [](const std::string& profile, const std::string& layout, const Sets& sets = {}) {
    const auto s = pricer_of_text(
        eight_gpus_with(fmt::format("profile: {}\ntrain: {{engine: megatron, layout: {}, micro_batch_tokens: 4096}}\n",
                                    profile, layout)),
        sets);
    return s->train().padding_tokens(s->point().train);
  };
  const Sets varied = {"workload.response_tokens={mean: 1500, max: 1536, cv: 0.2}"};
  // Lengths of 2,048 divide by all of it.
  CHECK(padding("verl-megatron", "{dp: 2, tp: 4, sp: true}") == 0.0);
  CHECK(padding("slime-megatron", "{dp: 2, tp: 4, sp: true}") == 0.0);
  // Two sequences, each to a multiple of 4 (tp), or of 16 beside cp 2: 1.5 and 7.5 on average.
  CHECK(padding("verl-megatron", "{dp: 2, tp: 4, sp: true}", varied) == 2 * 1.5);
  CHECK(padding("verl-megatron", "{dp: 1, tp: 4, cp: 2, sp: true}", varied) == 4 * 7.5);
  // verl's align_size asks for tp whether or not activations are cut (verl/models/mcore/util.py).
  CHECK(padding("verl-megatron", "{dp: 2, tp: 4, sp: false}", varied) == 2 * 1.5);
  // slime fills the micro-batch up to 4 x 128 tokens instead.
  CHECK(padding("slime-megatron", "{dp: 2, tp: 4, sp: true}", varied) == 255.5);
  // A fixed sample of 2,000 tokens in twos: 4,000 to 4,096.
  CHECK(padding("slime-megatron", "{dp: 2, tp: 4, sp: true}",
                {"workload.response_tokens={mean: 1488, max: 1488, distribution: fixed}"}) == 96.0);
  // What fills up is computed as any token is.
  const auto of = [](const std::string& profile) {
    const auto s = pricer_of_text(eight_gpus_with("profile: " + profile +
                                                  "\ntrain: {engine: megatron, layout: {dp: 2, tp: 4, sp: true}, "
                                                  "micro_batch_tokens: 4096}\n"),
                                  {"workload.response_tokens={mean: 1488, max: 1488, distribution: fixed}"});
    return s->train().dense_layer(s->point().train);
  };
  const LayerCost padded = of("slime-megatron"), plain = of("verl-megatron");
  CHECK(padded.flops_forward > plain.flops_forward * 1.02);
  // What is held is a full buffer of 4,096 tokens on either.
  CHECK(padded.kept_bytes == Approx(plain.kept_bytes));
}

}  // namespace hotbunk

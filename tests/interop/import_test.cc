// Launches of six systems as scenarios: what each key becomes, whose default stands in, what is refused. Long for the
// systems, of which each has its own launches.
#include "interop/import.h"

#include <algorithm>
#include <catch2/catch.hpp>

#include "tests/interop/launches.h"

namespace hotbunk {
namespace {

LaunchSource words(const std::string& command) { return {.file = "", .words = words_of(command), .variables = {}}; }

const std::string verl =
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 "
    "data.max_prompt_length=1024 "
    "data.max_response_length=3072 actor_rollout_ref.model.path=Qwen/Qwen2.5-7B "
    "actor_rollout_ref.actor.ppo_mini_batch_size=16 "
    "actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.name=vllm ";
const std::string dynamic = "actor_rollout_ref.actor.use_dynamic_bsz=True ";

const std::string slime =
    "python3 train.py --hf-checkpoint /root/Qwen3-4B --colocate --rollout-batch-size 32 --n-samples-per-prompt 8 "
    "--global-batch-size 128 --rollout-max-response-len 8192 --use-dynamic-batch-size --max-tokens-per-gpu 9216 "
    "--sglang-mem-fraction-static 0.7 --rollout-num-gpus-per-engine 2 --tensor-model-parallel-size 2 "
    "--sequence-parallel ";

}  // namespace

TEST_CASE("every table of launches reads, names its release, and each of its keys becomes something") {
  REQUIRE(launch_systems() ==
          std::vector<std::string>{"megatron", "nemo-rl", "openrlhf", "slime", "torchtitan", "verl"});
  for (const std::string& system : launch_systems()) {
    INFO(system);
    const LaunchTable table = table_of(system);
    CHECK(!table.release.empty());
    CHECK(table.keys.size() > 40);
    for (const LaunchKey& row : table.keys)
      if (!row.when_key.empty()) {
        INFO(row.key);
        CHECK(table.find(row.when_key) != nullptr);
      }
  }
}

TEST_CASE("verl: mini-batches count prompts, sequences give tokens, defaults are the release's") {
  const ImportedScenario i = import_of("verl", words(verl + "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"));
  const Scenario& s = i.scenario;
  CHECK(s.algorithm.mini_batches == 4);  // 64 prompts / 16 prompts
  CHECK(s.train.micro_batch_sequences == 2);
  CHECK(s.train.micro_batch_tokens == 2 * (1024 + 3072));
  CHECK(s.train.engine == TrainEngine::fsdp1);
  CHECK(s.train.precision.master == DType::f32);  // model_dtype is fp32 where nobody says
  CHECK(s.train.recompute == Recompute::full);
  CHECK(s.rollout.engine == RolloutEngine::vllm);
  CHECK(s.rollout.layout.tp == 2);  // its default
  CHECK(s.rollout.layout.dp == 4);
  CHECK(s.sync.bucket_bytes == std::int64_t{2048} << 20);
  CHECK(key_of(i, "actor_rollout_ref.actor.fsdp_config.model_dtype")->fate == KeyFate::defaulted);
  CHECK(key_of(i, "actor_rollout_ref.rollout.n")->fate == KeyFate::taken);
  const ImportedScenario bf16 =
      import_of("verl", words(verl + dynamic + "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"));
  CHECK(bf16.scenario.train.precision.master == DType::bf16);
  CHECK(bf16.scenario.train.precision.moments == DType::bf16);
  CHECK(bf16.scenario.train.micro_batch_tokens == 16384);
}

TEST_CASE("verl: Megatron's keys count under Megatron alone, and its experts' tp is tp where nobody says") {
  const std::string degrees =
      "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
      "actor_rollout_ref.actor.megatron.param_offload=True ";
  const ImportedScenario fsdp = import_of("verl", words(verl + dynamic + degrees));
  CHECK(fsdp.scenario.train.layout.tp == 1);
  CHECK_THAT(key_of(fsdp, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size")->why,
             Catch::Contains("read only where"));
  const ImportedScenario megatron = import_of(
      "verl",
      words(verl + dynamic + degrees + "model_engine=megatron actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B"));
  CHECK(megatron.scenario.train.engine == TrainEngine::megatron);
  CHECK(megatron.scenario.profile == "verl-megatron");
  CHECK(megatron.scenario.train.layout.tp == 2);
  CHECK(megatron.scenario.train.layout.sp);  // its default
  CHECK(megatron.scenario.train.layout.etp == 2);
  CHECK(megatron.scenario.train.offload == Offload::sleep);
}

TEST_CASE("verl: parameters and optimizer sleep each for itself") {
  const std::string prefix = "actor_rollout_ref.actor.fsdp_config.";
  const auto of = [&](const std::string& more) { return import_of("verl", words(verl + dynamic + more)).scenario; };
  const Scenario both = of(prefix + "param_offload=True " + prefix + "optimizer_offload=True");
  CHECK(both.train.offload == Offload::sleep);
  CHECK(both.transition == "verl");
  const Scenario optimizer = of(prefix + "optimizer_offload=True");
  CHECK(optimizer.train.offload == Offload::sleep);
  CHECK(optimizer.transition == "sleep_optimizer-wake_rollout-sync-wake_kv-rollout-sleep_rollout-wake_train");
  CHECK(of(prefix + "param_offload=True").transition ==
        "sleep_train-wake_rollout-wake_params-sync-sleep_train-wake_kv-rollout-sleep_rollout-wake_train");
  CHECK(of("").train.offload == Offload::none);
}

TEST_CASE("Megatron's optimizer on the CPU is a fraction, all of it unless said") {
  const std::string prefix = "actor_rollout_ref.actor.optim.override_optimizer_config.";
  const std::string megatron = verl + dynamic + "model_engine=megatron +" + prefix + "optimizer_cpu_offload=True ";
  CHECK(import_of("verl", words(megatron)).scenario.optimizer.cpu_fraction == 1.0);
  CHECK(import_of("verl", words(megatron + "+" + prefix + "optimizer_offload_fraction=0.25"))
            .scenario.optimizer.cpu_fraction == 0.25);
  CHECK(import_of("slime", words(slime + "--optimizer-cpu-offload")).scenario.optimizer.cpu_fraction == 1.0);
  CHECK(import_of("slime", words(slime)).scenario.optimizer.cpu_fraction == 0.0);
}

TEST_CASE("slime's FSDP shards over dp: context-parallel ranks have copies of the state") {
  std::string fsdp = slime;
  fsdp.replace(fsdp.find("--tensor-model-parallel-size 2 --sequence-parallel"), 50, "--train-backend fsdp");
  const TrainLayout alone = import_of("slime", words(fsdp)).scenario.train.layout;
  CHECK((alone.shard_over.empty() && alone.shard_ranks() == 8));
  const ImportedScenario cut = import_of("slime", words(fsdp + " --context-parallel-size 2"));
  CHECK((cut.scenario.train.layout.shard_over == "dp" && cut.scenario.train.layout.shard_ranks() == 4));
  CHECK_THAT(cut.text, Catch::Contains("slime's FSDP shards over dp alone"));
  const Scenario megatron = import_of("slime", words(slime + "--context-parallel-size 2")).scenario;
  CHECK(megatron.train.layout.shard_over.empty());
}

TEST_CASE("slime: the batch of a step counts samples, the bucket is bytes") {
  const ImportedScenario i = import_of("slime", words(slime + "--update-weight-buffer-size 1073741824"));
  CHECK(i.scenario.algorithm.mini_batches == 2);  // 32 x 8 samples / 128
  CHECK(i.scenario.sync.bucket_bytes == std::int64_t{1} << 30);
  CHECK(i.scenario.rollout.layout.tp == 2);
  CHECK(i.scenario.train.layout.sp);
  CHECK(i.scenario.model.name == "qwen3-4b");
  CHECK(i.scenario.rollout.engine == RolloutEngine::sglang);
  CHECK(import_of("slime", words(slime)).scenario.sync.bucket_bytes == std::int64_t{512} << 20);
  const auto both = imported("slime", words(slime + "--num-steps-per-rollout 4"));
  REQUIRE(!both);
  CHECK(both.error()[0].code == "E151");
}

TEST_CASE("slime: a sample above the tokens of a GPU is a micro-batch of its own; verl refuses it") {
  CHECK(import_of("slime", words(slime + "--max-tokens-per-gpu 4096")).scenario.train.micro_batch_tokens ==
        1024 + 8192);
  const auto v = imported("verl", words(verl + dynamic + "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048"));
  REQUIRE(!v);
  CHECK(v.error()[0].code == "E217");
}

TEST_CASE("log-prob passes have a batch of their own where the launch says so") {
  const std::string rollout = "actor_rollout_ref.rollout.log_prob_", ref = "actor_rollout_ref.ref.log_prob_";
  const auto verl_of = [](const std::string& more) { return import_of("verl", words(verl + dynamic + more)); };
  const auto tokens = [](const ImportedScenario& i) { return i.scenario.train.logprob_micro_batch_tokens; };
  const auto sequences = [](const ImportedScenario& i) { return i.scenario.train.logprob_micro_batch_sequences; };
  // Silent, or as training: no keys.
  CHECK_FALSE(verl_of("").scenario.train.scores_apart());
  const std::int64_t training = verl_of("").scenario.train.micro_batch_tokens;
  CHECK_FALSE(verl_of(rollout + "max_token_len_per_gpu=" + std::to_string(training)).scenario.train.scores_apart());
  CHECK(tokens(verl_of(rollout + "max_token_len_per_gpu=65536")) == 65536);
  // By sequences where that is said, whatever training does.
  const auto by_sequences = verl_of(rollout + "use_dynamic_bsz=False " + rollout + "micro_batch_size_per_gpu=16");
  CHECK((sequences(by_sequences) == 16 && tokens(by_sequences) == 0));
  // Dynamic micro-batches leave the sequences aside.
  CHECK_FALSE(verl_of(rollout + "micro_batch_size_per_gpu=16").scenario.train.scores_apart());
  // Two batches: the larger is what memory has to hold.
  const auto both = verl_of(rollout + "max_token_len_per_gpu=32768 " + ref + "max_token_len_per_gpu=65536");
  CHECK(tokens(both) == 65536);
  CHECK_THAT(both.text, Catch::Contains("old log-probs take"));
  CHECK(tokens(import_of("slime", words(slime + "--log-probs-max-tokens-per-gpu 30000"))) == 30000);
  CHECK(sequences(import_of("openrlhf", words("python3 -m openrlhf.cli.train_ppo_ray --actor_num_gpus_per_node 8 "
                                              "--vllm_num_engines 4 --vllm_tensor_parallel_size 2 "
                                              "--colocate_all_models --pretrain Qwen/Qwen2.5-7B --max_len 2048 "
                                              "--micro_train_batch_size 4 --micro_rollout_batch_size 8"))) == 8);
  const std::string file = launch_file(
      "nemo/logprob.yaml",
      "grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16}\npolicy:\n  model_name: Qwen/Qwen2.5-7B\n"
      "  train_global_batch_size: 512\n  train_micro_batch_size: 1\n  logprob_batch_size: 4\n"
      "  max_total_sequence_length: 4096\n  megatron_cfg: {enabled: true}\n"
      "  sequence_packing: {enabled: true, train_mb_tokens: 4096, logprob_mb_tokens: "
      "'${mul:${policy.max_total_sequence_length},${policy.logprob_batch_size}}'}\n"
      "cluster: {num_nodes: 1, gpus_per_node: 8}\n");
  CHECK(tokens(import_of("nemo-rl", {.file = file, .words = {}, .variables = {}})) == 16384);
  const auto unpacked =
      import_of("nemo-rl", {.file = file, .words = {"policy.sequence_packing.enabled=false"}, .variables = {}});
  CHECK((sequences(unpacked) == 4 && unpacked.scenario.train.micro_batch_sequences == 1));
}

TEST_CASE("slime: without --colocate training and rollout are apart") {
  std::string apart = slime;
  apart.replace(apart.find("--colocate"), 10, "--rollout-num-gpus 16");
  const Scenario s = import_of("slime", words(apart)).scenario;
  CHECK(s.placement == PlacementMode::disaggregated);
  CHECK(s.cluster.nodes == 3);  // 8 + 16 GPUs
  CHECK(s.train.layout.dp == 4);
  CHECK(s.rollout.layout.dp == 8);
}

TEST_CASE("Megatron cuts the optimizer's state over data ranks where it is told to, over as many as an instance has") {
  const std::string launch =
      "torchrun --nproc_per_node 8 pretrain_gpt.py --hf-checkpoint Qwen/Qwen2.5-7B --seq-length 4096 "
      "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --tensor-model-parallel-size 2 ";
  const auto shards = [&](const std::string& flags) {
    return import_of("megatron", words(launch + flags)).scenario.train.layout.fsdp;
  };
  CHECK(shards("") == 1);  // all of it on each, a flag's default
  CHECK(shards("--use-distributed-optimizer") == -1);
  const std::string instances = "--use-distributed-optimizer --num-distributed-optimizer-instances ";
  CHECK(shards(instances + "1") == -1);
  CHECK(shards(instances + "2") == 2);  // of 4 data ranks
  CHECK(shards("--num-distributed-optimizer-instances 2") == 1);
  const auto odd = imported("megatron", words(launch + instances + "3"));
  REQUIRE(!odd);
  CHECK(odd.error()[0].code == "E151");
  CHECK_THAT(render(odd.error()), Catch::Contains("8 GPUs / (tp x pp = 2) = 4 data ranks, 3 instances"));
}

TEST_CASE("Megatron pads a vocabulary to what the launch says; without a word the profile's multiple stands") {
  const std::string launch =
      "torchrun --nproc_per_node 8 pretrain_gpt.py --hf-checkpoint Qwen/Qwen2.5-7B --seq-length 4096 "
      "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 ";
  CHECK(import_of("megatron", words(launch)).scenario.model.vocab_multiple == 0);
  CHECK(import_of("megatron", words(launch + "--make-vocab-size-divisible-by 256")).scenario.model.vocab_multiple ==
        256);
  const auto none = imported("megatron", words(launch + "--make-vocab-size-divisible-by 0"));
  REQUIRE(!none);
  CHECK(none.error()[0].code == "E151");
}

TEST_CASE("Megatron's own FSDP is not planned, and is not taken for ZeRO-1") {
  const std::string launch =
      "torchrun --nproc_per_node 8 pretrain_gpt.py --hf-checkpoint Qwen/Qwen2.5-7B --seq-length 4096 "
      "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 ";
  CHECK(import_of("megatron", words(launch)).scenario.train.engine == TrainEngine::megatron);
  for (const char* flag : {"--use-megatron-fsdp", "--use-custom-fsdp", "--use-torch-fsdp2"}) {
    const auto sharded = imported("megatron", words(launch + flag));
    REQUIRE(!sharded);
    CHECK(sharded.error()[0].code == "E152");
  }
  const std::string nemo = launch_file(
      "nemo/fsdp.yaml",
      "grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16}\npolicy:\n  model_name: Qwen/Qwen2.5-7B\n"
      "  train_global_batch_size: 512\n  train_micro_batch_size: 1\n  max_total_sequence_length: 4096\n"
      "  megatron_cfg: {enabled: true}\n  sequence_packing: {enabled: false}\n"
      "cluster: {num_nodes: 1, gpus_per_node: 8}\n");
  const std::string ddp = "policy.megatron_cfg.distributed_data_parallel_config.",
                    of_verl = "megatron.override_ddp_config.", megatron = "actor_rollout_ref.actor.strategy=megatron ";
  const struct {
    std::string system, file, launch, on, off;  // off: what says no, and is no news
  } others[] = {
      {"nemo-rl", nemo, "", ddp + "use_custom_fsdp=true", ddp + "use_custom_fsdp=false"},
      {"nemo-rl", nemo, "", ddp + "use_megatron_fsdp=true", ddp + "use_megatron_fsdp=false"},
      {"verl", "", verl + dynamic + megatron, "+actor_rollout_ref.actor." + of_verl + "use_megatron_fsdp=True",
       "+actor_rollout_ref.actor." + of_verl + "use_megatron_fsdp=False"},
      {"verl", "", verl + dynamic + megatron, "+actor_rollout_ref.actor." + of_verl + "use_custom_fsdp=True",
       "+actor_rollout_ref.actor." + of_verl + "use_custom_fsdp=False"},
      {"verl", "", verl + dynamic + megatron, "+actor_rollout_ref.ref." + of_verl + "use_megatron_fsdp=True",
       "+actor_rollout_ref.ref." + of_verl + "use_megatron_fsdp=False"},
      {"verl", "", verl + dynamic + megatron, "+actor_rollout_ref.ref." + of_verl + "use_custom_fsdp=True",
       "+actor_rollout_ref.ref." + of_verl + "use_custom_fsdp=False"},
      {"slime", "", slime, "--use-megatron-fsdp", ""},
      {"slime", "", slime, "--use-custom-fsdp", ""},
  };
  for (const auto& [system, file, given, on, off] : others) {
    INFO(system << " " << on);
    const auto with = [&](const std::string& more) {
      return LaunchSource{.file = file,
                          .words = given.empty() ? std::vector<std::string>{more} : words_of(given + more),
                          .variables = {}};
    };
    CHECK(import_of(system, with(off)).scenario.train.engine == TrainEngine::megatron);
    const auto sharded = imported(system, with(on));
    REQUIRE(!sharded);
    CHECK(sharded.error()[0].code == "E152");
  }
}

TEST_CASE("an array that nothing sets is no flag's value") {
  // As slime's scripts write it: the model's arguments come from a file that may not be beside the script.
  const std::string launch = slime + "--colocate ${MODEL_ARGS[@]} --lr 1e-6";
  const ImportedScenario i =
      import_of("slime", {.file = launch_file("launch.sh", launch), .words = {}, .variables = {}});
  CHECK(i.scenario.placement == PlacementMode::colocated);
  CHECK(i.scenario.optimizer.lr == 1e-6);
  std::string notes;
  for (const std::string& note : i.notes) notes += note + "\n";
  CHECK_THAT(notes, Catch::Contains("${MODEL_ARGS[@]} is nowhere set"));
}

TEST_CASE("NeMo-RL: packed bins before cp, one cap on prompt and response, gradients in bf16") {
  launch_file("nemo/base.yaml",
              "grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16}\npolicy:\n  model_name: "
              "Qwen/Qwen2.5-7B\n  train_global_batch_size: 256\n"
              "  train_micro_batch_size: 2\n  max_total_sequence_length: 4096\n  megatron_cfg: {enabled: true, "
              "context_parallel_size: 2}\n"
              "  sequence_packing: {enabled: true, train_mb_tokens: "
              "'${mul:${policy.max_total_sequence_length},${policy.train_micro_batch_size}}'}\n"
              "  generation: {max_new_tokens: '${policy.max_total_sequence_length}'}\ndata: {max_input_seq_length: "
              "'${policy.max_total_sequence_length}'}\n"
              "cluster: {num_nodes: 1, gpus_per_node: 8}\n");
  const std::string file =
      launch_file("nemo/recipe.yaml", "defaults: base.yaml\npolicy: {max_total_sequence_length: 8192}\n");
  const Scenario s = import_of("nemo-rl", {.file = file, .words = {}, .variables = {}}).scenario;
  CHECK(s.profile == "nemo-megatron");
  CHECK(s.train.micro_batch_tokens == 8192);  // 2 x 8192 of a bin / cp 2
  CHECK(s.algorithm.mini_batches == 2);       // 32 x 16 / 256
  CHECK(s.train.precision.grads == DType::bf16);
  CHECK(s.workload.max_tokens == 8192);
  CHECK(s.workload.longest() == 8192);
  CHECK(s.algorithm.reference);
  const Scenario over =
      import_of("nemo-rl", {.file = file, .words = {"++policy.max_total_sequence_length=2048"}, .variables = {}})
          .scenario;
  CHECK(over.workload.max_tokens == 2048);
  CHECK(over.train.micro_batch_tokens == 2048);
}

TEST_CASE("OpenRLHF: dotted flags and the names before them are one") {
  const std::string now =
      "python3 -m openrlhf.cli.train_ppo_ray --actor.num_gpus_per_node 8 --vllm.num_engines 4 "
      "--vllm.tensor_parallel_size 2 --train.colocate_all "
      "--actor.model_name_or_path Qwen/Qwen2.5-7B --train.batch_size 128 --rollout.batch_size 128 "
      "--rollout.n_samples_per_prompt 8 --ds.zero_stage 3 "
      "--algo.advantage.estimator group_norm --data.max_len 2048 --train.micro_batch_size 4 --ds.enable_sleep "
      "--vllm.enable_sleep";
  const std::string before =
      "python3 -m openrlhf.cli.train_ppo_ray --actor_num_gpus_per_node 8 --vllm_num_engines 4 "
      "--vllm_tensor_parallel_size 2 --colocate_all_models "
      "--pretrain Qwen/Qwen2.5-7B --train_batch_size 128 --rollout_batch_size 128 --n_samples_per_prompt 8 "
      "--zero_stage 3 "
      "--advantage_estimator group_norm --max_len 2048 --micro_train_batch_size 4 --deepspeed_enable_sleep "
      "--vllm_enable_sleep";
  const Scenario a = import_of("openrlhf", words(now)).scenario, b = import_of("openrlhf", words(before)).scenario;
  CHECK(a == b);
  CHECK(a.algorithm.mini_batches == 8);  // 128 prompts x 8 / 128 samples
  CHECK(a.train.engine == TrainEngine::fsdp1);
  CHECK(a.algorithm.name == AlgorithmName::grpo);
  // Gradients are what DeepSpeed takes under ZeRO, the parameters' dtype; log-probs go sample by sample.
  CHECK(a.train.precision.grads == DType::bf16);
  CHECK(a.train.logprob_micro_batch_sequences == 1);
  // One cap: a prompt may have what its response leaves, and the other way round.
  CHECK(a.workload.max_tokens == 2048);
  CHECK(a.workload.prompt_tokens.max == 2047);
  CHECK(a.workload.response_tokens.max == 2047);
  CHECK(a.workload.prompt_tokens.mean == 511);    // a quarter
  CHECK(a.workload.response_tokens.mean == 512);  // a third of the rest
  const Scenario capped =
      import_of("openrlhf", words(now + " --data.max_len 8192 --rollout.max_new_tokens 7168")).scenario;
  CHECK(capped.workload.prompt_tokens.max == 1024);
  CHECK(capped.workload.response_tokens.max == 7168);
  const Scenario dynamic = import_of("openrlhf", words(now + " --train.dynamic_batch_enable")).scenario;
  CHECK(dynamic.train.logprob_micro_batch_sequences == 0);
  // ZeRO's optimizer on the host, whatever its stage.
  CHECK(a.optimizer.cpu_fraction == 0);
  for (const std::string flag : {"ds.adam_offload", "adam_offload"}) {
    INFO(flag);
    const auto why = [&](const ImportedScenario& i) {
      const auto key = std::ranges::find(i.keys, flag, &ImportedKey::key);
      return key == i.keys.end() ? std::string("not given") : key->why;
    };
    for (const char* stage : {"1", "2", "3"}) {
      const ImportedScenario i = import_of("openrlhf", words(now + " --ds.zero_stage " + stage + " --" + flag));
      CHECK(i.scenario.optimizer.cpu_fraction == 1);
      CHECK(why(i).empty());
    }
  }
  const auto uncovered = imported("openrlhf", words(now + " --vllm.num_engines 3"));
  REQUIRE(!uncovered);
  CHECK(uncovered.error()[0].code == "E151");
}

TEST_CASE("OpenRLHF: a critic has nodes of its own unless all models are colocated; asynchronous engines have, too") {
  const std::string ppo =
      "python3 -m openrlhf.cli.train_ppo_ray --actor.num_gpus_per_node 8 --vllm.num_engines 4 "
      "--vllm.tensor_parallel_size 2 --actor.model_name_or_path Qwen/Qwen2.5-7B --critic.model_name_or_path "
      "Qwen/Qwen2.5-7B --train.batch_size 128 --rollout.batch_size 128 --data.max_len 2048 ";
  const Scenario apart = import_of("openrlhf", words(ppo)).scenario;
  CHECK(apart.algorithm.name == AlgorithmName::ppo);
  CHECK(apart.placement == PlacementMode::disaggregated);
  CHECK(apart.algorithm.critic_placement == PlacementMode::disaggregated);
  CHECK(apart.cluster.nodes == 2);  // of actor and engines
  const ImportedScenario fewer = import_of("openrlhf", words(ppo + "--critic_num_gpus_per_node 4"));
  CHECK_THAT(fewer.text, Catch::Contains("4 GPUs, taken as 8, the actor's number"));
  const Scenario all = import_of("openrlhf", words(ppo + "--train.colocate_all")).scenario;
  CHECK(all.placement == PlacementMode::colocated);
  CHECK(all.algorithm.critic_placement == PlacementMode::colocated);
  const Scenario grpo = import_of("openrlhf", words(ppo + "--algo.advantage.estimator group_norm")).scenario;
  CHECK(grpo.algorithm.critic_placement == PlacementMode::colocated);
  const Scenario steps_off = import_of("openrlhf", words(ppo + "--train.colocate_all --train.async_enable")).scenario;
  CHECK(steps_off.placement == PlacementMode::disaggregated);
  CHECK(steps_off.algorithm.max_staleness == 1);
  CHECK(steps_off.algorithm.critic_placement == PlacementMode::colocated);
  CHECK(steps_off.cluster.nodes == 2);
}

TEST_CASE("OpenRLHF: a reference has nodes of its own unless it is colocated with the actor, or all models are") {
  const std::string grpo =
      "python3 -m openrlhf.cli.train_ppo_ray --actor.num_gpus_per_node 8 --vllm.num_engines 4 "
      "--vllm.tensor_parallel_size 2 --actor.model_name_or_path Qwen/Qwen2.5-7B --algo.advantage.estimator group_norm "
      "--train.batch_size 128 --rollout.batch_size 128 --data.max_len 2048 ";
  const auto placed = [&](const std::string& more) {
    return import_of("openrlhf", words(grpo + more)).scenario.algorithm.reference_placement;
  };
  CHECK(placed("") == PlacementMode::disaggregated);  // its default: a KL term, and nothing colocated
  CHECK(placed("--train.colocate_actor_ref") == PlacementMode::colocated);
  CHECK(placed("--train.colocate_all") == PlacementMode::colocated);
  CHECK(placed("--algo.kl.init_coef 0") == PlacementMode::colocated);  // there is none
  CHECK_THAT(import_of("openrlhf", words(grpo + "--ref_num_gpus_per_node 2")).text,
             Catch::Contains("2 GPUs, taken as 8, the actor's number"));
}

TEST_CASE("NeMo-RL: DTensors are a trainer of their own, what is neither packed nor sorted is padded to the longest") {
  const std::string nemo =
      "run_grpo.py policy.model_name=Qwen/Qwen3-8B policy.max_total_sequence_length=2048 "
      "cluster.gpus_per_node=8 ";
  const auto read = [&](const std::string& more) { return import_of("nemo-rl", words(nemo + more)).scenario; };
  const Scenario tensor = read("policy.dtensor_cfg.tensor_parallel_size=2 policy.dtensor_cfg.sequence_parallel=true");
  CHECK(tensor.profile == "nemo-fsdp");
  CHECK(tensor.train.engine == TrainEngine::fsdp2);
  CHECK(tensor.train.layout.tp == 2);
  CHECK(tensor.train.padding == Padding::none);  // packed unless said
  const std::string plain = "policy.sequence_packing.enabled=false ";
  CHECK(read(plain).train.padding == Padding::batch);
  CHECK(
      read(plain + "policy.dynamic_batching.enabled=true policy.dynamic_batching.train_mb_tokens=8192").train.padding ==
      Padding::none);
  CHECK(read("policy.megatron_cfg.enabled=true " + plain).train.padding == Padding::batch);
  // Layer-wise offload leaves nothing of training to put to sleep: it was refused beside the profile's order.
  const Scenario offloaded = read("policy.dtensor_cfg.cpu_offload=true");
  CHECK(offloaded.train.offload == Offload::layerwise);
  CHECK(offloaded.transition.find("sleep_train") == std::string::npos);
  CHECK(offloaded.transition.find("sleep_rollout") != std::string::npos);
  const Scenario verl_offloaded = import_of("verl", words(verl + dynamic +
                                                          "actor_rollout_ref.actor.strategy=fsdp2 "
                                                          "actor_rollout_ref.actor.fsdp_config.offload_policy=True"))
                                      .scenario;
  CHECK(verl_offloaded.train.offload == Offload::layerwise);
  // Keys that were read over.
  const Scenario longer = read("policy.hf_config_overrides.max_position_embeddings=65536");
  CHECK(longer.model.max_position == 65536);
  const Scenario modules = read(
      "policy.megatron_cfg.enabled=true policy.megatron_cfg.activation_checkpointing=true "
      "policy.megatron_cfg.recompute_granularity=selective 'policy.megatron_cfg.recompute_modules=[core_attn,mlp]'");
  CHECK(modules.train.recompute == Recompute::selective);
  CHECK(modules.train.recompute_modules == "core_attn-mlp");
}

TEST_CASE("a launch of SFT is read as one, of PPO too, another one is refused by name") {
  const std::string base =
      "policy: {model_name: Qwen/Qwen3-8B, max_total_sequence_length: 4096, train_global_batch_size: 64, "
      "train_micro_batch_size: 2, sequence_packing: {enabled: true, train_mb_tokens: 8192}}\n"
      "cluster: {gpus_per_node: 8, num_nodes: 2}\n";
  const auto of = [&](const std::string& section) {
    return imported("nemo-rl", {.file = launch_file("nemo/task.yaml", section + base), .words = {}, .variables = {}});
  };
  const auto sft = of("sft: {max_num_steps: 60}\n");
  if (!sft) FAIL(render(sft.error()));
  const Scenario& s = sft->scenario;
  CHECK(s.algorithm.name == AlgorithmName::sft);
  CHECK(s.algorithm.prompts == 64);
  CHECK(s.algorithm.samples_per_prompt == 1);
  CHECK(s.workload.longest() == 4096);
  CHECK(s.workload.response_tokens.mean == 1365);  // a third of 4095
  CHECK(s.train.offload == Offload::none);
  // Samples beyond a config's positions are trained, and not rolled out.
  const LaunchSource longer{
      .file = launch_file("nemo/longer.yaml", "sft: {max_num_steps: 60}\n" + base),
      .words = {"policy.model_name=Qwen/Qwen2.5-Math-7B", "policy.max_total_sequence_length=16384",
                "policy.sequence_packing.train_mb_tokens=16384"},
      .variables = {}};
  CHECK(import_of("nemo-rl", longer).scenario.model.max_position == 16384);
  LaunchSource said = longer;  // where the launch says how many there are, too
  said.words.push_back("policy.hf_config_overrides.max_position_embeddings=8192");
  CHECK(import_of("nemo-rl", said).scenario.model.max_position == 16384);
  const LaunchSource rolled{
      .file = launch_file("nemo/rolled.yaml", base),
      .words = {"policy.model_name=Qwen/Qwen2.5-Math-7B", "policy.max_total_sequence_length=16384",
                "policy.sequence_packing.train_mb_tokens=16384"},
      .variables = {}};
  REQUIRE_FALSE(imported("nemo-rl", rolled).has_value());
  CHECK(imported("nemo-rl", rolled).error()[0].code == "E217");
  const auto ppo = of("ppo: {max_num_steps: 60, num_prompts_per_step: 16, num_generations_per_prompt: 8}\n");
  if (!ppo) FAIL(render(ppo.error()));
  CHECK(ppo->scenario.algorithm.name == AlgorithmName::ppo);
  CHECK(ppo->scenario.algorithm.prompts == 16);
  CHECK(ppo->scenario.algorithm.mini_batches == 2);
  const auto dpo = of("dpo: {max_num_steps: 60}\n");
  REQUIRE_FALSE(dpo.has_value());
  CHECK(dpo.error()[0].code == "E152");
  CHECK_THAT(dpo.error()[0].message, Catch::Contains("DPO"));
  const Scenario of_slime =
      import_of("slime", words("train_async.py --hf-checkpoint /root/Qwen3-4B-Base --loss-type sft_loss "
                               "--rollout-batch-size 128 --global-batch-size 128 --use-dynamic-batch-size "
                               "--max-tokens-per-gpu 9216 --debug-train-only"))
          .scenario;
  CHECK(of_slime.algorithm.name == AlgorithmName::sft);
  CHECK(of_slime.algorithm.prompts == 128);
  CHECK(of_slime.placement == PlacementMode::colocated);
}

TEST_CASE("lengths and clips that a launch gives for none: a mean never exceeds its longest, CISPO clips above alone") {
  // All of the cap for a prompt leaves one token: a third of what an assumed prompt leaves is more than that.
  const Scenario s = import_of("nemo-rl", words("run_grpo.py policy.model_name=Qwen/Qwen3-8B "
                                                "policy.max_total_sequence_length=2048 data.max_input_seq_length=2048 "
                                                "cluster.gpus_per_node=8"))
                         .scenario;
  CHECK(s.workload.response_tokens.max == 1);
  CHECK(s.workload.response_tokens.mean == 1);
  const Scenario cispo = import_of("verl", words(verl + dynamic +
                                                 "actor_rollout_ref.actor.clip_ratio_low=10 "
                                                 "actor_rollout_ref.actor.clip_ratio_high=0.2"))
                             .scenario;
  CHECK(cispo.algorithm.clip_low == 1);
  CHECK(cispo.algorithm.clip_high == 0.2);
}

TEST_CASE("verl: a vLLM engine in data-parallel groups has tp ranks of each, and its experts over all of them") {
  const Scenario s = import_of("verl", words(verl + dynamic +
                                             "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B "
                                             "actor_rollout_ref.rollout.tensor_model_parallel_size=2 "
                                             "actor_rollout_ref.rollout.data_parallel_size=4 "
                                             "actor_rollout_ref.rollout.expert_parallel_size=8"))
                         .scenario;
  CHECK(s.rollout.layout.tp == 8);
  CHECK(s.rollout.layout.attention_dp == 4);
  CHECK(s.rollout.layout.ep == 8);
  CHECK(s.rollout.layout.dp == 1);
  // Without experts, and under SGLang, they are engines of their own.
  for (const char* other : {"actor_rollout_ref.model.path=Qwen/Qwen2.5-7B",
                            "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B actor_rollout_ref.rollout.name=sglang"}) {
    const Scenario each = import_of("verl", words(verl + dynamic + other +
                                                  " actor_rollout_ref.rollout.tensor_model_parallel_size=2 "
                                                  "actor_rollout_ref.rollout.data_parallel_size=4"))
                              .scenario;
    CAPTURE(other);
    CHECK(each.rollout.layout.tp == 2);
    CHECK(each.rollout.layout.attention_dp == 1);
    CHECK(each.rollout.layout.dp == 4);
  }
}

TEST_CASE("what a launch says and a scenario does not: padding, expandable segments") {
  const std::string plain = verl + dynamic;
  const auto padding = [](const ImportedScenario& i) { return i.scenario.train.padding; };
  CHECK(padding(import_of("verl", words(plain))) == Padding::none);
  const ImportedScenario padded = import_of("verl", words(plain + "actor_rollout_ref.model.use_remove_padding=False"));
  CHECK(padding(padded) == Padding::micro_batch);
  CHECK(padded.expandable.empty());
  const std::string openrlhf =
      "train_ppo_ray.py --pretrain Qwen/Qwen2.5-7B --actor_num_gpus_per_node 8 --colocate_all_models "
      "--vllm_num_engines 8 --advantage_estimator group_norm --max_len 2048 ";
  CHECK(padding(import_of("openrlhf", words(openrlhf))) == Padding::micro_batch);
  CHECK(padding(import_of("openrlhf", words(openrlhf + "--packing_samples"))) == Padding::none);
  // A variable of the script, one in front of the command, a key of the workers' environment.
  const auto of_script = [&](const std::string& before, const std::string& after) {
    return import_of("verl", {.file = launch_file("run.sh", "set -x\n" + before + plain + after + "\n"),
                              .words = {},
                              .variables = {}})
        .expandable;
  };
  CHECK(of_script("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n", "") ==
        "expandable_segments:True (run.sh:2)");
  CHECK(of_script("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ", "") == "expandable_segments:True (run.sh:2)");
  CHECK(of_script("", "+ray_kwargs.ray_init.runtime_env.env_vars.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True") ==
        "expandable_segments:True (run.sh:2)");
  CHECK(of_script("export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128\n", "").empty());
}

TEST_CASE("Megatron and torchtitan: every sample is a sequence of the same length") {
  const Scenario m =
      import_of("megatron",
                words("torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
                      "--num-attention-heads 32 "
                      "--num-query-groups 8 --ffn-hidden-size 14336 --swiglu --untie-embeddings-and-output-weights "
                      "--vocab-size 128256 "
                      "--seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 128 "
                      "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 "
                      "--num-layers-per-virtual-pipeline-stage 4 --recompute-granularity selective "
                      "--recompute-modules core_attn mlp"))
          .scenario;
  CHECK(m.train.recompute == Recompute::selective);
  CHECK(m.train.recompute_modules == "core_attn-mlp");
  CHECK(m.algorithm.name == AlgorithmName::sft);
  CHECK(m.cluster.nodes == 2);
  CHECK(m.train.layout.dp == 2);
  CHECK(m.train.layout.vpp == 2);  // 32 layers / 4 stages / 4
  CHECK(m.workload.longest() == 8192);
  CHECK(m.train.micro_batch_tokens == 8192);
  CHECK(parameter_count(m.model) == 8030261248);  // Llama-3 8B: of the sizes alone
  const std::string toml =
      launch_file("llama3_8b.toml",
                  "[model]\nname = \"llama3\"\nflavor = \"8B\"\n[training]\nlocal_batch_size = 2\nseq_len = "
                  "4096\n[parallelism]\ntensor_parallel_degree = 2\n[activation_checkpoint]\nmode = \"full\"\n");
  const Scenario t =
      import_of("torchtitan", {.file = toml, .words = {"--training.seq_len", "2048"}, .variables = {}}).scenario;
  CHECK(t.model.name == "llama-3.1-8b");
  CHECK(t.train.layout.tp == 2);
  CHECK(t.algorithm.prompts == 8);  // 4 data ranks x 2
  CHECK(t.workload.longest() == 2048);
  CHECK(t.train.recompute == Recompute::full);
  const Scenario d =
      import_of("torchtitan",
                words("torchrun --nproc_per_node 4 -m torchtitan.train --model.name llama3 --model.flavor 8B"))
          .scenario;
  CHECK(d.workload.longest() == 2048);  // its defaults: seq_len, local_batch_size on 4 data ranks, selective
  CHECK(d.algorithm.prompts == 32);
  CHECK(d.train.recompute == Recompute::selective);
}

TEST_CASE("adapters are read by each system's names, and what is not switched on is not there") {
  const std::string verl =
      "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct "
      "data.train_batch_size=256 actor_rollout_ref.actor.use_dynamic_bsz=True ";
  const auto lora = [](const std::string& system, const std::string& words) {
    return import_of(system, {.file = {}, .words = words_of(words), .variables = {}}).scenario.model.lora;
  };
  CHECK_FALSE(lora("verl", verl).on());
  const LoraSpec peft = lora(
      "verl", verl + "actor_rollout_ref.model.lora_rank=64 'actor_rollout_ref.model.target_modules=[v_proj, q_proj]'");
  CHECK((peft.rank == 64 && peft.alpha == 16.0 && peft.targets == "q_proj-v_proj"));  // 16: the release's default
  // FSDP's keys are nothing to Megatron, and Megatron's nothing to FSDP.
  const std::string megatron = verl + "model_engine=megatron ";
  CHECK_FALSE(lora("verl", megatron + "actor_rollout_ref.model.lora_rank=64").on());
  CHECK_FALSE(lora("verl", verl + "actor_rollout_ref.model.lora.rank=64").on());
  const LoraSpec fused = lora("verl", megatron +
                                          "actor_rollout_ref.model.lora.rank=32 "
                                          "'actor_rollout_ref.model.lora.target_modules=[linear_qkv,linear_fc2]'");
  CHECK((fused.rank == 32 && fused.alpha == 32.0 && fused.targets == "q_proj-k_proj-v_proj-down_proj"));
  CHECK(lora("verl", megatron + "actor_rollout_ref.model.lora.rank=32").targets == "all-linear");
  // Modules of another attention's match nothing of a model with latents, as the list that is the default has them.
  const LoraSpec latents = lora("verl", megatron +
                                            "actor_rollout_ref.model.path=deepseek-ai/DeepSeek-V2-Lite "
                                            "actor_rollout_ref.model.lora.rank=32 "
                                            "'actor_rollout_ref.model.lora.target_modules=[linear_qkv,linear_proj]'");
  CHECK((latents.rank == 32 && latents.targets == "o_proj"));
  const std::string nemo = "run_grpo.py policy.model_name=Qwen/Qwen3-8B policy.max_total_sequence_length=2048 ";
  CHECK_FALSE(lora("nemo-rl", nemo + "policy.dtensor_cfg.lora_cfg.dim=64").on());
  const LoraSpec dtensor =
      lora("nemo-rl", nemo + "policy.dtensor_cfg.lora_cfg.enabled=true policy.dtensor_cfg.lora_cfg.dim=64");
  CHECK((dtensor.rank == 64 && dtensor.alpha == 32.0 && dtensor.targets == "all-linear"));
  const std::string bridge = nemo + "policy.megatron_cfg.enabled=true policy.megatron_cfg.peft.enabled=true ";
  CHECK(lora("nemo-rl", bridge).rank == 8);
  CHECK(lora("nemo-rl", bridge + "'policy.megatron_cfg.peft.target_modules=[linear_proj]'").targets == "o_proj");
  const LoraSpec openrlhf =
      lora("openrlhf",
           "train_ppo_ray.py --pretrain Qwen/Qwen3-8B --actor_num_gpus_per_node 8 --colocate_all_models "
           "--vllm_num_engines 4 --vllm_tensor_parallel_size 2 --lora_rank 16 --target_modules q_proj v_proj");
  CHECK((openrlhf.rank == 16 && openrlhf.targets == "q_proj-v_proj"));
  // What a matrix is called nowhere stands at the launch's line.
  const auto wrong =
      imported("verl", {.file = launch_file("lora.sh", verl + "\\\n  actor_rollout_ref.model.lora_rank=4 \\\n  "
                                                              "actor_rollout_ref.model.target_modules=[qkv]\n"),
                        .words = {},
                        .variables = {}});
  REQUIRE_FALSE(wrong);
  CHECK(wrong.error()[0].code == "E232");
  CHECK(wrong.error()[0].where.line == 3);
}

TEST_CASE("sizes that have no role are not left out of a model in silence") {
  const std::string sizes =
      "python3 train.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --swiglu --vocab-size 32000 "
      "--num-experts 8 "
      "--moe-ffn-hidden-size 256 --colocate --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 "
      "--rollout-max-response-len 4096 --sglang-mem-fraction-static 0.7 ";
  CHECK(import_of("slime", words(sizes)).scenario.model.moe->experts == 8);
  for (const char* more : {"--multi-latent-attention", "--moe-shared-expert-intermediate-size 256"}) {
    const auto i = imported("slime", words(sizes + more));
    REQUIRE(!i);
    CHECK(i.error()[0].code == "E153");
  }
}

TEST_CASE("sizes have Megatron's rotary base and epsilon where a launch gives none, and Qwen2's biases where it asks") {
  const std::string sizes =
      "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --swiglu "
      "--vocab-size 32000 --seq-length 4096 --micro-batch-size 1 --global-batch-size 64 ";
  const auto model = [&](const std::string& more) { return import_of("megatron", words(sizes + more)).scenario.model; };
  const ModelSpec plain = model(""), said = model("--add-qkv-bias --rotary-base 1000000 --norm-epsilon 1e-6");
  CHECK(plain.rope_theta == 10000.0);
  CHECK(plain.norm_eps == 1e-5);
  CHECK_FALSE(plain.qkv_bias);
  CHECK(said.rope_theta == 1e6);
  CHECK(said.norm_eps == 1e-6);
  CHECK((said.qkv_bias && !said.o_bias));
}

TEST_CASE("a key given twice under two names that differ is an error at its place") {
  const std::string file = launch_file(
      "twice.sh", verl + dynamic + "\\\n  actor_rollout_ref.actor.strategy=fsdp2 \\\n  model_engine=megatron\n");
  const auto i = imported("verl", {.file = file, .words = {}, .variables = {}});
  REQUIRE(!i);
  CHECK(i.error()[0].code == "E151");
  CHECK(i.error()[0].where.line == 3);
}

TEST_CASE("batches that do not divide are an error that says what is counted") {
  const auto v = imported("verl", words(verl + dynamic + "actor_rollout_ref.actor.ppo_mini_batch_size=24"));
  REQUIRE(!v);
  CHECK(v.error()[0].code == "E151");
  CHECK_THAT(v.error()[0].help, Catch::Contains("counts prompts"));
  const auto s = imported("slime", words(slime + "--global-batch-size 96"));
  REQUIRE(!s);
  CHECK_THAT(s.error()[0].help, Catch::Contains("counts samples"));
}

TEST_CASE("what a scenario's rules refuse stands at the launch's line") {
  const std::string file =
      launch_file("heads.sh", verl + dynamic + "\\\n  actor_rollout_ref.rollout.tensor_model_parallel_size=3\n");
  const auto i = imported("verl", {.file = file, .words = {}, .variables = {}},
                          {"rollout.layout.dp=2", "cluster.gpus_per_node=6"});
  REQUIRE(!i);
  CHECK(i.error()[0].code == "E211");
  CHECK(i.error()[0].where.file == file);
  CHECK(i.error()[0].where.line == 2);
}

TEST_CASE("variables that nothing sets are named, and the default stands; the end of a model's path is enough") {
  const std::string file = launch_file(
      "undefined.sh", verl + dynamic +
                          "actor_rollout_ref.model.path=$HOME/models/Qwen2.5-7B \\\n  "
                          "actor_rollout_ref.rollout.gpu_memory_utilization=$MEM trainer.project_name=$USER\n");
  const ImportedScenario i = import_of("verl", {.file = file, .words = {}, .variables = {}});
  CHECK(i.undefined == std::vector<std::string>{"$MEM"});
  CHECK(i.scenario.rollout.memory_fraction == 0.5);
  CHECK(i.scenario.model.name == "qwen2.5-7b");
  CHECK(
      import_of("verl", {.file = file, .words = {}, .variables = {{"MEM", "0.75"}}}).scenario.rollout.memory_fraction ==
      0.75);
}

TEST_CASE("a sentence in the model's place is none: the launch's name says it, where it says one") {
  const std::string recipe =
      "policy:\n  model_name: Follow the instructions of the guide\n  max_total_sequence_length: 2048\n";
  const auto read = [&](const std::string& file) {
    return imported("nemo-rl", {.file = launch_file(file, recipe), .words = {}, .variables = {}});
  };
  const auto named = read("grpo-llama-3.1-8b-32n8g.yaml");
  if (!named) FAIL(render(named.error()));
  CHECK(named->scenario.model.name == "llama-3.1-8b");
  CHECK_THAT(named->text, Catch::Contains("by the launch's name"));
  const auto nameless = read("grpo-llama-3.1-8bit.yaml");  // no whole name
  REQUIRE_FALSE(nameless);
  CHECK(nameless.error()[0].code == "E153");
}

TEST_CASE("OpenRLHF: the cap of a release is nothing to a launch that gives both lengths") {
  const std::string launch =
      "train_ppo_ray.py --pretrain Qwen/Qwen2.5-7B --actor_num_gpus_per_node 8 --colocate_all_models "
      "--vllm_num_engines 8 --prompt_max_len 3000 --generate_max_len 4096 ";
  const Scenario both = import_of("openrlhf", words(launch)).scenario,
                 capped = import_of("openrlhf", words(launch + "--max_len 4096")).scenario;
  CHECK((both.workload.prompt_tokens.max == 3000 && both.workload.response_tokens.max == 4096));
  CHECK(both.workload.longest() == 7096);
  CHECK(capped.workload.longest() == 4096);
}

TEST_CASE("a model that nobody knows is asked for, and --set says it") {
  const auto i = imported("verl", words(verl + dynamic + "actor_rollout_ref.model.path=/models/mine"));
  REQUIRE(!i);
  CHECK(i.error()[0].code == "E153");
  const ImportedScenario set = import_of("verl", words(verl + dynamic + "actor_rollout_ref.model.path=/models/mine"),
                                         {"model=qwen3-8b", "cluster.gpu=h20"});
  CHECK(set.scenario.model.name == "qwen3-8b");
  CHECK(set.scenario.cluster.gpu.name == "h20-sxm-96gb");
  const ImportedScenario shallow = import_of("verl", words(verl + dynamic), {"model.num_hidden_layers=2"});
  CHECK(shallow.scenario.model.layers == 2);
}

TEST_CASE("the scenario says of each line where it comes from; what is left out may be a secret and is not shown") {
  const ImportedScenario i = import_of("slime", words(slime + "--wandb-key s3cr3t --such-a-flag 1"));
  CHECK_THAT(i.text, Catch::Contains("--rollout-batch-size 32"));
  CHECK_THAT(i.text, Catch::Contains("slime's default: --eps-clip 0.2"));
  CHECK_THAT(i.text, !Catch::Contains("s3cr3t"));
  CHECK(key_of(i, "such-a-flag")->fate == KeyFate::unknown);
  CHECK(key_of(i, "wandb-key")->fate == KeyFate::ignored);
}

TEST_CASE("a script without a launch, a value that is no number, a word that is not planned") {
  const auto none =
      imported("verl", {.file = launch_file("none.sh", "echo hello\nls -l\n"), .words = {}, .variables = {}});
  REQUIRE(!none);
  CHECK(none.error()[0].code == "E150");
  const auto text = imported("verl", words(verl + dynamic + "trainer.nnodes=many"));
  REQUIRE(!text);
  CHECK(text.error()[0].code == "E152");
  const auto word = imported("verl", words(verl + dynamic + "actor_rollout_ref.rollout.name=hf"));
  REQUIRE(!word);
  CHECK(word.error()[0].code == "E152");
}

}  // namespace hotbunk

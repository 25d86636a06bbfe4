"""Random scenarios that are legal and execute: every knob that changes the plan, the engine or the loss.

Drawn as nested dicts; JSON is YAML, so a scenario file is its dump.
"""
import copy
import json
import math

NUM_TASK_TOKENS = 15  # rl/tasks.h
WORLDS = (1, 2, 3, 4, 5, 6, 7, 8)
PLAIN = ("llama", "qwen2", "qwen3", "mistral", "gemma2")  # of one form; Qwen2 may become Mixtral or Qwen3-MoE
KINDS = PLAIN + ("gemma3_text", "phi3", "glm4_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "gpt2")
WINDOWED = ("mistral", "gemma2", "gemma3_text", "phi3", "gpt_oss")
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
           "mistral": "MistralForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
           "phi3": "Phi3ForCausalLM", "glm4_moe": "Glm4MoeForCausalLM", "gpt_oss": "GptOssForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM",
           "deepseek_v3": "DeepseekV3ForCausalLM", "gpt2": "GPT2LMHeadModel"}


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def whole_under(kv_heads, tp):
    return kv_heads % tp == 0 or tp % kv_heads == 0


def num_layers(model):
    return model.get("num_hidden_layers", model.get("n_layer"))


def num_experts(model):
    """Of a layer; 0 of a dense model."""
    return next((model[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in model), 0)


def has_router_bias(model):
    """Which no optimizer steps."""
    return model["model_type"] in ("deepseek_v3", "glm4_moe")


def tensor_parallel_sizes(scenario, world):
    """Sizes of one engine that a model allows and that divide a world."""
    m = scenario["model"]
    heads, width = m.get("num_attention_heads", m.get("n_head")), m.get("intermediate_size", m.get("n_inner"))
    cut = [heads, width, m.get("moe_intermediate_size", width)]
    if m["model_type"] == "gpt_oss":  # an engine's ranks each add their columns of the biases behind experts
        cut.append(m["hidden_size"])
    return [d for d in divisors(world) if all(n % d == 0 for n in cut) and whole_under(m.get("num_key_value_heads", heads), d)]


def draw_task(r):
    """The task, and the tokens of its prompt and answer (rl/tasks.cc)."""
    name = r.choice(["digit_sum", "sort", "reverse", "add", "parity"])
    digits = r.randint(1, 3)
    prompt = 2 * digits + 3 if name == "add" else digits + 2
    answer = {"digit_sum": len(str(9 * digits)) + 1, "add": digits + 2, "parity": 2}.get(name, digits + 1)
    return {"name": name, "digits": digits}, prompt, answer


def draw_cuts(r, world):
    """How training cuts layers and sequences: none of it in half the draws."""
    cuts = {"tp": 1, "cp": 1, "ulysses": 1, "pp": 1}
    for name in r.sample(sorted(cuts), len(cuts) if r.random() < 0.5 else 0):
        cuts[name] = r.choice(divisors(world // math.prod(cuts.values())))
    cuts["vpp"] = r.choice([1, 1, 2, 3]) if cuts["pp"] > 1 else 1
    return cuts


def draw_experts(r, sizes):
    """Of Mixtral or Qwen3-MoE; `sizes`: what cuts an expert's columns, or the experts."""
    unit = math.lcm(*sizes)
    experts = unit * r.randint(1, 3) if unit > 1 else r.randint(2, 6)
    taken = r.randint(1, experts)
    if r.random() < 0.5:
        return {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": experts,
                "num_experts_per_tok": taken, "intermediate_size": unit * r.randint(1, 12)}
    return {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": experts,
            "num_experts_per_tok": taken, "moe_intermediate_size": unit * r.randint(1, 12),
            "intermediate_size": unit * r.randint(1, 12), "norm_topk_prob": r.random() < 0.5, "decoder_sparse_step": 1}


def draw_grouped_experts(r, sizes, layers):
    """Of DeepSeek and GLM-4.5: experts in groups behind dense layers."""
    unit = math.lcm(*sizes)
    groups, each = r.choice([1, 2, 3]), r.randint(2, 4)
    experts = math.lcm(unit, groups) * each
    chosen_groups = r.randint(1, groups)
    return {"n_routed_experts": experts, "num_experts_per_tok": r.randint(1, min(8, chosen_groups * experts // groups)),
            "moe_intermediate_size": unit * r.randint(1, 12), "n_shared_experts": r.randint(0, 2),
            "first_k_dense_replace": r.randint(0, layers - 1), "n_group": groups, "topk_group": chosen_groups,
            "routed_scaling_factor": r.choice([1.0, 2.5])}


def draw_latents(r, kind, sizes, layers):
    """What DeepSeek-V2 and V3 have besides: latent attention, and experts in groups."""
    model = {"q_lora_rank": r.choice([None, r.randint(1, 20)]), "kv_lora_rank": r.randint(1, 20),
             "qk_nope_head_dim": r.randint(1, 9), "qk_rope_head_dim": 2 * r.randint(1, 4), "v_head_dim": r.randint(1, 11),
             **draw_grouped_experts(r, sizes, layers)}
    if kind == "deepseek_v2":
        model.update(topk_method="group_limited_greedy", norm_topk_prob=False)
    else:
        model["norm_topk_prob"] = r.random() < 0.5
    return model


def draw_gpt2(r, model):
    """The same sizes by GPT-2's names, of which a head's width is hidden size over heads."""
    heads, positions = model["num_attention_heads"], model["max_position_embeddings"]
    return {"model_type": "gpt2", "architectures": model["architectures"], "n_embd": heads * r.randint(1, 6),
            "n_layer": model["num_hidden_layers"], "n_head": heads, "n_inner": model["intermediate_size"],
            "n_positions": positions, "layer_norm_epsilon": 1e-5,
            **{k: model[k] for k in ("vocab_size", "tie_word_embeddings", "initializer_range", "bos_token_id", "eos_token_id")}}


def draw_model(r, tp, cuts, longest, kinds=KINDS):
    """Llama, Qwen2 (biases), Qwen3 (head norms), Mistral (a window), Gemma-2 and 3, Phi-3, GLM-4.5, gpt-oss, DeepSeek
    (latents), GPT-2 or one with experts, MHA to MQA, tied or not; sizes that divide nothing they need not. `tp`: of an engine."""
    kind = r.choice(kinds)
    sizes = [tp, cuts["tp"] * cuts["ulysses"], cuts["tp"]]
    unit = math.lcm(*sizes)
    heads = unit * r.randint(1, 4 if unit < 4 else 2)
    kv = r.choice([k for k in divisors(heads) if all(whole_under(k, n) for n in sizes)])
    model = {
        "model_type": kind, "architectures": [CLASSES[kind]],
        "hidden_size": r.randint(3, 48), "intermediate_size": unit * r.randint(1, 24 if unit < 4 else 4),
        "num_hidden_layers": cuts["pp"] * cuts["vpp"] + r.randint(0, 4),
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 2 * r.randint(1, 6),
        "vocab_size": r.choice([15, 16, 17, 33, 64, 150]), "max_position_embeddings": r.choice([longest, longest + 3, 128]),
        "rms_norm_eps": 1e-6, "rope_theta": r.choice([1e4, 1e6]), "tie_word_embeddings": r.random() < 0.5,
        "initializer_range": r.choice([0.02, 0.1, 0.3]), "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        return draw_gpt2(r, model)
    if kind.startswith("deepseek"):
        del model["head_dim"]
        model["num_key_value_heads"] = heads
        model.update(draw_latents(r, kind, sizes, model["num_hidden_layers"]))
    if kind in WINDOWED:
        model["sliding_window"] = r.choice([1, 3, max(1, longest // 2), longest + 3])
    if kind == "gemma2":
        model.update(query_pre_attn_scalar=r.choice([3, 16]), attn_logit_softcapping=r.choice([None, 2.0, 50.0]),
                     final_logit_softcapping=r.choice([None, 3.0, 30.0]))
    if kind == "gemma3_text":
        model.update(query_pre_attn_scalar=r.choice([3, 16]), rope_local_base_freq=r.choice([30.0, 1e4]),
                     sliding_window_pattern=r.randint(1, 3))
    if kind in ("phi3", "glm4_moe") and r.random() < 0.7:  # a part of a head turns, in pairs
        model.update(head_dim=4 * r.randint(1, 3), partial_rotary_factor=0.5)
    if kind == "glm4_moe":
        model.setdefault("partial_rotary_factor", 1.0)
        model.update(draw_grouped_experts(r, sizes, model["num_hidden_layers"]), use_qk_norm=r.random() < 0.5,
                     norm_topk_prob=r.random() < 0.5)
    if kind == "gpt_oss":
        experts = unit * r.randint(1, 3) if unit > 1 else r.randint(2, 6)
        model.update(num_local_experts=experts, num_experts_per_tok=r.randint(1, experts),
                     swiglu_limit=r.choice([0.3, 0.9, 7.0]), hidden_size=tp * r.randint(-(-3 // tp), max(1, 48 // tp)))
    if kind in ("llama", "qwen3", "glm4_moe"):
        model["attention_bias"] = r.random() < 0.25
    if kind != "phi3" and r.random() < 0.25:
        rope = {"rope_type": r.choice(["llama3", "linear", "yarn"]) if kind != "gemma3_text" else "linear",
                "factor": r.choice([2.0, 8.0])}
        if rope["rope_type"] != "linear":
            rope["original_max_position_embeddings"] = r.choice([8, 32])
        if rope["rope_type"] == "llama3":
            rope.update(low_freq_factor=1.0, high_freq_factor=4.0)
        model["rope_scaling"] = rope
    if kind == "qwen2" and r.random() < 0.6:
        model.update(draw_experts(r, sizes))
    return model


def draw_lengths(r, longest):
    mean = r.randint(1, longest)
    lengths = {"mean": mean, "max": longest, "distribution": r.choice(["fixed", "uniform", "lognormal"])}
    if lengths["distribution"] == "lognormal":
        lengths["cv"] = r.choice([0.1, 0.5, 2.0])
    return lengths


def draw_split(r, layers, cuts):
    """Layers of each chunk, at least one: a list, or Megatron's ways to say one where they divide."""
    stages, chunks = cuts["pp"], cuts["pp"] * cuts["vpp"]
    embedding, loss = r.random() < 0.5, r.random() < 0.5
    accounted = layers + embedding + loss
    if (embedding or loss) and accounted % chunks == 0 and accounted // chunks > 1:
        return {"account_for_embedding_in_pipeline_split": embedding, "account_for_loss_in_pipeline_split": loss}
    last = r.randint(1, layers)
    if cuts["vpp"] == 1 and layers > last and (layers - last) % (stages - 1) == 0:
        return {"num_layers_in_last_pipeline_stage": last}
    ends = sorted(r.sample(range(1, layers), chunks - 1)) + [layers]
    return {"pipeline_split": [end - begin for begin, end in zip([0] + ends, ends)]}


def draw_order(r):
    """Any order of the ranks, Ulysses' behind cp or apart."""
    axes = ["tp", "cp", "ep", "dp", "pp"] + ["ulysses"] * r.randint(0, 1)
    r.shuffle(axes)
    return "-".join(axes)


def draw_experts_mesh(r, model, layout, data_ranks, shards):
    """Any etp that divides the ranks and an expert's columns, and any ep of those that divide the experts and the ranks;
    sequence parallelism where a block of ranks needs tokens of its own (spec/expert_mesh.h)."""
    tp, meshes = layout["tp"], []
    columns = model.get("moe_intermediate_size", model["intermediate_size"])
    if model["model_type"] == "gpt_oss":  # as in an engine
        columns = math.gcd(columns, model["hidden_size"])
    for etp in divisors(math.gcd(columns, data_ranks * tp)):
        for ep in divisors(math.gcd(num_experts(model), data_ranks * tp // etp)):
            places = math.gcd(tp, etp * ep)
            spread = etp * ep // places
            if shards == 1 or shards % spread == 0:
                apart = places < tp or spread > 1
                meshes.append({"etp": etp, "ep": ep, "sp": apart and (places < tp or places > math.gcd(tp, etp))})
    mesh = r.choice(meshes)
    return mesh if mesh.pop("sp") is False else mesh | {"sp": True}


def draw_part_that_trains(r, model):
    """Adapters, or patterns of what does not train; nothing in half the draws."""
    kind, experts = model["model_type"], num_experts(model) > 0
    whole = kind in ("gpt2", "glm4_moe") or kind.startswith("deepseek")  # is trained whole, or not but for its adapters
    if kind != "phi3" and r.random() < 0.25:  # whose modules are several matrices
        some = ["q_proj", "v_proj", "o_proj"]
        if kind == "gpt2":
            some = r.choice([["c_attn"], ["c_fc", "c_proj"]])
        elif kind.startswith("deepseek"):
            some = ["q_a_proj" if model["q_lora_rank"] else "q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
        return {"lora": {"rank": r.randint(1, 9), "alpha": r.choice([1, 4, 16]),
                         "targets": some if r.random() < 0.5 else "all-linear"}}
    if not whole and r.random() < 0.33:
        return {"frozen": r.choice([["model.embed_tokens.*"], ["*.self_attn.*"], ["model.layers.0.*", "model.norm.weight"],
                                    ["*experts*"] if experts else ["*.mlp.*"]])}
    return {}


def draw_shards(r, engine, layout, data_ranks, experts):
    """Shard groups of some of the data ranks' dimensions, in the layout; units that few ranks of a group keep among them.
    Where experts are spread over data ranks these have to be in one group, and the few have the same ones."""
    spread = layout["etp"] * layout["ep"] // math.gcd(layout["tp"], layout["etp"] * layout["ep"]) if experts else 1
    if engine != "ddp" and r.random() < 0.2:
        named = r.choice([["dp"], ["cp"], ["ulysses"], ["dp", "cp"], ["ulysses", "dp"]])
        ranks = math.prod(layout[axis] for axis in named)
        if ranks == 1 or ranks % spread == 0:
            layout.update(fsdp=-1, shard_over=named)
            return {}
    if engine == "fsdp2" and r.random() < 0.3:
        group = data_ranks if layout["fsdp"] == -1 else layout["fsdp"]
        few = [n for n in divisors(group) if 1 < n < group and group % (n * spread) == 0]
        return {"reshard_after_forward": r.choice([True] + few)}
    return {}


def draw_train(r, world, cuts, model, longest):
    data_ranks = world // cuts["tp"] // cuts["pp"]
    sp = cuts["tp"] > 1 and r.random() < 0.5
    engine = r.choice(["fsdp2", "fsdp2", "ddp", "zero1", "zero2"])
    flat = not has_router_bias(model) and r.random() < (0.35 if cuts["tp"] * cuts["pp"] == 1 else 0.2)  # units
    engine = "fsdp1" if flat else engine
    micro = math.lcm(cuts["tp"], cuts["ulysses"]) * (longest + r.randint(0, 120))
    layout = {"dp": data_ranks // cuts["ulysses"] // cuts["cp"], "fsdp": r.choice([-1, data_ranks] + divisors(data_ranks)), **cuts,
              "sp": sp}
    if num_experts(model):
        shards = 1 if engine == "ddp" else data_ranks if layout["fsdp"] == -1 else layout["fsdp"]
        layout.update(draw_experts_mesh(r, model, layout, data_ranks, shards))
    train = {"engine": engine, "layout": layout,
             "context_exchange": r.choice(["auto", "ring", "all-gather"]), "micro_batch_tokens": micro, "recompute": r.choice(["none", "selective", "full"]),
             "precision": {"params": r.choice(["fp32", "fp32", "bf16"])}, "offload": r.choice(["none", "sleep"]),
             "reshard_after_forward": r.random() < 0.5, "prefetch": r.randint(0, 1),
             "loss_chunk_tokens": r.choice([0, 0, r.randint(1, micro + 3)])}
    if num_experts(model):
        train["router_aux_loss_coef"], train["router_z_loss_coef"] = r.choice([(0, 0), (0.1, 0), (0.3, 0.01)])
    if flat:
        train.update(wrap=r.choice([
            {"policy": "layer"}, {"policy": "size", "min_parameters": r.choice([1, 200, 1000, 5000, 100000])},
            {"policy": "names", "names": r.choice([["transformer.h.0*"], ["*.wte", "*.attn"]]) if model["model_type"] == "gpt2"
             else [r.choice(["model.layers.0*", "*embed*"]), "*.self_attn"]}]))
    train.update(draw_shards(r, engine, layout, data_ranks, num_experts(model) > 0))
    train.update(draw_part_that_trains(r, model))
    if r.random() < 0.3:
        layout["order"] = draw_order(r)
    if cuts["pp"] > 1:
        train.update(draw_split(r, num_layers(model), cuts))
        train["pipeline_schedule"] = r.choice(["1f1b", "1f1b", "gpipe", "zero-bubble"] + ["interleaved"] * (cuts["vpp"] > 1))
    elif layout["dp"] == world and r.random() < 0.5:
        layout["dp"] = "auto"
    return train


def draw_engine(r, world, tp, model):
    """How the ranks of an engine of so many tensor-parallel ones share a model: alone, in stages, each with its part of
    every sequence, with whole experts or columns of some, or with groups that have sequences of their own."""
    layout = {"tp": tp, "order": r.choice(["contiguous", "strided", "auto"])}
    engines = world // tp
    if tp > 1 and num_experts(model) > 0 and r.random() < 0.5:
        layout["ep"] = r.choice(divisors(math.gcd(tp, num_experts(model))))
    if tp > 1 and r.random() < 0.2:
        layout["attention_dp"] = r.choice(divisors(tp))
    if r.random() < 0.5:
        layout["pp"] = r.choice([d for d in divisors(engines) if num_layers(model) % d == 0])
        layout["cp"] = r.choice(divisors(engines // layout["pp"]))
        engines //= layout["pp"] * layout["cp"]
    return layout | {"dp": engines}


def draw_rollout(r, world, tp, prompt, longest, model):
    block, layout, vocab = r.randint(1, 8), draw_engine(r, world, tp, model), model["vocab_size"]
    span = block * layout.get("cp", 1)
    pool = r.choice([0, (longest + span + r.randint(0, 60)) * layout.get("attention_dp", 1)])
    return {"engine": "hotbunk", "layout": layout, "dtype": r.choice(["fp32", "fp32", "bf16"]),
            "memory_fraction": r.choice([0.3, 0.5, 0.9]),
            "max_running_requests": r.choice([1, 2, 3, 7, 20, 64]) * layout.get("attention_dp", 1),
            "max_prefill_tokens": prompt + r.choice([0, 1, 5, 40]),
            "block_tokens": block, "kv_cache_tokens": pool, "temperature": r.choice([0, 0.5, 1, 1, 1.7]),
            "top_p": r.choice([1, 1, 0.5, 0.9]), "top_k": r.choice([0, 0, 1, 3, vocab, vocab + 5]),
            "sleep": r.random() < 0.75, "sleep_level": r.randint(1, 2)}


def merged(r, *rows):
    """One list of all, each row in its own order."""
    rows, out = [list(row) for row in rows if row], []
    while rows:
        row = r.choice(rows)
        out.append(row.pop(0))
        rows = [x for x in rows if x]
    return out


def draw_transition(r, scenario):
    """A system's order, or a list of steps that is legal by how it is made: what sleeps on one side is woken on it."""
    if r.random() < 0.5:
        return r.choice(["hotbunk", "hotbunk", "slime", "verl", "verl-old"])
    algorithm, down, up, passes = scenario["algorithm"], [], [], []
    if scenario["train"]["offload"] == "sleep":
        apart = ["sleep_moments", "sleep_reference"] if algorithm["reference"] else ["sleep_moments"]
        down = r.choice([["sleep_optimizer"], merged(r, *[[x] for x in apart]), []])
        if not down or r.random() < 0.7:
            down = merged(r, down, ["sleep_train"])
        if "sleep_train" in down and algorithm["old_logprobs"] and r.random() < 0.5:
            passes = ["wake_params", "old_logprobs"]
        up = passes + (["wake_train"] if len(down) > 1 or not passes else [])
    towards, back = ["sync", "rollout"], []
    if scenario["rollout"]["sleep"]:
        towards = ["wake_rollout", "sync", "wake_kv", "rollout"]
        back = r.choice([["sleep_rollout"], merged(r, ["sleep_kv"], ["sleep_weights"])])
    if r.random() < 0.3:
        towards.insert(towards.index("rollout"), "flush")
    split = towards.index("rollout")
    return merged(r, down, towards[:split]) + ["rollout"] + merged(r, back, up)


def draw_algorithm(r, sft):
    samples = r.randint(1, 4)
    batches = 1 if r.random() < 0.6 else r.choice([samples, 2 * samples])
    if sft:
        prompts = batches * r.randint(1, 4)
        return {"name": "sft", "prompts": prompts, "mini_batches": batches}
    prompts = r.randint(1, 8)
    if prompts * samples % batches:
        batches = samples
    reference = r.random() < 0.5
    return {"name": "grpo", "prompts": prompts, "samples_per_prompt": samples, "mini_batches": batches,
            "reference": reference, "kl_coef": r.choice([0, 0.03]) if reference else 0, "old_logprobs": r.random() < 0.5,
            "clip_low": r.choice([0.1, 0.2]), "clip_high": r.choice([0.2, 0.28]), "normalize_std": r.random() < 0.5}


def sft_data(r, scenario):
    """Lines of task.data: both forms, blank lines between them."""
    longest = scenario["workload"]["prompt_tokens"]["max"] + scenario["workload"]["response_tokens"]["max"]
    lines = []
    for _ in range(r.randint(1, 12)):
        tokens = [r.randrange(scenario["model"]["vocab_size"]) for _ in range(r.randint(2, longest))]
        lines.append(json.dumps(tokens) if r.random() < 0.4 or len(tokens) < 3 else
                     json.dumps({"tokens": tokens, "prompt_length": r.randint(1, len(tokens) - 1)}))
        if r.random() < 0.1:
            lines.append("")
    return "\n".join(lines) + "\n"


def draw_cluster(r, world, one_host):
    """The ranks as devices that ranks share, on one node or, where nothing needs one host, on two."""
    shared = r.choice(divisors(world))
    devices = world // shared
    nodes = 2 if not one_host and devices % 2 == 0 and r.random() < 0.3 else 1
    return {"gpu": "local-cpu", "nodes": nodes, "gpus_per_node": devices // nodes, "ranks_per_device": shared,
            "device_memory_mib": 64}


def num_ranks(scenario):
    c = scenario["cluster"]
    return c["nodes"] * c["gpus_per_node"] * c["ranks_per_device"]


def draw_scenario(r, worlds=WORLDS, sft_share=0.2, steps=2, kinds=KINDS):
    """A scenario; with sft its task.data is "data.jsonl", which the caller writes beside it (sft_data)."""
    world = r.choice(worlds)
    tp, cuts = r.choice(divisors(world)), draw_cuts(r, world)
    task, task_prompt, answer = draw_task(r)
    prompt, response = task_prompt + r.choice([0, 0, 3]), answer + r.choice([0, 0, 1, 6])
    longest = prompt + response
    sft, model = r.random() < sft_share, draw_model(r, tp, cuts, longest, kinds)
    s = {"name": "drawn", "seed": r.randrange(1 << 40), "steps": steps, "checkpoint_every": r.choice([0, 0, 1, 2]),
         "model": model, "train": draw_train(r, world, cuts, model, longest),
         "optimizer": {"lr": r.choice([0, 1e-4, 1e-3, 1e-2]), "beta1": r.choice([0.9, 0.5]),
                       "beta2": r.choice([0.99, 0.999]), "eps": r.choice([1e-8, 1e-5]),
                       "weight_decay": r.choice([0, 0.01]), "max_grad_norm": r.choice([0, 0.5, 1]),
                       "warmup_steps": r.choice([0, 3])}}
    transport = r.choice(["ipc", "collective"])
    s["cluster"] = draw_cluster(r, world, one_host=sft or transport == "ipc")
    s["algorithm"] = draw_algorithm(r, sft)
    s["workload"] = {"prompt_tokens": draw_lengths(r, prompt), "response_tokens": draw_lengths(r, response)}
    if sft:
        s["task"] = {"data": "data.jsonl"}
        return s
    s["rollout"] = draw_rollout(r, world, tp, prompt, longest, s["model"])
    s["sync"] = {"mode": "bucketed", "bucket_mib": r.choice([0.002, 0.008, 0.5, 512]),
                 "transport": transport, "verify": r.random() < 0.5}
    # Adapters: where the model is awake for its reference.
    s["transition"] = "hotbunk" if "lora" in s["train"] else draw_transition(r, s)
    kept = s["rollout"]["sleep_level"] == 1 or not s["rollout"]["sleep"]
    s["sync"]["every"] = r.choice([1, 1, 1, 2, 3]) if kept else 1
    s["task"] = task
    return s


def with_world(r, scenario, world):
    """The same job on another number of ranks and another engine size: what it computes is promised to stay (P3)."""
    s = copy.deepcopy(scenario)
    s["cluster"].update(nodes=1, gpus_per_node=1, ranks_per_device=world)
    s["train"]["layout"] = {"dp": world}
    for key in [k for k in s["train"] if k.startswith(("pipeline_", "account_for_", "num_layers_in_"))]:
        del s["train"][key]
    if "rollout" in s:
        tp = r.choice(tensor_parallel_sizes(s, world))
        s["rollout"]["layout"] = {"tp": tp, "dp": world // tp, "order": s["rollout"]["layout"]["order"]}
        s["sync"]["verify"] = True
    return s


def small_job(r, worlds=(2, 3, 4), steps=100000, checkpoint_every=0, kinds=KINDS):
    """A job that is known to run long: for blows from outside."""
    s = draw_scenario(r, worlds=worlds, sft_share=0.15, steps=steps, kinds=kinds)
    s["checkpoint_every"] = checkpoint_every
    s["optimizer"].update(lr=1e-4, max_grad_norm=1)
    s["train"]["precision"] = {"params": "fp32"}
    s["train"].pop("lora", None)  # its checkpoints are adapters, which other parts do not look for
    if "sync" in s:
        s["sync"]["every"] = 1  # a run that goes on synchronises first: another run where that is between two syncs
    s["cluster"].update(nodes=1, gpus_per_node=1, ranks_per_device=num_ranks(s), device_memory_mib=64)
    return s

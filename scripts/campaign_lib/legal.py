"""Random legal scenarios, checked: what ran equals what was simulated, twice the same, and the same on other worlds."""
import json
import math

from campaign_lib import draw
from campaign_lib.outcome import Outcome
from campaign_lib.program import manners

NAME, WHAT = "scenarios", "random legal scenarios, run with --check"
PAGE = 4096


def skip_reason(_hotbunk):
    return ""


def write(place, r, scenario, name="scenario.yaml"):
    if scenario["algorithm"]["name"] == "sft" and not place.path("data.jsonl").exists():
        place.write("data.jsonl", draw.sft_data(r, scenario))
    return place.write(name, json.dumps(scenario, indent=1))


def final_weights(folder):
    final = folder / "checkpoints/final"
    adapter = final / "adapter_model.safetensors"
    return (adapter if adapter.exists() else final / "model.safetensors").read_bytes()


def result_of(folder):
    """All of a run that P7 holds: weights, tokens, lengths, bytes, metrics; never times."""
    summary = json.loads((folder / "summary.json").read_text())
    metrics = [{k: v for k, v in line.items() if not k.startswith(("timing_s/", "perf/throughput"))}
               for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]
    lengths = folder / "lengths.jsonl"
    return {"weights": final_weights(folder), "memory": summary["memory"], "traffic": summary["traffic"],
            "metrics": metrics, "plan": summary["plan_hash"],
            "lengths": lengths.read_text() if lengths.exists() else ""}


def run_checked(outcome, place, scenario_file, out, *more):
    """Runs with --check; the folder, or None with the fault noted."""
    done = place.run("run", scenario_file, "--check", "--json", "--out", place.path(out), *more, seconds=180)
    outcome.count("runs")
    outcome.faults += manners(done)
    if not outcome.expect(done.code == 0, f"run {out}: exit {done.code}: {done.said()}"):
        return None
    summary = json.loads(done.out)
    outcome.expect(summary.get("equal") is True, f"run {out}: simulated and measured differ: {done.said()}")
    return place.path(out)


def tight_memory(outcome, place, r, scenario):
    """The device is given just what the plan maps, to the page: it runs; a page less is refused with exit 1."""
    pooled = "rollout" not in scenario or scenario["rollout"]["kv_cache_tokens"] > 0
    if not pooled or r.random() < 0.5:
        return
    if scenario["train"].get("context_exchange") == "auto":  # with less memory the other one may fit
        scenario["train"]["context_exchange"] = r.choice(["ring", "all-gather"])
    done = place.run("plan", write(place, r, scenario), "--json")
    if not outcome.expect(done.code == 0, f"plan: exit {done.code}: {done.said()}"):
        return
    mapped = json.loads(done.out)["mapped_peak_bytes"]
    scenario["cluster"]["device_memory_mib"] = mapped / (1 << 20)
    if "rollout" in scenario:
        scenario["rollout"]["memory_fraction"] = 1
    less = json.loads(json.dumps(scenario))
    less["cluster"]["device_memory_mib"] = (mapped - PAGE) / (1 << 20)
    refused = place.run("run", write(place, r, less, "less.yaml"), "--out", place.path("less"))
    outcome.expect(refused.code == 1 and "E301" in refused.err,
                   f"a page less than the plan maps: exit {refused.code}: {refused.said()}")
    outcome.count("tight")


def close(a, b, tolerance):
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


def sampled_tokens(folder):
    """Of the first step, by sample; none of supervised fine-tuning."""
    file = folder / "samples.jsonl"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else []
    return {line["sample"]: line["tokens"] for line in lines if line["step"] == 1}


def same_numerics(outcome, first, other, what):
    """P3: the first step's tokens, reward, loss and gradient, before two optimizers' rounding can part the runs."""
    a, b = result_of(first), result_of(other)
    outcome.expect(a["lengths"].split("\n")[0] == b["lengths"].split("\n")[0], f"{what}: other lengths in step 1")
    outcome.expect(sampled_tokens(first) == sampled_tokens(other), f"{what}: other tokens in step 1")
    x, y = a["metrics"][0], b["metrics"][0]
    for key, tolerance in (("reward", 1e-6), ("loss", 1e-4), ("actor/grad_norm", 1e-3), ("actor/entropy", 1e-3)):
        if key in x or key in y:
            outcome.expect(key in x and key in y and close(x[key], y[key], tolerance),
                           f"{what}: {key} of step 1 is {x.get(key)} and {y.get(key)}")
    outcome.count("worlds compared")


def attempt(place, r):
    outcome = Outcome()
    scenario = draw.draw_scenario(r, steps=r.choice([1, 2, 2, 3]))
    tight_memory(outcome, place, r, scenario)
    file = write(place, r, scenario)
    options = ["--threads", r.randint(1, 3), "--trace-steps", r.randint(0, 3)]
    first = run_checked(outcome, place, file, "first", *options)
    outcome.figures["world"] = draw.num_ranks(scenario)
    if first is None:
        return outcome
    collective = scenario.get("sync", {}).get("transport", "collective") == "collective"
    if r.random() < 0.3:  # P7, over the other transport where the scenario allows it
        other = ["--transport", "gloo"] if collective and r.random() < 0.5 else []
        second = run_checked(outcome, place, file, "second", *options, *other)
        if second:
            a, b = result_of(first), result_of(second)
            outcome.faults += [f"a second run has other {key}" for key in a if a[key] != b[key]]
            outcome.count("gloo compared" if other else "repeats compared")
    exact = scenario["train"]["precision"]["params"] == "fp32" and scenario.get("rollout", {}).get("dtype", "fp32") == "fp32"
    if exact and scenario["algorithm"]["mini_batches"] == 1 and r.random() < 0.6:
        world = r.choice([w for w in draw.WORLDS if w != draw.num_ranks(scenario)])
        moved = draw.with_world(r, scenario, world)
        moved["cluster"]["device_memory_mib"] = 64
        other = run_checked(outcome, place, write(place, r, moved, "moved.yaml"), "moved", *options)
        if other:
            same_numerics(outcome, first, other, f"{scenario['cluster']['ranks_per_device']} and {world} ranks")
    if r.random() < 0.25:
        compared = place.run("compare", first)
        outcome.expect(compared.code == 0, f"compare: exit {compared.code}: {compared.said()}")
        reported = place.run("report", first)
        outcome.expect(reported.code == 0, f"report: exit {reported.code}: {reported.said()}")
    outcome.faults += place.left_behind()
    return outcome

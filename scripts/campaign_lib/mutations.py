"""Every reader of outside input, given files that were changed: no crash, no hang, no flood, always a word about it."""
import json
import os
import random
import shutil

from campaign_lib import draw, legal
from campaign_lib.mutate import mutated
from campaign_lib.outcome import Outcome
from campaign_lib.program import MIB, Place, manners

NAME, WHAT = "mutations", "mutated inputs of every reader, under limits of time and memory"
INPUTS_PER_ATTEMPT = 20
STRANGE_SHARE = 0.08  # of inputs that are no file, too large, or larger than they look
SECONDS, ADDRESS_BYTES, RESIDENT_BYTES = 30.0, 16 << 30, 1536 * MIB


def skip_reason(_hotbunk):
    return ""


def first_files(place):
    """What a job of one rank reads and writes, made once per campaign beside the attempts; {"name": path}."""
    home = place.folder.parent / "inputs"
    if (home / "whole").exists():
        return home
    shutil.rmtree(home, ignore_errors=True)
    r, maker = random.Random(0), Place(place.hotbunk, home, place.patience)
    scenario = draw.draw_scenario(r, worlds=(1,), sft_share=0, kinds=("qwen3",))
    scenario.update(steps=2, checkpoint_every=0)
    scenario["train"].pop("lora", None)  # what it writes is a whole model
    scenario["model"].update(model_type="qwen3", architectures=["Qwen3ForCausalLM"], max_position_embeddings=64,
                             rope_scaling={"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0,
                                           "high_freq_factor": 4.0, "original_max_position_embeddings": 32})
    scenario["cluster"]["device_memory_mib"] = 64
    job = legal.write(maker, r, scenario, "job.yaml")
    sft = {**scenario, "algorithm": {"name": "sft", "prompts": 2}, "task": {"data": "data.jsonl"}}
    legal.write(maker, r, sft, "sft.yaml")
    maker.write("tokens.jsonl", "[1, 5, 6, 3]\n\n[1, 7]\n")
    for command in (["plan", job, "--resolved"], ["plan", job, "--out", home / "plan.json"],
                    ["run", job, "--out", home / "run"], ["calibrate", job, "--out", home / "cal.yaml"]):
        done = maker.run(*command)
        if done.code != 0:
            raise RuntimeError(f"{command}: {done.said()}")
        if "--resolved" in command:
            maker.write("resolved.yaml", done.out)
    shutil.copytree(home / "run/checkpoints/final", home / "model")
    published = place.published
    shutil.copytree(published, home / "published")
    maker.write("whole", "")
    return home


# reader: (file changed, commands that read it; {home} holds the rest, {file} the changed one, {folder} its folder)
READERS = {
    "scenario": ("job.yaml", [["plan", "{file}"], ["plan", "{file}", "--json"], ["simulate", "{file}"],
                              ["explain", "{file}"]]),
    "resolved scenario": ("resolved.yaml", [["plan", "{file}", "--resolved"], ["simulate", "{file}", "--json"]]),
    "config.json": ("model/config.json", [["logprobs", "--model", "{folder}", "--tokens", "{home}/tokens.jsonl"],
                                          ["plan", "{home}/job.yaml", "--set", "model={folder}"]]),
    "safetensors": ("model/model.safetensors", [["logprobs", "--model", "{folder}", "--tokens", "{home}/tokens.jsonl"],
                                                ["generate", "--model", "{folder}", "--tokens", "{home}/tokens.jsonl"]]),
    "plan": ("plan.json", [["run", "{home}/job.yaml", "--plan", "{file}", "--out", "{folder}/out"]]),
    "calibration": ("cal.yaml", [["simulate", "{home}/job.yaml", "--set", "cluster.calibration={file}"]]),
    "lengths": ("run/lengths.jsonl", [["simulate", "{home}/job.yaml", "--lengths", "{file}"]]),
    "tokens": ("tokens.jsonl", [["logprobs", "--model", "{home}/model", "--tokens", "{file}"],
                                ["generate", "--model", "{home}/model", "--tokens", "{file}", "--json"]]),
    "task.data": ("data.jsonl", [["run", "{home}/sft.yaml", "--set", "task.data={file}", "--out", "{folder}/out"]]),
    "run folder": ("run", [["report", "{folder}"], ["compare", "{folder}"], ["compare", "{folder}", "--json"]]),
    "published CSV": ("published", [["validate", "--data", "{folder}"]]),
}
FOLDER_FILES = {"run folder": ["scenario.yaml", "plan.json", "trace.json", "simulated.json", "lengths.jsonl", "summary.json",
                               "metrics.jsonl", "sync_hashes.jsonl"], "published CSV": None}


def bomb(r):
    """A little YAML that is much: lists of aliases of lists of aliases."""
    depth, width = r.choice([(6, 9), (20, 2), (9, 9), (2, 3000)])
    lines = ["a0: &a0 [1]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, depth)]
    return ("\n".join(lines) + "\n").encode()


def make_strange(r, file):
    """Puts something else than a plain file of some text in its place; says what."""
    kind = r.choice(["fifo", "/dev/zero", "loop", "folder", "empty", "sparse", "bomb", "nothing"])
    if kind == "bomb":
        file.write_bytes(file.read_bytes() + bomb(r) if r.random() < 0.5 else bomb(r))
        return kind
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind in ("/dev/zero", "loop"):
        file.symlink_to("/dev/zero" if kind == "/dev/zero" else file.name)
    elif kind == "folder":
        file.mkdir()
    elif kind in ("empty", "sparse"):
        file.touch()
        os.truncate(file, 0 if kind == "empty" else 3 << 30)
    return kind


def changed_copy(r, reader, home, folder):
    """A copy of what the reader reads with one file changed; (that file, the folder it lies in, what)."""
    source = home / READERS[reader][0]
    shutil.rmtree(folder, ignore_errors=True)
    if reader in FOLDER_FILES:
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("checkpoints", "perfetto.json", "report.html"))
        names = FOLDER_FILES[reader] or sorted(p.name for p in source.glob("*.csv"))
        file = folder / r.choice([name for name in names if (folder / name).exists()])
    elif source.parent.name == "model":
        shutil.copytree(source.parent, folder)
        file = folder / source.name
    else:
        folder.mkdir(parents=True)
        file = folder / source.name
        shutil.copy(source, file)
        if (home / "data.jsonl").exists():
            shutil.copy(home / "data.jsonl", folder)
    if r.random() < STRANGE_SHARE:
        return file, folder, make_strange(r, file)
    file.write_bytes(mutated(r, file.read_bytes()))
    return file, folder, "mutated"


ANSWERS = {0: "accepted", 1: "no", 2: "refused", 3: "failed"}


def faults_of(place, done, words):
    """What is wrong with a command that was given something bad."""
    faults = manners(done, RESIDENT_BYTES if place.limited else None)
    # A folder where a file is to be written is no bad input, but a failure to write.
    if done.code == 3 and words[0] not in ("run", "logprobs", "generate") and "error[E633]" not in done.err:
        faults.append(f"{words[0]} reads a bad file and says exit 3: {done.said()[:500]}")
    if done.code == 0 and "--json" in words:
        try:
            json.loads(done.out, parse_constant=lambda name: faults.append(f"{name} in the JSON"))
        except ValueError as e:
            faults.append(f"no JSON: {e}")
    return faults


def attempt(place, r):
    outcome, home = Outcome(), first_files(place)
    for number in range(INPUTS_PER_ATTEMPT):
        reader = r.choice(sorted(READERS))
        file, folder, what = changed_copy(r, reader, home, place.path(f"case{number}"))
        command = r.choice(READERS[reader][1])
        words = [word.format(home=home, file=file, folder=folder) for word in command]
        done = place.run(*words, seconds=SECONDS, limits={"as": ADDRESS_BYTES} if place.limited else None)
        outcome.count("inputs")
        outcome.count(ANSWERS.get(done.code, "broken"))
        faults = [f"case{number}, {reader}, {what}: {fault}" for fault in faults_of(place, done, words)]
        outcome.faults += faults
        if not faults:
            shutil.rmtree(folder)
        outcome.stop_seconds = max(outcome.stop_seconds, done.seconds)
    outcome.faults += place.left_behind()
    return outcome

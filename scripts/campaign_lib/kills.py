"""Kills, stops and interrupts of ranks and launchers at random moments: the run ends in time, says who, loses nothing."""
import json
import os
import signal
import time

from campaign_lib import draw, legal
from campaign_lib.outcome import Outcome
from campaign_lib.program import DIAGNOSTIC, manners, marked_processes, ranks_of

NAME, WHAT = "kills", "SIGKILL, SIGSTOP, SIGINT, SIGTERM to ranks and launchers at random moments"
STOP_BOUND_S = 30.0
BLOWS = ["kill rank"] * 4 + ["kill launcher", "stop rank", "interrupt launcher", "terminate launcher", "interrupt all"]


def skip_reason(_hotbunk):
    return ""


def steps_done(folder):
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def whole_lines(outcome, folder):
    """The finished steps are on disk, one line each, none torn."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return
    try:
        steps = [json.loads(line)["step"] for line in file.read_text().splitlines()]
    except ValueError:
        outcome.faults.append("metrics.jsonl has a torn line")
        return
    outcome.expect(steps == list(range(1, len(steps) + 1)), f"metrics.jsonl: steps {steps[:3]} ... of {len(steps)}")


def usable_checkpoints(outcome, place, folder):
    """Whatever has a checkpoint's name is one: its weights load."""
    found = sorted(p for p in (folder / "checkpoints").glob("*") if not p.name.startswith("."))
    tokens = place.write("tokens.jsonl", "[1, 5, 6, 3]\n")
    for path in found[-2:]:
        done = place.run("logprobs", "--model", path, "--tokens", tokens)
        outcome.expect(done.code == 0, f"checkpoint {path.name} does not load: exit {done.code}: {done.said()[:500]}")
        outcome.count("checkpoints loaded")


def reportable(outcome, place, folder):
    """`report` works, or says in a diagnostic what the folder lacks."""
    done = place.run("report", folder)
    outcome.faults += manners(done)
    refused = done.code == 2 and DIAGNOSTIC.search(done.err)
    outcome.expect(done.code == 0 or refused, f"report: exit {done.code}: {done.said()}")


def aftermath(outcome, place, folder, killed):
    """`killed`: somebody had no chance to clean up, so that what he was writing may lie about, under no file's name."""
    outcome.faults += [f for f in place.left_behind() if not (killed and f.startswith("partial file"))]
    whole_lines(outcome, folder)
    usable_checkpoints(outcome, place, folder)
    reportable(outcome, place, folder)


def draw_moment(place, r, process, folder):
    """Waits for a random moment of a run: while it starts, or in or after some step."""
    if r.random() < 0.3:
        time.sleep(r.random() * 0.5)
        return "start"
    steps = r.randint(1, 12)
    wait_for(lambda: steps_done(folder) >= steps or place.ended(process), 60)
    time.sleep(r.random() * 0.2)
    return f"after step {steps}"


def pick_victim(place, r, process, world):
    """(rank, pid) as soon as a drawn rank is there; one process is launcher and rank where there is only one."""
    rank = r.randrange(world)
    if world == 1:
        return rank, process.pid
    wait_for(lambda: rank in ranks_of(process.pid) or place.ended(process), 30)
    return rank, ranks_of(process.pid).get(rank)


def after_kill(outcome, place, process, rank, pid, world):
    done = place.finish(process, STOP_BOUND_S)
    outcome.faults += manners(done) if world > 1 else []
    if world == 1:
        outcome.expect(done.code == -signal.SIGKILL, f"exit {done.code}")
    else:
        outcome.expect(done.code == 3, f"exit {done.code} after rank {rank} was killed: {done.said()}")
        outcome.expect(f"rank {rank} (pid {pid})" in done.err, f"rank {rank} (pid {pid}) is not named: {done.said()}")


def after_interrupt(outcome, place, process, folder, started):
    """The step is ended, the checkpoint, metrics and report are written; a run that had not begun just ends."""
    done = place.finish(process, STOP_BOUND_S)
    if not started and done.code in (-signal.SIGINT, -signal.SIGTERM):
        return  # no handler yet, and nothing to lose
    outcome.faults += manners(done) if done.code not in (130, 143) else []
    if not outcome.expect(done.code in (0, 130), f"exit {done.code} after an interrupt: {done.said()}") or not started:
        return
    for name in ("metrics.jsonl", "summary.json", "report.html"):
        outcome.expect((folder / name).exists(), f"an interrupted run wrote no {name}: {done.said()}")
    outcome.expect(any((folder / "checkpoints").glob("*/model.safetensors")), "an interrupted run left no checkpoint")


def after_stop(outcome, place, process, rank, pid, world):
    """Somebody says within 20 s who is being waited for; awake again the run goes on."""
    if world == 1:
        os.kill(pid, signal.SIGCONT)
        return blow_launcher(outcome, place, process)
    noise = process.streams[1].stat().st_size
    told = wait_for(lambda: f"rank {rank}" in process.streams[1].read_text()[noise:], 20 * place.patience)
    outcome.expect(told, f"rank {rank} was stopped for 20 s and nobody said so: {process.streams[1].read_text()[-500:]}")
    before = place.path("out")
    steps = steps_done(before)
    os.kill(pid, signal.SIGCONT)
    went_on = wait_for(lambda: steps_done(before) > steps or place.ended(process), 30 * place.patience)
    outcome.expect(went_on and not place.ended(process), f"rank {rank} was woken, and the run did not go on")
    return blow_launcher(outcome, place, process)


def blow_launcher(outcome, place, process):
    """The launcher is killed: everybody else goes with it."""
    os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    place.finish(process, STOP_BOUND_S)
    wait_for(lambda: not marked_processes(place.mark), 10 * place.patience)
    outcome.stop_seconds = max(outcome.stop_seconds, time.monotonic() - began)


def attempt(place, r):
    outcome = Outcome()
    scenario = draw.small_job(r, worlds=(1, 2, 2, 3, 4, 4, 6), checkpoint_every=r.choice([0, 1, 3]))
    world, folder, blow = scenario["cluster"]["ranks_per_device"], place.path("out"), r.choice(BLOWS)
    process = place.start("run", legal.write(place, r, scenario), "--out", folder)
    moment = draw_moment(place, r, process, folder)
    rank, pid = pick_victim(place, r, process, world)
    if place.ended(process) or pid is None:
        done = place.finish(process, 1)
        outcome.faults.append(f"the run ended before the blow: exit {done.code}: {done.said()}")
        return outcome
    place.commands.append(f"# {blow} {rank} (pid {pid}), {moment}")
    outcome.count(blow)
    started, began = steps_done(folder) > 0, time.monotonic()
    if blow == "kill rank":
        os.kill(pid, signal.SIGKILL)
        after_kill(outcome, place, process, rank, pid, world)
    elif blow == "kill launcher":
        blow_launcher(outcome, place, process)
    elif blow == "stop rank":
        os.kill(pid, signal.SIGSTOP)
        after_stop(outcome, place, process, rank, pid, world)
        began = None
    else:
        number = signal.SIGTERM if blow.startswith("terminate") else signal.SIGINT
        os.killpg(process.pid, number) if blow.endswith("all") else os.kill(process.pid, number)
        after_interrupt(outcome, place, process, folder, started)
    if began is not None:
        outcome.stop_seconds = max(outcome.stop_seconds, time.monotonic() - began)
    aftermath(outcome, place, folder, killed=blow.startswith(("kill", "stop")))
    return outcome

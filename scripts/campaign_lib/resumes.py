"""Runs killed at random moments, some of them twice, and resumed: bit for bit the run that nobody killed."""
import os
import signal
import subprocess
import time

from campaign_lib import draw, legal
from campaign_lib.kills import usable_checkpoints, whole_lines
from campaign_lib.outcome import Outcome
from campaign_lib.program import manners, ranks_of

NAME, WHAT = "resumes", "kill -9 at random moments, then --resume: the bits of the run that nobody killed"
EXACT = ("weights", "lengths", "plan")


def skip_reason(hotbunk):
    text = subprocess.run([hotbunk, "run", "--help"], capture_output=True, text=True, check=False).stdout
    return "" if "--resume" in text else "run has no --resume"


def blow_at(place, r, process, seconds):
    """Kills a rank, the launcher or all of them after so long, or asks the run to stop; False when it had ended before."""
    time.sleep(seconds)
    ranks = sorted(ranks_of(process.pid).values()) or [process.pid]
    number, victims = r.choice([(signal.SIGKILL, [r.choice(ranks)]), (signal.SIGKILL, [process.pid]),
                                (signal.SIGKILL, [process.pid, *ranks]), (signal.SIGTERM, [process.pid])])
    if place.ended(process):
        return False
    for pid in victims:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
    place.commands.append(f"# kill -{number} {victims} after {seconds:.2f} s")
    return True


def whole(folder, steps):
    """Whether a run's folder is that of all its steps."""
    metrics = folder / "metrics.jsonl"
    return (folder / "report.html").exists() and metrics.exists() and metrics.read_bytes().count(b"\n") == steps


def has_checkpoint(folder):
    return any(not path.name.startswith(".") for path in (folder / "checkpoints").glob("*"))


def other_metrics(a, b):
    """Steps and figures that differ, of those that are no times and no bytes of memory."""
    if [line["step"] for line in a] != [line["step"] for line in b]:
        return f"steps {len(a)} and {len(b)}"
    for x, y in zip(a, b):
        for key in sorted(k for k in x.keys() | y.keys() if not k.startswith("perf/max_memory")):
            if x.get(key) != y.get(key):
                return f"{key} of step {x['step']}: {x.get(key)} and {y.get(key)}"
    return ""


def compare(outcome, done, uninterrupted, resumed):
    outcome.faults += manners(done)
    ended = "no step is left" in done.err  # killed when all was written
    if outcome.expect(done.code == (2 if ended else 0), f"resumed: exit {done.code}: {done.said()}"):
        a, b = legal.result_of(uninterrupted), legal.result_of(resumed)
        outcome.faults += [f"resumed, it has other {key}" for key in EXACT if a[key] != b[key]]
        difference = other_metrics(a["metrics"], b["metrics"])
        outcome.expect(not difference, f"resumed, it has other metrics: {difference}")
        outcome.count("compared")


def attempt(place, r):
    outcome = Outcome()
    steps = r.randint(4, 40)
    scenario = draw.small_job(r, worlds=(1, 2, 2, 3, 4), steps=steps, checkpoint_every=r.choice([1, 2, 5]))
    scenario["optimizer"].update(lr=1e-3)
    file, reference, broken = legal.write(place, r, scenario), place.path("whole"), place.path("broken")
    first = place.run("run", file, "--out", reference)
    if not outcome.expect(first.code == 0, f"uninterrupted: exit {first.code}: {first.said()}"):
        return outcome
    process = place.start("run", file, "--out", broken)
    for _ in range(r.choice([1, 1, 2])):
        outcome.count("struck" if blow_at(place, r, process, r.random() * first.seconds) else "ended first")
        done = place.finish(process, 30)
        outcome.faults += place.left_behind_processes()
        if done.code == 0 and whole(broken, steps):
            compare(outcome, done, reference, broken)
            return outcome
        whole_lines(outcome, broken)
        usable_checkpoints(outcome, place, broken)
        process = place.start("run", "--resume", broken)
        if not has_checkpoint(broken):
            refused = place.finish(process, 30)
            outcome.faults += manners(refused)
            outcome.expect(refused.code == 2, f"there is no checkpoint yet: exit {refused.code}: {refused.said()}")
            outcome.count("too early")
            return outcome
    outcome.count("resumed")
    compare(outcome, place.finish(process, 60), reference, broken)
    outcome.faults += place.left_behind_processes()
    return outcome

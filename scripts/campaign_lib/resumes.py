"""Runs killed at random moments, some of them twice, and resumed: bit for bit the run that nobody killed."""
import os
import signal
import subprocess
import time

from campaign_lib import draw, legal
from campaign_lib.kills import usable_checkpoints, wait_for, whole_lines
from campaign_lib.outcome import Outcome
from campaign_lib.program import manners, marked_processes, ranks_of

NAME, WHAT = "resumes", "kill -9 at random moments, then --resume: the bits of the run that nobody killed"
EXACT = ("weights", "lengths", "metrics", "plan")


def skip_reason(hotbunk):
    text = subprocess.run([hotbunk, "run", "--help"], capture_output=True, text=True, check=False).stdout
    return "" if "--resume" in text else "run has no --resume"


def kill_at(place, r, process, seconds):
    """Kills a rank, the launcher or all of them after so long; False when the run had ended before."""
    time.sleep(seconds)
    ranks = sorted(ranks_of(process.pid).values()) or [process.pid]
    victims = r.choice([[r.choice(ranks)], [process.pid], [process.pid, *ranks]])
    if place.ended(process):
        return False
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    place.commands.append(f"# kill -9 {victims} after {seconds:.2f} s")
    return True


def attempt(place, r):
    outcome = Outcome()
    steps = r.randint(4, 40)
    scenario = draw.small_job(r, worlds=(1, 2, 2, 3, 4), steps=steps, checkpoint_every=r.choice([1, 2, 5]))
    scenario["optimizer"].update(lr=1e-3)
    file, whole, broken = legal.write(place, r, scenario), place.path("whole"), place.path("broken")
    first = place.run("run", file, "--out", whole)
    if not outcome.expect(first.code == 0, f"uninterrupted: exit {first.code}: {first.said()}"):
        return outcome
    process = place.start("run", file, "--out", broken)
    for _ in range(r.choice([1, 1, 2])):
        killed = kill_at(place, r, process, r.random() * first.seconds)
        outcome.count("killed" if killed else "ended first")
        done = place.finish(process, 30)
        wait_for(lambda: not marked_processes(place.mark), 10 * place.patience)
        if done.code == 0:
            break
        whole_lines(outcome, broken)
        usable_checkpoints(outcome, place, broken)
        process = place.start("run", "--resume", broken)
    else:
        done = place.finish(process, 60)
        outcome.count("resumed")
    outcome.faults += manners(done)
    if outcome.expect(done.code == 0, f"resumed: exit {done.code}: {done.said()}"):
        a, b = legal.result_of(whole), legal.result_of(broken)
        outcome.faults += [f"resumed, it has other {key}" for key in EXACT if a[key] != b[key]]
    outcome.faults += place.left_behind()
    return outcome

"""Long runs: every rank's memory over its steps has no slope, and the run folder does not grow with the steps."""
import json
import pathlib
import time

from campaign_lib import draw, legal
from campaign_lib.kills import steps_done
from campaign_lib.outcome import Outcome
from campaign_lib.program import manners, ranks_of

NAME, WHAT = "soak", "many steps: slope of each rank's memory, size of the files"
NOISE_BYTES, SLOPE_BYTES_PER_STEP = 1 << 20, 16.0  # what an allocator may still take over the later half; what may remain
BOUNDED = ("trace.json", "simulated.json", "summary.json", "report.html", "perfetto.json")
FILE_BYTES = 24 << 20
PAGE = 4096


def skip_reason(_hotbunk):
    return ""


def resident_bytes(pid):
    """Private memory of a process: what it shares with other ranks is the plan's, and constant."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return None
    return (int(fields[1]) - int(fields[2])) * PAGE


def slope(points):
    """Least squares over (step, bytes)."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def draw_job(r, steps):
    """Small enough that the steps are many; one of the draws that fit the hours is enough to see a slope."""
    s = draw.small_job(r, worlds=(1, 2, 4), steps=steps, checkpoint_every=steps // 4, kinds=draw.PLAIN)
    s["model"].update(hidden_size=8, num_hidden_layers=1, vocab_size=16)
    s["train"]["recompute"] = "none"
    s["algorithm"]["prompts"] = s["algorithm"]["mini_batches"]
    return s


def attempt(place, r):
    outcome = Outcome()
    steps = place.soak_steps
    scenario, folder = draw_job(r, steps), place.path("out")
    world = scenario["cluster"]["ranks_per_device"]
    process = place.start("run", legal.write(place, r, scenario), "--out", folder)
    points = {}
    while not place.ended(process):
        time.sleep(0.05)
        done = steps_done(folder)
        for rank, pid in (ranks_of(process.pid) or {0: process.pid}).items():
            resident = resident_bytes(pid)
            if resident and 0 < done < steps:
                points.setdefault(rank, []).append((done, resident))
    done = place.finish(process, 10)
    outcome.faults += manners(done)
    if not outcome.expect(done.code == 0, f"exit {done.code}: {done.said()}"):
        return outcome
    outcome.count("steps", steps)
    for rank, samples in points.items():
        later = samples[len(samples) // 2:]
        if not outcome.expect(len(later) >= 10, f"rank {rank}: {len(samples)} samples in {steps} steps show no slope"):
            continue
        grows, allowed = slope(later), SLOPE_BYTES_PER_STEP + NOISE_BYTES / max(1, later[-1][0] - later[0][0])
        outcome.figures["bytes per step"] = round(max(grows, outcome.figures.get("bytes per step", 0.0)), 1)
        outcome.expect(grows <= allowed, f"rank {rank} of {world}: {grows:.0f} B a step over {len(later)} samples")
    for name in BOUNDED:
        path = folder / name
        size = path.stat().st_size if path.exists() else 0
        outcome.figures[f"{name} MB"] = round(size / 1e6, 2)
        outcome.expect(size <= FILE_BYTES, f"{name} has {size} bytes after {steps} steps")
    outcome.expect(len((folder / "metrics.jsonl").read_text().splitlines()) == steps, "metrics.jsonl lacks steps")
    json.loads((folder / "summary.json").read_text())
    outcome.faults += place.left_behind()
    return outcome

#!/usr/bin/env python3
"""Records what tests/sim/recorded_test.cc compares: a calibration profile and a run's phase times of the demo scenario.

    scripts/record_phase_times.py [--hotbunk build/hotbunk] [--rounds 9] [--steps 12]

Each round calibrates and runs, as `scripts/demo` does. The round that ran fastest is kept, whole: its profile, its lengths
and its phase times belong together, and other programs on the machine can only add to a time.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import tempfile

root = pathlib.Path(__file__).resolve().parent.parent
target = root / "tests/sim/recorded"


def phase_seconds(compared):
    phases = {}
    for row in compared["times"]:
        phases.setdefault(row["phase"], []).append(row["b_seconds"])
    return {name: {"times": len(values), "seconds": round(statistics.mean(values), 9)} for name, values in phases.items()}


def one_round(hotbunk, folder, steps):
    scenario, profile = target / "scenario.yaml", folder / "profile.yaml"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": True}
    subprocess.run([hotbunk, "calibrate", scenario, "--out", profile], **quiet)
    keys = ["--set", f"steps={steps}", "--set", f"cluster.calibration={profile}"]
    subprocess.run([hotbunk, "run", scenario, *keys, "--out", folder / "run"], **quiet)
    text = subprocess.run([hotbunk, "compare", folder / "run", "--json"], capture_output=True, check=True).stdout
    compared = json.loads(text)
    return sum(r["b_seconds"] for r in compared["times"]), phase_seconds(compared), compared["time_error"], folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hotbunk", default=root / "build/hotbunk")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    target.mkdir(exist_ok=True)
    shutil.copy(root / "scenarios/demo.yaml", target / "scenario.yaml")
    with tempfile.TemporaryDirectory() as temporary:
        rounds = []
        for i in range(args.rounds):
            folder = pathlib.Path(temporary) / str(i)
            folder.mkdir()
            rounds.append(one_round(args.hotbunk, folder, args.steps))
            print(f"round {i + 1}: {rounds[-1][0]:.4f} s, error {rounds[-1][2]}")
        _, phases, _, folder = min(rounds, key=lambda r: r[0])
        shutil.copy(folder / "profile.yaml", target / "profile.yaml")
        shutil.copy(folder / "run/lengths.jsonl", target / "lengths.jsonl")
    record = {"steps": args.steps, "cores": os.cpu_count(), "phases": phases}
    (target / "measured.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

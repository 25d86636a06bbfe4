"""Full disks, read-only folders, low limits, closed streams: the right exit code and message, and nothing lost."""
import contextlib
import os
import re
import shutil
import subprocess

from campaign_lib import draw, legal
from campaign_lib.kills import usable_checkpoints, whole_lines
from campaign_lib.outcome import Outcome, Skipped
from campaign_lib.program import DIAGNOSTIC, MIB, is_partial, manners

NAME, WHAT = "limits", "full disks, read-only folders, low limits of files, processes and memory, closed streams"
BOUND_S = 40.0
NOBODY = 65534
ROOT_KINDS = ["full disk"] * 3 + ["read-only", "few processes"]
KINDS = ["few files"] * 3 + ["little memory"] * 3 + ["small files"] * 2 + ["small stack", "closed stdout", "full stdout",
                                                                          "closed stderr", "closed stdin"]
LOADER = re.compile(r"error while loading shared libraries|cannot allocate memory in static TLS")
COMMANDS = ["run", "run", "run", "plan", "simulate", "explain", "calibrate", "doctor"]


def skip_reason(_hotbunk):
    return ""


@contextlib.contextmanager
def small_disk(folder, size_bytes, read_only=False):
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        raise Skipped("small disks: mounting one is not allowed here")
    try:
        if read_only:
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def command_of(r, place, scenario_file, name=None):
    name = name or r.choice(COMMANDS)
    if name == "doctor":
        return [name]
    if name == "run":
        return [name, scenario_file, "--out", place.path("out")]
    out = {"calibrate": "cal.yaml", "plan": "plan.json", "simulate": "sim"}.get(name)
    return [name, scenario_file] + (["--out", place.path(out)] if out and r.random() < 0.7 else [])


def expect_no_loss(outcome, place, folder):
    """Whatever the folder holds is whole."""
    if not folder.exists():
        return
    whole_lines(outcome, folder)
    usable_checkpoints(outcome, place, folder)
    outcome.faults += [f"partial file {p.name} is left" for p in folder.rglob("*") if is_partial(p)]


def full_disk(outcome, place, r, scenario_file):
    disk = place.path("disk")
    size = r.choice([16, 64, 128, 256, 512, 1024, 2048, 4096]) * 1024
    with small_disk(disk, size):
        done = place.run("run", scenario_file, "--out", disk / "out", seconds=BOUND_S)
        outcome.faults += manners(done)
        if done.code != 0:
            # One rank does not say that it starts: its first words may be that a step's lines found no room.
            lines = re.search(r"/(samples|metrics|lengths|sync_hashes)\.jsonl$", done.err, re.MULTILINE)
            began = "starting" in done.err or "step " in done.err or lines
            wanted = 3 if began else 2
            outcome.expect(done.code == wanted, f"a disk of {size} B: exit {done.code}, not {wanted}: {done.said()}")
            outcome.expect("No space left" in done.err, f"nobody says that the disk is full: {done.said()}")
        expect_no_loss(outcome, place, disk / "out")
        outcome.stop_seconds = done.seconds


def read_only(outcome, place, r, scenario_file):
    with small_disk(place.path("disk"), MIB, read_only=True):
        done = place.run(*command_of(r, place, scenario_file, "run")[:-1], place.path("disk/out"), seconds=BOUND_S)
        outcome.faults += manners(done)
        outcome.expect(done.code == 2 and "E103" in done.err, f"read-only folder: exit {done.code}: {done.said()}")
        outcome.expect("starting" not in done.err, "ranks were started although the folder cannot be written")


def few_processes(outcome, place, r, scenario_file):
    """Root has no such limit: as nobody, whose other processes count too."""
    place.folder.chmod(0o777)
    program = place.path("hotbunk")
    shutil.copy(place.hotbunk, program)
    number = r.choice([1, 2, 3, 4, 6, 8, 12, 20])
    prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "prlimit", f"--nproc={number}"]
    if not shutil.which(prefix[0]) or not shutil.which("prlimit"):
        raise Skipped("few processes: needs setpriv and prlimit (util-linux)")
    probe = subprocess.run([*prefix[:4], str(program), "--version"], capture_output=True, check=False, cwd=place.folder)
    if probe.returncode != 0:
        raise Skipped("few processes: nobody cannot reach the work folder")
    place.hotbunk, own = program, place.hotbunk
    done = place.run("run", scenario_file, "--out", place.path("out"), prefix=prefix, seconds=BOUND_S)
    place.hotbunk = own
    outcome.faults += manners(done)
    outcome.expect(done.code in (0, 3), f"nproc {number}: exit {done.code}: {done.said()}")


def low_limit(outcome, place, r, kind, scenario_file):
    limits = {"few files": {"nofile": r.randint(3, 40)},
              "little memory": {"as": r.choice([30, 60, 100, 200, 400, 900]) * MIB},
              "small files": {"fsize": r.choice([0, 1000, 50_000, 400_000, 2_000_000])},
              "small stack": {"stack": r.choice([64, 128, 256, 1024]) * 1024}}[kind]
    arguments = command_of(r, place, scenario_file)
    done = place.run(*arguments, limits=limits, signals=kind != "small files", seconds=BOUND_S)
    place.commands.append(f"# with {limits}")
    # The loader itself may not find its libraries or memory: then nothing of ours has run.
    not_loaded = LOADER.search(done.err) or done.code < 0 and not done.raw and kind == "small stack"
    if not_loaded:
        raise Skipped(f"{kind}: the program was not loaded")
    # Where no file may have a byte, what it says is lost too: its streams are files.
    outcome.faults += [f"{limits}: {fault}" for fault in manners(done)
                       if limits.get("fsize") != 0 or "without a diagnostic" not in fault]
    outcome.stop_seconds = done.seconds
    if arguments[0] == "run":
        expect_no_loss(outcome, place, place.path("out"))


def streams(outcome, place, r, kind, scenario_file):
    arguments = command_of(r, place, scenario_file)
    redirect = {"closed stdout": ">&-", "full stdout": ">/dev/full", "closed stderr": "2>&-", "closed stdin": "<&-"}[kind]
    shell = ["sh", "-c", f'exec "$@" {redirect}', "sh"]
    if arguments[0] in ("plan", "simulate", "run", "explain", "doctor") and r.random() < 0.5:
        arguments.append("--json")
    done = place.run(*arguments, prefix=shell, seconds=BOUND_S)
    faults = manners(done)
    if kind == "closed stderr":
        faults = [f for f in faults if "without a diagnostic" not in f]
    outcome.faults += [f"{kind}: {fault}" for fault in faults]
    if kind in ("closed stdin", "closed stderr"):
        outcome.expect(done.code == 0, f"{kind}: {arguments[0]}: exit {done.code}: {done.said()}")
    if kind == "full stdout" and arguments[0] != "calibrate":
        outcome.expect(done.code != 0, f"{kind}: {arguments[0]} lost its result and said exit 0")
        outcome.expect(DIAGNOSTIC.search(done.err), f"{kind}: {arguments[0]} does not say so: {done.said()}")


def attempt(place, r):
    outcome = Outcome()
    scenario = draw.small_job(r, worlds=(1, 2, 3, 4), steps=r.choice([3, 10]), checkpoint_every=r.choice([0, 1]))
    file = legal.write(place, r, scenario)
    file.chmod(0o644)
    kind = r.choice(KINDS + ROOT_KINDS)
    if kind in ROOT_KINDS and os.geteuid() != 0:
        raise Skipped(f"{kind}: needs root")
    outcome.count(kind)
    if kind == "full disk":
        full_disk(outcome, place, r, file)
    elif kind == "read-only":
        read_only(outcome, place, r, file)
    elif kind == "few processes":
        few_processes(outcome, place, r, file)
    elif kind in ("few files", "little memory", "small files", "small stack"):
        low_limit(outcome, place, r, kind, file)
    else:
        streams(outcome, place, r, kind, file)
    outcome.faults += place.left_behind()
    return outcome

"""Starts the built program as a user would, under limits, and finds what it leaves behind."""
import dataclasses
import os
import pathlib
import re
import resource
import shlex
import shutil
import signal
import subprocess
import time
import uuid

MARK = "HOTBUNK_CAMPAIGN"  # in the environment of everything that one attempt starts: whose mark is alive was left behind
# Runs are compared bit for bit: measured by each, two could form products of bf16 in two ways.
FIXED = {"HOTBUNK_BF16_PRODUCTS": "rule"}
MIB = 1 << 20
EXIT_CODES = (0, 1, 2, 3)
DIAGNOSTIC = re.compile(r"error\[E\d{3}\]: .")
INTERNAL = re.compile(r"E699|internal check failed|Sanitizer|runtime error:|terminate called|"
                      # A library that was given no more addresses: said with the limit.
                      r"Segmentation fault(?!\): this process may have \d+ B of addresses)")
CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")  # a terminal would obey them; tab, line feed and CR may stand


@dataclasses.dataclass
class Done:
    """One command that ended, or was ended when its time was up."""
    command: list
    code: int  # negative: the signal that killed it
    out: str
    err: str
    raw: bytes  # both streams as they came
    seconds: float
    timed_out: bool
    peak_bytes: int  # resident, of the largest of its processes

    def said(self):
        """The end of its narration, without the steps that went well."""
        return "\n".join(line for line in self.err.splitlines() if not line.startswith("step "))[-2000:]


def limits_of(limits):
    """What the child does before it becomes the program: {"as": bytes, "nofile": n, ...} as setrlimit names them."""
    def apply():
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, "RLIMIT_" + name.upper()), (value, value))
    return apply if limits else None


def marked_processes(mark):
    """Process ids that carry a mark and run; a zombie has no environment left."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if wanted in pathlib.Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                found.append(int(entry))
        except OSError:
            continue  # it ended meanwhile
    return found


def children_of(pid):
    try:
        return [int(p) for p in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def environment_of(pid):
    try:
        lines = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(line.decode(errors="replace").split("=", 1) for line in lines if b"=" in line)


def ranks_of(launcher):
    """{rank: pid} of the processes that a local launch has started so far."""
    found = {}
    for pid in children_of(launcher):
        rank = environment_of(pid).get("RANK")
        if rank is not None:
            found[int(rank)] = pid
    return found


def shared_memory_files():
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


class Place:
    """The folder of one attempt, and every command that it ran there."""

    def __init__(self, hotbunk, folder, patience=1.0):
        self.hotbunk, self.folder, self.mark = hotbunk, pathlib.Path(folder), uuid.uuid4().hex
        self.patience = patience  # multiplies every time that something may take
        self.commands, self.number = [], 0
        shutil.rmtree(self.folder, ignore_errors=True)  # of an attempt before, kept because it failed
        self.folder.mkdir(parents=True)
        self.shared_memory = shared_memory_files()

    def path(self, name):
        return self.folder / name

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def start(self, *arguments, environment=None, limits=None, prefix=(), stdin=subprocess.DEVNULL, stdout=None,
              cwd=None, signals=True):
        """Begins a command in a session of its own; its streams go to files. `signals` False: SIGXFSZ stays ignored."""
        command = [*map(str, prefix), str(self.hotbunk), *map(str, arguments)]
        self.number += 1
        out, err = self.path(f"{self.number}.out"), self.path(f"{self.number}.err")
        variables = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        environment = FIXED | (environment or {})
        variables.update({MARK: self.mark, "NO_COLOR": "1", **environment})
        extra = " ".join(f"{k}={shlex.quote(v)}" for k, v in environment.items())
        self.commands.append((extra + " " if extra else "") + shlex.join(command))
        with open(out, "wb") as o, open(err, "wb") as e:
            process = subprocess.Popen(command, stdin=stdin, stdout=o if stdout is None else stdout, stderr=e,
                                       env=variables, cwd=cwd or self.folder, preexec_fn=limits_of(limits),
                                       start_new_session=True, restore_signals=signals)
        process.began, process.streams, process.arguments = time.monotonic(), (out, err), command
        return process

    def finish(self, process, seconds=60.0):
        """Waits, at most `seconds` times the patience; then everything that it started is killed."""
        deadline, timed_out, status, usage = time.monotonic() + seconds * self.patience, False, None, None
        while status is None:
            pid, found, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                status = found
            elif time.monotonic() > deadline:
                timed_out = True
                self.kill_all(process.pid)
                _, status, usage = os.wait4(process.pid, 0)
            else:
                time.sleep(0.005 if time.monotonic() - process.began < 1 else 0.03)
        took = time.monotonic() - process.began
        process.returncode = os.waitstatus_to_exitcode(status)
        out, err = (p.read_bytes() for p in process.streams)
        return Done(process.arguments, process.returncode, out.decode(errors="replace"), err.decode(errors="replace"),
                    out + err, took, timed_out, usage.ru_maxrss * 1024)

    @staticmethod
    def ended(process):
        """Whether it has, without taking its exit status from finish()."""
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def run(self, *arguments, seconds=60.0, **options):
        return self.finish(self.start(*arguments, **options), seconds)

    def kill_all(self, *more):
        for pid in {*marked_processes(self.mark), *more}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def left_behind_processes(self, seconds=3.0):
        """Whoever still runs of an attempt whose commands have ended; those that are just ending get a moment."""
        deadline = time.monotonic() + seconds * self.patience
        while (pids := marked_processes(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill_all()
        return [f"process {pid} is left" for pid in pids]

    def left_behind(self):
        """The same, and shared memory and partial files."""
        faults = self.left_behind_processes()
        new = [f for f in shared_memory_files() - self.shared_memory
               if ("hotbunk" in f or "gloo" in f) and not is_of_others(f)]
        faults += [f"/dev/shm/{name} is left" for name in new]
        partial = [p for p in self.folder.rglob("*") if is_partial(p)]
        return faults + [f"partial file {p.relative_to(self.folder)} is left" for p in partial]


def is_of_others(name):
    """Files of NCCL's double: a campaign runs CPU ranks alone, tests beside it kill processes that have some."""
    return name.startswith("hotbunk-nccl-")


def is_partial(path):
    """A file that is being written, or was (base/partial_file.cc)."""
    return re.fullmatch(r"\.[0-9a-f]{16}\.partial", path.name) is not None and path.is_file()


def manners(done, peak_bytes=None):
    """Faults that no command may have, whatever it was given: [] or what they are."""
    faults = []
    what = " ".join(str(word) for word in done.command[1:4])
    if done.timed_out:
        faults.append(f"{what}: did not end within {done.seconds:.0f} s")
    elif done.code not in EXIT_CODES:
        ended = signal.Signals(-done.code).name if done.code < 0 else f"exit {done.code}"
        faults.append(f"{what}: {ended}")
    if INTERNAL.search(done.err):
        faults.append(f"{what}: {INTERNAL.search(done.err)[0]}: {done.said()[-300:]}")
    if done.code in (2, 3) and not DIAGNOSTIC.search(done.err + done.out):
        faults.append(f"{what}: exit {done.code} without a diagnostic")
    if peak_bytes and done.peak_bytes > peak_bytes:
        faults.append(f"{what}: {done.peak_bytes // MIB} MiB resident, more than {peak_bytes // MIB}")
    if CONTROL.search(done.raw):
        faults.append(f"{what}: control bytes on the terminal: {CONTROL.search(done.raw)[0]!r}")
    return faults

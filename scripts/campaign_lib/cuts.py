"""A cable is cut between two hosts: network namespaces joined by a pair of virtual cards, one of them taken down."""
import os
import re
import shutil
import signal
import subprocess
import time

from campaign_lib import draw, legal
from campaign_lib.kills import aftermath, steps_done, wait_for
from campaign_lib.outcome import Outcome
from campaign_lib.program import children_of, manners, marked_processes

NAME, WHAT = "cuts", "a network cut at a random moment between two namespaces, ranks on both sides"
STOP_BOUND_S = 30.0
# Ranks on one host share memory, and know it by its processes: namespaces of both kinds make two of one.
HOST = ["unshare", "--net", "--pid", "--uts", "--mount", "--fork", "--mount-proc"]
GONE = re.compile(r"rank (\d+)(?: \([^)]*\))? (?:died|is gone|was lost|does not answer|is not reachable|cannot be reached)")


def skip_reason(_hotbunk):
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "unshare", "nsenter") if not shutil.which(tool)]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux)"
    probe = subprocess.run([*HOST, "true"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else "namespaces are not allowed here"


class TwoHosts:
    """Two hosts with a network, processes and a name each, joined by one cable; gone again at the end of the block."""

    def __init__(self):
        self.cards = [f"hb{os.getpid()}{side}" for side in "ab"]
        self.addresses = ["10.201.7.1", "10.201.7.2"]
        self.holders, self.inits = [], []

    def ip(self, *words, side=None):
        inside = ["nsenter", "-t", str(self.inits[side]), "-n"] if side is not None else []
        subprocess.run([*inside, "ip", *words], check=True, capture_output=True)

    def __enter__(self):
        for side in "ab":
            command = [*HOST, "sh", "-c", f"hostname host-{side}; exec sleep inf"]
            holder = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            self.holders.append(holder)
            wait_for(lambda: children_of(holder.pid), 10)
            self.inits.append(children_of(holder.pid)[0])
        self.ip("link", "add", self.cards[0], "netns", str(self.inits[0]), "type", "veth", "peer", "name", self.cards[1],
                "netns", str(self.inits[1]))
        for side, (card, address) in enumerate(zip(self.cards, self.addresses)):
            self.ip("addr", "add", address + "/24", "dev", card, side=side)
            self.ip("link", "set", card, "up", side=side)
            self.ip("link", "set", "lo", "up", side=side)
        return self

    def __exit__(self, *_):
        for holder, init in zip(self.holders, self.inits):
            os.kill(init, signal.SIGKILL)  # and all processes of that host
            holder.wait()

    def on(self, side):
        """What is written before a command that is to run on a host."""
        return ["nsenter", "-t", str(self.inits[side]), "-n", "-p", "-u", "-m"]

    def cut(self, side):
        self.ip("link", "set", self.cards[side], "down", side=side)


def start_ranks(place, hosts, file, side_of, port, *more):
    """One process per rank, as torchrun would start them on two hosts."""
    locals_, processes = [0, 0], []
    for rank, side in enumerate(side_of):
        environment = {"RANK": str(rank), "WORLD_SIZE": str(len(side_of)), "LOCAL_RANK": str(locals_[side]),
                       "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": str(port), "OMP_WAIT_POLICY": "passive"}
        locals_[side] += 1
        # The hosts may have different numbers of ranks, whose shares of the cores would differ (E705).
        processes.append(place.start("run", file, "--out", place.path("out"), "--threads", "1", *more,
                                     environment=environment, prefix=hosts.on(side)))
    return processes


def judge(outcome, done, rank, side_of):
    """One rank's end: exit code 3, and blame for a rank beyond the cut, for none on this side."""
    mine = side_of[rank]
    outcome.faults += manners(done)
    outcome.expect(done.code == 3, f"rank {rank}: exit {done.code}: {done.said()[-700:]}")
    far = [other for other, side in enumerate(side_of) if side != mine]
    outcome.expect(any(re.search(rf"rank {other}\b", done.err) for other in far),
                   f"rank {rank} names none of the lost ranks {far}: {done.said()[-700:]}")
    blamed = {int(found) for found in GONE.findall(done.err)}
    near = blamed - set(far)
    outcome.expect(not near, f"rank {rank} blames {sorted(near)} on its own side: {done.said()[-700:]}")


def attempt(place, r):
    outcome = Outcome()
    scenario = draw.small_job(r, worlds=(2, 3, 4), checkpoint_every=r.choice([0, 2]))
    world = scenario["cluster"]["ranks_per_device"]
    scenario.get("sync", {})["transport"] = "collective"
    if "data" in scenario["task"]:
        scenario["task"]["data"] = str(place.path("data.jsonl"))  # entering a namespace leaves the folder
    near = r.randint(1, world - 1)
    side_of = [0] * near + [1] * (world - near)
    folder, port = place.path("out"), r.randint(20000, 29999)
    with TwoHosts() as hosts:
        processes = start_ranks(place, hosts, legal.write(place, r, scenario), side_of, port)
        steps = r.randint(1, 8)
        running = wait_for(lambda: steps_done(folder) >= steps or place.ended(processes[0]), 90 * place.patience)
        if not running or place.ended(processes[0]):
            outcome.faults.append("the run over two hosts did not start: " + place.finish(processes[0], 1).said())
            return outcome
        time.sleep(r.random() * 0.3)
        cut_at, began = r.randrange(2), time.monotonic()
        ranks = f"{side_of.count(0)} + {side_of.count(1)} ranks"
        place.commands.append(f"# {ranks}, cut at host {'ab'[cut_at]} after step {steps}")
        hosts.cut(cut_at)
        outcome.count("cut")
        wait_for(lambda: not marked_processes(place.mark), STOP_BOUND_S * place.patience)
        outcome.stop_seconds = time.monotonic() - began
        for rank, process in enumerate(processes):
            judge(outcome, place.finish(process, 0.5), rank, side_of)
    aftermath(outcome, place, folder, killed=False)
    return outcome

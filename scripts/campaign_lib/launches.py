"""Ranks started by hand with torchrun's variables: one that reads another scenario, doubles, strangers at the door."""
import random
import secrets
import socket
import time

from campaign_lib import draw, legal
from campaign_lib.kills import steps_done, wait_for
from campaign_lib.outcome import Outcome
from campaign_lib.program import manners

NAME, WHAT = "launches", "ranks by hand: another scenario on one of them, doubles, strangers at the rendezvous"
KINDS = ["as torchrun", "another key", "another key", "stranger", "stranger", "double"]
STOP_BOUND_S = 30.0
# What one rank reads otherwise than the others; none changes the plan.
OTHER_KEYS = {"optimizer.lr": "0.0123", "seed": "99", "steps": "77", "checkpoint_every": "5", "optimizer.beta1": "0.7",
              "optimizer.warmup_steps": "9", "optimizer.weight_decay": "0.5", "algorithm.clip_low": "0.15"}


def skip_reason(_hotbunk):
    return ""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Team:
    """The ranks of one run, each a process with the variables that torchrun would set."""

    def __init__(self, place, file, world, out):
        self.place, self.file, self.world, self.out = place, file, world, out
        self.port, self.token = free_port(), secrets.token_hex(8)

    def start(self, rank, *more):
        environment = {"RANK": str(rank), "WORLD_SIZE": str(self.world), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(self.port), "HOTBUNK_TOKEN": self.token, "OMP_WAIT_POLICY": "passive"}
        return self.place.start("run", self.file, "--out", self.place.path(self.out), *more, environment=environment)

    def running(self, process, steps):
        folder = self.place.path(self.out)
        return wait_for(lambda: steps_done(folder) >= steps or self.place.ended(process), 60 * self.place.patience)


def says(r):
    """What a stranger sends: nothing, noise, another protocol, or the promise of very much."""
    return r.choice([b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(r.randrange(256) for _ in range(r.randint(1, 4000))),
                     b"\xff" * 8, b"\x00" * 64, b"\xff\xff\xff\x7f" * 4 + b"x" * 100_000])


def knock(r, port):
    """Strangers come to the rendezvous; some leave at once, the others stay as long as the answer lives."""
    guests = []
    for _ in range(r.choice([1, 5, 60])):
        try:
            guest = socket.create_connection(("127.0.0.1", port), timeout=2)
            guest.settimeout(0.2)
            guest.sendall(says(r))
        except OSError:
            continue  # not listening any more, or it hung up on us: both are its right
        if r.random() < 0.5:
            guest.close()
        else:
            guests.append(guest)
    return guests


def same_as_alone(outcome, place, file):
    """The launched run's result is the one that `run` alone makes (P7)."""
    alone = place.run("run", file, "--out", place.path("alone"))
    if outcome.expect(alone.code == 0, f"alone: exit {alone.code}: {alone.said()}"):
        a, b = legal.result_of(place.path("alone")), legal.result_of(place.path("out"))
        outcome.faults += [f"launched by hand, it has other {key}" for key in a if a[key] != b[key]]


def attempt(place, r):
    outcome, kind = Outcome(), r.choice(KINDS)
    steps = 3 if kind in ("as torchrun", "another key") else 40
    scenario = draw.small_job(r, worlds=(2, 3, 4), steps=steps)
    scenario["train"]["precision"] = {"params": "fp32"}
    world, file = scenario["cluster"]["ranks_per_device"], legal.write(place, r, scenario)
    team, odd = Team(place, file, world, "out"), r.randrange(world)
    outcome.count(kind)
    key = r.choice(sorted(OTHER_KEYS))
    more = ["--set", f"{key}={OTHER_KEYS[key]}"] if kind == "another key" else []
    began = time.monotonic()
    processes = [team.start(rank, *(more if rank == odd else [])) for rank in range(world)]
    guests = []
    if kind == "stranger":
        time.sleep(r.random())
        guests = knock(r, team.port)
        team.running(processes[0], 2)
        guests += knock(random.Random(r.random()), team.port)
    if kind == "double" and team.running(processes[0], 2):
        double = place.finish(team.start(odd), STOP_BOUND_S)
        outcome.faults += [f"the double of rank {odd}: {fault}" for fault in manners(double)]
        outcome.expect(double.code in (2, 3), f"the double of rank {odd}: exit {double.code}: {double.said()}")
    ended = [place.finish(process, STOP_BOUND_S + 30) for process in processes]
    for guest in guests:
        guest.close()
    outcome.faults += [f"rank {rank}: {fault}" for rank, done in enumerate(ended) for fault in manners(done)]
    if kind == "another key":
        outcome.stop_seconds = time.monotonic() - began
        outcome.expect(all(done.code in (2, 3) for done in ended),
                       f"rank {odd} has another {key}: exits {[done.code for done in ended]}")
        last = key.split(".")[-1]
        outcome.expect(any(last in done.err for done in ended), f"nobody names {key}: {ended[odd].said()}")
    elif outcome.expect(all(done.code == 0 for done in ended),
                        f"{kind}: exits {[done.code for done in ended]}: " + "".join(d.said() for d in ended)):
        same_as_alone(outcome, place, file)
    outcome.faults += place.left_behind()
    return outcome

"""What one attempt came to, and what all attempts of a part came to."""
import collections
import dataclasses


class Skipped(Exception):
    """What an attempt needs is not to be had here; its text says what."""


@dataclasses.dataclass
class Outcome:
    faults: list = dataclasses.field(default_factory=list)
    skipped: str = ""  # why nothing was tried
    stop_seconds: float = 0.0  # from the blow to the end of the last process
    counts: dict = dataclasses.field(default_factory=dict)  # what was done, by name: added up over attempts
    figures: dict = dataclasses.field(default_factory=dict)  # measured numbers by name: the largest is kept

    def count(self, name, number=1):
        self.counts[name] = self.counts.get(name, 0) + number

    def expect(self, true, otherwise):
        if not true:
            self.faults.append(otherwise)
        return bool(true)


@dataclasses.dataclass
class Tally:
    part: str
    tried: int = 0
    survived: int = 0
    failures: list = dataclasses.field(default_factory=list)  # {"index", "faults", "again", "folder"}
    skipped: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    longest_stop_s: float = 0.0
    seconds: float = 0.0
    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    figures: dict = dataclasses.field(default_factory=dict)

    def add(self, outcome, seconds):
        self.seconds += seconds
        if outcome.skipped:
            self.skipped[outcome.skipped] += 1
            return
        self.tried += 1
        self.survived += not outcome.faults
        self.longest_stop_s = max(self.longest_stop_s, outcome.stop_seconds)
        self.counts.update(outcome.counts)
        for name, value in outcome.figures.items():
            self.figures[name] = max(value, self.figures.get(name, value))

    def document(self):
        return {"part": self.part, "tried": self.tried, "survived": self.survived, "failed": len(self.failures),
                "skipped": dict(self.skipped), "longest_stop_s": round(self.longest_stop_s, 2),
                "seconds": round(self.seconds, 1), "counts": dict(self.counts), "figures": self.figures,
                "failures": self.failures}

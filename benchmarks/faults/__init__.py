"""Fault injection: interrupts training runs, resumes them, and compares them with undisturbed runs.

The faults are here: a seed determines their list. `programs` starts and watches runs, `inject` disturbs and compares
them, `scenarios` does so for files and nodes. `python -m benchmarks.faults` writes the record of the outcomes.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

CHECKPOINT_FILES = (
    "config.json",
    "model.safetensors",
    "optimizer.safetensors",
    "random.safetensors",
    "state.json",
)
TOKEN_CACHE, TOKEN_FILE = "token cache", "token file"


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A kind of fault.

    Attributes:
        title: Its name in records.
        points: The number of such faults in a full record.
        moments: When faults happen; of flips, the part of the file.
        targets: The processes or files that are affected.
    """

    title: str
    points: int
    moments: tuple[str, ...]
    targets: tuple[str, ...]


KINDS: Mapping[str, FaultKind] = MappingProxyType(
    {
        "kill": FaultKind(
            "kill -9",
            100,
            ("start", "step", "evaluation", "checkpoint", "rename"),
            ("launcher", "rank 0", "rank 1", "all"),
        ),
        "term": FaultKind(
            "SIGTERM", 12, ("start", "step", "evaluation", "checkpoint"), ("launcher", "rank 0", "rank 1")
        ),
        "stop": FaultKind("SIGSTOP of a rank", 8, ("step", "evaluation", "checkpoint", "rename"), ("rank 0", "rank 1")),
        "disk": FaultKind("full disk", 12, ("start", "step", "evaluation", "checkpoint"), ("disk",)),
        "flip": FaultKind(
            "flipped bit", 200, ("head", "tail", "anywhere"), (*CHECKPOINT_FILES, TOKEN_CACHE, TOKEN_FILE)
        ),
        "pair": FaultKind("two runs in one folder", 20, ("offset",), ("fresh", "resumed")),
        "node": FaultKind("lost and slow node", 8, ("step", "checkpoint"), ("cut 0", "cut 1", "killed 1", "slow 1")),
    }
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to inject.

    Attributes:
        kind: A key of `KINDS`.
        moment: One of the kind's moments.
        target: One of the kind's targets.
        seed: Determines everything else, for example the delay after the moment: see `draw`.
    """

    kind: str
    moment: str
    target: str
    seed: int

    def draw(self, what: str) -> float:
        """Return a pseudorandom number in [0, 1) from the seed and the name of a choice."""
        return random.Random(f"{self.seed} {what}").random()

    def __str__(self) -> str:
        return f"{self.kind}: {self.target} at {self.moment}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """The outcome of a fault.

    Attributes:
        fault: The fault.
        seconds: From the fault until no process of the run was left.
        survivors: Processes that had to be killed after the time limit.
        differs: Whether a loss, an evaluation or a final weight differs from the undisturbed run.
        unseen: For a flip: whether the run that read the file again reported nothing.
        problems: Other errors.
        left: What the disturbed run left or printed, for readers of the JSON file.
    """

    fault: Fault
    seconds: float
    survivors: int = 0
    differs: bool = False
    unseen: bool = False
    problems: tuple[str, ...] = ()
    left: str = ""

    @property
    def is_good(self) -> bool:
        """Whether there is no error of any kind."""
        return not (self.survivors or self.differs or self.unseen or self.problems)


def faults(seed: int, kinds: Iterable[str] = KINDS, points: int | None = None) -> tuple[Fault, ...]:
    """Return the faults of a record.

    All pairs of moment and target occur equally often, up to one. The first N faults of a kind do not depend on the
    other kinds or on the number of points.

    Args:
        seed: Determines all faults.
        kinds: Keys of `KINDS`.
        points: Faults per kind; None: the number in a full record.
    """
    return tuple(fault for kind in kinds for fault in _of_kind(seed, kind, points))


def _of_kind(seed: int, name: str, points: int | None) -> list[Fault]:
    kind, source = KINDS[name], random.Random(f"{seed} {name}")
    found: list[Fault] = []
    while len(found) < (kind.points if points is None else points):
        cases = list(product(kind.moments, kind.targets))
        source.shuffle(cases)
        found += [Fault(name, moment, target, source.getrandbits(32)) for moment, target in cases]
    return found[: kind.points if points is None else points]

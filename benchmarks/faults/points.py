"""The list of faults that a seed determines, and the record of their outcomes."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Any

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


def outcome_of(values: Mapping[str, Any]) -> FaultOutcome:
    """Return an outcome from its JSON object."""
    fault, problems = Fault(**values["fault"]), tuple(values["problems"])
    return FaultOutcome(**{**values, "fault": fault, "problems": problems})


def table(planned: Sequence[Fault], outcomes: Sequence[FaultOutcome]) -> str:
    """Return the results as a Markdown table with one row per kind."""
    lines = [
        "| fault | points | tried | survivors | runs that differ | flips unseen | other problems | longest end (s) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(fault.kind for fault in planned):
        those = [outcome for outcome in outcomes if outcome.fault.kind == name]
        cells = [
            KINDS[name].title,
            sum(fault.kind == name for fault in planned),
            len(those),
            sum(outcome.survivors for outcome in those),
            sum(outcome.differs for outcome in those),
            sum(outcome.unseen for outcome in those) if name == "flip" else "",
            sum(bool(outcome.problems) for outcome in those),
            f"{max((outcome.seconds for outcome in those), default=0.0):.1f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def record(facts: Mapping[str, Any], planned: Sequence[Fault], outcomes: Sequence[FaultOutcome]) -> str:
    """Return the whole record in Markdown.

    Args:
        facts: Result of `benchmarks.engine.machine.describe_run`, with `cores`, `minutes` and `notes`.
        planned: All requested faults.
        outcomes: Outcomes of the faults that were injected.
    """
    software = f"Python {facts['python']}, torch {facts['torch']}, bmburst {facts['bmburst']}"
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    notes = [f"- {note}" for note in facts["notes"]]
    lines = [
        "# Faults",
        "",
        f"{facts['date']}, {facts['device']} ({facts['cores']} cores), commit {facts['commit']}; {software}. "
        f"{facts['minutes']:.0f} minutes.",
        "",
        "```",
        f"$ {facts['command']}",
        "```",
        "",
        _READING,
        "",
        *([*notes, ""] if notes else []),
        table(planned, outcomes),
        "",
        "## Where kill -9 fell",
        "",
        *_spread(outcomes),
        "",
        "## What was not as it should be",
        "",
        *([f"- {_said(outcome)}" for outcome in bad] or ["Nothing."]),
    ]
    return "\n".join(lines) + "\n"


_READING = """A run of 12 steps on 2 ranks of the host runtime, with an evaluation every 4 steps and a checkpoint
every 3, is disturbed, goes on with `--resume` (or begins again where it had no checkpoint), is disturbed again and so
on until it is complete. Its losses, bits per byte, learning rates, gradient norms and evaluations are compared with
those of an undisturbed run after every fault, and the files of its last checkpoint at its end: every bit is the same or
the run differs. Survivors are processes of the run that are still there when it should have ended. The longest end is
the time from the fault until no process is left; of flips, pairs and slow nodes it is that of the whole run. A flip is
unseen when a run that reads the file again neither refuses nor says a word. Beside this file lies each point in
JSON."""


def _spread(outcomes: Sequence[FaultOutcome]) -> list[str]:
    """Return how often each state of the checkpoint folder was found after a kill."""
    places: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.fault.kind == "kill":
            place = f"{outcome.fault.moment}: {outcome.left}"
            places[place] = places.get(place, 0) + 1
    return [f"- {place}: {count}" for place, count in sorted(places.items())] or ["No point."]


def _said(outcome: FaultOutcome) -> str:
    wrong = [
        f"{outcome.survivors} survivors" if outcome.survivors else "",
        "differs" if outcome.differs else "",
        "unseen" if outcome.unseen else "",
        *outcome.problems,
    ]
    return f"{outcome.fault}: {'; '.join(filter(None, wrong))}"

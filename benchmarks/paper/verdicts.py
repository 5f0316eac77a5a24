"""What a claim of the paper is judged with: verdicts, ratios of recorded times, and whether their ranges overlap.

A recorded time is a median with the least and the most of its calls. Two methods whose ranges overlap differ by no more
than their measurements do. Imports no torch.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from benchmarks.paper.tables import MISSING, Row

KIB = 1024
CONFIRMED, NOT_CONFIRMED, NOT_TESTABLE = "confirmed", "not confirmed", "not testable here"
PARTLY = "partly"


class Verdict(NamedTuple):
    """What our runs say of a claim, and the numbers that say it."""

    verdict: str
    numbers: str


UNKNOWN = Verdict(MISSING, "-")


class Times(NamedTuple):
    """Milliseconds: the median of the calls, and their range."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, row: Row, *directions: str) -> "Times":
        """Return a row's time; with directions the sum of theirs.

        Args:
            row: A recorded row.
            directions: Keys of `milliseconds`, for example "forward" and "backward"; none where it has one time.
        """
        found: list[Mapping[str, Any]] = [row["milliseconds"][d] for d in directions] or [row["milliseconds"]]
        return cls(*(sum(times[name] for times in found) for name in cls._fields))

    def over(self, other: "Times") -> float:
        """Return how many times as long it takes, by the medians."""
        return self.median / other.median

    def overlaps(self, other: "Times") -> bool:
        """Return whether the ranges have a time in common."""
        return self.least <= other.most and other.least <= self.most


def judged(holds: bool, numbers: str, where: str = "") -> Verdict:
    """Return the verdict on a claim that holds or not.

    Args:
        holds: Whether it does.
        numbers: What the verdict says beside.
        where: On what it was tested, for example "on NVLink".
    """
    return Verdict(f"{CONFIRMED if holds else NOT_CONFIRMED} {where}".rstrip(), numbers)


def by_share(share: float, least: float, numbers: str) -> Verdict:
    """Return whether a saving reaches what is claimed; "partly" where it is less but still a saving.

    Args:
        share: What is saved; negative where more is needed.
        least: What is claimed.
        numbers: What the verdict says beside.
    """
    if share >= least:
        return Verdict(CONFIRMED, numbers)
    return Verdict(PARTLY if share > 0 else NOT_CONFIRMED, numbers)


def by_length(ratios: Mapping[int, float], numbers: str) -> Verdict:
    """Return whether the others take longer at all lengths; if only not at the shortest, the length from which they do.

    Args:
        ratios: The others' time over ours, by tokens, ascending.
        numbers: What the verdict says beside.
    """
    if not ratios:
        return UNKNOWN
    lengths = list(ratios)
    below = [tokens for tokens in lengths if ratios[tokens] <= 1]
    if len(lengths) > 1 and below == lengths[:1]:
        return Verdict(f"confirmed from {lengths[1] // KIB}K on, not at {lengths[0] // KIB}K", numbers)
    return judged(not below, numbers)


def fewer_bytes(share: float) -> str:
    """Return a saving of bytes in words."""
    return f"{abs(share):.1%} {'fewer' if share > 0 else 'more'} bytes"


def overlapping(names: Iterable[str]) -> str:
    """Return that the ranges of these methods overlap with ours, or nothing."""
    named = " and ".join(names)
    return f", ranges overlap with {named}" if named else ""


def way_of(row: Row) -> str:
    """Return how a recorded step of ours attended, since by default it is not the paper's ring; "" if not recorded."""
    chosen = row.get("strategy")
    if not chosen:
        return ""
    ranks = row["cell"]["ranks"]
    outer = "" if chosen["heads"] == ranks else f" with {chosen['outer']}"
    moved = "peer copies" if row["transport"] == "peer" else row["transport"]
    return f"ours is `heads`{outer} by {moved}, not `burst`"

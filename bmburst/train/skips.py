"""Steps that are not taken, for loss or gradient are not finite: counted, told, and after too many in a row the end."""

import math
from collections.abc import Callable, Sequence

from bmburst.errors import RunError
from bmburst.train.exchange import StepFacts


class Skips:
    """Watches what all ranks know of each step; every rank comes to the same.

    Args:
        hosts: Name of each rank's host.
        most: Steps in a row that may be skipped; 0 for any number.

    Attributes:
        total: Skipped steps of the run; one that is resumed sets those of before.
        said: What there is to say of the last step; empty if it was taken.
    """

    def __init__(self, hosts: Sequence[str], most: int) -> None:
        self._hosts, self._most = tuple(hosts), most
        self._in_row = 0
        self._first = ""
        self.total = 0
        self.said = ""

    def add(self, step: int, facts: StepFacts) -> None:
        """Take a step."""
        if facts.is_finite:
            self._in_row, self.said = 0, ""
            return
        self.total += 1
        self._in_row += 1
        self.said = f"step {step} is skipped: {self._cause(facts)}"
        if self._in_row == 1:
            self._first = self.said

    def require(self, has_checkpoint: Callable[[], bool]) -> None:
        """Check that the run may go on.

        Args:
            has_checkpoint: Returns whether the run can be resumed.

        Raises:
            RunError: Too many steps in a row were skipped.
        """
        if self._most and self._in_row >= self._most:
            advice = "begin again with a smaller --optimizer.lr: there is no checkpoint yet"
            if has_checkpoint():
                advice = "--resume goes on from the last checkpoint, with a smaller --optimizer.lr"
            raise RunError(
                f"{self._in_row} steps in a row were skipped, so the run was ended; it began so: {self._first}\n"
                f"weights are as before; {advice}"
            )

    def _cause(self, facts: StepFacts) -> str:
        """Say what is not finite, and where: losses come before gradients, which ranks add up."""
        bad_losses = _where(facts.shares)
        if bad_losses:
            return f"the loss is not finite on {self._ranks(bad_losses)}"
        bad_parts = _where(facts.squares)
        if bad_parts:
            return f"losses are finite, but the gradient is not in the parts of {self._ranks(bad_parts)}"
        return "loss or gradient are finite on each rank, but not their sum"

    def _ranks(self, ranks: Sequence[int]) -> str:
        first = ranks[0]
        more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        return f"rank {first} (host {self._hosts[first]}){more}"


def _where(values: Sequence[float]) -> list[int]:
    return [rank for rank, value in enumerate(values) if not math.isfinite(value)]

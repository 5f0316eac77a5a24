"""Watches over a run: ranks that lag behind, stop signals, and steps skipped because of a NaN or infinity."""

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median
from types import FrameType

from bmburst.errors import RunError
from bmburst.runtime.watchdog import polite
from bmburst.train.clock import Timing
from bmburst.train.exchange import StepFacts

WINDOW = 20
"""Steps in one measurement window."""
_COLD = 2  # first timings to ignore: none is known yet, then kernels are being compiled
_RATIO = 1.2  # times the median: clocks, temperatures and uneven masks explain less
_LEAST = 0.01  # seconds a step below which there is no warning
_CAUSES = (("data", "data loading"), ("compute", "forward and backward"), ("optimizer", "optimizer"))


class LagWatch:
    """Compares the ranks' own times, without their waits for each other.

    Args:
        hosts: Host name of each rank.
        window: Number of steps that are averaged before each judgement.
    """

    def __init__(self, hosts: Sequence[str], window: int = WINDOW) -> None:
        self._hosts = tuple(hosts)
        self._window = window
        self._steps: list[tuple[Timing, ...]] = []
        self._cold = _COLD

    def add(self, timings: Sequence[Timing]) -> str | None:
        """Add one step's timing of every rank; return a warning if a rank lags, at most once a window."""
        if self._cold:
            self._cold -= 1
            return None
        self._steps.append(tuple(timings))
        if len(self._steps) < self._window:
            return None
        said = self._judge()
        self._steps.clear()
        return said

    def _judge(self) -> str | None:
        means = {
            part: [fmean(getattr(step[rank], part) for step in self._steps) for rank in range(len(self._hosts))]
            for part, _ in _CAUSES
        }
        totals = [sum(of_rank) for of_rank in zip(*means.values(), strict=True)]
        slowest, middle = max(range(len(totals)), key=totals.__getitem__), median(totals)
        if totals[slowest] < max(_RATIO * middle, middle + _LEAST):
            return None
        part, cause = max(_CAUSES, key=lambda each: means[each[0]][slowest] - median(means[each[0]]))
        return (
            f"rank {slowest} (host {self._hosts[slowest]}) was {totals[slowest] / max(middle, 1e-9):.1f} times slower "
            f"than the median over the last {self._window} steps: its {cause} took {means[part][slowest]:.3g} s a "
            f"step, the median rank's {median(means[part]):.3g} s"
        )


class StopRequest:
    """Whether this process was asked to stop.

    Attributes:
        signum: By which signal; 0 for not.
    """

    def __init__(self) -> None:
        self.signum = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note signals in the block; outside the main thread, where Python allows no handlers, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with polite((signal.SIGTERM, signal.SIGUSR1), self._note):
            yield

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.signum = signum


def stopped_by(facts: StepFacts, hosts: Sequence[str], step: int, *, saves: bool = True) -> str:
    """Return, alike on all ranks, which rank was asked to stop before a step's exchange; empty if none was.

    Args:
        facts: The exchanged facts of the step.
        hosts: Host name of each rank.
        step: Number of the step.
        saves: Whether the run writes checkpoints.
    """
    asked = [(rank, int(host.stop)) for rank, host in enumerate(facts.hosts) if host.stop]
    if not asked:
        return ""
    rank, signum = asked[0]
    end = (
        "the checkpoint is saved, and --resume goes on from it"
        if saves
        else "--checkpoint-every never: nothing is saved"
    )
    return f"stopped after step {step} by {signal.Signals(signum).name} on rank {rank} (host {hosts[rank]}); {end}"


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

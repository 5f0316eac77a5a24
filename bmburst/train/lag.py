"""Which rank holds up the others, and by what: told once it has done so for a while."""

from collections.abc import Sequence
from statistics import fmean, median

from bmburst.train.clock import Timing

WINDOW = 20
"""Steps that are looked at together."""
_COLD = 2  # times of a process that are not looked at: none are known yet, then those of kernels being compiled
_RATIO = 1.2  # times the median: less is what clocks, temperatures and the kernel's shares of a mask make
_LEAST = 0.01  # seconds a step: less is not worth a line
_CAUSES = (("data", "data loading"), ("compute", "forward and backward"), ("optimizer", "optimizer"))


class LagWatch:
    """Compares what each rank does itself, without its waits for the others.

    Args:
        hosts: Name of each rank's host.
        window: Steps after which it judges, and forgets.
    """

    def __init__(self, hosts: Sequence[str], window: int = WINDOW) -> None:
        self._hosts = tuple(hosts)
        self._window = window
        self._steps: list[tuple[Timing, ...]] = []
        self._cold = _COLD

    def add(self, timings: Sequence[Timing]) -> str | None:
        """Take one step's timing of every rank; return a warning if a rank lags, at most once a window."""
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

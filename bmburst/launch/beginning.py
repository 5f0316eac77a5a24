"""How the time from the start of a command to its first step, or to its model, is spent: `Beginning`."""

import os
import time
from collections.abc import Mapping

from bmburst.amounts import enumerated
from bmburst.launch.rank import LAUNCHER, start_time

_SHOWN = 0.05  # seconds of a part that is shown
_TICKS = os.sysconf("SC_CLK_TCK")


class Beginning:
    """Adds up the seconds of a beginning, part after part. A part that ends again gets the sum.

    Args:
        since: When the first part begins, on the clock of `time.monotonic`; None: now.
    """

    def __init__(self, since: float | None = None) -> None:
        self._last = time.monotonic() if since is None else since
        self._seconds: dict[str, float] = {}

    @classmethod
    def of_process(cls, imported: str, before: str = "", rank: int | None = None) -> "Beginning":
        """Return the beginning of a command, up to now.

        Args:
            imported: Name of the part from the start of the rank.
            before: Name of the part before it: what the launcher did before it started the rank. Left out if another
                launcher started the rank.
            rank: Process of the rank; None: this one.
        """
        own = _started(os.getpid() if rank is None else rank)
        launcher = os.environ.get(LAUNCHER, "")
        first = _started(int(launcher)) if launcher.isdigit() else None
        made = cls(own if first is None else first)
        if own is not None and first is not None:
            made.end(before, own)
        made.end(imported)
        return made

    def end(self, part: str, now: float | None = None) -> float:
        """End a part, which began where the one before it ended, and return the seconds since then.

        Args:
            part: Its name.
            now: When it ended; None: now.
        """
        now = time.monotonic() if now is None else now
        seconds = max(now - self._last, 0.0)
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds
        self._last = now
        return seconds

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of each part, in the order in which they began."""
        return self._seconds

    def until(self, what: str) -> str:
        """Return the parts that take time in lines of 80 columns: "12.3 s to the model: checks 1.2, imports 2.3"."""
        parts = (f"{name} {seconds:.1f}" for name, seconds in self._seconds.items() if seconds >= _SHOWN)
        return enumerated(f"{sum(self._seconds.values()):.1f} s to {what}", parts, 80)


def _started(pid: int) -> float | None:
    """Return when a process started, on the clock of `time.monotonic`; None if it has ended.

    Linux counts it in ticks since boot, on a clock that also runs while the machine sleeps.
    """
    ticks = start_time(pid)
    if not ticks:
        return None
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / _TICKS)

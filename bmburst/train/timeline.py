"""`--profile`: torch's profiler around chosen steps, one Chrome trace for each rank in the run folder."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bmburst.errors import UserError

FOLDER = "profile"
_STEPS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def profiled_steps(text: str | None) -> range:
    """Return the steps that "3" or "3-5" names; none for None.

    Raises:
        UserError: Text names none.
    """
    if text is None:
        return range(0)
    found = _STEPS.fullmatch(text.strip())
    first = int(found[1]) if found else 0
    last = int(found[2] or first) if found else 0
    if not 1 <= first <= last:
        raise UserError(f"profile '{text}'\nallowed: a step or a range of them, for example 3 or 3-5, counted from 1")
    return range(first, last + 1)


@dataclass(slots=True)
class Timeline:
    """Records the profiled steps of one rank; the file appears after the last of them.

    Attributes:
        steps: Which; empty for none.
        folder: The run folder.
        rank: This rank.
        on_gpu: Whether there is a GPU to record.
        written: The file, when it is there.
    """

    steps: range
    folder: Path
    rank: int
    on_gpu: bool
    written: Path | None = None
    _profiler: Any = field(default=None, repr=False)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Do a step inside. A run that is resumed within the range records the rest of it."""
        if number not in self.steps:
            yield
            return
        from torch.profiler import ProfilerActivity, profile, record_function

        if self._profiler is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
            self._profiler = profile(activities=activities)
            self._profiler.start()
        with record_function(f"step {number}"):
            yield
        if number == self.steps[-1]:
            self.close()

    def close(self) -> None:
        """Write what is recorded; a second time does nothing."""
        if self._profiler is None:
            return
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        folder = self.folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self.written = folder / f"steps-{self.steps[0]}-{self.steps[-1]}.rank-{self.rank}.json"
        profiler.export_chrome_trace(str(self.written))

"""What a rank of the attention benchmark does; it is run as `python -m bmburst.bench.rank FOLDER`, the job's folder."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from bmburst.bench.accuracy import measure_accuracy
from bmburst.bench.cells import Cell, accuracy_ranks
from bmburst.bench.job import Job
from bmburst.bench.loop import Loop, run_rank
from bmburst.bench.methods import LocalKernel, Setting, all_methods
from bmburst.bench.party import Party
from bmburst.bench.patterns import pattern_of
from bmburst.bench.rows import Row
from bmburst.bench.speed import Effort, measure_speed, memory_refusal
from bmburst.bench.table import one_line


def main(argv: list[str]) -> None:
    """Run one rank.

    Args:
        argv: The job's folder.
    """
    folder = Path(argv[0])
    run_rank(_AttentionLoop, Job.read(folder), folder)


class _AttentionLoop(Loop[Cell]):
    job: Job

    def prepare(self) -> None:
        self.kernel = LocalKernel(self.job.kernel)
        self.methods = all_methods(self.device.type)
        self.parties = {size: self._party(size) for size in accuracy_ranks(self.world)}

    def refusal(self, cell: Cell) -> str | None:
        method = self.methods[cell.method]
        return method.refusal(cell) or memory_refusal(method, cell, self.gauge)

    def measure(self, cell: Cell) -> Row:
        method, party = self.methods[cell.method], self.parties[cell.ranks]
        assert party is not None  # this rank takes part
        setting = Setting(
            party=party, kernel=self.kernel, kernel_name=self.job.kernel, deterministic=self.job.deterministic
        )
        if cell.suite == "accuracy":
            found = measure_accuracy(method, cell, setting)
        else:
            found = measure_speed(method, cell, setting, self.gauge, self._effort())
        return {"layout": method.layout(cell), "kernel": self._kernel_name(cell), **found}

    def line(self, cell: Cell, row: Row) -> str:
        return one_line(cell, row)

    def _effort(self) -> Effort:
        trace = Path(self.job.trace) if self.job.trace else None
        return Effort(repeats=self.job.repeats, seconds=self.job.cell_seconds, trace=trace)

    def _kernel_name(self, cell: Cell) -> str:
        dtype: torch.dtype = getattr(torch, cell.dtype)
        q = torch.empty(1, 1, 1, cell.head_dim, dtype=dtype, device=self.device)
        return self.kernel.name(q, q, pattern_of(cell.mask, cell.tokens))

    def _party(self, size: int) -> Party | None:
        """Return the party of the first `size` ranks; None where this rank is not in it. All ranks call it."""
        group = dist.group.WORLD if size == self.world else dist.new_group(list(range(size)))
        if self.rank >= size:
            return None
        assert group is not None  # this rank is in it
        return Party(group=group, rank=self.rank, size=size, device=self.device, is_world=size == self.world)


if __name__ == "__main__":
    main(sys.argv[1:])

"""The file of results of the attention benchmark."""

import math
import statistics
from typing import Any, ClassVar

from bmburst.bench.cells import Cell
from bmburst.bench.rows import FAILED, OK, REFUSED, ResultFile, Row
from bmburst.bench.work import forward_flops

__all__ = ["FAILED", "OK", "REFUSED", "Results", "Row"]

_PLAIN = ("sequence", "batch")  # suites whose cells take the same time for the same work


class Results(ResultFile[Cell]):
    """See `ResultFile`."""

    FORMAT: ClassVar[str] = "bmburst attention benchmark 1"

    @staticmethod
    def make_cell(values: dict[str, Any]) -> Cell:
        """See `ResultFile.make_cell`."""
        return Cell(**values)

    def estimate(self, cell: Cell) -> float:
        """Return about how many seconds a cell will take: the median of those nearest in work, scaled by it.

        Only cells of the same kind of run are looked at; 0 where there is none. The first to use a kernel took longer.
        """
        known = [
            (other, float(row["seconds"]))
            for suite in (_PLAIN if cell.suite in _PLAIN else (cell.suite,))
            for other, row in self.cell_rows(suite)
            if row["status"] == OK and (other.ranks, other.device) == (cell.ranks, cell.device)
        ]
        if not known:
            return 0.0
        work = forward_flops(cell)
        nearest = min((forward_flops(other) for other, _ in known), key=lambda flops: abs(math.log(flops / work)))
        seconds = statistics.median(seconds for other, seconds in known if forward_flops(other) == nearest)
        return seconds * max(0.5, work / nearest)

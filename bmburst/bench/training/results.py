"""The file of results of the training benchmark."""

import statistics
from typing import Any, ClassVar

from bmburst.bench.rows import OK, ResultFile
from bmburst.bench.training.bound import flops
from bmburst.bench.training.cells import STEPS, TrainCell
from bmburst.bench.training.methods import METHODS
from bmburst.schedule.hardware import machine_of

_BUILDING = 10.0  # seconds of a cell beside its steps: weights, kernels, rates
_FEW = 5  # steps of a long cell, warm-up included


class TrainResults(ResultFile[TrainCell]):
    """See `ResultFile`."""

    FORMAT: ClassVar[str] = "bmburst training benchmark 1"

    @staticmethod
    def make_cell(values: dict[str, Any]) -> TrainCell:
        """See `ResultFile.make_cell`."""
        return TrainCell(**values)

    def estimate(self, cell: TrainCell) -> float:
        """Return about how many seconds a cell will take: as the nearest of its suite, else as the planner predicts."""
        work = flops(cell) / cell.ranks
        known = [
            (flops(other) / other.ranks, float(row["seconds"]))
            for other, row in self.cell_rows(cell.suite)
            if row["status"] == OK and other.device == cell.device
        ]
        near = [seconds for done, seconds in known if work / 1.5 <= done <= work * 1.5]
        if near:
            return statistics.median(near)
        machine = machine_of(self.runs[-1]["device"]) if self.runs else None
        predicted = None if machine is None else METHODS[cell.method].predict(cell, machine)
        return 0.0 if predicted is None else _BUILDING + STEPS.get(cell.suite, _FEW) * predicted.seconds

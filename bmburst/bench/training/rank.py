"""What a rank of the training benchmark does; it is run as `python -m bmburst.bench.training.rank FOLDER`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from bmburst.bench.loop import Loop, run_rank
from bmburst.bench.methods import LocalKernel, Setting
from bmburst.bench.party import Party
from bmburst.bench.rows import Row
from bmburst.bench.training.cells import TrainCell
from bmburst.bench.training.job import TrainJob
from bmburst.bench.training.methods import METHODS
from bmburst.bench.training.table import one_line
from bmburst.schedule.hardware import machine_of


def main(argv: list[str]) -> None:
    """Run one rank.

    Args:
        argv: The job's folder.
    """
    folder = Path(argv[0])
    job = TrainJob.read(folder)
    run_rank(_TrainLoop, job, folder, tensor=job.tensor)


class _TrainLoop(Loop[TrainCell]):
    job: TrainJob

    def prepare(self) -> None:
        group = dist.group.WORLD
        assert group is not None  # it was begun
        party = Party(group=group, rank=self.rank, size=self.world, device=self.device)
        self.setting = Setting(party=party, kernel=LocalKernel(self.job.kernel), kernel_name=self.job.kernel)

    def refusal(self, cell: TrainCell) -> str | None:
        method, on_gpu = METHODS[cell.method], self.device.type == "cuda"
        machine = machine_of(torch.cuda.get_device_name(self.device)) if on_gpu else None
        capacity = float(torch.cuda.get_device_properties(self.device).total_memory) if on_gpu else 0.0
        return method.refusal(cell) or method.memory_refusal(cell, machine, capacity)

    def measure(self, cell: TrainCell) -> Row:
        from bmburst.bench.training.losses import measure_losses
        from bmburst.bench.training.steps import Means, measure_steps

        means = Means(
            setting=self.setting,
            gauge=self.gauge,
            from_all=self.from_all,
            folder=self.folder,
            repeats=self.job.repeats,
            seconds=self.job.cell_seconds,
            trace=Path(self.job.trace) if self.job.trace else None,
        )
        if cell.suite == "step":
            return measure_steps(cell, means)
        return measure_losses(cell, means, self.job.text, self.job.steps)

    def line(self, cell: TrainCell, row: Row) -> str:
        return one_line(cell, row)


if __name__ == "__main__":
    main(sys.argv[1:])

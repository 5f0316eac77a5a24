"""What the ranks of the training benchmark are told."""

from dataclasses import dataclass
from typing import ClassVar

from bmburst.bench.job import AnyJob
from bmburst.bench.training.cells import TrainCell
from bmburst.bench.training.results import TrainResults


@dataclass(frozen=True, kw_only=True)
class TrainJob(AnyJob[TrainCell]):
    """One start of the ranks: BMTrain knows one tensor degree a process, so methods of different degrees start apart.

    Attributes:
        tensor: Ranks that share each matrix.
        steps: Steps of the suites that train for losses; 0: each suite's own.
        text: What those train on, as `bmburst train --data` takes it.
    """

    PROGRAM: ClassVar[str] = "bmburst.bench.training.rank"

    runtime: str = "bmtrain"
    tensor: int = 1
    steps: int = 0
    text: str = "stdlib"

    @staticmethod
    def results() -> type[TrainResults]:
        """See `AnyJob.results`."""
        return TrainResults

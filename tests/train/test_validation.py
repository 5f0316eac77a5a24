"""`Trainer` checks a configuration against its ranks once, and not at all if a command has done so."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bmburst.errors import UserError
from bmburst.train.config import OptimizerConfig, ParallelConfig, TrainConfig
from tests.distributed.programs import on_program
from tests.train import run_program as program


class Counted(TrainConfig):
    """Records the numbers of ranks that it and its copies are validated for."""

    calls: list[int] = []  # noqa: RUF012

    def validate(self, world_size: int) -> None:
        self.calls.append(world_size)
        super().validate(world_size)


def counted(folder: Path, name: str, **changes: Any) -> Counted:
    Counted.calls.clear()
    made = program.config(folder, name, **changes)
    return Counted(**{field.name: getattr(made, field.name) for field in dataclasses.fields(made)})


@on_program(2)
def test_a_run_from_python_is_validated_once(tmp_path: Path) -> None:
    from bmburst.train.trainer import Trainer, run

    folder, size = tmp_path, 2
    # Each of them asks the planner: for the policy, pinned memory, the room of a save, and the report at the end.
    whole = {"recompute": "auto", "optimizer": OptimizerConfig(offload=True), "host_memory": 1.0, "steps": 2}
    for valid_for, calls in ((None, [size]), (size + 1, [size]), (size, [])):
        run(counted(folder, f"run-{valid_for}", **whole), valid_for=valid_for)
        assert Counted.calls == calls, valid_for
    impossible = counted(folder, "impossible", batch_size=6, parallel=ParallelConfig(data_parallel=size + 1))
    with pytest.raises(UserError, match=f"does not divide {size} ranks"):
        Trainer(impossible)
    assert Counted.calls == [size]

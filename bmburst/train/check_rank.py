"""What a rank of `bmburst check` does: a few steps of training, and files with what came of every tensor.

It is run as `python -m bmburst.train.check_rank FOLDER STEPS`, where FOLDER holds the configuration. Tensors are
gathered one at a time to rank 0 and written at once, so that no process ever holds the model.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bmburst.checkpoint.tensor_files import SafetensorsWriter
from bmburst.train.config import TrainConfig
from bmburst.train.resolve import CONFIG_FILE, resolve

if TYPE_CHECKING:
    from bmburst.zero import NamedShard, Weights

# Parameters before the first step, gradients of the first step, parameters after the last.
BEFORE_FILE, GRADIENT_FILE, AFTER_FILE = "before.safetensors", "gradient.safetensors", "after.safetensors"
STEPS_FILE = "steps.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """What each step of a run gave.

    Attributes:
        losses: Mean loss of each step, in nats per token.
        grad_norms: Norm of each step's gradient before clipping.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]

    @classmethod
    def read(cls, folder: Path) -> "Steps":
        """Return what `measure` left in a folder."""
        values = json.loads((folder / STEPS_FILE).read_text(encoding="utf-8"))
        return cls(losses=tuple(values["losses"]), grad_norms=tuple(values["grad_norms"]))

    def write(self, folder: Path) -> None:
        """Write it where `read` finds it."""
        (folder / STEPS_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def measure(config: TrainConfig, steps: int) -> None:
    """Train some steps and leave in `config.output` what came of them. Every rank calls it; rank 0 writes.

    Parameters are written in fp32 where the optimizer keeps them so: rounded to bfloat16 they would hide small steps.

    Raises:
        UserError: Something that the configuration names cannot work.
    """
    from bmburst.train.trainer import Trainer

    trainer = Trainer(config)
    trainer.restore()
    # BMTrain classes, as the trainer's own.
    from bmburst.zero import Weights, named_shards

    shards = named_shards(trainer.model)
    state = trainer.optimizer.state
    _save(trainer.folder / BEFORE_FILE, shards, lambda _: Weights.THEMSELVES)
    losses, norms = [], []
    for step in range(steps):
        trainer.mesh.set_checks(step == 0)
        loss, _ = trainer.backward(trainer.next_batch())
        if step == 0:
            _save(trainer.folder / GRADIENT_FILE, shards, lambda shard: shard.storage.grad)
        _, norm = trainer.update()
        losses.append(loss)
        norms.append(norm)
    if config.dtype == "float32":
        _save(trainer.folder / AFTER_FILE, shards, lambda _: Weights.THEMSELVES)
    else:
        _save(trainer.folder / AFTER_FILE, shards, lambda shard: state[shard.storage].get("_param_fp32"), torch.float32)
    if trainer.is_main:
        Steps(losses=tuple(losses), grad_norms=tuple(norms)).write(trainer.folder)


def main(argv: list[str]) -> None:
    """Run one rank.

    Args:
        argv: The run's folder, which holds its configuration, and the number of steps.
    """
    folder = Path(argv[0])
    measure(resolve((folder / CONFIG_FILE,)).replace(output=folder), int(argv[1]))


def _save(
    path: Path,
    shards: "list[NamedShard]",
    pick: "Callable[[NamedShard], Tensor | Weights | None]",
    dtype: torch.dtype | None = None,
) -> None:
    """Write one tensor for every parameter, put together from all ranks' pieces."""
    from bmburst.zero import gather

    full = (gather(shard, pick(shard), dtype=dtype, root=0) for shard in shards)
    if shards[0].rank != 0:
        for _ in full:  # takes part in each gather
            pass
        return
    with SafetensorsWriter(path, [(s.name, s.shape, dtype or s.dtype) for s in shards]) as writer:
        for tensor in full:
            assert tensor is not None  # this is the rank that receives
            writer.write(tensor)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Train for the losses alone: the same curve by every method, and a curve on real text."""

from bmburst.bench.rows import Row
from bmburst.bench.timing import Times
from bmburst.bench.training.cells import STEPS, TrainCell
from bmburst.bench.training.methods import METHODS
from bmburst.bench.training.peers import build
from bmburst.bench.training.steps import Means, memory, timed
from bmburst.train.config import DataConfig


def measure_losses(cell: TrainCell, means: Means, text: str, steps: int) -> Row:
    """Return every step's loss in nats a token and gradient norm, and the time of a step. Every rank calls it.

    Args:
        cell: What is trained.
        means: What it is measured with.
        text: On what, as `TrainConfig.data.source`; bytes are its tokens.
        steps: How many; 0: as many as the suite has.
    """
    data = DataConfig(source=text, tokenizer="bytes", cache=means.folder)
    trainer = build(cell, means.setting, data, means.folder, steps=steps or STEPS[cell.suite])
    milliseconds, found = timed(trainer, trainer.config.steps, means)
    return {
        "recompute": METHODS[cell.method].recompute(cell),
        "losses": [step.loss for step in found],
        "grad_norms": [step.grad_norm for step in found],
        "milliseconds": Times.of(milliseconds[1:] or milliseconds).to_dict(),
        **memory(means.gauge, found),
    }

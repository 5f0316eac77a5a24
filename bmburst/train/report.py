"""All that a run shows and writes of its steps, on rank 0; on the others nothing."""

import contextlib

from bmburst.config import to_dict
from bmburst.train.config import TrainConfig
from bmburst.train.metrics import EvalMetrics, MetricsWriter, StepMetrics
from bmburst.train.plot import plot_losses
from bmburst.train.progress import Progress
from bmburst.train.summary import Summary
from bmburst.train.wandb import Wandb


class Report(contextlib.ExitStack):
    """Metrics files, progress, plot and summary of a run.

    Args:
        config: The run; `output` is set.
        first_step: First step of this process.
        is_main: Whether this rank reports; else every call does nothing.
    """

    def __init__(self, config: TrainConfig, first_step: int, *, is_main: bool) -> None:
        super().__init__()
        assert config.output is not None
        self._folder, self._summary = config.output, Summary()
        self._writer: MetricsWriter | None = None
        self._bar: Progress | None = None
        if is_main:
            online = None if config.wandb is None else Wandb(config.wandb, self._folder, to_dict(config))
            self._writer = self.enter_context(MetricsWriter(self._folder, first_step, online))
            self._bar = self.enter_context(Progress(config.steps, first_step))

    def step(self, metrics: StepMetrics) -> None:
        """Take a step."""
        if self._writer and self._bar:
            self._writer.write(metrics)
            self._bar.update(metrics)
            self._summary.add(metrics)

    def held_out(self, metrics: EvalMetrics) -> None:
        """Take an evaluation; the plot is drawn anew."""
        if self._writer and self._bar:
            self._writer.write_eval(metrics)
            self._bar.update_eval(metrics)
            plot_losses(self._folder)

    def note(self, text: str) -> None:
        """Show a line that stays; nothing where it is empty."""
        if self._bar and text:
            self._bar.note(text)

    def finish(self) -> None:
        """Write and show the summary."""
        if self._bar:
            self.note(self._summary.write(self._folder))
            self.note(f"run folder: {self._folder}")

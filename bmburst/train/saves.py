"""What a run leaves for `resume`: its configuration, and checkpoints that are written beside training. `RunSaves`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bmburst.amounts import GIB
from bmburst.checkpoint import adapter, hugging_face
from bmburst.checkpoint.background import BackgroundSaves
from bmburst.checkpoint.base_model import Base
from bmburst.checkpoint.files import RunProgress, newest_complete, verified_together
from bmburst.checkpoint.sharded_files import on_every_rank
from bmburst.checkpoint.training import Draft
from bmburst.checkpoint.training import load as load_checkpoint
from bmburst.errors import UserError
from bmburst.memory import available_bytes
from bmburst.plan.memory import memory_of
from bmburst.schedule.hardware import HOST, hardware_like
from bmburst.train.config import TrainConfig
from bmburst.train.machine import planned
from bmburst.train.reference import reference_text, require_reference
from bmburst.train.resolve import write_run_config

if TYPE_CHECKING:
    from bmburst.blocks.model import Llama
    from bmburst.optim.adamw import AdamW


class RunSaves(BackgroundSaves):
    """The checkpoints of a run. Every rank makes the same calls.

    Args:
        config: The run, with a recompute policy; `output`, the run folder, is set.
        model: The model.
        optimizer: Its optimizer.
        tokenizer: Files of the tokenizer by name, which each checkpoint holds.
        asked: The run as it was asked for, with "auto" where it was given.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: "Llama",
        optimizer: "AdamW",
        tokenizer: Mapping[str, bytes],
        asked: TrainConfig,
    ) -> None:
        super().__init__()
        assert config.output is not None
        self.folder = config.output
        self._config, self._model, self._optimizer, self._tokenizer = config, model, optimizer, tokenizer
        self._asked = asked
        # What the configuration asks `restore` to load, until it is called.
        self._unread = "resume" if config.resume else "lora.init_from" if config.lora.init_from else ""
        self._unread = self._unread or ("init_from" if config.init_from else "")
        self._is_own = bool(config.resume)
        self._base: Base | None = None
        self._reference = None if config.reference is None else reference_text(config, config.reference)

    def restore(self) -> RunProgress | None:
        """Load the newest complete checkpoint of the run folder, or the weights of `init_from`, as configured.

        Returns:
            The progress of the checkpoint; None if the run begins.

        Raises:
            UserError: `resume` is true and there is no checkpoint, or all are damaged, or it has another model
                or another reference.
        """
        progress = self._read()
        self._unread = ""
        return progress

    def _read(self) -> RunProgress | None:
        """See `restore`."""
        config, base = self._config, self._config.init_from
        newest = verified_together(self.folder) if config.resume else self.folder
        if newest == self.folder and config.resume is True:
            raise UserError(
                f"{self.folder} has no complete checkpoint to resume from\nfix: start a new run without --resume"
            )
        if base is not None and (config.lora.is_on or newest == self.folder):
            base = verified_together(base)
            hugging_face.load(self._model, base)
            if config.lora.is_on:
                self._base = Base.open(base, config.model)
        if newest == self.folder:
            if config.lora.init_from is not None:
                adapter.load(self._model, verified_together(config.lora.init_from), self._base)
            return None
        require_reference(config, newest)
        return load_checkpoint(newest, self._model, self._optimizer, base=self._base)

    def require_restored(self) -> None:
        """Raise UserError if the configuration names weights to begin with, and `restore` has not been called."""
        if self._unread:
            raise UserError(
                f"{self._unread} is set, and its weights are not loaded\nfix: trainer.restore(), before the first step"
            )

    def require_folder(self) -> None:
        """Check that this run may save: its weights are loaded, and the folder has no checkpoints of another run.

        A later `resume` would take the newest checkpoint, of whichever run. Collective.

        Raises:
            UserError: On all ranks, if it may not.
        """
        self.require_restored()
        if not self._is_own:
            on_every_rank(self._require_no_checkpoint)
            self._is_own = True

    def _require_no_checkpoint(self) -> None:
        if (found := newest_complete(self.folder)) is not None:
            raise UserError(
                f"output {self.folder}: it holds {found.name} of another run\n"
                "fix: another output, or resume=True and trainer.restore() to continue that run"
            )

    def write_config(self) -> None:
        """Write the configuration to the run folder, for `resume`; call it on one rank."""
        write_run_config(self._asked, self.folder)

    def go_beside_training(self, progress: RunProgress) -> str:
        """Reserve host memory if training goes on after a save; return why there is none, or nothing.

        Call it after the first step, when the other memory of the run is in use.
        """
        every, done = self._config.checkpoint_every, progress.step
        if not every or -(-done // every) * every >= self._config.steps:  # only the last step is saved
            return ""
        return self.prepare(self._draft(progress), self._free())

    def save(self, progress: RunProgress, *, wait: bool) -> Path:
        """Write a checkpoint and return its path.

        Args:
            progress: The progress of the run.
            wait: Whether to return when it is on disk. Otherwise training may go on; see `BackgroundSaves.start`.

        Raises:
            UserError: On all ranks, if a rank cannot write this checkpoint or the previous one; or as `require_folder`.
        """
        self.require_folder()
        draft = self._draft(progress)
        self.start(draft)
        if wait:
            self.wait()
        return draft.target

    def has_one(self) -> bool:
        """Return whether the run folder has a complete checkpoint, after the started save has ended."""
        self.wait()
        return newest_complete(self.folder) is not None

    def _draft(self, progress: RunProgress) -> Draft:
        return Draft.of(
            self.folder,
            self._model,
            self._optimizer,
            replace(progress, reference=self._reference),
            keep=self._config.keep_checkpoints,
            base=self._base,
            tokenizer=self._tokenizer,
        )

    def _free(self) -> int | None:
        """Return the bytes of this host that copies may take."""
        available, most = available_bytes(), self._config.host_memory
        if available is None or most is None:
            return available
        import bmtrain as bmt

        hardware = hardware_like(HOST)
        used = memory_of(planned(self._config, bmt.world_size(), 1, hardware), hardware).in_host
        return min(available, int(most * GIB - used))

"""Saves and loads training checkpoints. They are atomic, and stored by parameter name for any number of ranks.

A checkpoint is a folder `checkpoints/step-000050` of the run folder. `model.safetensors` and `config.json` are a
Hugging Face LLaMA. `optimizer.safetensors` holds AdamW's state by parameter name. For large models both are in parts
with an index. `random.safetensors` holds the state of torch's random number generators. `state.json` holds the rest,
with size and checksum of every file and its own checksum. The files of a tokenizer on this machine are copied beside
them. The learning rate is a function of the step and needs no state.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from errno import EFBIG
from pathlib import Path
from typing import TYPE_CHECKING

from bmburst import __version__
from bmburst.amounts import bytes_text
from bmburst.checkpoint.files import (
    FOLDER,
    FORMAT,
    STATE_FILE,
    RunProgress,
    checkpoints,
    newest_complete,
    problem_of,
    read_progress,
    step_of,
)
from bmburst.checksum import text_of, with_checksum
from bmburst.errors import UserError
from bmburst.outputs import FULL, free_bytes

if TYPE_CHECKING:
    from bmburst.blocks.model import Llama
    from bmburst.checkpoint.base_model import Base
    from bmburst.checkpoint.sharded_files import Contents, ShardedTensor, TensorSource
    from bmburst.optim.adamw import AdamW

RANDOM_FILE = "random.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A checkpoint that is not written yet. Every rank makes it at the step that is saved.

    Attributes:
        run_folder: The run folder.
        progress: The progress of the run.
        contents: The other files.
        keep: Number of checkpoints to keep.
    """

    run_folder: Path
    progress: RunProgress
    contents: "Contents"
    keep: int

    @classmethod
    def of(
        cls,
        run_folder: Path,
        model: "Llama",
        optimizer: "AdamW",
        progress: RunProgress,
        *,
        keep: int,
        part_bytes: int | None = None,
        base: "Base | None" = None,
        tokenizer: Mapping[str, bytes] | None = None,
    ) -> "Draft":
        """Return the checkpoint of the present step.

        For a model with adapters only the adapters' weights are written, in PEFT's format. They name the base model
        `base`. `tokenizer` maps names of the tokenizer's files to their content, which is written beside the weights.
        """
        from bmburst.checkpoint import adapter, hugging_face
        from bmburst.checkpoint.optimizer_state import optimizer_group
        from bmburst.checkpoint.sharded_files import Contents

        weights = (
            hugging_face.contents(model, part_bytes=part_bytes) if model.lora is None else adapter.contents(model, base)
        )
        groups = (*weights.groups, optimizer_group(model, optimizer, part_bytes))
        files = {**weights.files, RANDOM_FILE: _random_state(), **(tokenizer or {})}
        return cls(run_folder=run_folder, progress=progress, contents=Contents(groups, files), keep=keep)

    @property
    def target(self) -> Path:
        """The folder of the checkpoint."""
        return self.run_folder / FOLDER / f"step-{self.progress.step:06d}"

    @property
    def _partial(self) -> Path:
        return self.target.with_name(f".{self.target.name}")

    @property
    def tensors(self) -> tuple["ShardedTensor", ...]:
        """All tensors that are written."""
        return tuple(tensor for group in self.contents.groups for tensor in group.tensors)

    def write(self, source: "TensorSource") -> Path:
        """Write the checkpoint, and keep only the newest `keep` checkpoints up to it. Every rank must call it.

        `bmburst.checkpoint.sharded_files` describes which ranks write.

        The folder gets its name only when all its files are on disk. So a run that is killed at any point leaves the
        previous checkpoint intact, and at most some folders with names that begin with a dot. The next call removes
        these. After a failed write the incomplete folder is removed at once.

        Raises:
            UserError: On all ranks, if a rank cannot write.
        """
        import bmtrain as bmt

        is_main, partial_folder = bmt.rank() == 0, self._partial
        try:
            source.on_every_rank(lambda: _remove_hidden(self.target.parent) if is_main else None)
            checksums = self.contents.write(partial_folder, source)
            source.on_every_rank(lambda: self._publish(checksums) if is_main else None)
        except OSError as error:  # on all ranks
            if is_main:  # before a rank ends, which would end the others
                shutil.rmtree(partial_folder, ignore_errors=True)
            source.on_every_rank(lambda: None)
            if error.errno == EFBIG:
                fix = "raise the limit of a file's size (ulimit -f), or write to another file system"
            else:  # the incomplete folder is gone
                fix = self._room() if error.errno in FULL else "give the right to write"
            raise UserError(
                f"cannot write the checkpoint {self.target}: {error.strerror}\n"
                f"fix: {fix}, then --resume continues the run{_from(self.run_folder)}"
            ) from error
        return self.target

    def _publish(self, checksums: Mapping[str, int]) -> None:
        """Give the folder its name when all files are on disk, then remove older checkpoints."""
        _save_state(self._partial / STATE_FILE, self.progress, checksums)
        for path in (*self._partial.iterdir(), self._partial):
            _sync(path)
        _hide(self.target)  # an old one of this step is damaged: a run resumes from the newest complete one
        self._partial.rename(self.target)
        _sync(self.target.parent)
        # Later and incomplete checkpoints are damaged. They do not count, or they would displace complete ones.
        upto = [path for path in checkpoints(self.run_folder) if step_of(path) <= self.progress.step]
        whole = [path for path in upto if problem_of(path) is None]
        for old in set(upto) - set(whole[-self.keep :]):
            _hide(old)
        _remove_hidden(self.target.parent)

    def _room(self) -> str:
        """Return the fix for a full disk, with numbers."""
        free = free_bytes(self.run_folder)
        return f"make room: a checkpoint needs {bytes_text(self.contents.nbytes)}, and {bytes_text(free)} are free"


def load(checkpoint: Path, model: "Llama", optimizer: "AdamW", *, base: "Base | None" = None) -> RunProgress:
    """Restore model, optimizer and random state on any number of ranks. Every rank must call it, and reads its shards.

    For a model with adapters only these are restored. The other weights must already be loaded from `base`.

    Raises:
        UserError: The checkpoint is truncated, not a checkpoint of bmburst, or of another model.
    """
    from bmburst.checkpoint import adapter, hugging_face
    from bmburst.checkpoint.optimizer_state import load_optimizer

    progress = read_progress(checkpoint)
    if model.lora is not None:
        adapter.load(model, checkpoint, base)
    else:
        hugging_face.load(model, checkpoint)
    load_optimizer(checkpoint, model, optimizer, max(progress.step - progress.skipped, 0))
    _load_random(checkpoint / RANDOM_FILE)
    return progress


def _hide(checkpoint: Path) -> None:
    """Rename a checkpoint, if it exists, to a hidden name, so that a kill during removal leaves no partial one."""
    if checkpoint.is_dir():
        checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.old"))


def _remove_hidden(folder: Path) -> None:
    for path in folder.glob(".step-*"):
        shutil.rmtree(path)


def _from(run_folder: Path) -> str:
    newest = newest_complete(run_folder)
    return f" from {newest.name}" if newest is not None else " (there is no checkpoint yet: begin it again)"


def _save_state(path: Path, progress: RunProgress, checksums: Mapping[str, int]) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(path.parent.iterdir())}
    state = {"format": FORMAT, "version": __version__, "step": progress.step, "data": dict(progress.data)}
    state |= {"tokenizer": progress.tokenizer, "skipped": progress.skipped, "files": sizes}
    state |= {} if progress.loss_scale is None else {"loss_scale": list(progress.loss_scale)}
    state |= {} if progress.reference is None else {"reference": progress.reference}
    state |= {"checksums": {name: text_of(checksums[name]) for name in sizes}}
    path.write_text(with_checksum(json.dumps(state, indent=2)), encoding="utf-8")


def _random_state() -> bytes:
    """Return the file with the state of torch's generators."""
    import torch
    from safetensors.torch import save

    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    data: bytes = save(states)
    return data


def _load_random(path: Path) -> None:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        states = load_file(path)
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except (SafetensorError, OSError, KeyError, RuntimeError, TypeError) as error:
        raise UserError(f"{path} holds no state of torch's generators\nfix: use another checkpoint") from error


def _sync(path: Path) -> None:
    """Flush a file or folder to disk (fsync), before anything that is written later."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

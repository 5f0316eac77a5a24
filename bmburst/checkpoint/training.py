"""Checkpoints: whole or not there, by parameter name, so that they load on any number of ranks.

A checkpoint is a folder `checkpoints/step-000050` of the run folder. `model.safetensors` and `config.json` are a
Hugging Face LLaMA; `optimizer.safetensors` holds AdamW's state by parameter name (of large models both are in parts,
with an index); `random.safetensors` the state of torch's random number generators; `state.json` the rest, with the size
of every file. The learning rate is a function of the step and needs no state.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bmburst.config import read_json
from bmburst.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from bmburst.blocks.model import Llama
    from bmburst.optim import AdamW
    from bmburst.zero import NamedShard

FOLDER = "checkpoints"
STATE_FILE = "state.json"
OPTIMIZER, RANDOM_FILE = "optimizer", "random.safetensors"
FORMAT = "bmburst-checkpoint-1"
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        step: Optimizer steps done.
        data: `Batches.state_dict()`.
        tokenizer: Name of the run's tokenizer.
        skipped: Steps of them that changed nothing.
    """

    step: int
    data: Mapping[str, Any]
    tokenizer: str
    skipped: int = 0


def newest_complete(run_folder: Path) -> Path | None:
    """Return the newest checkpoint of a run folder whose files are all there in full, or None."""
    return next((path for path in reversed(_checkpoints(run_folder)) if _problem(path) is None), None)


def read_progress(checkpoint: Path) -> Progress:
    """Return what a checkpoint says of its run.

    Raises:
        UserError: It is truncated, or no checkpoint of bmburst.
    """
    problem = _problem(checkpoint)
    if problem is not None:
        raise UserError(f"{checkpoint}: {problem}\nfix: use another checkpoint of the run")
    state = read_json(checkpoint / STATE_FILE)
    return Progress(
        step=state["step"], data=state["data"], tokenizer=state["tokenizer"], skipped=int(state.get("skipped", 0))
    )


def save(
    run_folder: Path,
    model: "Llama",
    optimizer: "AdamW",
    progress: Progress,
    *,
    keep: int,
    part_bytes: int | None = None,
) -> Path:
    """Write a checkpoint, and remove all but the newest `keep` up to it. Every rank calls it.

    `bmburst.checkpoint.sharded_files` says which ranks write.

    The folder appears under its name when everything in it is on disk: a run killed at any point leaves the checkpoint
    before, and at most folders whose names begin with a dot, which the next call removes.

    Raises:
        UserError: A rank cannot write it.
    """
    import bmtrain as bmt

    from bmburst.checkpoint import hugging_face

    target = run_folder / FOLDER / f"step-{progress.step:06d}"
    partial = target.with_name(f".{target.name}")
    is_writer = bmt.rank() == 0
    with _refusing(target):
        if is_writer:
            _remove_hidden(target.parent)
            partial.mkdir(parents=True)
        hugging_face.save(model, partial, part_bytes=part_bytes)
        _save_optimizer(partial, model, optimizer, part_bytes)
        if is_writer:
            _save_random(partial / RANDOM_FILE)
            _save_state(partial / STATE_FILE, progress)
            for path in (*partial.iterdir(), partial):
                _sync(path)
            _hide(target)  # of the same step: a damaged one, for a run resumes from the newest complete one
            partial.rename(target)
            _sync(target.parent)
            # Later ones are damaged: they do not count, or they would push out this one.
            upto = [path for path in _checkpoints(run_folder) if _step(path) <= progress.step]
            for old in upto[:-keep]:
                _hide(old)
            _remove_hidden(target.parent)
    bmt.synchronize()
    return target


def load(checkpoint: Path, model: "Llama", optimizer: "AdamW") -> Progress:
    """Restore model, optimizer and random state, on any number of ranks. Every rank calls it and reads its own part.

    Raises:
        UserError: The checkpoint is truncated, no checkpoint of bmburst, or of another model.
    """
    from bmburst.checkpoint import hugging_face

    progress = read_progress(checkpoint)
    hugging_face.load(model, checkpoint)
    _load_optimizer(checkpoint, model, optimizer, progress.step)
    _load_random(checkpoint / RANDOM_FILE)
    return progress


@contextlib.contextmanager
def alone_in(run_folder: Path) -> Iterator[None]:
    """Keep other processes from training in a run folder until the block ends, or this process does.

    Raises:
        UserError: One is.
    """
    run_folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run_folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"another process is training in {run_folder}\nfix: end it, or wait until it is done") from None
    except OSError:
        pass  # some network file systems do not lock folders
    try:
        yield
    finally:
        os.close(descriptor)


def _checkpoints(run_folder: Path) -> list[Path]:
    """Return a run's checkpoint folders, oldest first."""
    folder = run_folder / FOLDER
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _NAME.fullmatch(path.name) and path.is_dir()), key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _hide(checkpoint: Path) -> None:
    """Give a checkpoint, if it is there, a name that none has, at once: a kill while it is removed leaves no half."""
    if checkpoint.is_dir():
        checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.old"))


def _remove_hidden(folder: Path) -> None:
    for path in folder.glob(".step-*"):
        shutil.rmtree(path)


@contextlib.contextmanager
def _refusing(target: Path) -> Iterator[None]:
    """Turn what the operating system refuses into an error that says what was being done."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write the checkpoint {target}: {error.strerror}\n"
            "fix: make room or give the right to write, then --resume continues the run"
        ) from error


def _problem(checkpoint: Path) -> str | None:
    """Return why a folder is no complete checkpoint, or None. Looks at names and sizes, not at the numbers."""
    path = checkpoint / STATE_FILE
    if not path.is_file():
        return f"it has no {STATE_FILE}, so it is no checkpoint of bmburst"
    try:
        state = read_json(path)
    except UserError:
        return f"{STATE_FILE} is truncated or not JSON"
    kinds = {"step": int, "data": dict, "tokenizer": str, "files": dict}
    if state.get("format") != FORMAT:
        return f"{STATE_FILE} is not of format {FORMAT}"
    for name, kind in kinds.items():
        if not isinstance(state.get(name), kind):
            return f"{STATE_FILE} has no valid '{name}'"
    for name, size in state["files"].items():
        there = (checkpoint / name).stat().st_size if (checkpoint / name).is_file() else None
        if there != size:
            return f"{name} is missing" if there is None else f"{name} is truncated: {there} of {size} bytes"
    return None


def _save_state(path: Path, progress: Progress) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(path.parent.iterdir())}
    state = {"format": FORMAT, "step": progress.step, "data": dict(progress.data)}
    state |= {"tokenizer": progress.tokenizer, "skipped": progress.skipped}
    path.write_text(json.dumps({**state, "files": sizes}, indent=2) + "\n", encoding="utf-8")


def _save_optimizer(folder: Path, model: "Llama", optimizer: "AdamW", part_bytes: int | None) -> None:
    import torch

    from bmburst.checkpoint.sharded_files import Gathered, save_parts
    from bmburst.optim import initial_state, state_names
    from bmburst.zero import gather, named_shards

    def gathered(shard: "NamedShard", name: str, root: int) -> "Tensor | None":
        state = optimizer.state.get(shard.storage) or initial_state(shard, optimizer.state_device(shard.storage))
        return gather(shard, state.get(name), dtype=torch.float32, root=root)

    tensors = [
        Gathered(f"{shard.name}.{name}", shard.shape, torch.float32, partial(gathered, shard, name))
        for shard in named_shards(model)
        for name in state_names(shard)
    ]
    save_parts(folder, OPTIMIZER, tensors, part_bytes=part_bytes)


def _load_optimizer(folder: Path, model: "Llama", optimizer: "AdamW", step: int) -> None:
    from bmburst.checkpoint.sharded_files import open_parts
    from bmburst.optim import initial_state, state_names
    from bmburst.zero import named_shards, scatter_piece

    file = open_parts(folder, OPTIMIZER)
    shards = named_shards(model)
    expected = {f"{shard.name}.{name}": shard.shape for shard in shards for name in state_names(shard)}
    different = sorted(key for key in {*expected, *file.shapes} if expected.get(key) != file.shapes.get(key))
    if different:
        there, here = (_said(shapes.get(different[0])) for shapes in (file.shapes, expected))
        raise UserError(
            f"{folder / OPTIMIZER} is of another model or dtype: {different[0]} is {there}, here {here}\n"
            "fix: resume with the dtype the run had, or take the weights alone: --init-from"
        )
    for shard in shards:
        state = optimizer.state[shard.storage]
        if not state:
            state.update(initial_state(shard, optimizer.state_device(shard.storage)))
        state["step"] = step
        for name in state_names(shard):
            scatter_piece(shard, shard.read(partial(file.read, f"{shard.name}.{name}")), state[name])


def _said(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def _save_random(path: Path) -> None:
    import torch
    from safetensors.torch import save

    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    path.write_bytes(save(states))


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
    """Have the file or folder on disk before anything that is written after it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

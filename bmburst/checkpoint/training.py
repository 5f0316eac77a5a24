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
import zlib
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from bmburst.amounts import bytes_text
from bmburst.checkpoint.checksum import sealed, text_of
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
    verified_together,
)
from bmburst.errors import UserError
from bmburst.outputs import FULL, free_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from bmburst.blocks.model import Llama
    from bmburst.checkpoint.adapter import Base
    from bmburst.optim import AdamW
    from bmburst.zero import NamedShard

__all__ = ["STATE_FILE", "RunProgress", "load", "newest_complete", "read_progress", "save", "verified_together"]

OPTIMIZER, RANDOM_FILE = "optimizer", "random.safetensors"


def save(
    run_folder: Path,
    model: "Llama",
    optimizer: "AdamW",
    progress: RunProgress,
    *,
    keep: int,
    part_bytes: int | None = None,
    base: "Base | None" = None,
    tokenizer: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a checkpoint, and keep only the newest `keep` checkpoints up to it. Every rank must call it.

    `bmburst.checkpoint.sharded_files` describes which ranks write.

    For a model with adapters only the adapters' weights are written, in PEFT's format. They name the base model `base`.
    `tokenizer` maps names of the tokenizer's files to their content, which rank 0 writes beside the weights.

    The folder gets its name only when all its files are on disk. So a run that is killed at any point leaves the
    previous checkpoint intact, and at most some folders with names that begin with a dot. The next call removes these.
    After a failed write the incomplete folder is removed at once.

    Raises:
        UserError: On all ranks, if a rank cannot write.
    """
    import bmtrain as bmt

    from bmburst.checkpoint import adapter, hugging_face
    from bmburst.checkpoint.sharded_files import together

    target = run_folder / FOLDER / f"step-{progress.step:06d}"
    partial = target.with_name(f".{target.name}")
    is_writer = bmt.rank() == 0
    checksums: dict[str, int] = {}

    def prepare() -> None:
        if is_writer:
            _remove_hidden(target.parent)
            partial.mkdir(parents=True)

    def finish() -> None:
        if not is_writer:
            return
        checksums[RANDOM_FILE] = _save_random(partial / RANDOM_FILE)
        for name, content in (tokenizer or {}).items():
            (partial / name).write_bytes(content)
            checksums[name] = zlib.crc32(content)
        _save_state(partial / STATE_FILE, progress, checksums)
        for path in (*partial.iterdir(), partial):
            _sync(path)
        _hide(target)  # an old one of this step is damaged: a run resumes from the newest complete one
        partial.rename(target)
        _sync(target.parent)
        # Later and incomplete checkpoints are damaged. They do not count, or they would displace complete ones.
        upto = [path for path in checkpoints(run_folder) if step_of(path) <= progress.step]
        whole = [path for path in upto if problem_of(path) is None]
        for old in set(upto) - set(whole[-keep:]):
            _hide(old)
        _remove_hidden(target.parent)

    try:
        together(prepare)
        if model.lora is not None:
            checksums |= adapter.save(model, partial, base)
        else:
            checksums |= hugging_face.save(model, partial, part_bytes=part_bytes)
        checksums |= _save_optimizer(partial, model, optimizer, part_bytes)
        together(finish)
    except (UserError, OSError) as error:  # on all ranks
        cause = error.__cause__ if isinstance(error, UserError) else error
        if is_writer:  # before a rank ends, which would end the others
            shutil.rmtree(partial, ignore_errors=True)
        bmt.synchronize()
        if not isinstance(cause, OSError):
            raise
        room = _room(run_folder, model) if cause.errno in FULL else ""  # after removing the incomplete folder
        raise UserError(
            f"cannot write the checkpoint {target}: {cause.strerror}\n"
            f"fix: {room or 'give the right to write'}, then --resume continues the run{_from(run_folder)}"
        ) from error
    return target


def load(checkpoint: Path, model: "Llama", optimizer: "AdamW", *, base: "Base | None" = None) -> RunProgress:
    """Restore model, optimizer and random state on any number of ranks. Every rank must call it, and reads its shards.

    For a model with adapters only these are restored. The other weights must already be loaded from `base`.

    Raises:
        UserError: The checkpoint is truncated, not a checkpoint of bmburst, or of another model.
    """
    from bmburst.checkpoint import adapter, hugging_face

    progress = read_progress(checkpoint)
    if model.lora is not None:
        adapter.load(model, checkpoint, base)
    else:
        hugging_face.load(model, checkpoint)
    _load_optimizer(checkpoint, model, optimizer, max(progress.step - progress.skipped, 0))
    _load_random(checkpoint / RANDOM_FILE)
    return progress


def _hide(checkpoint: Path) -> None:
    """Rename a checkpoint, if it exists, to a hidden name, so that a kill during removal leaves no partial one."""
    if checkpoint.is_dir():
        checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.old"))


def _remove_hidden(folder: Path) -> None:
    for path in folder.glob(".step-*"):
        shutil.rmtree(path)


def _room(run_folder: Path, model: "Llama") -> str:
    """Return the fix for a full disk, with numbers."""
    from bmburst.optim import state_names
    from bmburst.zero import named_shards

    written = (each for each in named_shards(model) if each.storage.requires_grad)
    needed = sum(prod(s.shape) * (s.dtype.itemsize + 4 * len(state_names(s))) for s in written)
    return f"make room: a checkpoint needs {bytes_text(needed)}, and {bytes_text(free_bytes(run_folder))} are free"


def _from(run_folder: Path) -> str:
    newest = newest_complete(run_folder)
    return f" from {newest.name}" if newest is not None else " (there is no checkpoint yet: begin it again)"


def _save_state(path: Path, progress: RunProgress, checksums: Mapping[str, int]) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(path.parent.iterdir())}
    state = {"format": FORMAT, "step": progress.step, "data": dict(progress.data)}
    state |= {"tokenizer": progress.tokenizer, "skipped": progress.skipped, "files": sizes}
    state |= {} if progress.loss_scale is None else {"loss_scale": list(progress.loss_scale)}
    state |= {"checksums": {name: text_of(checksums[name]) for name in sizes}}
    path.write_text(sealed(json.dumps(state, indent=2)), encoding="utf-8")


def _save_optimizer(folder: Path, model: "Llama", optimizer: "AdamW", part_bytes: int | None) -> dict[str, int]:
    import torch

    from bmburst.checkpoint.sharded_files import ShardedTensor, save_parts
    from bmburst.optim import state_names
    from bmburst.zero import gather, named_shards

    def gathered(shard: "NamedShard", name: str, *, root: int) -> "Tensor | None":
        return gather(shard, optimizer.state_of(shard, name), dtype=torch.float32, root=root)

    tensors = [
        ShardedTensor(f"{shard.name}.{name}", shard.shape, torch.float32, partial(gathered, shard, name))
        for shard in named_shards(model)
        if shard.storage.requires_grad
        for name in state_names(shard)
    ]
    return save_parts(folder, OPTIMIZER, tensors, part_bytes=part_bytes)


def _load_optimizer(folder: Path, model: "Llama", optimizer: "AdamW", step: int) -> None:
    from bmburst.checkpoint.sharded_files import open_parts
    from bmburst.optim import state_names
    from bmburst.zero import named_shards

    file = open_parts(folder, OPTIMIZER)
    shards = [each for each in named_shards(model) if each.storage.requires_grad]
    expected = {f"{shard.name}.{name}": shard.shape for shard in shards for name in state_names(shard)}
    different = sorted(key for key in {*expected, *file.shapes} if expected.get(key) != file.shapes.get(key))
    if different:
        there, here = (_said(shapes.get(different[0])) for shapes in (file.shapes, expected))
        raise UserError(
            f"{folder / OPTIMIZER} is of another model or dtype: {different[0]} is {there}, here {here}\n"
            "fix: resume with the dtype the run had, or take the weights alone: --init-from"
        )
    for shard in shards:
        for name in state_names(shard):
            piece = shard.read(partial(file.read, f"{shard.name}.{name}"))
            optimizer.load_state_of(shard, name, piece, step)


def _said(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def _save_random(path: Path) -> int:
    import torch
    from safetensors.torch import save

    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    data: bytes = save(states)
    path.write_bytes(data)
    return zlib.crc32(data)


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

"""Checkpoints: whole or not there, by parameter name, so that they load on any number of ranks.

A checkpoint is a folder `checkpoints/step-000050` of the run folder. `model.safetensors` and `config.json` are a
Hugging Face LLaMA; `optimizer.safetensors` holds AdamW's state by parameter name (of large models both are in parts,
with an index); `random.safetensors` the state of torch's random number generators; `state.json` the rest, with size and
checksum of every file and of itself. The learning rate is a function of the step and needs no state.
"""

import json
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bmburst.checksum import damaged_file, is_sealed, sealed, text_of
from bmburst.errors import UserError
from bmburst.outputs import FULL, amount, free_bytes
from bmburst.plan.counts import adam_bytes
from bmburst.plan.task import ITEMSIZE
from bmburst.train.config import TrainConfig

if TYPE_CHECKING:
    from torch import Tensor

    from bmburst.blocks.model import Llama
    from bmburst.optim import AdamW
    from bmburst.zero import NamedShard

FOLDER = "checkpoints"
STATE_FILE = "state.json"
OPTIMIZER, RANDOM_FILE = "optimizer", "random.safetensors"
FORMAT = "bmburst-checkpoint-1"
VERIFIED = "BMBURST_VERIFIED_CHECKPOINT"
"""Environment variable by which a launcher tells its ranks which checkpoint it has verified, so that they need not."""
_NAME = re.compile(r"step-(\d{1,18})")
_MEMBERS = frozenset({"format", "step", "data", "tokenizer", "skipped", "files"})  # before there were checksums


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
    """Return the newest checkpoint of a run folder whose files are all there in full, or None.

    Checksums of files are not compared: `newest_whole` does.
    """
    return next((path for path in reversed(_checkpoints(run_folder)) if _problem(path) is None), None)


def newest_whole(run_folder: Path, say: Callable[[str], object]) -> Path | None:
    """Return the newest checkpoint of a run folder whose files all have their checksums; None if there are none.

    Args:
        run_folder: The run folder.
        say: Called with a line of text for each newer checkpoint that is damaged.

    Raises:
        UserError: There are checkpoints, but all are damaged.
    """
    problems: list[str] = []
    for path in reversed(_checkpoints(run_folder)):
        problem = _problem(path) or _damage(path)
        if problem is None:
            for text in problems:
                say(f"{text}; going on from {path.name}")
            return path
        problems.append(f"checkpoint {path.name} is not used: {problem}")
    if problems:
        more = f"; and {len(problems) - 1} more are damaged too" if len(problems) > 1 else ""
        raise UserError(
            f"{run_folder} has no complete checkpoint: {problems[0]}{more}\n"
            "fix: restore its files from a copy, or leave --resume out and give another --output to begin again"
        )
    return None


def require_whole(checkpoint: Path) -> None:
    """Check that a checkpoint's files are all there and have their checksums; anything else passes.

    A checkpoint without checksums, of an earlier version, is only checked for sizes.

    Raises:
        UserError: One has not.
    """
    if (checkpoint / STATE_FILE).exists() and (problem := _problem(checkpoint) or _damage(checkpoint)) is not None:
        raise UserError(f"{checkpoint}: {problem}\nfix: use another checkpoint of the run, or restore it from a copy")


def verified(given: Path, say: Callable[[str], object]) -> Path:
    """Return the checkpoint that a run folder or a checkpoint stands for, verified; any other directory as it is.

    Args:
        given: A run folder, a checkpoint or another directory.
        say: As of `newest_whole`.

    Raises:
        UserError: It is damaged, or all are.
    """
    if (told := os.environ.get(VERIFIED)) and given in (Path(told), Path(told).parent.parent):
        return Path(told)
    if (given / STATE_FILE).exists():
        require_whole(given)
        return given
    return newest_whole(given, say) or given


def verified_together(given: Path) -> Path:
    """Do what `verified` does on rank 0 alone, for all ranks; every rank calls it.

    Raises:
        UserError: On all ranks; see `verified`.
    """
    import bmtrain as bmt

    from bmburst.runtime.watchdog import beat
    from bmburst.weight_parts import together

    found = together(lambda: str(verified(given, warn)) if bmt.rank() == 0 else "")[0]
    beat()
    return Path(found)


def warn(text: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"{text}\n")


def nbytes(config: TrainConfig) -> int:
    """Return the bytes of a checkpoint's weights and optimizer state."""
    itemsize = ITEMSIZE[config.dtype]
    return config.model.num_parameters * (itemsize + adam_bytes(itemsize))


def bytes_to_come(config: TrainConfig, run_folder: Path) -> int:
    """Return the bytes by which a run's checkpoints will grow beyond what is there, at most.

    A new one is written before the oldest is removed, so that there is one more than is kept for a while.
    """
    every = config.checkpoint_every
    if every is None:
        return 0
    there = [path for path in _checkpoints(run_folder) if _problem(path) is None]
    begun = max((_step(path) for path in there), default=0)
    writes = max(config.steps // every - begun // every, 0) + (config.steps % every > 0) if every else 1
    if config.steps <= begun:
        return 0
    return max(min(writes + len(there), config.keep_checkpoints + 1) - len(there), 1) * nbytes(config)


def read_progress(checkpoint: Path) -> Progress:
    """Return what a checkpoint says of its run.

    Raises:
        UserError: It is truncated, or no checkpoint of bmburst.
    """
    problem = _problem(checkpoint)
    if problem is not None:
        raise UserError(f"{checkpoint}: {problem}\nfix: use another checkpoint of the run")
    state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    return Progress(step=state["step"], data=state["data"], tokenizer=state["tokenizer"], skipped=_skipped(state))


def save(
    run_folder: Path,
    model: "Llama",
    optimizer: "AdamW",
    progress: Progress,
    *,
    keep: int,
    part_bytes: int | None = None,
) -> Path:
    """Write a checkpoint, and remove all but the newest `keep` up to it. Every rank calls it; `bmburst.weight_parts`
    says who writes.

    The folder appears under its name when everything in it is on disk: a run killed at any point leaves the checkpoint
    before, and at most folders whose names begin with a dot, which the next call removes. What could not be written is
    removed at once.

    Raises:
        UserError: On all ranks, if one cannot write it.
    """
    import bmtrain as bmt

    from bmburst import hugging_face
    from bmburst.weight_parts import together

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
        _save_state(partial / STATE_FILE, progress, checksums)
        for path in (*partial.iterdir(), partial):
            _sync(path)
        _hide(target)  # of the same step: a damaged one, for a run resumes from the newest complete one
        partial.rename(target)
        _sync(target.parent)
        # Later ones are damaged, and so are incomplete ones: they do not count, or they would push out whole ones.
        upto = [path for path in _checkpoints(run_folder) if _step(path) <= progress.step]
        whole = [path for path in upto if _problem(path) is None]
        for old in set(upto) - set(whole[-keep:]):
            _hide(old)
        _remove_hidden(target.parent)

    try:
        together(prepare)
        checksums |= hugging_face.save(model, partial, part_bytes=part_bytes)
        checksums |= _save_optimizer(partial, model, optimizer, part_bytes)
        together(finish)
    except (UserError, OSError) as error:  # on all ranks
        cause = error.__cause__ if isinstance(error, UserError) else error
        room = _room(run_folder, model) if isinstance(cause, OSError) and cause.errno in FULL else ""
        if is_writer:  # before any rank ends, and the others with it
            shutil.rmtree(partial, ignore_errors=True)
        bmt.synchronize()
        if not isinstance(cause, OSError):
            raise
        raise UserError(
            f"cannot write the checkpoint {target}: {cause.strerror}\n"
            f"fix: {room or 'give the right to write'}, then --resume continues the run{_from(run_folder)}"
        ) from error
    return target


def load(checkpoint: Path, model: "Llama", optimizer: "AdamW") -> Progress:
    """Restore model, optimizer and random state, on any number of ranks. Every rank calls it and reads its own part.

    Raises:
        UserError: The checkpoint is truncated, no checkpoint of bmburst, or of another model.
    """
    from bmburst import hugging_face

    progress = read_progress(checkpoint)
    hugging_face.load(model, checkpoint)
    _load_optimizer(checkpoint, model, optimizer, progress.step)
    _load_random(checkpoint / RANDOM_FILE)
    return progress


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


def _room(run_folder: Path, model: "Llama") -> str:
    """Return what to do where a checkpoint found no room, with numbers."""
    from bmburst.optim import state_names
    from bmburst.zero import named_shards

    needed = sum(prod(s.shape) * (s.dtype.itemsize + 4 * len(state_names(s))) for s in named_shards(model))
    return f"make room: a checkpoint needs {amount(needed)}, and {amount(free_bytes(run_folder))} are free"


def _from(run_folder: Path) -> str:
    newest = newest_complete(run_folder)
    return f" from {newest.name}" if newest is not None else " (there is no checkpoint yet: begin it again)"


def _problem(checkpoint: Path) -> str | None:
    """Return why a folder is no complete checkpoint, or None. Looks at names, sizes and state.json, not at numbers."""
    state = _read_state(checkpoint / STATE_FILE)
    if isinstance(state, str):
        return state
    for name, size in state["files"].items():
        there = (checkpoint / name).stat().st_size if (checkpoint / name).is_file() else None
        if there != size:
            return f"{name} is missing" if there is None else f"{name} is truncated: {there} of {size} bytes"
    return None


def _read_state(path: Path) -> dict[str, Any] | str:
    """Return what a state.json holds, or why it is no valid one."""
    try:
        data = path.read_bytes()
    except OSError:
        return f"it has no {STATE_FILE}, so it is no checkpoint of bmburst"
    try:
        state = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        return f"{STATE_FILE} is truncated or not JSON"
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        return f"{STATE_FILE} is not of format {FORMAT}"
    seal = is_sealed(data)
    if not seal and (seal is False or not _MEMBERS.issuperset(state)):
        return f"{STATE_FILE} is damaged: it does not have its checksum"
    files, checksums = state.get("files"), state.get("checksums", {})
    valid = {
        "step": _is_count(state.get("step")),
        "data": isinstance(state.get("data"), dict),
        "tokenizer": isinstance(state.get("tokenizer"), str),
        "files": isinstance(files, dict) and all(_is_name(name) and _is_count(files[name]) for name in files),
        "skipped": _is_count(state.get("skipped", 0)),
        "checksums": isinstance(checksums, dict) and all(_is_name(name) for name in checksums),
    }
    wrong = [name for name, is_valid in valid.items() if not is_valid]
    return f"{STATE_FILE} has no valid '{wrong[0]}'" if wrong else state


def _damage(checkpoint: Path) -> str | None:
    """Return which file of a complete checkpoint does not have its checksum, or None. Reads all of them."""
    from bmburst.runtime.watchdog import beat

    state = _read_state(checkpoint / STATE_FILE)
    return state if isinstance(state, str) else damaged_file(checkpoint, state.get("checksums", {}), beat)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_name(name: object) -> bool:
    """Whether a name is of a file in the checkpoint itself."""
    return isinstance(name, str) and "\0" not in name and Path(name).name == name


def _skipped(state: Mapping[str, Any]) -> int:
    return int(state.get("skipped", 0))


def _save_state(path: Path, progress: Progress, checksums: Mapping[str, int]) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(path.parent.iterdir())}
    state = {"format": FORMAT, "step": progress.step, "data": dict(progress.data)}
    state |= {"tokenizer": progress.tokenizer, "skipped": progress.skipped, "files": sizes}
    state |= {"checksums": {name: text_of(checksums[name]) for name in sizes}}
    path.write_text(sealed(json.dumps(state, indent=2)), encoding="utf-8")


def _save_optimizer(folder: Path, model: "Llama", optimizer: "AdamW", part_bytes: int | None) -> dict[str, int]:
    import torch

    from bmburst.optim import initial_state, state_names
    from bmburst.weight_parts import Gathered, save_parts
    from bmburst.zero import gather, named_shards

    def gathered(shard: "NamedShard", name: str, root: int) -> "Tensor | None":
        state = optimizer.state.get(shard.storage) or initial_state(shard, optimizer.state_device(shard.storage))
        return gather(shard, state.get(name), dtype=torch.float32, root=root)

    tensors = [
        Gathered(f"{shard.name}.{name}", shard.shape, torch.float32, partial(gathered, shard, name))
        for shard in named_shards(model)
        for name in state_names(shard)
    ]
    return save_parts(folder, OPTIMIZER, tensors, part_bytes=part_bytes)


def _load_optimizer(folder: Path, model: "Llama", optimizer: "AdamW", step: int) -> None:
    from bmburst.optim import initial_state, state_names
    from bmburst.weight_parts import open_parts
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
    """Have the file or folder on disk before anything that is written after it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Checkpoints: whole or not there, by parameter name, so that they load on any number of ranks.

A checkpoint is a folder `checkpoints/step-000050` of the run folder. `model.safetensors` and `config.json` are a
Hugging Face LLaMA; `optimizer.safetensors` holds AdamW's state by parameter name; `random.safetensors` the state of the
random number generators; `state.json` the rest, with the size of every file.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bmburst.errors import UserError

if TYPE_CHECKING:
    from bmburst.blocks.model import Llama
    from bmburst.optim import AdamW

FOLDER = "checkpoints"
STATE_FILE = "state.json"
OPTIMIZER_FILE, RANDOM_FILE = "optimizer.safetensors", "random.safetensors"
FORMAT = "bmburst-checkpoint-1"
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        step: Optimizer steps done.
        data: `Batches.state_dict()`.
        tokenizer: Name of the run's tokenizer.
    """

    step: int
    data: Mapping[str, Any]
    tokenizer: str


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
    state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    return Progress(step=state["step"], data=state["data"], tokenizer=state["tokenizer"])


def save(run_folder: Path, model: "Llama", optimizer: "AdamW", progress: Progress, *, keep: int) -> Path:
    """Write a checkpoint, and remove all but the newest `keep`. Every rank calls it; rank 0 writes.

    The folder appears under its name when everything in it is on disk: a run killed at any point leaves the checkpoint
    before, and at most a folder whose name begins with a dot.
    """
    import bmtrain as bmt

    from bmburst import hugging_face

    name = f"step-{progress.step:06d}"
    target, partial = run_folder / FOLDER / name, run_folder / FOLDER / f".{name}"
    is_writer = bmt.rank() == 0
    if is_writer:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    hugging_face.save(model, partial)
    _save_optimizer(partial / OPTIMIZER_FILE, model, optimizer)
    if is_writer:
        _save_random(partial / RANDOM_FILE)
        sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        state = {"format": FORMAT, "step": progress.step, "data": dict(progress.data), "tokenizer": progress.tokenizer}
        (partial / STATE_FILE).write_text(json.dumps({**state, "files": sizes}, indent=2) + "\n", encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            _sync(path)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        _sync(target.parent)
        for old in _checkpoints(run_folder)[:-keep]:
            shutil.rmtree(old.rename(old.with_name(f".{old.name}")))
    bmt.synchronize()
    return target


def load(checkpoint: Path, model: "Llama", optimizer: "AdamW") -> Progress:
    """Restore model, optimizer and random state, on any number of ranks. Every rank calls it and reads its own part.

    Raises:
        UserError: The checkpoint is truncated, no checkpoint of bmburst, or of another model.
    """
    from bmburst import hugging_face

    progress = read_progress(checkpoint)
    hugging_face.load(model, checkpoint)
    _load_optimizer(checkpoint / OPTIMIZER_FILE, model, optimizer, progress.step)
    _load_random(checkpoint / RANDOM_FILE)
    return progress


def _checkpoints(run_folder: Path) -> list[Path]:
    """Return a run's checkpoint folders, oldest first."""
    folder = run_folder / FOLDER
    found = {path: _NAME.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ())}
    return sorted((path for path, match in found.items() if match), key=lambda path: int(path.name.split("-")[1]))


def _problem(checkpoint: Path) -> str | None:
    """Return why a folder is no complete checkpoint, or None. Looks at names and sizes, not at the numbers."""
    path = checkpoint / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return f"it has no {STATE_FILE}, so it is no checkpoint of bmburst"
    except ValueError:
        return f"{STATE_FILE} is truncated or not JSON"
    if not isinstance(state, dict) or state.get("format") != FORMAT or not isinstance(state.get("files"), dict):
        return f"{STATE_FILE} is not of format {FORMAT}"
    for name, size in state["files"].items():
        there = (checkpoint / name).stat().st_size if (checkpoint / name).is_file() else None
        if there != size:
            return f"{name} is missing" if there is None else f"{name} is truncated: {there} of {size} bytes"
    return None


def _save_optimizer(path: Path, model: "Llama", optimizer: "AdamW") -> None:
    import torch

    from bmburst.optim import state_names
    from bmburst.weight_files import SafetensorsWriter
    from bmburst.zero import gather, named_shards

    pieces = [(shard, name) for shard in named_shards(model) for name in state_names(shard)]
    full = (
        gather(shard, optimizer.state[shard.storage].get(name), dtype=torch.float32, root=0) for shard, name in pieces
    )
    if pieces[0][0].rank != 0:
        for _ in full:  # takes part in each gather
            pass
        return
    with SafetensorsWriter(path, [(f"{s.name}.{name}", s.shape, torch.float32) for s, name in pieces]) as writer:
        for tensor in full:
            assert tensor is not None  # this is the rank that receives
            writer.write(tensor)


def _load_optimizer(path: Path, model: "Llama", optimizer: "AdamW", step: int) -> None:
    import torch

    from bmburst.optim import state_names
    from bmburst.weight_files import open_tensors
    from bmburst.zero import named_shards, scatter_piece

    file = open_tensors(path)
    for shard in named_shards(model):
        state = optimizer.state[shard.storage]
        state["step"] = step
        for name in state_names(shard):
            key = f"{shard.name}.{name}"
            if file.shapes.get(key) != shard.shape:
                raise UserError(f"{path} has no {key} of shape {list(shard.shape)}: it is of another model or dtype")
            if name not in state:
                state[name] = torch.zeros_like(shard.storage.data, dtype=torch.float32)
            scatter_piece(shard, file.read(key, shard.begin, shard.end), state[name])


def _save_random(path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    save_file(states, path)


def _load_random(path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    states = load_file(path)
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _sync(path: Path) -> None:
    """Have the file or folder on disk before anything that is written after it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

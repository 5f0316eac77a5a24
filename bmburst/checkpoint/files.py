"""Finds and verifies checkpoints: names, sizes and checksums of their files, and the contents of state.json.

`bmburst.checkpoint.training` writes and loads checkpoints. This module imports no torch, because the launcher uses it
before ranks start.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bmburst.checksum import damaged_file, verify_own_checksum
from bmburst.config import parse_json
from bmburst.errors import UserError

FOLDER = "checkpoints"
STATE_FILE = "state.json"
FORMAT = "bmburst-checkpoint-1"
VERIFIED = "BMBURST_VERIFIED_CHECKPOINT"
"""Environment variable with the checkpoint that the launcher has verified, so that its ranks need not verify it."""
_NAME = re.compile(r"step-(\d{1,18})")
_MEMBERS = frozenset({"format", "step", "data", "tokenizer", "skipped", "files"})  # before checksums


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProgress:
    """Progress of a run.

    Attributes:
        step: Number of optimizer steps done.
        data: `Batches.state_dict()`.
        tokenizer: Name of the run's tokenizer.
        skipped: Number of skipped steps among them.
        loss_scale: Loss scale, and number of steps since its last change; None unless weights are fp16.
        reference: `Base.text` of the reference of preference training; None: none with weights of its own, or unknown.
    """

    step: int
    data: Mapping[str, Any]
    tokenizer: str
    skipped: int = 0
    loss_scale: tuple[float, int] | None = None
    reference: str | None = None


def checkpoints(run_folder: Path) -> list[Path]:
    """Return a run's checkpoint folders, oldest first."""
    folder = run_folder / FOLDER
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _NAME.fullmatch(path.name) and path.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step-"))


def problem_of(checkpoint: Path) -> str | None:
    """Return why a folder is not a complete checkpoint, or None. Checks names, sizes and state.json, not contents."""
    state = _complete_state(checkpoint)
    return state if isinstance(state, str) else None


def newest_complete(run_folder: Path) -> Path | None:
    """Return the newest checkpoint of a run folder with all files in full size, or None.

    Checksums of files are not checked; `newest_whole` checks them.
    """
    return next((path for path in reversed(checkpoints(run_folder)) if problem_of(path) is None), None)


def newest_whole(run_folder: Path, say: Callable[[str], object]) -> Path | None:
    """Return the newest checkpoint of a run folder with correct checksums; None if there are no checkpoints.

    Args:
        run_folder: The run folder.
        say: Called with a message for each newer checkpoint that is damaged.

    Raises:
        UserError: There are checkpoints, but all are damaged.
    """
    problems: list[str] = []
    for path in reversed(checkpoints(run_folder)):
        problem = _damage(path)
        if problem is None:
            for text in problems:
                say(f"{text}; going on from {path.name}")
            return path
        problems.append(f"checkpoint {path.name} is not used: {problem}")
    if problems:
        more = f"; and {len(problems) - 1} more are damaged too" if len(problems) > 1 else ""
        raise UserError(
            f"{run_folder} has no complete checkpoint: {problems[0]}{more}\n"
            "fix: restore its files from a copy, or begin again in another --output"
        )
    return None


def require_whole(checkpoint: Path) -> None:
    """Raise UserError unless all files of a checkpoint exist and have correct checksums. Other directories pass.

    In a checkpoint of an earlier version, without checksums, only the sizes are checked.
    """
    if (checkpoint / STATE_FILE).exists() and (problem := _damage(checkpoint)) is not None:
        raise UserError(f"{checkpoint}: {problem}\nfix: use another checkpoint of the run, or restore it from a copy")


def verified(given: Path, say: Callable[[str], object]) -> Path:
    """Verify a checkpoint, or find the newest undamaged one of a run folder. Return any other directory unchanged.

    Args:
        given: A run folder, a checkpoint or another directory.
        say: See `newest_whole`.

    Raises:
        UserError: The checkpoint is damaged, or all checkpoints of the run folder are.
    """
    if (told := os.environ.get(VERIFIED)) and given in (Path(told), Path(told).parent.parent):
        return Path(told)
    if (given / STATE_FILE).exists():
        require_whole(given)
        return given
    return newest_whole(given, say) or given


def verified_together(given: Path) -> Path:
    """Call `verified` on rank 0, and return its result, or raise its error, on all ranks. Every rank must call it."""
    import bmtrain as bmt

    from bmburst.checkpoint.sharded_files import on_every_rank
    from bmburst.launch.watchdog import beat

    found = on_every_rank(lambda: str(verified(given, warn)) if bmt.rank() == 0 else "")[0]
    beat()
    return Path(found)


def warn(text: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"{text}\n")


def read_progress(checkpoint: Path) -> RunProgress:
    """Read the progress of a run from its checkpoint; UserError if it is truncated, or is none of bmburst."""
    state = _complete_state(checkpoint)
    if isinstance(state, str):
        raise UserError(f"{checkpoint}: {state}\nfix: use another checkpoint of the run")
    scale = state.get("loss_scale")
    return RunProgress(
        step=state["step"],
        data=state["data"],
        tokenizer=state["tokenizer"],
        skipped=int(state.get("skipped", 0)),
        loss_scale=None if scale is None else (float(scale[0]), scale[1]),
        reference=state.get("reference"),
    )


def written_by(run_folder: Path) -> str | None:
    """Return the version of bmburst that wrote the newest checkpoint of a run; None if no checkpoint names one."""
    newest = newest_complete(run_folder)
    state = None if newest is None else _read_state(newest / STATE_FILE)
    found = state.get("version") if isinstance(state, dict) else None
    return found if isinstance(found, str) else None


def own_tokenizer(*directories: Path) -> str | None:
    """Return the tokenizer of the first model directory that has one, by its name for `load_tokenizer`; else None.

    That is the directory itself if it contains a tokenizer, or the tokenizer that a checkpoint names. A directory whose
    tokenizer has another format, such as tokenizer.model, is returned too, if there is no other: `load_tokenizer`
    refuses it, and text is not read as bytes.

    Raises:
        UserError: A directory is a truncated checkpoint.
    """
    from bmburst.data.tokenizer import other_files

    for directory in directories:
        if (directory / "tokenizer.json").is_file():
            return str(directory)
        if (directory / STATE_FILE).exists():
            return read_progress(directory).tokenizer
    return next((str(directory) for directory in directories if other_files(directory)), None)


def note_bytes(directory: Path, option: str) -> None:
    """Write a line that text is read as bytes, because a model comes without a tokenizer and none is named.

    Args:
        directory: Directory of the model.
        option: Option that names a tokenizer.
    """
    warn(
        f"note: {directory} comes without a tokenizer, so the text is read as bytes: right for models that were "
        f"trained on bytes ({option} bytes); of others, add tokenizer.json, or give {option} DIR"
    )


def _complete_state(checkpoint: Path) -> dict[str, Any] | str:
    """Return the contents of a complete checkpoint's state.json, or the reason why the checkpoint is not complete."""
    state = _read_state(checkpoint / STATE_FILE)
    if isinstance(state, str):
        return state
    for name, size in state["files"].items():
        there = (checkpoint / name).stat().st_size if (checkpoint / name).is_file() else None
        if there != size:
            return f"{name} is missing" if there is None else f"{name} is truncated: {there} of {size} bytes"
    return state


def _read_state(path: Path) -> dict[str, Any] | str:
    """Return the contents of a state.json, or the reason why it is not valid."""
    try:
        data = path.read_bytes()
    except OSError:
        return f"it has no {STATE_FILE}, so it is no checkpoint of bmburst"
    try:
        state = parse_json(data)
    except (ValueError, RecursionError):
        return f"{STATE_FILE} is truncated or not JSON"
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        return f"{STATE_FILE} is not of format {FORMAT}"
    seal = verify_own_checksum(data)
    if not seal and (seal is False or not _MEMBERS.issuperset(state)):
        return f"{STATE_FILE} is damaged: it does not have its checksum"
    files, checksums = state.get("files"), state.get("checksums", {})
    valid = {
        "step": _is_count(state.get("step")),
        "data": isinstance(state.get("data"), dict),
        "tokenizer": isinstance(state.get("tokenizer"), str),
        "files": isinstance(files, dict) and all(_is_name(name) and _is_count(files[name]) for name in files),
        "skipped": _is_count(state.get("skipped", 0)),
        "loss_scale": _is_scale(state.get("loss_scale")),
        "reference": isinstance(state.get("reference", ""), str),
        "checksums": isinstance(checksums, dict) and all(_is_name(name) for name in checksums),
    }
    wrong = [name for name, is_valid in valid.items() if not is_valid]
    return f"{STATE_FILE} has no valid '{wrong[0]}'" if wrong else state


def _damage(checkpoint: Path) -> str | None:
    """Return why a checkpoint is not complete, or which file has a wrong checksum, or None. Reads all files."""
    from bmburst.launch.watchdog import beat

    state = _complete_state(checkpoint)
    return state if isinstance(state, str) else damaged_file(checkpoint, state.get("checksums", {}), beat)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_scale(value: object) -> bool:
    """Return whether a value is a loss scale with a number of steps, or None."""
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], int | float):
        return value is None
    return 1 <= value[0] < 2.0**1000 and _is_count(value[1])


def _is_name(name: object) -> bool:
    """Return whether a name is that of a file in the checkpoint's own folder."""
    return isinstance(name, str) and "\0" not in name and Path(name).name == name

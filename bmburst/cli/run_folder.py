"""The folder of a training run, before its ranks start: its name, its lock, its disk space, and what is in it."""

import contextlib
import errno
import itertools
import math
import time
from collections.abc import Container, Iterator
from pathlib import Path

from bmburst.amounts import bytes_text
from bmburst.blocks.dtypes import ITEMSIZE
from bmburst.checkpoint.files import checkpoints, newest_whole, problem_of, step_of, warn
from bmburst.errors import UserError
from bmburst.optim.config import MOMENT_BYTES
from bmburst.outputs import FULL, LOCK_FILE, TRAINING_LOCK, free_bytes, lock_folder, require_space
from bmburst.plan.counts import saved_master
from bmburst.train.config import TrainConfig
from bmburst.train.metrics import METRICS_FILE, read_lines
from bmburst.train.resolve import CONFIG_FILE, resolve
from bmburst.train.schedule import learning_rate

# Files that only a run that has trained leaves. Other files, such as the launcher's, may exist before.
RUN_TRACES = (METRICS_FILE, "checkpoints")
# Errors when writing metrics, plot and sample. Data, weights and checkpoints have their own messages.
_CANNOT_WRITE = (*FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EIO, errno.ESTALE)
_NO_RUN = (LOCK_FILE, TRAINING_LOCK, f".{CONFIG_FILE}.")  # the last is written by a run that has the lock

_LEFTOVER = 20.0  # seconds that ranks may outlive a launcher that was killed


def checkpoint_to_resume(folder: Path) -> Path:
    """Return the newest checkpoint of a run folder with correct checksums; UserError if there is none."""
    newest = newest_whole(folder, warn)
    if newest is None:
        raise UserError(
            f"--resume: {folder} has no complete checkpoint\n"
            "fix: leave --resume out and give another --output to begin again"
        )
    return newest


def changed_rate(folder: Path, config: TrainConfig, done: int) -> str | None:
    """Return a line that says that the learning rate of a run jumps where it is resumed; None if it does not.

    A run that ended at the lowest rate of its schedule goes on with a higher one if it gets more steps.

    Args:
        folder: The run's folder. Its metrics have the rate of the last step.
        config: The configuration with which the run goes on.
        done: Number of steps that were done.
    """
    rows = []
    with contextlib.suppress(OSError, UserError):  # the rank that continues the file refuses it
        rows = read_lines(folder / METRICS_FILE)
    before = next((row.get("lr") for row in reversed(rows) if row["step"] == done), None)
    schedule, peak = config.schedule, config.optimizer.lr
    if not isinstance(before, float) or math.isclose(
        before, learning_rate(schedule, peak, done, config.steps), rel_tol=0.01
    ):
        return None
    after = learning_rate(schedule, peak, done + 1, config.steps)
    return (
        f"the learning rate jumps from {before:.3g} at step {done:,} to {after:.3g}: the schedule is that of "
        f"{config.steps:,} steps from the start, as the options of this start say"
    )


def is_run(folder: Path) -> bool:
    """Return whether a folder holds files of a run, or its configuration."""
    return any((folder / name).exists() for name in (CONFIG_FILE, *RUN_TRACES))


def lock(stack: contextlib.ExitStack, folder: Path) -> None:
    """Lock a run folder until the stack is closed; UserError while another run is using it."""
    with explaining_write_errors(folder):
        stack.enter_context(lock_folder(folder))
        # The writing rank may outlive a killed launcher by a few seconds.
        with lock_folder(folder, TRAINING_LOCK, patience=_LEFTOVER):
            pass


def require_room(config: TrainConfig, folder: Path, tokens: tuple[Path, int]) -> None:
    """Raise UserError unless the disk has room for all files of the run.

    Args:
        config: Configuration of the run.
        folder: The run folder.
        tokens: Folder of the token cache, and the bytes that will be written there.
    """
    size, keep = bytes_text(checkpoint_bytes(config)), config.keep_checkpoints
    needs = {
        f"checkpoints of {size} (the newest {keep} are kept, and one more while it is written)": (
            folder,
            bytes_to_come(config, folder),
        ),
        "tokens of the text": tokens,
    }
    require_space(needs, "a smaller --keep-checkpoints, or --checkpoint-every never, which writes none")


def checkpoint_bytes(config: TrainConfig) -> int:
    """Return the bytes of a checkpoint's weights and optimizer state; with adapters, only of what is trained."""
    each = ITEMSIZE[config.dtype] + MOMENT_BYTES[config.optimizer.state] + saved_master(config.dtype)
    trained = config.lora.trained(config.model) if config.lora.is_on else config.model.num_parameters
    return math.ceil(trained * each)


def bytes_to_come(config: TrainConfig, run_folder: Path) -> int:
    """Return the largest number of bytes by which a run's checkpoints will grow.

    A new checkpoint is written before the oldest is removed, so for a while there is one more than is kept.
    """
    every = config.checkpoint_every
    if every is None:
        return 0
    there = [path for path in checkpoints(run_folder) if problem_of(path) is None]
    begun = max((step_of(path) for path in there), default=0)
    writes = max(config.steps // every - begun // every, 0) + (config.steps % every > 0) if every else 1
    if config.steps <= begun:
        return 0
    return max(min(writes + len(there), config.keep_checkpoints + 1) - len(there), 1) * checkpoint_bytes(config)


@contextlib.contextmanager
def explaining_write_errors(folder: Path | None, config: TrainConfig | None = None) -> Iterator[None]:
    """Turn an OSError of writing the run folder into a UserError."""
    try:
        yield
    except OSError as error:
        is_gone = folder is not None and error.errno == errno.ENOENT and not folder.is_dir()
        if error.errno not in _CANNOT_WRITE and not is_gone:
            raise
        fix = "change its permissions, or give another --output"
        if is_gone:
            fix = "leave the folder in its place until the run ends, and train again"
        if error.errno in (errno.EIO, errno.ESTALE):
            fix = "mount its file system again, or give another --output"
        if error.errno in FULL:
            fix = "make room" if folder is None else f"make room: {bytes_text(free_bytes(folder))} are free"
            if config is not None and config.checkpoint_every is not None:
                fix += f", and a checkpoint needs {bytes_text(checkpoint_bytes(config))}"
        raise UserError(
            f"output {folder}: cannot be written: {error.strerror}\n"
            f"fix: {fix}; --resume goes on from the newest checkpoint, if there is one"
        ) from error


def name_folder(config: TrainConfig) -> Path:
    """Return the folder of a run, or a new name if the configuration has none."""
    name = config.preset or (config.init_from.resolve().name if config.init_from else "model")
    return config.output or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"


def make_folder(config: TrainConfig, base: Path) -> Path:
    """Create the folder of a run, and return it: another one if another run has just taken a new name."""
    folder = base
    if config.output is not None:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    base.parent.mkdir(exist_ok=True)
    # Runs that start in the same second get different names: only one of them can create a folder.
    for number in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def check_fresh(folder: Path, traces: Container[str] | None = None) -> None:
    """Raise UserError unless a folder holds no run.

    Args:
        folder: The run folder.
        traces: Names of files that only a run writes; None for all names but those that a refused run leaves.
    """
    require_no_file(folder)
    if folder.is_dir():
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith(_NO_RUN))
        found = [name for name in names if traces is None or name in traces]
        if found and not (found == [CONFIG_FILE] and _is_run_config(folder / CONFIG_FILE)):
            raise UserError(
                f"output {folder}: not empty, it holds {found[0]}\n"
                "fix: give --resume to continue the run in it, or another --output"
            )


def require_no_file(folder: Path) -> None:
    """Refuse a file in place of a run folder."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output {folder}: is a file\nfix: give --output with a new or empty folder")


def _is_run_config(path: Path) -> bool:
    # If the ranks refused a run, for example because of a malformed JSONL line, this is its only file.
    try:
        resolve((path,))
    except UserError:
        return False
    return True

"""`bmburst train`: settles the configuration and the run folder, starts the ranks, and in each of them trains."""

import argparse
import contextlib
import errno
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bmburst.config import add_options, given_options
from bmburst.errors import RunError, UserError
from bmburst.outputs import require_folder
from bmburst.train.config import TrainConfig
from bmburst.train.resolve import CONFIG_FILE, check_resumable, check_run, resolve, write_run_config

HELP = (
    "Train a LLaMA-family model on long sequences. Every field of the configuration is an option. Options override "
    "the file of --config, and the file overrides the preset."
)
SHORT = {"data.source": "--data"} | {
    f"parallel.{name}": f"--{name.replace('_', '-')}"
    for name in (
        "data_parallel",
        "sequence_parallel",
        "tensor_parallel",
        "head_parallel",
        "layout",
        "strategy",
        "kernel",
        "transport",
    )
}
TITLES = {
    "": "run",
    "model": "model (defaults: the preset's; llama-tiny's are shown)",
    "data": "data",
    "optimizer": "optimizer",
    "schedule": "learning rate",
    "parallel": "ranks",
}
# What a run leaves in its folder once it has trained. Other files, such as the launcher's, may be there before.
_RUN_TRACES = ("metrics.jsonl", "checkpoints")
# Of metrics, plot and sample; data, weights and checkpoints have messages of their own.
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add --config and an option for every field of TrainConfig."""
    parser.usage = "bmburst train [--config FILE] [--FIELD VALUE ...]"
    parser.add_argument(
        "--config", metavar="FILE", help="configuration file, JSON or YAML, for example the config.json of a run"
    )
    add_options(parser, TrainConfig(), short=SHORT, titles=TITLES)


def run(args: argparse.Namespace) -> int:
    """Train, and return the exit status.

    Raises:
        UserError: Something in the configuration cannot work.
    """
    if "RANK" in os.environ:
        return _run_rank(args)
    config = settle(args)
    nproc = ranks_to_start(config)
    check_run(config, nproc)
    if config.resume and config.output is not None:
        done = steps_done(config.output)
        if done >= config.steps:
            print(f"{config.output}: finished with {done} steps; a larger --steps goes on", file=sys.stderr)
            return 0
    folder = _name_folder(config)
    require_folder("output", folder)
    # numpy comes with it, and the command line's help does without.
    from bmburst.train.text import check_text, token_cache

    check_text(config, token_cache(config, folder))
    with _refusing(folder):
        folder = _make_folder(config, folder)
    words = _resumed(args, folder) if config.resume else _begun(config, folder)

    from bmburst.runtime.launch import LaunchSpec, launch

    spec = LaunchSpec(nproc=nproc, hang_timeout=config.hang_timeout)
    return launch(spec, ["-m", "bmburst", "train", *words])


def settle(args: argparse.Namespace, *, as_rank: bool = False) -> TrainConfig:
    """Return the resolved configuration; of a resumed run, over the one in its folder, which is then `output`.

    Args:
        args: Parsed options.
        as_rank: This is a rank, whose run folder the launcher may have put files in already.

    Raises:
        UserError: A value is wrong, a fresh run's folder is not empty, or a resumed one has nothing to resume.
    """
    options = given_options(args, TrainConfig)
    given = Path(args.config) if args.config is not None else None
    config = resolve((given,) if given else (), options)
    if not config.resume:
        if config.output is not None:
            with _refusing(config.output):
                _check_fresh(config.output, as_rank=as_rank)
        return config
    folder = _folder_to_resume(config, given)
    own = folder / CONFIG_FILE
    if not own.is_file():
        raise UserError(
            f"--resume: {folder} is no run folder, for it has no {CONFIG_FILE}\n"
            "fix: --output with the folder of an earlier run, or leave --resume out to begin one"
        )
    files = (own,) if given is None or given.resolve() == own.resolve() else (own, given)
    config = resolve(files, options | {"resume": "true", "output": str(folder)})
    check_resumable(resolve((own,)), config, folder)
    return config


def ranks_to_start(config: TrainConfig) -> int:
    """Return how many ranks this machine gets: as configured, else all GPUs, else 2 processes.

    Raises:
        UserError: There are fewer GPUs than ranks.
    """
    import torch

    from bmburst.runtime.launch.spec import require_devices

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parallel = config.parallel
    nproc = config.nproc
    if nproc is None and parallel.sequence_parallel is not None:
        nproc = parallel.data_parallel * parallel.sequence_parallel * parallel.tensor_parallel
    if nproc is None:
        nproc = devices or max(2, parallel.data_parallel * parallel.tensor_parallel)
    require_devices(nproc, devices)
    return nproc


def steps_done(folder: Path) -> int:
    """Return the steps of the newest complete checkpoint of a run folder.

    Raises:
        UserError: There is no complete checkpoint.
    """
    from bmburst.checkpoint.training import newest_complete, read_progress

    newest = newest_complete(folder)
    if newest is None:
        raise UserError(
            f"--resume: {folder} has no complete checkpoint\n"
            "fix: leave --resume out and give another --output to begin again"
        )
    return read_progress(newest).step


def _begun(config: TrainConfig, folder: Path) -> list[str]:
    """Return the options of a fresh run's ranks, having written what was settled."""
    with _refusing(folder):
        return ["--config", str(write_run_config(config, folder)), "--output", str(folder)]


def _resumed(args: argparse.Namespace, folder: Path) -> list[str]:
    """Return the options of a resumed run's ranks: what was given, once more.

    The folder's own configuration stays as it is until the ranks have done a step: a change that is refused must not be
    there at the next attempt.
    """
    given = given_options(args, TrainConfig)
    options = [f"--{name}={value}" for name, value in given.items() if name not in ("output", "resume")]
    return [*([] if args.config is None else ["--config", args.config]), *options, "--output", str(folder), "--resume"]


def _run_rank(args: argparse.Namespace) -> int:
    try:
        config = _settle_in_rank(args)
    except UserError:
        # Every rank finds the same, and torchrun would show it once for each.
        if os.environ["RANK"] != "0" and "BMBURST_LAUNCH_FOLDER" not in os.environ:
            return 2
        raise

    from bmburst.train.trainer import run as train

    try:
        with _refusing(config.output):
            train(config)
    except RunError as error:
        # A rank that another one's launcher did not start has nobody who shows it once for all.
        alone = "BMBURST_LAUNCH_FOLDER" not in os.environ and os.environ["RANK"] != "0" and error.on_all_ranks
        raise SystemExit(1 if alone else str(error)) from None
    return 0


def _settle_in_rank(args: argparse.Namespace) -> TrainConfig:
    config = settle(args, as_rank=True)
    if config.output is None:
        raise UserError(
            "started as a rank without a run folder: ranks cannot agree on a new name\n"
            "fix: --output DIR, or let bmburst train start the ranks (--nproc)"
        )
    check_run(config, int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0")))
    return config


@contextlib.contextmanager
def _refusing(folder: Path | None) -> Iterator[None]:
    """Say in the user's words that a run folder cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        raise UserError(
            f"output {folder}: cannot be written: {error.strerror}\n"
            "fix: make room or give the right to write; --resume goes on from the newest checkpoint, if there is one"
        ) from error


def _name_folder(config: TrainConfig) -> Path:
    name = config.preset or (config.init_from.resolve().name if config.init_from else "model")
    return config.output or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"


def _make_folder(config: TrainConfig, base: Path) -> Path:
    folder = base
    if config.output is not None:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    base.parent.mkdir(exist_ok=True)
    # Runs begun in the same second get names of their own: making a folder succeeds for one of them only.
    for number in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def _check_fresh(folder: Path, *, as_rank: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output {folder}: is a file\nfix: --output with a new or empty folder")
    if folder.is_dir():
        found = sorted(path.name for path in folder.iterdir() if not as_rank or path.name in _RUN_TRACES)
        if found and not (found == [CONFIG_FILE] and _is_run_config(folder / CONFIG_FILE)):
            raise _occupied(folder, found[0])


def _is_run_config(path: Path) -> bool:
    # All that a run leaves which was refused in its ranks, for example for a line of JSONL that is none.
    try:
        resolve((path,))
    except UserError:
        return False
    return True


def _occupied(folder: Path, name: str) -> UserError:
    return UserError(
        f"output {folder}: not empty, it holds {name}\nfix: --resume to continue the run in it, or another --output"
    )


def _folder_to_resume(config: TrainConfig, given: Path | None) -> Path:
    if config.output is not None:
        return config.output
    if given is not None and given.name == CONFIG_FILE:
        return given.parent
    raise UserError(
        "--resume does not say which run\nfix: --output RUN_FOLDER, for example one under runs/, or --config "
        f"RUN_FOLDER/{CONFIG_FILE}"
    )

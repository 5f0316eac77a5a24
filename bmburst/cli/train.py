"""`bmburst train`: resolves the configuration and the run folder, starts the ranks, and trains in each of them."""

import argparse
import contextlib
import errno
import itertools
import json
import os
import sys
import time
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from bmburst.checkpoint.files import VERIFIED, bytes_to_come, nbytes, newest_whole, read_progress, verified, warn
from bmburst.cli import leaves_errors_to_rank_0, ranks_to_start
from bmburst.config import add_options, build_config, given_options, read_layer, to_dict
from bmburst.errors import RunError, UserError
from bmburst.outputs import FULL, LOCK_FILE, TRAINING_LOCK, amount, free_bytes, held, require_folder, require_space
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
    "lora": "adapters instead of all weights",
    "dpo": "training on pairs of a chosen and a rejected answer",
    "parallel": "ranks",
}
# Files that only a run that has trained leaves. Other files, such as the launcher's, may exist before.
_RUN_TRACES = ("metrics.jsonl", "checkpoints")
# Errors when writing metrics, plot and sample. Data, weights and checkpoints have their own messages.
_CANNOT_WRITE = (*FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)

RUN_CONFIG = "BMBURST_RUN_CONFIG"
"""Environment variable with the resolved configuration as JSON, from the launcher to its ranks."""
_LEFTOVER = 20.0  # seconds that ranks may outlive a launcher that was killed


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
        UserError: The configuration cannot work, or another run is using the run folder.
    """
    if "RANK" in os.environ:
        return _run_rank(args)
    config = resolve_options(args)
    folder = _name_folder(config)
    require_folder("output", folder)
    with contextlib.ExitStack() as stack:
        is_locked = config.output is not None and folder.is_dir()
        if is_locked:  # before any file of the folder is read
            _lock(stack, folder)
            config = resolve_options(args)
        nproc = ranks_of(config)
        check_run(config, nproc)
        from bmburst.train.machine import check_host_memory  # here, because the help does not need the planner

        check_host_memory(config, nproc)
        environment: dict[str, str] = {}
        if config.resume:
            newest = _to_resume(folder)
            done = read_progress(newest).step
            if done >= config.steps:
                print(f"{folder}: finished with {done} steps; a larger --steps goes on", file=sys.stderr)
                return 0
            print(f"going on from {newest}", file=sys.stderr, flush=True)
            environment[VERIFIED] = str(newest)
        else:
            _check_fresh(folder)  # before the data and the weights are read
        # Imported here because it imports numpy, which the help does not need.
        from bmburst.train.text import bytes_of_tokens, check_text, token_cache

        cache = token_cache(config, folder)
        text = check_text(config, cache)
        _require_room(config, folder, (cache, bytes_of_tokens(config, cache, text)))
        if config.init_from is not None and not config.resume:
            print(f"reading weights: {config.init_from}", file=sys.stderr, flush=True)
            environment[VERIFIED] = str(verified(config.init_from, warn))
        if not is_locked:  # another run may have created the folder by now
            with _explaining_write_errors(folder, config):
                folder = _make_folder(config, folder)
            _lock(stack, folder)
        if not config.resume:
            with _explaining_write_errors(folder, config):
                _check_fresh(folder)  # again: another run may have used the folder meanwhile
                write_run_config(config, folder)
        environment[RUN_CONFIG] = json.dumps(to_dict(config.replace(output=folder)))

        from bmburst.runtime.launch import LaunchSpec, launch

        spec = LaunchSpec(nproc=nproc, hang_timeout=config.hang_timeout, start_timeout=config.start_timeout)
        with set_environment(environment):
            words = ["--output", str(folder), *(["--resume"] if config.resume else [])]
            return launch(spec, ["-m", "bmburst", "train", *words])


@contextlib.contextmanager
def set_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for ranks that are started in the `with` block."""
    before = {name: os.environ.pop(name, None) for name in (RUN_CONFIG, VERIFIED)}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def resolve_options(args: argparse.Namespace) -> TrainConfig:
    """Build the configuration from the options. With --resume they override the run folder's, which becomes `output`.

    Raises:
        UserError: A value is wrong, the folder of a new run is a file, or there is no run to resume.
    """
    options = given_options(args, TrainConfig)
    given = Path(args.config) if args.config is not None else None
    # The options of a resumed run are complete only together with the configuration in its folder.
    which: dict[str, str] = {name: options[name] for name in ("resume", "output") if name in options}
    config = resolve((given,) if given else (), which if "resume" in which else options)
    if not config.resume:
        config = resolve((given,) if given else (), options)
        if config.output is not None:
            with _explaining_write_errors(config.output):
                _require_no_file(config.output)
        return config
    folder = _folder_to_resume(config, given)
    own = folder / CONFIG_FILE
    if not own.is_file():
        raise UserError(
            f"--resume: {folder} is not a run folder: it has no {CONFIG_FILE}\n"
            "fix: give --output with the folder of an earlier run, or leave --resume out to begin a new one"
        )
    files = (own,) if given is None or given.resolve() == own.resolve() else (own, given)
    config = resolve(files, options | {"resume": "true", "output": str(folder)})
    check_resumable(resolve((own,)), config, folder)
    return config


def ranks_of(config: TrainConfig) -> int:
    """Return the number of ranks on this machine: as configured, else one per GPU, else at least 2 processes.

    Raises:
        UserError: There are fewer GPUs than ranks.
    """
    parallel, nproc = config.parallel, config.nproc
    if nproc is None and parallel.sequence_parallel is not None:
        nproc = parallel.data_parallel * parallel.sequence_parallel * parallel.tensor_parallel
    return ranks_to_start(nproc, max(2, parallel.data_parallel * parallel.tensor_parallel))


def _to_resume(folder: Path) -> Path:
    """Return the newest checkpoint of a run folder with correct checksums.

    Raises:
        UserError: There is none.
    """
    newest = newest_whole(folder, warn)
    if newest is None:
        raise UserError(
            f"--resume: {folder} has no complete checkpoint\n"
            "fix: leave --resume out and give another --output to begin again"
        )
    return newest


def _lock(stack: contextlib.ExitStack, folder: Path) -> None:
    """Lock a run folder until the stack is closed.

    Raises:
        UserError: Another run is using it.
    """
    with _explaining_write_errors(folder):
        stack.enter_context(held(folder))
        # The writing rank may outlive a killed launcher by a few seconds.
        with held(folder, TRAINING_LOCK, patience=_LEFTOVER):
            pass


def _require_room(config: TrainConfig, folder: Path, tokens: tuple[Path, int]) -> None:
    """Check that the disk has room for all files of the run.

    Args:
        config: Configuration of the run.
        folder: The run folder.
        tokens: Folder of the token cache, and the bytes that will be written there.

    Raises:
        UserError: There is not enough.
    """
    size, keep = amount(nbytes(config)), config.keep_checkpoints
    needs = {
        f"checkpoints of {size} (the newest {keep} are kept, and one more while it is written)": (
            folder,
            bytes_to_come(config, folder),
        ),
        "tokens of the text": tokens,
    }
    require_space(needs, "a smaller --keep-checkpoints, or --checkpoint-every never, which writes none")


def _run_rank(args: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        try:
            config = _resolve_in_rank(args, stack)
        except UserError:
            if leaves_errors_to_rank_0():
                return 2
            raise

        from bmburst.train.trainer import run as train

        try:
            with _explaining_write_errors(config.output, config):
                train(config)
        except RunError as error:
            raise SystemExit(1 if error.on_all_ranks and leaves_errors_to_rank_0() else str(error)) from None
        return 0


def _resolve_in_rank(args: argparse.Namespace, stack: contextlib.ExitStack) -> TrainConfig:
    """Return the configuration that the launcher resolved; under torchrun, resolve it here.

    Under torchrun rank 0 locks the run folder until the stack is closed.
    """
    if RUN_CONFIG in os.environ:
        config = build_config(TrainConfig, read_layer(TrainConfig, json.loads(os.environ[RUN_CONFIG]), RUN_CONFIG))
    else:
        config = resolve_options(args)
    if config.output is None:
        raise UserError(
            "started as a rank (RANK is set) without --output: ranks cannot agree on the name of a new folder\n"
            "fix: give --output DIR, or let bmburst train start the ranks (--nproc)"
        )
    check_run(config, int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0")))
    if RUN_CONFIG not in os.environ and os.environ["RANK"] == "0":
        from bmburst.train.text import bytes_of_tokens, find_text, token_cache

        cache = token_cache(config, config.output)
        _require_room(config, config.output, (cache, bytes_of_tokens(config, cache, find_text(config))))
        with _explaining_write_errors(config.output, config):
            config.output.mkdir(parents=True, exist_ok=True)
        _lock(stack, config.output)
    if RUN_CONFIG not in os.environ and not config.resume:
        with _explaining_write_errors(config.output, config):
            _check_fresh(config.output, _RUN_TRACES)
    return config


@contextlib.contextmanager
def _explaining_write_errors(folder: Path | None, config: TrainConfig | None = None) -> Iterator[None]:
    """Turn an OSError of writing the run folder into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        fix = "change its permissions, or give another --output"
        if error.errno in FULL:
            fix = "make room" if folder is None else f"make room: {amount(free_bytes(folder))} are free"
            if config is not None and config.checkpoint_every is not None:
                fix += f", and a checkpoint needs {amount(nbytes(config))}"
        raise UserError(
            f"output {folder}: cannot be written: {error.strerror}\n"
            f"fix: {fix}; --resume goes on from the newest checkpoint, if there is one"
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
    # Runs that start in the same second get different names: only one of them can create a folder.
    for number in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def _check_fresh(folder: Path, traces: Container[str] | None = None) -> None:
    """Check that a folder holds no run.

    Args:
        folder: The run folder.
        traces: Names of files that only a run writes; None for all names but those that a refused run leaves.

    Raises:
        UserError: It holds a run.
    """
    _require_no_file(folder)
    if folder.is_dir():
        names = sorted(path.name for path in folder.iterdir() if path.name not in (LOCK_FILE, TRAINING_LOCK))
        found = [name for name in names if traces is None or name in traces]
        if found and not (found == [CONFIG_FILE] and _is_run_config(folder / CONFIG_FILE)):
            raise _occupied(folder, found[0])


def _require_no_file(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output {folder}: is a file\nfix: give --output with a new or empty folder")


def _is_run_config(path: Path) -> bool:
    # If the ranks refused a run, for example because of a malformed JSONL line, this is its only file.
    try:
        resolve((path,))
    except UserError:
        return False
    return True


def _occupied(folder: Path, name: str) -> UserError:
    return UserError(
        f"output {folder}: not empty, it holds {name}\n"
        "fix: give --resume to continue the run in it, or another --output"
    )


def _folder_to_resume(config: TrainConfig, given: Path | None) -> Path:
    if config.output is not None:
        return config.output
    if given is not None and given.name == CONFIG_FILE:
        return given.parent
    raise UserError(
        "--resume does not say which run to resume\n"
        "fix: give --output RUN_FOLDER, for example one under runs/, or --config "
        f"RUN_FOLDER/{CONFIG_FILE}"
    )

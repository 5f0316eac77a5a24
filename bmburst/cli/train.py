"""`bmburst train`: resolves the configuration and the run folder, starts the ranks, and trains in each of them."""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bmburst.checkpoint.files import VERIFIED, note_bytes, read_progress, verified, warn
from bmburst.cli import training
from bmburst.cli.program import leaves_errors_to_rank_0
from bmburst.cli.run_folder import (
    RUN_TRACES,
    changed_rate,
    check_fresh,
    checkpoint_to_resume,
    explaining_write_errors,
    is_run,
    lock,
    make_folder,
    name_folder,
    require_room,
)
from bmburst.config import from_dict, to_dict
from bmburst.errors import RunError, UserError
from bmburst.launch.handover import Request, run_command
from bmburst.launch.rank import STOPPED
from bmburst.launch.spec import LaunchSpec
from bmburst.outputs import require_folder
from bmburst.train.config import TrainConfig
from bmburst.train.resolve import check_run, write_run_config

HELP = (
    "Train a LLaMA-family model on long sequences. Every field of the configuration is an option. Options override "
    "the file of --config, and the file overrides the preset."
)
configure = training.configure


def run(args: argparse.Namespace) -> int:
    """Train, and return the exit status: `STOPPED` if a signal stopped the run, which has saved a checkpoint."""
    return run_command(__name__, partial(settle, args))


def run_rank(request: Request) -> int:
    """Train in one rank, as `settle` has decided, and return the exit status."""
    config = from_dict(TrainConfig, request["config"], "request")
    if request["verified"] is not None:
        os.environ[VERIFIED] = request["verified"]

    from bmburst.launch.beginning import Beginning
    from bmburst.train.trainer import run as train

    beginning = Beginning.of_process("imports", before="checks")
    try:
        with explaining_write_errors(config.output, config):
            stopped = train(config, beginning, valid_for=request["ranks"])
    except RunError as error:
        raise SystemExit(1 if error.on_all_ranks and leaves_errors_to_rank_0() else str(error)) from None
    if not stopped:
        return 0
    return 128 + signal.SIGTERM if config.checkpoint_every is None else STOPPED


@contextlib.contextmanager
def settle(args: argparse.Namespace, world_size: int | None = None) -> Iterator[tuple[Request | None, LaunchSpec]]:
    """Decide and check the whole run, once, and hold its folder while the block runs."""
    with contextlib.ExitStack() as stack:
        _, given = training.asked_folder(args)
        with explaining_write_errors(given):
            is_locked = given is not None and is_run(given)  # in another's folder no lock is left
        if given is not None and is_locked:  # before any file of the folder is read
            require_folder("output", given)
            lock(stack, given)
        config = training.resolve_options(args, world_size)
        if world_size is not None and config.output is None:
            raise UserError(
                "started as a rank (RANK is set) without --output: a restarted run must find its folder\n"
                "fix: give --output DIR, or let bmburst train start the ranks (--nproc)"
            )
        folder = name_folder(config)
        require_folder("output", folder)
        nproc = world_size or training.ranks_of(config)
        if config.resume is not True and (line := training.explain_choices(args, config, nproc)):
            print(line, file=sys.stderr, flush=True)
        check_run(config, nproc, int(os.environ.get("LOCAL_RANK", "0")))
        spec = LaunchSpec(nproc=nproc, hang_timeout=config.hang_timeout, start_timeout=config.start_timeout)
        if world_size is None:
            from bmburst.train.machine import check_host_memory  # here, because the help does not need the planner

            check_host_memory(config, nproc)
        # Imported here because they import numpy, which the help does not need.
        from bmburst.data import TokenFile
        from bmburst.train.text import bytes_of_tokens, check_text, steps_of_epochs, token_cache

        start: Path | None = None
        cache, text = token_cache(config, folder), None
        traces = None if world_size is None else RUN_TRACES  # torchrun may have written its logs there
        if config.resume is True:
            start = checkpoint_to_resume(folder)
            progress = read_progress(start)
            if config.epochs is not None:
                text = check_text(config, cache)
                before = progress.step, int(progress.data["samples"])
                config = _with_steps(args, config, steps_of_epochs(config, cache, before))
            done = progress.step
            if done >= config.steps:
                more = "--steps" if config.epochs is None else "--epochs"
                print(f"{folder}: finished with {done} steps; a larger {more} goes on", file=sys.stderr)
                yield None, spec
                return
            print(f"going on from {start}", file=sys.stderr, flush=True)
            if (jump := changed_rate(folder, config, done)) is not None:
                print(jump, file=sys.stderr, flush=True)
        elif not config.resume:
            check_fresh(folder, traces)  # before the data and the weights are read
        text = text or check_text(config, cache)
        if config.epochs is not None and config.resume is not True:
            config = _with_steps(args, config, steps_of_epochs(config, cache))
        require_room(config, folder, (cache, bytes_of_tokens(config, cache, text)))
        if config.init_from is not None and config.resume is not True:
            if config.data.tokenizer is None and not isinstance(text, TokenFile):  # a model's own is named
                note_bytes(config.init_from, "--data.tokenizer")
            print(f"reading weights: {config.init_from}", file=sys.stderr, flush=True)
            start = verified(config.init_from, warn)
        if not is_locked:  # another run may have created the folder by now
            with explaining_write_errors(folder, config):
                folder = make_folder(config, folder)
            lock(stack, folder)
        if config.resume is not True:
            with explaining_write_errors(folder, config):
                if not config.resume:
                    check_fresh(folder, traces)  # again: another run may have used the folder meanwhile
                write_run_config(config, folder)
        request = {
            "config": to_dict(config.replace(output=folder)),
            "ranks": nproc,
            "verified": None if start is None else str(start),
        }
        yield request, spec


def _with_steps(args: argparse.Namespace, config: TrainConfig, steps: int) -> TrainConfig:
    print(f"{config.epochs:g} epochs are {steps:,} steps", file=sys.stderr, flush=True)
    return training.with_steps(args, config, steps)

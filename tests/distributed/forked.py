"""Ranks in processes of their own that need not import torch again."""

import atexit
import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch.multiprocessing as mp

import bmburst

# What ranks use, and what the trainer, torch's optimizers and a test's own file import late: some 2 s of a training
# rank. BMTrain is not among it: whether and how it is imported is for each rank to show.
IMPORTED = [
    "torch.distributed",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "safetensors.torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen3.modeling_qwen3",
    "pytest",
    "bmburst.attention.api",
    "bmburst.train.trainer",
    "bmburst.launch.launcher",
    "tests.distributed.settled",  # the last
]


def start_ranks(size: int, body: Callable[..., None], args: tuple[object, ...], *, fresh: bool = False) -> Any:
    """Call `body(rank, *args)` on `size` processes, and return the job, which is to be joined.

    They are forked off a server that has imported torch and this package and has done nothing else: it has one thread,
    no CUDA and no process group, so that a rank begins as one that has just imported them. That saves each some 4 s of
    processor time. `fresh` ones import for themselves: CUDA is for those.
    """
    if fresh:
        return mp.spawn(body, args=args, nprocs=size, join=False)
    server()
    return mp.start_processes(as_here(body), args=args, nprocs=size, join=False, start_method="forkserver")


def server() -> Any:
    """Return `multiprocessing` with the server's processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    # It imports the package from its folder; a test's own place for files may be too long a name for a socket.
    with contextlib.chdir(Path(bmburst.__file__).parents[1]), mock.patch("tempfile.tempdir", "/tmp"):
        forkserver.ensure_running()
    return context


def as_here(body: Callable[..., None], environment: dict[str, str] | None = None) -> Callable[..., None]:
    """Return a function for a process of the server that calls `body` in an environment, by default this process's."""
    environment = dict(os.environ) if environment is None else environment  # the server has that of its own beginning
    return partial(_enter, environment, bmburst.__file__, body)


def join_ranks(job: Any, what: str, seconds: float) -> None:
    """Wait for the ranks of a job; the first failure fails the caller, and none is left running.

    Raises:
        TimeoutError: It is not over in time.
    """
    deadline = time.monotonic() + seconds
    try:
        while not job.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} on {len(job.processes)} ranks was not over after {seconds:g} s")
    finally:
        for process in job.processes:
            process.kill()


def default_interrupt() -> None:
    """Handle SIGINT as Python does: the shell of a command in the background has its processes ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _enter(environment: dict[str, str], package: str, body: Callable[..., None], *args: object) -> None:
    assert bmburst.__file__ == package, f"the server has imported {bmburst.__file__}: it was started in another folder"
    default_interrupt()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the server's
    try:
        body(*args)
    finally:
        atexit._run_exitfuncs()  # a forked process leaves them out; the host runtime delivers what is under way

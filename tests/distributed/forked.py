"""Ranks in processes of their own that need not import torch again."""

import atexit
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

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
    "pytest",
    "bmburst.attention.api",
    "bmburst.train.trainer",
]


def start_ranks(size: int, body: Callable[..., None], args: tuple[object, ...], *, fresh: bool = False) -> Any:
    """Call `body(rank, *args)` on `size` processes, and return the job, which is to be joined.

    They are forked off a server that has imported torch and this package and has done nothing else: it has one thread,
    no CUDA and no process group, so that a rank begins as one that has just imported them. That saves each some 4 s of
    processor time. `fresh` ones import for themselves: CUDA is for those.
    """
    if fresh:
        return mp.spawn(body, args=args, nprocs=size, join=False)
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    here = dict(os.environ)  # the server has the environment of its own beginning
    ours = (here, bmburst.__file__, body, args)
    return mp.start_processes(_enter, args=ours, nprocs=size, join=False, start_method="forkserver")


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


def _enter(
    rank: int, environment: dict[str, str], package: str, body: Callable[..., None], args: tuple[object, ...]
) -> None:
    assert bmburst.__file__ == package, f"the server has imported {bmburst.__file__}: it was started in another folder"
    os.environ.clear()
    os.environ.update(environment)
    try:
        body(rank, *args)
    finally:
        atexit._run_exitfuncs()  # a forked process leaves them out; the host runtime delivers what is under way

"""Runs a function on several ranks, each a thread of this process."""

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import Any, TypeVar

import torch

from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.groups import LocalCommunicator, LostRank, MessageQueue, single_rank_group
from bmburst.mesh import Mesh, MeshShape

T = TypeVar("T")


def run_ranks(size: int, body: Callable[..., T], *args: object) -> list[T]:
    """Call `body(communicator, *args)` on `size` ranks, one thread each, and return all results.

    Raises:
        Exception: The failure of the lowest failed rank, after all ranks have ended. `LostRank` is raised only if no
            rank failed in another way.
    """
    queues = [[MessageQueue() for _ in range(size)] for _ in range(size)]

    def run(rank: int) -> T:
        try:
            return body(CheckedCommunicator(LocalCommunicator(rank, queues), torch.device("cpu")), *args)
        finally:
            for queue in queues[rank]:
                queue.close()

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    failed = [future for future in futures if future.exception() is not None]
    for future in sorted(failed, key=lambda future: isinstance(future.exception(), LostRank)):
        future.result()
    return [future.result() for future in futures]


def on_ranks(
    size: int | None = None, run: Callable[..., object] = run_ranks, **options: object
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test that every one of `size` ranks runs: its first argument is the rank's communicator.

    Args:
        size: Number of ranks; None: the test's argument `size`.
        run: Calls a function on that many ranks, with what the first argument is to be.
        options: Options of `run`.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def start(**arguments: Any) -> None:
            run(arguments["size"] if size is None else size, partial(test, **arguments), **options)

        signature = inspect.signature(test)
        _, *given = signature.parameters.values()  # what pytest gives
        start.__signature__ = signature.replace(parameters=given)  # type: ignore[attr-defined]
        return start

    return decorate


def past_first_calls(comm: CheckedCommunicator) -> CheckedCommunicator:
    """Return a communicator whose first calls, which ranks compare on GPUs too, are over."""
    comm._state.compared = defaultdict(lambda: sys.maxsize)
    return comm


def mesh_of(comm: CheckedCommunicator | None = None) -> Mesh:
    """Return the mesh of ranks that share one sequence; None: of one rank."""
    comm = comm or single_rank_group()
    return Mesh(MeshShape(1, comm.size, 1), comm.rank, comm, comm, single_rank_group())

"""Run one function on every rank of a fresh BMTrain job in processes of its own."""

import os
from collections.abc import Callable

import torch

from tests.distributed.forked import join_ranks, start_ranks
from tests.distributed.ports import held_port


def run_program(
    size: int,
    body: Callable[..., None],
    *args: object,
    seconds: float = 120,
    on_gpus: bool = False,
    tensor: int = 1,
) -> None:
    """Start BMTrain on `size` processes and call `body(*args)` on each.

    The first failure fails the caller, and so does a job that is not over in time; none is left running. CUDA is hidden
    from the processes unless `on_gpus`. `tensor` ranks share each matrix.
    """
    with held_port() as port:
        job = start_ranks(size, _enter, (size, port, on_gpus, tensor, body, args), fresh=on_gpus)
        join_ranks(job, body.__name__, seconds)


def _enter(
    rank: int,
    size: int,
    port: int,
    on_gpus: bool,
    tensor: int,
    body: Callable[..., None],
    args: tuple[object, ...],
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if not on_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    from bmburst.runtime import start

    start(seed=0, tensor=tensor)
    torch.set_num_threads(1)  # BMTrain sets it to the processor's cores
    body(*args)

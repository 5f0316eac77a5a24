"""Run one function on every rank of a BMTrain job, in processes of its own."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests import lazy
from tests.distributed.decorated import Test, on_each_rank
from tests.distributed.forked import join_ranks, start_ranks
from tests.distributed.pools import LARGEST, pool
from tests.distributed.ports import held_port

_PATIENCE = 10.0  # seconds in which sends that are under way arrive, as at the end of a process


def run_program(
    size: int,
    body: Callable[..., None],
    *args: object,
    seconds: float = 120,
    on_gpus: bool = False,
    tensor: int = 1,
    pipe: int = 1,
    fresh: bool = False,
) -> None:
    """Start BMTrain on `size` processes and call `body(*args)` on each.

    The processes have run other bodies before, unless there are many or `fresh` ones are asked for: those are for what
    ends a process, measures its memory or its beginning. BMTrain starts anew for each body. Where there are GPUs, all
    processes are fresh: BMTrain's own extension, which knows no such start, is then in the place of the host runtime.

    The first failure fails the caller, and so does a job that is not over in time; none is left running. CUDA is hidden
    from the processes unless `on_gpus`. `tensor` ranks share each matrix, and `pipe` stages share the layers.
    """
    with held_port() as port:
        has_gpus = torch.cuda.is_available()
        if fresh or size > LARGEST or has_gpus:
            job = start_ranks(size, _enter, (size, port, on_gpus, tensor, pipe, body, args), fresh=has_gpus)
        else:
            job = pool(started_again).run(size, (size, port, tensor, pipe), body, args)
        join_ranks(job, body.__name__, seconds)


def on_program(size: int | None = None, **options: object) -> Callable[[Test], Test]:
    """Decorate a test that every rank of a BMTrain job runs; options are those of `run_program`."""
    return on_each_rank(run_program, size, **options)


@contextlib.contextmanager
def started_again(rank: int, size: int, port: int, tensor: int, pipe: int) -> Iterator[None]:
    """Start BMTrain, on the host runtime, and end it: the next start finds it as after its import."""
    _start(rank, size, port, tensor, pipe, on_gpus=False)
    yield
    from bmburst.host.extension import EXTENSION, MARK
    from bmburst.launch import start as launched

    nccl: Any = getattr(sys.modules[EXTENSION], MARK)
    nccl.close(_PATIENCE)
    nccl.waiting = contextlib.nullcontext
    torch.cuda.set_stream(torch.cuda.default_stream())
    lazy.bmt.config.clear()
    lazy.bmt.config.update(rank=0, local_rank=0, world_size=1, initialized=False)  # of bmtrain.global_var
    lazy.bmt.debug.DEBUG_VARS.clear()
    launched._store = None


def _enter(
    rank: int,
    size: int,
    port: int,
    on_gpus: bool,
    tensor: int,
    pipe: int,
    body: Callable[..., None],
    args: tuple[object, ...],
) -> None:
    _start(rank, size, port, tensor, pipe, on_gpus=on_gpus)
    body(*args)


def _start(rank: int, size: int, port: int, tensor: int, pipe: int, *, on_gpus: bool) -> None:
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
    from bmburst.launch.start import start

    start(seed=0, tensor=tensor, pipe=pipe)
    torch.set_num_threads(1)  # BMTrain sets it to the processor's cores

"""Run one function on every rank of a gloo process group, in processes of its own."""

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from tests.distributed.decorated import Test, on_each_rank
from tests.distributed.forked import join_ranks, start_ranks
from tests.distributed.pools import LARGEST, pool


def run_processes(
    size: int, body: Callable[..., None], *args: object, seconds: float = 600, fresh: bool = False
) -> None:
    """Call `body(*args)` on `size` processes; the first failure fails the caller, a lost rank does not hang it.

    The processes have run other bodies before, unless there are many or `fresh` ones are asked for: those are for what
    measures memory, or what other bodies must not find. The rendezvous is a file in a fresh folder, so no two tests
    race for a port.
    """
    with TemporaryDirectory() as folder:
        url = (Path(folder) / "rendezvous").as_uri()
        if fresh or size > LARGEST:
            job = start_ranks(size, _enter, (size, url, body, args))
        else:
            job = pool(group).run(size, (size, url), body, args)
        join_ranks(job, body.__name__, seconds)


def on_processes(size: int | None = None, **options: object) -> Callable[[Test], Test]:
    """Decorate a test that every rank of a process group runs; options are those of `run_processes`."""
    return on_each_rank(run_processes, size, **options)


@contextlib.contextmanager
def group(rank: int, size: int, url: str) -> Iterator[None]:
    """Join a process group for a while."""
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        dist.barrier()  # a rank that is soon over would end before others have found it
        yield
    finally:
        dist.destroy_process_group()


def _enter(rank: int, size: int, url: str, body: Callable[..., None], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    with group(rank, size, url):
        body(*args)

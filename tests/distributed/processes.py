"""Run one function on every rank of a fresh gloo process group, in processes of its own."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from tests.distributed.forked import start_ranks


def run_processes(size: int, body: Callable[..., None], *args: object) -> None:
    """Call `body(*args)` on `size` processes; the first failure fails the caller, a lost rank does not hang it.

    The rendezvous is a file in a fresh folder, so no two tests race for a port.
    """
    with TemporaryDirectory() as folder:
        url = (Path(folder) / "rendezvous").as_uri()
        job = start_ranks(size, _enter, (size, url, body, args))
        while not job.join():
            pass


def _enter(rank: int, size: int, url: str, body: Callable[..., None], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        body(*args)
    finally:
        dist.destroy_process_group()

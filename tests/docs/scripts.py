"""Runs a page's scripts on ranks as `bmburst launch` does, but on processes that have imported torch already."""

import contextlib
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import torch

from tests.distributed.forked import join_ranks, start_ranks
from tests.distributed.ports import held_port

SECONDS = 300  # on a machine that others load: more than that is a hang


def run_script(folder: Path, size: int, words: list[str], *, host: bool = True) -> str:
    """Run a script with arguments on `size` ranks in a folder, without GPUs, and return what rank 0 printed.

    The first failure fails the caller; none is left running. `-m` and a module may take the script's place. Without
    `host` the ranks are as torchrun starts them: the host runtime is put in place by nobody but the script.
    """
    with held_port() as port:
        job = start_ranks(size, _enter, (size, port, str(folder), words, host))
        join_ranks(job, str(words), SECONDS)
    return (folder / "printed-0").read_text()


def _enter(rank: int, size: int, port: int, folder: str, words: list[str], host_runtime: bool) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(folder)
    torch.set_num_threads(1)
    if host_runtime:
        from bmburst.runtime import host

        host.install()
    one_thread = mock.patch("torch.set_num_threads")  # BMTrain takes as many as there are cores, which others use too
    with one_thread, Path(f"printed-{rank}").open("w") as printed, contextlib.redirect_stdout(printed):
        _run(words)


def _run(words: list[str]) -> None:
    module = words[0] == "-m"
    sys.argv = words[1:] if module else words
    try:
        if module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{words} ended with status {end.code}") from end

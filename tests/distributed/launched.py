"""Ranks that the launcher starts with torch imported: forked off the server of tests, or off the launcher."""

import multiprocessing
import os
import runpy
import signal
import sys
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bmburst.launch.rank import LAUNCHER
from tests.distributed.forked import as_here, server

START = "bmburst.launch.agent.start_rank"
"""The launcher's function whose place these take."""


class LaunchedRank:
    """What the launcher uses of the `subprocess.Popen` of a rank.

    The process begins as the launcher's own does, but for what is imported, and with one thread for torch: BMTrain
    would take as many as there are cores, which other ranks use too.
    """

    def __init__(self, process: Any) -> None:
        process.start()
        self._process = process
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status; -N when signal N ended it, None before its end."""
        found: int | None = self._process.exitcode
        return found

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> None:
        self._process.join()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def from_server(command: Sequence[str], environment: Mapping[str, str]) -> LaunchedRank:
    """Start a rank of a launcher that is this process: what tests have imported and patched the rank does not have."""
    streams = [Connection(os.dup(number)) for number in range(3)]
    try:
        args = os.getcwd(), streams, command[1:]
        return LaunchedRank(server().Process(target=as_here(_enter, dict(environment)), args=args))
    finally:
        for stream in streams:
            stream.close()


def from_launcher(command: Sequence[str], environment: Mapping[str, str]) -> LaunchedRank:
    """Start a rank of a launcher that is itself a process of the server."""
    args = os.getcwd(), [], command[1:]
    body = as_here(_enter, dict(environment))
    return LaunchedRank(multiprocessing.get_context("fork").Process(target=body, args=args))


def name_of(rank: object) -> str:
    """Return the name of the process of a rank that was forked: what it began with is the environment of others."""
    return f"rank {rank}"


def _enter(cwd: str, streams: list[Connection], words: Sequence[str]) -> None:
    os.setsid()
    Path("/proc/self/comm").write_text(name_of(os.environ["RANK"]))
    vars(weakref.finalize)["_registry"].clear()  # what the launcher deletes at its end
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # the launcher's
    os.chdir(cwd)
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    os.environ[LAUNCHER] = str(os.getppid())  # it ends with the launcher, or with the server
    if words[1] == "-m":
        sys.modules.pop(words[2], None)  # it runs as `__main__`
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).parent))
    torch.set_num_threads(1)
    with mock.patch("torch.set_num_threads"):
        runpy.run_path(words[0], run_name="__main__")

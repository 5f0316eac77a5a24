"""Ranks that live as long as the tests of this process and run one body after another.

What a rank imports and compiles it keeps, so that the next body does not pay for it: for BMTrain, transformers and a
test's own file that is up to some seconds of processor time. A body finds what it finds in a new process otherwise:
the environment, the working directory, the states of the random number generators, no gradients, no caches of this
package. What a body leaves behind that is not set back (`tests.distributed.leftovers`) ends its rank, and the next body
gets a new one; so does a failure, a time-out, and an environment other than that in which the rank began.
"""

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from tqdm import tqdm

from tests.distributed import leftovers
from tests.distributed.forked import as_here, server

LARGEST = 4
"""The most ranks that are kept of each kind."""
_LOST_PEER = "Connection closed by peer", "Connection reset by peer"  # gloo's words in a failure
_PATIENCE = 5.0  # seconds until the end of the lost peer is seen

Around = Callable[..., contextlib.AbstractContextManager[None]]

_CHANGES_ALWAYS = frozenset({"PYTEST_CURRENT_TEST"})


class Pool:
    """Ranks of one kind, at most `LARGEST`, begun when they are first needed.

    Args:
        around: Enters a job on a rank, `with around(rank, *job):`, and leaves it. A function of a module.
    """

    def __init__(self, around: Around) -> None:
        self._around = around
        self._ranks: dict[int, _Rank] = {}

    def run(self, size: int, job: tuple[object, ...], body: Callable[..., None], args: tuple[object, ...]) -> "Job":
        """Begin `body(*args)` on ranks 0 to `size` - 1, and return the job, which is to be joined."""
        assert size <= LARGEST, f"{size} ranks: a pool has at most {LARGEST}"
        environment = _environment()
        for rank in range(size):
            known = self._ranks.get(rank)
            if known is not None and not known.serves(environment):
                known.end()
                del self._ranks[rank]
            if rank not in self._ranks:
                self._ranks[rank] = _Rank(environment)
        ranks = [self._ranks[rank] for rank in range(size)]
        for number, rank in enumerate(ranks):
            rank.call(dict(os.environ), self._around, (number, *job), body, args)
        return Job(ranks)

    def end(self) -> None:
        """End all ranks that wait for a body."""
        for rank in self._ranks.values():
            rank.end()
        self._ranks.clear()


class Job:
    """What `torch.multiprocessing.start_processes` returns, as far as tests use it."""

    def __init__(self, ranks: "list[_Rank]") -> None:
        self.processes = ranks
        self._left = {rank.connection: number for number, rank in enumerate(ranks)}

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the bodies; return whether all are over.

        Raises:
            ProcessRaisedException: A body has raised. The ranks of the job are killed.
            ProcessExitedException: A rank has ended.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._left:
            patience = None if deadline is None else deadline - time.monotonic()
            if patience is not None and patience <= 0:
                return False
            for connection in multiprocessing.connection.wait(list(self._left), patience):
                self._take(self._left.pop(connection))
        return True

    def _take(self, number: int) -> None:
        rank = self.processes[number]
        try:
            failure = rank.answer()
            if failure is not None:
                if any(words in failure for words in _LOST_PEER):  # a killed process closes its sockets before it ends
                    for connection in multiprocessing.connection.wait(list(self._left), _PATIENCE):
                        self._take(self._left.pop(connection))
                message = f"\n\n-- Process {number} terminated with the following error:\n{failure}"
                raise ProcessRaisedException(message, number, rank.pid)
        except EOFError:
            code = rank.exit_code()
            if code < 0:
                name = signal.Signals(-code).name
                message = f"process {number} terminated with signal {name}"
                raise ProcessExitedException(message, number, rank.pid, code, name) from None
            if code > 0:
                message = f"process {number} terminated with exit code {code}"
                raise ProcessExitedException(message, number, rank.pid, code) from None


class _Rank:
    """One process, and the end of the connection to it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.connection, theirs = multiprocessing.Pipe()
        self._process = server().Process(target=as_here(_serve), args=(theirs,))
        self._process.start()
        theirs.close()
        self.pid: int = self._process.pid or 0
        self._idle = True

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Return whether the process waits for a body, and began in this environment."""
        return self._idle and self._environment == environment and self._process.is_alive()

    def call(self, *job: object) -> None:
        self._idle = False
        self.connection.send_bytes(ForkingPickler.dumps(job))

    def answer(self) -> str | None:
        """Return how the body failed, if it did.

        Raises:
            EOFError: The process has ended.
        """
        failure, self._idle = pickle.loads(self.connection.recv_bytes())
        if not self._idle:
            self._process.join()
        return failure

    def exit_code(self) -> int:
        self._process.join()
        return self._process.exitcode or 0

    def kill(self) -> None:
        """End the process unless it waits for another body."""
        if not self._idle:
            self._process.kill()

    def end(self) -> None:
        self.connection.close()  # a rank that waits for a body ends then
        if not self._idle:
            self._process.kill()


@cache
def pool(around: Around) -> Pool:
    """Return this process's pool of a kind; its ranks end with the process."""
    made = Pool(around)
    atexit.register(made.end)  # before multiprocessing waits for the ranks
    return made


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _CHANGES_ALWAYS}


def _end_with_the_tests() -> None:
    tests = multiprocessing.parent_process()
    multiprocessing.connection.wait([tests.sentinel])
    os._exit(1)


def _serve(connection: Connection) -> None:
    """Run bodies until the other end closes, or until one leaves something behind."""
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # seconds; otherwise the first bar starts a thread that stays
    beginning = leftovers.Beginning.now()
    while True:
        try:
            received = connection.recv_bytes()
        except (EOFError, ConnectionError):
            return
        failure, left = None, []
        try:
            environment, around, job, body, args = pickle.loads(received)
            beginning.restore(environment)
            with around(*job):
                settings = leftovers.Settings.now()
                body(*args)
                left = settings.changed()
            left += beginning.clean()
        except Exception:
            failure = traceback.format_exc()
        stays = failure is None and not left
        if (log := os.environ.get("BMBURST_TEST_POOLS")) is not None and left:
            with open(log, "a") as file:
                file.write(f"{body.__module__}.{body.__name__}: {', '.join(left)}\n")
        connection.send_bytes(ForkingPickler.dumps((failure, stays)))
        if not stays:
            return

"""Python as `subprocess` has it: fresh, or forked off the server of the tests' ranks with torch there."""

import contextlib
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

from tests.distributed.forked import as_here, default_interrupt, server
from tests.distributed.launched import START, from_launcher, name_of


class Python:
    """`python WORDS`, started: what tests use of a `subprocess.Popen` whose output is text in pipes.

    A process of its own, in a folder and an environment of its own, with nothing to read. It has imported torch, which
    takes some 3 s of processor time; what it starts itself has not, but for `forked` ranks.

    Args:
        words: `-m MODULE ...`, `-c TEXT ...` or `SCRIPT ...`.
        cwd: Its working directory.
        env: Its environment. What Python reads of it as it begins has no effect, but for PYTHONPATH.
        first: Python that it runs before.
        forked: Whether ranks that it launches are forked off it.
    """

    def __init__(
        self, words: Sequence[str], *, cwd: Path, env: Mapping[str, str], first: str = "", forked: bool = False
    ) -> None:
        ends = [os.pipe() for _ in range(2)]
        self.stdout, self.stderr = (os.fdopen(read, "r") for read, _ in ends)
        pipes = [Connection(write, readable=False) for _, write in ends]
        body = as_here(_enter, dict(env))
        self._process = server().Process(target=body, args=(str(cwd), pipes, words, first, forked))
        self._process.start()
        for pipe in pipes:
            pipe.close()
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """Exit status; -N when signal N ended it, None before its end."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return what it has written to its end, and that of those who share its output."""
        with ThreadPoolExecutor(2) as pool:
            try:
                out, err = pool.map(lambda stream: stream.read(), (self.stdout, self.stderr), timeout=timeout)
            except TimeoutError:
                self.kill()
                raise
        self.wait(timeout)
        return out, err

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """End it, if it runs, and what it is read by."""
        self.kill()
        self.wait()
        self.stdout.close()
        self.stderr.close()


class Program(Python):
    """`python -m bmburst WORDS`, started."""

    def __init__(
        self, words: list[str], *, cwd: Path, env: Mapping[str, str], first: str = "", forked: bool = False
    ) -> None:
        super().__init__(["-m", "bmburst", *words], cwd=cwd, env=env, first=first, forked=forked)


def run_python(
    *words: str, cwd: Path, env: Mapping[str, str], timeout: float = 120, first: str = "", forked: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` to its end; it has imported torch."""
    return _to_its_end(Python(words, cwd=cwd, env=env, first=first, forked=forked), timeout)


def fresh_program(words: list[str], *, cwd: Path, env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start `python -m bmburst WORDS` as a user does: what it needs it imports itself."""
    command, pipe = [sys.executable, "-m", "bmburst", *words], subprocess.PIPE
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=env,
        preexec_fn=default_interrupt,
    )  # fmt: skip


def run_bmburst(
    *words: object, cwd: Path, env: Mapping[str, str], timeout: float, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `python -m bmburst WORDS` to its end; `fresh` as a user does, else it and its ranks have imported torch."""
    texts = [str(word) for word in words]
    program = fresh_program(texts, cwd=cwd, env=env) if fresh else Program(texts, cwd=cwd, env=env, forked=True)
    return _to_its_end(program, timeout)


def rank_of(launcher: int, rank: int) -> int:
    """Return the process id of a rank that a launcher started or forked."""
    threads = Path(f"/proc/{launcher}/task").glob("*/children")
    for folder in [Path("/proc", pid) for thread in threads for pid in thread.read_text().split()]:
        variables = (folder / "environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in variables or (folder / "comm").read_text().strip() == name_of(rank):
            return int(folder.name)
    raise AssertionError(f"no rank {rank}")


def _to_its_end(program: Python | subprocess.Popen[str], timeout: float) -> subprocess.CompletedProcess[str]:
    try:
        out, err = program.communicate(timeout)
    finally:
        program.kill()
        program.wait()
        for stream in (program.stdout, program.stderr):
            stream.close()
    return subprocess.CompletedProcess([], program.returncode or 0, out, err)


def _enter(cwd: str, pipes: list[Connection], words: Sequence[str], first: str, forked: bool) -> None:
    os.chdir(cwd)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, pipe in enumerate(pipes, 1):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    exec(first, {"__name__": "__main__"})
    with mock.patch(START, from_launcher) if forked else contextlib.nullcontext():
        try:
            _run(*words)
        except Exception as error:  # as the interpreter does, in the place of multiprocessing
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
            sys.excepthook(type(error), error, error.__traceback__)
            raise SystemExit(1) from None


def _run(kind: str, *words: str) -> None:
    """Run what Python's command line says."""
    if kind == "-m":
        sys.argv = list(words)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *words[1:]]
        exec(compile(words[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = [kind, *words]
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")

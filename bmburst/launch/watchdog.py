"""Ends a rank that makes no progress, and writes the stacks of its threads to a file.

BMTrain's collectives have no timeout, and a blocked one holds the GIL, so no Python thread could detect it.
faulthandler's timer is a C thread that does not need the GIL. It writes the stacks of all threads to a file and ends
the process. `beat` restarts the timer. The timer is the only state; the files are named in the environment.
"""

import contextlib
import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType

_VARIABLE = "BMBURST_WATCHDOG"  # "PID FD SECONDS FD" of the process that armed it
_STOOD = "BMBURST_STOOD"  # "PID FILE" of the process that armed it
_OPTIMIZERS = "torch.optim.optimizer"
_FLAGS = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC


def arm(seconds: float, folder: Path, local_rank: int, start: float | None = None) -> None:
    """Start the timer of this process, and write its stacks if it crashes, or that of one thread if it is terminated.

    Args:
        seconds: Longest time between two calls of `beat`; 0: no limit, also for the start.
        folder: Folder for `hang.LOCAL_RANK`, written when the time is over, and `stood.LOCAL_RANK`, written when this
            process crashes or is terminated. They distinguish the stuck rank from ranks that wait for it.
        local_rank: Number in the names of the files. The size of `steps.LOCAL_RANK` is the number of optimizer steps.
        start: Longest time until the first `beat`; by default `seconds`.
    """
    stood = os.open(folder / f"stood.{local_rank}", _FLAGS, 0o600)
    os.environ[_STOOD] = f"{os.getpid()} {folder / f'stood.{local_rank}'}"
    faulthandler.enable(file=stood)
    _write_stack_on_sigterm(stood)
    if seconds > 0:
        hang = os.open(folder / f"hang.{local_rank}", _FLAGS, 0o600)
        steps = os.open(folder / f"steps.{local_rank}", _FLAGS, 0o600)
        os.environ[_VARIABLE] = f"{os.getpid()} {hang} {seconds} {steps}"
        faulthandler.dump_traceback_later(seconds if start is None else start, exit=True, file=hang)


def _write_stack_on_sigterm(file: int) -> None:
    """Write the stack of the thread that gets SIGTERM, which is the main thread, and then do what SIGTERM does.

    The other threads run on meanwhile: reading their stacks may crash the process, which is to save its state.
    """
    faulthandler.register(signal.SIGTERM, file=file, all_threads=False, chain=True)


def beat() -> None:
    """Report progress of this process. Takes about 50 us; does nothing if no launcher armed the timer."""
    if armed := _armed():
        fd, seconds, _ = armed
        faulthandler.dump_traceback_later(float(seconds), exit=True, file=int(fd))


def _armed() -> list[str]:
    """Return the timer's file descriptor and seconds, and the descriptor of the steps' file; empty if not armed."""
    pid, _, rest = os.environ.get(_VARIABLE, "").partition(" ")
    return rest.split() if pid == str(os.getpid()) else []  # else it is inherited from the parent


def _step() -> None:
    """Count an optimizer step, and `beat`."""
    beat()
    if armed := _armed():
        os.write(int(armed[2]), b".")


@contextlib.contextmanager
def handle_signals(
    signums: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Return a context in which `handler` handles signals that would end this process, and the launcher knows it.

    After such a signal the launcher waits for this rank, unless another rank has failed. On SIGTERM the stacks are
    still written. Use it only in the main thread.
    """
    folder, local_rank = os.environ.get("BMBURST_LAUNCH_FOLDER"), os.environ.get("LOCAL_RANK")
    pid, _, path = os.environ.get(_STOOD, "").partition(" ")
    stood = os.open(path, _FLAGS, 0o600) if pid == str(os.getpid()) else None
    sign = None if folder is None else Path(folder) / f"polite.{local_rank}"
    with _held_back(signal.SIGTERM):  # a signal in between would leave no stacks
        faulthandler.unregister(signal.SIGTERM)
        before = {signum: signal.signal(signum, handler) for signum in signums}
        if stood is not None:
            _write_stack_on_sigterm(stood)
    if sign is not None:
        sign.touch()
    try:
        yield
    finally:
        if sign is not None:
            sign.unlink(missing_ok=True)
        faulthandler.unregister(signal.SIGTERM)
        for signum, earlier in before.items():
            signal.signal(signum, signal.SIG_DFL if earlier is None else earlier)
        if stood is not None:
            _write_stack_on_sigterm(stood)


@contextlib.contextmanager
def _held_back(signum: signal.Signals) -> Iterator[None]:
    """Return a context that blocks a signal to this thread until its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signum])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def beat_with_optimizers() -> None:
    """Make every step of every torch optimizer call `beat`; this includes BMTrain's optimizers.

    It does not import torch: a script that never imports it has no optimizer.
    """
    if _OPTIMIZERS in sys.modules:
        _hook(sys.modules[_OPTIMIZERS])
    else:
        sys.meta_path.insert(0, _AfterImport())


def _hook(optimizers: ModuleType) -> None:
    optimizers.register_optimizer_step_post_hook(lambda *_: _step())


class _AfterImport(importlib.abc.MetaPathFinder):
    """Hooks torch's optimizers when they are imported; it never finds a module itself."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _OPTIMIZERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _HookingLoader(spec.loader)
        return spec


class _HookingLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _hook(module)

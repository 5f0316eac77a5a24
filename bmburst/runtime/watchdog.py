"""Ends a rank that makes no progress, and writes the stack of each of its threads.

BMTrain's collectives have no time-out, and a blocked one holds Python's global lock, so that no Python thread could
notice. faulthandler's timer is a C thread that needs no lock: it writes every thread's stack to a file and ends the
process. `beat` starts it anew; the timer itself is the only state there is, and the environment says where it writes.
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
_OPTIMIZERS = "torch.optim.optimizer"
_FLAGS = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC


def arm(seconds: float, folder: Path, local_rank: int, start: float | None = None) -> None:
    """Start the timer of this process, and have its stack written down if something else ends it.

    Args:
        seconds: How long this process may go without a `beat` once there has been one; 0: for ever, the start too.
        folder: Where `hang.LOCAL_RANK` is written when the time is over, and `stood.LOCAL_RANK` when this process
            crashes or is ended, so that the rank that is stuck can be distinguished from ranks that wait for it.
        local_rank: Names the files. The size of `steps.LOCAL_RANK` is the number of optimizer steps.
        start: How long this process may take to its first `beat`; by default `seconds`.
    """
    stood = os.open(folder / f"stood.{local_rank}", _FLAGS, 0o600)
    faulthandler.enable(file=stood)
    faulthandler.register(signal.SIGTERM, file=stood, chain=True)
    if seconds > 0:
        hang = os.open(folder / f"hang.{local_rank}", _FLAGS, 0o600)
        steps = os.open(folder / f"steps.{local_rank}", _FLAGS, 0o600)
        os.environ[_VARIABLE] = f"{os.getpid()} {hang} {seconds} {steps}"
        faulthandler.dump_traceback_later(seconds if start is None else start, exit=True, file=hang)


def beat() -> None:
    """Say that this process has made progress. Costs about 50 us; does nothing where no launcher armed the timer."""
    if armed := _armed():
        fd, seconds, _ = armed
        faulthandler.dump_traceback_later(float(seconds), exit=True, file=int(fd))


def _armed() -> list[str]:
    """Return where and after how many seconds the timer writes, and the steps' file; nothing where it is not armed."""
    pid, _, rest = os.environ.get(_VARIABLE, "").partition(" ")
    return rest.split() if pid == str(os.getpid()) else []  # of another process: that which started this one


def _step() -> None:
    """Count an optimizer step; it is a `beat`."""
    beat()
    if armed := _armed():
        os.write(int(armed[2]), b".")


@contextlib.contextmanager
def polite(signums: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let `handler` take signals that would end this process, and tell the launcher that it need not.

    The launcher then waits for this rank after such a signal, unless another rank has failed. Where SIGTERM met the
    process is written down all the same. Only in the main thread.
    """
    folder, local_rank = os.environ.get("BMBURST_LAUNCH_FOLDER"), os.environ.get("LOCAL_RANK")
    stood = None if folder is None else os.open(Path(folder) / f"stood.{local_rank}", _FLAGS, 0o600)
    sign = None if folder is None else Path(folder) / f"polite.{local_rank}"
    with _held_back(signal.SIGTERM):  # one in between would be taken, but not written down
        faulthandler.unregister(signal.SIGTERM)
        before = {signum: signal.signal(signum, handler) for signum in signums}
        if stood is not None:
            faulthandler.register(signal.SIGTERM, file=stood, chain=True)
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
            faulthandler.register(signal.SIGTERM, file=stood, chain=True)


@contextlib.contextmanager
def _held_back(signum: signal.Signals) -> Iterator[None]:
    """Let a signal to this thread wait until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signum])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def beat_with_optimizers() -> None:
    """Make every step of every torch optimizer a `beat`; BMTrain's optimizers are torch's in this respect.

    torch is not imported for it: a script that never does has no optimizer.
    """
    if _OPTIMIZERS in sys.modules:
        _hook(sys.modules[_OPTIMIZERS])
    else:
        sys.meta_path.insert(0, _AfterImport())


def _hook(optimizers: ModuleType) -> None:
    optimizers.register_optimizer_step_post_hook(lambda *_: _step())


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself; waits for torch's optimizers to be imported and then hooks them."""

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

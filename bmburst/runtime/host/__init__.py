"""The host runtime: runs unmodified BMTrain 1.0.1 on CPUs, with gloo instead of NCCL.

BMTrain needs CUDA and NCCL. `install` replaces BMTrain's compiled extension (`patches`, `nccl`, `kernels`) and the
functions of torch.cuda that BMTrain calls (`patches`, `cuda`). It changes this process only. It must be called
before `import bmtrain`.

Environment: BMBURST_TIMEOUT is the timeout of an exchange between ranks, in seconds (default 1800).
GLOO_SOCKET_IFNAME names the network interfaces that connect the hosts.
"""

import atexit
import ctypes
import importlib.util
import os
import shlex
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from bmburst.errors import UserError
from bmburst.runtime.install_bmtrain import install_command

if TYPE_CHECKING:
    from bmburst.runtime.host.nccl import Nccl

_FLUSH = 10.0  # seconds to wait at exit for pending sends
# Options of mallopt, with bytes: blocks below the first are on the heap, which keeps up to the second when freed.
_KEPT = (("mmap_threshold", -3, 32 << 20), ("trim_threshold", -1, 1 << 30))


def install() -> None:
    """Make `import bmtrain` work on CPUs in this process. A second call does nothing.

    Raises:
        UserError: CUDA is usable, BMTrain is not installed, or BMTrain is imported already with its own extension.
    """
    if is_installed():
        return
    import torch

    if torch.cuda.is_available():
        raise UserError(
            "the host runtime is for machines without CUDA, and CUDA is usable here\n"
            "fix: to run on the CPU, set CUDA_VISIBLE_DEVICES= (empty) before Python starts"
        )
    if "bmtrain" in sys.modules:
        raise UserError(
            "bmtrain is imported already, with its own CUDA extension\n"
            "fix: call bmburst.runtime.start() or bmburst.runtime.host.install() before the first `import bmtrain`"
        )
    if importlib.util.find_spec("bmtrain") is None:
        command = shlex.join(install_command())
        raise UserError(f"BMTrain is not installed for {sys.executable}\nfix: {command}")

    from bmburst.runtime.host import patches
    from bmburst.runtime.host.cuda import Streams
    from bmburst.runtime.host.nccl import Nccl, Rendezvous

    streams = Streams()
    nccl = Nccl(streams, Rendezvous())
    patches.apply(streams)
    silence_storage_warnings()
    sys.modules[patches.EXTENSION] = patches.build_extension(nccl)
    _keep_freed_memory()
    atexit.register(_close, nccl, os.getpid())
    if os.environ.get("RANK", "0") == "0":
        print("bmburst: no CUDA here, running BMTrain on CPUs (host runtime)", file=sys.stderr)  # noqa: T201


def is_installed() -> bool:
    """Return whether the host runtime is installed in this process."""
    return hasattr(sys.modules.get("bmtrain.C"), "__bmburst_host_runtime__")


def wrap_communication(waiting: Callable[[], AbstractContextManager[None]]) -> None:
    """Enter the context `waiting()` around every launch of BMTrain's communication. On CPUs a launch blocks."""
    sys.modules["bmtrain.C"].__bmburst_host_runtime__.waiting = waiting


def silence_storage_warnings() -> None:
    """Hide torch's deprecation warnings about functions that BMTrain 1.0.1 uses. A user cannot act on them."""
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated", category=UserWarning)
    warnings.filterwarnings("ignore", message=r"The torch\.cuda\.\*DtypeTensor constructors", category=UserWarning)


def _keep_freed_memory() -> None:
    """Let the C library keep freed memory for the tensors of the next layer.

    By default it returns most of it to the kernel, which clears each page before it hands it out again: a fifth of the
    CPU time in a step of llama-tiny. Settings in the environment, in either form of glibc, take precedence.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    for name, option, nbytes in _KEPT:
        is_given = f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}=" in tunables
        if mallopt is not None and not is_given:
            mallopt(option, nbytes)


def _close(nccl: "Nccl", process: int) -> None:
    if os.getpid() != process:
        return  # a forked child: the connections belong to its parent
    dying = hasattr(sys, "last_value")  # an exception ends this process: the receivers may have ended
    nccl.close(0.0 if dying else _FLUSH)

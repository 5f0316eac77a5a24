"""The environment that ranks get beside their place in the run: threads, NCCL, and our own variables."""

import os
from collections.abc import Mapping
from pathlib import Path

from bmburst.errors import UserError
from bmburst.runtime.stores import LOOPBACK_ONLY

# Our own variables, read by bmburst/runtime/rank.py (a file that imports nothing of bmburst, so it repeats them).
FOLDER = "BMBURST_LAUNCH_FOLDER"
LAUNCHER = "BMBURST_LAUNCHER_PID"
HANG_TIMEOUT = "BMBURST_HANG_TIMEOUT"
START_TIMEOUT = "BMBURST_START_TIMEOUT"
HOST_RUNTIME = "BMBURST_HOST_RUNTIME"

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = _QUOTA) -> int:
    """Return the cores this process may use: those it may be scheduled on, less where a container's quota is lower."""
    cores = len(os.sched_getaffinity(0))
    if not quota.is_file():
        return cores
    allowance, _, period = quota.read_text().strip().partition(" ")
    if not (allowance.isdigit() and period.isdigit()) or int(period) == 0:
        return cores
    return max(1, min(cores, int(allowance) // int(period)))


def defaults(nproc: int, cores: int, *, cuda: bool, nnodes: int = 1) -> dict[str, str]:
    """Return the settings for variables that the user left open.

    * OMP_NUM_THREADS: the cores shared out evenly. Unset, every rank would start a thread for every core.
    * NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL 2.26 and later): ZeRO's and the sequence ring's communicators are in flight
      together; NCCL then keeps their kernels in the order in which the host issued them, so that they cannot block
      each other.
    * `stores.LOOPBACK_ONLY`, on one node.
    """
    found = {"OMP_NUM_THREADS": str(max(1, cores // nproc))}
    if nnodes == 1:
        found |= LOOPBACK_ONLY
    if cuda:
        found["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
    return found


def open_defaults(environ: Mapping[str, str], nproc: int, cores: int, *, cuda: bool, nnodes: int = 1) -> dict[str, str]:
    """Return those of `defaults` that the user has not set.

    Raises:
        UserError: CUDA_DEVICE_MAX_CONNECTIONS is 1 and there are GPUs. It puts all streams of a GPU into one hardware
            queue: a parameter gather then waits behind a ring step that waits for a rank whose gather is still queued.
    """
    if cuda and environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1":
        raise UserError(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts every stream of a GPU in one queue: concurrent transfers can hang\n"
            "allowed: unset (8), or 2 to 32\n"
            "do: unset CUDA_DEVICE_MAX_CONNECTIONS"
        )
    found = defaults(nproc, cores, cuda=cuda, nnodes=nnodes)
    return {name: value for name, value in found.items() if name not in environ}

"""Whether a host has the memory that an offloaded optimizer needs: refused at the start, not killed in the midst."""

from pathlib import Path

from bmburst.amounts import GIB
from bmburst.errors import UserError
from bmburst.mesh import Mesh
from bmburst.plan.counts import adam_bytes
from bmburst.plan.task import ITEMSIZE
from bmburst.train.config import TrainConfig

_MEMORY = Path("/proc/meminfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")


def state_bytes(config: TrainConfig, world_size: int, local_size: int) -> int:
    """Return what AdamW keeps in the memory of a host that has `local_size` of the job's ranks."""
    return adam_bytes(ITEMSIZE[config.dtype]) * config.model.num_parameters * local_size // world_size


def available_bytes() -> int | None:
    """Return the memory that this host still has, at most its container's; None where Linux does not say."""
    try:
        lines = _MEMORY.read_text(encoding="ascii").splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    try:
        # Not less what the container uses: that counts the cache of files, which is given up on demand.
        return min(free, int(_LIMIT.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no container, or none with a limit
        return free


def require_host_memory(config: TrainConfig, mesh: Mesh, local_size: int) -> None:
    """Check that each host has room for AdamW's state; every rank calls it.

    Raises:
        UserError: One has not; on all ranks, or the others would wait for those of a short host.
    """
    needed, available = state_bytes(config, mesh.shape.size, local_size), available_bytes()
    if mesh.sum(float(available is not None and available < needed)):
        raise _shortage(needed, available)


def _shortage(needed: int, available: int | None) -> UserError:
    """Return why `optimizer.offload` cannot work; `available` is of this host, which may be another than the short."""
    here = "" if available is None or available >= needed else f": {available / GIB:.1f} are free on this one"
    return UserError(
        f"optimizer.offload needs {needed / GIB:.1f} GiB of each host's memory, and one has less{here}\n"
        "fix: leave --optimizer.offload out, or share the model among more hosts"
    )

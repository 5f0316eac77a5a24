"""Memory of this host, and of this process and its GPU."""

import sys
from pathlib import Path

DRIVER_IS_FULL = "CUDA error: out of memory"
"""What the `RuntimeError` says where CUDA itself, and not torch's allocator, finds no memory on a GPU."""

_ROOT = Path("/")
_MEMORY, _LIMIT = "proc/meminfo", "sys/fs/cgroup/memory.max"
_GROWS = ("sys/bus/virtio/drivers/virtio_mem/virtio*", "sys/bus/vmbus/drivers/hv_balloon/*-*")
"""Devices that add memory to a virtual machine on demand: MemTotal then starts at a fraction of the total."""


def available_bytes(root: Path = _ROOT) -> int | None:
    """Return the free bytes of this host, at most its container's limit; None if Linux does not report them.

    Args:
        root: The root of the file systems in which the kernel reports them.
    """
    # The container's usage is not subtracted: it includes the page cache.
    return _least(_line("MemAvailable:", root), root)


def total_bytes(root: Path = _ROOT) -> int | None:
    """Return the bytes of this host, at most its container's limit; None if they can grow or Linux reports none.

    Args:
        root: See `available_bytes`.
    """
    grows = any(any(root.glob(pattern)) for pattern in _GROWS)
    return None if grows else _least(_line("MemTotal:", root), root)


def peak_bytes() -> tuple[int, int]:
    """Return the peak allocated and the peak reserved memory of this rank in bytes.

    On a GPU, since `forget_peak`; without CUDA, the peak resident set of the process so far, and 0.
    """
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return peak_resident_bytes(), 0


def peak_resident_bytes() -> int:
    """Return the peak resident set of the process so far, in bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, kilobytes on Linux


def forget_peak() -> None:
    """Reset the GPU's peak memory counters that `peak_bytes` reads."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _line(name: str, root: Path) -> int | None:
    try:
        lines = (root / _MEMORY).read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))
    except (OSError, StopIteration):
        return None


def _least(nbytes: int | None, root: Path) -> int | None:
    if nbytes is None:
        return None
    try:
        return min(nbytes, int((root / _LIMIT).read_text(encoding="ascii")))
    except (OSError, ValueError):  # no container, or no limit
        return nbytes

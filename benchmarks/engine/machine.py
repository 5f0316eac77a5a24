"""The machine of a run: collectives between its ranks, GPU memory, and versions, hardware and commit for records."""

import gc
import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmburst import __version__
from bmburst.comm.collectives import ALL_GATHER, REDUCE_SCATTER, named_verb
from bmburst.comm.memory import bytes_of

_USABLE = 0.92  # fraction of a device; the rest is for context, communicators and fragmentation
_PACKAGES = (
    "triton",
    "flash-attn-4",
    "flash-attn",
    "flash-attn-3",
    "nvidia-cutlass-dsl",
    "ring-flash-attn",
    "yunchang",
    "burst-attn",
    "bmtrain",
    "numpy",
)


def describe_run(command: Sequence[str], device: str, ranks: int) -> dict[str, Any]:
    """Return the header of a run, for JSON."""
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "command": shlex.join(command),
        "ranks": ranks,
        "device": _device(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "bmburst": __version__,
        "commit": commit(),
    }
    if device == "cuda":
        facts |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": _driver(),
        }
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "PYTORCH_"))}
    return facts | {"packages": {n: v for n in _PACKAGES if (v := _version(n)) is not None}, "environment": settings}


def commit() -> str | None:
    """Return the commit of the running source tree, with `+` if files are changed; None outside a repository."""
    root = Path(__file__).parents[2]

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    name = git("rev-parse", "HEAD")
    return None if name is None else name + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def _device(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name(0)
    cpu = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", cpu.read_text(), re.MULTILINE) if cpu.exists() else None
    return found.group(1) if found else platform.machine()


def _driver() -> str | None:
    version = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module.*?(\d+\.\d+[.\d]*)", version.read_text()) if version.exists() else None
    return found.group(1) if found else None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroup:
    """The ranks that share a sequence."""

    process_group: dist.ProcessGroup  # their process group
    rank: int  # this rank's number in the group
    size: int  # number of ranks
    device: torch.device  # device of this rank's tensors
    is_world: bool = True  # whether the group contains all ranks of the run

    @classmethod
    def world(cls, device: torch.device) -> "RankGroup":
        """Return the group of all ranks, after `init_process_group`."""
        assert dist.group.WORLD is not None
        return cls(process_group=dist.group.WORLD, rank=dist.get_rank(), size=dist.get_world_size(), device=device)

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Return `[size, ...]` whose part i was sent by rank i.

        `parts` is `[size, ...]`, contiguous; part i is sent to rank i.
        """
        received = torch.empty_like(parts)
        if self.size == 1:
            return received.copy_(parts)
        dist.all_to_all_single(bytes_of(received), bytes_of(parts), group=self.process_group)
        return received

    def all_gather(self, part: Tensor) -> Tensor:
        """Return the tensors of all ranks, `[size, ...]`, in rank order."""
        received = part.new_empty((self.size, *part.shape))
        if self.size == 1:
            return received.copy_(part[None])
        named_verb(ALL_GATHER)(bytes_of(received), bytes_of(part.contiguous()), group=self.process_group)
        return received

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """Return the sum over all ranks of `parts[rank]`, where `rank` is this rank's number.

        `parts` is `[size, ...]`, contiguous.
        """
        received = torch.empty_like(parts[0])
        if self.size == 1:
            return received.copy_(parts[0])
        named_verb(REDUCE_SCATTER)(received.view(-1), parts.view(-1), group=self.process_group)
        return received

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a tensor over the ranks in place, by default with a sum, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, op=op, group=self.process_group)
        return tensor

    def largest(self, value: float) -> float:
        """Return the largest of the ranks' values."""
        own = torch.tensor(value, dtype=torch.float64, device=self.device)
        return float(self.all_reduce(own, dist.ReduceOp.MAX).item())

    def barrier(self) -> None:
        """Wait until all ranks have called it and their devices are idle."""
        if self.size > 1:
            dist.barrier(group=self.process_group)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def rotate(self, tensor: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Start sending a tensor to the next rank and receiving one from the previous rank.

        Returns:
            The received tensor, and the works that must be waited for before it is read.
        """
        received = torch.empty_like(tensor)
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        hops = [
            dist.P2POp(dist.isend, tensor, group=self.process_group, group_peer=to),
            dist.P2POp(dist.irecv, received, group=self.process_group, group_peer=source),
        ]
        return received, dist.batch_isend_irecv(hops)


def start_ranks(backend: str = "nccl", **options: Any) -> torch.device:
    """Initialize torch.distributed from the launcher's environment variables, and return this rank's device.

    The backend is for GPUs; on CPUs it is gloo. Options are those of `torch.distributed.init_process_group`.
    """
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", **options)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device, **options)
    return device


@dataclass(frozen=True, slots=True)
class Gauge:
    """Measures the memory of a cell on this rank's GPU.

    It is the peak of torch's allocator plus the growth of other memory (`beside_peak`) since the start of the run.
    """

    device: torch.device  # this rank's device. On a CPU nothing is measured.
    beside: int = 0  # bytes of other memory at the start of the run

    @classmethod
    def begin(cls, device: torch.device) -> "Gauge":
        """Return a gauge. Call it after the run has created its communicators, and before its buffers."""
        return cls(device, beside_peak(device) if device.type == "cuda" else 0)

    def clear(self) -> None:
        """Free unused memory, and reset the peak."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self, allocated: float | None = None) -> float | None:
        """Return the bytes at the peak since `clear`; None on a CPU.

        `allocated` is the peak of torch's allocator, if the measured code itself resets it.
        """
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize(self.device)
        if allocated is None:
            allocated = torch.cuda.max_memory_allocated(self.device)
        return allocated + max(0, beside_peak(self.device) - self.beside)

    def capacity(self, ranks_here: int) -> float:
        """Return the bytes that a cell may take on a rank.

        Without a GPU, `ranks_here` ranks share this machine's memory.
        """
        if self.device.type == "cuda":
            return _USABLE * torch.cuda.get_device_properties(self.device).total_memory
        return _USABLE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks_here


def beside_peak(device: torch.device) -> int:
    """Return the bytes of a GPU that the peak of torch's allocator does not include.

    These are memory outside the allocator, such as NCCL's and buffers that other ranks read, and memory that the
    allocator holds for CUDA graphs.
    """
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device) + kept_by_graphs(device)


def kept_by_graphs(device: torch.device) -> int:
    """Return the bytes that torch's allocator reserves for CUDA graphs."""
    segments = (s for s in torch.cuda.memory_snapshot() if s["device"] == device.index)
    return sum(s["total_size"] - s["allocated_size"] for s in segments if s["segment_pool_id"] != (0, 0))

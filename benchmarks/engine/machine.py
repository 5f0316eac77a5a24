"""Records versions, hardware and commit of a run, and measures the memory that a cell takes."""

import gc
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bmburst import __version__
from bmburst.outputs import replacing

_USABLE = 0.92  # of a device: context, communicators and fragments take the rest
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
    """Return the header of a run, as JSON knows it.

    Args:
        command: The command line.
        device: "cuda" or "cpu".
        ranks: Ranks of the run.
    """
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


def require_gpu(module: str) -> None:
    """End the program with a message where there is no GPU.

    Args:
        module: What is run, for example "benchmarks.biased".
    """
    if not torch.cuda.is_available():
        sys.exit(f"{module} needs a GPU, but torch finds none\nfix: run it on a machine with CUDA")


def write_record(path: Path | None, module: str, ranks: int = 1, **found: Any) -> None:
    """Write what a module of `benchmarks` found, and its machine, as JSON; nothing where there is no path."""
    if path is not None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        machine = describe_run(["python", "-m", module, *sys.argv[1:]], device, ranks)
        with replacing(path) as partial:
            partial.write_text(json.dumps({"machine": machine, **found}, indent=1) + "\n", encoding="utf-8")


def publish(path: Path | None, module: str, text: str, ranks: int = 1, **found: Any) -> None:
    """Print the table of what a module found; with a path, write it there as `write_record` and the table beside it."""
    write_record(path, module, ranks, **found)
    print(text)
    if path is not None:
        path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")


def commit() -> str | None:
    """Return the commit of the source tree that runs, marked `+` where files differ; None outside a repository."""
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


@dataclass(frozen=True, slots=True)
class Gauge:
    """Reads how much memory a cell takes on this rank's GPU.

    What lies beside the peak of torch's allocator (`beside_peak`) is added to it, less what that was when a run began.

    Attributes:
        device: This rank's device. On a CPU nothing is read.
        beside: Bytes beside it when the run began.
    """

    device: torch.device
    beside: int = 0

    @classmethod
    def begin(cls, device: torch.device) -> "Gauge":
        """Return a gauge for a run that has made its communicators but no buffers."""
        return cls(device, beside_peak(device) if device.type == "cuda" else 0)

    def clear(self) -> None:
        """Give back what nothing holds any more, and begin a new peak."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self, allocated: float | None = None) -> float | None:
        """Return the bytes at the peak since `clear`; None on a CPU.

        Args:
            allocated: The peak of torch's allocator, where what was measured began a new one now and then itself.
        """
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize(self.device)
        if allocated is None:
            allocated = torch.cuda.max_memory_allocated(self.device)
        return allocated + max(0, beside_peak(self.device) - self.beside)

    def capacity(self, ranks_here: int) -> float:
        """Return the bytes that a cell may take on a rank.

        Args:
            ranks_here: Ranks that share this machine's memory, where there is no GPU.
        """
        if self.device.type == "cuda":
            return _USABLE * torch.cuda.get_device_properties(self.device).total_memory
        return _USABLE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks_here


def beside_peak(device: torch.device) -> int:
    """Return the bytes of a GPU that no peak of torch's allocator counts.

    What the driver has given out and the allocator does not hold, as buffers that other ranks read and NCCL's, and what
    the allocator keeps for CUDA graphs.
    """
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device) + kept_by_graphs(device)


def kept_by_graphs(device: torch.device) -> int:
    """Return the bytes that torch's allocator keeps for CUDA graphs: nobody else gets them."""
    segments = (s for s in torch.cuda.memory_snapshot() if s["device"] == device.index)
    return sum(s["total_size"] - s["allocated_size"] for s in segments if s["segment_pool_id"] != (0, 0))

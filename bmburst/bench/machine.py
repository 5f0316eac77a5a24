"""What the numbers of a run depend on: versions, hardware, commit, command line, date."""

import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bmburst import __version__

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
)


def describe(command: Sequence[str], device: str, ranks: int) -> dict[str, Any]:
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
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}
    return facts | {"packages": {n: v for n in _PACKAGES if (v := _version(n)) is not None}, "environment": settings}


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

"""Faster twins of plain torch: Triton kernels (`triton_twin`), C compiled at first use, and optional packages.

No other module decides between a Triton kernel and its twin. Packages are imported at first use.

Liger-Kernel (0.6.4) is not used, for three reasons. Its SwiGLU overwrites saved inputs with gradients. Its rotary
embedding rotates its inputs in place, or copies heads that are a slice. Its norm rounds twice, as Hugging Face's LLaMA.
"""

import ctypes
import importlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bmburst_ops.errors import KernelError
from bmburst_ops.machine import HERE, Machine

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CAPABILITY = (8, 0)  # the first with bf16
_FLAGS = ("-march=native", "-fno-math-errno", "-shared", "-fPIC")


def triton_twin(module: str, *tensors: Tensor) -> Any | None:
    """Return the module `bmburst_ops.<module>` if its Triton kernels support these tensors; None: use plain torch.

    Args:
        module: Name of the module. It needs Triton, so it is imported only here.
        tensors: Inputs of the operation, at least one. Kernels support fp32 and 16-bit dtypes on one NVIDIA GPU.
    """
    device = tensors[0].device
    for each in tensors:  # not `all(...)`, which would make a generator in every call of every operation
        if not (each.is_cuda and each.device == device and each.dtype in _DTYPES):
            return None
    return triton_module(module) if _has_bf16(device) else None


@cache
def _has_bf16(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _CAPABILITY


@cache
def triton_module(name: str, machine: Machine = HERE) -> Any | None:
    """Return the module `bmburst_ops.<name>`, which needs Triton; None without Triton."""
    return importlib.import_module(f"bmburst_ops.{name}") if machine.has("triton") else None


def import_package(module: str, kernel: str, load: Callable[[str], ModuleType] = importlib.import_module) -> ModuleType:
    """Import a module of a package, which takes seconds the first time; KernelError if an installed one fails."""
    try:
        return load(module)
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: no driver or shared libraries
        reason = " ".join(str(error).split())
        raise KernelError(
            f"kernel '{kernel}' is installed but {module} cannot be imported\n{reason}\n"
            "fix: reinstall the package, or choose another kernel"
        ) from error


def find_compiler() -> str | None:
    """Return the path of the C compiler: CC from the environment, else cc or gcc; None if there is none."""
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")


def compiled(source: Path, flags: Sequence[str], temporary: Path | None = None) -> ctypes.CDLL | None:
    """Compile a C file and load it, in a fraction of a second. Results are not cached here; callers keep them.

    Args:
        source: The file.
        flags: Compiler flags, in addition to those that all libraries here have.
        temporary: Where temporary folders are made; None: where `tempfile` makes them.

    Returns:
        The library; None if there is no compiler, compiling fails, or no temporary folder is writable.
    """
    compiler = find_compiler()
    if compiler is None:
        return None
    try:
        # A private folder: other users cannot change the code. NFS keeps the file of a loaded library in it.
        with tempfile.TemporaryDirectory(prefix="bmburst-", dir=temporary, ignore_cleanup_errors=True) as folder:
            library = Path(folder) / f"{source.stem}.so"
            command = [compiler, *_FLAGS, *flags, str(source), "-o", str(library), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError):
        return None

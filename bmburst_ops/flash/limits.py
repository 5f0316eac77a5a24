"""Optional kernel packages, and what several kernels refuse: phrases as `Kernel.refusal` returns them, or None.

Packages are found without importing them, and imported when first used.
"""

import importlib
import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from types import MappingProxyType, ModuleType

import torch
from torch import Tensor

from bmburst_ops.errors import KernelError
from bmburst_ops.pattern import CAUSAL, Band, Cells, Need, Pattern, Segments


@cache
def version_of(distribution: str) -> tuple[int, ...] | None:
    """Return the numbers of an installed distribution's version, (2, 8, 3) of 2.8.3, or None if it is not installed.

    Asked by distribution and not by module: flash-attn and flash-attn-4 share the top-level module `flash_attn`, and
    flash-attn carries an older copy of what flash-attn-4 is.
    """
    try:
        return tuple(int(n) for n in re.findall(r"\d+", metadata.version(distribution))[:3])
    except metadata.PackageNotFoundError:
        return None


@cache
def is_there(module: str) -> bool:
    """Whether a top-level module can be found."""
    return importlib.util.find_spec(module) is not None


def import_package(module: str, kernel: str) -> ModuleType:
    """Import a package's module, which costs seconds the first time.

    Raises:
        KernelError: It is installed but cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # the last where a package asks for driver and libraries
        reason = " ".join(str(error).split())
        raise KernelError(
            f"kernel '{kernel}' is installed but {module} cannot be imported\n{reason}\n"
            "fix: reinstall the package, or choose another kernel"
        ) from error


PACKED: frozenset[Need] = frozenset({"window", "segments"})
"""What kernels with windows and variable lengths are able to do."""
CAPPED: frozenset[Need] = PACKED | {"softcap"}
"""And with a softcap."""
_NAMES: Mapping[Need, str] = MappingProxyType(
    {
        "window": "sliding windows",
        "segments": "packed segments",
        "blocks": "block-sparse masks",
        "cells": "block-sparse masks",
        "softcap": "logit softcapping",
    }
)


def unless_half_on_gpu(q: Tensor) -> str | None:
    """Refuse other devices than NVIDIA GPUs, and other dtypes than fp16 and bf16."""
    if q.device.type != "cuda":
        return f"runs on NVIDIA GPUs only, and the tensors are on {q.device}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16 only, got {q.dtype}"
    return None


def unless_head_dim(q: Tensor, widest: int, where: str = "") -> str | None:
    """Refuse head dims that are no multiple of 8, or wider; `where` says what the limit depends on."""
    if q.shape[-1] % 8 or q.shape[-1] > widest:
        return f"takes head dims that are multiples of 8 up to {widest}{where}, got {q.shape[-1]}"
    return None


def unless_ampere(q: Tensor) -> str | None:
    """Refuse GPUs before Ampere."""
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return f"needs Ampere or newer, got {torch.cuda.get_device_name(q.device)}"
    return None


def unless_able(needs: frozenset[Need], able: frozenset[Need] = frozenset()) -> str | None:
    """Refuse what the kernel is not able to do."""
    missing = [name for need, name in _NAMES.items() if need in needs - able]
    return f"cannot do {', '.join(missing)}" if missing else None


def without_cells(pattern: Pattern, kernel: str) -> Band | Segments:
    """Return the pattern of a kernel that does all but block-sparse masks.

    Raises:
        KernelError: It is one.
    """
    if isinstance(pattern, Cells):
        raise unable(kernel, unless_able(pattern.needs))
    return pattern


def band_of(pattern: Pattern, kernel: str) -> Band:
    """Return the pattern of a kernel that does rectangles alone.

    Raises:
        KernelError: It is of another kind.
    """
    if not isinstance(pattern, Band):
        raise unable(kernel, unless_able(pattern.needs))
    return pattern


def causal_or_full(pattern: Band | Segments, kernel: str) -> bool:
    """Return whether the pattern is causal, for a kernel that knows but that and full rectangles.

    Raises:
        KernelError: It is neither.
    """
    if (reason := unless_able(pattern.needs)) is not None:
        raise unable(kernel, reason)
    return pattern == CAUSAL


def require_no_softcap(softcap: float | None, kernel: str) -> None:
    """Refuse a softcap, for a kernel that has none.

    Raises:
        KernelError: There is one.
    """
    if softcap is not None:
        raise unable(kernel, unless_able(frozenset({"softcap"})))


def unless_repeating(deterministic: bool, kernel: str, reason: str) -> None:
    """Refuse a backward that must repeat its bits, of a kernel that cannot promise it.

    Raises:
        KernelError: It is one.
    """
    if deterministic:
        raise unable(kernel, reason)


def unable(kernel: str, reason: str | None) -> KernelError:
    """Return the error of a kernel that was called for what it refuses."""
    return KernelError(f"kernel '{kernel}' {reason}\nfix: choose another kernel")

"""Refusals that several kernels share: phrases for `Kernel.refusal`, or None."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from bmburst_ops.errors import KernelError
from bmburst_ops.pattern import CAUSAL, Band, Cells, Need, Pattern, Segments

PACKED: frozenset[Need] = frozenset({"window", "segments"})
"""The needs that kernels with windows and variable lengths support."""
CAPPED: frozenset[Need] = PACKED | {"softcap"}
"""The same, and softcap."""
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
    """Refuse devices other than NVIDIA GPUs, and dtypes other than fp16 and bf16."""
    if q.device.type != "cuda":
        return f"runs on NVIDIA GPUs only, and the tensors are on {q.device}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16 only, got {q.dtype}"
    return None


def unless_head_dim(q: Tensor, widest: int, where: str = "") -> str | None:
    """Refuse head dims above `widest` or not a multiple of 8; `where` says what the limit depends on."""
    if q.shape[-1] % 8 or q.shape[-1] > widest:
        return f"takes head dims that are multiples of 8 up to {widest}{where}, got {q.shape[-1]}"
    return None


def unless_ampere(q: Tensor) -> str | None:
    """Refuse GPUs before Ampere."""
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return f"needs Ampere or newer, got {torch.cuda.get_device_name(q.device)}"
    return None


def unless_able(needs: frozenset[Need], able: frozenset[Need] = frozenset()) -> str | None:
    """Refuse needs that are not in `able`."""
    missing = [name for need, name in _NAMES.items() if need in needs - able]
    return f"cannot do {', '.join(missing)}" if missing else None


def without_cells(pattern: Pattern, kernel: str) -> Band | Segments:
    """Return the pattern, for a kernel that supports all but block-sparse masks.

    Raises:
        KernelError: The pattern is a block-sparse mask.
    """
    if isinstance(pattern, Cells):
        raise unable(kernel, unless_able(pattern.needs))
    return pattern


def band_of(pattern: Pattern, kernel: str) -> Band:
    """Return the pattern, for a kernel that supports only rectangles.

    Raises:
        KernelError: The pattern is of another kind.
    """
    if not isinstance(pattern, Band):
        raise unable(kernel, unless_able(pattern.needs))
    return pattern


def causal_or_full(pattern: Band | Segments, kernel: str) -> bool:
    """Return whether the pattern is causal, for a kernel that supports only causal and full rectangles.

    Raises:
        KernelError: The pattern is neither.
    """
    if (reason := unless_able(pattern.needs)) is not None:
        raise unable(kernel, reason)
    return pattern == CAUSAL


def require_no_softcap(softcap: float | None, kernel: str) -> None:
    """Refuse a softcap, for a kernel that does not support it.

    Raises:
        KernelError: `softcap` is not None.
    """
    if softcap is not None:
        raise unable(kernel, unless_able(frozenset({"softcap"})))


def unless_repeating(deterministic: bool, kernel: str, reason: str) -> None:
    """Refuse a deterministic backward, for a kernel that does not support it.

    Raises:
        KernelError: `deterministic` is True.
    """
    if deterministic:
        raise unable(kernel, reason)


def unable(kernel: str, reason: str | None) -> KernelError:
    """Return the error of a kernel that was called with inputs that it refuses."""
    return KernelError(f"kernel '{kernel}' {reason}\nfix: choose another kernel")

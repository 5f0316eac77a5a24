"""Inputs of attention kernels: which ones kernels refuse, aligned tensors, and patterns in the form that kernels read.

- Refusals that several kernels share are phrases for `Kernel.refusal`, or None.
- Vector loads and TMA need aligned tensors.
- A pattern's index vectors are copied to a GPU once, without blocking the host, and can be used on any stream.
- Packages take a window, and the cu_seqlens of variable-length sequences.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.errors import KernelError
from bmburst_ops.flash.kernel import Gradients, Partial, Scoring, deliver_gradients, deliver_partial
from bmburst_ops.machine import Machine
from bmburst_ops.pattern import CAUSAL, Band, Cells, IntArray, Need, Pattern, Segments

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


LATENT_WIDTHS = frozenset({(192, 128), (96, 64)})
"""Head dims of keys and of values that packages take unequal: those of models with multi-head latent attention.
`tests/gpu/test_two_widths.py` checks them. cuDNN 9.11 and later is wrong in backward on Hopper with others of 128 and
more (`nvte_get_fused_attn_backend` of TransformerEngine)."""


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


def unless_ampere(q: Tensor, machine: Machine) -> str | None:
    """Refuse GPUs before Ampere."""
    if machine.capability(q.device) < (8, 0):
        return f"needs Ampere or newer, got {machine.gpu(q.device)}"
    return None


def unless_able(needs: frozenset[Need], able: frozenset[Need] = frozenset()) -> str | None:
    """Refuse needs that are not in `able`."""
    missing = [name for need, name in _NAMES.items() if need in needs - able]
    return f"cannot do {', '.join(missing)}" if missing else None


def without_cells(pattern: Pattern, kernel: str) -> Band | Segments:
    """Return the pattern, for a kernel without block-sparse masks; KernelError for one of these."""
    if isinstance(pattern, Cells):
        raise unable(kernel, unless_able(pattern.needs))
    return pattern


def band_of(pattern: Pattern, kernel: str) -> Band:
    """Return the pattern, for a kernel that supports only rectangles; KernelError for another kind."""
    if not isinstance(pattern, Band):
        raise unable(kernel, unless_able(pattern.needs))
    return pattern


def causal_or_full(pattern: Band | Segments, kernel: str) -> bool:
    """Return whether the pattern is causal, for a kernel with causal and full rectangles; KernelError for others."""
    if (reason := unless_able(pattern.needs)) is not None:
        raise unable(kernel, reason)
    return pattern == CAUSAL


def require_no_softcap(scoring: Scoring, kernel: str) -> tuple[Pattern, float]:
    """Return pattern and scale, for a kernel without a softcap; KernelError if there is one."""
    if scoring.softcap is not None:
        raise unable(kernel, unless_able(frozenset({"softcap"})))
    return scoring.pattern, scoring.scale


def unless_repeating(deterministic: bool, kernel: str, reason: str) -> None:
    """Raise KernelError for a deterministic backward, in a kernel that does not support it."""
    if deterministic:
        raise unable(kernel, reason)


def unable(kernel: str, reason: str | None) -> KernelError:
    """Return the error of a kernel that was called with inputs that it refuses."""
    return KernelError(f"kernel '{kernel}' {reason}\nfix: choose another kernel")


_VECTOR = 16  # bytes: a vector load, and the unit of TMA's addresses and strides
_ALIGNED = 4  # elements: every index vector starts at a multiple of 16 bytes


def is_aligned(tensor: Tensor, unit: int = _VECTOR) -> bool:
    """Return whether rows are dense, start at multiples of `unit` bytes, and no dimension is expanded."""
    *strides, last = tensor.stride()
    if last != 1 or tensor.data_ptr() % unit:
        return False
    step = unit // tensor.element_size()
    return all(s > 0 and s % step == 0 for s in strides)


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor if GPU kernels can read it, else an aligned copy."""
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def writable(target: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the target if a GPU kernel with results in the dtype of `like` can write to it directly, else None."""
    return target if target is not None and target.dtype is like.dtype and is_aligned(target) else None


def writable_statistic(target: Tensor | None) -> Tensor | None:
    """Return the target if a GPU kernel that stores fp32 statistics element by element can write to it, else None."""
    fits = target is not None and target.dtype is torch.float32 and is_aligned(target, target.element_size())
    return target if fits else None


def gradient_memory(q: Tensor, k: Tensor, v: Tensor, into: Gradients | None) -> Gradients:
    """Return tensors for a kernel's gradients: those of `into` that it can write to, else new ones."""
    targets = (None, None, None) if into is None else into
    written = (writable(target, like) for target, like in zip(targets, (q, k, v), strict=True))
    return Gradients(*(torch.empty_like(x) if t is None else t for t, x in zip(written, (q, k, v), strict=True)))


class DeviceVectors(NamedTuple):
    """Vectors on a device; on a GPU with the stream that copies or computes them, and an event after that."""

    vectors: tuple[Tensor, ...]
    stream: torch.cuda.Stream | None
    arrived: torch.cuda.Event | None

    def here(self) -> tuple[Tensor, ...]:
        """Return the vectors, ready for use on the current stream."""
        if self.stream is None or self.arrived is None:
            return self.vectors
        if (holder := _holder.get()) is not None:
            holder.append(self)
            return self.vectors
        current = torch.cuda.current_stream(self.vectors[0].device)
        if current != self.stream:
            current.wait_event(self.arrived)
            for vector in self.vectors:
                vector.record_stream(current)
        return self.vectors


@contextmanager
def collect_vectors() -> Iterator[list[DeviceVectors]]:
    """Return a context that collects all vectors used inside it in a list. Inside, none is waited for or may be copied.

    It is for CUDA graph capture: a graph reads vectors at their addresses, and cannot wait for outside events.
    """
    vectors = list[DeviceVectors]()
    token = _holder.set(vectors)
    try:
        yield vectors
    finally:
        _holder.reset(token)


_holder: ContextVar[list[DeviceVectors] | None] = ContextVar("bmburst_vectors", default=None)


def copy_to_device(
    arrays: Sequence[IntArray | NDArray[np.bool_]], device: torch.device, dtype: torch.dtype = torch.int32
) -> DeviceVectors:
    """Copy arrays to a device, each as a flat vector of the dtype, in one non-blocking transfer."""
    assert _holder.get() is None
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.size // _ALIGNED) * _ALIGNED)
    numbers = torch.zeros(starts[-1], dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    for array, start in zip(arrays, starts, strict=False):
        numbers[start : start + array.size] = torch.from_numpy(array.ravel())
    memory = numbers.to(device, non_blocking=True)
    vectors = tuple(memory[start : start + array.size] for array, start in zip(arrays, starts, strict=False))
    return vectors_of_stream(vectors)


def vectors_of_stream(vectors: tuple[Tensor, ...]) -> DeviceVectors:
    """Return vectors that the current stream computes (at least one, all on one device), with an event after them."""
    device = vectors[0].device
    if device.type != "cuda":
        return DeviceVectors(vectors, None, None)
    stream, arrived = torch.cuda.current_stream(device), torch.cuda.Event()
    arrived.record(stream)
    return DeviceVectors(vectors, stream, arrived)


class PackageArguments(NamedTuple):
    """A package's arguments for a pattern. Tensors are `[tokens, ...]` with offsets, else `[batch, tokens, ...]`."""

    band: Band
    queries: Tensor | None
    keys: Tensor | None
    """cu_seqlens: int32, from 0 to the number of tokens of all batches; one more than segments of all batches."""
    longest_queries: int
    longest_keys: int

    @property
    def causal(self) -> bool:
        """Whether the mask is passed with the causal flag."""
        return self.band == CAUSAL

    @property
    def window(self) -> tuple[int, int]:
        """How far a query sees to the left and to the right; -1 for no bound, and for the causal mask."""
        left, right = (-1 if self.causal or bound is None else bound for bound in self.band)
        return left, right

    @property
    def lengths(self) -> dict[str, Any]:
        """Offsets and lengths by their names in flash-attn 2 and 4; empty without segments."""
        if self.queries is None:
            return {}
        return {
            "cu_seqlens_q": self.queries,
            "cu_seqlens_k": self.keys,
            "max_seqlen_q": self.longest_queries,
            "max_seqlen_k": self.longest_keys,
        }

    def flat(self, tensor: Tensor) -> Tensor:
        """Return `[batch, tokens, ...]` in the package's shape; a copy only if samples are not adjacent in memory."""
        return tensor if self.queries is None else tensor.flatten(0, 1)

    def flat_statistic(self, tensor: Tensor) -> Tensor:
        """Return `[batch, heads, queries]` in the package's shape: `[heads, tokens]` with offsets."""
        return tensor if self.queries is None else tensor.transpose(0, 1).flatten(1)

    def flat_target(self, target: Tensor | None) -> Tensor | None:
        """Return output memory in the package's shape, or None if no such view exists."""
        if target is None or self.queries is None:
            return target
        batch, tokens, *_ = target.shape
        follows = batch == 1 or target.stride(0) == tokens * target.stride(1)
        return target.flatten(0, 1) if follows else None

    def flat_statistic_target(self, target: Tensor | None) -> Tensor | None:
        """Return memory for `[batch, heads, queries]` in the package's shape, or None if no such view exists."""
        if target is None or self.queries is None:
            return target
        return target[0] if target.shape[0] == 1 else None

    def flat_targets(self, into: Gradients | None) -> Gradients | None:
        """Return memory for gradients in the package's shape, or None if any of them has no such view."""
        flat = [self.flat_target(target) for target in into or ()]
        found = [target for target in flat if target is not None]
        return Gradients(*found) if len(found) == len(Gradients._fields) else None

    def partial(self, out: Tensor, lse: Tensor, q: Tensor, into: Partial | None) -> Partial:
        """Return the package's results as `Kernel.forward` does, with the shape of q."""
        if self.queries is None:
            return deliver_partial(Partial(out, lse), into)
        sizes = q.shape[:2]
        found = Partial(out.unflatten(0, sizes), lse.unflatten(1, sizes).transpose(0, 1))
        return found._replace(lse=found.lse.contiguous()) if into is None else deliver_partial(found, into)

    def gradients(self, found: Gradients, batch: int, into: Gradients | None) -> Gradients:
        """Return the package's gradients as `Kernel.backward` does."""
        if self.queries is None:
            return deliver_gradients(found, into)
        return deliver_gradients(Gradients(*(t.unflatten(0, (batch, -1)) for t in found)), into)


def package_arguments(pattern: Band | Segments, q: Tensor, k: Tensor) -> PackageArguments:
    """Return the arguments of a package for a pattern of these queries and keys. Neither may be empty."""
    if isinstance(pattern, Band):
        return PackageArguments(pattern, None, None, q.shape[1], k.shape[1])
    offsets = _offsets(pattern, q.shape[0], q.device)
    queries, keys = offsets.sent.here()
    return PackageArguments(pattern.band.within(*offsets.longest), queries, keys, *offsets.longest)


def fa2_arguments(pattern: Band | Segments, q: Tensor, k: Tensor) -> PackageArguments:
    """Return the arguments of FlashAttention-2, as a package or inside torch.

    The kernel ignores a right window of at least `max_seqlen_k`. A left window without a right one has a right window
    of `max_seqlen_k` in it. Both are wrong with more queries than keys. So the right window is given, and
    `max_seqlen_k` is set above it. With `max_seqlen_q` = 1 the kernel assumes one query in every segment. So
    `max_seqlen_q` is at least 2.
    """
    if isinstance(pattern, Band) and k.shape[1] <= (_right(pattern, q.shape[1]) or 0):
        pattern = Segments(pattern, (0, q.shape[1]), (0, k.shape[1]))
    call = package_arguments(pattern, q, k)
    if call.queries is None:
        return call
    right = _right(call.band, call.longest_queries)
    return call._replace(
        band=Band(call.band.left, right),
        longest_queries=max(call.longest_queries, 2),
        longest_keys=max(call.longest_keys, (right or 0) + 1),
    )


def _right(band: Band, queries: int) -> int | None:
    """Return how far to the right FlashAttention-2 has to be told to look; None: no bound on either side."""
    return queries - 1 if band.right is None and band.left is not None else band.right


class _Offsets(NamedTuple):
    sent: DeviceVectors
    longest: tuple[int, int]
    """The largest number of queries and of keys in a segment."""


@bounded_cache(maxsize=256)
def _offsets(pattern: Segments, batch: int, device: torch.device) -> _Offsets:
    sides = (np.array(pattern.queries), np.array(pattern.keys))
    queries, keys = (int(np.diff(side).max()) for side in sides)
    return _Offsets(copy_to_device([_repeated(side, batch) for side in sides], device), (queries, keys))


def _repeated(offsets: IntArray, batch: int) -> IntArray:
    """Return the offsets of `batch` samples, one after another."""
    later = offsets[1:] + np.arange(batch)[:, None] * offsets[-1]
    return np.concatenate((offsets[:1], later.ravel()))

"""Patterns as arguments of flash attention packages: a window, and the cu_seqlens of variable-length sequences."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.flash.kernel import Gradients, Partial
from bmburst_ops.flash.memory import DeviceVectors, copy_to_device, deliver_gradients, deliver_partial
from bmburst_ops.pattern import CAUSAL, Band, IntArray, Segments


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

    The kernel ignores a right window of at least `max_seqlen_k`, which is wrong with more queries than keys. So
    `max_seqlen_k` is set above the window. With `max_seqlen_q` = 1 the kernel assumes one query in every segment. So
    `max_seqlen_q` is at least 2.
    """
    if isinstance(pattern, Band) and k.shape[1] <= (pattern.right or 0):
        pattern = Segments(pattern, (0, q.shape[1]), (0, k.shape[1]))
    call = package_arguments(pattern, q, k)
    if call.queries is None:
        return call
    longest_keys = max(call.longest_keys, (call.band.right or 0) + 1)
    return call._replace(longest_queries=max(call.longest_queries, 2), longest_keys=longest_keys)


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

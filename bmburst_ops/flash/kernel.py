"""The interface of all attention kernels, `Kernel`, and its definition in plain torch, `ReferenceKernel`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bmburst_ops.machine import HERE, Machine
from bmburst_ops.merge import accumulation_dtype
from bmburst_ops.pattern import FULL, Cells, Need, Pattern, cell_of, visible_ranges

_ROWS = 512  # queries per slab: memory stays linear in the keys


class Partial(NamedTuple):
    """Attention of one tile: `out` `[batch, queries, heads, value_dim]`, `lse` `[batch, heads, queries]` in nats."""

    out: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """Gradients of one tile, shaped as q, k and v."""

    q: Tensor
    k: Tensor
    v: Tensor


class BackwardInputs(NamedTuple):
    """Inputs of backward for one tile, or for several.

    Attributes:
        grad_out: dO of the whole attention, shaped as the output.
        q: Queries.
        k: Keys.
        v: Values, shaped as k but for their own head dim.
        lse: Global log-sum-exp `[batch, heads, queries]`, over all keys, not only the tile's.
        delta: Global rowsum(dO * O), shaped as lse.
    """

    grad_out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    delta: Tensor


class Scoring(NamedTuple):
    """How the scores of a tile come from products of queries and keys.

    Attributes:
        pattern: Which keys each query sees.
        scale: Factor on the products.
        softcap: Above 0: scaled products become `softcap * tanh(product / softcap)`. None: no softcap. Some kernels do
            not support it: see `Kernel.refusal` with the need "softcap".
    """

    pattern: Pattern
    scale: float
    softcap: float | None = None


class Kernel(ABC):
    """Attention of one tile with its log-sum-exp, forward and backward.

    Shapes: q `[batch, queries, heads, head_dim]`; k `[batch, keys, kv_heads, head_dim]` and v `[batch, keys, kv_heads,
    value_dim]`, with heads a multiple of kv_heads (query head h reads KV head `h // (heads / kv_heads)`); any strides.
    value_dim is head_dim, except where `takes_widths`. A pattern defines which keys each query sees; it is the same for
    all heads and batches. A query that sees no key has an output of zero, a log-sum-exp of `-inf` and a gradient of
    zero. A key that no query sees has a gradient of zero.

    Args:
        machine: Where it runs.
    """

    name: str
    recordable = False
    """Whether calls can be captured in a CUDA graph, and have enough host overhead for that to pay off."""
    takes_delta = False
    """Whether backward uses delta as given. If not, it goes through `surrogate_out`, which cannot express a non-zero
    delta in a row whose dO is zero."""

    def __init__(self, machine: Machine = HERE) -> None:
        self._machine = machine

    @abstractmethod
    def refusal(self, q: Tensor, k: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """Return why the kernel does not support these inputs or `needs` on this machine, as a phrase; None if it does.

        It runs at every call of attention and must be cheap: it may look for a package, but not import it.
        """

    def takes_widths(self, q: Tensor, k: Tensor, value_dim: int, needs: frozenset[Need] = frozenset()) -> bool:
        """Return whether it takes values of this head dim beside such queries and keys, on q's device.

        If not, it gets padded tensors: `PaddedKernel`.
        """
        del q, k, value_dim, needs
        return False

    def nondeterminism(self, q: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """Return why backward cannot be deterministic on q's device, as a phrase; None if it is on request.

        Backward raises `KernelError` if `deterministic` is requested where it is not supported.
        """
        del q, needs
        return None

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, into: Partial | None = None) -> Partial:
        """Return the tile's output, in q's dtype or wider, and its log-sum-exp, in fp32 or wider.

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            scoring: Which keys each query sees, and how it scores them.
            into: Where to write the results: the output `[batch, queries, heads, value_dim]`, and the log-sum-exp
                `[batch, heads, queries]`, with any strides and a dense last dimension. A kernel that cannot write there
                copies its results. Default: new memory.
        """

    @abstractmethod
    def backward(
        self, given: BackwardInputs, scoring: Scoring, *, deterministic: bool, into: Gradients | None = None
    ) -> Gradients:
        """Return the tile's gradients.

        Args:
            given: The tile's inputs, and the statistics of the whole attention for its queries.
            scoring: As in forward.
            deterministic: Whether repeated calls must give bitwise equal gradients.
            into: Where to write the gradients, shaped as q, k and v, with strides as in forward. Default: new memory.
        """


def deliver(result: Tensor, target: Tensor | None) -> Tensor:
    """Return the result in `target`, copied unless it is already there; without a target return it as it is."""
    if target is None:
        return result
    return target if _is_same(result, target) else target.copy_(result)


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    if a is b:
        return True
    if a.dtype is not b.dtype or a.shape != b.shape or not a.data_ptr() == b.data_ptr() != 0:
        return False
    # The stride of a dimension of size 1 is arbitrary: it may change when a tensor is flattened and unflattened.
    return all(mine == theirs or size == 1 for size, mine, theirs in zip(a.shape, a.stride(), b.stride(), strict=True))


def empty_partial(q: Tensor, v: Tensor) -> Partial:
    """Allocate the results for queries and values: the output contiguous in q's dtype, lse in fp32 or wider."""
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    return Partial(out, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype)))


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Allocate the gradients of queries, keys and values, contiguous."""
    return Gradients(*(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)))


def deliver_partial(result: Partial, into: Partial | None) -> Partial:
    """Return output and log-sum-exp in `into`; see `deliver`."""
    return result if into is None else Partial(*map(deliver, result, into))


def deliver_gradients(results: Gradients, into: Gradients | None) -> Gradients:
    """Return the gradients in `into`; see `deliver`."""
    return results if into is None else Gradients(*map(deliver, results, into))


class BooleanMask:
    """The boolean mask of a pattern, a slab of queries at a time, so that memory stays linear in the keys."""

    def __init__(self, pattern: Pattern, queries: int, keys: int) -> None:
        self.keys = keys
        self.is_full = pattern == FULL
        self.rows = visible_ranges(pattern, queries, keys)
        self.cells = pattern if isinstance(pattern, Cells) else None

    def block(self, queries: slice) -> tuple[slice, Tensor | None]:
        """Return the keys that any of these queries may see, and their mask `[queries, keys]`; None if all are seen."""
        if self.is_full or queries.start == queries.stop:
            return slice(0, self.keys), None
        start, stop = self.rows.start[queries], self.rows.stop[queries]
        seen = slice(int(start[0]), int(stop[-1]))
        columns = np.arange(seen.start, seen.stop)
        mask = (columns >= start[:, None]) & (columns < stop[:, None])
        if self.cells is not None:
            query_cells = cell_of(self.cells.query_edges, queries.start, queries.stop)
            key_cells = cell_of(self.cells.key_edges, seen.start, seen.stop)
            mask &= self.cells.cells[query_cells[:, None], key_cells]
        return seen, torch.from_numpy(mask)


class ReferenceKernel(Kernel):
    """`Kernel` in plain torch, computed in fp32 or wider."""

    name = "reference"
    takes_delta = True

    def refusal(self, q: Tensor, k: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """See `Kernel.refusal`: it supports all inputs."""
        del q, k, needs
        return None

    def takes_widths(self, q: Tensor, k: Tensor, value_dim: int, needs: frozenset[Need] = frozenset()) -> bool:
        """See `Kernel.takes_widths`."""
        del q, k, value_dim, needs
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, into: Partial | None = None) -> Partial:
        """See `Kernel.forward`."""
        dtype = accumulation_dtype(q.dtype)
        values = v.to(dtype)
        outs, lses = [], []
        for slab in _slabs(q, k, scoring):
            lse = slab.scores.logsumexp(-1)
            weights = torch.exp(slab.scores - finite(lse)[..., None])
            outs.append(torch.einsum("bkgqn,bnkd->bqkgd", weights, values[:, slab.keys]).flatten(2, 3))
            lses.append(lse.flatten(1, 2))
        return deliver_partial(Partial(torch.cat(outs, 1), torch.cat(lses, 2)), into)

    def backward(
        self, given: BackwardInputs, scoring: Scoring, *, deterministic: bool, into: Gradients | None = None
    ) -> Gradients:
        """See `Kernel.backward`. P = exp(S - lse), dS = P * (dO V^T - delta) * scale (arXiv:2307.08691, alg. 2).

        With a softcap c, S = c * tanh(T / c), and dT = dS * (1 - (S / c)^2).
        """
        del deterministic  # always deterministic
        grad_out, q, k, v, lse, delta = given
        dtype, kv_heads, softcap = accumulation_dtype(q.dtype), k.shape[2], scoring.softcap
        keys, values = k.to(dtype), v.to(dtype)
        grad_q = []
        grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(values)
        for rows, seen, scores in _slabs(q, k, scoring):
            queries, grads = (t[:, rows].to(dtype).unflatten(2, (kv_heads, -1)) for t in (q, grad_out))
            statistics = (t[:, :, rows].to(dtype).unflatten(1, (kv_heads, -1))[..., None] for t in (lse, delta))
            row_lse, row_delta = statistics
            weights = torch.exp(scores - finite(row_lse)).masked_fill(row_lse == -torch.inf, 0.0)
            grad_v[:, seen] += torch.einsum("bkgqn,bqkgd->bnkd", weights, grads)
            inner = torch.einsum("bqkgd,bnkd->bkgqn", grads, values[:, seen])
            grad_scores = weights * (inner - row_delta) * scoring.scale
            if softcap is not None:
                grad_scores *= 1 - scores.clamp(min=-softcap).div(softcap).square()  # clamp: hidden scores are -inf
            grad_q.append(torch.einsum("bkgqn,bnkd->bqkgd", grad_scores, keys[:, seen]).flatten(2, 3))
            grad_k[:, seen] += torch.einsum("bkgqn,bqkgd->bnkd", grad_scores, queries)
        return deliver_gradients(Gradients(torch.cat(grad_q, 1), grad_k, grad_v), into)


class _Slab(NamedTuple):
    """Consecutive queries, the keys that any of them sees, and scores `[batch, kv_heads, group, queries, keys]`."""

    queries: slice
    keys: slice
    scores: Tensor


def _slabs(q: Tensor, k: Tensor, scoring: Scoring) -> Iterator[_Slab]:
    """Yield slabs of queries, in order. There is at least one, even without queries; with queries none is empty."""
    pattern, scale, softcap = scoring
    dtype, (count, keys), kv_heads = accumulation_dtype(q.dtype), (q.shape[1], k.shape[1]), k.shape[2]
    wide, visible = k.to(dtype), BooleanMask(pattern, count, keys)
    for rows in _runs(visible, count):
        seen, mask = visible.block(rows)
        queries = q[:, rows].to(dtype).unflatten(2, (kv_heads, -1))
        scores = torch.einsum("bqkgd,bnkd->bkgqn", queries, wide[:, seen]) * scale
        if softcap is not None:
            scores = scores.div(softcap).tanh() * softcap
        if mask is not None:
            scores = scores.masked_fill(~mask.to(q.device), -torch.inf)
        yield _Slab(rows, seen, scores)


def _runs(visible: BooleanMask, count: int) -> Iterator[slice]:
    """Yield slices of `count` queries; no slice has queries of several documents.

    Zero times NaN is NaN, so keys of other documents must not be multiplied at all, even with weight zero.
    """
    start, stop = visible.rows
    edges = np.flatnonzero(start[1:] >= stop[:-1]) + 1  # queries that share no key with the query before
    for document, end in pairwise([0, *edges.tolist(), count]):
        for first in range(document, max(end, 1), _ROWS):
            yield slice(first, min(first + _ROWS, end))


def finite(lse: Tensor) -> Tensor:
    """Return lse with 0 for queries that see no key: their scores are all -inf, and -inf - -inf is NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)

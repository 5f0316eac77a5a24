"""Bottom-right causal rectangles on kernels whose causal mask is top-left: the two differ unless the tile is square."""

from typing import Protocol

import torch
from torch import Tensor

from bmburst_ops.flash.kernel import Gradients, Partial
from bmburst_ops.flash.memory import deliver, deliver_gradients, deliver_partial
from bmburst_ops.merge import accumulation_dtype, merge_partials_


class ForwardPart(Protocol):
    """Attention of a tile that is full or square."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
        """Return the part's output and log-sum-exp."""
        ...


class BackwardPart(Protocol):
    """Gradients of a tile that is full or square; queries, dO and their statistics are bound already."""

    def __call__(self, k: Tensor, v: Tensor, causal: bool) -> Gradients:
        """Return the part's gradients."""
        ...


def forward(part: ForwardPart, q: Tensor, k: Tensor, v: Tensor, causal: bool, into: Partial | None) -> Partial:
    """Return attention of a tile, through one part or two that are merged in fp32 or wider; `into` as `Kernel.forward`.

    The output is in the part's dtype, or after a merge in fp32 or wider.
    """
    hidden = k.shape[1] - q.shape[1]
    if not _must_cut(causal, q, k):
        return deliver_partial(part(q, k, v, causal and hidden == 0), into)
    seen, square = (part(q, k[:, keys], v[:, keys], is_causal) for keys, is_causal in _cut(hidden))
    dtype = accumulation_dtype(q.dtype)
    # Merged where it is asked for if that is wide enough: rounded in between it would lose what the merge keeps.
    merged = torch.empty_like(seen.out, dtype=dtype) if into is None or into.out.dtype != dtype else into.out
    merged.copy_(seen.out)
    merge_partials_(merged, seen.lse, square.out, square.lse)
    return deliver_partial(Partial(merged, seen.lse), into)


def backward(part: BackwardPart, q: Tensor, k: Tensor, v: Tensor, causal: bool, into: Gradients | None) -> Gradients:
    """Return the gradients of a tile, through the same parts as `forward`; `into` as `Kernel.backward`."""
    hidden = k.shape[1] - q.shape[1]
    if not _must_cut(causal, q, k):
        return deliver_gradients(part(k, v, causal and hidden == 0), into)
    seen, square = (part(k[:, keys], v[:, keys], is_causal) for keys, is_causal in _cut(hidden))
    grad_q = torch.add(seen.q.to(accumulation_dtype(q.dtype)), square.q)
    if into is None:
        return Gradients(grad_q, torch.cat((seen.k, square.k), 1), torch.cat((seen.v, square.v), 1))
    for target, first, second in ((into.k, seen.k, square.k), (into.v, seen.v, square.v)):
        target[:, :hidden].copy_(first)
        target[:, hidden:].copy_(second)
    return Gradients(deliver(grad_q, into.q), into.k, into.v)


def _must_cut(causal: bool, q: Tensor, k: Tensor) -> bool:
    """A square is the same either way, and a single query sees every key."""
    return causal and q.shape[1] not in (1, k.shape[1])


def _cut(hidden: int) -> tuple[tuple[slice, bool], tuple[slice, bool]]:
    """A bottom-right causal rectangle is a full one over the first `hidden` keys and a causal square over the rest."""
    return (slice(0, hidden), False), (slice(hidden, None), True)

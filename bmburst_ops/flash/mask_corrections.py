"""Masks that kernels of torch and of packages get wrong, set right around their calls.

They were not made for queries that see nothing and keys that nobody sees; some not for causal rectangles aligned at the
bottom right, nor for NaN in the document behind.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.flash.kernel import BackwardInputs, Gradients, Partial
from bmburst_ops.flash.limits import is_there
from bmburst_ops.flash.memory import DeviceVectors, copy_to_device, deliver, deliver_gradients, deliver_partial
from bmburst_ops.flash.triton import cap_of, near_rows, strides_of
from bmburst_ops.flash.triton_launch import BlockSizes, Kernels, launch_grid
from bmburst_ops.flash.varlen import package_arguments
from bmburst_ops.merge import accumulation_dtype, merge_partials_
from bmburst_ops.pattern import Band, Pattern, Rectangle, Segments, rectangles, transposed, visible_ranges

_SHARE = 4096  # tokens of a document that one program computes again
_WIDE_TILES = 96  # head dims up to this have tiles of more than 128 keys
_UNBOUNDED = 2**30

PackedPattern = Band | Segments
SeenForward = Callable[[Tensor, Tensor, Tensor, PackedPattern, Partial | None], Partial]
"""A kernel's forward of `(q, k, v, pattern, into)`."""
SeenBackward = Callable[[BackwardInputs, PackedPattern, Gradients | None], Gradients]
"""A kernel's backward of `(given, pattern, into)`."""


def forward_seen(
    part: SeenForward, q: Tensor, k: Tensor, v: Tensor, pattern: PackedPattern, into: Partial | None
) -> Partial:
    """Return the part's result: of a band it gets the queries that see something, of segments all, set right after.

    Queries that see nothing and keys that nobody sees are kept from it. A kernel may leave its memory as it was there,
    call the log-sum-exp `inf`, or make NaN of `-inf - -inf`.
    """
    seen = _seen(pattern, q.shape[1], k.shape[1])
    if seen is None:
        return _nothing(q, into)
    if isinstance(pattern, Segments):
        partial = part(q, k, v, pattern, into)
        if (queries := _places(pattern, q, k)[0]) is not None:
            partial.out.index_fill_(1, queries, 0.0)
            partial.lse.index_fill_(2, queries, -torch.inf)
        return partial
    first, first_key = seen.queries.start, seen.keys.start
    if not first and not first_key:
        return part(q, k, v, seen.band, into)
    near = q[:, first:], k[:, first_key:], v[:, first_key:]
    if into is None:
        out, lse = part(*near, seen.band, None)
        return Partial(_after_zeros(out, first), pad(lse, (first, 0), value=-torch.inf))
    part(*near, seen.band, Partial(into.out[:, first:], into.lse[..., first:]))
    into.out[:, :first] = 0
    into.lse[..., :first] = -torch.inf
    return into


def backward_seen(
    part: SeenBackward, given: BackwardInputs, pattern: PackedPattern, into: Gradients | None
) -> Gradients:
    """Return the part's gradients, as `forward_seen`."""
    grad_out, q, k, v, lse, delta = given
    seen = _seen(pattern, q.shape[1], k.shape[1])
    if seen is None:
        return deliver_gradients(Gradients(*(torch.zeros_like(t) for t in (q, k, v))), into)
    if isinstance(pattern, Segments):
        queries, keys = _places(pattern, q, k)
        if queries is not None:
            given = given._replace(lse=lse.index_fill(2, queries, 0.0), delta=delta.index_fill(2, queries, 0.0))
        gradients = part(given, pattern, into)
        for gradient, places in zip(gradients, (queries, keys, keys), strict=True):
            if places is not None:
                gradient.index_fill_(1, places, 0.0)
        return gradients
    first, first_key = seen.queries.start, seen.keys.start
    if not first and not first_key:
        return part(given, seen.band, into)
    near = BackwardInputs(
        grad_out[:, first:], q[:, first:], k[:, first_key:], v[:, first_key:], lse[..., first:], delta[..., first:]
    )
    starts = (first, first_key, first_key)
    if into is None:
        return Gradients(*map(_after_zeros, part(near, seen.band, None), starts))
    part(near, seen.band, Gradients(*(t[:, start:] for t, start in zip(into, starts, strict=True))))
    for target, start in zip(into, starts, strict=True):
        target[:, :start] = 0
    return into


class _MaskedTokens(NamedTuple):
    """Places on a device; None where there is none."""

    queries: DeviceVectors | None
    keys: DeviceVectors | None


def _seen(pattern: PackedPattern, queries: int, keys: int) -> Rectangle | None:
    """Return where a band sees something; of segments, the first such; None if nobody sees anything."""
    return next(rectangles(pattern, queries, keys), None)


def _places(pattern: Segments, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return which queries see nothing, and which keys nobody sees."""
    found = _sent(pattern, q.shape[1], k.shape[1], q.device)
    queries, keys = (None if sent is None else sent.here()[0] for sent in found)
    return queries, keys


@bounded_cache(maxsize=256)
def _sent(pattern: Segments, queries: int, keys: int, device: torch.device) -> _MaskedTokens:
    rows = visible_ranges(pattern, queries, keys)
    columns = transposed(rows, keys)
    empty = (np.flatnonzero(side.start == side.stop) for side in (rows, columns))
    return _MaskedTokens(*(copy_to_device((places,), device, torch.int64) if places.size else None for places in empty))


def _nothing(q: Tensor, into: Partial | None) -> Partial:
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32, device=q.device)
    return deliver_partial(Partial(torch.zeros_like(q), lse), into)


def _after_zeros(tensor: Tensor, count: int) -> Tensor:
    """Return a result `[batch, tokens, ...]` with zeros for `count` tokens before it."""
    if not count:
        return tensor
    return torch.cat((tensor.new_zeros(tensor.shape[0], count, *tensor.shape[2:]), tensor), 1)


class CausalForward(Protocol):
    """Attention of a tile that is full or square."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
        """Return the part's output and log-sum-exp."""
        ...


class CausalBackward(Protocol):
    """Gradients of a tile that is full or square; queries, dO and their statistics are bound already."""

    def __call__(self, k: Tensor, v: Tensor, causal: bool) -> Gradients:
        """Return the part's gradients."""
        ...


def forward_bottom_right(
    part: CausalForward, q: Tensor, k: Tensor, v: Tensor, causal: bool, into: Partial | None
) -> Partial:
    """Return attention of a tile, through one part or two that are merged in fp32 or wider; `into` as `Kernel.forward`.

    For kernels whose causal mask is top-left: it differs from ours unless the tile is square. The output is in the
    part's dtype, or after a merge in fp32 or wider.
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


def backward_bottom_right(
    part: CausalBackward, q: Tensor, k: Tensor, v: Tensor, causal: bool, into: Gradients | None
) -> Gradients:
    """Return the gradients of a tile, through the same parts as `forward_bottom_right`; `into` as `Kernel.backward`."""
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


def isolate_forward(
    found: Partial, q: Tensor, k: Tensor, v: Tensor, *, pattern: Pattern, scale: float, softcap: float | None = None
) -> Partial:
    """Return a kernel's result, with documents computed again where V of the next tokens is not finite.

    For kernels whose tiles of packed documents reach into the next document. Without Triton, which torch for NVIDIA
    GPUs brings along, results stay as they are. Callers leave out tensors on CPUs: there the packages are stand-ins of
    tests.

    Args:
        found: The result; its output is written to. The log-sum-exp is right already.
        q: As given to `Kernel.forward`, as all that follows.
        k: Keys.
        v: Values.
        pattern: A band has one document, and is left as it is.
        scale: Factor on the scores, above 0.
        softcap: Of the scores, or None.
    """
    if isinstance(pattern, Segments) and is_there("triton"):
        tensors = [near_rows(t) for t in (q, k, v)]
        _run(_kernels().forward, [*tensors, found.out], q, k, pattern, scale, softcap, over_keys=True)
    return found


def isolate_backward(
    found: Gradients, given: BackwardInputs, *, pattern: Pattern, scale: float, softcap: float | None = None
) -> Gradients:
    """Return a kernel's gradients, with documents computed again where what follows them is not finite.

    Args:
        found: The gradients, which are written to.
        given: As given to `Kernel.backward`.
        pattern: See `isolate_forward`.
        scale: Factor on the scores, above 0.
        softcap: Of the scores, or None.
    """
    if isinstance(pattern, Segments) and is_there("triton"):
        tensors = [*map(near_rows, given[:4]), *(t.transpose(1, 2) for t in given[4:])]
        _run(_kernels().keys, [*tensors, *found[1:]], given.q, given.k, pattern, scale, softcap, over_keys=False)
        _run(_kernels().queries, [*tensors, found.q], given.q, given.k, pattern, scale, softcap, over_keys=True)
    return found


def _run(
    kernel: object,
    tensors: list[Tensor],
    q: Tensor,
    k: Tensor,
    pattern: Segments,
    scale: float,
    softcap: float | None,
    *,
    over_keys: bool,
) -> None:
    """Run a kernel whose programs hold queries and go over keys, or the other way round."""
    call, documents, head_dim = package_arguments(pattern, q, k), len(pattern.queries) - 1, q.shape[3]
    longest, tokens = (call.longest_queries, k.shape[1]) if over_keys else (call.longest_keys, q.shape[1])
    parts = -(-longest // _SHARE)
    left, right = (_UNBOUNDED if bound is None else bound for bound in pattern.band)
    numbers = (parts, tokens, q.shape[2] // k.shape[2], scale, cap_of(softcap, scale), left, right)
    size = 64 if head_dim <= 128 else 32
    behind = 256 if head_dim <= _WIDE_TILES else 128
    arguments = (*tensors, *map(strides_of, tensors), call.queries, call.keys, *numbers)
    launch_grid(kernel, k, documents * parts, arguments, BlockSizes(size, size, 4, 1), BEHIND=behind)


@cache
def _kernels() -> Kernels:
    from bmburst_ops.flash.triton_isolate import forward_kernel, keys_kernel, queries_kernel

    return Kernels(forward_kernel, keys_kernel, queries_kernel)

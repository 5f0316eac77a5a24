"""Attention by one collective each way: the head exchange of short sequences, where the host or latency bounds.

Ranks exchange heads as in `bmburst.attention.heads`, but all of them in one all-to-all on the current stream: tensors
are packed by token, exchanged, and brought into the order of the sequence; results go back the same way. There are no
units of heads, streams or signals, and as few operations as possible, because each takes time of the host. The cost
model chooses this way by its predicted time (`bmburst.schedule.cost`).

On a GPU, kernels read from one buffer and write to another that stay in place for the next call, and run as CUDA graphs
(`bmburst.comm.streams`).

Memory beside the results, on each rank: inputs and results of the exchange, each before and after it.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from bmburst.attention.call import AttentionCall, head_shapes_of
from bmburst.attention.local import local_backward, local_forward
from bmburst.comm.communicator import OnCurrentStream
from bmburst.comm.streams import BUFFERS, RECORDINGS, current_stream, is_capturing
from bmburst.comm.waits import working
from bmburst.schedule.heads_plan import token_order, workspace_nbytes
from bmburst.schedule.layout import Layout
from bmburst.schedule.tiles import Span
from bmburst.schedule.units import HeadShapes, records_kernels
from bmburst_ops.flash import BackwardInputs, Gradients, Partial
from bmburst_ops.flash.inputs import DeviceVectors, copy_to_device
from bmburst_ops.merge import accumulation_dtype

Attend = Callable[[AttentionCall, Span, Tensor, Tensor, Tensor, Partial], object]
"""Attends with some KV heads of a rank: `(call, kv_heads, q, k, v, into)`, where q, k and v hold only these heads."""


def at_once_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, attend: Attend | None = None) -> Partial:
    """Return attention of this rank's queries over the whole sequence; see `bmburst.attention.heads.heads_forward`."""
    shapes = head_shapes_of(call, q.shape, k.shape, v.shape, q.dtype)
    is_recorded = attend is None and is_recordable(call, shapes, q)
    rows = to_heads(call, shapes, [by_rank(t, shapes.degree) for t in (q, k, v)], is_recorded=is_recorded)
    return attend_own(call, shapes, q, rows, attend, is_recorded=is_recorded)


def at_once_backward(call: AttentionCall, given: BackwardInputs) -> Gradients:
    """Return the gradients of this rank's q, k and v; see `ring_backward`."""
    grad_out, q, k, v, lse, delta = given
    shapes = head_shapes_of(call, q.shape, k.shape, v.shape, q.dtype)
    is_recorded = is_recordable(call, shapes, q)
    parts = [by_rank(t, shapes.degree) for t in (statistics(q.dtype, lse, delta), q, grad_out, k, v)]
    rows = to_heads(call, shapes, parts, is_recorded=is_recorded)
    results = differentiate_own(call, shapes, q, rows, is_recorded=is_recorded)
    home = to_tokens(call, shapes, [t.flatten(2) for t in results])
    return Gradients(*(joined(part, *t.shape[2:]) for part, t in zip(home, (q, k, v), strict=True)))


def attend_own(
    call: AttentionCall, shapes: HeadShapes, q: Tensor, rows: Tensor, attend: Attend | None = None, *, is_recorded: bool
) -> Partial:
    """Attend with this rank's heads, and return the results of all heads for this rank's tokens.

    Args:
        call: The attention.
        shapes: Its sizes.
        q: This rank's queries of all heads; only shape and dtype are read.
        rows: Queries, keys and values of this rank's heads for all tokens, as `to_heads` returns them.
        attend: As in `spread_forward`; default: the kernel.
        is_recorded: Whether the kernels run as CUDA graphs.
    """
    own, own_kv = shapes.own_heads, shapes.own_kv_heads
    dim, value_dim = shapes.head_dim, shapes.value_width
    size = shapes.batch, shapes.tokens, own
    out, lse = _results(is_recorded, q, (*size, value_dim), (shapes.batch, own, shapes.tokens))

    def work() -> None:
        queries, keys, values = _heads(by_token(rows, shapes, q), (own, own_kv, own_kv), (dim, dim, value_dim))
        if attend is None:
            local_forward(call.outer, queries, keys, values, Partial(out, lse))
        else:
            attend(call.outer, Span(0, own_kv), queries, keys, values, Partial(out, lse))

    _run(call, work, is_recorded, rows, out)
    own_lse, own_out = to_tokens(call, shapes, [statistics(q.dtype, lse).flatten(2), out.flatten(2)])
    own_lse = own_lse.view(lse.dtype).permute(1, 0, 3, 2).reshape(shapes.batch, -1, q.shape[1])
    return Partial(joined(own_out, q.shape[2], value_dim), own_lse)


def differentiate_own(
    call: AttentionCall, shapes: HeadShapes, q: Tensor, rows: Tensor, *, is_recorded: bool
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values of this rank's heads for all tokens.

    Args:
        call: The attention.
        shapes: Its sizes.
        q: See `attend_own`.
        rows: `statistics` of log-sum-exp and delta, queries, dO, keys and values, as `to_heads` returns them.
        is_recorded: See `attend_own`.

    Returns:
        Three tensors `[batch, tokens, heads, dim]`.
    """
    own, own_kv = shapes.own_heads, shapes.own_kv_heads
    dim, value_dim = shapes.head_dim, shapes.value_width
    wide = accumulation_dtype(q.dtype)
    words = 2 * own * wide.itemsize // q.element_size()
    size = shapes.batch, shapes.tokens
    results = _results(is_recorded, q, (*size, own, dim), (*size, own_kv, dim), (*size, own_kv, value_dim))

    def work() -> None:
        of_tokens = by_token(rows, shapes, q)
        counts, dims = (own, own, own_kv, own_kv), (dim, value_dim, dim, value_dim)
        queries, grads, keys, values = _heads(of_tokens[..., words:], counts, dims)
        numbers = of_tokens[..., :words].view(wide).unflatten(2, (own, 2))
        own_lse, own_delta = numbers.permute(3, 0, 2, 1).contiguous()
        arrived = BackwardInputs(grads, queries, keys, values, own_lse, own_delta)
        local_backward(call.outer, arrived, Gradients(*results))

    # In backward the kernel pads its temporary memory for each document.
    varying = workspace_nbytes(shapes, own, own_kv) if call.mask.starts else 0
    _run(call, work, is_recorded, rows, results[0], backward=True, varying=varying)
    return results


def is_recordable(call: AttentionCall, shapes: HeadShapes, q: Tensor) -> bool:
    """Return whether the kernels run as CUDA graphs."""
    sums = shapes.batch * shapes.tokens * shapes.own_heads * shapes.head_dim * shapes.statistics_itemsize
    return call.kernel.recordable and records_kernels(q.is_cuda and not is_capturing(), sums)


def statistics(dtype: torch.dtype, *numbers: Tensor) -> Tensor:
    """Return numbers `[batch, heads, tokens]` in fp32 or wider as `[batch, tokens, heads, words]` of another dtype."""
    return torch.stack([each.mT for each in numbers], 3).view(dtype)


def _run(
    call: AttentionCall,
    work: Callable[[], None],
    is_recorded: bool,
    inbox: Tensor,
    outbox: Tensor,
    *,
    backward: bool = False,
    varying: int = 0,
) -> None:
    """Launch the kernels. `work` makes the views that they read: the launch of a graph needs none."""
    with working(call.comm):
        if is_recorded:
            places = inbox.data_ptr(), outbox.data_ptr(), current_stream(inbox.device.index)
            RECORDINGS.get(call, backward, 0, *places).run(work, varying)
        else:
            work()


def by_rank(tensor: Tensor, size: int) -> Tensor:
    """Return `[batch, tokens, heads, features]` as `[ranks, batch, tokens, features]` of each rank's heads."""
    batch, tokens, heads, _ = tensor.shape
    if heads < size:  # several ranks hold the same KV head
        tensor = tensor[:, :, :, None].expand(-1, -1, -1, size // heads, -1)
    return tensor.reshape(batch, tokens, size, -1).permute(2, 0, 1, 3)


def to_heads(call: AttentionCall, shapes: HeadShapes, parts: Sequence[Tensor], *, is_recorded: bool) -> Tensor:
    """Exchange parts by rank; return this rank's heads in the order of the sequence, as `_wide` rows of tokens.

    Args:
        call: The attention.
        shapes: Its sizes.
        parts: Tensors `[ranks, batch, local_tokens, features]`, one dtype.
        is_recorded: Whether the rows stay in place for CUDA graphs.
    """
    arrived = _exchanged(call, packed(parts))
    order, _ = _orders(shapes.layout, shapes.batch, arrived.device)
    sent = _wide(arrived.view(-1, arrived.shape[3]))
    into = BUFFERS.get(sent.device, "in", (sent.shape, sent.dtype))[0] if is_recorded else None
    return torch.index_select(sent, 0, order, out=into)


def by_token(rows: Tensor, shapes: HeadShapes, like: Tensor) -> Tensor:
    """Return the result of `to_heads` as `[batch, tokens, features]`."""
    return rows.view(like.dtype).view(shapes.batch, shapes.tokens, -1)


def to_tokens(call: AttentionCall, shapes: HeadShapes, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Exchange `[batch, tokens, features]`; return `[ranks, batch, local_tokens, features]` of each rank's heads."""
    rows = packed(parts)
    _, order = _orders(shapes.layout, shapes.batch, rows.device)
    sent = _wide(rows.view(-1, rows.shape[2])).index_select(0, order).view(rows.dtype)
    home = _exchanged(call, sent.view(shapes.degree, shapes.batch, -1, rows.shape[2]))
    return split(home, [part.shape[2] for part in parts])


def split(packed: Tensor, features: Sequence[int]) -> tuple[Tensor, ...]:
    """Return views of the parts that were `packed`."""
    parts: tuple[Tensor, ...] = packed[..., : sum(features)].split(features, -1)
    return parts


def _exchanged(call: AttentionCall, sent: Tensor) -> Tensor:
    # That of a group whose ranks all exchange heads. `isinstance` with a protocol takes tens of microseconds.
    return cast(OnCurrentStream, call.comm).all_to_all_here(sent)


def _wide(rows: Tensor) -> Tensor:
    """Return rows in wide elements, if they can be divided into such: they are copied faster."""
    return rows.view(torch.int64) if rows.shape[1] * rows.element_size() % torch.int64.itemsize == 0 else rows


def packed(parts: Sequence[Tensor], *, is_recorded: bool = False) -> Tensor:
    """Join parts along their features; padded, so that statistics can be viewed in their own dtype.

    For `is_recorded` see `to_heads`.
    """
    features = sum(part.shape[-1] for part in parts)
    more = -features % (_WIDEST // parts[0].element_size()) if parts[0].element_size() < _WIDEST else 0
    if more:
        parts = [*parts, parts[0].new_zeros((*parts[0].shape[:-1], more))]
    size = *parts[0].shape[:-1], features + more
    into = BUFFERS.get(parts[0].device, "in", (size, parts[0].dtype))[0] if is_recorded else None
    return torch.cat([*parts], -1, out=into).contiguous()


_WIDEST = 4  # bytes of a statistic of 16-bit tensors


def _heads(rows: Tensor, counts: Sequence[int], dims: Sequence[int]) -> list[Tensor]:
    """Return views `[batch, tokens, heads, dim]` of consecutive heads of each token."""
    batch, tokens, _ = rows.shape
    features = [count * dim for count, dim in zip(counts, dims, strict=True)]
    return [part.view(batch, tokens, count, -1) for part, count in zip(split(rows, features), counts, strict=True)]


def _results(is_recorded: bool, like: Tensor, *sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return memory for results of these sizes: those of three dimensions are statistics."""
    kinds = [(size, accumulation_dtype(like.dtype) if len(size) == 3 else like.dtype) for size in sizes]
    if is_recorded:
        return BUFFERS.get(like.device, "out", *kinds)
    return tuple([torch.empty(size, dtype=dtype, device=like.device) for size, dtype in kinds])


def joined(parts: Tensor, heads: int, dim: int) -> Tensor:
    """Return `[ranks, batch, tokens, features]` of each rank's heads as `[batch, tokens, heads, dim]`.

    The shares of the ranks that hold the same KV head are summed in fp32 or wider.
    """
    size, batch, tokens, _ = parts.shape
    if heads < size:
        parts = parts.unflatten(0, (heads, -1)).sum(1, dtype=accumulation_dtype(parts.dtype))
    return parts.permute(1, 2, 0, 3).reshape(batch, tokens, heads, dim)


def _orders(layout: Layout, batch: int, device: torch.device) -> tuple[Tensor, ...]:
    vectors = _order_vectors(layout, batch, device)
    # A stream that is captured cannot wait for earlier work; torch waits for it before a capture.
    is_here = vectors.stream is None or vectors.stream == current_stream(device.index) or is_capturing()
    return vectors.vectors if is_here else vectors.here()


@lru_cache(maxsize=64)
def _order_vectors(layout: Layout, batch: int, device: torch.device) -> DeviceVectors:
    """Return, of `[ranks, batch, local_tokens]`, the row of each token of `[batch, tokens]`, and the inverse."""
    outward = token_order(layout, batch)
    inward = outward.argsort()
    return copy_to_device((inward, outward), device, torch.int64)

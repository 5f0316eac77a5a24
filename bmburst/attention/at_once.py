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
    own, own_kv = shapes.own_heads, shapes.own_kv_heads
    dim, value_dim = shapes.head_dim, shapes.value_width
    is_recorded = attend is None and _is_recorded(call, shapes, q)
    rows = _to_heads(call, shapes, is_recorded, [_by_rank(t, shapes.degree) for t in (q, k, v)])
    size = shapes.batch, shapes.tokens, own
    out, lse = _results(is_recorded, q, (*size, value_dim), (shapes.batch, own, shapes.tokens))

    def work() -> None:
        queries, keys, values = _heads(_by_token(rows, shapes, q), (own, own_kv, own_kv), (dim, dim, value_dim))
        if attend is None:
            local_forward(call.outer, queries, keys, values, Partial(out, lse))
        else:
            attend(call.outer, Span(0, own_kv), queries, keys, values, Partial(out, lse))

    _run(call, work, is_recorded, rows, out)
    statistics = torch.stack((lse.mT,), 3).view(q.dtype).flatten(2)  # [batch, tokens, heads * words]
    home = _to_tokens(call, shapes, [statistics, out.flatten(2)])
    words = statistics.shape[2]
    own_lse = home[..., :words].view(lse.dtype).permute(1, 0, 3, 2).reshape(shapes.batch, -1, q.shape[1])
    return Partial(_joined(home[..., words : words + own * value_dim], q.shape[2], value_dim), own_lse)


def at_once_backward(call: AttentionCall, given: BackwardInputs) -> Gradients:
    """Return the gradients of this rank's q, k and v; see `ring_backward`."""
    grad_out, q, k, v, lse, delta = given
    shapes = head_shapes_of(call, q.shape, k.shape, v.shape, q.dtype)
    own, own_kv = shapes.own_heads, shapes.own_kv_heads
    dim, value_dim = shapes.head_dim, shapes.value_width
    is_recorded = _is_recorded(call, shapes, q)
    statistics = torch.stack((lse.mT, delta.mT), 3).view(q.dtype)  # [batch, tokens, heads, 2 * words]
    parts = [_by_rank(t, shapes.degree) for t in (statistics, q, k, v, grad_out)]
    rows = _to_heads(call, shapes, is_recorded, parts)
    words = parts[0].shape[3]
    size, heads = (shapes.batch, shapes.tokens), ((own, dim), (own_kv, dim), (own_kv, value_dim))
    results = _results(is_recorded, q, *[(*size, *each) for each in heads])

    def work() -> None:
        of_tokens = _by_token(rows, shapes, q)
        counts, dims = (own, own_kv, own_kv, own), (dim, dim, value_dim, value_dim)
        queries, keys, values, grads = _heads(of_tokens[..., words:], counts, dims)
        numbers = of_tokens[..., :words].view(lse.dtype).unflatten(2, (own, 2))
        own_lse, own_delta = numbers.permute(3, 0, 2, 1).contiguous()
        arrived = BackwardInputs(grads, queries, keys, values, own_lse, own_delta)
        local_backward(call.outer, arrived, Gradients(*results))

    # In backward the kernel pads its temporary memory for each document.
    varying = workspace_nbytes(shapes, own, own_kv) if call.mask.starts else 0
    _run(call, work, is_recorded, rows, results[0], backward=True, varying=varying)
    home = _to_tokens(call, shapes, [t.flatten(2) for t in results])
    features = [count * width for count, width in heads]
    parts = home[..., : sum(features)].split(features, 3)
    return Gradients(*(_joined(part, *t.shape[2:]) for part, t in zip(parts, (q, k, v), strict=True)))


def _is_recorded(call: AttentionCall, shapes: HeadShapes, q: Tensor) -> bool:
    """Return whether the kernels run as CUDA graphs."""
    sums = shapes.batch * shapes.tokens * shapes.own_heads * shapes.head_dim * shapes.statistics_itemsize
    return call.kernel.recordable and records_kernels(q.is_cuda and not is_capturing(), sums)


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


def _by_rank(tensor: Tensor, size: int) -> Tensor:
    """Return `[batch, tokens, heads, features]` as `[ranks, batch, tokens, features]` of each rank's heads."""
    batch, tokens, heads, _ = tensor.shape
    if heads < size:  # several ranks hold the same KV head
        tensor = tensor[:, :, :, None].expand(-1, -1, -1, size // heads, -1)
    return tensor.reshape(batch, tokens, size, -1).permute(2, 0, 1, 3)


def _to_heads(call: AttentionCall, shapes: HeadShapes, is_recorded: bool, parts: Sequence[Tensor]) -> Tensor:
    """Exchange parts by rank; return this rank's heads in the order of the sequence, as `_wide` rows of tokens."""
    arrived = _exchanged(call, _packed(parts))
    order, _ = _orders(shapes.layout, shapes.batch, arrived.device)
    sent = _wide(arrived.view(-1, arrived.shape[3]))
    into = BUFFERS.get(sent.device, "in", (sent.shape, sent.dtype))[0] if is_recorded else None
    return torch.index_select(sent, 0, order, out=into)


def _by_token(rows: Tensor, shapes: HeadShapes, like: Tensor) -> Tensor:
    """Return the result of `_to_heads` as `[batch, tokens, features]`."""
    return rows.view(like.dtype).view(shapes.batch, shapes.tokens, -1)


def _to_tokens(call: AttentionCall, shapes: HeadShapes, parts: Sequence[Tensor]) -> Tensor:
    """Exchange `[batch, tokens, features]`; return `[ranks, batch, local_tokens, features]` of each rank's heads."""
    packed = _packed(parts)
    _, order = _orders(shapes.layout, shapes.batch, packed.device)
    sent = _wide(packed.view(-1, packed.shape[2])).index_select(0, order).view(packed.dtype)
    return _exchanged(call, sent.view(shapes.degree, shapes.batch, -1, packed.shape[2]))


def _exchanged(call: AttentionCall, sent: Tensor) -> Tensor:
    # That of a group whose ranks all exchange heads. `isinstance` with a protocol takes tens of microseconds.
    return cast(OnCurrentStream, call.comm).all_to_all_here(sent)


def _wide(rows: Tensor) -> Tensor:
    """Return rows in wide elements, if they can be divided into such: they are copied faster."""
    return rows.view(torch.int64) if rows.shape[1] * rows.element_size() % torch.int64.itemsize == 0 else rows


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """Join parts along their features; padded, so that statistics can be viewed in their own dtype."""
    features = sum(part.shape[-1] for part in parts)
    more = -features % (_WIDEST // parts[0].element_size()) if parts[0].element_size() < _WIDEST else 0
    if more:
        parts = [*parts, parts[0].new_zeros((*parts[0].shape[:-1], more))]
    return torch.cat([*parts], -1).contiguous()


_WIDEST = 4  # bytes of a statistic of 16-bit tensors


def _heads(rows: Tensor, counts: Sequence[int], dims: Sequence[int]) -> list[Tensor]:
    """Return views `[batch, tokens, heads, dim]` of consecutive heads of each token."""
    batch, tokens, _ = rows.shape
    features = [count * dim for count, dim in zip(counts, dims, strict=True)]
    parts = rows[..., : sum(features)].split(features, 2)
    return [part.view(batch, tokens, count, -1) for part, count in zip(parts, counts, strict=True)]


def _results(is_recorded: bool, like: Tensor, *sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return memory for results of these sizes: those of three dimensions are statistics."""
    kinds = [(size, accumulation_dtype(like.dtype) if len(size) == 3 else like.dtype) for size in sizes]
    if is_recorded:
        return BUFFERS.get(like.device, "out", *kinds)
    return tuple([torch.empty(size, dtype=dtype, device=like.device) for size, dtype in kinds])


def _joined(parts: Tensor, heads: int, dim: int) -> Tensor:
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

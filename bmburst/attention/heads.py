"""Attention by exchanging heads: every rank attends with its own heads over the whole sequence.

No partial results, no merge, no sum over ranks: outputs and gradients are those of one device's kernel, bit for bit.
While a kernel works on some heads, the next ones come in and the last ones go home.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bmburst.attention.call import AttentionCall
from bmburst.attention.heads_plan import HeadsPlan, Transferral, Unit, make_heads_plan
from bmburst.attention.outer import outer_backward, outer_forward
from bmburst.comm.protocol import Transfer
from bmburst.schedule import Span
from bmburst_ops.flash import Gradients, Kernel, Partial
from bmburst_ops.merge import accumulation_dtype

_IN, _OUT = 0, 1  # lanes: what comes in does not queue behind what goes home
_AHEAD = 2  # units under way before the first kernel; as many outboxes as a lane has


def heads_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Return attention of this rank's queries over the whole sequence; see `ring_forward`."""
    plan = _plan(call, q, k, backward=False)
    shapes, statistics = plan.shapes, accumulation_dtype(q.dtype)
    queries, keys, values = _token_buffers(plan, q, k, v)
    out = q.new_empty(q.shape)
    lse = q.new_empty((shapes.batch, shapes.heads, shapes.layout.tokens), dtype=statistics)

    def pack(unit: Unit, at: Transferral, box: Tensor) -> None:
        for start, tensor, span in zip(at.starts, (q, k, v), _spans(unit), strict=True):
            _pack(plan, box, start, tensor, span)

    going_home: list[Transfer] = []
    for i, unit in _arriving(call, plan, (queries, keys, values), pack):
        at = plan.outbound[i]
        box = call.comm.outbox(at.exchange.nbytes, _OUT)
        own = _field(box, at.starts[0], (shapes.batch, shapes.tokens, len(unit.heads), shapes.head_dim), q.dtype)
        own_lse = _field(box, at.starts[1], (shapes.batch, len(unit.heads), shapes.tokens), statistics)
        heads, kv = unit.heads.slice, unit.kv_heads.slice
        part = outer_forward(call.outer, queries[:, :, heads], keys[:, :, kv], values[:, :, kv], out=own)
        own_lse.copy_(part.lse)
        going_home.append(call.comm.exchange(at.exchange, box, (out, lse), _OUT))
    for transfer in going_home:
        transfer.wait()
    return Partial(out, lse)


def heads_backward(
    call: AttentionCall, kernel: Kernel, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor
) -> Gradients:
    """Return the gradients of this rank's q, k and v; see `ring_backward`."""
    plan = _plan(call, q, k, backward=True)
    shapes = plan.shapes
    tokens = _token_buffers(plan, q, k, v, grad_out)
    by_heads = (shapes.batch, shapes.own_heads, shapes.tokens)
    statistics = tuple(t.new_empty(by_heads) for t in (lse, delta))
    queries, keys, values, grads = tokens
    grad_q = q.new_empty(q.shape)
    grad_k, grad_v = (t.new_empty((shapes.replicas, *t.shape)) for t in (k, v))

    def pack(unit: Unit, at: Transferral, box: Tensor) -> None:
        spans = (*_spans(unit), unit.heads)
        for start, tensor, span in zip(at.starts, (q, k, v, grad_out), spans, strict=False):
            _pack(plan, box, start, tensor, span)
        for start, statistic in zip(at.starts[4:], (lse, delta), strict=True):
            _pack_statistic(plan, box, start, statistic, unit.heads)

    going_home: list[Transfer] = []
    for i, unit in _arriving(call, plan, (*tokens, *statistics), pack):
        at = plan.outbound[i]
        box = call.comm.outbox(at.exchange.nbytes, _OUT)
        heads, kv = unit.heads.slice, unit.kv_heads.slice
        whole = (shapes.batch, shapes.tokens)
        counts = (len(unit.heads), len(unit.kv_heads), len(unit.kv_heads))
        into = Gradients(
            *(
                _field(box, start, (*whole, count, shapes.head_dim), q.dtype)
                for start, count in zip(at.starts, counts, strict=True)
            )
        )
        own_lse, own_delta = (t[:, heads] for t in statistics)
        outer_backward(
            call.outer,
            kernel,
            *(grads[:, :, heads], queries[:, :, heads], keys[:, :, kv], values[:, :, kv]),
            *(own_lse, own_delta),
            into=into,
        )
        going_home.append(call.comm.exchange(at.exchange, box, (grad_q, grad_k, grad_v), _OUT))
    for transfer in going_home:
        transfer.wait()
    return Gradients(grad_q, *(_joined(t) for t in (grad_k, grad_v)))


def _arriving(
    call: AttentionCall,
    plan: HeadsPlan,
    targets: Sequence[Tensor],
    pack: Callable[[Unit, Transferral, Tensor], None],
) -> Iterator[tuple[int, Unit]]:
    """Yield each unit once its tensors are here; the units after it are on their way."""
    under_way: list[Transfer] = []

    def send(i: int) -> None:
        at = plan.inbound[i]
        box = call.comm.outbox(at.exchange.nbytes, _IN)
        pack(plan.units[i], at, box)
        under_way.append(call.comm.exchange(at.exchange, box, targets, _IN))

    for i in range(min(_AHEAD, len(plan.units))):
        send(i)
    for i, unit in enumerate(plan.units):
        under_way[i].wait()
        yield i, unit
        if i + _AHEAD < len(plan.units):
            send(i + _AHEAD)


def _plan(call: AttentionCall, q: Tensor, k: Tensor, *, backward: bool) -> HeadsPlan:
    return make_heads_plan(call.head_shapes(q, k), call.comm.rank, backward=backward, most=call.strategy.most_kv_heads)


def _spans(unit: Unit) -> tuple[Span, Span, Span]:
    return unit.heads, unit.new_kv_heads, unit.new_kv_heads


def _token_buffers(plan: HeadsPlan, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return memory for the whole sequence of the rank's own heads of each tensor."""
    shapes = plan.shapes
    heads = (shapes.own_heads if t.shape[2] == shapes.heads else shapes.own_kv_heads for t in tensors)
    whole = (shapes.batch, shapes.tokens)
    return tuple(t.new_empty((*whole, own, shapes.head_dim)) for t, own in zip(tensors, heads, strict=True))


def _pack(plan: HeadsPlan, box: Tensor, start: int, tensor: Tensor, span: Span) -> None:
    """Lay out every rank's heads of a unit one rank after another: `[rank, batch, tokens, heads, head_dim]`."""
    if not len(span):
        return
    shapes = plan.shapes
    batch, tokens, heads, head_dim = tensor.shape
    replicas = shapes.degree // heads if heads < shapes.degree else 1
    shares = tensor.unflatten(2, (shapes.degree // replicas, -1))[:, :, :, span.slice]
    target = _field(box, start, (shapes.degree // replicas, replicas, batch, tokens, len(span), head_dim), tensor.dtype)
    target.copy_(shares.permute(2, 0, 1, 3, 4)[:, None])


def _pack_statistic(plan: HeadsPlan, box: Tensor, start: int, statistic: Tensor, span: Span) -> None:
    """Lay out `[batch, heads, tokens]` as `[rank, batch, heads of the unit, tokens]`."""
    batch, _, tokens = statistic.shape
    shares = statistic.unflatten(1, (plan.shapes.degree, -1))[:, :, span.slice]
    target = _field(box, start, (plan.shapes.degree, batch, len(span), tokens), statistic.dtype)
    target.copy_(shares.transpose(0, 1))


def _field(box: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return part of an outbox as a tensor."""
    numel = 1
    for size in shape:
        numel *= size
    return box[start : start + numel * dtype.itemsize].view(dtype).view(shape)


def _joined(replicas: Tensor) -> Tensor:
    """Add up the shares of the ranks that hold the same KV head."""
    if replicas.shape[0] == 1:
        return replicas[0]
    return replicas.sum(0, dtype=accumulation_dtype(replicas.dtype))

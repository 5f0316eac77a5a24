"""Attention by exchanging heads: every rank attends with its own heads over the whole sequence.

No partial results, no merge, no sum over ranks: outputs and gradients are those of one device's kernel. While a kernel
works on some heads, the next ones come in and the last ones go home. Tensors are moved from where they lie to where
they are needed; nothing is packed.

Memory beside the results, on each rank: the inbox, `q + k + v` bytes of the local tensors forward and
`2 q + k + v` backward (with KV heads repeated where there are fewer than ranks), and two outboxes for the results of a
unit each. Over the peer transport they stay allocated for the next call.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bmburst.attention.call import AttentionCall
from bmburst.attention.heads_plan import HeadsPlan, Strides, Unit, make_heads_plan
from bmburst.attention.outer import outer_backward, outer_forward
from bmburst.comm.messages import tensor_in
from bmburst.comm.protocol import Transfer
from bmburst_ops.flash import Gradients, Kernel, Partial
from bmburst_ops.merge import accumulation_dtype

_IN, _OUT = 0, 1  # lanes: what comes in does not queue behind what goes home


def heads_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Return attention of this rank's queries over the whole sequence; see `ring_forward`."""
    brought = [_token_rows(t) for t in (q, k, v)]
    plan = _plan(call, q, k, brought, backward=False)
    shapes, statistics = plan.shapes, accumulation_dtype(q.dtype)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((shapes.batch, shapes.heads, shapes.layout.tokens), dtype=statistics)
    outer, going_home = call.outer, list[Transfer]()
    for i, unit, (queries, keys, values) in _arriving(call, plan, brought):
        at = plan.outbound[i]
        box = call.comm.outbox(at.exchange.nbytes, _OUT)
        own = _tokens_of(plan, box, at.starts[0], len(unit.heads), q.dtype)
        own_lse = _statistic_of(plan, box, at.starts[1], len(unit.heads), statistics)
        part = outer_forward(outer, queries, keys, values, out=own)
        own_lse.copy_(part.lse)
        going_home.append(call.comm.pull(at.exchange, box, (out, lse), _OUT))
    for transfer in going_home:
        transfer.wait()
    return Partial(out, lse)


def heads_backward(
    call: AttentionCall, kernel: Kernel, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor
) -> Gradients:
    """Return the gradients of this rank's q, k and v; see `ring_backward`."""
    brought = [*(_token_rows(t) for t in (q, k, v, grad_out)), lse.contiguous(), delta.contiguous()]
    plan = _plan(call, q, k, brought, backward=True)
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_k, grad_v = (t.new_empty((plan.shapes.replicas, *t.shape)) for t in (k, v))
    outer, going_home = call.outer, list[Transfer]()
    for i, unit, (queries, keys, values, grads, own_lse, own_delta) in _arriving(call, plan, brought):
        at = plan.outbound[i]
        box = call.comm.outbox(at.exchange.nbytes, _OUT)
        counts = (len(unit.heads), len(unit.kv_heads), len(unit.kv_heads))
        into = Gradients(
            *(_tokens_of(plan, box, start, n, q.dtype) for start, n in zip(at.starts, counts, strict=True))
        )
        outer_backward(outer, kernel, grads, queries, keys, values, own_lse, own_delta, into=into)
        going_home.append(call.comm.pull(at.exchange, box, (grad_q, grad_k, grad_v), _OUT))
    for transfer in going_home:
        transfer.wait()
    return Gradients(grad_q, *(_joined(t) for t in (grad_k, grad_v)))


def _arriving(
    call: AttentionCall, plan: HeadsPlan, brought: Sequence[Tensor]
) -> Iterator[tuple[int, Unit, list[Tensor]]]:
    """Yield each unit with its tensors over all tokens, once they are here; the next moves while the caller works.

    Queries and what belongs to them come with the unit's heads, keys and values with its KV heads.
    """
    shapes = plan.shapes
    inbox = call.comm.inbox(plan.nbytes, _IN)
    next_one = call.comm.push(plan.inbound[0], brought, inbox, _IN)
    by_heads = (_tokens_of, _tokens_of, _tokens_of, _tokens_of, _statistic_of, _statistic_of)
    views = []
    for i, (tensor, start) in enumerate(zip(brought, plan.starts, strict=True)):
        own = shapes.own_kv_heads if i in (1, 2) else shapes.own_heads
        views.append(by_heads[i](plan, inbox, start, own, tensor.dtype))
    for i, unit in enumerate(plan.units):
        next_one.wait()
        heads = [unit.kv_heads.slice if j in (1, 2) else unit.heads.slice for j in range(len(views))]
        yield i, unit, [t[:, :, own] if t.dim() == 4 else t[:, own] for t, own in zip(views, heads, strict=True)]
        if i + 1 < len(plan.units):  # after the kernel: the host's time for this one is hidden too
            next_one = call.comm.push(plan.inbound[i + 1], brought, inbox, _IN)


def _token_rows(tensor: Tensor) -> Tensor:
    """Return the tensor with the heads of a token one after another, a copy only where they are not.

    Ranks may hold tensors of different strides: what moves is then cut into the same blocks on all of them.
    """
    _, _, heads, head_dim = tensor.shape
    _, token, head, feature = tensor.stride()
    if feature == 1 and (head == head_dim or heads == 1) and token >= heads * head_dim:
        return tensor
    return tensor.contiguous()


def _plan(call: AttentionCall, q: Tensor, k: Tensor, brought: Sequence[Tensor], *, backward: bool) -> HeadsPlan:
    strides = []
    for tensor in brought:
        batch, second, third = (stride * tensor.element_size() for stride in tensor.stride()[:3])
        strides.append(Strides(batch, second, third) if tensor.dim() == 4 else Strides(batch, third, second))
    return make_heads_plan(
        call.head_shapes(q, k), call.comm.rank, tuple(strides), backward=backward, most=call.strategy.most_kv_heads
    )


def _tokens_of(plan: HeadsPlan, box: Tensor, start: int, heads: int, dtype: torch.dtype) -> Tensor:
    """Return `[batch, tokens, heads, head_dim]` in a box."""
    return tensor_in(box, start, (plan.shapes.batch, plan.shapes.tokens, heads, plan.shapes.head_dim), dtype)


def _statistic_of(plan: HeadsPlan, box: Tensor, start: int, heads: int, dtype: torch.dtype) -> Tensor:
    """Return `[batch, heads, tokens]` in a box."""
    return tensor_in(box, start, (plan.shapes.batch, heads, plan.shapes.tokens), dtype)


def _joined(replicas: Tensor) -> Tensor:
    """Add up the shares of the ranks that hold the same KV head."""
    if replicas.shape[0] == 1:
        return replicas[0]
    return replicas.sum(0, dtype=accumulation_dtype(replicas.dtype))

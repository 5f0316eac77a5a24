"""Attention with a learned bias and a mask of its own, over a sequence that is split over ranks.

Keys and values go round the ring; what they are was told once for the batch (`BiasedSequence`). In backward their
gradients follow one step behind. Where tokens stand is among what was told, so that every layout works. The gradient
of the bias table is this rank's share, as that of any parameter that all ranks have: the sum over ranks is the gradient
of the sum of their losses.

Memory beside inputs and results, for B samples, S tokens over P ranks, H heads of dimension D: forward 4 * B * S/P * H
* D (keys and values that are here, and the next ones) and an output in fp32; backward that, and 4 such gradients in
fp32; one rank alone has none of that. Nothing grows with the square of the sequence.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmburst.attention.biased_sequence import HOW_MADE, BiasedSequence
from bmburst.attention.differentiable import gradient_signature, no_autocast, output_gradients
from bmburst.attention.options import require_scale, require_transport, scale_of
from bmburst.attention.single_ring import carry_home, visits
from bmburst.comm.checks import Checked, describe, require_numbers
from bmburst.comm.meter import traced
from bmburst.comm.transports import TRANSPORTS, over_transport
from bmburst.errors import UserError, require_known
from bmburst.recompute import keep
from bmburst.schedule.ring_schedule import Schedule, Step
from bmburst_ops.biased import (
    BiasedGradients,
    BiasedKernel,
    Pairs,
    require_inputs,
    require_relations,
    select_biased_kernel,
)
from bmburst_ops.errors import KernelError
from bmburst_ops.first_order import first_order
from bmburst_ops.flash import Partial
from bmburst_ops.merge import accumulation_dtype, add_, merge_partials_

__all__ = ["BiasedSequence", "biased_attention"]


def biased_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, sequence: BiasedSequence, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return exact attention of this rank's queries over the whole sequence: softmax(q k^T * scale + table[bucket]) v.

    Every rank of the group calls it with its own tokens, in any order, as many as the others. The same call gives the
    same bits each time. A compiled caller's graph ends before it and goes on after it.

    Args:
        q: `[batch, local_tokens, heads, head_dim]`, any float dtype, any strides.
        k: The same shape.
        v: The same shape.
        table: The learned bias, `[sequence.formula.rows, heads]`, any float dtype, the same on every rank.
        sequence: What the tokens are, and who has the others. One for all layers of a batch, on every rank: the first
            call with it finds out what the others need not.
        scale: Factor on the products, above 0; default `head_dim ** -0.5`.

    Returns:
        The output, shaped and typed as q, and the log-sum-exp `[batch, heads, local_tokens]` in fp32 or wider. Both are
        differentiable, also by the table. Tokens that see no key, padding among them, give zero and -inf.

    Raises:
        UserError: Shapes, dtypes or devices cannot work, the sequence's tensors were changed in place, or the ranks of
            the group disagree.
    """
    if torch.compiler.is_compiling():
        from bmburst.attention.uncompiled import attend_biased as run
    else:
        run = attend
    return run(q, k, v, table, sequence, scale)


def attend(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, sequence: BiasedSequence, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp as it runs; see `biased_attention`."""
    if not isinstance(sequence, BiasedSequence):
        raise UserError(f"sequence must be a BiasedSequence, got {type(sequence).__name__}\n{HOW_MADE}")
    call = _decide(q, k, v, table, sequence, scale)
    out, lse = _BiasedAttention.apply(q, k, v, table, call)  # type: ignore[no-untyped-call]
    return out, lse


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One attention, decided.

    Attributes:
        comm: Over its transport.
        kernel: That computes blocks.
        pairs: This rank's queries and the keys of each rank.
        scale: Factor on the products.
        schedule: Once around the ring: which tokens see each other is in vectors that nobody has looked at.
    """

    comm: Checked
    kernel: BiasedKernel
    pairs: tuple[Pairs, ...]
    scale: float
    schedule: Schedule


def _decide(q: Tensor, k: Tensor, v: Tensor, table: Tensor, sequence: BiasedSequence, scale: float | None) -> _Call:
    """Return what is done, together with the other ranks while the group compares them.

    Else layers like an earlier one of the batch are decided as that was.
    """

    def here() -> tuple[BiasedKernel, str]:
        require_known("transport", sequence.transport, TRANSPORTS)
        sequence.require_unchanged()
        try:
            own = Pairs(sequence.formula, sequence.relations, sequence.tokens, sequence.tokens)
            require_inputs(q, k, v, table, own)
            require_numbers("q", q)
            require_transport(sequence.group, q, sequence.transport)
            if not q.is_cuda and sequence.is_new:  # where the host need not wait; on a GPU such biases are NaN
                require_relations(own)
            kernel = select_biased_kernel(sequence.kernel, q)
        except KernelError as error:
            raise UserError(str(error)) from None
        require_scale(scale)
        return kernel, _signature(q, k, v, table, sequence, kernel, scale) if sequence.group.active else ""

    def decide() -> _Call:
        kernel = sequence.group.decided(here)
        comm = over_transport(sequence.group, sequence.transport)
        steps = tuple(Step(distance, (comm.rank - distance) % comm.size, ()) for distance in range(comm.size))
        return _Call(comm, kernel, sequence.pairs(comm), scale_of(q, scale), Schedule(comm.size, steps))

    tensors = (q, k, v, table)
    if sequence.group.active or not all(isinstance(t, Tensor) for t in tensors) or not isinstance(scale, float | None):
        return decide()
    sequence.require_unchanged()
    kind: Hashable = (scale, *((t.shape, t.dtype, t.device, t.layout) for t in tensors))
    call: _Call = sequence.decided(kind, decide)
    sequence.pairs(call.comm)  # here, on whatever stream
    return call


def _signature(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    sequence: BiasedSequence,
    kernel: BiasedKernel,
    scale: float | None,
) -> str:
    """Return what must be equal on every rank."""
    return (
        f"biased attention\nq, k, v {describe(q, k, v)}\ntable {describe(table)}\nrelations "
        f"{describe(sequence.relations)}\n{sequence.formula}\nscale {scale}\nkernel {kernel.name}\n"
        f"transport {sequence.transport}\n{gradient_signature(q, k, v, table)}\n"
        f"a call with a {'new' if sequence.is_new else 'known'} sequence"
    )


class _BiasedAttention(torch.autograd.Function):
    """`(q, k, v, table, call) -> (out, lse)`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        with no_autocast(q.device.type), traced("biased attention forward"):
            out, lse = keep(lambda: tuple(_forward(call, q, k, v, table)))
        ctx.save_for_backward(q, k, v, table, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order(UserError)
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, table, out, lse = ctx.saved_tensors
        grad_out, delta = output_gradients(out, grad_out, grad_lse)
        with no_autocast(q.device.type), traced("biased attention backward"):
            grads = _backward(ctx.call, grad_out, q, k, v, table, lse, delta)
        return *(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v, table), strict=True)), None


def _forward(call: _Call, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Partial:
    """Return attention of this rank's queries: keys and values visit."""
    merged: Partial | None = None
    for step, (keys, values) in visits(call.comm, call.schedule, k, v):
        part = call.kernel.forward(q, keys, values, table, call.pairs[step.owner], scale=call.scale)
        if call.comm.size == 1:
            return part
        if merged is None:
            merged = Partial(part.out.to(accumulation_dtype(q.dtype)), part.lse)
        else:
            merge_partials_(*merged, *part)
    assert merged is not None  # our own keys and values come first
    return Partial(merged.out.to(q.dtype), merged.lse)


def _backward(
    call: _Call, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, lse: Tensor, delta: Tensor
) -> BiasedGradients:
    """Return the gradients of q, k and v, and this rank's share of the table's: fp32 or wider, of one rank rounded."""
    own: list[tuple[Tensor, Tensor]] = []
    is_alone = call.comm.size == 1

    def visit(step: Step, guests: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (keys, values), pairs = guests, call.pairs[step.owner]
        grads = call.kernel.backward(
            *(grad_out, q, keys, values, lse, delta, table), pairs, scale=call.scale, rounded=is_alone
        )
        if own:
            grad_q, grad_table = own[0]
            add_(grad_q, grads.q)
            grad_table.add_(grads.table)
        else:
            own.append((grads.q, grads.table))
        return grads.k, grads.v

    grad_k, grad_v = carry_home(call.comm, call.schedule, (k, v), visit)
    grad_q, grad_table = own[0]
    return BiasedGradients(grad_q, grad_k, grad_v, grad_table)

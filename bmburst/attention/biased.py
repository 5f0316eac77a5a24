"""Attention with a learned bias and a mask of its own, over a sequence that is split over ranks.

Keys and values go round the ring with the integers that say what they are; in backward their gradients follow one step
behind. Where tokens stand is among those integers, so that every layout works. The gradient of the bias table is this
rank's share, as that of any parameter that all ranks have: the sum over ranks is the gradient of the sum of their
losses.

Memory beside inputs and results, for B samples, S tokens over P ranks, H heads of dimension D: forward 4 * B * S/P * H
* D (keys and values that are here, and the next ones) and an output in fp32; backward that, and 4 such gradients in
fp32. Nothing grows with the square of the sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bmburst.attention.call import require_scale, require_transport, scale_of
from bmburst.attention.differentiable import gradient_signature, no_autocast, output_gradients
from bmburst.attention.ring import carry_home, visits
from bmburst.comm.checks import Checked, describe
from bmburst.comm.transports import TRANSPORTS, over_transport
from bmburst.errors import UserError, require_known
from bmburst.recompute import keep
from bmburst.schedule import Schedule, Step
from bmburst.trace import traced
from bmburst_ops.biased import (
    Bias,
    BiasedGradients,
    BiasedKernel,
    RelativeBias,
    Tokens,
    require_inputs,
    require_relations,
    select_biased_kernel,
)
from bmburst_ops.errors import KernelError
from bmburst_ops.flash import Partial
from bmburst_ops.merge import accumulation_dtype, add_, merge_partials_

_MADE = "fix: take what a position bias of bmburst.integrations.cpm_live returns"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BiasedSequence:
    """This rank's part of a batch of sequences: what attention must know of it beside q, k, v and the bias table.

    Attributes:
        formula: Which row of the table a query and a key have.
        relations: int32 `[batch or 1, entries]`, the same on every rank of the group.
        tokens: What this rank's tokens are, in the whole sequence.
        group: The ranks that share the sequences.
        kernel: "auto", "triton" or "reference".
        transport: As in `bmburst.burst_attention`.
    """

    formula: RelativeBias
    relations: Tensor
    tokens: Tokens
    group: Checked
    kernel: str = "auto"
    transport: str = "auto"

    def __post_init__(self) -> None:
        kinds = {"formula": RelativeBias, "relations": Tensor, "tokens": Tokens, "group": Checked}
        for name, kind in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise UserError(f"{name} must be a {kind.__name__}, got {type(value).__name__}\n{_MADE}")


def biased_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, sequence: BiasedSequence, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return exact attention of this rank's queries over the whole sequence: softmax(q k^T * scale + table[bucket]) v.

    Every rank of the group calls it with its own tokens, in any order, as many as the others. The same call gives the
    same bits each time.

    Args:
        q: `[batch, local_tokens, heads, head_dim]`, any float dtype, any strides.
        k: The same shape.
        v: The same shape.
        table: The learned bias, `[sequence.formula.rows, heads]`, any float dtype, the same on every rank.
        sequence: What the tokens are, and who has the others.
        scale: Factor on the products, above 0; default `head_dim ** -0.5`.

    Returns:
        The output, shaped and typed as q, and the log-sum-exp `[batch, heads, local_tokens]` in fp32 or wider. Both are
        differentiable, also by the table. Tokens that see no key, padding among them, give zero and -inf.

    Raises:
        UserError: Shapes, dtypes or devices cannot work, or the ranks of the group disagree.
    """
    if not isinstance(sequence, BiasedSequence):
        raise UserError(f"sequence must be a BiasedSequence, got {type(sequence).__name__}\n{_MADE}")
    bias = Bias(sequence.formula, table, sequence.relations)

    def decide() -> tuple[BiasedKernel, str]:
        require_known("transport", sequence.transport, TRANSPORTS)
        try:
            require_inputs(q, k, v, bias, sequence.tokens, sequence.tokens)
            require_transport(sequence.group, q, sequence.transport)
            if not q.is_cuda:  # where the host need not wait; on a GPU such biases are NaN
                require_relations(sequence.formula, sequence.relations, sequence.tokens, sequence.tokens)
            kernel = select_biased_kernel(sequence.kernel, q)
        except KernelError as error:
            raise UserError(str(error)) from None
        require_scale(scale)
        return kernel, (
            f"biased attention\nq, k, v {describe(q, k, v)}\ntable {describe(table)}\nrelations "
            f"{describe(sequence.relations)}\n{sequence.formula}\nscale {scale}\nkernel {kernel.name}\n"
            f"transport {sequence.transport}\n{gradient_signature(q, k, v, table)}"
        )

    kernel = sequence.group.decided(decide)
    comm = over_transport(sequence.group, sequence.transport)
    call = _Call(comm, kernel, sequence.formula, sequence.relations, sequence.tokens, scale_of(q, scale))
    out, lse = _BiasedAttention.apply(q, k, v, table, call)  # type: ignore[no-untyped-call]
    return out, lse


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One attention, decided."""

    comm: Checked
    kernel: BiasedKernel
    formula: RelativeBias
    relations: Tensor
    tokens: Tokens
    scale: float

    def bias(self, table: Tensor) -> Bias:
        return Bias(self.formula, table, self.relations)

    @property
    def schedule(self) -> Schedule:
        """Once around the ring: which tokens see each other is in vectors that nobody has looked at."""
        rank, size = self.comm.rank, self.comm.size
        steps = tuple(Step(distance, (rank - distance) % size, ()) for distance in range(size))
        return Schedule(rank, size, "kv", steps)


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
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, table, out, lse = ctx.saved_tensors
        grad_out, delta = output_gradients(out, grad_out, grad_lse)
        with no_autocast(q.device.type), traced("biased attention backward"):
            grads = _backward(ctx.call, grad_out, q, k, v, table, lse, delta)
        return *(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v, table), strict=True)), None


def _forward(call: _Call, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Partial:
    """Return attention of this rank's queries: keys, values and their integers visit."""
    dtype, bias = accumulation_dtype(q.dtype), call.bias(table)
    out = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype, device=q.device)
    for _, (keys, values, packed) in visits(call.comm, call.schedule, k, v, call.tokens.packed()):
        of_keys = Tokens.unpacked(packed)
        merge_partials_(out, lse, *call.kernel.forward(q, keys, values, bias, call.tokens, of_keys, scale=call.scale))
    return Partial(out.to(q.dtype), lse)


def _backward(
    call: _Call, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, lse: Tensor, delta: Tensor
) -> BiasedGradients:
    """Return the gradients of q, k and v, and this rank's share of the table's, in fp32 or wider."""
    bias = call.bias(table)
    grad_q = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype), memory_format=torch.contiguous_format)
    grad_table = torch.zeros_like(table, dtype=accumulation_dtype(table.dtype), memory_format=torch.contiguous_format)

    def visit(_: Step, guests: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        keys, values, packed = guests
        grads = call.kernel.backward(
            *(grad_out, q, keys, values, lse, delta, bias, call.tokens, Tokens.unpacked(packed)), scale=call.scale
        )
        add_(grad_q, grads.q)
        grad_table.add_(grads.table)
        return grads.k, grads.v

    grad_k, grad_v = carry_home(call.comm, call.schedule, (k, v, call.tokens.packed()), visit)
    return BiasedGradients(grad_q, grad_k, grad_v, grad_table)

"""Attention over a group of ranks as one autograd function, with activation checkpointing and attention sinks.

A checkpoint may keep the results of the last tokens only (recompute policy `:0.5`) and recompute those of the first
tokens, the prefix. Under a causal mask the prefix attends only to itself. Recomputing half of the sequence thus takes
1/4 of the FLOPs and half of the bytes over the links. Source: BurstEngine's sequence-level selective checkpointing for
striped halves, arXiv:2509.19836.

Peak memory falls only if every rank keeps the same share of its tokens. The layout decides which shares are possible:

- one rank alone: any share;
- striped: any share; the prefix is striped too, and balanced;
- zigzag: half, which is every rank's second chunk. The first chunks form a contiguous layout of the prefix. If all
  ranks exchange heads, each rank has all tokens of the prefix and equal work: 1/4 of the FLOPs. In a ring or a gather
  the last rank has up to twice the mean, so 1/2 of the FLOPs;
- contiguous, balanced: none. The last ranks would keep everything.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bmburst.attention.call import AttentionCall, Executor, SequenceCall
from bmburst.attention.options import gradient_signature, require_no_transform, require_own_memory, require_tensor
from bmburst.comm.checks import call_number, describe_tensors, in_backward_of
from bmburst.comm.waits import traced
from bmburst.errors import UserError
from bmburst.recompute import keep
from bmburst.recompute.policy import require_end
from bmburst.schedule.layout import Contiguous, Layout, Striped
from bmburst_ops.autocast import no_autocast
from bmburst_ops.errors import first_order
from bmburst_ops.flash import BackwardInputs, Partial
from bmburst_ops.merge import row_dots


class SequenceAttention(torch.autograd.Function):
    """`(executor, call, q, k, v, ...) -> (out, lse)`: the autograd function of every kind of attention over ranks."""

    @staticmethod
    def forward(ctx: Any, executor: Executor, call: SequenceCall, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Attend; when a checkpoint recomputes, return the results that it kept."""
        prefix = partial(Prefix.of, executor, call, inputs) if isinstance(call, AttentionCall) else None
        with no_autocast(inputs[0].device.type), traced("attention forward"):
            out, lse = keep(partial(executor.forward, call, *inputs), prefix)
        ctx.save_for_backward(*inputs, out, lse)
        ctx.executor, ctx.call, ctx.number = executor, call, call_number(call.comm)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order(UserError)
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs."""
        require_no_transform("the output's gradient", grad_out, grad_lse)
        q, k, v, *others, out, lse = ctx.saved_tensors
        call: SequenceCall = ctx.call if grad_lse is None else ctx.call.taking_delta(q, v)
        grad_out, delta = output_gradients(out, grad_out, grad_lse)
        with no_autocast(q.device.type), traced("attention backward"), in_backward_of(ctx.number):
            grads = ctx.executor.backward(call, BackwardInputs(grad_out, q, k, v, lse, delta), *others)
        inputs = q, k, v, *others
        return None, None, *(grad if grad is None else grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True))


def output_gradients(out: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convert the gradients of an output and its log-sum-exp to the dO and delta that a kernel's backward takes.

    Args:
        out: `[batch, tokens, heads, head_dim]`.
        grad_out: Shaped as `out`, any strides, or None for zero.
        grad_lse: `[batch, heads, tokens]`, or None for zero.

    Returns:
        The output's gradient, dense, and delta `[batch, heads, tokens]` in fp32 or wider.
    """
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out.contiguous()
    delta = row_dots(grad_out, out)
    if grad_lse is not None:
        # dS = P * (dO V^T - delta + dlse): dlse is subtracted from delta. The result may be non-zero where dO is zero.
        delta = delta - grad_lse.to(delta.dtype)
    return grad_out, delta


@dataclass(frozen=True, slots=True)
class Prefix:
    """Recomputes attention for the first tokens of a sequence (recompute policy `:0.5`); see `PrefixRecompute`.

    Attributes:
        executor: Runs the call.
        call: The attention of the prefix.
        rows: Local tokens of the prefix, on every rank.
        inputs: q, k and v of all tokens, and a sink if there is one.
    """

    executor: Executor
    call: AttentionCall
    rows: int
    inputs: tuple[Tensor, ...]

    @classmethod
    def of(cls, executor: Executor, call: AttentionCall, inputs: tuple[Tensor, ...], kept: float) -> "Prefix":
        """Return the prefix that is left if a checkpoint keeps the share `kept` of the tokens, the last ones.

        Raises:
            UserError: The layout or the mask has no such prefix. Every rank raises it.
        """
        layout = call.layout
        if call.is_cross:  # the first queries may see any key: keep all results
            return cls(executor, call, 0, inputs)
        require_end(kept, layout.name, layout.size)
        rows = min(layout.tokens - 1, round((1 - kept) * layout.tokens))
        if rows < 1:
            return cls(executor, call, 0, inputs)
        length = min(call.length, layout.size * rows)
        if int(call.mask.rows(np.array([length - 1]), call.length).stop[0]) > length:
            raise UserError(
                f"mask {call.mask} shows the first {length} tokens later ones, so their attention cannot be recomputed "
                "alone\nfix: recompute policy block-keep-attention, or a causal mask"
            )
        return cls(executor, call.over(_first(layout, rows), length), rows, inputs)

    def end(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See `PrefixRecompute.end`."""
        out, lse = results
        return out[:, self.rows :].detach().clone(), lse[:, :, self.rows :].detach().clone()

    def whole(self, end: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See `PrefixRecompute.whole`."""
        out, lse = end
        if not self.rows:
            return out.detach(), lse.detach()
        q, k, v, *others = self.inputs
        first = self.executor.forward(self.call, *(t[:, : self.rows] for t in (q, k, v)), *others)
        return torch.cat((first.out, out), 1), torch.cat((first.lse, lse), 2)


def _first(layout: Layout, rows: int) -> Layout:
    """Return the layout of the first `rows` local tokens of every rank."""
    return (Striped if isinstance(layout, Striped) else Contiguous)(layout.size, rows)


def check_sink(q: Tensor, sink: Tensor) -> tuple[None, str]:
    """Check a sink against this rank's queries, and describe what must be equal on all ranks.

    Args:
        q: `[batch, local_tokens, heads, head_dim]`. An invalid q passes: it is refused later, with the other inputs.
        sink: `[heads]`.

    Raises:
        UserError: The sink has the wrong type, shape, dtype or device.
    """
    require_tensor("sink", sink, "[heads], one number a query head")
    require_own_memory("sink", sink)
    described = f"attention with a sink\nsink {describe_tensors(sink)}\nsink {gradient_signature(sink)}"
    if not isinstance(q, Tensor) or q.dim() != 4:
        return None, described
    if sink.shape != q.shape[2:3] or not sink.is_floating_point() or sink.element_size() < 2:
        raise UserError(
            f"sink must have one floating-point number of at least 16 bits for each of {q.shape[2]} query heads, got "
            f"{list(sink.shape)} of {sink.dtype}\nfix: all heads' sinks on every rank, also where ranks exchange heads"
        )
    if sink.device != q.device:
        raise UserError(f"sink is on {sink.device}, q on {q.device}\nfix: move it to this rank's device")
    return None, described


@cache
def with_sink(executor: Executor) -> Executor:
    """Return an executor of the same call that takes a sink, `[heads]`, as one more input.

    A sink is one learned logit a query head, which takes a share of every row's softmax (gpt-oss): a key that all
    queries see and whose value is zero. Kernels do not know about it: the results with the sink (out', lse') follow row
    by row from the results over all real keys (out, lse), in natural logarithms:

        lse' = log(exp(lse) + exp(sink))        out' = out * exp(lse - lse')

    In backward a kernel that gets lse' and `delta = sum(dout * out') - dlse'` forms the weights `exp(score - lse')`,
    and so returns the gradients of q, k and v with the sink. The gradient of the sink is the sum over its rows of
    `-exp(sink - lse') * delta`.

    Rows that see no key stay as they are: their output is 0 and their log-sum-exp -inf.
    """

    def forward(call: SequenceCall, q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Partial:
        return beside_sink(executor.forward(call, q, k, v), sink)

    def backward(call: SequenceCall, given: BackwardInputs, sink: Tensor) -> tuple[Any, ...]:
        share = (_by_row(sink, given.lse) - given.lse).exp().where(given.lse > -torch.inf, 0)
        of_sink = -(share * given.delta).sum((0, 2))
        return *executor.backward(call, given), of_sink

    return Executor(forward, backward)


def beside_sink(found: Partial, sink: Tensor) -> Partial:
    """Return the result of attention with a sink, `[heads]`, from that over all keys without it; see `with_sink`."""
    out, lse = found
    whole = torch.logaddexp(lse, _by_row(sink, lse)).where(lse > -torch.inf, lse)
    share = (lse - whole).exp().where(lse > -torch.inf, 0)  # [batch, heads, tokens]
    return Partial(torch.mul(out, share.transpose(1, 2)[..., None], out=torch.empty_like(out)), whole)


def _by_row(sink: Tensor, lse: Tensor) -> Tensor:
    """Return `[heads]` as `[1, heads, 1]` in the dtype of a log-sum-exp."""
    return sink.to(lse.dtype)[None, :, None]

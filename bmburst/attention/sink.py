"""Attention sinks: one learned logit a query head, which takes a share of every row's softmax (gpt-oss).

A sink is a key that all queries see and whose value is zero. Kernels do not know about it: the results with the sink
(out', lse') follow row by row from the results over all real keys (out, lse), in natural logarithms:

    lse' = log(exp(lse) + exp(sink))        out' = out * exp(lse - lse')

In backward a kernel that gets lse' and `delta = sum(dout * out') - dlse'` forms the weights `exp(score - lse')`, and so
returns the gradients of q, k and v with the sink. The gradient of the sink is the sum over its rows of
`-exp(sink - lse') * delta`.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from bmburst.attention.call import Executor, SequenceCall
from bmburst.comm.checks import describe_tensors
from bmburst.errors import UserError
from bmburst_ops.flash import BackwardInputs, Partial


def check_sink(q: Tensor, sink: Tensor) -> tuple[None, str]:
    """Check a sink against this rank's queries, and describe what must be equal on all ranks.

    Args:
        q: `[batch, local_tokens, heads, head_dim]`. An invalid q passes: it is refused later, with the other inputs.
        sink: `[heads]`.

    Raises:
        UserError: The sink has the wrong type, shape, dtype or device.
    """
    if not isinstance(sink, Tensor):
        raise UserError(
            f"sink must be a torch tensor, got {type(sink).__name__}\n"
            "allowed: [heads], one number a query head\nfix: sink = torch.as_tensor(sink)"
        )
    described = f"attention with a sink: {describe_tensors(sink)}, requires_grad {sink.requires_grad}"
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

    Rows that see no key stay as they are: their output is 0 and their log-sum-exp -inf.
    """

    def forward(call: SequenceCall, q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Partial:
        out, lse = executor.forward(call, q, k, v)
        whole = torch.logaddexp(lse, _by_row(sink, lse)).where(lse > -torch.inf, lse)
        share = (lse - whole).exp().where(lse > -torch.inf, 0)  # [batch, heads, tokens]
        return Partial(torch.mul(out, share.transpose(1, 2)[..., None], out=torch.empty_like(out)), whole)

    def backward(call: SequenceCall, given: BackwardInputs, sink: Tensor) -> tuple[Any, ...]:
        share = (_by_row(sink, given.lse) - given.lse).exp().where(given.lse > -torch.inf, 0)
        of_sink = -(share * given.delta).sum((0, 2))
        return *executor.backward(call, given), of_sink

    return Executor(forward, backward)


def _by_row(sink: Tensor, lse: Tensor) -> Tensor:
    """Return `[heads]` as `[1, heads, 1]` in the dtype of a log-sum-exp."""
    return sink.to(lse.dtype)[None, :, None]

"""Attention over a group of ranks as one differentiable function."""

from typing import Any

import torch
from torch import Tensor

from bmburst.attention.call import AttentionCall
from bmburst.attention.differentiable import no_autocast, output_gradients
from bmburst.attention.executor import backward, forward
from bmburst.attention.prefix import Beginning
from bmburst.errors import UserError
from bmburst.recompute import keep
from bmburst_ops.first_order import first_order
from bmburst_ops.flash import Given, Kernel, ReferenceKernel, TritonKernel


class SequenceAttention(torch.autograd.Function):
    """`(q, k, v, call) -> (out, lse)`; see `burst_attention`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Attend, or inside a checkpoint's recomputation return what that gave."""
        with no_autocast(q.device.type):
            out, lse = keep(lambda: tuple(forward(call, q, k, v)), lambda part: Beginning.before(part, call, q, k, v))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order(UserError)
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v."""
        q, k, v, out, lse = ctx.saved_tensors
        call: AttentionCall = ctx.call
        grad_out, delta = output_gradients(out, grad_out, grad_lse)
        # A delta that is not zero where dO is: the surrogate output of a kernel that takes none cannot express it.
        is_taken = grad_lse is None or call.kernel.takes_delta
        kernel = call.kernel if is_taken else _taking_delta(q, k)
        with no_autocast(q.device.type):
            grads = backward(call, kernel, Given(grad_out, q, k, v, lse, delta))
        return *(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True)), None


def _taking_delta(q: Tensor, k: Tensor) -> Kernel:
    """Return a kernel that uses any delta as it is given."""
    fast = TritonKernel()
    return fast if q.is_cuda and fast.refusal(q, k) is None else ReferenceKernel()

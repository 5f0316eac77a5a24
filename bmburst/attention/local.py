"""Attention of one device over a whole sequence: one tile, one kernel call, nothing to merge."""

import torch
from torch import Tensor

from bmburst.attention.call import AttentionCall
from bmburst_ops.flash import Gradients, Kernel, Partial


def local_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Partial:
    """Return attention of these queries over these keys, of which the first `call.length` tokens are real."""
    real = slice(0, call.length)
    whole = call.length == q.shape[1]
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    part = call.kernel.forward(
        q[:, real], k[:, real], v[:, real], causal=call.mask == "causal", scale=call.scale, out=out[:, real]
    )
    if whole:
        return Partial(out, part.lse)
    out[:, call.length :] = 0
    lse = part.lse.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
    lse[:, :, real] = part.lse
    return Partial(out, lse)


def local_backward(
    call: AttentionCall,
    kernel: Kernel,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    into: Gradients | None = None,
) -> Gradients:
    """Return the gradients of q, k and v."""
    real = slice(0, call.length)
    if into is None:
        into = Gradients(*(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)))
    kernel.backward(
        *(t[:, real] for t in (grad_out, q, k, v)),
        *(t[:, :, real] for t in (lse, delta)),
        causal=call.mask == "causal",
        scale=call.scale,
        deterministic=call.deterministic,
        into=Gradients(*(t[:, real] for t in into)),
    )
    for gradient in into:
        gradient[:, call.length :] = 0
    return into

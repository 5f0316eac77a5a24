"""The kernel under test as peers call it: forward with its log-sum-exp, backward from the output it gave.

bmburst's own kernels take delta in backward. Peers keep the output and let the kernel compute delta, so where a kernel
has such a path it is the one taken here, for the peers and for one GPU alone: nobody is charged for our interface.
"""

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from bmburst_ops.flash import Band, Given, Gradients, Segments, select_kernel
from bmburst_ops.flash.fa4 import fa4_options
from bmburst_ops.flash.memory import aligned, gradient_memory
from bmburst_ops.flash.varlen import told, told_flash_attention_2
from bmburst_ops.merge import row_dots

Shape = Band | Segments
"""Which keys the queries see, aligned at the bottom right."""


class ForBackward(NamedTuple):
    """What backward needs beside the inputs: dO, the output and log-sum-exp, and where gradients are to be written."""

    grad: Tensor
    out: Tensor
    lse: Tensor
    into: Gradients | None = None


class LocalKernel:
    """One kernel of the table, chosen by name and by the tensors of each call.

    Args:
        name: A name of `bmburst_ops.flash.NAMES`; "auto" takes the first that fits.
    """

    def __init__(self, name: str = "auto") -> None:
        self.choice = name

    def name(self, q: Tensor, k: Tensor, pattern: Shape) -> str:
        """Return the name of the kernel that takes these inputs."""
        return select_kernel(self.choice, q, k, needs=pattern.needs).name

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pattern: Shape, scale: float) -> tuple[Tensor, Tensor]:
        """Return output, in q's dtype, and log-sum-exp `[batch, heads, queries]`."""
        part = select_kernel(self.choice, q, k, needs=pattern.needs).forward(q, k, v, pattern=pattern, scale=scale)
        return part.out.to(q.dtype), part.lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, results: ForBackward, pattern: Shape, scale: float
    ) -> Gradients:
        """Return the gradients, in q's dtype, from the global output and log-sum-exp."""
        kernel = select_kernel(self.choice, q, k, needs=pattern.needs)
        own = _OWN_BACKWARD.get(kernel.name)
        if own is not None:
            return own(q, k, v, results, pattern, scale)
        grad, out, lse, into = results
        given = Given(grad, q, k, v, lse, row_dots(grad, out))
        grads = kernel.backward(given, pattern=pattern, scale=scale, deterministic=False, into=into)
        return Gradients(*(g.to(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)))


def _flash_attention_4(
    q: Tensor, k: Tensor, v: Tensor, results: ForBackward, pattern: Shape, scale: float
) -> Gradients:
    interface, call = importlib.import_module("flash_attn.cute.interface"), told(pattern, q, k)
    flat_q, flat_k, flat_v, out, grad = (aligned(call.flat(t)) for t in (q, k, v, results.out, results.grad))
    memory = gradient_memory(flat_q, flat_k, flat_v, call.flat_targets(results.into))
    lse = call.flat_statistic(results.lse).float().contiguous()
    named = {"dq": memory.q, "dk": memory.k, "dv": memory.v}
    interface._flash_attn_bwd(flat_q, flat_k, flat_v, out, grad, lse, softmax_scale=scale, **named, **fa4_options(call))
    return call.gradients(memory, q.shape[0], results.into)


def _torch(q: Tensor, k: Tensor, v: Tensor, results: ForBackward, pattern: Shape, scale: float) -> Gradients:
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # random state of a dropout that is zero
    call = told_flash_attention_2(pattern, q, k)
    grad, flat_q, flat_k, flat_v, out = (aligned(call.flat(t)) for t in (results.grad, q, k, v, results.out))
    lse = call.flat_statistic(results.lse).contiguous()
    lengths = call.queries, call.keys, call.longest_queries, call.longest_keys
    left, right = call.window
    window = {} if left == right == -1 else {"window_size_left": left, "window_size_right": right}
    found = torch.ops.aten._flash_attention_backward(
        *(grad, flat_q, flat_k, flat_v, out, lse, *lengths, 0.0, call.causal, unused, unused), scale=scale, **window
    )
    return call.gradients(Gradients(*found), q.shape[0], results.into)


Backward = Callable[[Tensor, Tensor, Tensor, ForBackward, Shape, float], Gradients]
_OWN_BACKWARD: Mapping[str, Backward] = MappingProxyType({"fa4": _flash_attention_4, "torch": _torch})

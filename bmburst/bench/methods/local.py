"""The kernel under test as peers call it: forward with its log-sum-exp, backward from the output it gave.

bmburst's own kernels take delta in backward. Peers keep the output and let the kernel compute delta, so where a kernel
has such a path it is the one taken here, for the peers and for one GPU alone: nobody is charged for our interface.
"""

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from bmburst_ops.flash import Gradients, select_kernel
from bmburst_ops.flash.memory import aligned, deliver_gradients, gradient_memory
from bmburst_ops.merge import row_dots

Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float, Gradients | None], Gradients]


class LocalKernel:
    """One kernel of the table, chosen by name and by the tensors of each call.

    Args:
        name: A name of `bmburst_ops.flash.NAMES`; "auto" takes the first that fits.
    """

    def __init__(self, name: str = "auto") -> None:
        self.choice = name

    def name(self, q: Tensor, k: Tensor) -> str:
        """Return the name of the kernel that takes these inputs."""
        return select_kernel(self.choice, q, k).name

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Return output, in q's dtype, and log-sum-exp `[batch, heads, queries]`. Causal is bottom-right aligned."""
        part = select_kernel(self.choice, q, k).forward(q, k, v, causal=causal, scale=scale)
        return part.out.to(q.dtype), part.lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
        into: Gradients | None = None,
    ) -> Gradients:
        """Return the gradients, in q's dtype, from the global output and log-sum-exp; written `into` if it is given."""
        kernel = select_kernel(self.choice, q, k)
        own = _OWN_BACKWARD.get(kernel.name)
        if own is not None:
            return own(grad, q, k, v, out, lse, causal, scale, into)
        delta = row_dots(grad, out)
        grads = kernel.backward(grad, q, k, v, lse, delta, causal=causal, scale=scale, deterministic=False, into=into)
        return Gradients(*(g.to(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)))


def _flash_attention_4(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    into: Gradients | None,
) -> Gradients:
    interface = importlib.import_module("flash_attn.cute.interface")
    grad, q, k, v, out = (aligned(t) for t in (grad, q, k, v, out))
    memory = gradient_memory(q, k, v, into)
    named = {"dq": memory.q, "dk": memory.k, "dv": memory.v}
    interface._flash_attn_bwd(q, k, v, out, grad, lse.float().contiguous(), softmax_scale=scale, causal=causal, **named)
    return deliver_gradients(memory, into)


def _torch(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    into: Gradients | None,
) -> Gradients:
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # random state of a dropout that is zero
    grad, q, k, v, out = (aligned(t) for t in (grad, q, k, v, out))
    lengths = q.shape[1], k.shape[1]
    found = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, *lengths, 0.0, causal, unused, unused, scale=scale
    )
    return deliver_gradients(Gradients(*found), into)


_OWN_BACKWARD: Mapping[str, Backward] = MappingProxyType({"fa4": _flash_attention_4, "torch": _torch})

"""Attention of values that have another head dim than keys, by kernels that take one head dim.

The narrower tensors of a tile get zeros at the end of each head. Zeros of q and k do not change a score. Zeros of v
give zeros of the output, which are cut off. Tensors are padded for one kernel call: exchanges move them as they are.
"""

from torch import Tensor
from torch.nn.functional import pad

from bmburst_ops.flash.kernel import (
    BackwardInputs,
    Gradients,
    Kernel,
    Partial,
    Scoring,
    deliver_gradients,
    deliver_partial,
)
from bmburst_ops.pattern import Need


class PaddedKernel(Kernel):
    """`Kernel` for values `[batch, keys, kv_heads, value_dim]`, by a kernel that takes one head dim.

    Args:
        kernel: It supports the wider one of both head dims.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.name, self.recordable, self.takes_delta = kernel.name, kernel.recordable, kernel.takes_delta

    def refusal(self, q: Tensor, k: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """See `Kernel.refusal`."""
        return self.kernel.refusal(q, k, needs)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, into: Partial | None = None) -> Partial:
        """See `Kernel.forward`. The output is copied: a kernel cannot write its zeros behind each head of `into`."""
        width = max(q.shape[-1], v.shape[-1])
        found = self.kernel.forward(_padded(q, width), _padded(k, width), _padded(v, width), scoring)
        out = found.out[..., : v.shape[-1]]
        return deliver_partial(Partial(out if into else out.contiguous(), found.lse), into)

    def backward(
        self, given: BackwardInputs, scoring: Scoring, *, deterministic: bool, into: Gradients | None = None
    ) -> Gradients:
        """See `Kernel.backward`."""
        inputs = given.q, given.k, given.v
        width = max(t.shape[-1] for t in inputs)
        grad_out, q, k, v = (_padded(t, width) for t in given[:4])
        wider = BackwardInputs(grad_out, q, k, v, given.lse, given.delta)
        found = self.kernel.backward(wider, scoring, deterministic=deterministic)
        cut = Gradients(*(grad[..., : t.shape[-1]] for grad, t in zip(found, inputs, strict=True)))
        return deliver_gradients(cut, into)


def _padded(tensor: Tensor, width: int) -> Tensor:
    """Return `[..., width]` with zeros behind each head."""
    missing = width - tensor.shape[-1]
    return pad(tensor, (0, missing)) if missing else tensor

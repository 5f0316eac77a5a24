"""Attention of what a rank holds: here alone, or with the groups that hold the rest of the sequence."""

from torch import Tensor

from bmburst.attention.call import AttentionCall
from bmburst.attention.gather import gather_backward, gather_forward
from bmburst.attention.local import backward_by_tiles, forward_by_tiles
from bmburst.attention.ring import ring_backward, ring_forward
from bmburst_ops.flash import Given, Gradients, Kernel, Partial
from bmburst_ops.flash.memory import deliver_gradients, deliver_partial


def outer_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, into: Partial | None = None) -> Partial:
    """Return attention of these queries over the whole sequence, without exchanging heads.

    Args:
        call: The attention; its communicator holds one rank of each group that exchanged heads.
        q: `[batch, tokens, heads, head_dim]`.
        k: `[batch, tokens, kv_heads, head_dim]`.
        v: Shaped as k.
        into: Where to write the results, as `Kernel.forward`. Default: new memory.
    """
    if call.comm.size == 1:
        return forward_by_tiles(call, call.tiles(0, 0), q, k, v, into)
    if call.strategy.outer == "gather":
        return gather_forward(call, q, k, v, into)
    return deliver_partial(ring_forward(call, q, k, v), into)


def outer_backward(call: AttentionCall, kernel: Kernel, given: Given, into: Gradients | None = None) -> Gradients:
    """Return the gradients of q, k and v, without exchanging heads; `into` as above."""
    if call.comm.size == 1:
        return backward_by_tiles(call, kernel, call.tiles(0, 0), given, into)
    if call.strategy.outer == "gather":
        return gather_backward(call, kernel, given, into)
    return deliver_gradients(ring_backward(call, kernel, given), into)

"""What carries out an attention: with an exchange of heads or without."""

from torch import Tensor

from bmburst.attention.call import AttentionCall
from bmburst.attention.heads import heads_backward, heads_forward
from bmburst.attention.outer import outer_backward, outer_forward
from bmburst.comm.meter import traced
from bmburst_ops.flash import Given, Gradients, Kernel, Partial


def forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Return attention of this rank's queries over the whole sequence.

    The output is in q's dtype, the log-sum-exp in fp32 or wider. Padding rows give zero and `-inf`.
    """
    executor = heads_forward if call.strategy.ulysses_degree > 1 else outer_forward
    with traced("attention forward"):
        return executor(call, q, k, v)


def backward(call: AttentionCall, kernel: Kernel, given: Given) -> Gradients:
    """Return the gradients of this rank's q, k and v, in their dtype or wider."""
    executor = heads_backward if call.strategy.ulysses_degree > 1 else outer_backward
    with traced("attention backward"):
        return executor(call, kernel, given)

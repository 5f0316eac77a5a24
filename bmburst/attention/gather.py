"""Placeholder until the gather lands."""

from torch import Tensor

from bmburst.attention.call import AttentionCall
from bmburst_ops.flash import Gradients, Kernel, Partial


def gather_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """x"""
    raise NotImplementedError


def gather_backward(
    call: AttentionCall, kernel: Kernel, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor
) -> Gradients:
    """x"""
    raise NotImplementedError

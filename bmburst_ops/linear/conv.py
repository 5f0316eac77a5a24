"""The causal depthwise convolution of recurrent layers, on one device, over the pieces of a flat batch."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bmburst_ops.fused import triton_twin
from bmburst_ops.linear.kernel import Pieces

_MOST_WIDTH = 8  # of the Triton kernels, which unroll it


def causal_conv(
    x: Tensor, halos: Tensor, weight: Tensor, bias: Tensor | None, pieces: Pieces, activation: str | None
) -> Tensor:
    """Return `act(sum_j weight[:, j] x[t - width + 1 + j] + bias)`, `[tokens, channels]`; zero for padding.

    Args:
        x: `[tokens, channels]` of a flat batch.
        halos: The tokens before the waiting pieces, `[waiting, width - 1, channels]`.
        weight: `[channels, width]`.
        bias: `[channels]`, or None.
        pieces: The pieces.
        activation: "silu" or None.
    """
    given = x, halos, weight, bias, pieces, activation
    if fused := _fused(x, halos, weight):
        found: Tensor = fused.causal_conv(*given)
        return found
    return _convolved(*given)


def causal_conv_gradients(
    grad: Tensor, x: Tensor, halos: Tensor, weight: Tensor, bias: Tensor | None, pieces: Pieces, activation: str | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, halos, weight and bias, given that of the output of `causal_conv`.

    That of x is dense and shares no memory with others, so that the caller may add to it.
    """
    if fused := _fused(x, halos, weight):
        found: tuple[Tensor, Tensor, Tensor, Tensor | None] = fused.causal_conv_gradients(
            grad, x, halos, weight, bias, pieces, activation
        )
        return found
    x, halos, weight = (t.detach().requires_grad_() for t in (x, halos, weight))
    bias = None if bias is None else bias.detach().requires_grad_()
    with torch.enable_grad():
        out = _convolved(x, halos, weight, bias, pieces, activation)
    leaves = [x, halos, weight, *([] if bias is None else [bias])]
    of_x, of_halos, of_weight, *of_bias = torch.autograd.grad(out, leaves, grad, materialize_grads=True)
    of_x = of_x.clone(memory_format=torch.contiguous_format)
    return of_x, of_halos, of_weight, of_bias[0] if of_bias else None


def _fused(x: Tensor, halos: Tensor, weight: Tensor) -> Any:
    return triton_twin("linear.triton_conv", x, halos, weight) if weight.shape[1] <= _MOST_WIDTH else None


def _convolved(
    x: Tensor, halos: Tensor, weight: Tensor, bias: Tensor | None, pieces: Pieces, activation: str | None
) -> Tensor:
    """Convolve once over all pieces, each with the tokens before it in front: zeros, or its halo."""
    before = weight.shape[1] - 1
    waiting = {number: i for i, number in enumerate(pieces.waiting)}
    zeros = x.new_zeros(before, x.shape[1])
    parts: list[Tensor] = []
    for number in range(len(pieces.edges) - 1):
        tokens = x[pieces.span(number)]
        tokens = torch.zeros_like(tokens) if number in pieces.padding else tokens  # a NaN would reach the weight
        parts += [halos[waiting[number]] if number in waiting else zeros, tokens]
    longer = torch.cat(parts).to(weight.dtype)
    found = functional.conv1d(longer.T[None], weight[:, None], bias, groups=x.shape[1])[0].T
    outs: list[Tensor] = []
    for number, edge in enumerate(pieces.edges[:-1]):
        begin = edge + before * number
        out = found[begin : begin + pieces.edges[number + 1] - edge]
        # Zeros that are still part of the graph, also where all is padding.
        outs.append(functional.pad(out[:0], (0, 0, 0, len(out))) if number in pieces.padding else out)
    out = torch.cat(outs)
    return (out if activation is None else functional.silu(out)).to(x.dtype)

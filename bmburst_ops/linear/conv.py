"""The causal depthwise convolution of recurrent layers, on one device, over the pieces of a flat batch."""

import torch
from torch import Tensor
from torch.nn import functional

from bmburst_ops.linear.kernel import Pieces


def causal_conv(
    x: Tensor, halos: Tensor, weight: Tensor, bias: Tensor | None, pieces: Pieces, activation: str | None
) -> Tensor:
    """Return `act(sum_j weight[:, j] x[t - width + 1 + j] + bias)`, `[tokens, channels]`; zero for padding.

    It is differentiable in all tensors. The convolution runs once over all pieces, each with the tokens before it in
    front: zeros, or its halo.

    Args:
        x: `[tokens, channels]` of a flat batch.
        halos: The tokens before the waiting pieces, `[waiting, width - 1, channels]`.
        weight: `[channels, width]`.
        bias: `[channels]`, or None.
        pieces: The pieces.
        activation: "silu" or None.
    """
    before = weight.shape[1] - 1
    waiting = {number: i for i, number in enumerate(pieces.waiting)}
    zeros = x.new_zeros(before, x.shape[1])
    parts: list[Tensor] = []
    for number in range(len(pieces.edges) - 1):
        parts += [halos[waiting[number]] if number in waiting else zeros, x[pieces.span(number)]]
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

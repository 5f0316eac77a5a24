"""Folds of summaries on one device: the states between the fragments of each piece, from M and U of every fragment."""

import torch
from torch import Tensor
from torch.nn import functional

from bmburst_ops.fused import triton_twin
from bmburst_ops.linear.kernel import multiply

_MOST_KEY_DIM = 128  # of the Triton kernel, whose programs hold M


def fold_fragments(
    transitions: Tensor, ends: Tensor, firsts: Tensor, edges: tuple[int, ...], *, backward: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the state before each fragment, `[fragments, heads, key_dim, columns]`, and after each piece.

    Forward, `S = M S + U` from the first to the last fragment of a piece. Backward, for gradients, `S = M^T S + U` from
    the last to the first: the results are those after each fragment, and before each piece. On NVIDIA GPUs one Triton
    kernel computes all of it, if a program can hold M.

    Args:
        transitions: M, `[fragments, heads, key_dim, key_dim]`, fp32 or wider, any strides.
        ends: U, `[fragments, heads, key_dim, columns]`, or fewer columns: those that are missing are zero.
        firsts: States before the pieces (backward: gradients after them), `[pieces, heads, key_dim, columns]`.
        edges: First fragment of each piece, and the number of fragments.
        backward: See above.
    """
    if firsts.shape[2] <= _MOST_KEY_DIM and (fused := triton_twin("linear.triton_fold", firsts, transitions, ends)):
        found: tuple[Tensor, Tensor] = fused.fold_fragments(transitions, ends, firsts, edges, backward=backward)
        return found
    missing = firsts.shape[-1] - ends.shape[-1]
    each, lasts = firsts.new_empty(len(transitions), *firsts.shape[1:]), torch.empty_like(firsts)
    for piece, state in enumerate(firsts):
        order = range(edges[piece], edges[piece + 1])
        for fragment in reversed(order) if backward else order:
            each[fragment] = state
            m = transitions[fragment].mT if backward else transitions[fragment]
            state = multiply(m, state) + functional.pad(ends[fragment], (0, missing))
        lasts[piece] = state
    return each, lasts

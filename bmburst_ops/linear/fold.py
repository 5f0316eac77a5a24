"""Folds of summaries on one device: the states between the fragments of each piece, from M and U of every fragment.

A fragment maps the state before it to `M S + U`. In backward, the gradient of the state after a fragment maps to
`M^T S + U`, from the last fragment to the first. Edges are the first fragment of each piece, and the number of
fragments. Where each piece has one fragment, nothing is computed.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from bmburst_ops.linear.kernel import Recurrence


def states_between(
    recurrence: Recurrence,
    transitions: Tensor,
    ends: Tensor,
    firsts: Tensor,
    edges: tuple[int, ...],
    *,
    backward: bool = False,
) -> Tensor:
    """Return the state before each fragment (backward: the gradient after it), `[fragments, *state]`.

    Args:
        recurrence: The recurrence.
        transitions: M, `[fragments, heads, ...]`, fp32 or wider.
        ends: U, `[fragments, *state]`.
        firsts: States before the pieces (backward: gradients after them), `[pieces, *state]`.
        edges: See the module.
        backward: See the module.
    """
    if len(firsts) == len(ends):
        return firsts
    found = torch.empty_like(ends)
    states = found.unbind()
    for piece, order in enumerate(_orders(edges, backward)):
        states[order[0]].copy_(firsts[piece])
        for here, after in pairwise(order):
            recurrence.advance(transitions[here], states[here], ends[here], states[after], backward=backward)
    return found


def states_after(
    recurrence: Recurrence, transitions: Tensor, ends: Tensor, edges: tuple[int, ...], *, backward: bool = False
) -> Tensor:
    """Return U of each piece, `[pieces, *state]`: the state after it if the first is zero; see `states_between`."""
    if len(edges) - 1 == len(ends):
        return ends
    found = []
    for first, *others in _orders(edges, backward):
        state = ends[first]
        for fragment in others:
            state = recurrence.advance(transitions[fragment], state, ends[fragment], backward=backward)
        found.append(state)
    return torch.stack(found)


def joined_transitions(recurrence: Recurrence, transitions: Tensor, edges: tuple[int, ...]) -> Tensor:
    """Return M of each piece, `[pieces, heads, ...]`: the product of those of its fragments, the last one leftmost."""
    if len(edges) - 1 == len(transitions):
        return transitions
    found = []
    for first, *others in _orders(edges, backward=False):
        product = transitions[first]
        for fragment in others:
            product = recurrence.act(transitions[fragment], product)
        found.append(product)
    return torch.stack(found)


def _orders(edges: tuple[int, ...], backward: bool) -> Iterator[range]:
    """Yield the fragments of each piece, in the order in which a state passes through them."""
    for begin, end in pairwise(edges):
        yield range(end - 1, begin - 1, -1) if backward else range(begin, end)

"""Folds of summaries on one device: the states between the fragments of each piece, from M and U of every fragment.

A fragment maps the state before it to `M S + U`. In backward, the gradient of the state after a fragment maps to
`M^T S + U`, from the last fragment to the first. Edges are the first fragment of each piece, and the number of
fragments. Where each piece has one fragment, nothing is computed.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from bmburst_ops.linear.kernel import Recurrence


def states_between(
    recurrence: Recurrence,
    transitions: Tensor,
    ends: Tensor,
    edges: tuple[int, ...],
    firsts: Tensor,
    pieces: Sequence[int],
    *,
    backward: bool = False,
) -> Tensor:
    """Return the state before each fragment (backward: the gradient after it), `[fragments, *state]`.

    Args:
        recurrence: The recurrence.
        transitions: M, `[fragments, heads, ...]`, fp32 or wider.
        ends: U, `[fragments, *state]`.
        edges: See the module.
        firsts: States before some pieces (backward: gradients after them), `[len(pieces), *state]`.
        pieces: Their numbers. Those of the others are zero.
        backward: See the module.
    """
    if len(pieces) == len(ends):
        return firsts.to(ends.dtype)
    found = torch.empty_like(ends)
    states, given = found.unbind(), dict(zip(pieces, firsts.unbind(), strict=True))
    for piece, order in enumerate(_orders(edges, backward)):
        first = given.get(piece)
        states[order[0]].zero_() if first is None else states[order[0]].copy_(first)
        for here, after in pairwise(order):
            recurrence.advance(transitions[here], states[here], ends[here], states[after], backward=backward)
    return found


def states_after(
    recurrence: Recurrence,
    transitions: Tensor,
    ends: Tensor,
    edges: tuple[int, ...],
    pieces: Sequence[int],
    *,
    backward: bool = False,
) -> Tensor:
    """Return U of some pieces, `[len(pieces), *state]`: the states after them if those before them are zero.

    See `states_between`.
    """
    found, orders = [], list(_orders(edges, backward))
    for first, *others in (orders[piece] for piece in pieces):
        state = ends[first]
        for fragment in others:
            state = recurrence.advance(transitions[fragment], state, ends[fragment], backward=backward)
        found.append(state)
    return _stacked(found)


def joined_transitions(
    recurrence: Recurrence, transitions: Tensor, edges: tuple[int, ...], pieces: Sequence[int]
) -> Tensor:
    """Return M of some pieces, `[len(pieces), heads, ...]`: products of M of their fragments, the last one leftmost."""
    found, orders = [], list(_orders(edges, backward=False))
    for first, *others in (orders[piece] for piece in pieces):
        product = transitions[first]
        for fragment in others:
            product = recurrence.act(transitions[fragment], product)
        found.append(product)
    return _stacked(found)


def _stacked(tensors: list[Tensor]) -> Tensor:
    """Return tensors as one, without a copy if there is only one."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)


def _orders(edges: tuple[int, ...], backward: bool) -> Iterator[range]:
    """Yield the fragments of each piece, in the order in which a state passes through them."""
    for begin, end in pairwise(edges):
        yield range(end - 1, begin - 1, -1) if backward else range(begin, end)

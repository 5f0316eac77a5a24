"""Folds of summaries on one device: the states that paths store. See `bmburst_ops.linear.paths`."""

from torch import Tensor

from bmburst_ops.fused import triton_twin
from bmburst_ops.linear.kernel import Recurrence
from bmburst_ops.linear.paths import Paths


def fold(
    recurrence: Recurrence,
    transitions: Tensor,
    ends: Tensor,
    paths: Paths,
    firsts: Tensor | None = None,
    *,
    backward: bool = False,
    out: Tensor | None = None,
    products: Tensor | None = None,
) -> Tensor:
    """Return the stored states, `[places, *state]`.

    Args:
        recurrence: The recurrence.
        transitions: M, `[rows, heads, ...]`, fp32 or wider.
        ends: U, `[rows, *state]`.
        paths: The paths.
        firsts: The given states, `[given, *state]`.
        backward: See `bmburst_ops.linear.paths`.
        out: Memory of the result.
        products: Memory `[places, heads, ...]` for M of whole paths, where the state after them is stored.
    """
    kernels = triton_twin("linear.triton_fold", transitions, ends) if recurrence.kind == "decay" else None
    if kernels is not None:
        in_one: Tensor = kernels.fold(transitions, ends, paths, firsts, out=out, products=products)
        return in_one
    found = paths.memory(ends, *ends.shape[1:]) if out is None else out
    for path in paths.each:
        state = None if firsts is None or path.first < 0 else firsts[path.first]  # None is zero
        product, places = None, (*path.before, path.after)
        if places[0] >= 0:
            found[places[0]] = 0.0 if state is None else state
        for row, place in zip(path.rows, places[1:], strict=True):
            m, u, memory = transitions[row], ends[row], None if place < 0 else found[place]
            if state is None:
                state = u if memory is None else memory.copy_(u)
            else:
                state = recurrence.advance(m, state, u, memory, backward=backward)
            if products is not None:
                product = m if product is None else recurrence.act(m, product)
        if products is not None and product is not None:
            products[path.after] = product
    return found

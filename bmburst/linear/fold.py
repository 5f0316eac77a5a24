"""Exchange and fold of summaries: which state each link of a chain begins with, and the gradient that it ends with.

Forward, a rank sends M and U of its links, and gets the state before each of them. Backward, it sends the gradient of
each of these states through the link's own outputs, and gets the gradient of the state after each link. M stays where
it was folded. Bytes depend on heads and links, not on tokens. There are two ways:

- one hop: every rank gets all summaries and folds them for itself;
- two hops: rank r gets the summaries of its share of the heads, folds these, and sends the states to the ranks of the
  links. Heads are independent of each other. It receives about 1/ranks of the bytes, and keeps as much less of M.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from bmburst.linear.call import ScanCall
from bmburst_ops.linear.fold import fold
from bmburst_ops.linear.kernel import Inputs
from bmburst_ops.linear.paths import Path, Paths


@dataclass(frozen=True, slots=True)
class Folded:
    """What the fold of a forward pass gives a rank.

    Attributes:
        starts: States before its waiting pieces, `[waiting, *state]`.
        final: The state after the last token, `[samples, *state]`; None unless the chain has it.
        transitions: M of all slots, or of this rank's share of their heads, `[ranks * slots * samples, heads, ...]`,
            for backward.
    """

    starts: Tensor
    final: Tensor | None
    transitions: Tensor


def fold_forward(call: ScanCall, inputs: Inputs, summaries: Tensor, initial: Tensor | None) -> Folded:
    """Return the states before this rank's waiting pieces.

    Args:
        call: The call.
        inputs: Inputs of the recurrence; their shapes are read.
        summaries: M and U of this rank's exporting pieces in `call.sent`, `[slots * samples, heads, numbers]`.
        initial: States before the first token, `[samples, heads, ...]`, or None.
    """
    if not call.has_states:
        transitions, starts = call.recurrence.summary_views(inputs, summaries)
        return Folded(starts, None, transitions)
    hops = _Hops(call, summaries.shape[1])
    transitions, ends = call.recurrence.summary_views(inputs, hops.out(summaries).flatten(0, 2))
    transitions = transitions.contiguous()  # a copy: it is kept for backward, without U
    firsts = None if initial is None else hops.own_heads(initial.to(ends.dtype))
    states = fold(call.recurrence, transitions, ends, link_paths(call, backward=False), firsts)
    return Folded(*hops.back(states, backward=False), transitions)


def fold_backward(
    call: ScanCall, transitions: Tensor, start_grads: Tensor, final_grad: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the states after this rank's exporting pieces, and of the initial state.

    Args:
        call: The call.
        transitions: `Folded.transitions`.
        start_grads: Gradients of the states before this rank's waiting pieces through these pieces' own outputs, in
            `call.sent_back`, `[slots * samples, heads, ...]`; it is changed.
        final_grad: This rank's gradient of the final state, `[samples, heads, ...]`; None if the chain has none.

    Returns:
        The first `[exporting, heads, ...]`, the second `[samples, heads, ...]`: on the rank of the first link, zero on
        the others, None without an initial state.
    """
    if not call.has_states:
        return start_grads, None
    hops, firsts = _Hops(call, start_grads.shape[1]), None
    if final_grad is not None:
        start_grads[-len(final_grad) :] = final_grad
    arrived = hops.out(start_grads)
    if call.chain.has_final:
        arrived, firsts = arrived[:, :-1], arrived[:, -1].sum(0)
    paths = link_paths(call, backward=True)
    states = fold(call.recurrence, transitions, arrived.flatten(0, 2), paths, firsts, backward=True)
    ends, initial = hops.back(states, backward=True)
    return ends, None if initial is None else initial * call.is_first


@lru_cache(maxsize=64)
def link_paths(call: ScanCall, *, backward: bool) -> Paths:
    """Return the paths of states through links, whose rows are `[ranks, slots, samples]`, flat.

    They store the states before this rank's waiting pieces, or with two hops those before all links, placed as the
    rows; then the final state of each sample if it is used. In backward, they store the gradients of the states after
    exporting pieces, and of initial states.
    """
    chain, samples = call.chain, len(call.chain.starts)
    rows = [(link.rank * chain.slots + link.slot) * samples for link in chain.links]
    numbers = call.pieces.exporting if backward else call.pieces.waiting
    own = [rows[call.own[number].link] + call.own[number].sample for number in numbers]
    places = range(chain.size * chain.slots * samples) if call.hops == 2 else own
    place_of = {row: place for place, row in enumerate(places)}
    links = range(len(rows))
    exports = [tuple(chain.exports(link, sample) for sample in range(samples)) for link in links]
    passing = [chain.passing(link) for link in links]
    enters, leaves = (exports, chain.continues) if backward else (chain.continues, exports)
    is_given, is_used = (chain.has_final, call.has_initial) if backward else (call.has_initial, chain.has_final)
    found = list[Path]()
    for sample in range(samples):
        path = Path((), (), first=sample if is_given else -1)
        for link in reversed(links) if backward else links:
            row = rows[link] + sample
            place = place_of.get(row, -1) if enters[link][sample] else -1
            if not passing[link][sample]:
                found.append(path._replace(after=place))
                path, place = Path((), ()), -1
            if leaves[link][sample]:
                path = path._replace(rows=(*path.rows, row), before=(*path.before, place))
        found.append(path._replace(after=len(places) + sample if is_used else -1))
    shortened = (path.shortened() for path in found)
    return Paths(tuple(path for path in shortened if path.after >= 0), len(places) + samples * is_used)


class _Hops:
    """The exchange of a call: to where states are folded, and back.

    Args:
        call: The call.
        heads: Independent parts of a state.
    """

    def __init__(self, call: ScanCall, heads: int) -> None:
        self._call, self._heads = call, heads
        self._comm, self._chain = call.comm, call.chain
        self._share = -(-heads // self._comm.size) if call.hops == 2 else heads

    def out(self, slots: Tensor) -> Tensor:
        """Return all ranks' slots, `[ranks, slots, samples, own heads, ...]`, given `[slots * samples, heads, ...]`."""
        slots = slots.unflatten(0, (-1, len(self._chain.starts)))
        if self._call.hops == 1:
            return self._call.gathered(slots)
        (arrived,) = self._comm.all_to_all(self._by_share(slots, 2).movedim(2, 0)).wait()
        return arrived

    def back(self, states: Tensor, *, backward: bool) -> tuple[Tensor, Tensor | None]:
        """Return the states of this rank's pieces, `[pieces, heads, ...]`, and those of samples that follow, or None.

        Args:
            states: What a fold by `link_paths` stored.
            backward: Whether the pieces are the exporting ones. Otherwise they are the waiting ones.
        """
        samples, own = len(self._chain.starts), self._call.pieces
        pieces = own.exporting if backward else own.waiting
        count = len(pieces) if self._call.hops == 1 else self._chain.size * self._chain.slots * samples
        further = states[count:] if len(states) > count else None
        if self._call.hops == 1:
            return states[:count], further
        slots = states[:count].unflatten(0, (self._chain.size, self._chain.slots, samples))
        if further is not None:
            slots = torch.cat([slots, further.expand(self._chain.size, 1, *further.shape)], 1)
        (arrived,) = self._comm.all_to_all(slots).wait()
        slots = arrived.movedim(0, 2).flatten(2, 3)[:, :, : self._heads]  # of [ranks of heads, slots, samples, share]
        on_device = self._call.places(states.device)
        places = on_device.exporting if backward else on_device.waiting
        return slots.flatten(0, 1).index_select(0, places), None if further is None else slots[-1]

    def own_heads(self, state: Tensor) -> Tensor:
        """Return the heads of `[samples, heads, ...]` that this rank folds."""
        return state if self._call.hops == 1 else self._by_share(state, 1)[:, self._comm.rank]

    def _by_share(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the tensor with heads, in dimension `dim`, as `[ranks, share]`; missing heads are zero."""
        missing = self._share * self._comm.size - self._heads
        if missing:
            shape = (*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :])
            tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim)
        split: Tensor = tensor.unflatten(dim, (self._comm.size, self._share))
        return split

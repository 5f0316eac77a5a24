"""Recurrences by Triton kernels, with long pieces cut into fragments that run at the same time.

A kernel passes a state from chunk to chunk in one program for some columns of a head. With one program for a whole
piece and few heads, most of a GPU would wait. Here each piece is cut at multiples of 64 tokens into fragments. First
the fragments compute their M and U, then a fold gives the state before each, then all compute their outputs from these.
In backward the same is done for gradients, from the last fragment to the first. The results are exact. Pieces of one
fragment that need no state and give none, such as short documents, have no M and U.
"""

from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from bmburst_ops.fragments import fragments
from bmburst_ops.linear.fold import fold
from bmburst_ops.linear.kernel import Inputs, Pieces, Recurrence, Slots
from bmburst_ops.linear.kinds import KINDS, Kind
from bmburst_ops.linear.paths import Paths, paths_after, paths_between
from bmburst_ops.linear.spans import Spans, all_fragments, chosen_spans, numbers_on


class Plan(NamedTuple):
    """How pieces are cut into fragments. Pieces that are cut, or whose states are used, are folded.

    Attributes:
        edges: Edges of all fragments, in tokens.
        folded: Number of folded pieces. Their fragments have M and U.
        places: Numbers of these fragments.
        by_piece: Edges of the folded pieces among these fragments.
        waiting: Numbers of the waiting pieces, among the folded ones.
        exporting: Likewise, of the exporting pieces.
        unread: Numbers of the fragments whose U nobody reads: the last ones of pieces that are not exporting.
        unread_matrices: Those whose M nobody reads: also the first ones of pieces that are neither.
        unread_gradients: Those whose gradient of the state before them nobody reads: the first ones of pieces that do
            not wait.
    """

    edges: tuple[int, ...]
    folded: int
    places: tuple[int, ...]
    by_piece: tuple[int, ...]
    waiting: tuple[int, ...]
    exporting: tuple[int, ...]
    unread: tuple[int, ...]
    unread_matrices: tuple[int, ...]
    unread_gradients: tuple[int, ...]


class FragmentScan:
    """See `bmburst_ops.linear.kernel.PreparedScan`.

    Args:
        recurrence: The recurrence.
        inputs: Its inputs.
        pieces: The pieces.
        tokens: Usual tokens of a fragment.
        kept: What `kept` returned after the forward pass; needed in backward.
    """

    def __init__(
        self, recurrence: Recurrence, inputs: Inputs, pieces: Pieces, tokens: int, kept: tuple[Tensor, ...] = ()
    ) -> None:
        self._recurrence, self._inputs, self._pieces = recurrence, inputs, pieces
        self._plan = make_plan(pieces, tokens)
        states = 2 if self._plan.folded else 0
        self._kept, self._factors = kept[:states], kept[states:]

    def summary(self, slots: Slots) -> Tensor:
        """See `PreparedScan.summary`."""
        recurrence = self._recurrence
        found = recurrence.new_summaries(self._inputs, slots.size)
        if slots.places:
            transitions, ends = recurrence.summary_views(self._inputs, found)
            paths = _paths_after(self._plan, slots, backward=False)
            fold(recurrence, *self._summaries, paths, out=ends, products=transitions)
        return found

    def forward(self, starts: Tensor) -> Tensor:
        """See `PreparedScan.forward`."""
        before, plan = None, self._plan
        if plan.folded:
            transitions, ends = self._summaries
            before = self._between(transitions, ends, starts, backward=False)
            self._kept = before, transitions
        return self._without_padding(self._kind.out(self._of_all(before))[0])

    def kept(self) -> tuple[Tensor, ...]:
        """See `PreparedScan.kept`: the states before folded fragments and their M, and the factors of all chunks."""
        return *self._kept, *self._kind.factors

    def start_gradients(self, grad_out: Tensor, slots: Slots) -> Tensor:
        """See `PreparedScan.start_gradients`."""
        self._grad_out = self._without_padding(grad_out.clone() if self._pieces.padding else grad_out)[None]
        self._before = self._of_all(self._kept[0] if self._kept else None)
        if not slots.places:
            return self._zeros(slots.size, *self._recurrence.state_shape(self._inputs))
        paths = _paths_after(self._plan, slots, backward=True)
        return fold(self._recurrence, self._kept[1], self._own_gradients, paths, backward=True)

    def backward(self, starts: Tensor, grad_out: Tensor, grad_ends: Tensor) -> Inputs:
        """See `PreparedScan.backward`. `start_gradients` was called with the gradient of the output."""
        del starts, grad_out
        after, plan = None, self._plan
        if plan.folded:
            after = self._between(self._kept[1], self._own_gradients, grad_ends, backward=True)
        grads = self._kind.gradients(self._before, self._grad_out, self._of_all(after))
        return tuple(self._without_padding(grad[0]) for grad in grads)

    def _between(self, transitions: Tensor, ends: Tensor, given: Tensor, *, backward: bool) -> Tensor:
        """Return the states before all folded fragments, in backward the gradients after them."""
        if len(given) == len(ends):
            return given  # a fragment a piece, and all of them wait
        return fold(
            self._recurrence, transitions, ends, _paths_between(self._plan, backward=backward), given, backward=backward
        )

    @cached_property
    def _kind(self) -> Kind:
        fragments = all_fragments(self._plan.edges, self._inputs[0].device)
        inputs = tuple(t[None] for t in self._inputs)
        return KINDS[self._recurrence.kind](self._recurrence, inputs, fragments, self._factors)

    def _spans(self, unread: tuple[int, ...]) -> Spans:
        """Return the fragments that have M and U; unread ones without tokens."""
        return chosen_spans(self._plan.edges, self._plan.places, self._inputs[0].device, unread)

    @cached_property
    def _summaries(self) -> tuple[Tensor, Tensor]:
        """M and U of the fragments that have them; where nobody reads them, the identity and zero."""
        return self._kind.summaries(self._spans(self._plan.unread), self._spans(self._plan.unread_matrices))

    @cached_property
    def _own_gradients(self) -> Tensor:
        """The gradients of the states before these fragments through their own outputs."""
        return self._kind.state_gradients(self._spans(self._plan.unread_gradients), self._grad_out)

    def _of_all(self, states: Tensor | None) -> Tensor | None:
        """Return the states of the fragments that have M and U among those of all fragments, zero for the others."""
        count = len(self._plan.edges) - 1
        if states is None or len(states) == count:
            return states
        places = numbers_on(states.device, self._plan.places)
        return self._zeros(count, *states.shape[1:]).index_copy_(0, places, states)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self._inputs[0].device)

    def _without_padding(self, tensor: Tensor) -> Tensor:
        """Set the rows of padding to zero, in place."""
        for number in self._pieces.padding:
            tensor[self._pieces.span(number)] = 0
        return tensor


@lru_cache(maxsize=64)
def make_plan(pieces: Pieces, tokens: int) -> Plan:
    """Return how pieces are cut into fragments of about `tokens` tokens."""
    edges, ends = fragments(pieces.edges, tokens)
    state_is_used = {*pieces.waiting, *pieces.exporting}
    folded = [n for n, (begin, end) in enumerate(pairwise(ends)) if end - begin > 1 or n in state_is_used]
    rank = {number: i for i, number in enumerate(folded)}
    firsts = {ends[n] for n in folded if n not in pieces.waiting}
    lasts = {ends[n + 1] - 1 for n in folded if n not in pieces.exporting}
    exported = {ends[n] for n in pieces.exporting}
    return Plan(
        edges=edges,
        folded=len(folded),
        places=tuple(at for n in folded for at in range(ends[n], ends[n + 1])),
        by_piece=tuple(accumulate((ends[n + 1] - ends[n] for n in folded), initial=0)),
        waiting=tuple(rank[number] for number in pieces.waiting),
        exporting=tuple(rank[number] for number in pieces.exporting),
        unread=tuple(sorted(lasts)),
        unread_matrices=tuple(sorted(lasts | firsts - exported)),
        unread_gradients=tuple(sorted(firsts)),
    )


@lru_cache(maxsize=64)
def _paths_between(plan: Plan, *, backward: bool) -> Paths:
    """Return the paths to the states before all folded fragments, backward to the gradients after them."""
    return paths_between(plan.by_piece, plan.exporting if backward else plan.waiting, backward=backward)


@lru_cache(maxsize=64)
def _paths_after(plan: Plan, slots: Slots, *, backward: bool) -> Paths:
    """Return the paths to the states after exporting pieces, backward to the gradients before waiting ones."""
    return paths_after(plan.by_piece, plan.waiting if backward else plan.exporting, *slots, backward=backward)

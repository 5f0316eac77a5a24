"""Recurrences by fla-core's kernels, with long pieces cut into fragments that run at the same time.

fla's training kernels pass a state from chunk to chunk of a piece in one program for some columns of a head. With few
heads, most of a GPU then waits. Here each piece is cut at multiples of 64 tokens into fragments. First the fragments
compute their M and U, then `fold_fragments` gives the state before each, then all compute their outputs from these. In
backward the same is done for gradients, from the last fragment to the first. The results are exact. Pieces of one
fragment that need no state and give none, such as short documents, have no M and U.
"""

import math
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmburst_ops.linear.fla_kinds import CHUNK, KINDS, Cut, fla_functions
from bmburst_ops.linear.fold import fold_fragments
from bmburst_ops.linear.kernel import Inputs, Pieces, Recurrence

_LEAST = 16 * CHUNK  # tokens of a fragment: shorter ones compute more summaries than they save
_PROGRAMS, _COLUMNS = 4, 64  # wanted programs for each multiprocessor; columns of a state in one program
_MOST_KEPT = 128 << 20  # bytes of states and M that a layer keeps for backward


def fragment_tokens(tokens: int, heads: int, value_dim: int, processors: int) -> int:
    """Return the tokens of a fragment: a multiple of 64, so few that all multiprocessors have work, at least 1,024."""
    fragments = _PROGRAMS * processors / (heads * math.ceil(value_dim / _COLUMNS))
    return max(_LEAST, CHUNK * math.ceil(tokens / max(1.0, fragments) / CHUNK))


class Plan(NamedTuple):
    """How pieces are cut into fragments. Pieces that are cut, or whose states are used, are folded.

    Attributes:
        edges: Edges of all fragments, in tokens.
        folded: Number of folded pieces. Their fragments have M and U.
        places: Numbers of these fragments.
        by_piece: Edges of the folded pieces among these fragments.
        waiting: Numbers of the waiting pieces, among the folded ones.
        exporting: Likewise, of the exporting pieces.
    """

    edges: tuple[int, ...]
    folded: int
    places: tuple[int, ...]
    by_piece: tuple[int, ...]
    waiting: tuple[int, ...]
    exporting: tuple[int, ...]


class FlaScan:
    """See `bmburst_ops.linear.kernel.PreparedScan`.

    Args:
        recurrence: The recurrence.
        inputs: Its inputs.
        pieces: The pieces.
        tokens: Tokens of a fragment, a multiple of 64.
        kept: What `kept` returned after the forward pass.
    """

    def __init__(
        self, recurrence: Recurrence, inputs: Inputs, pieces: Pieces, tokens: int, kept: tuple[Tensor, ...] = ()
    ) -> None:
        assert tokens % CHUNK == 0
        self._recurrence, self._inputs, self._pieces, self._kept = recurrence, inputs, pieces, kept
        self._plan = make_plan(pieces, tokens)

    def summary(self) -> tuple[Tensor, Tensor]:
        """See `PreparedScan.summary`."""
        heads, key_dim, value_dim = self._recurrence.state_shape(self._inputs)
        numbers = list(self._plan.exporting)
        if not numbers:
            transition = self._recurrence.transition_shape(self._inputs)
            return self._zeros(0, *transition), self._zeros(0, heads, key_dim, value_dim)
        firsts = self._zeros(self._plan.folded, heads, key_dim, value_dim + key_dim)
        firsts[..., value_dim:] = torch.eye(key_dim, device=firsts.device)
        _, lasts = fold_fragments(*self._summaries, firsts, self._plan.by_piece)
        ends, transitions = lasts[numbers].split([value_dim, key_dim], -1)
        return transitions if self._recurrence.is_delta else transitions[..., :1, :1], ends

    def forward(self, starts: Tensor) -> Tensor:
        """See `PreparedScan.forward`."""
        self._before = self._states(starts)
        return self._without_padding(self._kind.out(self._before)[0])

    def kept(self) -> tuple[Tensor, ...]:
        """See `PreparedScan.kept`."""
        if self._before is None:
            return ()
        transitions = self._summaries[0]
        if self._before.nbytes + transitions.nbytes > _MOST_KEPT:
            return ()
        return self._before, transitions.contiguous()

    def start_gradients(self, grad_out: Tensor) -> Tensor:
        """See `PreparedScan.start_gradients`."""
        self._grad_out = self._without_padding(grad_out.clone() if self._pieces.padding else grad_out)[None]
        numbers = list(self._plan.waiting)
        shape = self._recurrence.state_shape(self._inputs)
        if not numbers:
            return self._zeros(0, *shape)
        _, lasts = self._folded_back(self._zeros(self._plan.folded, *shape))
        return lasts[numbers]

    def backward(self, starts: Tensor, grad_out: Tensor, grad_ends: Tensor) -> Inputs:
        """See `PreparedScan.backward`."""
        del grad_out  # `start_gradients` was called with it
        after = None
        if self._plan.folded:
            firsts = self._zeros(self._plan.folded, *self._recurrence.state_shape(self._inputs))
            firsts[list(self._plan.exporting)] = grad_ends.float()
            after = self._of_all(self._folded_back(firsts)[0])
        before = self._kept[0] if self._kept else self._states(starts)
        dq, dk, *others = self._kind.gradients(before, self._grad_out, after)
        if self._recurrence.normalize:
            back = fla_functions().norm_bwd
            dq, dk = (back(y, norm, d) for (y, norm), d in zip(self._normed, (dq, dk), strict=True))
        return tuple(self._without_padding(grad[0]) for grad in (dq, dk, *others))

    @cached_property
    def _normed(self) -> tuple[tuple[Tensor, Any], ...]:
        """Queries and keys, and the reciprocals of their norms if they are normalized."""
        both = (t[None] for t in self._inputs[:2])
        return tuple(fla_functions().norm_fwd(t) if self._recurrence.normalize else (t, None) for t in both)

    @cached_property
    def _kind(self) -> Any:
        inputs = *(x for x, _ in self._normed), *(t[None] for t in self._inputs[2:])
        options = _options(self._plan.edges, inputs[0].device)
        return KINDS[self._recurrence.kind](inputs, self._recurrence.scale, options)

    @cached_property
    def _cut(self) -> Cut:
        """The fragments that have M and U."""
        return _cut(self._plan, self._inputs[0].device)

    @cached_property
    def _summaries(self) -> tuple[Tensor, Tensor]:
        """M and U of the fragments that have them."""
        found: tuple[Tensor, Tensor] = self._kind.summaries(self._cut)
        return found

    @cached_property
    def _own_gradients(self) -> Tensor:
        """The gradients of the states before these fragments through their own outputs."""
        found: Tensor = self._kind.state_gradients(self._cut, self._grad_out)
        return found

    def _folded_back(self, firsts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the states after these fragments, and of those before their pieces."""
        transitions = self._kept[1] if self._kept else self._summaries[0]
        return fold_fragments(transitions, self._own_gradients, firsts, self._plan.by_piece, backward=True)

    def _states(self, starts: Tensor) -> Tensor | None:
        """Return the state before each fragment; None if all are zero."""
        if not self._plan.folded:
            return None
        firsts = self._zeros(self._plan.folded, *self._recurrence.state_shape(self._inputs))
        firsts[list(self._plan.waiting)] = starts.float()
        return self._of_all(fold_fragments(*self._summaries, firsts, self._plan.by_piece)[0])

    def _of_all(self, states: Tensor) -> Tensor:
        """Return the states of the fragments that have M and U among those of all fragments, zero for the others."""
        count = len(self._plan.edges) - 1
        if len(states) == count:
            return states
        found = self._zeros(count, *states.shape[1:])
        found[list(self._plan.places)] = states
        return found

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self._inputs[0].device)

    def _without_padding(self, tensor: Tensor) -> Tensor:
        """Set the rows of padding to zero, in place."""
        for number in self._pieces.padding:
            tensor[self._pieces.span(number)] = 0
        return tensor


def fragments(edges: tuple[int, ...], tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the edges of all fragments in tokens, and the edges of the pieces in fragments."""
    found, by_piece = [0], [0]
    for begin, end in pairwise(edges):
        found += [*range(begin + tokens, end, tokens), end]
        by_piece.append(len(found) - 1)
    return tuple(found), tuple(by_piece)


@lru_cache(maxsize=64)
def make_plan(pieces: Pieces, tokens: int) -> Plan:
    """Return how pieces are cut into fragments of `tokens` tokens."""
    edges, ends = fragments(pieces.edges, tokens)
    state_is_used = {*pieces.waiting, *pieces.exporting}
    folded = [n for n, (begin, end) in enumerate(pairwise(ends)) if end - begin > 1 or n in state_is_used]
    rank = {number: i for i, number in enumerate(folded)}
    return Plan(
        edges=edges,
        folded=len(folded),
        places=tuple(at for n in folded for at in range(ends[n], ends[n + 1])),
        by_piece=tuple(accumulate((ends[n + 1] - ends[n] for n in folded), initial=0)),
        waiting=tuple(rank[number] for number in pieces.waiting),
        exporting=tuple(rank[number] for number in pieces.exporting),
    )


@lru_cache(maxsize=64)
def _cut(plan: Plan, device: torch.device) -> Cut:
    """Return the fragments of a plan that have M and U, in order."""
    spans: list[slice] = []
    own = [0]
    for at in plan.places:
        begin, end = plan.edges[at], plan.edges[at + 1]
        own.append(own[-1] + end - begin)
        if spans and spans[-1].stop == begin:
            spans[-1] = slice(spans[-1].start, end)
        else:
            spans.append(slice(begin, end))
    return Cut(tuple(spans), tuple(own), _options(tuple(own), device))


@lru_cache(maxsize=64)
def _options(edges: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """Return the arguments of fla's inner functions for the edges of fragments, without waiting for the device."""
    on_host = torch.tensor(edges, dtype=torch.int64)
    on_device = on_host.to(device)
    chunks = fla_functions().prepare_chunk_indices
    return {"cu_seqlens": on_device, "chunk_indices": chunks(on_device, CHUNK, cu_seqlens_cpu=on_host)}

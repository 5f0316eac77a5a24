"""Recurrences by fla-core's kernels, with long pieces cut into fragments that run at the same time.

fla's training kernels pass a state from chunk to chunk of a piece in one program for some columns of a head. With few
heads, most of a GPU then waits. Here each piece is cut at multiples of 64 tokens into fragments. First the fragments
compute their M and U, then `fold_fragments` gives the state before each, then all compute their outputs from these. In
backward the same is done for gradients, from the last fragment to the first. The results are exact. Pieces of one
fragment that need no state and give none, such as short documents, have no M and U.
"""

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

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
        self._edges, by_piece = fragments(pieces.edges, tokens)
        state_is_used = {*pieces.waiting, *pieces.exporting}
        self._folded = [n for n, (a, b) in enumerate(pairwise(by_piece)) if b - a > 1 or n in state_is_used]
        """Pieces whose fragments have M and U."""
        self._places = [at for n in self._folded for at in range(by_piece[n], by_piece[n + 1])]
        """Fragments of these pieces."""
        counts = [by_piece[n + 1] - by_piece[n] for n in self._folded]
        self._by_piece = tuple(sum(counts[:i]) for i in range(len(counts) + 1))
        self._cut = _cut(self._edges, tuple(self._places), inputs[0].device)

    def summary(self) -> tuple[Tensor, Tensor]:
        """See `PreparedScan.summary`."""
        heads, key_dim, value_dim = self._recurrence.state_shape(self._inputs)
        numbers = self._of_folded(self._pieces.exporting)
        if not numbers:
            transition = self._recurrence.transition_shape(self._inputs)
            return self._zeros(0, *transition), self._zeros(0, heads, key_dim, value_dim)
        firsts = self._zeros(len(self._folded), heads, key_dim, value_dim + key_dim)
        firsts[..., value_dim:] = torch.eye(key_dim, device=firsts.device)
        _, lasts = fold_fragments(*self._summaries, firsts, self._by_piece)
        ends, transitions = lasts[numbers].split([value_dim, key_dim], -1)
        return transitions if self._recurrence.is_delta else transitions[..., :1, :1], ends

    def forward(self, starts: Tensor) -> Tensor:
        """See `PreparedScan.forward`."""
        self._before = self._states(starts)
        return self._without_padding(self._kind.out(self._before)[0])

    def kept(self) -> tuple[Tensor, ...]:
        """See `PreparedScan.kept`."""
        if not self._folded or self._before is None:
            return ()
        found = (self._before, self._summaries[0].contiguous())
        return found if sum(t.nbytes for t in found) <= _MOST_KEPT else ()

    def start_gradients(self, grad_out: Tensor) -> Tensor:
        """See `PreparedScan.start_gradients`."""
        self._grad_out = self._without_padding(grad_out.clone())[None]
        numbers = self._of_folded(self._pieces.waiting)
        shape = self._recurrence.state_shape(self._inputs)
        if not numbers:
            return self._zeros(0, *shape)
        _, lasts = self._folded_back(self._zeros(len(self._folded), *shape))
        return lasts[numbers]

    def backward(self, starts: Tensor, grad_out: Tensor, grad_ends: Tensor) -> Inputs:
        """See `PreparedScan.backward`."""
        del grad_out  # `start_gradients` was called with it
        after = None
        if self._folded:
            firsts = self._zeros(len(self._folded), *self._recurrence.state_shape(self._inputs))
            firsts[self._of_folded(self._pieces.exporting)] = grad_ends.float()
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
        return KINDS[self._recurrence.kind](inputs, self._recurrence.scale, _options(self._edges, inputs[0].device))

    @cached_property
    def _summaries(self) -> tuple[Tensor, Tensor]:
        """M and U of the fragments of `_folded`."""
        found: tuple[Tensor, Tensor] = self._kind.summaries(self._cut)
        return found

    @cached_property
    def _own_gradients(self) -> Tensor:
        """The gradients of the states before these fragments through their own outputs."""
        found: Tensor = self._kind.state_gradients(self._cut, self._grad_out)
        return found

    def _folded_back(self, firsts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the states after these fragments, and of those before the pieces of `_folded`."""
        transitions = self._kept[1] if self._kept else self._summaries[0]
        return fold_fragments(transitions, self._own_gradients, firsts, self._by_piece, backward=True)

    def _states(self, starts: Tensor) -> Tensor | None:
        """Return the state before each fragment; None if all are zero."""
        if not self._folded:
            return None
        firsts = self._zeros(len(self._folded), *self._recurrence.state_shape(self._inputs))
        firsts[self._of_folded(self._pieces.waiting)] = starts.float()
        return self._of_all(fold_fragments(*self._summaries, firsts, self._by_piece)[0])

    def _of_all(self, states: Tensor) -> Tensor:
        """Return the states of the fragments of `_folded` among those of all fragments, zero for the others."""
        if len(self._places) == len(self._edges) - 1:
            return states
        found = self._zeros(len(self._edges) - 1, *states.shape[1:])
        found[self._places] = states
        return found

    def _of_folded(self, numbers: Sequence[int]) -> list[int]:
        """Return the places of pieces in `_folded`."""
        return [self._folded.index(number) for number in numbers]

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
def _cut(edges: tuple[int, ...], places: tuple[int, ...], device: torch.device) -> Cut:
    """Return some of the fragments with these edges, in order."""
    spans: list[slice] = []
    own = [0]
    for at in places:
        begin, end = edges[at], edges[at + 1]
        own.append(own[-1] + end - begin)
        if spans and spans[-1].stop == begin:
            spans[-1] = slice(spans[-1].start, end)
        else:
            spans.append(slice(begin, end))
    return Cut(tuple(spans), tuple(own), _options(tuple(own), device) if places else {})


@lru_cache(maxsize=64)
def _options(edges: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """Return the arguments of fla's inner functions for the edges of fragments, without waiting for the device."""
    on_host = torch.tensor(edges, dtype=torch.int64)
    on_device = on_host.to(device)
    chunks = fla_functions().prepare_chunk_indices
    return {"cu_seqlens": on_device, "chunk_indices": chunks(on_device, CHUNK, cu_seqlens_cpu=on_host)}

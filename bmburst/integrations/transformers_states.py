"""A scope in which the functions of a recurrent layer compute over the ranks, and its states in a cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from bmburst.comm.checks import CheckedCommunicator
from bmburst.integrations.transformers_attention import SequenceMask
from bmburst.schedule.mask import Causal


@dataclass(slots=True)
class Scope:
    """A call of a mixer on a split batch, or on tokens that every rank has.

    Attributes:
        split: The batch; or a group of this rank alone, if it has all tokens.
        state: The layer of a cache, of transformers' `LinearAttentionLayer`, whose states the tokens continue and set.
        had_state: Whether there were tokens before these.
        scans: Number of recurrences in the call, whose states are stacked in dimension 1; 0: one, with its own state.
        ends: The last states of the recurrences so far, if they are stacked.
        used: The functions that were called.
    """

    split: SequenceMask | CheckedCommunicator
    state: Any = None
    had_state: bool = False
    scans: int = 0
    ends: list[Tensor] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def of_convolution(self) -> dict[str, Any]:
        """Return the arguments of a convolution that say how the sequence is split and what precedes it."""
        tail = self.state.conv_states[0][..., 1:].mT if self.had_state else None  # `[batch, width - 1, channels]`
        return self._of_sequence() | {"initial_state": tail}

    def of_recurrence(self) -> dict[str, Any]:
        """Return the arguments of a recurrence that say how the sequence is split and what precedes it."""
        state = self.state.recurrent_states[0] if self.had_state else None
        if state is not None and self.scans:
            state = state[:, len(self.ends)]
        return self._of_sequence() | {"initial_state": state}

    def _of_sequence(self) -> dict[str, Any]:
        split, final = self.split, {"final_state": self.state is not None}
        if not isinstance(split, SequenceMask):
            return final | {"layout": "contiguous", "group": split}
        documents = split.documents[0] if len(split.documents) == 1 else split.documents
        length = None if split.documents else split.length  # documents include their length
        of_batch = {"mask": documents or Causal(), "length": length, "layout": split.options.layout}
        return final | of_batch | {"group": split.comm}

    def convolved(self, found: Any) -> Tensor:
        """Keep the last tokens, if there is a cache, and return the output of a convolution."""
        if self.state is None:
            return cast(Tensor, found)
        out, tail = found
        kept = functional.pad(tail.mT, (1, 0))  # transformers keeps one token more, which no later output reads
        if not self.state.is_conv_states_initialized[0]:
            self.state.lazy_initialization(conv_states=kept, conv_kernel_size=kept.shape[-1])
        self.state.conv_states[0].copy_(kept)
        self.state.has_previous_state[0] = True  # read by the next call
        return cast(Tensor, out)

    def scanned(self, found: Any) -> Tensor:
        """Keep the final state, if there is a cache, and return the output of a recurrence."""
        if self.state is None:
            return cast(Tensor, found)
        self.ends.append(found[1])
        if len(self.ends) == max(1, self.scans):
            self.state.update_recurrent_state(torch.stack(self.ends, 1) if self.scans else found[1])
            self.state.has_previous_state[0] = True
        return cast(Tensor, found[0])

    def begins(self, tokens: Tensor) -> Tensor:
        """Return which of the local tokens `[batch, local_tokens, ...]` are the first of a document.

        `[batch or 1, local_tokens]` bool. No token is, behind those whose states are kept.
        """
        if self.had_state:
            return torch.zeros(1, tokens.shape[1], dtype=torch.bool, device=tokens.device)
        if isinstance(self.split, SequenceMask):
            return self.split.places() == 0
        return (torch.arange(tokens.shape[1], device=tokens.device) == 0)[None]


SCOPE: ContextVar[Scope | None] = ContextVar("bmburst_mixer", default=None)
"""The call of a mixer that is computed at present."""


@contextmanager
def opened(split: SequenceMask | CheckedCommunicator, state: Any = None, scans: int = 0) -> Iterator[Scope]:
    """Open a scope for the call of a mixer."""
    scope = Scope(split, state, state is not None and bool(state.has_previous_state[0]), scans)
    token = SCOPE.set(scope)
    try:
        yield scope
    finally:
        SCOPE.reset(token)

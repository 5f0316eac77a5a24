"""Watches attention's forward passes, whoever runs them."""

from collections.abc import Callable

import pytest
from torch import Tensor

from bmburst.attention import api
from bmburst.attention.call import AttentionCall, Executor
from bmburst_ops.flash import Partial

Seen = Callable[[AttentionCall, tuple[Tensor, ...], bool], object]
"""Takes the call that runs, its inputs, and whether it is the whole attention: a prefix is another call."""


def watch_forward(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    """Call `seen` before each forward pass of attention, one that is computed again too."""
    executor_of = api.executor_of

    def watching(call: AttentionCall) -> Executor:
        real = executor_of(call)

        def forward(ran: AttentionCall, *inputs: Tensor) -> Partial:
            seen(ran, inputs, ran is call)
            return real.forward(ran, *inputs)

        return Executor(forward, real.backward)

    monkeypatch.setattr(api, "executor_of", watching)


def count_forward(monkeypatch: pytest.MonkeyPatch, seen: Callable[[AttentionCall], object]) -> None:
    """Call `seen` before each forward pass of a whole attention."""
    watch_forward(monkeypatch, lambda ran, _, is_whole: is_whole and seen(ran))

"""Counts how often attention runs forward, whoever runs it."""

from collections.abc import Callable

import pytest
from torch import Tensor

from bmburst.attention import api
from bmburst.attention.call import AttentionCall, Executor
from bmburst_ops.flash import Partial


def count_forward(monkeypatch: pytest.MonkeyPatch, seen: Callable[[AttentionCall], object]) -> None:
    """Call `seen` before each forward pass of a whole attention, one that is computed again too."""
    executor_of = api.executor_of

    def counting(call: AttentionCall) -> Executor:
        real = executor_of(call)

        def forward(ran: AttentionCall, *inputs: Tensor) -> Partial:
            if ran is call:  # a prefix that is computed again is another call
                seen(ran)
            return real.forward(ran, *inputs)

        return Executor(forward, real.backward)

    monkeypatch.setattr(api, "executor_of", counting)

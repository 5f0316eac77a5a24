"""Activation checkpointing that never runs attention twice.

A block's activations are dropped after forward and computed again in backward, except what attention gave: its output
and log-sum-exp are kept, so that the recomputation sends nothing over the ring. They are kept by the one call of
`checkpoint` that made them, in no table: two models, several microbatches in flight, an exception in between, or a
forward that never sees a backward cannot mix them up, and under no_grad nothing is kept.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from bmburst.errors import unknown

POLICIES = ("none", "block", "block-keep-attention")
"""What is computed again in backward: nothing, the whole block, or the block without its attention."""


def checkpoint(policy: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)` and compute its activations again in backward, by policy.

    Args:
        policy: One of `POLICIES`. Memory a call keeps until its backward: "block", its inputs; "block-keep-attention",
            also attention's output and log-sum-exp, `batch * tokens * heads * (head_dim * itemsize + 4)` bytes.
        function: Deterministic; called once in forward, and once in backward unless the policy is "none".
        args: Its positional arguments.

    Raises:
        UserError: The policy is unknown.
    """
    if policy not in POLICIES:
        raise unknown("recompute policy", policy, POLICIES)
    if policy == "none":
        return function(*args)
    contexts = _keep_attention if policy == "block-keep-attention" else _keep_nothing
    return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def keep(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return `compute()`; in the recomputation of a checkpoint that keeps results, what it gave the first time.

    Calls are matched by their order within the checkpointed function.
    """
    tape = _tape.get()
    return compute() if tape is None else tape.next(compute)


class _Tape:
    """Results of one checkpointed call, in order."""

    def __init__(self) -> None:
        self._results: list[tuple[Tensor, ...]] = []
        self._position = 0
        self._playing = False

    def next(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if not self._playing:
            results = compute()
            self._results.append(tuple(t.detach() for t in results))
            return results
        self._position += 1
        # Fresh views: autograd attaches the recomputed graph to what is returned here, not to the first graph's output.
        return tuple(t.detach() for t in self._results[self._position - 1])

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self._current():
            yield

    @contextmanager
    def playing(self) -> Iterator[None]:
        self._playing, self._position = True, 0
        with self._current():
            yield

    @contextmanager
    def _current(self) -> Iterator[None]:
        token = _tape.set(self)
        try:
            yield
        finally:
            _tape.reset(token)


def _keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    tape = _Tape()
    return tape.recording(), tape.playing()


@contextmanager
def _without_tape() -> Iterator[None]:
    token = _tape.set(None)
    try:
        yield
    finally:
        _tape.reset(token)


def _keep_nothing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _without_tape()


_tape: ContextVar[_Tape | None] = ContextVar("bmburst_tape", default=None)

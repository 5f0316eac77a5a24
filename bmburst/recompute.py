"""Activation checkpointing that never runs attention twice.

A block's activations are dropped after forward and computed again in backward, except what attention gave: its output
and log-sum-exp are kept, so that the recomputation sends nothing over the ring. They are kept by the one call of
`checkpoint` that made them, in no table: two models, several microbatches in flight, an exception in between, or a
forward that never sees a backward cannot mix them up, and under no_grad nothing is kept.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from bmburst.errors import require_known
from bmburst.mesh import current_mesh, using_mesh

POLICIES = ("none", "block", "block-keep-attention")
"""What is computed again in backward: nothing, the whole block, or the block without its attention."""

Results = tuple[Tensor, ...]


def checkpoint(policy: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)` and compute its activations again in backward, by policy.

    Args:
        policy: One of `POLICIES`. Memory a call keeps until its backward: "block", its inputs; "block-keep-attention",
            also attention's output and log-sum-exp, `batch * tokens * heads * (head_dim * itemsize + 4)` bytes.
        function: Deterministic; called once in forward, and once in each backward unless the policy is "none". It must
            not change attention's output in place.
        args: Its positional arguments.

    Raises:
        UserError: The policy is unknown.
    """
    require_known("recompute policy", policy, POLICIES)
    if policy == "none":
        return function(*args)
    contexts = _keeping_attention if policy == "block-keep-attention" else _keeping_nothing
    return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def keep(compute: Callable[[], Results]) -> Results:
    """Return `compute()`; in the recomputation of a checkpoint that keeps results, what it gave the first time.

    Calls are matched by their order within the checkpointed function.
    """
    tape = _tape.get()
    return compute() if tape is None else tape.next(compute)


class _Tape:
    """Results of one checkpointed call, in order; results that a checkpoint around it keeps are taken from there."""

    def __init__(self) -> None:
        self._outer = _tape.get()
        self._results: list[tuple[Results, list[int]]] = []
        self._position: int | None = None  # None: recording

    def rewind(self) -> None:
        """Give out the results from the first on, from now on."""
        self._position = 0

    def next(self, compute: Callable[[], Results]) -> Results:
        """Return the results of the next call."""
        if self._position is None:
            results = compute() if self._outer is None else self._outer.next(compute)
            self._results.append((tuple(t.detach() for t in results), [t._version for t in results]))
            return results
        results, versions = self._results[self._position]
        self._position += 1
        if [t._version for t in results] != versions:
            raise RuntimeError(
                "attention's output was changed in place, but the recompute policy 'block-keep-attention' keeps it\n"
                "change a copy, or use the policy 'block'"
            )
        # Fresh views: autograd attaches the recomputed graph to what is returned here, not to the first graph's output.
        return tuple(t.detach() for t in results)


class _Recomputation(AbstractContextManager[None]):
    """What a recomputation runs in: the mesh of the forward, and its tape from the beginning. Entered at each backward.

    Backward may run in a thread of autograd's, or after the block that made the mesh current.
    """

    def __init__(self, tape: _Tape | None) -> None:
        self._tape, self._mesh, self._entered = tape, current_mesh(), ExitStack()

    def __enter__(self) -> None:
        if self._tape is not None:
            self._tape.rewind()
        self._entered.enter_context(_using_tape(self._tape))
        self._entered.enter_context(using_mesh(self._mesh))

    def __exit__(self, *_: object) -> None:
        self._entered.close()


def _keeping_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    tape = _Tape()
    return _using_tape(tape), _Recomputation(tape)


def _keeping_nothing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _Recomputation(None)


@contextmanager
def _using_tape(tape: _Tape | None) -> Iterator[None]:
    token = _tape.set(tape)
    try:
        yield
    finally:
        _tape.reset(token)


_tape: ContextVar[_Tape | None] = ContextVar("bmburst_tape", default=None)

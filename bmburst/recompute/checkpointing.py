"""Activation checkpointing that never runs attention twice.

A block's activations are dropped after forward and computed again in backward, except what attention gave: its output
and log-sum-exp are kept, so that the recomputation sends nothing over the ring. They are kept by the one call of
`checkpoint` that made them, in no table: two models, several microbatches in flight, an exception in between, or a
forward that never sees a backward cannot mix them up, and under no_grad nothing is kept.

`bmburst.recompute.policy` has the policies, and what each costs in memory and time.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from bmburst.errors import UserError
from bmburst.mesh import current_mesh, using_mesh
from bmburst.recompute.host_store import Deposit, HostStore
from bmburst.recompute.policy import POLICIES, Policy

__all__ = ["POLICIES", "Part", "checkpoint", "is_recomputing", "keep"]

Results = tuple[Tensor, ...]


class Part(Protocol):
    """Results of which an end is kept, and the beginning computed again."""

    def end(self, results: Results) -> Results:
        """Return what is to be kept, in memory of its own."""
        ...

    def whole(self, end: Results) -> Results:
        """Return the results again, of what was kept."""
        ...


MakePart = Callable[[float], Part] | None
"""Returns how such a part of some results is kept, counted from their end; None: they have no parts."""


def checkpoint(policy: str | Policy, function: Callable[..., Any], *args: Any, store: HostStore | None = None) -> Any:
    """Call `function(*args)` and compute its activations again in backward, by policy.

    Args:
        policy: One of `bmburst.recompute.policy`, which says what a call keeps until its backward. "block": its
            inputs; "block-keep-attention": also attention's output and log-sum-exp, `batch * tokens * heads *
            (head_dim * itemsize + 4)` bytes, of which "block-keep-attention:0.5" keeps the half of the sequence's end;
            with "+offload" the inputs that need a gradient, with "+offload-all" all of it, lie in host memory.
            A call is one layer: "+first-20" is a model's, whose layers get theirs of `Policy.of_layers`.
        function: Deterministic; called once in forward, and once in each backward unless the policy is "none". It must
            not change attention's output in place.
        args: Its positional arguments.
        store: Where an offload goes. Calls that follow each other share one, so that a backward sends for the tensors
            of the next; by default the call has its own.

    Raises:
        UserError: The policy is unknown or a whole model's, or it keeps a part of attention where layout or mask have
            no such part.
    """
    chosen = policy if isinstance(policy, Policy) else Policy.parse(policy)
    if chosen.layers is not None:
        whole = replace(chosen, layers=None).name
        raise UserError(
            f"recompute policy '{chosen.name}' is for the layers of a model, and one call does not know which it is\n"
            f"fix: {whole}, or for layer i Policy.parse('{chosen.name}').of_layers(number of layers)[i]"
        )
    if not chosen.recomputes or not torch.is_grad_enabled():
        return function(*args)
    deposit, call, given = None, function, args
    if chosen.offload != "nothing":
        deposit = (HostStore() if store is None else store).deposit()
        call = _FromHost(function, args, deposit)
        given = call.placeholders
    tape = partial(_Tape, chosen, deposit) if chosen.attention else None
    contexts = partial(_contexts, function, tape)
    return torch_checkpoint(call, *given, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def keep(compute: Callable[[], Results], part: MakePart = None) -> Results:
    """Return `compute()`; in the recomputation of a checkpoint that keeps results, what it gave the first time.

    Calls are matched by their order within the checkpointed function.

    Args:
        compute: The work.
        part: Returns how to keep such a part of the results, counted from their end. Default: they have no parts, and
            are kept whole.
    """
    tape = _tape.get()
    return compute() if tape is None else tape.next(compute, part)


def is_recomputing(function: Callable[..., Any]) -> bool:
    """Whether this is the second call of a function that was itself given to `checkpoint`, for its backward.

    Then nothing that it returns is used: it may leave out what only its result needs.
    """
    return _again.get() == function


class _FromHost:
    """A function whose tensors that need a gradient come from host memory when it is called again."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], deposit: Deposit) -> None:
        self._function, self._deposit = function, deposit
        self._first: dict[int, Tensor] | None = {
            i: arg for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.requires_grad
        }
        self._numbers = {i: deposit.put(tensor) for i, tensor in self._first.items()}
        # torch keeps what it is given.
        self.placeholders = tuple(arg.new_empty(0) if i in self._first else arg for i, arg in enumerate(args))

    def __call__(self, *args: Any) -> Any:
        tensors, self._first = self._first, None
        if tensors is None:
            self._deposit.begin()
            tensors = {i: self._deposit.get(number).requires_grad_() for i, number in self._numbers.items()}
        return self._function(*(tensors.pop(i, arg) for i, arg in enumerate(args)))


class _Kept:
    """Results of one call: where they are, and how they are had again."""

    def __init__(self, results: Results, policy: Policy, part: MakePart, deposit: Deposit | None) -> None:
        self._fraction, self._deposit = policy.attention, deposit if policy.offload == "all" else None
        if part is None or self._fraction == 1:
            held = tuple(t.detach() for t in results)
        else:
            held = part(self._fraction).end(results)
        if self._deposit is None:
            self._held, self._versions = held, [t._version for t in held]
        else:
            self._numbers = [self._deposit.put(t) for t in held]

    def again(self, part: MakePart) -> Results:
        """Return the results of the first time."""
        if self._deposit is None:
            held = self._held
            if [t._version for t in held] != self._versions:
                raise RuntimeError(
                    "attention's output was changed in place, but recompute policy 'block-keep-attention' keeps it\n"
                    "change a copy, or use the policy 'block'"
                )
        else:
            held = tuple(self._deposit.get(number) for number in self._numbers)
        if part is not None and self._fraction < 1:
            return part(self._fraction).whole(held)
        # Fresh views: autograd attaches the recomputed graph to what is returned here, not to the first graph's output.
        return tuple(t.detach() for t in held)


class _Tape:
    """Results of one checkpointed call, in order; results that a checkpoint around it keeps are taken from there."""

    def __init__(self, policy: Policy, deposit: Deposit | None) -> None:
        self._policy, self._deposit, self._outer = policy, deposit, _tape.get()
        self._results: list[_Kept] = []
        self._position: int | None = None  # None: recording

    def rewind(self) -> None:
        """Give out the results from the first on, from now on."""
        self._position = 0

    def next(self, compute: Callable[[], Results], part: MakePart) -> Results:
        """Return the results of the next call."""
        if self._position is None:
            results = compute() if self._outer is None else self._outer.next(compute, part)
            self._results.append(_Kept(results, self._policy, part, self._deposit))
            return results
        self._position += 1
        return self._results[self._position - 1].again(part)


class _Recomputation(AbstractContextManager[None]):
    """What a recomputation runs in: the mesh of the forward, and its tape from the beginning. Entered at each backward.

    Backward may run in a thread of autograd's, or after the block that made the mesh current.
    """

    def __init__(self, function: Callable[..., Any], tape: _Tape | None) -> None:
        self._function, self._tape, self._mesh, self._entered = function, tape, current_mesh(), ExitStack()

    def __enter__(self) -> None:
        if self._tape is not None:
            self._tape.rewind()
        self._entered.enter_context(_running(self._tape, self._function))
        self._entered.enter_context(using_mesh(self._mesh))

    def __exit__(self, *_: object) -> None:
        self._entered.close()


def _contexts(
    function: Callable[..., Any], make_tape: Callable[[], _Tape] | None
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what a call runs in, and its recomputation."""
    tape = None if make_tape is None else make_tape()
    first = _running(_tape.get() if tape is None else tape, None)
    return first, _Recomputation(function, tape)


@contextmanager
def _running(tape: _Tape | None, again: Callable[..., Any] | None) -> Iterator[None]:
    tokens = _tape.set(tape), _again.set(again)
    try:
        yield
    finally:
        _tape.reset(tokens[0])
        _again.reset(tokens[1])


_tape: ContextVar[_Tape | None] = ContextVar("bmburst_tape", default=None)
_again: ContextVar[Callable[..., Any] | None] = ContextVar("bmburst_again", default=None)

"""Activation checkpointing that saves attention's results and recomputes the other activations: `checkpoint`.

A block's activations are dropped after forward and recomputed in backward. Attention's output and log-sum-exp are
saved, so that the recompute does not communicate. Each call of `checkpoint` owns its saved tensors; there is no global
table. So results cannot be mixed up between two models, between micro-batches in flight, after an exception, or by a
forward without a backward. Under no_grad nothing is saved.

`bmburst.recompute.policy` defines the policies and their cost in memory and time.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from bmburst.errors import UserError
from bmburst.mesh import current_mesh, using_mesh
from bmburst.recompute.host_store import HostStore, OffloadGroup
from bmburst.recompute.policy import Policy

__all__ = [
    *("PrefixRecompute", "Recomputation", "Tape"),
    *("checkpoint", "is_keeping", "is_recomputing", "keep", "recording"),
]

Results = tuple[Tensor, ...]


class PrefixRecompute(Protocol):
    """Results whose last tokens are saved and whose first tokens are recomputed."""

    def end(self, results: Results) -> Results:
        """Return a copy of the results of the last tokens."""
        ...

    def whole(self, end: Results) -> Results:
        """Return the results of all tokens, from those of the last tokens that `end` returned."""
        ...


MakePrefix = Callable[[float], PrefixRecompute] | None
"""Maps the fraction of tokens to save, counted from the end, to a `PrefixRecompute`; None: save all or nothing."""


def checkpoint(policy: str | Policy, function: Callable[..., Any], *args: Any, store: HostStore | None = None) -> Any:
    """Call `function(*args)` and recompute its activations in backward according to a policy.

    Args:
        policy: What the call saves until its backward; see `bmburst.recompute.policy`. "block" saves its inputs.
            "block-keep-attention" also saves attention's output and log-sum-exp, `batch * tokens * heads * (head_dim *
            itemsize + 4)` bytes; "block-keep-attention:0.5" saves them for the second half of the sequence. "+offload"
            offloads the inputs that require a gradient to host memory, "+offload-all" all saved tensors. A call is one
            layer, so options of a whole model such as "+first-20" raise an error; use `Policy.of_layers`.
        function: A deterministic function. It is called once in forward, and once in each backward unless the policy is
            "none". It must not change attention's output in place.
        args: Its positional arguments.
        store: Host memory for offloaded tensors. Share one among consecutive layers, so that the backward of a layer
            prefetches the tensors of the preceding layer. Default: a separate store for this call.

    Raises:
        UserError: The policy is unknown or for a whole model, or the layout or the mask does not allow saving a
            fraction of attention.
    """
    chosen = Policy.parse(policy)
    if chosen.is_of_model:
        whole = Policy(recomputes=chosen.recomputes, attention=chosen.attention, offload=chosen.offload).name
        raise UserError(
            f"recompute policy '{chosen.name}' is for the layers of a model, but one call does not know its layer\n"
            f"fix: {whole}, or for layer i Policy.parse('{chosen.name}').of_layers(number of layers)[i]"
        )
    if not chosen.recomputes or not torch.is_grad_enabled():
        return function(*args)
    group, call, given = None, function, args
    if chosen.offload != "nothing":
        group = (HostStore() if store is None else store).new_group()
        call = _FromHost(function, args, group)
        given = call.placeholders
    tape = partial(Tape, chosen, group) if chosen.attention else None
    contexts = partial(_contexts, function, tape)
    return torch_checkpoint(call, *given, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def keep(compute: Callable[[], Results], part: MakePrefix = None) -> Results:
    """Return `compute()`. In the recompute of a checkpoint that saves results, return the saved results instead.

    Calls are matched by their order within the checkpointed function.

    Args:
        compute: The function whose results are saved.
        part: Returns how to save a fraction of the results, see `MakePrefix`. Default: the results are saved
            completely.
    """
    tape = _tape.get()
    return compute() if tape is None else tape.next(compute, part)


def is_keeping() -> bool:
    """Return whether `keep` saves results or returns saved ones here. They must then not be changed in place."""
    return _tape.get() is not None


def is_recomputing(function: Callable[..., Any]) -> bool:
    """Return whether backward is recomputing `function`, which was passed to `checkpoint`.

    The return value is then unused, so the function may skip work that only the return value needs.
    """
    return _again.get() == function


class _FromHost:
    """A function with offloaded inputs: the second call reads inputs that require a gradient from host memory."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], group: OffloadGroup) -> None:
        self._function, self._group = function, group
        self._first: dict[int, Tensor] | None = {
            i: arg for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.requires_grad
        }
        self._numbers = {i: group.put(tensor) for i, tensor in self._first.items()}
        # torch's checkpoint saves its arguments: it gets empty tensors instead of the offloaded ones.
        self.placeholders = tuple(arg.new_empty(0) if i in self._first else arg for i, arg in enumerate(args))

    def __call__(self, *args: Any) -> Any:
        tensors, self._first = self._first, None
        if tensors is None:
            self._group.begin()
            tensors = {i: self._group.get(number).requires_grad_() for i, number in self._numbers.items()}
        return self._function(*(tensors.pop(i, arg) for i, arg in enumerate(args)))


class _SavedResults:
    """Saved results of one call, on the GPU or in host memory."""

    def __init__(self, results: Results, policy: Policy, part: MakePrefix, group: OffloadGroup | None) -> None:
        self._fraction, self._group = policy.attention, group if policy.offload == "all" else None
        if part is None or self._fraction == 1:
            held = tuple(t.detach() for t in results)
        else:
            held = part(self._fraction).end(results)
        self._held: Results | None = None
        if self._group is None:
            self._held, self._versions = held, [t._version for t in held]
        else:
            self._numbers = [self._group.put(t) for t in held]

    def give_up(self) -> Results:
        """See `Tape.give_up`."""
        if self._group is not None:
            return ()
        held, self._held = self._held, None
        assert held is not None
        return held

    def hold(self, tensors: Iterator[Tensor]) -> None:
        """See `Tape.hold`."""
        if self._group is None:
            self._held = tuple(next(tensors) for _ in self._versions)

    def again(self, part: MakePrefix) -> Results:
        """Return the results of the first call."""
        if self._group is None:
            held = self._held
            assert held is not None
            if [t._version for t in held] != self._versions:
                raise RuntimeError(
                    "attention's output was changed in place, but recompute policy 'block-keep-attention' keeps it\n"
                    "change a copy, or use the policy 'block'"
                )
        else:
            held = tuple(self._group.get(number) for number in self._numbers)
        if part is not None and self._fraction < 1:
            return part(self._fraction).whole(held)
        # New views: autograd must attach the recomputed graph to them, not to the output of the first graph.
        return tuple(t.detach() for t in held)


class Tape:
    """Saved results of one checkpointed call, in order. A nested checkpoint replays results of the outer one.

    Args:
        policy: Determines which results are saved, and where.
        group: Host memory of the call, if the policy offloads.
        replays_once: Whether each result is freed when it is replayed.
    """

    def __init__(self, policy: Policy, group: OffloadGroup | None, *, replays_once: bool = False) -> None:
        self._policy, self._group, self._outer, self._once = policy, group, _tape.get(), replays_once
        self._results: list[_SavedResults | None] = []
        self._position: int | None = None  # None while results are recorded

    def give_up(self) -> Results:
        """Return the saved tensors that are on the device, and drop the references to them; `hold` restores them."""
        return tuple(tensor for saved in self._results if saved is not None for tensor in saved.give_up())

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Hold the tensors that `give_up` returned, until the next `give_up`."""
        rest = iter(tensors)
        for saved in self._results:
            if saved is not None:
                saved.hold(rest)

    def rewind(self) -> None:
        """Switch to replay, starting at the first result."""
        self._position = 0

    def next(self, compute: Callable[[], Results], part: MakePrefix) -> Results:
        """Record the results of the next call, or replay them."""
        if self._position is None:
            results = compute() if self._outer is None else self._outer.next(compute, part)
            self._results.append(_SavedResults(results, self._policy, part, self._group))
            return results
        self._position += 1
        saved = self._results[self._position - 1]
        assert saved is not None, "a tape that replays once is replayed again"
        if self._once:
            self._results[self._position - 1] = None
        return saved.again(part)


class Recomputation(AbstractContextManager[None]):
    """The context of a recompute: sets the mesh of the forward pass and replays its tape. Each backward enters it.

    The mesh must be set again, because backward may run in an autograd thread, or after the `with` block of the mesh.
    """

    def __init__(self, function: Callable[..., Any], tape: Tape | None) -> None:
        self._function, self._tape, self._mesh, self._entered = function, tape, current_mesh(), ExitStack()

    def __enter__(self) -> None:
        if self._tape is not None:
            self._tape.rewind()
        self._entered.enter_context(_running(self._tape, self._function))
        self._entered.enter_context(using_mesh(self._mesh))

    def __exit__(self, *_: object) -> None:
        self._entered.close()


def _contexts(
    function: Callable[..., Any], make_tape: Callable[[], Tape] | None
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the context managers of a call and of its recompute."""
    tape = None if make_tape is None else make_tape()
    first = _running(_tape.get() if tape is None else tape, None)
    return first, Recomputation(function, tape)


def recording(tape: Tape) -> AbstractContextManager[None]:
    """Return a context in which `keep` records results on a tape, or replays them if the tape was rewound."""
    return _running(tape, _again.get())


@contextmanager
def _running(tape: Tape | None, again: Callable[..., Any] | None) -> Iterator[None]:
    tokens = _tape.set(tape), _again.set(again)
    try:
        yield
    finally:
        _tape.reset(tokens[0])
        _again.reset(tokens[1])


_tape: ContextVar[Tape | None] = ContextVar("bmburst_tape", default=None)
_again: ContextVar[Callable[..., Any] | None] = ContextVar("bmburst_again", default=None)

"""The kernels of a block between its exchanges, as CUDA graphs: for short sequences, where the host bounds a step.

A block that recomputes nothing is two parts around attention: from the residual stream to queries, keys and values, and
from attention's output to the next residual stream. A part is a function of tensors and of parameters of the block. It
has one graph of its forward and one of its backward pass, which the host launches in the time of one kernel. Attention
and the transfers of ZeRO run between them, as they do without graphs.

A graph reads and writes fixed memory. Inputs are copied to it, unless they are results of another part. Weights and
gradients must be in place (`GatherMemory.stays`). A part that finds them elsewhere runs without its graph. A pass runs
without graphs if its shapes are others than those of the first passes, under autocast, and while another one waits for
its backward pass: activations are in memory that all passes share. A block with hooks runs without graphs.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from bmburst.comm.streams import captured, free_nbytes, is_capturing
from bmburst_ops.errors import KernelError, first_order
from bmburst_ops.linears import gradient_memory

if TYPE_CHECKING:
    from bmburst.blocks.gathering import GatherMemory

PartFunction = Callable[..., tuple[Tensor, ...]]
"""Maps the inputs of a part to its results."""

PASSES = 2
"""Passes before parts are captured. They compile the kernels, and show how much memory a pass needs."""
_MORE = 1.0  # times the activations of a pass: graphs of llama-3-8b on 2 H200s keep 0.6 to 0.9 beside them
_SPARE = 1 << 30  # bytes


class BlockGraphs:
    """What the parts of a model share: stream, memory and addresses of their graphs.

    Args:
        weights: Memory of the weights and gradients that the graphs read and write.
        cuda: `torch.cuda`, or what stands in for it.

    Attributes:
        captures: Whether this forward pass captures its parts. Only one does: it frees activations in backward. Those
            of a part that is captured later would be where other parts have theirs.
    """

    def __init__(self, weights: "GatherMemory", cuda: Any = torch.cuda) -> None:
        self._cuda, self._weights = cuda, weights
        self.captures = False
        self._resources: tuple[Any, Any] | None = None
        self._fixed: set[tuple[object, ...]] = set()
        self._kind: tuple[object, ...] = ()
        self._tables: tuple[Tensor, ...] = ()
        self._open = weakref.WeakSet[_Pass]()
        self._passes = self._start = self._needed = 0
        weights.stays = True

    def part(self, function: PartFunction, modules: Iterable[torch.nn.Module]) -> "Part":
        """Return a part that reads the parameters of some modules, each by its name in its module."""
        return Part(function, list(chain.from_iterable(each.modules() for each in modules)), self)

    def begin(self, *tables: Tensor) -> tuple[Tensor, ...]:
        """Begin a forward pass; return its rotary tables in fixed memory. Empty: it must run without graphs."""
        if self._open or not self._weights.stays or torch.is_autocast_enabled(tables[0].device.type):
            return ()
        kind = tuple([(each.shape, each.dtype) for each in tables])
        self.captures = self._resources is None
        if self.captures:
            self._passes = self._passes + 1 if kind == self._kind else 1
            self._kind, self._start = kind, self._cuda.memory_allocated()
            if self._passes <= PASSES or not self._reserve():
                return ()
            self._tables = self.fix(tuple([torch.empty_like(each) for each in tables]))
        if kind != self._kind:
            return ()
        torch._foreach_copy_(self._tables, tables)
        return self._tables

    def end(self) -> None:
        """Note the memory that a forward pass has kept."""
        if self._resources is None:
            self._needed = max(self._needed, self._cuda.memory_allocated() - self._start)

    def _reserve(self) -> bool:
        """Make the pool of the graphs if there is memory for it; if not, later passes run without graphs."""
        of_steps = self._cuda.memory_reserved() - self._cuda.memory_allocated()  # those without graphs
        self._cuda.empty_cache()
        self._weights.stays = free_nbytes(self._cuda) >= of_steps + _MORE * self._needed + _SPARE
        self._resources = (self._cuda.Stream(), self._cuda.MemPool()) if self._weights.stays else None
        return self._weights.stays

    def opened(self) -> "_Pass":
        """Return what keeps the memory of a forward pass of a part. `close` frees it, or that nothing refers to it."""
        made = _Pass()
        self._open.add(made)
        return made

    def close(self, opened: "_Pass") -> None:
        """Free the memory of a forward pass of a part."""
        self._open.discard(opened)

    def fix(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Note that tensors stay in place, and return them."""
        self._fixed.update(map(_place, tensors))
        return tensors

    def inputs_like(self, tensors: Sequence[Tensor]) -> "list[_Input]":
        """Return fixed memory that has the inputs of a graph: the tensors themselves, where they stay in place."""
        found = []
        for each in tensors:
            is_given = _place(each) in self._fixed
            found.append(_Input(each.detach() if is_given else each.detach().clone(), is_given=is_given))
        return found

    def record(self, work: Callable[[], tuple[Any, ...]]) -> tuple[Any, tuple[Any, ...]]:
        """Capture the work without running it; return the graph, and the tensors that its replay writes."""
        assert self._resources is not None
        return captured(self._cuda, *self._resources, work)


def has_hooks(modules: Iterable[torch.nn.Module]) -> bool:
    """Return whether hooks see the calls of some modules. A graph would not call them."""
    return _has_any_global_hook() or any(
        each._forward_hooks or each._forward_pre_hooks or each._backward_hooks or each._backward_pre_hooks
        for each in modules
    )


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class _Pass:
    """A forward pass of a part whose backward pass may still run."""


@dataclass(frozen=True, eq=False, slots=True)
class _Input:
    """Fixed memory that a graph reads.

    Attributes:
        memory: The memory.
        is_given: Whether another graph writes it; else inputs are copied to it.
    """

    memory: Tensor
    is_given: bool

    def accepts(self, tensor: Tensor) -> bool:
        """Return whether a tensor can be the input."""
        return not self.is_given or tensor.data_ptr() == self.memory.data_ptr()

    def load(self, tensor: Tensor) -> None:
        """Make a tensor the input."""
        if not self.is_given:
            self.memory.data.copy_(tensor)  # without `data`, autograd sees a change of what it has saved


@dataclass(frozen=True, eq=False, slots=True)
class _Recorded:
    """A graph of a part.

    Attributes:
        graph: The graph.
        inputs: What it reads.
        results: What it writes; None: an input without gradient.
    """

    graph: Any
    inputs: list[_Input]
    results: tuple[Tensor | None, ...]

    def accepts(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors can be the inputs."""
        return all(each.accepts(tensor) for each, tensor in zip(self.inputs, tensors, strict=True))

    def replay(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Run the graph on inputs; return its results."""
        _load(self.inputs, tensors)
        self.graph.replay()
        return [None if each is None else each.detach() for each in self.results]  # autograd may keep what is new


def _load(inputs: Sequence[_Input], tensors: Sequence[Tensor]) -> None:
    for each, tensor in zip(inputs, tensors, strict=True):
        each.load(tensor)


class Part:
    """A part of a block.

    Args:
        function: What it computes.
        modules: All modules whose own parameters it reads.
        graphs: What the parts of the model share.
    """

    def __init__(self, function: PartFunction, modules: Iterable[torch.nn.Module], graphs: BlockGraphs) -> None:
        self._function, self._graphs = function, graphs
        self._owned = [(each._parameters, name, value) for each in modules for name, value in _named(each)]
        self._parameters = [parameter for *_, parameter in self._owned]
        self._trained = [each for each in self._parameters if each.requires_grad]
        self._copies: list[torch.nn.Parameter] = []
        self._kind: tuple[object, ...] = ()
        self._number = 0
        self._leaves: list[Tensor] = []
        self._results: tuple[Tensor, ...] = ()  # with the autograd graph, until backward is captured
        self._forward: _Recorded | None = None
        self._backward: _Recorded | None = None
        self._backward_at: list[int | None] = []

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the results of the function, which runs as a graph if it can."""
        if not self._is_captured(inputs):
            return self._function(*inputs)
        found: tuple[Tensor, ...] = _Graphed.apply(self, *inputs, *self._trained)  # type: ignore[no-untyped-call]
        return found

    def run_forward(self, tensors: Sequence[Tensor]) -> tuple[int, _Pass, tuple[Tensor, ...]]:
        """Run the graph of the forward pass; return its number, what keeps its memory, and the results.

        `tensors` are the inputs, and more.
        """
        assert self._forward is not None
        self._number += 1
        return self._number, self._graphs.opened(), tuple(self._forward.replay(tensors[: len(self._leaves)]))

    def run_backward(self, number: int, opened: _Pass, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Run the graph of the backward pass; return the gradients of the inputs and of the trained parameters."""
        if number != self._number:
            raise RuntimeError(
                "backward a second time through a forward pass: its activations are gone\n"
                "fix: Llama(block_graphs=False), or one backward pass for each forward pass"
            )
        self._number += 1  # graphs of other blocks use the memory of activations in their backward pass
        memory = [gradient_memory(each) for each in self._trained]
        at = [None if each is None else each.data_ptr() for each in (*self._parameters, *memory)]
        if self._backward is None:
            self._capture_backward(grads, memory)
            self._backward_at = at
        assert self._backward is not None
        is_here = at == self._backward_at and self._backward.accepts(grads)
        found = self._backward.replay(grads) if is_here else self._without_graph(grads, memory)
        self._graphs.close(opened)
        return found

    def _is_captured(self, inputs: Sequence[Tensor]) -> bool:
        """Return whether this call can run as a graph; capture the forward pass if this is the pass for it."""
        if is_capturing() or (self._forward is None and not self._graphs.captures):
            return False
        kind = (
            *[(each.shape, each.dtype, each.stride(), each.requires_grad) for each in inputs],
            *[each.data_ptr() for each in self._parameters],
        )
        if self._forward is None:
            self._kind = kind
            self._capture_forward(inputs)
            return True
        return kind == self._kind and self._forward.accepts(inputs)

    def _capture_forward(self, inputs: Sequence[Tensor]) -> None:
        held = self._graphs.inputs_like(inputs)
        self._leaves = _leaves(held, [each.requires_grad for each in inputs])
        self._copies = [torch.nn.Parameter(each.data, each.requires_grad) for each in self._parameters]

        def work() -> tuple[Tensor, ...]:
            with torch.enable_grad(), self._with_copies():
                self._results = self._function(*self._leaves)
            return self._results

        graph, results = self._graphs.record(work)
        self._forward = _Recorded(graph, held, self._graphs.fix(tuple([each.detach() for each in results])))

    def _capture_backward(self, grads: Sequence[Tensor], memory: Sequence[Tensor | None]) -> None:
        held = self._graphs.inputs_like(grads)
        given = [each.memory for each in held]
        for copy, parameter in zip(self._copies, self._parameters, strict=True):
            copy.data = parameter.data
        trained = [each for each in self._copies if each.requires_grad]
        graph, results = self._graphs.record(lambda: _gradients(self._leaves, trained, self._results, given, memory))
        self._graphs.fix(tuple([each for each in results if each is not None]))
        self._results = ()
        self._backward = _Recorded(graph, held, results)

    def _without_graph(self, grads: Sequence[Tensor], memory: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients, from a forward pass that is computed again."""
        assert self._forward is not None
        with torch.enable_grad():
            leaves = _leaves(self._forward.inputs, [each.requires_grad for each in self._leaves])
            results = self._function(*leaves)
        return list(_gradients(leaves, self._trained, results, grads, memory))

    @contextmanager
    def _with_copies(self) -> Iterator[None]:
        """Let the modules have copies of their parameters, with the same memory.

        A graph of autograd that is alive remembers on which stream a parameter was used. Another stream may not wait
        for it while it captures.
        """
        try:
            for (owner, name, _), copy in zip(self._owned, self._copies, strict=True):
                owner[name] = copy
            yield
        finally:
            for owner, name, parameter in self._owned:
                owner[name] = parameter


def _named(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, each) for name, each in module._parameters.items() if each is not None]


def _gradients(
    leaves: Sequence[Tensor],
    trained: Sequence[torch.nn.Parameter],
    results: Sequence[Tensor],
    grads: Sequence[Tensor],
    memory: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of leaves, None where it is not required, and those of trained parameters, in `memory`."""
    for parameter, place in zip(trained, memory, strict=True):
        if place is not None:
            _offer(parameter, place)
    wanted = [each for each in leaves if each.requires_grad]
    found = torch.autograd.grad(results, [*wanted, *trained], grads)
    of_parameters = []
    for parameter, place, gradient in zip(trained, memory, found[len(wanted) :], strict=True):
        parameter.__dict__.pop("gradient_memory", None)
        if place is not None and gradient.data_ptr() != place.data_ptr():
            place.copy_(gradient)
        of_parameters.append(gradient if place is None else place)
    of_leaves = iter(found)
    return *[next(of_leaves) if each.requires_grad else None for each in leaves], *of_parameters


def _leaves(inputs: Sequence[_Input], wanted: Sequence[bool]) -> list[Tensor]:
    pairs = zip(inputs, wanted, strict=True)
    return [each.memory.detach().requires_grad_(requires_grad) for each, requires_grad in pairs]


def _offer(parameter: torch.nn.Parameter, place: Tensor) -> None:
    """Let backward write the gradient of a parameter to its memory; see `bmburst_ops.linears.gradient_memory`."""

    def take() -> Tensor:
        del parameter.gradient_memory  # type: ignore[attr-defined]
        return place.detach()

    parameter.gradient_memory = take  # type: ignore[attr-defined]


class _Graphed(torch.autograd.Function):
    """Runs the graphs of a part."""

    @staticmethod
    def forward(ctx: Any, part: Part, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.part = part
        ctx.number, ctx.opened, results = part.run_forward(tensors)
        return results

    @staticmethod
    @first_order(KernelError)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.part.run_backward(ctx.number, ctx.opened, grads)

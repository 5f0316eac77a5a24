"""A `bmtrain.Block` that gathers its weights and scatters its gradient with little work of the host.

Parameters, storages and files are those of `bmtrain.Block`, as is what moves between ranks. See
`bmburst.blocks.gathering` for what differs: no tensor is made for a parameter in a pass, and the weights of the next
block are gathered before the kernels of this one are launched.

A block's frozen matrices may be in 4 bits (QLoRA, arXiv:2305.14314): a `Linear` with `quantize()` has the parameter
`nf4`, packed as in `bmburst_ops.nf4`, instead of `weight`. BMTrain shards it over all ranks as it shards any other
parameter of the block, and gathers it before forward and before backward. Right after, the block dequantizes its
matrices; `weight` of each is then a plain tensor, until the block is released. So all operations of a block are those
of frozen 16-bit weights, under every recompute policy and ZeRO stage, and with weights in host memory.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import bmtrain as bmt
import torch
from torch import Tensor

from bmburst.blocks.gathering import GatherMemory, GradientMemory, Layout, Slot, current
from bmburst.blocks.layers import Linear, quantized_linears, with_graph
from bmburst.comm.collectives import FlatStorage, launched_together
from bmburst_ops import nf4
from bmburst_ops.linears import LaterProducts

AfterScatter = Callable[[Collection[torch.nn.Parameter]], Any]
"""Gets the storages of a block, whose gradients the load stream scatters; returns the stream that completes them."""


class ShardedBlock(bmt.Block):  # type: ignore[misc]  # BMTrain has no types
    """A block without BMTrain's checkpointing: `bmburst.recompute` replaces it, which would run the ring twice.

    The module gets the stream first, and returns it. Put blocks into a `bmtrain.TransformerBlockList`. For backward,
    the module must save its parameters themselves, as `bmburst_ops.linears` does: views of their data would be those of
    another block then.

    Args:
        module: The module to wrap, as in `bmtrain.Block`.
        zero_level: BMTrain's ZeRO stage, 2 or 3. With 2, `memory` needs room for all blocks. Of matrices in 4 bits, the
            bytes stay gathered.
        memory: Memory of gathered blocks, shared by all blocks of a list.
        later: What backward may leave for `finish_backward`: the gradients of its linear layers' weights. None: it
            always computes them.

    Attributes:
        after_scatter: Called in backward for each block; None: the gradient is complete when it is scattered.
    """

    def __init__(
        self, module: torch.nn.Module, *, zero_level: int, memory: GatherMemory, later: LaterProducts | None = None
    ) -> None:
        super().__init__(module, use_checkpoint=False, zero_level=zero_level)
        self.after_scatter: AfterScatter | None = None
        self._memory = memory
        self._layout = Layout.of(self)
        self._ordered: list[torch.nn.Parameter] = [each["parameter"] for each in self._param_info]
        self._slot: Slot | None = None
        self._gradients: GradientMemory | None = None
        self._taken: list[int] = []  # the places of parameters whose gradients are written there
        self._is_in_backward = False
        self._views = _ShardViews(self)
        self._quantized = list(quantized_linears(module).values())
        self._aside: dict[str, Tensor] = {}
        self.later, self._left = later, deque[list[Tensor | None]]()
        for each in module.modules():
            if isinstance(each, Linear):
                each.later = later

    _ready: bool  # BMTrain's: whether the parameters are the gathered weights

    # `bmtrain.Block` finds its parameters in `__getattribute__`, which makes Python code of every attribute.
    __getattribute__ = torch.nn.Module.__getattribute__

    @property
    def _parameters(self) -> dict[str, Any]:
        found: dict[str, Any] = self._module._parameters
        return found

    @_parameters.setter
    def _parameters(self, _own: object) -> None:
        """Ignore what `torch.nn.Module` sets."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the block with gathered weights. In backward they are there again."""
        has_graph = torch.is_grad_enabled()
        if has_graph:
            hidden = with_graph(hidden)
            if self._is_first_layer:
                # The blocks after the first one are released by the blocks before them.
                hidden = _InBackward.apply(self.after_backward, hidden)  # type: ignore[no-untyped-call]
        if self._is_first_layer and not self._ready:
            self._memory.begin()
        entered = self._enter()
        try:
            self._dequantize()
            self.prepare(self.next_module())
            result: Tensor = self._module(hidden, *args, **kwargs)
        finally:
            if entered:
                self._leave(keep=has_graph)
                if self._is_last_layer and not has_graph:
                    self._memory.end()
        if not has_graph:
            return result
        returned: Tensor = _InBackward.apply(self.before_backward, result)  # type: ignore[no-untyped-call]
        return returned

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the weights for the duration of the context, outside of the block's forward and backward."""
        entered = self._enter()
        try:
            self._dequantize()
            yield
        finally:
            if entered:
                self._leave(keep=True)

    def before_backward(self) -> None:
        """Gather the weights, and scatter the gradient of the block after this one."""
        self._is_in_backward = self._enter()
        if self._is_in_backward:
            for each in self._ordered:
                if each.requires_grad:
                    each.grad = None  # backward puts its own tensor there, without an addition
        if (after := self.next_module()) is not None:
            after.after_backward()
        if self._is_in_backward and not (self.later is not None and self.later.is_open):
            self._offer_memory()
        self._dequantize()  # the gradients and weights of the block after this one are gone: memory matters here
        self.prepare(self.pre_module())

    def after_backward(self) -> None:
        """Scatter the gradient, unless `finish_backward` does, and release the weights."""
        if not self._is_in_backward:
            return
        self._is_in_backward = False
        gradients = [each.grad for each in self._ordered]
        if self.later is not None and self.later.is_open:
            self._left.append(gradients)
        else:
            self._give(gradients)
        self._leave(keep=False)
        self._views.show_gradients()
        if self._is_first_layer:
            self._memory.end()

    @torch.no_grad()
    def finish_backward(self) -> None:
        """Compute the gradients of weights that the oldest unfinished backward pass left, and scatter the gradient."""
        assert self.later is not None
        products = self.later.take()
        if self._ready:  # weights are gathered and gradients are scattered once for several passes
            for each in products:
                gradient = each.gradient()
                each.weight.grad = gradient if each.weight.grad is None else each.weight.grad.add_(gradient)
            return
        gradients, places = self._left.popleft(), {id(each): place for place, each in enumerate(self._ordered)}
        self._offer_memory()
        while products:
            product = products.pop()
            gradients[places[id(product.weight)]] = product.gradient()
        self._give(gradients)
        self._views.show_gradients()
        if self._is_first_layer:
            self._memory.end()

    def _offer_memory(self) -> None:
        """Let backward write gradients where they are scattered from; the memory is allocated for the first of them."""

        def take(place: int) -> Tensor | None:
            del self._ordered[place].gradient_memory  # type: ignore[attr-defined]
            if self._gradients is None:
                self._gradients = self._memory.gradients(self._layout, self._trained(), is_early=True)
            view = self._gradients.views[place]
            self._taken.append(place)
            return None if view is None else view.detach()  # autograd keeps a tensor that nothing else refers to

        self._gradients = None
        self._taken.clear()
        for place, each in enumerate(self._ordered):
            if each.requires_grad:
                each.gradient_memory = partial(take, place)  # type: ignore[attr-defined]

    def _trained(self) -> frozenset[str]:
        return frozenset(name for name, each in self._storage_params.items() if each.requires_grad)

    def put_gradient_aside(self) -> None:
        """Clear the gradient, and keep its memory for the next one, which is then written there and not added."""
        for name, storage in self._storage_params.items():
            if storage.grad is not None:
                self._aside[name], storage.grad = storage.grad, None
        for parameter in self._ordered:
            parameter.grad = None

    def prepare(self, neighbour: "ShardedBlock | None") -> None:
        """Begin to gather the weights of the block that comes next."""
        if neighbour is not None and neighbour._slot is None and not neighbour._ready:
            neighbour.gather()

    def gather(self) -> None:
        """Gather the weights on the load stream."""
        slot = self._slot = self._memory.take(self._layout, self)
        load = bmt.config["load_stream"]
        load.wait_event(slot.left)
        with torch.cuda.stream(load):
            with launched_together():
                for name, storage in self._storage_params.items():
                    comm = self._storage_info[name]["zero_comm"]
                    bmt.nccl.allGather(FlatStorage(storage.data), FlatStorage(slot.memory[name]), comm)
            slot.gathered.record(load)

    def lose_slot(self) -> None:
        """Forget the gathered weights: another block gets their memory."""
        self._slot = None

    def begin_scatter(self) -> None:
        """Prepare for the gradient to be scattered and added to that of micro-batches before."""

    def end_scatter(self, writer: Any) -> None:
        """Use the gradient, which is complete after the work of stream `writer`."""

    def _enter(self) -> bool:
        """Make the gathered weights the data of the parameters; return False if they are already."""
        if self._ready:
            return False
        self._memory.keep_pace()
        if self._slot is None:
            self.gather()
        slot = self._slot
        assert slot is not None
        slot.is_busy = self._ready = True
        current().wait_event(slot.gathered)
        for parameter, view in zip(self._ordered, slot.views, strict=True):
            assert view is not None
            parameter.data = view
        return True

    def _leave(self, *, keep: bool) -> None:
        """Make the shards the data of the parameters again."""
        slot, self._ready = self._slot, False
        self._views.show()
        for linear in self._quantized:
            linear.weight.data = linear.weight.new_empty(0)
        assert slot is not None
        self._memory.leave(slot, keep=keep)

    @torch.no_grad()
    def _dequantize(self) -> None:
        for linear in self._quantized:
            if not linear.weight.numel():
                linear.weight.data = nf4.dequantize(linear.nf4.data, linear.shape, linear.weight.dtype)

    def _give(self, gradients: list[Tensor | None]) -> None:
        """Scatter the gradients of the parameters."""
        self.begin_scatter()
        self._scatter(gradients)
        load = bmt.config["load_stream"]
        storages = self._storage_params.values()
        self.end_scatter(load if self.after_scatter is None else self.after_scatter(storages))

    @torch.no_grad()
    def _scatter(self, own: list[Tensor | None]) -> None:
        """Add up the gradients of all ranks, and those of micro-batches before, each rank its shard."""
        for each in self._ordered:
            each.__dict__.pop("gradient_memory", None)
        names = self._trained()
        if not names:
            return
        trained = {name: each for name, each in self._storage_params.items() if name in names}
        gradients, self._gradients = self._gradients, None
        if gradients is not None and any(own[place] is None for place in self._taken):
            # Autograd has the gradient still, and adds that of another forward pass of the same backward pass.
            self._memory.give_away(gradients)
            gradients = None
        if gradients is None:
            gradients = self._memory.gradients(self._layout, names, is_early=False)
        gradients.collect(own)
        for name, storage in trained.items():
            info = self._storage_info[name]
            if storage.grad is None:
                memory = self._aside.pop(name, None)
                storage.grad = torch.empty_like(storage.data) if memory is None else memory
            else:
                gradients.memory[name][info["begin"] : info["end"]].add_(storage.grad)
        load = bmt.config["load_stream"]
        load.wait_stream(current())
        with torch.cuda.stream(load):
            with launched_together():
                for name, storage in trained.items():
                    whole, comm = FlatStorage(gradients.memory[name]), self._storage_info[name]["zero_comm"]
                    bmt.nccl.reduceScatter(whole, FlatStorage(storage.grad), "sum", comm)
            gradients.scattered.record(load)


class _ShardViews:
    """Views of a block's shards for its parameters, made again only if the shards are elsewhere.

    Args:
        block: The block.
    """

    def __init__(self, block: ShardedBlock) -> None:
        self._block = block
        self._at: list[int] = []
        self._data: list[Tensor] = []
        self._gradients_at: list[int | None] = []
        self._gradients: list[Tensor | None] = []

    def show(self) -> None:
        """Make the parameters this rank's shards."""
        at = [each.data_ptr() for each in self._block._storage_params.values()]
        if at != self._at:
            self._at, self._data = at, [self._view(each, self._storage(each).data) for each in self._block._param_info]
        for parameter, data in zip(self._block._ordered, self._data, strict=True):
            parameter.data = data

    def show_gradients(self) -> None:
        """Make the gradients of the parameters those of the shards, after `show`."""
        kept = [each.grad for each in self._block._storage_params.values()]
        at = [None if each is None else each.data_ptr() for each in kept]
        if at != self._gradients_at:
            self._gradients_at = at
            self._gradients = [self._gradient(each) for each in self._block._param_info]
        for parameter, gradient in zip(self._block._ordered, self._gradients, strict=True):
            parameter.grad = gradient

    def _storage(self, info: dict[str, Any]) -> torch.nn.Parameter:
        found: torch.nn.Parameter = self._block._storage_params[info["kw_name"]]
        return found

    def _gradient(self, info: dict[str, Any]) -> Tensor | None:
        gradient = self._storage(info).grad
        has_one = gradient is not None and "begin" in info and info["parameter"].requires_grad
        return self._view(info, gradient) if has_one and gradient is not None else None

    @staticmethod
    def _view(info: dict[str, Any], storage: Tensor) -> Tensor:
        """Return a parameter's run of a shard; an empty tensor if the rank has none of it."""
        if "begin" not in info:
            return storage.new_empty(0)
        return storage[info["begin"] : info["begin"] + info["end"][0]]


class _InBackward(torch.autograd.Function):
    """Returns a tensor as it is, and calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], tensor: Tensor) -> Tensor:
        ctx.call = call
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        ctx.call()
        return None, grad

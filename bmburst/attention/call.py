"""Chooses kernel, transport and strategy of an attention call, the same on all ranks of its group."""

from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from bmburst.attention.options import AttentionOptions, gradient_signature, require_tensors, require_transport, scale_of
from bmburst.comm.checks import CheckedCommunicator, describe_tensors
from bmburst.comm.communicator import BlockMover
from bmburst.comm.groups import single_rank_group
from bmburst.comm.transports import (
    RingGroups,
    StridedSubgroup,
    device_name,
    double_ring_groups,
    exchanging_group,
    find_nodes,
    over_transport,
)
from bmburst.errors import UserError
from bmburst.schedule.cost import Placement
from bmburst.schedule.cross import Side, attended
from bmburst.schedule.hardware import Hardware, hardware_like
from bmburst.schedule.heads_plan import HeadsPlan, Strides, make_heads_plan
from bmburst.schedule.layout import Layout, kernel_needs
from bmburst.schedule.mask import Mask, make_mask
from bmburst.schedule.parallelism import STRATEGIES, RingTensors, Strategy
from bmburst.schedule.ring_schedule import Schedule, make_schedule, tiles
from bmburst.schedule.strategy import choose_strategy
from bmburst.schedule.tiles import Tile
from bmburst.schedule.units import HeadShapes
from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.flash import Kernel, Partial, ReferenceKernel, TritonKernel
from bmburst_ops.merge import accumulation_dtype

Call = TypeVar("Call", bound="SequenceCall")


@dataclass(frozen=True, eq=False, kw_only=True)
class SequenceCall:
    """A checked attention call, of any kind, over the ranks of a sequence. Executors run it.

    Calls are compared by identity, since caches use the call as their key.

    Attributes:
        comm: The group, over the transport that moves its blocks.
        layout: Which rank holds which tokens.
        length: Real tokens of the whole sequence.
        mask: Which keys a query sees.
        scale: Factor on the scores.
        strategy: What the ranks exchange.
        double_ring: The groups of a double ring, where the strategy has one.
    """

    comm: BlockMover
    layout: Layout
    length: int
    mask: Mask
    scale: float
    strategy: Strategy
    double_ring: RingGroups | None = None

    @cached_property
    def rings(self) -> RingGroups:
        """The groups of the ring, or of the double ring."""
        return self.double_ring or RingGroups(self.comm, single_rank_group())

    def schedule(self, ring_tensors: RingTensors, *, returning: bool) -> Schedule:
        """Return this rank's schedule in the ring; `returning`: whether gradients return to the blocks' owners."""
        place = self.layout, self.length, self.mask, self.comm.rank
        return make_schedule(*place, ring_tensors, self.rings.inter.size, returning=returning)

    def taking_delta(self, q: Tensor, v: Tensor) -> "SequenceCall":
        """Return this call with a kernel that uses a given delta; in this class, the call itself."""
        del q, v
        return self


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionCall(SequenceCall):
    """A call of `burst_attention`.

    Attributes:
        kernel: The kernel that computes a tile.
        deterministic: Whether repeated calls must give the same bits.
        softcap: Scaled scores become `softcap * tanh(score / softcap)`; None: they stay as they are.
        is_cross: Whether this is cross-attention, even if queries and keys happen to have the same layout.
    """

    kernel: Kernel
    deterministic: bool
    softcap: float | None = None
    is_cross: bool = False

    def tiles(self, query_rank: int, key_rank: int) -> tuple[Tile, ...]:
        """Return the tiles between one rank's queries and another's keys."""
        return tiles(self.layout, self.length, self.mask, query_rank, key_rank)

    def heads_plan(self, brought: list[Tensor], *, backward: bool) -> HeadsPlan:
        """Return this rank's plan of a head exchange.

        The cache key is made of the tensors' shapes, dtype and strides: hashing all arguments of `make_heads_plan` took
        50 microseconds on the host of an H200, before the first copy of each call.

        Args:
            brought: This rank's queries, keys and values, and in backward the others; see `make_heads_plan`.
            backward: See `make_heads_plan`.
        """
        strides = tuple([tensor.stride() for tensor in brought])
        q, k, v = (tensor.shape for tensor in brought[:3])
        return _heads_plan(self.layout, self.strategy, self.comm.rank, backward, q, k, v, brought[0].dtype, strides)

    def over(self, layout: Layout, length: int) -> "AttentionCall":
        """Return this call for other tokens: the same object each time, since it is the key of its CUDA graphs."""
        return _over(self, layout, length)

    @cached_property
    def outer(self) -> "AttentionCall":
        """The attention after the head exchange: over one rank of each group that exchanged heads."""
        degree = self.strategy.ulysses_degree
        if degree == 1:
            return self
        strategy, layout = replace(self.strategy, ulysses_degree=1), self.layout.over_groups(degree)
        return replace(self, comm=StridedSubgroup(self.comm, degree), layout=layout, strategy=strategy)

    def taking_delta(self, q: Tensor, v: Tensor) -> "AttentionCall":
        """Return this call with a kernel that uses a given delta.

        A kernel that takes no delta gets a surrogate output instead, which cannot express a delta that is non-zero
        where dO is zero.
        """
        if self.kernel.takes_delta:
            return self
        wider = max(q, v, key=lambda tensor: tensor.shape[-1])
        return _taking_delta(self, with_triton=q.is_cuda and TritonKernel().refusal(wider, wider) is None)


@lru_cache(maxsize=256)
def _heads_plan(
    layout: Layout,
    strategy: Strategy,
    rank: int,
    backward: bool,
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    dtype: torch.dtype,
    strides: tuple[tuple[int, ...], ...],
) -> HeadsPlan:
    shapes = replace(_shapes_of(layout, q, k, v, dtype), degree=strategy.ulysses_degree)
    return make_heads_plan(
        shapes,
        rank,
        tuple(Strides.of(each, shapes) for each in strides),
        backward=backward,
        units=strategy.units(backward=backward),
    )


@bounded_cache(maxsize=256)
def head_shapes_of(call: AttentionCall, q: torch.Size, k: torch.Size, v: torch.Size, dtype: torch.dtype) -> HeadShapes:
    """Return the sizes of a rank's queries and keys after the head exchange of a call."""
    return replace(_shapes_of(call.layout, q, k, v, dtype), degree=call.strategy.ulysses_degree)


@bounded_cache(maxsize=64)
def _over(call: AttentionCall, layout: Layout, length: int) -> AttentionCall:
    return replace(call, layout=layout, length=length)


@bounded_cache(maxsize=64)
def _taking_delta(call: AttentionCall, *, with_triton: bool) -> AttentionCall:
    return replace(call, kernel=TritonKernel() if with_triton else ReferenceKernel())


class Executor(NamedTuple):
    """The forward and backward functions that run a call under one strategy.

    Attributes:
        forward: Maps `(call, q, k, v, *others)` to this rank's output, in q's dtype, and log-sum-exp, in fp32 or wider.
            Padding rows give zero and `-inf`.
        backward: Maps `(call, BackwardInputs, *others)` to the gradients of all inputs, in their dtype or wider; of
            `others` None for one that needs none.
    """

    forward: Callable[..., Partial]
    backward: Callable[..., tuple[Tensor | None, ...]]


class DecidedCalls(Generic[Call]):
    """Cache of the calls of one group and its options, by the kind of their tensors: all that deciding reads."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, Call] = {}

    def get(self, kind: Hashable, decide: Callable[[], Call]) -> Call:
        """Return the call of that kind; `decide` makes it if there is none."""
        call = self._calls.get(kind)
        if call is None:
            if len(self._calls) >= _MOST_KINDS:
                self._calls.clear()
            call = self._calls[kind] = decide()
        return call


_MOST_KINDS = 64
"""Most kinds of tensors whose calls are kept for one group and its options."""


@bounded_cache(maxsize=256)
def _decided_calls(
    comm: CheckedCommunicator, lengths: tuple[int | None, int | None], options: AttentionOptions
) -> DecidedCalls[AttentionCall]:
    del comm, lengths, options
    return DecidedCalls()


def decide(
    comm: CheckedCommunicator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: int | None,
    options: AttentionOptions,
    key_length: int | None = None,
    latent_dim: int = 0,
) -> AttentionCall:
    """Check the inputs and choose kernel and strategy.

    A call with inputs of the same kind as an earlier call reuses its checks and its decision: deciding takes the host a
    sixth of a millisecond, during which no kernel runs. For `latent_dim` see `HeadShapes`.

    Raises:
        UserError: The inputs or options are not supported. If the group compares its ranks, all of them raise it.
    """
    anew = partial(_decide, comm, q, k, v, length, options, key_length, latent_dim)
    if (comm.active and comm.always) or not isinstance(length, int | None) or not isinstance(key_length, int | None):
        return anew()
    try:
        decided = _decided_calls(comm, (length, key_length), options)
        kind = [(type(t), t.layout, t.is_nested, t.shape, t.stride(), t.dtype, t.device) for t in (q, k, v)]
    except (AttributeError, RuntimeError, TypeError):  # no dense tensor, or an unhashable option: `_decide` refuses it
        return anew()
    if comm.active:  # compared, and yet the same object each time: it is the key of its CUDA graphs
        call = anew()
        return decided.get((latent_dim, *kind), lambda: call)
    return decided.get((latent_dim, *kind), anew)


def _decide(
    comm: CheckedCommunicator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: int | None,
    options: AttentionOptions,
    key_length: int | None,
    latent_dim: int,
) -> AttentionCall:
    request = StrategyRequest.of(comm, options.strategy, options.transport, comm.ulysses_degree)

    def check() -> tuple[tuple[AttentionCall, HeadShapes], str]:
        options.validate()
        require_tensors(q, k, v, is_cross=(is_cross := options.is_cross(key_length)))
        require_transport(comm, q, options.transport)
        assert not isinstance(options.mask, tuple)  # one call for each sample
        queries = Side(options.layout, q.shape[1], length)
        keys = Side(options.key_layout or options.layout, k.shape[1], key_length) if is_cross else None
        layout, real, mask = attended(comm.size, queries, keys, make_mask(options.mask))
        shapes = replace(head_shapes(layout, q, k, v), latent_dim=latent_dim)
        call = AttentionCall(
            comm=comm,
            kernel=options.kernel_for(kernel_needs(layout, mask), q, k, v),
            layout=layout,
            length=real,
            mask=mask,
            scale=scale_of(q, options.scale),
            strategy=request.choose(shapes, real, mask),
            deterministic=options.deterministic,
            softcap=None if options.softcap is None else float(options.softcap),
            is_cross=is_cross,
        )
        hints = f"nodes {comm.nodes}\nheads {comm.ulysses_degree}"
        hints += f"\nlatents of {latent_dim}" if latent_dim else ""
        return (call, shapes), f"{_signature(call, q, k, v, options)}\n{hints}" if comm.active else ""

    return request.place(*comm.decided(check))


@dataclass(frozen=True, slots=True)
class StrategyRequest:
    """A strategy and a transport that a caller asks for, and the group that will run them.

    Attributes:
        comm: The group.
        name: One of `bmburst.schedule.parallelism.STRATEGIES`.
        transport: One of `bmburst.comm.transports.TRANSPORTS`.
        hardware: The hardware of the ranks, the same for all of them.
        ulysses_degree: How many neighbouring ranks must exchange heads; None: the cheapest degree.
    """

    comm: CheckedCommunicator
    name: str
    transport: str
    hardware: Hardware
    ulysses_degree: int | None

    @classmethod
    def of(cls, comm: CheckedCommunicator, name: str, transport: str, ulysses_degree: int | None) -> "StrategyRequest":
        """Return the request. Collective the first time for a group: no rank may raise alone before it."""
        return cls(comm, name, transport, hardware_like(device_name(comm)), ulysses_degree)

    def choose(self, shapes: HeadShapes, length: int, mask: Mask, placement: Placement | None = None) -> Strategy:
        """Return the cheapest strategy of that name.

        Args:
            shapes: Sizes; `degree` is ignored.
            length: Real tokens of the sequence.
            mask: Which keys a query sees.
            placement: The nodes of the ranks and the transport of their blocks; None: not known yet.

        Raises:
            UserError: The strategy cannot work with these shapes.
        """
        placement = placement or self._placed(self.comm.transport)
        return choose_strategy(self.name, shapes, length, mask, placement, self.hardware, self.ulysses_degree)

    def place(self, call: Call, shapes: HeadShapes) -> Call:
        """Return the call, on which all ranks agree, with its final transport and strategy.

        Collective the first time for a group.

        Raises:
            UserError: The request needs equal numbers of ranks on the nodes, or peer access, and the group lacks it.
        """
        comm = self.comm
        has_own_groups = STRATEGIES[self.name].needs("double-ring")  # groups with their own transports
        moved = comm if has_own_groups else over_transport(comm, self.transport)
        placement = self._placement(moved.transport)
        if moved is comm and placement.nodes is None and not call.strategy.at_once:
            return call
        strategy = self.choose(shapes, call.length, call.mask, placement)
        if strategy.at_once:
            return replace(call, comm=exchanging_group(comm), strategy=strategy)
        if strategy.outer != "double-ring":
            return replace(call, comm=moved, strategy=strategy)
        assert placement.nodes is not None
        groups = double_ring_groups(comm, placement.nodes, self.transport, strategy.ulysses_degree)
        return replace(call, comm=moved, strategy=strategy, double_ring=groups)

    def _placement(self, transport: str) -> Placement:
        """Return the placement of the ranks. They are asked for their nodes only if the choice depends on it."""
        spec = STRATEGIES[self.name]
        if self.comm.size == 1 or transport == "peer":  # peers are on one node
            return self._placed(transport, 1 if transport == "peer" else None)
        if "double-ring" not in spec.outer and spec.exchange != "some":
            return self._placed(transport)
        nodes = find_nodes(self.comm)
        if nodes.uneven and spec.needs("double-ring"):
            raise UserError(f"strategy '{self.name}' cannot work: {nodes.uneven}\nfix: use strategy='auto'")
        within = None if self.transport == "auto" else self.transport
        return replace(self._placed(transport, nodes.count), even=not nodes.uneven, within=within)

    def _placed(self, transport: str, nodes: int | None = None) -> Placement:
        return Placement(transport, nodes, collectives=self.transport != "peer")


def _signature(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str:
    """Describe what must be equal on every rank, in names that users know."""
    keys = f", key_layout {call.layout.keys.name}" if call.is_cross else ""
    facts = {
        "q": describe_tensors(q),
        "k": describe_tensors(k),
        "v": describe_tensors(v),
        "length": call.length,
        "mask": call.mask,
        "layout": call.layout.queries.name + keys,
        "scale": call.scale,
        "softcap": call.softcap,
        "kernel": call.kernel.name,
        "transport": options.transport,
        **{f"strategy.{name}": value for name, value in asdict(call.strategy).items()},
    }
    named = (f"{name} {value}" for name, value in facts.items())
    return "\n".join(["burst_attention", *named, gradient_signature(q, k, v)])


def head_shapes(layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> HeadShapes:
    """Return the sizes of a rank's tensors before any head exchange; only shapes and dtype are read.

    Args:
        layout: Of the whole sequence.
        q: `[batch, tokens, heads, head_dim]`.
        k: `[batch, tokens, kv_heads, head_dim]`.
        v: `[batch, tokens, kv_heads, value_dim]`.
    """
    return _shapes_of(layout, q.shape, k.shape, v.shape, q.dtype)


def _shapes_of(layout: Layout, q: torch.Size, k: torch.Size, v: torch.Size, dtype: torch.dtype) -> HeadShapes:
    batch, _, heads, head_dim = q
    return HeadShapes(
        layout=layout,
        degree=1,
        batch=batch,
        heads=heads,
        kv_heads=k[2],
        head_dim=head_dim,
        itemsize=dtype.itemsize,
        statistics_itemsize=accumulation_dtype(dtype).itemsize,
        value_dim=v[3],
    )

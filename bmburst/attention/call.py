"""One attention over a group of ranks, decided: everything the executor needs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from torch import Tensor

from bmburst.attention.differentiable import gradient_signature
from bmburst.attention.options import AttentionOptions, require_tensors, require_transport, scale_of
from bmburst.comm.checks import Checked, describe
from bmburst.comm.levels import Levels, device_name, find_nodes, over_levels
from bmburst.comm.protocol import BlockMover
from bmburst.comm.subgroups import EveryNth
from bmburst.comm.transports import over_transport
from bmburst.errors import UserError
from bmburst.schedule.cost import Placement
from bmburst.schedule.double_schedule import DoubleSchedule, make_double_schedule
from bmburst.schedule.hardware import hardware_like
from bmburst.schedule.heads_plan import HeadShapes, HeadsPlan, Strides, make_heads_plan
from bmburst.schedule.layout import Layout, make_layout, real_length
from bmburst.schedule.mask import Mask, make_mask
from bmburst.schedule.ring_schedule import Schedule, make_schedule, tiles
from bmburst.schedule.strategy import choose_strategy
from bmburst.schedule.strategy_names import STRATEGIES, Strategy, Travellers
from bmburst.schedule.tiles import Tile
from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.errors import KernelError
from bmburst_ops.flash import Kernel, select_kernel
from bmburst_ops.merge import accumulation_dtype


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """A checked attention: the executor only obeys it. Equal to no other, so that what is kept of it is found by it."""

    comm: BlockMover
    kernel: Kernel
    layout: Layout
    length: int
    mask: Mask
    scale: float
    strategy: Strategy
    deterministic: bool
    levels: Levels | None = None
    """Of a double ring."""
    _heads_plans: dict[tuple[object, ...], HeadsPlan] = field(default_factory=dict, init=False, repr=False)
    _others: dict[tuple[Layout, int], "AttentionCall"] = field(default_factory=dict, init=False, repr=False)

    def double_schedule(self, travellers: Travellers, *, returning: bool) -> DoubleSchedule:
        """Return this rank's schedule in a double ring; `returning`: whether something follows the travellers home."""
        assert self.levels is not None
        nodes = self.levels.outer.size
        options = (self.layout, self.length, self.mask, self.comm.rank, travellers, nodes)
        return make_double_schedule(*options, returning=returning)

    def schedule(self, travellers: Travellers) -> Schedule:
        """Return this rank's schedule."""
        return make_schedule(self.layout, self.length, self.mask, self.comm.rank, travellers)

    def tiles(self, query_rank: int, key_rank: int) -> tuple[Tile, ...]:
        """Return the work between one rank's queries and another's keys."""
        return tiles(self.layout, self.length, self.mask, query_rank, key_rank)

    def heads_plan(self, q: Tensor, k: Tensor, brought: Sequence[Tensor], *, backward: bool) -> HeadsPlan:
        """Return this rank's plan of an exchange of heads.

        Kept here by what a tensor says of itself: to find it in `make_heads_plan`'s cache took the host of an H200 50
        microseconds before the first copy of each call, this takes 8.

        Args:
            q: This rank's queries.
            k: Its keys.
            brought: See `make_heads_plan`.
            backward: See `make_heads_plan`.
        """
        key = (backward, q.shape, k.shape, *(tensor.stride() for tensor in brought))
        if key not in self._heads_plans:
            self._heads_plans[key] = make_heads_plan(
                replace(head_shapes(self.layout, q, k), degree=self.strategy.ulysses_degree),
                self.comm.rank,
                tuple(_strides(tensor) for tensor in brought),
                backward=backward,
                most=self.strategy.most_kv_heads,
                pace=self.strategy.pace,
            )
        return self._heads_plans[key]

    def over(self, layout: Layout, length: int) -> "AttentionCall":
        """Return this attention of other tokens: one call for all layers, by which its kernels are recorded."""
        if (layout, length) not in self._others:
            self._others[layout, length] = replace(self, layout=layout, length=length)
        return self._others[layout, length]

    @cached_property
    def outer(self) -> "AttentionCall":
        """The attention that remains once heads are exchanged: over one rank of each group that did."""
        degree = self.strategy.ulysses_degree
        if degree == 1:
            return self
        strategy, layout = replace(self.strategy, ulysses_degree=1), self.layout.over_groups(degree)
        return replace(self, comm=EveryNth(self.comm, degree), layout=layout, strategy=strategy)


def decide(
    comm: Checked, q: Tensor, k: Tensor, v: Tensor, length: int | None, options: AttentionOptions
) -> AttentionCall:
    """Check the inputs and choose kernel and strategy.

    A call like an earlier one is decided as that was: no kernel starts before, and deciding takes the host a sixth of a
    millisecond.

    Raises:
        UserError: Something cannot work; where the group compares its ranks, on all of them.
    """
    if comm.active or not isinstance(length, int | None):
        return _decide(comm, q, k, v, length, options)
    require_tensors(q, k, v)
    try:
        decision = _decision(comm, length, options, *((t.shape, t.stride(), t.dtype, t.device) for t in (q, k, v)))
    except TypeError:  # an option that cannot be hashed, a list, is refused
        return _decide(comm, q, k, v, length, options)
    if decision.call is None:
        decision.call = _decide(comm, q, k, v, length, options)
    return decision.call


@dataclass(slots=True)
class _Decision:
    """What was decided for inputs of one kind, if it was."""

    call: AttentionCall | None = None


@bounded_cache(maxsize=256)
def _decision(*_: object) -> _Decision:
    return _Decision()


def _decide(
    comm: Checked, q: Tensor, k: Tensor, v: Tensor, length: int | None, options: AttentionOptions
) -> AttentionCall:
    """Decide, together with the other ranks while the group compares them."""
    hardware = hardware_like(device_name(comm))

    def here() -> tuple[AttentionCall, str]:
        options.validate()
        require_tensors(q, k, v)
        require_transport(comm, q, options.transport)
        assert not isinstance(options.mask, tuple)  # one call for each sample
        mask = make_mask(options.mask)
        real = real_length(comm.size, q.shape[1], mask.length if length is None else length)
        mask.require(real)
        layout = make_layout(options.layout, comm.size, q.shape[1], mask, real)
        call = AttentionCall(
            comm=comm,
            kernel=_kernel(options, mask, q, k),
            layout=layout,
            length=real,
            mask=mask,
            scale=scale_of(q, options.scale),
            strategy=choose(layout, real, mask, Placement(comm.transport, None)),
            deterministic=options.deterministic,
        )
        hints = f"nodes {comm.nodes}\nheads {comm.ulysses_degree}"
        return call, f"{_signature(call, q, k, v, options)}\n{hints}" if comm.active else ""

    def choose(layout: Layout, real: int, mask: Mask, placement: Placement) -> Strategy:
        shapes = head_shapes(layout, q, k)
        return choose_strategy(options.strategy, shapes, real, mask, placement, hardware, comm.ulysses_degree)

    call = comm.decided(here)
    # What follows is collective the first time: not before all agree.
    by_levels = STRATEGIES[options.strategy].needs("double-ring")  # which have transports of their own
    moved = comm if by_levels else over_transport(comm, options.transport)
    placement = _placement(comm, moved, options)
    if moved is comm and placement.nodes is None:
        return call
    strategy = choose(call.layout, call.length, call.mask, placement)
    if strategy.outer != "double-ring":
        return replace(call, comm=moved, strategy=strategy)
    assert placement.nodes is not None
    levels = over_levels(comm, placement.nodes, options.transport, strategy.ulysses_degree)
    return replace(call, comm=moved, strategy=strategy, levels=levels)


def _placement(comm: Checked, moved: Checked, options: AttentionOptions) -> Placement:
    """Return where the ranks lie and what moves their blocks; ranks are asked only where several ways are compared.

    Raises:
        UserError: They lie unevenly on nodes, and the strategy asked for needs it.
    """
    asked = STRATEGIES[options.strategy]
    if comm.size == 1 or moved.transport == "peer":  # peers are on one node
        return Placement(moved.transport, 1 if moved.transport == "peer" else None)
    if "double-ring" not in asked.outer and asked.exchange != "some":
        return Placement(moved.transport, None)
    nodes = find_nodes(comm)
    if nodes.uneven and asked.needs("double-ring"):
        raise UserError(f"strategy '{options.strategy}' cannot work: {nodes.uneven}\nuse strategy='auto'")
    within = None if options.transport == "auto" else options.transport
    return Placement(moved.transport, nodes.count, not nodes.uneven, within)


def _signature(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str:
    """Return what must be equal on every rank, in names that a user knows: a pace follows from the rest."""
    facts = {
        "q": describe(q),
        "k": describe(k),
        "v": describe(v),
        "length": call.length,
        "mask": call.mask,
        "layout": call.layout.name,
        "scale": call.scale,
        "kernel": call.kernel.name,
        "transport": options.transport,
        **{f"strategy.{name}": value for name, value in asdict(call.strategy).items() if name != "pace"},
    }
    named = (f"{name} {value}" for name, value in facts.items())
    return "\n".join(["burst_attention", *named, gradient_signature(q, k, v)])


def _kernel(options: AttentionOptions, mask: Mask, q: Tensor, k: Tensor) -> Kernel:
    try:
        return select_kernel(options.kernel, q, k, options.deterministic, mask.needs)
    except KernelError as error:
        raise UserError(str(error)) from None


def _strides(tensor: Tensor) -> Strides:
    batch, second, third = (stride * tensor.element_size() for stride in tensor.stride()[:3])
    return Strides(batch, second, third) if tensor.dim() == 4 else Strides(batch, third, second)


def head_shapes(layout: Layout, q: Tensor, k: Tensor) -> HeadShapes:
    """Return the sizes of a rank's queries and keys, no heads exchanged; only shapes and dtype are looked at.

    Args:
        layout: Of the whole sequence.
        q: `[batch, tokens, heads, head_dim]`.
        k: `[batch, tokens, kv_heads, head_dim]`.
    """
    batch, _, heads, head_dim = q.shape
    return HeadShapes(
        layout=layout,
        degree=1,
        batch=batch,
        heads=heads,
        kv_heads=k.shape[2],
        head_dim=head_dim,
        itemsize=q.element_size(),
        statistics_itemsize=accumulation_dtype(q.dtype).itemsize,
    )

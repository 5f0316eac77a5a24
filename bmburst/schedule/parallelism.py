"""How ranks share work, as configurations name it: the shape of their mesh, and the strategies of attention.

A mesh has pipe x data x sequence x tensor ranks, with sequence groups of nodes x ring x heads ranks.

Rank `((p * data + d) * sequence + s) * tensor + t` is in stage p, and is data rank d, sequence rank s and tensor rank
t there. Ranks of one tensor group are consecutive, as in BMTrain's own topology (`tp_id = rank % tp_size`, `stage_id =
rank // (world_size / pipe_size)`), because they communicate most; then those of a sequence, so that a ring stays inside
a node if it fits. Stages communicate least. Inside a sequence group, ranks that exchange heads are consecutive and
nodes are outermost: `s = (node * ring + r) * heads + h`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import isqrt
from types import MappingProxyType
from typing import Literal

from bmburst.amounts import MOST, as_whole, whole_number
from bmburst.errors import UserError

MOST_RANKS = 65536


@dataclass(frozen=True, slots=True)
class MeshShape:
    """The number of ranks on each axis of a mesh.

    Attributes:
        data: Data parallel degree: groups of ranks that work on different sequences.
        sequence: Sequence parallel degree: ranks that share one sequence.
        tensor: Tensor parallel degree: ranks that share each matrix and its heads.
        heads: Ulysses degree: ranks of a sequence that exchange heads; None: chosen by attention.
        nodes: Nodes of a sequence group, with slow links between them.
        pipe: Pipeline parallel degree: stages, each with a part of the layers.

    Raises:
        UserError: An axis is smaller than 1, there are more than 65,536 ranks, or nodes x heads does not divide the
            sequence.
    """

    data: int
    sequence: int
    tensor: int = 1
    heads: int | None = None
    nodes: int = 1
    pipe: int = 1

    def __post_init__(self) -> None:
        axes = {"data": self.data, "sequence": self.sequence, "tensor": self.tensor, "nodes": self.nodes}
        axes["pipe"] = self.pipe
        for name, ranks in axes.items() if self.heads is None else (axes | {"heads": self.heads}).items():
            _require_whole(name, ranks)
        if not 1 <= self.size <= MOST_RANKS or min(self.data, self.sequence, self.tensor, self.pipe) < 1:
            raise UserError(
                f"{self} has an axis without ranks, or too many ranks\n"
                f"allowed: at least 1 rank on each axis, at most {MOST_RANKS:,} in all\n"
                "fix: give 1 for an axis that is not used"
            )
        _require_part("nodes", self.nodes, self.sequence, f"{self.sequence} sequence ranks")
        if self.heads is not None:
            here = self.sequence // self.nodes
            _require_part("heads", self.heads, here, f"{here} sequence ranks" + (" a node" if self.nodes > 1 else ""))

    def __str__(self) -> str:
        tensor = f" x tensor {self.tensor}" if self.tensor != 1 else ""
        pipe = f"pipe {self.pipe} x " if self.pipe != 1 else ""
        return f"{pipe}data {self.data} x sequence {self.sequence}{tensor}"

    @classmethod
    def fit(
        cls,
        world_size: int,
        data: int | None = None,
        sequence: int | None = None,
        tensor: int = 1,
        heads: int | None = None,
        nodes: int | None = None,
        pipe: int = 1,
    ) -> "MeshShape":
        """Return the mesh of `world_size` ranks.

        Args:
            world_size: Total number of ranks.
            data: Default: world_size / (pipe x sequence x tensor), or 1 without `sequence`.
            sequence: Default: world_size / (pipe x data x tensor).
            tensor: Ranks that share each matrix.
            heads: See the attributes.
            nodes: See the attributes; by default 1.
            pipe: Stages.

        Raises:
            UserError: The product of the axes is not `world_size`; the message names values that fit.
        """
        given = {"world_size": world_size, "data": data, "sequence": sequence, "tensor": tensor, "pipe": pipe}
        for name, ranks in given.items():
            if ranks is not None or name not in ("data", "sequence"):
                _require_whole(name, ranks)
        if not 1 <= world_size <= MOST_RANKS:
            raise UserError(f"world_size {world_size}\nallowed: 1 to {MOST_RANKS:,}\nfix: the number of ranks")
        _require_part("pipe", pipe, world_size, f"{world_size} ranks")
        of_stage = world_size // pipe
        _require_part("tensor", tensor, of_stage, f"{of_stage} ranks" + (" of a stage" if pipe > 1 else ""))
        rest = of_stage // tensor
        if data is None:
            data = max(1, rest // sequence) if sequence else 1
        if sequence is None:
            sequence = rest // data if data else 0
        if data < 1 or sequence < 1 or data * sequence != rest:
            each = "" if tensor == 1 else f" with tensor {tensor}"
            each += "" if pipe == 1 else f" with pipe {pipe}"
            raise UserError(
                f"{world_size} ranks cannot form a mesh of data {data} x sequence {sequence}{each}\n"
                f"fix: data x sequence must be {rest}, each one of {', '.join(map(str, divisors(rest)))}"
            )
        return cls(data, sequence, tensor, heads, 1 if nodes is None else nodes, pipe)

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return self.pipe * self.stage_size

    @property
    def stage_size(self) -> int:
        """Number of ranks of a stage."""
        return self.data * self.sequence * self.tensor

    def sequence_groups(self) -> list[list[int]]:
        """Return the global ranks of each sequence group, in ring order."""
        return [
            [self._rank(p, d, s, t) for s in range(self.sequence)]
            for p, d, t in product(*map(range, (self.pipe, self.data, self.tensor)))
        ]

    def data_groups(self) -> list[list[int]]:
        """Return the global ranks of each data group."""
        return [
            [self._rank(p, d, s, t) for d in range(self.data)]
            for p, s, t in product(*map(range, (self.pipe, self.sequence, self.tensor)))
        ]

    def tensor_groups(self) -> list[list[int]]:
        """Return the global ranks of each tensor group: ranks with parts of the same matrices, for the same tokens."""
        return [
            [self._rank(p, d, s, t) for t in range(self.tensor)]
            for p, d, s in product(*map(range, (self.pipe, self.data, self.sequence)))
        ]

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return data rank, sequence rank and tensor rank of a global rank, in its stage.

        Raises:
            UserError: There is no such rank.
        """
        if as_whole(rank) is None or not 0 <= rank < self.size:
            raise UserError(f"rank {rank!r} is not one of {self.size} ranks\nfix: 0 to {self.size - 1}")
        rest, t = divmod(rank % self.stage_size, self.tensor)
        d, s = divmod(rest, self.sequence)
        return d, s, t

    def require_heads(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """Check that a model's attention heads can be divided among the ranks, over `tensor` and then over `heads`.

        If there are fewer KV heads than ranks, several ranks hold the same KV head.

        Returns:
            Query heads and KV heads of a tensor rank.

        Raises:
            UserError: They cannot be divided; the message names the nearest degrees that work.
        """
        _require_size("query heads", heads)
        _require_size("KV heads", kv_heads)
        _require_dealt("tensor", self.tensor, heads, kv_heads, heads)
        own = heads // self.tensor, max(1, kv_heads // self.tensor)
        if self.heads is not None:
            _require_dealt("heads", self.heads, *own, self.sequence // self.nodes)
        return own

    def require_width(self, name: str, width: int) -> int:
        """Return a tensor rank's part of a width of the model.

        Raises:
            UserError: `tensor` does not divide the width; the message names the nearest degrees that work.
        """
        _require_size(name, width)
        _require_part("tensor", self.tensor, width, f"{name} {width}")
        return width // self.tensor

    def require_zero_group(self, ranks: int) -> None:
        """Raise UserError, with all sizes that work, unless ranks divide into ZeRO groups of whole tensor groups."""
        allowed = [each for each in divisors(self.size) if each % self.tensor == 0]
        if ranks not in allowed:
            tensor = f" with tensor_parallel {self.tensor}" if self.tensor > 1 else ""
            raise UserError(
                f"parallel.zero_group of {ranks} ranks is not possible on {self.size} ranks{tensor}\n"
                f"allowed: {', '.join(map(str, allowed))}\nfix: --parallel.zero_group world, or one of these"
            )

    def _rank(self, pipe: int, data: int, sequence: int, tensor: int) -> int:
        return ((pipe * self.data + data) * self.sequence + sequence) * self.tensor + tensor


def divisors(number: int) -> list[int]:
    """Return the divisors of a number of at most `MOST`, in order."""
    small = [d for d in range(1, isqrt(max(0, number)) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def can_share(degree: int, heads: int, kv_heads: int) -> bool:
    """Return whether `degree` ranks can share the heads: each has whole groups of query heads, or part of one."""
    return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)


def _require_whole(axis: str, ranks: object) -> None:
    if as_whole(ranks) is None:
        raise UserError(
            f"{axis} of a mesh must be a whole number, got {ranks!r}\nallowed: at least 1\nfix: pass an int"
        )


def _require_size(what: str, number: object) -> None:
    """Refuse a size of a model that is no number, or whose divisors would take long to find."""
    if whole_number(what, number, 1) > MOST:
        raise UserError(f"{what} {number}\nallowed: at most {MOST:,}\nfix: the size of the model")


def _require_part(axis: str, degree: int, whole: int, said: str) -> None:
    if degree < 1 or whole % degree:
        raise UserError(f"{axis} {degree} does not divide {said}\n{_nearest(degree, divisors(whole))}")


def _require_dealt(axis: str, degree: int, heads: int, kv_heads: int, whole: int) -> None:
    """Refuse a degree by which heads cannot be divided evenly, and name the nearest ones that divide `whole`."""
    if not can_share(degree, heads, kv_heads):
        raise UserError(
            f"{axis} {degree} cannot share {heads} query heads and {kv_heads} KV heads\n"
            f"{_nearest(degree, [other for other in divisors(whole) if can_share(other, heads, kv_heads)])}"
        )


def _nearest(degree: int, allowed: list[int]) -> str:
    near = [*[n for n in allowed if n < degree][-1:], *[n for n in allowed if n > degree][:1]]
    return f"fix: nearest that work: {' and '.join(map(str, near))}"


Outer = Literal["ring", "gather", "double-ring"]
RingTensors = Literal["kv", "q"]
"""The tensors that a ring sends from rank to rank in backward: keys and values, or queries and dO."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy: head exchange in groups of neighbouring ranks, and a ring or gather between the groups.

    Attributes:
        ulysses_degree: Neighbouring ranks that exchange heads (DeepSpeed Ulysses); 1 for none.
        outer: How groups of that many ranks share keys and values.
        ring_tensors: The tensors that the ring sends in backward; forward always sends keys and values.
        most_kv_heads: KV heads that one step of a gather moves; 0: all in one step.
        forward_units: Of a head exchange: query heads of a rank that are exchanged while others are computed, in order;
            empty: all in one step.
        backward_units: The same for backward.
        at_once: Whether heads are exchanged by one collective each way, before and after all kernels.
        latents: Whether ranks then send latents instead of keys and values (`bmburst.attention.latents`).
    """

    ulysses_degree: int
    outer: Outer
    ring_tensors: RingTensors
    most_kv_heads: int = 0
    forward_units: tuple[int, ...] = ()
    backward_units: tuple[int, ...] = ()
    at_once: bool = False
    latents: bool = False

    def units(self, *, backward: bool) -> tuple[int, ...]:
        """Return the units of a pass."""
        return self.backward_units if backward else self.forward_units

    @property
    def moves_queries(self) -> bool:
        """Whether backward is a ring of queries: each rank keeps its keys."""
        return self.outer != "gather" and self.ring_tensors == "q"


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategySpec:
    """The strategies that a name allows.

    Attributes:
        exchange: How many neighbouring ranks exchange heads: none, groups of some, all, or any number.
        outer: The allowed methods between such groups: a ring, a gather of the keys and values that a rank needs, or a
            double ring (inside nodes and between nodes). If all ranks are one group, it is a ring of one.
        ring_tensors: The tensors that a ring sends in backward; None: the ones that cost less.
    """

    exchange: Literal["none", "some", "all", "any"]
    outer: tuple[Outer, ...] = ("ring",)
    ring_tensors: RingTensors | None = None

    def allows(self, heads: int, size: int) -> bool:
        """Return whether `heads` of `size` neighbouring ranks may exchange heads."""
        return {"none": heads == 1, "some": 1 < heads < size, "all": heads == size, "any": True}[self.exchange]

    def fits(self, heads: int, size: int, outer: str) -> bool:
        """Return whether the name allows `heads` and `outer`; with a single group any `outer` fits."""
        return self.allows(heads, size) and (heads == size or outer in self.outer)

    def needs(self, outer: Outer) -> bool:
        """Return whether `outer` is the only method that the name allows."""
        return self.outer == (outer,)


TRANSPORTS = ("auto", "peer", "nccl", "gloo")
"""How attention may send blocks between ranks; `bmburst.comm.transports` has them."""
STRATEGIES: Mapping[str, StrategySpec] = MappingProxyType(
    {
        "auto": StrategySpec(exchange="any", outer=("ring", "gather", "double-ring")),
        "heads": StrategySpec(exchange="all"),
        "gather": StrategySpec(exchange="none", outer=("gather",)),
        "ring": StrategySpec(exchange="none"),
        "kv": StrategySpec(exchange="none", ring_tensors="kv"),
        "burst": StrategySpec(exchange="none", ring_tensors="q"),
        "heads+ring": StrategySpec(exchange="some"),
        "heads+gather": StrategySpec(exchange="some", outer=("gather",)),
        "double-ring": StrategySpec(exchange="none", outer=("double-ring",)),
    }
)


def name_of(heads: int, size: int, outer: str) -> str:
    """Return the first name that allows `heads` of `size` ranks and `outer` between groups; "auto" if none does."""
    if size == 1:
        return "auto"  # there is nothing to distribute: every name fits
    named = (name for name, asked in STRATEGIES.items() if asked.exchange != "any" and asked.fits(heads, size, outer))
    return next(named, "auto")

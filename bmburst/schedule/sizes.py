"""What attention's executors move and how they cut their work, on one rank: the formulas of their docstrings."""

from dataclasses import dataclass
from functools import cached_property

from bmburst.schedule.heads_plan import HeadShapes
from bmburst.schedule.ring_schedule import AttentionShape
from bmburst.schedule.strategy_names import Strategy
from bmburst.schedule.units import even_units, make_units


@dataclass(frozen=True)
class Sizes:
    """One rank's attention by a strategy, in bytes of its local tensors.

    Attributes:
        strategy: How it is spread.
        shapes: Sizes; `degree` is the strategy's.
    """

    strategy: Strategy
    shapes: HeadShapes

    @cached_property
    def groups(self) -> int:
        """Groups of ranks that exchange heads."""
        return self.shapes.layout.size // self.shapes.degree

    @cached_property
    def q(self) -> float:
        """Bytes of the queries, and of the output."""
        return float(self._rows * self.shapes.heads * self.shapes.head_dim * self.shapes.itemsize)

    @cached_property
    def k(self) -> float:
        """Bytes of the keys, and of the values."""
        return float(self._rows * self.shapes.kv_heads * self.shapes.head_dim * self.shapes.itemsize)

    @cached_property
    def statistics(self) -> float:
        """Bytes of log-sum-exp, and of delta."""
        return float(self._rows * self.shapes.heads * self.shapes.statistics_itemsize)

    @cached_property
    def exchanged_k(self) -> float:
        """Bytes of a rank's keys once heads are exchanged."""
        return self.k * self.shapes.replicas

    @cached_property
    def ring_forward(self) -> float:
        """Bytes of a hop forward: K and V."""
        return 2 * self.exchanged_k

    @cached_property
    def ring_backward(self) -> tuple[float, float]:
        """Bytes of a hop backward: of what visits, and of the gradients that follow it."""
        wide = self.shapes.statistics_itemsize / self.shapes.itemsize
        if self.strategy.travellers == "q":
            return 2 * self.q + 2 * self.statistics, self.q * wide
        return 2 * self.exchanged_k, 2 * self.exchanged_k * wide

    @cached_property
    def gather_bytes(self) -> float:
        """Bytes of K and V of all other groups, as a rank pulls and sends home if its queries see all of them."""
        return 2 * self.exchanged_k * (self.groups - 1)

    @cached_property
    def gather_units(self) -> int:
        """Units that a gather is cut into."""
        return len(even_units(self.shapes.own_heads, self.shapes.own_kv_heads, self.strategy.most_kv_heads))

    def unit_shares(self, *, backward: bool) -> list[float]:
        """Return the share of the query heads in each unit of an exchange of heads."""
        own, most, pace = self.shapes.own_heads, self.strategy.most_kv_heads, self.strategy.pace
        units = make_units(own, self.shapes.own_kv_heads, most=most, pace=pace, backward=backward)
        return [len(unit.heads) / own for unit in units]

    def head_bytes(self, *, backward: bool) -> tuple[float, float]:
        """Return the bytes that an exchange of heads brings to a rank, and that it takes home; its own part is in."""
        if backward:
            inward = 2 * self.q + 2 * self.exchanged_k + 2 * self.statistics
            return inward, self.q + 2 * self.exchanged_k
        return self.q + 2 * self.exchanged_k, self.q + self.statistics

    def calls(self, stops: int, *, backward: bool) -> int:
        """Return how often a pass calls the kernel.

        Args:
            stops: At how many steps a rank attends: to own keys, and to those of others.
            backward: Which pass.
        """
        units = len(self.unit_shares(backward=backward)) if self.shapes.degree > 1 else 1
        if stops == 1:
            return units
        if self.strategy.outer == "gather":
            inner = self.gather_units if self.shapes.degree == 1 else 1
            return units * (3 * inner if backward else 2 * inner + 1)
        return units * stops

    @property
    def _rows(self) -> int:
        return self.shapes.batch * self.shapes.layout.tokens


def attention_shape(shapes: HeadShapes) -> AttentionShape:
    """Return the sizes that one rank sees after the exchange of heads."""
    return AttentionShape(
        batch=shapes.batch,
        tokens=shapes.tokens,
        heads=shapes.own_heads,
        kv_heads=shapes.own_kv_heads,
        head_dim=shapes.head_dim,
        itemsize=shapes.itemsize,
        gradient_itemsize=shapes.statistics_itemsize,
        statistics_itemsize=shapes.statistics_itemsize,
    )

"""Bytes that attention's executors move and cut, on one rank and for one layer: the formulas of their docstrings."""

from dataclasses import dataclass

from bmburst.plan.candidates import Candidate
from bmburst.plan.operators import WIDE
from bmburst.schedule.units import even_units, hides_transfers, make_units, most_exchanged, most_gathered


@dataclass(frozen=True, slots=True)
class Sizes:
    """One rank's attention, in bytes of its local tensors.

    Attributes:
        candidate: Whose.
        q: Of the queries, and of the output.
        k: Of the keys, and of the values.
        statistics: Of log-sum-exp, and of delta.
    """

    candidate: Candidate
    q: float
    k: float
    statistics: float

    @property
    def copies(self) -> float:
        """Ranks that exchange heads and hold the same KV head."""
        return max(1.0, self.candidate.heads / self.candidate.own_kv_heads)

    @property
    def exchanged_k(self) -> float:
        """Bytes of a rank's keys once heads are exchanged."""
        return self.k * self.copies

    @property
    def heads(self) -> int:
        """Query heads that a kernel of this rank sees."""
        return self.candidate.own_heads // self.candidate.heads

    @property
    def kv_heads(self) -> int:
        """KV heads likewise."""
        return max(1, self.candidate.own_kv_heads // self.candidate.heads)

    @property
    def travellers(self) -> str:
        """What goes round a ring in backward, "q" or "kv"."""
        if self.candidate.travellers != "auto":
            return self.candidate.travellers
        return "q" if self._ring_total("q") <= self._ring_total("kv") else "kv"

    @property
    def ring_forward(self) -> float:
        """Bytes of a hop forward: K and V."""
        return 2 * self.exchanged_k

    @property
    def ring_backward(self) -> tuple[float, float]:
        """Bytes of a hop backward: of what visits, and of the gradients that follow it."""
        return self._ring_bytes(self.travellers)

    @property
    def gather_bytes(self) -> float:
        """Bytes of K and V that a rank pulls, and of dK and dV that it sends home."""
        return 2 * self.exchanged_k * (self.candidate.groups - 1)

    @property
    def gather_units(self) -> int:
        """Units that a gather is cut into."""
        return len(even_units(self.heads, self.kv_heads, self.most_kv_heads))

    @property
    def most_kv_heads(self) -> int:
        """KV heads that move in one step, as `bmburst.schedule.strategy` decides; 0: all."""
        candidate, task = self.candidate, self.candidate.task
        whole = candidate.tokens * candidate.sequence
        work = 2.0 * task.micro_batch * whole**2 * task.model.head_dim
        hides = candidate.sequence_nodes == 1 and hides_transfers(candidate.transport, work)
        vector = task.micro_batch * task.model.head_dim * task.itemsize
        if candidate.heads == 1:
            return most_gathered(candidate.own_kv_heads, vector * whole, hides=hides)
        return most_exchanged(self.heads, self.kv_heads, vector * candidate.tokens * candidate.heads, hides=hides)

    def unit_shares(self, *, backward: bool) -> list[float]:
        """Return the share of the query heads in each unit of an exchange of heads."""
        units = make_units(self.heads, self.kv_heads, most=self.most_kv_heads, backward=backward)
        return [len(unit.heads) / self.heads for unit in units]

    def head_bytes(self, *, backward: bool) -> tuple[float, float]:
        """Return the bytes that an exchange of heads brings to a rank, and that it takes home; its own part is in."""
        if backward:
            inward = 2 * self.q + 2 * self.exchanged_k + 2 * self.statistics
            return inward, self.q + 2 * self.exchanged_k
        return self.q + 2 * self.exchanged_k, self.q + self.statistics

    def calls(self, *, backward: bool) -> int:
        """Return how often a pass calls the kernel."""
        units = len(self.unit_shares(backward=backward)) if self.candidate.heads > 1 else 1
        if self.candidate.groups == 1:
            return units
        if self.candidate.outer == "gather":
            inner = self.gather_units if self.candidate.heads == 1 else 1
            return units * (3 * inner if backward else 2 * inner + 1)
        return units * self.candidate.groups

    def _ring_bytes(self, travellers: str) -> tuple[float, float]:
        wide = WIDE / self.candidate.task.itemsize
        if travellers == "q":
            return 2 * self.q + 2 * self.statistics, self.q * wide
        return 2 * self.exchanged_k, 2 * self.exchanged_k * wide

    def _ring_total(self, travellers: str) -> float:
        visiting, returning = self._ring_bytes(travellers)
        return (self.candidate.groups - 1) * visiting + self.candidate.groups * returning


def sizes(candidate: Candidate) -> Sizes:
    """Return a candidate's sizes."""
    rows, model = candidate.rows, candidate.task.model
    vector = model.head_dim * candidate.task.itemsize
    return Sizes(
        candidate,
        q=float(rows * candidate.own_heads * vector),
        k=float(rows * candidate.own_kv_heads * vector),
        statistics=float(rows * candidate.own_heads * WIDE),
    )

"""Formulas for the bytes that attention communicates, saves and writes to memory, by method of the paper's table 1.

They are for one layer on one rank of G, without a mask: B sequences of N tokens, Z query and Zk KV heads of d features,
h bytes per element, w bytes per fp32 number. `tests/benchmarks/test_overheads.py` checks the formulas by counting. The
tables of `docs/paper.md` on overheads were made of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The shape of an attention over ranks."""

    ranks: int  # G
    batch: int = 1  # B
    tokens: int  # N, of the whole sequence
    heads: int  # Z, of queries
    kv_heads: int  # Zk
    head_dim: int = 128  # d
    itemsize: int = 2  # h, bytes per element: 2 in bfloat16
    wide: int = 4  # w, bytes per element of accumulators and statistics

    @property
    def q(self) -> float:
        """Bytes of a rank's queries: B N Z d h / G."""
        return self.batch * self.tokens / self.ranks * self.heads * self.head_dim * self.itemsize

    @property
    def k(self) -> float:
        """Bytes of a rank's keys: B N Zk d h / G."""
        return self.q * self.kv_heads / self.heads

    @property
    def statistics(self) -> float:
        """Bytes of one wide number per query and head of a rank: B N Z w / G."""
        return self.q / self.head_dim / self.itemsize * self.wide

    @property
    def scores(self) -> float:
        """Bytes of a rank's rows of scores, in the inputs' dtype: B N^2 Z h / G."""
        return self.q / self.head_dim * self.tokens

    @property
    def rise(self) -> float:
        """w / h."""
        return self.wide / self.itemsize


Bytes = Callable[[Shape], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """Communication and memory of one method."""

    forward: Bytes  # that a rank receives
    backward: Bytes  # that a rank receives
    kept: Bytes  # that a rank saves for backward of a layer's attention
    scores: Bytes = lambda _: 0.0  # of scores and weights that forward writes to the GPU's memory
    at_work: Bytes = lambda _: 0.0  # of scores and weights at their peak


def _hops(s: Shape) -> int:
    return s.ranks - 1


def _ours(s: Shape) -> float:
    return 2 * s.q + 2 * s.k + s.statistics


def _copies(s: Shape) -> float:
    """Return the number of copies of a KV head in a head exchange: one per rank that has query heads of it."""
    return max(1.0, s.ranks / s.kv_heads)


_HEADS = Method(
    forward=lambda s: (2 * s.q + 2 * s.k * _copies(s) + s.statistics) * _hops(s) / s.ranks,
    backward=lambda s: (3 * s.q + 4 * s.k * _copies(s) + 2 * s.statistics) * _hops(s) / s.ranks,
    kept=_ours,
)
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "RingAttention (Li et al.)": Method(
            forward=lambda s: 2 * s.k * _hops(s),
            backward=lambda s: 4 * s.k * _hops(s),
            kept=lambda s: s.q + 2 * s.k + s.scores,
            scores=lambda s: 2 * s.scores,
            at_work=lambda s: 2 * s.scores,
        ),
        "tensor parallel v1, attention's half": Method(
            forward=lambda s: 2 * s.q * _hops(s), backward=lambda s: 2 * s.q * _hops(s), kept=_ours
        ),
        "tensor parallel v3, attention's half": Method(
            forward=lambda s: 2 * s.q * _hops(s), backward=lambda s: 2 * s.q * _hops(s), kept=_ours
        ),
        "burst": Method(
            forward=lambda s: 2 * s.k * _hops(s),
            backward=lambda s: 2 * (s.q + s.statistics) * _hops(s) + s.rise * s.q * s.ranks,
            kept=_ours,
        ),
        "kv": Method(
            forward=lambda s: 2 * s.k * _hops(s),
            backward=lambda s: 2 * s.k * _hops(s) + 2 * s.rise * s.k * s.ranks,
            kept=_ours,
        ),
        "heads (Ulysses) over NCCL": _HEADS,
        "heads (Ulysses) by peer copies, the default": _HEADS,
        "gather": Method(forward=lambda s: 2 * s.k * _hops(s), backward=lambda s: 4 * s.k * _hops(s), kept=_ours),
    }
)

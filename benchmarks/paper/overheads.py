"""Formulas for the bytes that attention communicates, saves and writes to memory: the paper's table 1, and bmburst.

They are for one layer on one rank of G, without a mask: B sequences of N tokens, Z query and Zk KV heads of d features,
h bytes per element, w bytes per fp32 number. `tests/benchmarks/test_overheads.py` checks the formulas by counting. The
tables of `docs/paper.md` on overheads are of these formulas. Imports no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The shape of an attention over ranks.

    Attributes:
        ranks: G, the number of ranks.
        batch: B, the number of sequences.
        tokens: N, tokens of the whole sequence.
        heads: Z, the number of query heads.
        kv_heads: Zk, the number of KV heads.
        head_dim: d, features of a head.
        itemsize: h, bytes per element: 2 in bfloat16.
        wide: w, bytes per element of accumulators and statistics.
    """

    ranks: int
    batch: int = 1
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    itemsize: int = 2
    wide: int = 4

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
LI = "RingAttention (Li et al.)"
ON_CHIP = 98304  # M: numbers of 16 bits in the 192 KiB of an A100's multiprocessor


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """Communication, memory and I/O of one method.

    Attributes:
        paper: Communication in the paper, forward / backward, in elements; "" if the paper does not list the method.
        paper_kept: Activation memory in the paper, in elements, with M elements of on-chip memory; "" likewise.
        forward: Bytes that a rank receives in forward.
        backward: Bytes that a rank receives in backward.
        formulas: `forward` and `backward` as text.
        kept: Bytes that a rank saves for backward of a layer's attention.
        kept_formula: `kept` as text.
        scores: Bytes of scores and weights that forward writes to the GPU's memory.
        scores_formula: `scores` as text.
        at_work: Peak bytes of scores and weights in memory.
        io: Elements that forward reads from and writes to the GPU's memory: the order, without constants.
        io_formula: `io` as text.
    """

    paper: str
    paper_kept: str
    forward: Bytes
    backward: Bytes
    formulas: tuple[str, str]
    kept: Bytes
    kept_formula: str
    scores: Bytes = lambda _: 0.0
    scores_formula: str = "0"
    at_work: Bytes = lambda _: 0.0
    io: Bytes = lambda s: s.batch * s.heads * s.tokens**2 * s.head_dim**2 / (s.ranks * ON_CHIP)
    io_formula: str = "B Z N^2 d^2 / (G M)"


def _hops(s: Shape) -> int:
    return s.ranks - 1


def _ours(s: Shape) -> float:
    return 2 * s.q + 2 * s.k + s.statistics


def _copies(s: Shape) -> float:
    """Return the number of copies of a KV head in a head exchange: one per rank that has query heads of it."""
    return max(1.0, s.ranks / s.kv_heads)


def _tile_scores(s: Shape) -> float:
    """Return the bytes of a rank's tiles without LAO: scores in the inputs' dtype and in fp32, and weights."""
    return s.scores * (2 + s.rise)


def _io_of_scores(s: Shape) -> float:
    """Return the order of `Method.io` for attention that writes its scores to memory."""
    return s.batch * s.heads * (s.tokens * s.head_dim + s.tokens**2) / s.ranks


_IO_OF_SCORES = "B Z (N d + N^2) / G"
_PAPER_FLASH = "4 BZNd / G + (M / 4d)^2 + BNH"
_KEPT = "q, k, v, o, lse: B N d h (2 Z + 2 Zk) / G + B N Z w / G"
_HEADS = Method(
    paper="",
    paper_kept="",
    forward=lambda s: (2 * s.q + 2 * s.k * _copies(s) + s.statistics) * _hops(s) / s.ranks,
    backward=lambda s: (3 * s.q + 4 * s.k * _copies(s) + 2 * s.statistics) * _hops(s) / s.ranks,
    formulas=("(2 q + 2 k c + statistics) (G - 1) / G", "(3 q + 4 k c + 2 statistics) (G - 1) / G"),
    kept=_ours,
    kept_formula=_KEPT,
)
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        LI: Method(
            paper="2 BZNd / 6 BZNd",
            paper_kept="4 BZNd / G + BZN^2 / G + BNH / G",
            forward=lambda s: 2 * s.k * _hops(s),
            backward=lambda s: 4 * s.k * _hops(s),
            formulas=("2 k (G - 1)", "4 k (G - 1)"),
            kept=lambda s: s.q + 2 * s.k + s.scores,
            kept_formula="q, k, v, weights: B N d h (Z + 2 Zk) / G + B N^2 Z h / G",
            scores=lambda s: 2 * s.scores,
            scores_formula="2 B N^2 Z h / G",
            at_work=lambda s: 2 * s.scores,
            io=_io_of_scores,
            io_formula=_IO_OF_SCORES,
        ),
        "tensor parallel v1, attention's half": Method(
            paper="4 BZNd / 4 BZNd with the MLP",
            paper_kept=_PAPER_FLASH,
            forward=lambda s: 2 * s.q * _hops(s),
            backward=lambda s: 2 * s.q * _hops(s),
            formulas=("2 q (G - 1), an all-reduce", "2 q (G - 1)"),
            kept=_ours,
            kept_formula=f"{_KEPT}, of own heads",
        ),
        "tensor parallel v3, attention's half": Method(
            paper="4 BZNd / 4 BZNd with the MLP",
            paper_kept=_PAPER_FLASH,
            forward=lambda s: 2 * s.q * _hops(s),
            backward=lambda s: 2 * s.q * _hops(s),
            formulas=("2 q (G - 1), all-gather and reduce-scatter", "2 q (G - 1)"),
            kept=_ours,
            kept_formula=f"{_KEPT}, of own heads",
        ),
        "burst": Method(
            paper="2 BZNd / 3 BZNd + 2 BZN",
            paper_kept=f"{_PAPER_FLASH} / G",
            forward=lambda s: 2 * s.k * _hops(s),
            backward=lambda s: 2 * (s.q + s.statistics) * _hops(s) + s.rise * s.q * s.ranks,
            formulas=("2 k (G - 1)", "2 (q + statistics) (G - 1) + q w/h G"),
            kept=_ours,
            kept_formula=_KEPT,
        ),
        "burst without LAO": Method(
            paper="2 BZNd / 3 BZNd + 2 BZN",
            paper_kept="4 BZNd / G + BZN^2 / G^2 + BNH / G",
            forward=lambda s: 2 * s.k * _hops(s),
            backward=lambda s: 2 * (s.q + s.statistics) * _hops(s) + s.rise * s.q * s.ranks,
            formulas=("2 k (G - 1)", "2 (q + statistics) (G - 1) + q w/h G"),
            kept=_ours,
            kept_formula=_KEPT,
            scores=_tile_scores,
            scores_formula="B N^2 Z (2 h + w) / G",
            at_work=lambda s: s.scores * (1 + s.rise) / s.ranks,
            io=_io_of_scores,
            io_formula=_IO_OF_SCORES,
        ),
        "kv": Method(
            paper="",
            paper_kept="",
            forward=lambda s: 2 * s.k * _hops(s),
            backward=lambda s: 2 * s.k * _hops(s) + 2 * s.rise * s.k * s.ranks,
            formulas=("2 k (G - 1)", "2 k (G - 1) + 2 k w/h G"),
            kept=_ours,
            kept_formula=_KEPT,
        ),
        "heads (Ulysses) over NCCL": _HEADS,
        "heads (Ulysses) by peer copies, the default": _HEADS,
        "gather": Method(
            paper="",
            paper_kept="",
            forward=lambda s: 2 * s.k * _hops(s),
            backward=lambda s: 4 * s.k * _hops(s),
            formulas=("2 k (G - 1)", "4 k (G - 1)"),
            kept=_ours,
            kept_formula=_KEPT,
        ),
    }
)

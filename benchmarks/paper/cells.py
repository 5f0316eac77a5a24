"""Cells of the benchmark of the paper's ablations and of the README's tables. Imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.attention.cells import GQA, MHA, Cell
from benchmarks.engine.kind import ONE_GPU, BaseCell, BaseSelection

KV, BURST = "kv", "burst"
ONLINE, AT_THE_END, NO_OVERLAP = "online", "at-the-end", "no-overlap"
FLASH, WHOLE_TILE = "flash", "whole-tile"
OURS = "ours"
_KIB = 1024
LONGEST_ALONE = 512 * _KIB  # tokens that one GPU attends to: longer, the README has no time either


class PaperSuite(NamedTuple):
    """What a suite measures where the options do not say.

    Attributes:
        methods: Its methods.
        tokens: Sequence lengths.
        mask: "causal" or "full".
        setups: `(heads, kv_heads)`.
        batches: Sequences at once.
    """

    methods: tuple[str, ...]
    tokens: tuple[int, ...]
    mask: str
    setups: tuple[tuple[int, int], ...] = (MHA,)
    batches: tuple[int, ...] = (1,)


SUITES: Mapping[str, PaperSuite] = MappingProxyType(
    {
        # What moves in backward: K and V with their gradients, or Q, dO and statistics with dQ.
        "backward": PaperSuite((KV, BURST), (64 * _KIB,), "causal", setups=(MHA, GQA)),
        # Global attention optimization: partial results are merged as they come, transfers run beside kernels.
        "merge": PaperSuite((ONLINE, AT_THE_END, NO_OVERLAP), (32 * _KIB, 128 * _KIB), "causal"),
        # Local attention optimization: the scores of a tile stay on the chip, or are written to memory.
        "tile": PaperSuite((FLASH, WHOLE_TILE), tuple(_KIB * n for n in (4, 8, 16, 32, 64)), "full"),
        # The tables of the README, without a mask as its times suggest.
        "batch": PaperSuite((ONE_GPU, OURS), (64 * _KIB,), "full", batches=(1, 2, 4, 8)),
        "sequence": PaperSuite((ONE_GPU, OURS), tuple(_KIB * n for n in (64, 128, 256, 512, 1024)), "full"),
    }
)
METHODS = tuple(dict.fromkeys(name for suite in SUITES.values() for name in suite.methods))


@dataclass(frozen=True, kw_only=True)
class PaperCell(BaseCell):
    """One measurement.

    Attributes:
        suite: One of `SUITES`.
        method: One of the suite's.
        tokens: Tokens of the whole sequence.
        batch: Sequences at once.
        heads: Query heads.
        kv_heads: Key/value heads.
    """

    tokens: int
    batch: int = 1
    heads: int
    kv_heads: int

    @property
    def mask(self) -> str:
        """The suite's mask."""
        return SUITES[self.suite].mask

    @property
    def attention(self) -> Cell:
        """The same as a cell of the attention benchmark."""
        return Cell(
            suite="sequence",
            method=self.method,
            ranks=self.ranks,
            device=self.device,
            dtype=self.dtype,
            tokens=self.tokens,
            batch=self.batch,
            heads=self.heads,
            kv_heads=self.kv_heads,
            mask=self.mask,
        )

    @property
    def name(self) -> str:
        """For example `backward/65536/gqa/burst` or `batch/8x65536/mha/ours`; globs are matched against it."""
        tokens = f"{self.batch}x{self.tokens}" if self.suite == "batch" else f"{self.tokens}"
        return f"{self.suite}/{tokens}/{self.attention.head_setup}/{self.method}"


def list_cells(selection: BaseSelection) -> tuple[PaperCell, ...]:
    """Return the selected cells of every suite, in the order in which they run: short sequences first."""
    found = (cell for suite in SUITES for cell in _cells(selection, suite))
    return tuple(cell for cell in found if selection.fits(cell) and (cell.ranks > 1 or cell.tokens <= LONGEST_ALONE))


def _cells(selection: BaseSelection, name: str) -> Iterator[PaperCell]:
    suite = SUITES[name]
    everything = product(
        selection.ranks,
        suite.setups,
        selection.tokens or suite.tokens,
        suite.batches,
        (method for method in suite.methods if method in selection.methods),
    )
    for ranks, (heads, kv_heads), tokens, batch, method in everything:
        yield PaperCell(
            suite=name,
            method=method,
            ranks=1 if method == ONE_GPU else ranks,
            device=selection.device,
            dtype=selection.plain_dtype,
            tokens=tokens,
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
        )

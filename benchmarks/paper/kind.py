"""Registers `bmburst bench paper`: the paper's ablations and the README's tables. Imports no torch."""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.attention import GQA, HEAD_DIM, MHA, Cell, forward_flops
from benchmarks.engine import OK, ONE_GPU, BaseCell, BaseSelection, Kind, Results, Row, selection_of
from benchmarks.engine.report import Rows, grid, groups, known, ranks_name
from bmburst.errors import UserError

if TYPE_CHECKING:
    from benchmarks.engine.job import RankRun

KV, BURST = "kv", "burst"
ONLINE, AT_THE_END, NO_OVERLAP = "online", "at-the-end", "no-overlap"
FLASH, WHOLE_TILE = "flash", "whole-tile"
OURS = "ours"
_KIB = 1024


class PaperSuite(NamedTuple):
    """The defaults of a suite.

    Attributes:
        methods: Names of methods.
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
        # A ring's backward moves K and V with dK and dV, or Q, dO and statistics with dQ.
        "backward": PaperSuite((KV, BURST), (64 * _KIB,), "causal", setups=(MHA, GQA)),
        # Global attention optimization: partial results are merged as they arrive, transfers overlap with kernels.
        "merge": PaperSuite((ONLINE, AT_THE_END, NO_OVERLAP), (32 * _KIB, 128 * _KIB), "causal"),
        # Local attention optimization: the scores of a tile stay on chip, or are written to memory.
        "tile": PaperSuite((FLASH, WHOLE_TILE), tuple(_KIB * n for n in (4, 8, 16, 32, 64)), "full"),
        # The tables of the README. Its times suggest attention without a mask.
        "batch": PaperSuite((ONE_GPU, OURS), (64 * _KIB,), "full", batches=(1, 2, 4, 8)),
        "sequence": PaperSuite((ONE_GPU, OURS), tuple(_KIB * n for n in (64, 128, 256, 512, 1024)), "full"),
    }
)
METHODS = tuple(dict.fromkeys(name for suite in SUITES.values() for name in suite.methods))
_TITLES = {
    "backward": "What moves in backward",
    "merge": "Partial results merged as they come, or at the end; transfers beside kernels, or before them",
    "tile": "A tile's scores on the chip, or in memory",
    "batch": "Attention over batch size",
    "sequence": "Attention over sequence length",
}


@dataclass(frozen=True, kw_only=True)
class PaperCell(BaseCell):
    """One measurement.

    Attributes:
        suite: One of `SUITES`.
        method: One of the suite's methods.
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
        """The cell of the attention benchmark with the same shape."""
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
    return tuple(cell for cell in found if selection.fits(cell))


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


def describe(cell: PaperCell, row: Row) -> str:
    """Return a measured row in one line."""
    del cell
    times = ", ".join(f"{name} {time['median']:.2f} ms" for name, time in row["milliseconds"].items())
    moved = f", {row['bytes'] / 1e6:.1f} MB received in backward" if "bytes" in row else ""
    return f"{times}{moved}, {known(row['peak_memory_gib'])} GiB ({row['seconds']:.1f} s)"


def tables(results: Results[PaperCell], notes: dict[str, int]) -> list[str]:
    """Return all tables as lines; see `benchmarks.engine.report.grid` for the notes."""
    lines: list[str] = []
    for title, rows in _settings(results):
        lines += [f"## {title}", "", *grid(_head(rows), rows, _column(rows), _shown, notes)]
        if any("bytes" in row for _, row in rows):
            lines += grid(
                "MB received in backward", rows, _column(rows), lambda row: f"{row['bytes'] / 1e6:.1f}", notes
            )
        lines += grid(f"peak GiB: {_names(rows)}", rows, _column(rows), _peaks, notes)
    return lines


def draw(results: Results[PaperCell], stem: Path) -> list[Path]:
    """Draw nothing: `docs/paper.md` has the pictures."""
    del results, stem
    return []


def _settings(results: Results[PaperCell]) -> Iterator[tuple[str, Rows[PaperCell]]]:
    def title(cell: PaperCell) -> str:
        heads = f"{cell.heads} heads" if cell.heads == cell.kv_heads else f"{cell.heads} q / {cell.kv_heads} kv heads"
        where = f"{heads}, head dim {HEAD_DIM}, {cell.mask}, {cell.dtype}"
        return f"{_TITLES[cell.suite]}: {where}, {ranks_name(cell)}"

    for suite in SUITES:
        rows = sorted(results.cell_rows(suite), key=lambda pair: -pair[0].ranks)  # the first row determines the title
        yield from groups(rows, lambda cell: (cell.heads, cell.kv_heads, cell.device, cell.dtype), title)


def _column(rows: Rows[PaperCell]) -> Callable[[PaperCell], int]:
    return (lambda cell: cell.batch) if rows[0][0].suite == "batch" else (lambda cell: cell.tokens)


def _names(rows: Rows[PaperCell]) -> str:
    names = next((list(row["milliseconds"]) for _, row in rows if "milliseconds" in row), [])
    return " / ".join(name.replace("_", " + ") for name in names)


def _head(rows: Rows[PaperCell]) -> str:
    return f"ms: {_names(rows)}"


def _shown(row: Row) -> str:
    return " / ".join(f"{time['median']:.2f}" for time in row["milliseconds"].values())


def _peaks(row: Row) -> str:
    return " / ".join(known(peak) for peak in row["peak_gib"].values())


def _configure(group: argparse._ArgumentGroup) -> None:
    del group  # this kind has no options of its own


def _select(args: argparse.Namespace, device: str, ranks: tuple[int, ...]) -> tuple[PaperCell, ...]:
    if len(ranks) > 1 or ranks[0] < 2:
        named = ",".join(map(str, ranks))
        raise UserError(f"bench paper on {named} ranks\nallowed: one number, 2 or more\nfix: --gpus 2 or --ranks 2")
    return list_cells(BaseSelection(**selection_of(args, device, ranks, list(METHODS))))


def _starts(args: argparse.Namespace, cells: Sequence[PaperCell], ranks: tuple[int, ...]) -> list[dict[str, Any]]:
    del args
    return [{"cells": tuple(cells), "ranks": ranks[0]}]


def _estimate(results: Results[PaperCell], cell: PaperCell) -> float:
    """Return the approximate seconds of a cell, scaled from the recorded cell of its method with the nearest FLOPs."""
    work = forward_flops(cell.attention)
    timed = [
        (forward_flops(other.attention), float(row["seconds"]))
        for other, row in results.cell_rows(cell.suite, status=OK)
        if (other.method, other.device) == (cell.method, cell.device)
    ]
    if not timed:
        return 0.0
    nearest, seconds = min(timed, key=lambda pair: abs(math.log(pair[0] / work)))
    return seconds * max(0.5, work / nearest)


def _rank_run() -> "type[RankRun[PaperCell]]":
    from benchmarks.paper.measure import PaperRun

    return PaperRun


KIND = Kind(
    name="paper",
    format="bmburst benchmark of the paper 1",
    cell=PaperCell,
    own_options=(),
    defaults={"repeats": 5, "cell_seconds": 2.0, "cell_timeout": 300.0},
    configure=_configure,
    select=_select,
    refusal=lambda _: None,
    starts=_starts,
    estimate=_estimate,
    rank_run=_rank_run,
    describe=describe,
    tables=tables,
    draw=draw,
)

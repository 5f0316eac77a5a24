"""Registers `bmburst bench paper`: the cells that the options select, and estimates of a cell's time."""

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.attention.cells import forward_flops
from benchmarks.engine.kind import OK, BaseSelection, Kind, Results, selection_of
from benchmarks.paper import report
from benchmarks.paper.cells import METHODS, PaperCell, list_cells
from bmburst.errors import UserError

if TYPE_CHECKING:
    from benchmarks.engine.rank import RankRun


def _configure(group: argparse._ArgumentGroup) -> None:
    del group  # it has none of its own


def _select(args: argparse.Namespace, device: str, ranks: tuple[int, ...]) -> tuple[PaperCell, ...]:
    if len(ranks) > 1 or ranks[0] < 2:
        named = ",".join(map(str, ranks))
        raise UserError(f"bench paper on {named} ranks\nallowed: one number, 2 or more\nfix: --gpus 2 or --ranks 2")
    return list_cells(BaseSelection(**selection_of(args, device, ranks, list(METHODS))))


def _starts(args: argparse.Namespace, cells: Sequence[PaperCell], ranks: tuple[int, ...]) -> list[dict[str, Any]]:
    del args
    return [{"cells": tuple(cells), "ranks": ranks[0]}]


def _estimate(results: Results[PaperCell], cell: PaperCell) -> float:
    """Return about how many seconds a cell will take: as the one of its suite and method that is nearest in work."""
    work = forward_flops(cell.attention)
    known = [
        (forward_flops(other.attention), float(row["seconds"]))
        for other, row in results.cell_rows(cell.suite, status=OK)
        if (other.method, other.device) == (cell.method, cell.device)
    ]
    if not known:
        return 0.0
    nearest, seconds = min(known, key=lambda pair: abs(math.log(pair[0] / work)))
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
    describe=report.describe,
    tables=report.tables,
    draw=report.draw,
)

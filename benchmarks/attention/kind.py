"""Registers `bmburst bench attention`: its options, the cells they select, and estimates of a cell's time."""

import argparse
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.attention import report
from benchmarks.attention.cells import HEAD_DIM, MASKS, Cell, Selection, forward_flops, list_cells
from benchmarks.engine.kind import OK, RUNTIMES, Kind, Results, selection_of
from bmburst.errors import UserError

if TYPE_CHECKING:
    from benchmarks.engine.rank import RankRun

_PLAIN = ("sequence", "batch")  # suites whose cells take the same time for the same work


def _configure(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--runtime",
        choices=RUNTIMES,
        default="torch",
        help="process groups of torch.distributed or of BMTrain (default: torch)",
    )
    add("--heads", type=int, metavar="N", help="query heads, instead of 32/32 and 32/8")
    add("--kv-heads", type=int, metavar="N", help="KV heads (default: as --heads)")
    add("--head-dim", type=int, metavar="N", default=HEAD_DIM, help=f"head dimension (default: {HEAD_DIM})")
    add("--mask", choices=(*MASKS, "all"), default="all", help="masks to measure (default: all)")
    add("--deterministic", action="store_true", help="call burst_attention with deterministic=True")


def _select(args: argparse.Namespace, device: str, ranks: tuple[int, ...]) -> tuple[Cell, ...]:
    from benchmarks.attention.methods import all_methods

    for name in ("heads", "kv_heads", "head_dim"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(
                f"--{name.replace('_', '-')} {value}\nallowed: at least 1\nfix: leave it out for the suite's own"
            )
    if len(ranks) > 1:
        given = f"--gpus {args.gpus}" if args.ranks is None else f"--ranks {args.ranks}"
        raise UserError(f"{given}: attention takes one number of ranks\nfix: run the command once for each")
    heads = None
    if args.heads is not None or args.kv_heads is not None:
        queries = args.heads or max(32, args.kv_heads)
        heads = ((queries, args.kv_heads or queries),)
    return list_cells(
        Selection(
            heads=heads,
            head_dim=args.head_dim,
            masks=MASKS if args.mask == "all" else (args.mask,),
            **selection_of(args, device, ranks, list(all_methods(device))),
        )
    )


def _refusal(cell: Cell) -> str | None:
    from benchmarks.attention.methods import all_methods

    return all_methods(cell.device)[cell.method].refusal(cell)


def _starts(args: argparse.Namespace, cells: Sequence[Cell], ranks: tuple[int, ...]) -> list[dict[str, Any]]:
    options = {"deterministic": args.deterministic}
    return [{"cells": tuple(cells), "ranks": ranks[0], "runtime": args.runtime, "options": options}]


def _estimate(results: Results[Cell], cell: Cell) -> float:
    """Return about how many seconds a cell will take: the median of those nearest in work, scaled by it.

    Only cells of the same kind of run are looked at. The first to use a kernel took longer.
    """
    known = [
        (other, float(row["seconds"]))
        for other, row in results.cell_rows(*(_PLAIN if cell.suite in _PLAIN else (cell.suite,)), status=OK)
        if (other.ranks, other.device) == (cell.ranks, cell.device)
    ]
    if not known:
        return 0.0
    work = forward_flops(cell)
    nearest = min((forward_flops(other) for other, _ in known), key=lambda flops: abs(math.log(flops / work)))
    seconds = statistics.median(seconds for other, seconds in known if forward_flops(other) == nearest)
    return seconds * max(0.5, work / nearest)


def _rank_run() -> "type[RankRun[Cell]]":
    from benchmarks.attention.measure import AttentionRun

    return AttentionRun


KIND = Kind(
    name="attention",
    format="bmburst attention benchmark 1",
    cell=Cell,
    own_options=("runtime", "heads", "kv_heads", "head_dim", "mask", "deterministic"),
    defaults={"repeats": 9, "cell_seconds": 10.0, "cell_timeout": 300.0},
    configure=_configure,
    select=_select,
    refusal=_refusal,
    starts=_starts,
    estimate=_estimate,
    rank_run=_rank_run,
    timelines=lambda cell: tuple(f"{cell.key}/{direction}" for direction in report.DIRECTIONS),
    describe=report.describe,
    tables=report.tables,
    draw=report.draw,
)

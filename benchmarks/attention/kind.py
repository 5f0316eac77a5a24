"""Registers `bmburst bench attention`: its options, the cells they select, estimates of time, tables and pictures."""

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.attention.cells import HEAD_DIM, MASKS, SUITES, TREE, Cell, Selection, forward_flops, list_cells
from benchmarks.engine.kinds import OK, ONE_GPU, RUNTIMES, Kind, Results, Row, selection_of
from benchmarks.engine.report import (
    Rows,
    grid,
    groups,
    is_measured,
    known,
    of_whom,
    panel,
    plot_methods,
    ranks_name,
    spread_name,
)
from bmburst.amounts import short
from bmburst.errors import UserError

_PLAIN = ("sequence", "batch")  # suites whose cells take the same time for the same FLOPs
DIRECTIONS = {"forward": "forward", "forward_backward": "forward + backward"}
_TITLE = {
    "sequence": "Attention over sequence length, batch 1",
    "batch": "Attention over batch size",
    "block": "Attention block (projections, rotary, attention) over sequence length",
    "documents": "Attention of packed causal documents over tokens in all",
    "window": "Attention in a causal sliding window over sequence length",
    TREE: "Attention of a prompt and its answers, a prefix tree, over tokens in all",
    "accuracy": "Relative L2 error against fp64",
}
_ERRORS = {"o": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}


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
    add("--mask", choices=(*MASKS, TREE, "all"), default="all", help="masks to measure (default: all)")
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
            masks=(*MASKS, TREE) if args.mask == "all" else (args.mask,),
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
    """Return the approximate seconds of a cell: the median of recorded cells with the nearest FLOPs, scaled by FLOPs.

    Only cells with the same ranks and device count. The first cell of a kernel takes longer, hence the median.
    """
    timed = [
        (other, float(row["seconds"]))
        for other, row in results.cell_rows(*(_PLAIN if cell.suite in _PLAIN else (cell.suite,)), status=OK)
        if (other.ranks, other.device) == (cell.ranks, cell.device)
    ]
    if not timed:
        return 0.0
    work = forward_flops(cell)
    nearest = min((forward_flops(other) for other, _ in timed), key=lambda flops: abs(math.log(flops / work)))
    seconds = statistics.median(seconds for other, seconds in timed if forward_flops(other) == nearest)
    return seconds * max(0.5, work / nearest)


def describe(cell: Cell, row: Row) -> str:
    """Return a measured row in one line."""
    if cell.suite == "accuracy":
        return ", ".join(f"{_ERRORS[n]} {value:.2e}" for n, value in row["errors"].items())
    parts = [f"{title} {_speed_of(row[direction])}" for direction, title in DIRECTIONS.items()]
    chosen = row.get("strategy")
    how = f", {spread_name(cell.ranks, chosen)} by {row['transport']}" if chosen else ""
    return f"{'; '.join(parts)} ({row['seconds']:.1f} s{how})"


def _speed_of(part: Row) -> str:
    times = f", {part['times_arithmetic']:.2f} x arithmetic" if "times_arithmetic" in part else ""
    return f"{part['milliseconds']['median']:.2f} ms {_rate(part)} TFLOP/s ratio {part['ratio']:.3f}{times}"


def _rate(part: Row) -> str:
    """Return TFLOP/s as text; on a CPU the number is below one."""
    return f"{part['tflops']:.0f}" if part["tflops"] >= 10 else f"{part['tflops']:.2g}"


def tables(results: Results[Cell], notes: dict[str, int]) -> list[str]:
    """Return all tables as lines; see `grid` for the notes."""
    lines: list[str] = []
    for suite in SUITES:
        for title, rows in comparisons(results, suite):
            lines += [f"## {title}", "", *_mask_facts(rows)]
            lines += _accuracy(rows, notes) if suite == "accuracy" else _speed(suite, rows, notes)
    return lines


def comparisons(results: Results[Cell], suite: str) -> Iterable[tuple[str, Rows[Cell]]]:
    """Yield a title and rows for every setting in which methods of a suite can be compared."""
    # Rows of a group differ in the column of the table. Accuracy and batch tables are separate for each length.
    return groups(
        results.cell_rows(suite),
        lambda cell: (
            *(cell.heads, cell.kv_heads, cell.head_dim, cell.mask, cell.dtype, cell.device),
            0 if suite == "accuracy" else cell.ranks,
            cell.tokens if suite in ("batch", "accuracy") else 0,
        ),
        lambda cell: _title(suite, cell),
    )


def _column(suite: str) -> Callable[[Cell], int]:
    """Return the function from a cell to its column in the tables of a suite."""
    names = {"batch": "batch", "accuracy": "ranks"}
    return lambda cell: int(getattr(cell, names.get(suite, "tokens")))


def _title(suite: str, cell: Cell) -> str:
    tokens = f", {short(cell.tokens)} tokens" if suite in ("batch", "accuracy") else ""
    where = "" if suite == "accuracy" else f", {ranks_name(cell)}"
    mask = "" if cell.mask == suite else f", {cell.mask}"
    return f"{_TITLE[suite]}: {_heads(cell)}, head dim {cell.head_dim}{mask}, {cell.dtype}{tokens}{where}"


def _heads(cell: Cell) -> str:
    return f"{cell.heads} heads" if cell.heads == cell.kv_heads else f"{cell.heads} q / {cell.kv_heads} kv heads"


def _mask_facts(rows: Sequence[tuple[Cell, Row]]) -> list[str]:
    """Return lines that describe the masks for every measured length."""
    measured = {cell.tokens: row for cell, row in rows if row.keys() & {"documents", "window", TREE}}
    found = []
    for tokens, row in sorted(measured.items()):
        if "window" in row:
            found.append(f"- {short(tokens)} tokens: a query sees itself and the {row['window'] - 1} tokens before it.")
            continue
        if TREE in row:
            own = row[TREE]
            found.append(
                f"- {short(tokens)} tokens: a prompt of {own['prompt']}, {own['answers']} answers of {own['answer']}."
            )
            continue
        own = row["documents"]
        found.append(
            f"- {short(tokens)} tokens: {own['number']} documents, median {own['median']:g}, longest {own['longest']}; "
            f"drawn log-normal, median {own['drawn_median']}, sigma {own['sigma']}, seed {own['seed']}."
        )
    return [*found, ""] if found else []


def _speed(suite: str, rows: Rows[Cell], notes: dict[str, int]) -> list[str]:
    lines, column = [], _column(suite)
    for direction, title in DIRECTIONS.items():

        def times(row: Row, direction: str = direction) -> str:
            part = row[direction]
            return f"{part['ratio']:.3f} / {part['milliseconds']['median']:.2f} / {_rate(part)}"

        head = f"{title}: ratio to one GPU / ms / TFLOP/s a GPU"
        lines += grid(head, rows, column, times, notes)
    if suite in MASKS:  # suites "documents" and "window"
        head = "time over one GPU's for as many FLOPs of plain causal attention: forward / forward + backward"
        lines += grid(head, rows, column, _over_arithmetic, notes)
    if any("host_us" in row for _, row in rows):
        lines += grid("host: microseconds a call, forward / backward", rows, column, _host, notes)
    lines += grid("peak GiB a GPU / GB received / exposed ms (forward + backward)", rows, column, _costs, notes)
    return lines


def _costs(row: Row) -> str:
    both = row["forward_backward"]
    moved = None if both["bytes"] is None else both["bytes"] / 1e9
    return f"{known(row['peak_memory_gib'])} / {known(moved, '.2f')} / {both['exposed_ms']:.2f}"


def _host(row: Row) -> str:
    own = row.get("host_us")
    return "-" if own is None else f"{own['forward']:.0f} / {own['backward']:.0f}"


def _over_arithmetic(row: Row) -> str:
    return " / ".join(f"{row[direction]['times_arithmetic']:.2f}" for direction in DIRECTIONS)


def _accuracy(rows: Rows[Cell], notes: dict[str, int]) -> list[str]:
    def errors(row: Row) -> str:
        return " / ".join(f"{row['errors'][name]:.2e}" for name in _ERRORS)

    return grid("error of O / dQ / dK / dV on ranks", rows, _column("accuracy"), errors, notes)


def draw(results: Results[Cell], stem: Path) -> list[Path]:
    """Draw ratio and TFLOP/s of every comparison that has a measured cell, and return the pictures' paths."""
    return [
        picture
        for suite in SUITES
        if suite != "accuracy"
        for title, rows in comparisons(results, suite)
        if is_measured(rows)
        for picture in _pictures(suite, title, rows, stem)
    ]


def timeline_title(cell: Cell, direction: str) -> tuple[str, str]:
    """Return the title and the subtitle of a cell's timeline."""
    return (
        f"Timeline of attention, {DIRECTIONS[direction]}, by {of_whom(cell)}",
        f"{short(cell.tokens)} tokens, {_heads(cell)}, {cell.mask}, {ranks_name(cell)}",
    )


def _pictures(suite: str, title: str, rows: Rows[Cell], stem: Path) -> Iterator[Path]:
    column = _column(suite)

    def over(axes: Any) -> None:
        axes.set_xlabel("sequences at once" if suite == "batch" else "tokens of the whole sequence")

    for direction, name in DIRECTIONS.items():

        def ratio(row: Row, direction: str = direction) -> float | None:
            return None if row["cell"]["method"] == ONE_GPU else float(row[direction]["ratio"])

        def rate(row: Row, direction: str = direction) -> float:
            return float(row[direction]["tflops"])

        def ratios(axes: Any, ratio: Callable[[Row], float | None] = ratio) -> None:
            plot_methods(axes, [pair for pair in rows if pair[0].method != ONE_GPU], column, ratio)
            found = [1.0, *(value for _, row in rows if row["status"] == OK and (value := ratio(row)) is not None)]
            axes.set_ylim(max(0.0, min(found) - 0.05), max(found) + 0.05)  # ratios are near 1
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set_ylabel("ratio to one GPU's kernel")
            over(axes)

        def rates(axes: Any, rate: Callable[[Row], float] = rate) -> None:
            plot_methods(axes, rows, column, rate)
            axes.set_ylim(bottom=0)
            axes.set_ylabel("TFLOP/s a GPU")
            over(axes)

        start = _path(suite, rows[0][0], stem)
        for what, fill in (("ratio", ratios), ("tflops", rates)):
            yield panel(start.with_name(f"{start.name}-{direction}-{what}.png"), name, title, fill)


def _path(suite: str, cell: Cell, stem: Path) -> Path:
    """Return the prefix of the paths of a comparison's pictures."""
    where = f"{cell.ranks}" + ("" if cell.device == "cuda" else cell.device)
    tokens = f"-{short(cell.tokens)}" if suite == "batch" else ""
    mask = "" if cell.mask == suite else f"-{cell.mask}"
    return stem.with_name(f"{stem.name}-{suite}{tokens}-{cell.head_setup}{mask}-{where}")


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
    rank_run="benchmarks.attention.measure:AttentionRun",
    timelines=lambda cell: tuple(f"{cell.key}/{direction}" for direction in DIRECTIONS),
    describe=describe,
    tables=tables,
    draw=draw,
)

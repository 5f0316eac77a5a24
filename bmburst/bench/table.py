"""Results as text: a line for a cell as it is measured, and Markdown tables of methods over lengths, batches, ranks."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bmburst.amounts import short
from bmburst.bench.cells import MASK_TOKENS, SUITES, Cell
from bmburst.bench.grid import grid, run_lines, what_did_not_run
from bmburst.bench.results import OK, Results, Row

DIRECTIONS = {"forward": "forward", "forward_backward": "forward + backward"}
_COLUMN: dict[str, Callable[[Cell], int]] = {
    **dict.fromkeys(SUITES, lambda cell: cell.tokens),
    "batch": lambda cell: cell.batch,
    "accuracy": lambda cell: cell.ranks,
}
_TITLE = {
    "sequence": "Attention over sequence length, batch 1",
    "batch": "Attention over batch size",
    "block": "Attention block (projections, rotary, attention) over sequence length",
    "documents": "Attention of packed causal documents over tokens in all",
    "window": "Attention in a causal sliding window over sequence length",
    "accuracy": "Relative L2 error against fp64",
}
_ERRORS = {"o": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}


def one_line(cell: Cell, row: Row) -> str:
    """Return what is printed as a cell is done."""
    if row["status"] != OK:
        return f"{cell.key}: {row['status']}: {row['reason']}"
    if cell.suite == "accuracy":
        return f"{cell.key}: " + ", ".join(f"{_ERRORS[n]} {value:.2e}" for n, value in row["errors"].items())
    parts = [f"{title} {_speed_of(row[direction])}" for direction, title in DIRECTIONS.items()]
    chosen = row.get("strategy")
    how = f", {how_spread(cell.ranks, chosen)} by {row['transport']}" if chosen else ""
    return f"{cell.key}: {'; '.join(parts)} ({row['seconds']:.1f} s{how})"


def _speed_of(part: Row) -> str:
    times = f", {part['times_arithmetic']:.2f} x arithmetic" if "times_arithmetic" in part else ""
    return f"{part['milliseconds']['median']:.2f} ms {_rate(part)} TFLOP/s ratio {part['ratio']:.3f}{times}"


def _rate(part: Row) -> str:
    """Return TFLOP/s, which on a CPU are less than one."""
    return f"{part['tflops']:.0f}" if part["tflops"] >= 10 else f"{part['tflops']:.2g}"


def how_spread(ranks: int, chosen: dict[str, Any]) -> str:
    """Return what `burst_attention` chose: heads exchanged by how many ranks, and what lies between such groups."""
    parts = [f"heads x{chosen['heads']}"] if chosen["heads"] > 1 else []
    outside = chosen["outer"] if chosen["outer"] == "gather" else f"{chosen['outer']} ({chosen['travellers']} backward)"
    return " + ".join([*parts, *([outside] if ranks > chosen["heads"] else [])]) or "alone"


def markdown(results: Results) -> str:
    """Return all tables and, below, what could not run and where it all ran."""
    notes: dict[str, int] = {}
    lines: list[str] = []
    for suite in SUITES:
        for title, rows in comparisons(results, suite):
            lines += [f"## {title}", "", *_mask_facts(rows)]
            lines += _accuracy(rows, notes) if suite == "accuracy" else _speed(suite, rows, notes)
    return "\n".join([*lines, *what_did_not_run(notes), *run_lines(results)]) + "\n"


def comparisons(results: Results, suite: str) -> Iterable[tuple[str, list[tuple[Cell, Row]]]]:
    """Yield a title and rows for every setting in which methods of a suite can be compared."""
    groups: dict[tuple[Any, ...], list[tuple[Cell, Row]]] = {}
    for cell, row in results.cell_rows(suite):
        # The column of the table is left open; accuracy tables keep lengths apart, batch tables too.
        apart = cell.tokens if suite in ("batch", "accuracy") else 0
        ranks = 0 if suite == "accuracy" else cell.ranks
        key = cell.heads, cell.kv_heads, cell.head_dim, cell.mask, cell.dtype, cell.device, ranks, apart
        groups.setdefault(key, []).append((cell, row))
    for rows in groups.values():
        yield _title(suite, rows[0][0]), rows


def columns(suite: str, rows: Sequence[tuple[Cell, Row]]) -> list[int]:
    """Return the lengths, batch sizes or ranks that occur, ascending."""
    return sorted({_COLUMN[suite](cell) for cell, _ in rows})


def by_method(suite: str, rows: Sequence[tuple[Cell, Row]]) -> dict[str, dict[int, Row]]:
    """Return each method's rows by column, methods in the order of the file."""
    found: dict[str, dict[int, Row]] = {}
    for cell, row in rows:
        found.setdefault(cell.method, {})[_COLUMN[suite](cell)] = row
    return found


def _title(suite: str, cell: Cell) -> str:
    heads = f"{cell.heads} heads" if cell.heads == cell.kv_heads else f"{cell.heads} q / {cell.kv_heads} kv heads"
    tokens = f", {short(cell.tokens)} tokens" if suite in ("batch", "accuracy") else ""
    kind = "GPU" if cell.device == "cuda" else "CPU rank"
    where = "" if suite == "accuracy" else f", {cell.ranks} {kind}{'s' if cell.ranks > 1 else ''}"
    mask = "" if cell.mask == suite else f", {cell.mask}"
    return f"{_TITLE[suite]}: {heads}, head dim {cell.head_dim}{mask}, {cell.dtype}{tokens}{where}"


def _mask_facts(rows: Sequence[tuple[Cell, Row]]) -> list[str]:
    """Return what the masks are beyond their names, for every length that was measured."""
    measured = {cell.tokens: row for cell, row in rows if row.keys() & {"documents", "window"}}
    found = []
    for tokens, row in sorted(measured.items()):
        if "window" in row:
            found.append(f"- {short(tokens)} tokens: a query sees itself and the {row['window'] - 1} tokens before it.")
            continue
        own = row["documents"]
        found.append(
            f"- {short(tokens)} tokens: {own['number']} documents, median {own['median']:g}, longest {own['longest']}; "
            f"drawn log-normal, median {own['drawn_median']}, sigma {own['sigma']}, seed {own['seed']}."
        )
    return [*found, ""] if found else []


def _speed(suite: str, rows: list[tuple[Cell, Row]], notes: dict[str, int]) -> list[str]:
    lines = []
    for direction, title in DIRECTIONS.items():

        def times(row: Row, direction: str = direction) -> str:
            part = row[direction]
            return f"{part['ratio']:.3f} / {part['milliseconds']['median']:.2f} / {_rate(part)}"

        head = f"{title}: ratio to one GPU / ms / TFLOP/s a GPU"
        lines += _grid(suite, rows, head, times, notes)
    if suite in MASK_TOKENS:
        head = "time over one GPU's for as many FLOPs of plain causal attention: forward / forward + backward"
        lines += _grid(suite, rows, head, _over_arithmetic, notes)
    lines += _grid(suite, rows, "peak GiB a GPU / GB received / exposed ms (forward + backward)", _costs, notes)
    return lines


def _costs(row: Row) -> str:
    both, peak = row["forward_backward"], row["peak_memory_gib"]
    memory = "?" if peak is None else f"{peak:.1f}"
    moved = "?" if both["bytes"] is None else f"{both['bytes'] / 1e9:.2f}"
    return f"{memory} / {moved} / {both['exposed_ms']:.2f}"


def _over_arithmetic(row: Row) -> str:
    return " / ".join(f"{row[direction]['times_arithmetic']:.2f}" for direction in DIRECTIONS)


def _accuracy(rows: list[tuple[Cell, Row]], notes: dict[str, int]) -> list[str]:
    def errors(row: Row) -> str:
        return " / ".join(f"{row['errors'][name]:.2e}" for name in _ERRORS)

    return _grid("accuracy", rows, "error of O / dQ / dK / dV on ranks", errors, notes)


def _grid(
    suite: str, rows: list[tuple[Cell, Row]], head: str, show: Callable[[Row], str], notes: dict[str, int]
) -> list[str]:
    return grid(head, columns(suite, rows), by_method(suite, rows), show, notes)

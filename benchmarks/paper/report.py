"""Tables of the paper's benchmark: bytes and milliseconds of backward's transfers, ablations, the README's tables."""

from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.attention.cells import HEAD_DIM
from benchmarks.engine.kind import Results, Row
from benchmarks.engine.report import Rows, grid, groups, known, ranks_name
from benchmarks.paper.cells import SUITES, PaperCell

_TITLES = {
    "backward": "What moves in backward",
    "merge": "Partial results merged as they come, or at the end; transfers beside kernels, or before them",
    "tile": "A tile's scores on the chip, or in memory",
    "batch": "Attention over batch size",
    "sequence": "Attention over sequence length",
}


def describe(cell: PaperCell, row: Row) -> str:
    """Return what a measured row says in a line."""
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
        rows = sorted(results.cell_rows(suite), key=lambda pair: -pair[0].ranks)  # a title is of several GPUs
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

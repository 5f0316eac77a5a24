"""Tables and pictures of the training benchmark: time, memory, derived models, losses."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine.kind import OK, Results, Row
from benchmarks.engine.report import (
    Rows,
    grid,
    groups,
    is_measured,
    known,
    note,
    of_whom,
    panel,
    plot_methods,
    rank_kind,
    ranks_name,
    scale_heights,
    spread_name,
)
from benchmarks.training.cells import Rates, TrainCell, bound, to_all_layers
from bmburst.amounts import short

SHOWN_STEPS = 10  # of a curve, evenly
MEDIAN_STEPS = 9  # that a curve is smoothed over


def describe(cell: TrainCell, row: Row) -> str:
    """Return what a measured row says in a line."""
    ms, took = row["milliseconds"]["median"], f"({row['seconds']:.1f} s)"
    if cell.suite != "step":
        return f"loss {row['losses'][0]:.4f} to {row['losses'][-1]:.4f}, {ms:.1f} ms a step {took}"
    mfu, kernel_mfu = (known(row[name], ".1%") for name in ("mfu", "mfu_kernel"))
    return (
        f"{ms:.1f} ms, {row['ratio']:.3f} of the bound, {row['tokens_per_second']:.0f} tokens/s/GPU, "
        f"MFU {mfu} ({kernel_mfu}), {known(row['peak_memory_gib'])} GiB {took}"
    )


def tables(results: Results[TrainCell], notes: dict[str, int]) -> list[str]:
    """Return all tables as lines; see `grid` for the notes."""
    shown = (
        (over_tokens, _steps),
        (extrapolated, _derived),
        (over_ranks, _scaling),
        (partial(trained, suite="loss"), _losses),
        (partial(trained, suite="curve"), _curves),
    )
    lines: list[str] = []
    for find, table in shown:
        for title, rows in find(results):
            lines += [f"## {title}", "", *table(rows, notes)]
    return lines


def over_tokens(results: Results[TrainCell]) -> Iterator[tuple[str, Rows[TrainCell]]]:
    """Yield a title and rows for every model and number of ranks: methods are compared over lengths."""
    yield from groups(
        results.cell_rows("step"),
        lambda cell: (cell.preset, cell.layers, cell.ranks, cell.device, cell.dtype, cell.recompute),
        lambda cell: f"Training step over sequence length: {_model(cell)}, {ranks_name(cell)}{_how(cell)}",
    )


def over_ranks(results: Results[TrainCell]) -> Iterator[tuple[str, Rows[TrainCell]]]:
    """Yield the same for every model and length that was measured on several numbers of ranks."""
    for title, rows in groups(
        results.cell_rows("step"),
        lambda cell: (cell.preset, cell.layers, cell.tokens, cell.device, cell.dtype, cell.recompute),
        lambda cell: f"Training step over GPUs: {_model(cell)}, {short(cell.tokens)} tokens{_how(cell)}",
    ):
        if len({cell.ranks for cell, _ in rows}) > 1:
            yield title, rows


def extrapolated(results: Results[TrainCell]) -> Iterator[tuple[str, Rows[TrainCell]]]:
    """Yield the same for what was measured with several numbers of layers, none of them all."""
    for title, rows in groups(
        results.cell_rows("step"),
        lambda cell: (cell.preset, cell.ranks, cell.device, cell.dtype, cell.recompute),
        lambda cell: (
            f"Derived, not measured: {cell.preset} with all {cell.all_layers} layers, {ranks_name(cell)}{_how(cell)}"
        ),
    ):
        if any(_lines(rows)):
            yield title, rows


def trained(results: Results[TrainCell], suite: str) -> Iterator[tuple[str, Rows[TrainCell]]]:
    """Yield the same for what was trained for losses: on one rank and on several by every method; or on real text."""
    titles = {"loss": "The same losses by every method", "curve": "Loss on real text"}
    yield from groups(
        results.cell_rows(suite),
        lambda cell: (cell.preset, cell.layers, cell.tokens, cell.device, cell.dtype, cell.recompute),
        lambda cell: f"{titles[suite]}: {_model(cell)}, {short(cell.tokens)} tokens, {cell.dtype}{_how(cell, '')}",
    )


def furthest(row: Row, reference: Row, what: str = "losses") -> float:
    """Return the largest difference of two curves at one step, relative to the reference."""
    pairs = zip(row[what], reference[what], strict=False)  # of runs with fewer steps, those
    return float(max(abs(one - other) / abs(other) for one, other in pairs))


def reference_of(rows: Rows[TrainCell]) -> Row | None:
    """Return the row of one rank, if it was measured."""
    return next((row for cell, row in rows if cell.ranks == 1 and row["status"] == OK), None)


def curve_name(cell: TrainCell) -> str:
    """Return what a curve is called among those of other methods and ranks."""
    return f"{cell.method}, {ranks_name(cell)}"


def _steps(rows: Rows[TrainCell], notes: dict[str, int]) -> list[str]:
    def column(cell: TrainCell) -> int:
        return cell.tokens

    def times(row: Row) -> str:
        return f"{row['milliseconds']['median'] / 1e3:.3f} / {row['bound']['total']:.3f} / {row['ratio']:.3f}"

    def speeds(row: Row) -> str:
        return f"{row['tokens_per_second']:.0f} / {known(row['mfu'], '.1%')} / {known(row['mfu_kernel'], '.1%')}"

    return [
        *grid("s a step / bound / ratio to the bound", rows, column, times, notes),
        *grid("tokens/s a GPU / MFU / MFU, attention's backward x 2.5", rows, column, speeds, notes),
        *grid("peak GiB a GPU / by the planner, torch's alone", rows, column, _memory, notes),
        *_how_ours(rows),
        *_rates(rows),
        *_same_losses(rows),
    ]


def _how_ours(rows: Rows[TrainCell]) -> list[str]:
    """Return what ours chose where there was a choice, by length."""
    said = [
        f"{short(cell.tokens)} {spread_name(cell.ranks, row['strategy'])} by {row['transport']}, {row['recompute']}"
        for cell, row in sorted(rows, key=lambda pair: pair[0].tokens)
        if "strategy" in row
    ]
    return [f"ours: {'; '.join(said)}.", ""] if said else []


def _rates(rows: Rows[TrainCell]) -> list[str]:
    """Return what kernels did in these cells, before and behind the steps: the rates of the bound."""
    measured = [row["rates"] for _, row in rows if row["status"] == OK]
    if not measured:
        return []
    spans = []
    for name in ("attention", "matmul"):
        values = [value for rates in measured for value in rates[name]]
        spans.append(f"{name} {min(values):.4g} to {max(values):.4g}")
    return [f"Rates of one GPU that the bounds were made with, TFLOP/s: {', '.join(spans)}.", ""]


def _same_losses(rows: Rows[TrainCell]) -> list[str]:
    """Return how far the first losses of methods on one length are apart: they train one model on one sequence."""
    first: dict[int, list[float]] = {}
    for cell, row in rows:
        if row["status"] == OK:
            first.setdefault(cell.tokens, []).append(row["losses"][0])
    apart = [(max(losses) - min(losses)) / min(losses) for losses in first.values() if len(losses) > 1]
    return [f"First losses of the methods differ by {max(apart):.1e} at most, relative.", ""] if apart else []


def _scaling(rows: Rows[TrainCell], notes: dict[str, int]) -> list[str]:
    def column(cell: TrainCell) -> int:
        return cell.ranks

    def speeds(row: Row) -> str:
        return f"{row['milliseconds']['median'] / 1e3:.3f} / {row['tokens_per_second']:.0f} / {row['ratio']:.3f}"

    return [
        *grid("s a step / tokens/s a GPU / ratio to the bound, on GPUs", rows, column, speeds, notes),
        *grid("peak GiB a GPU / by the planner, torch's alone, on GPUs", rows, column, _memory, notes),
    ]


def _lines(rows: Rows[TrainCell]) -> Iterator[tuple[str, int, dict[int, Row]]]:
    """Yield method, length, and rows by number of layers, where there are two numbers and not all layers."""
    found: dict[tuple[str, int], dict[int, Row]] = {}
    for cell, row in rows:
        if row["status"] == OK:
            found.setdefault((cell.method, cell.tokens), {})[cell.layers] = row
    for (method, tokens), by_layers in found.items():
        if len(by_layers) > 1 and rows[0][0].all_layers not in by_layers:
            yield method, tokens, by_layers


def _derived(rows: Rows[TrainCell], _: dict[str, int]) -> list[str]:
    layers = rows[0][0].all_layers
    lines = [
        f"The line through what was measured with fewer layers, at {layers} layers; the bound at their mean rates.",
        "",
        "| method | tokens | from layers | s a step | bound | ratio | tokens/s a GPU | peak GiB a GPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method, tokens, by_layers in _lines(rows):

        def at(value: Callable[[Row], float | None], own: Mapping[int, Row] = by_layers) -> float | None:
            values = {n: found for n, row in own.items() if (found := value(row)) is not None}
            return to_all_layers(values, layers)

        seconds = at(lambda row: row["milliseconds"]["median"] / 1e3)
        peak = at(lambda row: row["peak_memory_gib"])
        assert seconds is not None  # of two numbers of layers
        least = _bound_of_all(list(by_layers.values()))
        speed = tokens / seconds / rows[0][0].ranks
        lines.append(
            f"| {method} | {short(tokens)} | {', '.join(map(str, sorted(by_layers)))} | {seconds:.3f} | {least:.3f} | "
            f"{seconds / least:.3f} | {speed:.0f} | {known(peak)} |"
        )
    return [*lines, ""]


def _bound_of_all(rows: list[Row]) -> float:
    """Return the seconds of the bound with all layers, at the mean of the rates that were measured with fewer."""
    cell = TrainCell(**rows[0]["cell"])
    rates = {
        name: sum(sum(row["rates"][name]) for row in rows) / (2 * len(rows)) * 1e12 for name in ("attention", "matmul")
    }
    return bound(replace(cell, layers=cell.all_layers), Rates(**rates)).total


def _losses(rows: Rows[TrainCell], notes: dict[str, int]) -> list[str]:
    reference = reference_of(rows)
    head = "| | first loss | last loss | furthest from one rank's, relative | gradient norms, likewise |"
    lines = [head, "|---|---|---|---|---|"]
    for cell, row in rows:
        if row["status"] != OK:
            lines.append(f"| {curve_name(cell)} | {note(row, notes)} |  |  |  |")
            continue
        curves = ("losses", "grad_norms")
        away = [known(None if reference is None else furthest(row, reference, what), ".1e") for what in curves]
        first, last = row["losses"][0], row["losses"][-1]
        lines.append(f"| {curve_name(cell)} | {first:.5f} | {last:.5f} | {' | '.join(away)} |")
    return [*lines, "", f"{max(len(row.get('losses', ())) for _, row in rows)} steps.", ""]


def _curves(rows: Rows[TrainCell], notes: dict[str, int]) -> list[str]:
    lines = []
    for cell, row in rows:
        if row["status"] != OK:
            note(row, notes)
            continue
        steps = shown_steps(len(row["losses"]))
        medians = running_median(row["losses"])
        losses, smooth = ([f"{values[step - 1]:.4f}" for step in steps] for values in (row["losses"], medians))
        lines += [
            f"| {curve_name(cell)}: step | {' | '.join(map(str, steps))} |",
            f"|---|{'---|' * len(steps)}",
            f"| loss, nats a token | {' | '.join(losses)} |",
            f"| median of {MEDIAN_STEPS} steps around it | {' | '.join(smooth)} |",
            "",
            f"{row['milliseconds']['median']:.0f} ms a step, "
            f"{cell.tokens / row['milliseconds']['median'] * 1e3 / cell.ranks:.0f} tokens/s a {rank_kind(cell)}.",
            "",
        ]
    return lines


def running_median(losses: Sequence[float]) -> list[float]:
    """Return at each step the median of the `MEDIAN_STEPS` around it, of fewer at the ends.

    A step sees few sequences, and some texts are harder than others: the median shows what training does.
    """
    around = MEDIAN_STEPS // 2
    return [statistics.median(losses[max(0, step - around) : step + around + 1]) for step in range(len(losses))]


def shown_steps(count: int) -> list[int]:
    """Return steps of a curve, from 1, evenly, with the first and the last."""
    last = min(SHOWN_STEPS, count) - 1
    return sorted({1 + round(n * (count - 1) / max(last, 1)) for n in range(last + 1)})


def _memory(row: Row) -> str:
    planned, allocated = row.get("planned"), row["allocated_gib"]
    said = "" if planned is None else f" ({known(allocated)}) / {planned['allocated_gib']:.1f}"
    return f"{known(row['peak_memory_gib'])}{said}"


def _model(cell: TrainCell) -> str:
    layers = "" if cell.layers == cell.all_layers else f", {cell.layers} of {cell.all_layers} layers"
    return f"{cell.preset}{layers}"


def _how(cell: TrainCell, dtype: str | None = None) -> str:
    words = [cell.dtype if dtype is None else dtype, f"recompute {cell.recompute}" if cell.recompute else ""]
    return "".join(f", {word}" for word in words if word)


Panel = tuple[str, str, Callable[[Row], float | None]]
"""The end of a picture's name, what is drawn, and its value."""
_OVER_TOKENS: Sequence[Panel] = (
    ("seconds", "seconds a step", lambda row: row["milliseconds"]["median"] / 1e3),
    ("ratio", "step over the bound", lambda row: row["ratio"]),
    ("speed", "tokens/s a GPU", lambda row: row["tokens_per_second"]),
    ("memory", "peak GiB a GPU", lambda row: row["peak_memory_gib"]),
)
_OVER_RANKS: Sequence[Panel] = (
    ("total", "tokens/s of all GPUs", lambda row: row["tokens_per_second"] * row["cell"]["ranks"]),
    ("speed", "tokens/s a GPU", lambda row: row["tokens_per_second"]),
    ("memory", "peak GiB a GPU", lambda row: row["peak_memory_gib"]),
)
_LOGARITHMIC = "seconds"


def draw(results: Results[TrainCell], stem: Path) -> list[Path]:
    """Draw every comparison that has a measured cell, and return the pictures' paths.

    Args:
        results: What was measured.
        stem: Path whose name the pictures' names begin with.
    """
    paths: list[Path] = []
    for title, rows in over_tokens(results):
        if is_measured(rows):
            paths += _panels(title, rows, _OVER_TOKENS, lambda cell: cell.tokens, _path(stem, rows, "tokens"))
    for title, rows in over_ranks(results):
        if is_measured(rows):
            paths += _panels(title, rows, _OVER_RANKS, lambda cell: cell.ranks, _path(stem, rows, "gpus"))
    for suite in ("loss", "curve"):
        for title, rows in trained(results, suite):
            if is_measured(rows):
                paths += _draw_curves(title, rows, _path(stem, rows, suite))
    return paths


def timeline_title(cell: TrainCell) -> tuple[str, str]:
    """Return what the timeline of a cell shows, and the setting."""
    return (
        f"Timeline of a training step by {of_whom(cell)}",
        f"{_model(cell)}, {short(cell.tokens)} tokens, {ranks_name(cell)}",
    )


def _panels(
    title: str, rows: Rows[TrainCell], panels: Sequence[Panel], column: Callable[[TrainCell], int], start: Path
) -> Iterator[Path]:
    for end, name, value in panels:

        def fill(axes: Any, end: str = end, name: str = name, value: Callable[[Row], float | None] = value) -> None:
            plot_methods(axes, rows, column, value)
            scale_heights(axes, logarithmic=end == _LOGARITHMIC)
            axes.set_ylabel(name)
            axes.set_xlabel("tokens of the sequence" if panels is _OVER_TOKENS else "GPUs")

        yield panel(start.with_name(f"{start.name}-{end}.png"), name.capitalize(), title, fill)


def _draw_curves(title: str, rows: Rows[TrainCell], start: Path) -> Iterator[Path]:
    """Draw losses over steps and, where there is one rank's curve, how far the others are from it."""
    measured = [(cell, row) for cell, row in rows if row["status"] == OK]
    reference = reference_of(rows)
    others = [] if reference is None else [(cell, row) for cell, row in measured if cell.ranks > 1]

    def losses(axes: Any) -> None:
        for cell, row in measured:
            steps = range(1, len(row["losses"]) + 1)
            (line,) = axes.plot(steps, running_median(row["losses"]), label=curve_name(cell), linewidth=1.8)
            axes.plot(steps, row["losses"], color=line.get_color(), linewidth=0.8, alpha=0.4)
        axes.set_xlabel("step")
        axes.set_ylabel("nats a token")

    def differences(axes: Any) -> None:
        assert reference is not None
        for cell, row in others:
            away = [abs(a - b) / b for a, b in zip(row["losses"], reference["losses"], strict=False)]
            axes.plot(range(1, len(away) + 1), away, label=curve_name(cell), linewidth=1.3)
        axes.set_xlabel("step")
        axes.set_ylabel("relative difference")
        axes.set_yscale("log")

    says = f"Loss of each step (thin) and the median of {MEDIAN_STEPS} steps"
    yield panel(start.with_name(f"{start.name}.png"), says, title, losses)
    if others:
        away = start.with_name(f"{start.name}-difference.png")
        yield panel(away, "Difference of the loss from one rank's", title, differences)


def _path(stem: Path, rows: Rows[TrainCell], what: str) -> Path:
    cell = rows[0][0]
    device = "" if cell.device == "cuda" else cell.device
    where = {"tokens": f"-{cell.ranks}{device}", "gpus": f"-{short(cell.tokens)}{device}"}.get(what, device)
    dtype = "" if cell.dtype == "bfloat16" else f"-{cell.dtype}"
    recompute = f"-{cell.recompute}" if cell.recompute else ""
    return stem.with_name(f"{stem.name}-{what}-{cell.model_name}{where}{dtype}{recompute}")

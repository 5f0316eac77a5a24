"""Tables of the training benchmark: time, memory, derived models, losses."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from benchmarks.engine.kinds import OK, Results, Row
from benchmarks.engine.report import Rows, grid, groups, known, markdown_table, note, rank_kind, ranks_name, spread_name
from benchmarks.training.cells import ZERO, Rates, TrainCell, bound
from bmburst.amounts import short

SHOWN_STEPS = 10  # evenly spaced steps of a curve in a table
MEDIAN_STEPS = 9  # window of the running median


def describe(cell: TrainCell, row: Row) -> str:
    """Return a measured row in one line."""
    ms, took = row["milliseconds"]["median"], f"({row['seconds']:.1f} s)"
    if cell.suite == "save":
        return (
            f"a save of {row['gib']:.1f} GiB stops training for {row['waiting_seconds']:.2f} s, beside training for "
            f"{row['beside_seconds']:.2f} s and is written in {row['writing_seconds']:.1f} s; {ms:.1f} ms a step {took}"
        )
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
        (over_batches, partial(_steps, by_batch=True)),
        (extrapolated, _derived),
        (over_ranks, _scaling),
        (partial(trained, suite="loss"), _losses),
        (partial(trained, suite="curve"), _curves),
        (partial(trained, suite="save"), _saves),
    )
    lines: list[str] = []
    for find, table in shown:
        for title, rows in find(results):
            lines += [f"## {title}", "", *table(rows, notes)]
    return lines


def over_tokens(results: Results[TrainCell]) -> Iterator[tuple[str, Rows[TrainCell]]]:
    """Yield a title and rows for every model and number of ranks: methods are compared over lengths."""
    yield from groups(
        [(cell, row) for cell, row in results.cell_rows("step") if cell.batch == 1],
        lambda cell: (cell.preset, cell.layers, cell.ranks, cell.device, cell.dtype, cell.recompute, cell.zero),
        lambda cell: f"Training step over sequence length: {model_of(cell)}, {ranks_name(cell)}{how(cell)}",
    )


def over_batches(results: Results[TrainCell]) -> Iterator[tuple[str, Rows[TrainCell]]]:
    """Yield a title and rows for every model and length with batches of several sequences."""
    for title, rows in groups(
        results.cell_rows("step"),
        lambda cell: (cell.preset, cell.layers, cell.tokens, cell.ranks, cell.device, cell.dtype, cell.zero),
        lambda cell: (
            f"Training step over batch size: {model_of(cell)}, {short(cell.tokens)} tokens, {ranks_name(cell)}"
            f"{how(cell)}"
        ),
    ):
        if any(cell.batch > 1 for cell, _ in rows):
            yield title, rows


def over_ranks(results: Results[TrainCell]) -> Iterator[tuple[str, Rows[TrainCell]]]:
    """Yield a title and rows for every model and length that was measured on several numbers of ranks."""
    for title, rows in groups(
        [(cell, row) for cell, row in results.cell_rows("step") if cell.batch == 1],
        lambda cell: (cell.preset, cell.layers, cell.tokens, cell.device, cell.dtype, cell.recompute, cell.zero),
        lambda cell: f"Training step over GPUs: {model_of(cell)}, {short(cell.tokens)} tokens{how(cell)}",
    ):
        if len({cell.ranks for cell, _ in rows}) > 1:
            yield title, rows


def extrapolated(results: Results[TrainCell]) -> Iterator[tuple[str, Rows[TrainCell]]]:
    """Yield a title and rows for every model that was measured with several reduced numbers of layers only."""
    for title, rows in groups(
        [(cell, row) for cell, row in results.cell_rows("step") if cell.batch == 1],
        lambda cell: (cell.preset, cell.ranks, cell.device, cell.dtype, cell.recompute, cell.zero),
        lambda cell: (
            f"Derived, not measured: {cell.preset} with all {cell.all_layers} layers, {ranks_name(cell)}{how(cell)}"
        ),
    ):
        if any(_lines(rows)):
            yield title, rows


def trained(results: Results[TrainCell], suite: str) -> Iterator[tuple[str, Rows[TrainCell]]]:
    """Yield a title and rows for every model that was trained in one of the suites "loss", "curve" and "save"."""
    titles = {
        "loss": "The same losses by every method",
        "curve": "Loss on real text",
        "save": "Training stands still for a checkpoint",
    }
    yield from groups(
        results.cell_rows(suite),
        lambda cell: (cell.preset, cell.layers, cell.tokens, cell.device, cell.dtype, cell.recompute),
        lambda cell: f"{titles[suite]}: {model_of(cell)}, {short(cell.tokens)} tokens, {cell.dtype}{how(cell, '')}",
    )


def furthest(row: Row, reference: Row, what: str = "losses") -> float:
    """Return the largest difference of two curves at a step, relative to the reference.

    If the reference has another number of steps, the common ones count. `what` is "losses" or "grad_norms".
    """
    pairs = zip(row[what], reference[what], strict=False)
    return float(max(abs(one - other) / abs(other) for one, other in pairs))


def reference_of(rows: Rows[TrainCell]) -> Row | None:
    """Return the row of one rank, if it was measured."""
    return next((row for cell, row in rows if cell.ranks == 1 and row["status"] == OK), None)


def curve_name(cell: TrainCell) -> str:
    """Return the label of a curve: method and ranks."""
    return f"{cell.method}, {ranks_name(cell)}"


def _steps(rows: Rows[TrainCell], notes: dict[str, int], *, by_batch: bool = False) -> list[str]:
    def column(cell: TrainCell) -> int:
        return cell.batch if by_batch else cell.tokens

    def times(row: Row) -> str:
        return f"{row['milliseconds']['median'] / 1e3:.3f} / {row['bound']['total']:.3f} / {row['ratio']:.3f}"

    def speeds(row: Row) -> str:
        return f"{row['tokens_per_second']:.0f} / {known(row['mfu'], '.1%')} / {known(row['mfu_kernel'], '.1%')}"

    return [
        *grid("s a step / bound / ratio to the bound", rows, column, times, notes),
        *grid("tokens/s a GPU / MFU / MFU, attention's backward x 2.5", rows, column, speeds, notes),
        *grid("peak GiB a GPU / by the planner, torch's alone", rows, column, _memory, notes),
        *_how_many(rows),
        *_how_ours(rows, column),
        *_rates(rows),
        *_same_losses(rows, column),
    ]


def _how_many(rows: Rows[TrainCell]) -> list[str]:
    """Return a sentence with the number of steps behind each median."""
    counts = {row["milliseconds"]["count"] for _, row in rows if row["status"] == OK}
    if not counts:
        return []
    span = " to ".join(f"{count}" for count in sorted({min(counts), max(counts)}))
    return [f"Each time is the median of {span} step{'' if max(counts) == 1 else 's'}.", ""]


def _how_ours(rows: Rows[TrainCell], column: Callable[[TrainCell], int]) -> list[str]:
    """Return a line with the strategy, transport and policy that ours chose in each column."""
    choices = [
        f"{short(column(cell))} {spread_name(cell.ranks, row['strategy'])} by {row['transport']}, {row['recompute']}"
        for cell, row in sorted(rows, key=lambda pair: column(pair[0]))
        if "strategy" in row
    ]
    return [f"ours: {'; '.join(choices)}.", ""] if choices else []


def _rates(rows: Rows[TrainCell]) -> list[str]:
    """Return a line with the ranges of the measured rates from which the bounds are computed."""
    measured = [row["rates"] for _, row in rows if row["status"] == OK]
    if not measured:
        return []
    spans = []
    for name in ("attention", "matmul"):
        values = [value for rates in measured for value in rates[name]]
        spans.append(f"{name} {min(values):.4g} to {max(values):.4g}")
    return [f"Rates of one GPU that the bounds were made with, TFLOP/s: {', '.join(spans)}.", ""]


def _same_losses(rows: Rows[TrainCell], column: Callable[[TrainCell], int]) -> list[str]:
    """Return a line with the largest relative difference of the methods' first losses on the same tokens."""
    first: dict[int, list[float]] = {}
    for cell, row in rows:
        if row["status"] == OK:
            first.setdefault(column(cell), []).append(row["losses"][0])
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
    """Yield method, length and rows by number of layers, if there are two or more numbers and all are reduced."""
    found: dict[tuple[str, int], dict[int, Row]] = {}
    for cell, row in rows:
        if row["status"] == OK:
            found.setdefault((cell.method, cell.tokens), {})[cell.layers] = row
    for (method, tokens), by_layers in found.items():
        if len(by_layers) > 1 and rows[0][0].all_layers not in by_layers:
            yield method, tokens, by_layers


def _derived(rows: Rows[TrainCell], _: dict[str, int]) -> list[str]:
    layers = rows[0][0].all_layers
    columns = ("method", "tokens", "from layers", "s a step", "bound", "ratio", "tokens/s a GPU", "peak GiB a GPU")
    lines = []
    for method, tokens, by_layers in _lines(rows):

        def at(value: Callable[[Row], float | None], own: Mapping[int, Row] = by_layers) -> float | None:
            values = {n: found for n, row in own.items() if (found := value(row)) is not None}
            return to_all_layers(values, layers)

        seconds = at(lambda row: row["milliseconds"]["median"] / 1e3)
        peak = at(lambda row: row["peak_memory_gib"])
        assert seconds is not None  # `_lines` yields two or more numbers of layers
        least = _bound_of_all(list(by_layers.values()))
        speed = tokens / seconds / rows[0][0].ranks
        cells = [method, short(tokens), ", ".join(map(str, sorted(by_layers))), f"{seconds:.3f}", f"{least:.3f}"]
        lines.append([*cells, f"{seconds / least:.3f}", f"{speed:.0f}", known(peak)])
    said = f"The line through what was measured with fewer layers, at {layers} layers; the bound at their mean rates."
    return [said, "", *markdown_table(columns, lines), ""]


def to_all_layers(measured: Mapping[int, float], layers: int) -> float | None:
    """Return the value at `layers` layers on the least-squares line through measured values by number of layers.

    Returns None for fewer than two values.
    """
    if len(measured) < 2:
        return None
    count = len(measured)
    middle, mean = sum(measured) / count, sum(measured.values()) / count
    slope = sum((n - middle) * (value - mean) for n, value in measured.items())
    slope /= sum((n - middle) ** 2 for n in measured)
    return mean + slope * (layers - middle)


def _bound_of_all(rows: list[Row]) -> float:
    """Return the bound in seconds with all layers, at the mean of the rates measured with reduced layers."""
    cell = TrainCell(**rows[0]["cell"])
    rates = {
        name: sum(sum(row["rates"][name]) for row in rows) / (2 * len(rows)) * 1e12 for name in ("attention", "matmul")
    }
    return bound(replace(cell, layers=cell.all_layers), Rates(**rates)).total


def _losses(rows: Rows[TrainCell], notes: dict[str, int]) -> list[str]:
    reference = reference_of(rows)
    columns = ["", "first loss", "last loss", "furthest from one rank's, relative", "gradient norms, likewise"]

    def shown(row: Row) -> list[str]:
        curves = ("losses", "grad_norms")
        away = [known(None if reference is None else furthest(row, reference, what), ".1e") for what in curves]
        return [f"{row['losses'][0]:.5f}", f"{row['losses'][-1]:.5f}", *away]

    steps = max(len(row.get("losses", ())) for _, row in rows)
    return [*_by_curve(columns, rows, shown, notes), "", f"{steps} steps.", ""]


def _saves(rows: Rows[TrainCell], notes: dict[str, int]) -> list[str]:
    columns = ["", "GiB", "a step, s", "training waits, s", "beside it, s", "of it", "on disk after, s"]

    def shown(row: Row) -> list[str]:
        waiting, beside, step = row["waiting_seconds"], row["beside_seconds"], row["milliseconds"]["median"] / 1e3
        cells = [f"{row['gib']:.1f}", f"{step:.2f}", f"{waiting:.2f}", f"{beside:.2f}", f"{beside / waiting:.1%}"]
        return [*cells, f"{row['writing_seconds']:.1f}", f"{row['prepared_seconds']:.1f}"]

    return [*_by_curve([*columns, "memory prepared, s"], rows, shown, notes), ""]


def _by_curve(
    columns: Sequence[str], rows: Rows[TrainCell], shown: Callable[[Row], list[str]], notes: dict[str, int]
) -> list[str]:
    """Return a table with a line for each cell: its name and what `shown` returns, or the note why it has none."""
    none = [""] * (len(columns) - 2)
    cells = (shown(row) if row["status"] == OK else [note(row, notes), *none] for _, row in rows)
    return markdown_table(columns, ([curve_name(cell), *own] for (cell, _), own in zip(rows, cells, strict=True)))


def _curves(rows: Rows[TrainCell], notes: dict[str, int]) -> list[str]:
    lines = []
    for cell, row in rows:
        if row["status"] != OK:
            note(row, notes)
            continue
        steps = shown_steps(len(row["losses"]))
        medians = running_median(row["losses"])
        losses, smooth = ([f"{values[step - 1]:.4f}" for step in steps] for values in (row["losses"], medians))
        values = [["loss, nats a token", *losses], [f"median of {MEDIAN_STEPS} steps around it", *smooth]]
        lines += [
            *markdown_table([f"{curve_name(cell)}: step", *steps], values),
            "",
            f"{row['milliseconds']['median']:.0f} ms a step, "
            f"{cell.tokens / row['milliseconds']['median'] * 1e3 / cell.ranks:.0f} tokens/s a {rank_kind(cell)}.",
            "",
        ]
    return lines


def running_median(losses: Sequence[float]) -> list[float]:
    """Return the running median over `MEDIAN_STEPS` steps, with shorter windows at both ends."""
    around = MEDIAN_STEPS // 2
    return [statistics.median(losses[max(0, step - around) : step + around + 1]) for step in range(len(losses))]


def shown_steps(count: int) -> list[int]:
    """Return up to `SHOWN_STEPS` evenly spaced steps from 1 to `count`, including both."""
    last = min(SHOWN_STEPS, count) - 1
    return sorted({1 + round(n * (count - 1) / max(last, 1)) for n in range(last + 1)})


def _memory(row: Row) -> str:
    planned, allocated = row.get("planned"), row["allocated_gib"]
    details = "" if planned is None else f" ({known(allocated)}) / {planned['allocated_gib']:.1f}"
    return f"{known(row['peak_memory_gib'])}{details}"


def model_of(cell: TrainCell) -> str:
    """Return the preset, followed by the number of layers if it is reduced."""
    layers = "" if cell.layers == cell.all_layers else f", {cell.layers} of {cell.all_layers} layers"
    return f"{cell.preset}{layers}"


def how(cell: TrainCell, dtype: str | None = None) -> str:
    """Return the end of a title: dtype, selected recompute policy, and the ZeRO stage if it is not 3."""
    words = [cell.dtype if dtype is None else dtype, f"recompute {cell.recompute}" if cell.recompute else ""]
    words += ["" if cell.zero == ZERO else f"ZeRO-{cell.zero}"]
    return "".join(f", {word}" for word in words if word)

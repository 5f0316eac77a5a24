"""Registers `bmburst bench inference`: options, cells, and tables and pictures with the paper's numbers."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.kinds import OK, Kind, Results, Row, selection_of
from benchmarks.engine.report import (
    Panel,
    Rows,
    columns_of,
    draw_panels,
    grid,
    groups,
    is_measured,
    known,
    markdown_table,
    of_whom,
    ranks_name,
)
from benchmarks.inference.cells import (
    CAUSAL,
    METHODS,
    SUITES,
    WARM_STEPS,
    InferenceCell,
    InferenceSelection,
    list_cells,
)
from bmburst.amounts import numbers, short
from bmburst.errors import UserError
from bmburst.schedule.hardware import hardware_of

_BUILDING = 10.0  # seconds of a cell before its answers: creating weights, compiling kernels, warm-up
_ANSWERS = 2  # answers of a long cell
FIRST, TOKEN = "first_token_seconds", "token_milliseconds"
_MEANING = (
    "First token: from the prompt's ids on the host to the first new token on the host. In brackets: time over the "
    "bound, which is the work at the rates of long kernels (prefill) and all weights and cache at the memory's "
    "bandwidth (a token), spread over all GPUs. Weights are random."
)


def _configure(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--models", metavar="NAME,...", help="presets (default: llama-2-7b,llama-2-13b,llama-3-8b)")
    add(
        "--masks", metavar="NAME,...", help="masks of attention in prefill: causal, full or both (default: the suites')"
    )
    add("--batches", metavar="N,...", help="prompts at once (default: 1, and without --tokens 8,32 in the suite batch)")
    add("--new-tokens", type=int, metavar="N", default=24, help="tokens of each answer (default: 24)")


def _select(args: argparse.Namespace, device: str, ranks: tuple[int, ...]) -> tuple[InferenceCell, ...]:
    if args.dtype == "float64":
        raise UserError(
            "--dtype float64 is not a dtype of inference\nallowed: bfloat16, float16, float32\nfix: --dtype bfloat16"
        )
    return list_cells(
        InferenceSelection(
            models=None if args.models is None else tuple(args.models.split(",")),
            masks=None if args.masks is None else tuple(args.masks.split(",")),
            batches=None if args.batches is None else numbers("--batches", args.batches),
            new_tokens=args.new_tokens,
            **selection_of(args, device, ranks, list(METHODS)),
        )
    )


def _starts(args: argparse.Namespace, cells: Sequence[InferenceCell], ranks: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return a start for each number of ranks."""
    del args
    starts = ((size, tuple(cell for cell in cells if cell.ranks == size)) for size in ranks)
    return [{"ranks": size, "cells": own} for size, own in starts if own]


def _estimate(results: Results[InferenceCell], cell: InferenceCell) -> float:
    """Return the approximate seconds of a cell: its recorded time, else an estimate from its bounds."""
    seconds = results.rows.get(cell.key, {}).get("seconds")
    if seconds is not None:
        return float(seconds)
    hardware = hardware_of(results.runs[-1]["device"]) if results.runs else None
    return 0.0 if hardware is None else _BUILDING + _ANSWERS * cell.seconds(hardware)


def describe(cell: InferenceCell, row: Row) -> str:
    """Return a measured row in one line."""
    whole = f"first token {row[FIRST]:.3f} s{_over(row, FIRST)}, {row[TOKEN]:.2f} ms a token{_over(row, TOKEN)}"
    speed = f", {row['tokens_per_second']:.0f} tokens/s" if cell.batch > 1 else ""
    return f"{whole}{speed}, {known(row['peak_memory_gib'])} GiB"


def tables(results: Results[InferenceCell], notes: dict[str, int]) -> list[str]:
    """Return all tables as lines of Markdown; see `grid` for the notes."""
    lines: list[str] = []
    for title, rows in _settings(results):
        lines += [f"## {title}", ""]
        column = _column(rows[0][0])
        for head, show in (
            ("first token, s", lambda row: f"{row[FIRST]:.3f}{_over(row, FIRST)}"),
            ("ms a token", lambda row: f"{row[TOKEN]:.2f}{_over(row, TOKEN)}"),
        ):
            lines += grid(head, rows, column, show, notes)
        if rows[0][0].suite == "batch":
            lines += grid("tokens/s of all prompts", rows, column, lambda row: f"{row['tokens_per_second']:.0f}", notes)
        lines += grid("peak GiB a rank (torch's allocator)", rows, column, _memory, notes)
        lines += _agreement(rows, column)
        lines += _beside_paper(rows)
    return [*lines, _MEANING, ""] if lines else lines


def paper() -> dict[str, Any]:
    """Return the paper's figures: see `paper.json`."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "paper.json").read_text(encoding="utf-8"))
    return found


def _settings(results: Results[InferenceCell]) -> Iterator[tuple[str, Rows[InferenceCell]]]:
    """Yield the rows of each model, mask and number of ranks, with a title."""

    def key(cell: InferenceCell) -> tuple[Any, ...]:
        length = cell.tokens if cell.suite == "batch" else 0
        return cell.suite, cell.model, cell.mask, cell.ranks, cell.device, cell.dtype, length

    def title(cell: InferenceCell) -> str:
        prompts = f"prompts of {short(cell.tokens)} over their number" if cell.suite == "batch" else "one prompt"
        return f"{cell.model}, {prompts}, {_mask(cell)}, {ranks_name(cell)}, {cell.dtype}"

    for suite in SUITES:
        yield from groups(results.cell_rows(suite), key, title)


def _mask(cell: InferenceCell) -> str:
    return "causal" if cell.mask == CAUSAL else "no mask"


def _column(cell: InferenceCell) -> Callable[[InferenceCell], int]:
    return (lambda cell: cell.batch) if cell.suite == "batch" else (lambda cell: cell.tokens)


def _over(row: Row, what: str) -> str:
    ratios = row.get("ratios")
    return "" if ratios is None else f" ({ratios[what]:.2f})"


def _memory(row: Row) -> str:
    return f"{known(row['peak_memory_gib'])} ({known(row['allocated_gib'])})"


def _agreement(rows: Rows[InferenceCell], column: Callable[[InferenceCell], int]) -> list[str]:
    """Return a line with the number of columns in which all methods generated the same tokens.

    In 16 bits, rounding may reorder tokens with almost equal logits.
    """
    found: dict[int, list[list[int]]] = {}
    for cell, row in rows:
        if row["status"] == OK:
            found.setdefault(column(cell), []).append(row["tokens"])
    several = [answers for answers in found.values() if len(answers) > 1]
    if not several:
        return []
    equal = sum(all(answer == answers[0] for answer in answers) for answers in several)
    return [f"First greedy tokens are the same by all methods in {equal} of {len(several)} columns.", ""]


def _beside_paper(rows: Rows[InferenceCell]) -> list[str]:
    """Return a table of the paper's times to the first token for the same model and lengths; empty without any."""
    cell, found = rows[0][0], paper()
    methods = found["models"].get(cell.model)
    columns = [n for n in columns_of(rows, lambda cell: cell.tokens) if n in found["tokens"]]
    if methods is None or not columns or cell.suite == "batch":
        return []
    lines = []
    for name, seconds in methods.items():
        own = dict(zip(found["tokens"], seconds, strict=True))
        lines.append([name, *("out of memory" if own[n] is None else f"{own[n]:.2f}" for n in columns)])
    return [*markdown_table(["the paper, s", *map(short, columns)], lines), "", f"{found['source']}.", ""]


_PANELS = (
    Panel("first-token", "seconds to the first token", lambda row: row[FIRST], is_logarithmic=True, bound=FIRST),
    Panel("first-token-over-bound", "first token over the bound", lambda row: row.get("ratios", {}).get(FIRST)),
    Panel("token", "milliseconds a token", lambda row: row[TOKEN], bound=TOKEN),
    Panel("memory", "peak GiB a rank", lambda row: row["peak_memory_gib"]),
)
_SPEED = Panel("speed", "tokens/s of all prompts", lambda row: row["tokens_per_second"])


def draw(results: Results[InferenceCell], stem: Path) -> list[Path]:
    """Draw every comparison that has a measured cell, and return the pictures' paths."""
    return [
        picture
        for title, rows in _settings(results)
        if is_measured(rows)
        for picture in _draw(title, rows, _path(stem, rows[0][0]))
    ]


def timeline_title(cell: InferenceCell) -> tuple[str, str]:
    """Return the title and the subtitle of a cell's timeline."""
    return (
        f"Timeline of a prompt and {WARM_STEPS} steps of decoding, by {of_whom(cell)}",
        f"{cell.model}, {short(cell.tokens)} tokens x {cell.batch}, {_mask(cell)}, {ranks_name(cell)}",
    )


def _draw(title: str, rows: Rows[InferenceCell], start: Path) -> Iterator[Path]:
    is_batch = rows[0][0].suite == "batch"
    panels, axis = ([*_PANELS, _SPEED], "prompts at once") if is_batch else (_PANELS, "tokens of the prompt")
    yield from draw_panels(title, rows, panels, _column(rows[0][0]), start, axis)


def _path(stem: Path, cell: InferenceCell) -> Path:
    length = f"-{short(cell.tokens)}" if cell.suite == "batch" else ""
    device = "" if cell.device == "cuda" else cell.device
    dtype = "" if cell.dtype == "bfloat16" else f"-{cell.dtype}"
    return stem.with_name(f"{stem.name}-{cell.suite}-{cell.model}{length}-{cell.mask}-{cell.ranks}{device}{dtype}")


KIND = Kind(
    name="inference",
    format="bmburst inference benchmark 1",
    cell=InferenceCell,
    own_options=("models", "masks", "batches", "new_tokens"),
    defaults={"repeats": 3, "cell_seconds": 30.0, "cell_timeout": 600.0},
    configure=_configure,
    select=_select,
    refusal=lambda cell: cell.refusal(),
    starts=_starts,
    estimate=_estimate,
    rank_run="benchmarks.inference.measure:InferenceRun",
    describe=describe,
    tables=tables,
    draw=draw,
)

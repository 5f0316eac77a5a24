"""Registers `bmburst bench train`: its options, the cells they select, estimates of time, and pictures."""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from benchmarks.engine.kinds import OK, Kind, Results, selection_of
from benchmarks.engine.report import Panel, Rows, draw_panels, is_measured, of_whom, panel, ranks_name
from benchmarks.training.cells import METHODS, STEPS, ZERO, TrainCell, TrainSelection, flops, list_cells
from benchmarks.training.report import (
    MEDIAN_STEPS,
    curve_name,
    describe,
    model_of,
    over_ranks,
    over_tokens,
    reference_of,
    running_median,
    tables,
    trained,
)
from bmburst.amounts import numbers, short
from bmburst.errors import UserError
from bmburst.recompute.policy import Policy
from bmburst.record_format import RecordFormat
from bmburst.schedule.hardware import machine_of
from bmburst.train.sources import check_data_path

_BUILDING = 10.0  # seconds of a cell before its steps: creating weights, compiling kernels, measuring rates
_FEW = 5  # steps of a long cell, including warm-up
_SPEED = Panel("speed", "tokens/s a GPU", lambda row: row["tokens_per_second"])
_MEMORY = Panel("memory", "peak GiB a GPU", lambda row: row["peak_memory_gib"])
_OVER_TOKENS = (
    Panel("seconds", "seconds a step", lambda row: row["milliseconds"]["median"] / 1e3, is_logarithmic=True),
    Panel("ratio", "step over the bound", lambda row: row["ratio"]),
    *(_SPEED, _MEMORY),
)
_TOTAL = Panel("total", "tokens/s of all GPUs", lambda row: row["tokens_per_second"] * row["cell"]["ranks"])
_OVER_RANKS = (_TOTAL, _SPEED, _MEMORY)


def _configure(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--preset", metavar="NAME,...", help="models (default: llama-3-8b,llama-2-7b; small models for losses)")
    add(
        "--layers",
        metavar="N,...",
        help="numbers of layers to measure; from two numbers the time of the whole model is derived",
    )
    add(
        "--recompute",
        metavar="POLICY",
        default="",
        help="recompute policy of all methods (default: that of each method)",
    )
    add("--batch", metavar="N,...", default="1", help="sequences per step in the suite step (default: 1)")
    add("--zero", metavar="N,...", default="3", help="ZeRO stages in the suite step, 2 or 3 (default: 3)")
    add("--steps", type=int, metavar="N", help="training steps of the suites loss and curve (default: 30, curve 60)")
    add("--text", metavar="PATH", default="stdlib", help="training text of the suites loss and curve (default: stdlib)")


def _select(args: argparse.Namespace, device: str, ranks: tuple[int, ...]) -> tuple[TrainCell, ...]:
    if args.steps is not None and args.steps < 1:
        raise UserError(f"--steps {args.steps}\nallowed: at least 1\nfix: leave it out for each suite's own number")
    if args.recompute:
        Policy.parse(args.recompute)
    if args.text != "stdlib" and not Path(args.text).exists():
        raise UserError(f"--text {args.text} does not exist\nfix: name a text file or folder, or leave it out")
    check_data_path(args.text, RecordFormat())
    if args.dtype not in (None, "bfloat16", "float32"):
        raise UserError(
            f"--dtype {args.dtype} is not a dtype of the trainer\nallowed: bfloat16, float32\nfix: --dtype bfloat16"
        )
    return list_cells(
        TrainSelection(
            presets=None if args.preset is None else tuple(args.preset.split(",")),
            layers=None if args.layers is None else numbers("--layers", args.layers),
            recompute=args.recompute,
            batches=numbers("--batch", args.batch),
            stages=numbers("--zero", args.zero),
            **selection_of(args, device, ranks, list(METHODS)),
        )
    )


def _starts(args: argparse.Namespace, cells: Sequence[TrainCell], ranks: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return a start for each number of ranks and tensor degree. A BMTrain process has one tensor degree."""
    del ranks
    starts: dict[tuple[int, int], list[TrainCell]] = {}
    for cell in cells:
        starts.setdefault((cell.ranks, METHODS[cell.method].tensor(cell)), []).append(cell)
    text = args.text if args.text == "stdlib" else str(Path(args.text).absolute())
    shared = {"runtime": "bmtrain", "options": {"text": text, "steps": args.steps or 0}}
    return [{"ranks": size, "tensor": tensor, "cells": tuple(own), **shared} for (size, tensor), own in starts.items()]


def _estimate(results: Results[TrainCell], cell: TrainCell) -> float:
    """Return the approximate seconds of a cell: the median of measured cells with similar FLOPs, else a prediction."""
    work = flops(cell) / cell.ranks
    known = [
        (flops(other) / other.ranks, float(row["seconds"]))
        for other, row in results.cell_rows(cell.suite, status=OK)
        if other.device == cell.device
    ]
    near = [seconds for done, seconds in known if work / 1.5 <= done <= work * 1.5]
    if near:
        return statistics.median(near)
    machine = machine_of(results.runs[-1]["device"]) if results.runs else None
    predicted = METHODS[cell.method].predict(cell, machine)
    return 0.0 if predicted is None else _BUILDING + STEPS.get(cell.suite, _FEW) * predicted.seconds


def draw(results: Results[TrainCell], stem: Path) -> list[Path]:
    """Draw every comparison that has a measured cell, and return the pictures' paths."""
    paths: list[Path] = []
    for find, panels, name, column, axis in (
        (over_tokens, _OVER_TOKENS, "tokens", "tokens", "tokens of the sequence"),
        (over_ranks, _OVER_RANKS, "gpus", "ranks", "GPUs"),
    ):
        for title, rows in find(results):
            if is_measured(rows):
                paths += draw_panels(title, rows, panels, attrgetter(column), _path(stem, rows, name), axis)
    for suite in ("loss", "curve"):
        for title, rows in trained(results, suite):
            if is_measured(rows):
                paths += _draw_curves(title, rows, _path(stem, rows, suite))
    return paths


def timeline_title(cell: TrainCell) -> tuple[str, str]:
    """Return the title and the subtitle of a cell's timeline."""
    return (
        f"Timeline of a training step by {of_whom(cell)}",
        f"{model_of(cell)}, {short(cell.tokens)} tokens, {ranks_name(cell)}",
    )


def _draw_curves(title: str, rows: Rows[TrainCell], start: Path) -> Iterator[Path]:
    """Draw losses over steps and, if one rank was measured, the relative differences of the others from it."""
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

    name = f"Loss of each step (thin) and the median of {MEDIAN_STEPS} steps"
    yield panel(start.with_name(f"{start.name}.png"), name, title, losses)
    if others:
        away = start.with_name(f"{start.name}-difference.png")
        yield panel(away, "Difference of the loss from one rank's", title, differences)


def _path(stem: Path, rows: Rows[TrainCell], what: str) -> Path:
    cell = rows[0][0]
    device = "" if cell.device == "cuda" else cell.device
    where = {"tokens": f"-{cell.ranks}{device}", "gpus": f"-{short(cell.tokens)}{device}"}.get(what, device)
    dtype = "" if cell.dtype == "bfloat16" else f"-{cell.dtype}"
    recompute = (f"-{cell.recompute}" if cell.recompute else "") + ("" if cell.zero == ZERO else f"-zero{cell.zero}")
    return stem.with_name(f"{stem.name}-{what}-{cell.model_name}{where}{dtype}{recompute}")


KIND = Kind(
    name="train",
    format="bmburst training benchmark 1",
    cell=TrainCell,
    own_options=("preset", "layers", "recompute", "batch", "zero", "steps", "text"),
    defaults={"repeats": 5, "cell_seconds": 30.0, "cell_timeout": 600.0},
    configure=_configure,
    select=_select,
    refusal=lambda cell: METHODS[cell.method].refusal(cell),
    starts=_starts,
    estimate=_estimate,
    rank_run="benchmarks.training.measure:TrainRun",
    describe=describe,
    tables=tables,
    draw=draw,
)

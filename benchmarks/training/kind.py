"""Registers `bmburst bench train`: its options, the cells they select, starts of ranks, and estimates of time."""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engine.kind import OK, Kind, Results, selection_of
from benchmarks.training import pictures, report
from benchmarks.training.cells import STEPS, TrainCell, TrainSelection, flops, list_cells
from benchmarks.training.methods import METHODS
from bmburst.amounts import numbers
from bmburst.errors import UserError
from bmburst.recompute.policy import Policy
from bmburst.schedule.hardware import machine_of
from bmburst.train.data_paths import check_data_path

if TYPE_CHECKING:
    from benchmarks.engine.rank import RankRun

_BUILDING = 10.0  # seconds of a cell beside its steps: weights, kernels, rates
_FEW = 5  # steps of a long cell, warm-up included


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
    add("--batch", metavar="N,...", default="1", help="sequences of a step of the suite step (default: 1)")
    add("--zero", metavar="N,...", default="3", help="stages of ZeRO of the suite step, 2 or 3 (default: 3)")
    add(
        "--steps",
        type=int,
        metavar="N",
        help="training steps of the suites loss and curve (default: 30, curve 60)",
    )
    add("--text", metavar="PATH", default="stdlib", help="training text of the suites loss and curve (default: stdlib)")


def _select(args: argparse.Namespace, device: str, ranks: tuple[int, ...]) -> tuple[TrainCell, ...]:
    if args.steps is not None and args.steps < 1:
        raise UserError(f"--steps {args.steps}\nallowed: at least 1\nfix: leave it out for each suite's own number")
    if args.recompute:
        Policy.parse(args.recompute)
    if args.text != "stdlib" and not Path(args.text).exists():
        raise UserError(f"--text {args.text} does not exist\nfix: name a text file or folder, or leave it out")
    check_data_path(args.text, "text")
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
    """Return a start for each number of ranks and tensor degree: BMTrain knows one such degree a process."""
    del ranks
    starts: dict[tuple[int, int], list[TrainCell]] = {}
    for cell in cells:
        starts.setdefault((cell.ranks, METHODS[cell.method].tensor(cell)), []).append(cell)
    text = args.text if args.text == "stdlib" else str(Path(args.text).absolute())
    shared = {"runtime": "bmtrain", "options": {"text": text, "steps": args.steps or 0}}
    return [{"ranks": size, "tensor": tensor, "cells": tuple(own), **shared} for (size, tensor), own in starts.items()]


def _estimate(results: Results[TrainCell], cell: TrainCell) -> float:
    """Return about how many seconds a cell will take: as the nearest of its suite, else as the planner predicts."""
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
    predicted = None if machine is None else METHODS[cell.method].predict(cell, machine)
    return 0.0 if predicted is None else _BUILDING + STEPS.get(cell.suite, _FEW) * predicted.seconds


def _rank_run() -> "type[RankRun[TrainCell]]":
    from benchmarks.training.measure import TrainRun

    return TrainRun


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
    rank_run=_rank_run,
    describe=report.describe,
    tables=report.tables,
    draw=pictures.draw,
)

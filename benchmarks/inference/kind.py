"""Registers `bmburst bench inference`: its options, the cells they select, starts of ranks, and estimates of time."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.engine.kind import Kind, Results, selection_of
from benchmarks.inference import report
from benchmarks.inference.cells import METHODS, InferenceCell, InferenceSelection, list_cells
from bmburst.amounts import numbers
from bmburst.errors import UserError
from bmburst.schedule.hardware import hardware_of

if TYPE_CHECKING:
    from benchmarks.engine.rank import RankRun

_BUILDING = 10.0  # seconds of a cell beside its answers: weights, kernels, a short answer
_ANSWERS = 2  # of a long cell


def _configure(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--models", metavar="NAME,...", help="presets (default: llama-2-7b,llama-2-13b,llama-3-8b)")
    add("--masks", metavar="NAME,...", help="causal, full or both: of attention in prefill (default: the suites')")
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
    """Return about how many seconds a cell will take: as it took before, else by its bounds."""
    known = results.rows.get(cell.key, {}).get("seconds")
    if known is not None:
        return float(known)
    hardware = hardware_of(results.runs[-1]["device"]) if results.runs else None
    return 0.0 if hardware is None else _BUILDING + _ANSWERS * cell.seconds(hardware)


def _rank_run() -> "type[RankRun[InferenceCell]]":
    from benchmarks.inference.measure import InferenceRun

    return InferenceRun


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
    rank_run=_rank_run,
    describe=report.describe,
    tables=report.tables,
    draw=report.draw,
)

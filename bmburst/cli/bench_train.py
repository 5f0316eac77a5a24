"""`bmburst bench train`: its options, as cells and a job for each tensor degree and number of ranks."""

import argparse
from pathlib import Path
from typing import Any

from bmburst.amounts import tokens
from bmburst.cli.bench_kind import Kind, Prepared, Shown, chosen, of_jobs, require_kernel
from bmburst.cli.numbers import numbers
from bmburst.errors import UserError
from bmburst.train.resolve import check_data_path


def configure(group: argparse._ArgumentGroup) -> None:
    """Add the options that only this benchmark has."""
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
    add(
        "--steps",
        type=int,
        metavar="N",
        help="training steps of the suites loss and curve (default: 30, curve 60)",
    )
    add("--text", metavar="PATH", default="stdlib", help="training text of the suites loss and curve (default: stdlib)")


def _prepare(args: argparse.Namespace, device: str, ranks: tuple[int, ...]) -> Prepared:
    from bmburst.bench.training.cells import Choice, TrainCell, list_cells
    from bmburst.bench.training.job import TrainJob
    from bmburst.bench.training.methods import METHODS
    from bmburst.recompute.policy import Policy

    if args.steps is not None and args.steps < 1:
        raise UserError(f"--steps {args.steps}\nallowed: 1 and more\nfix: leave it out for each suite's own number")
    if args.recompute:
        Policy.parse(args.recompute)
    if args.text != "stdlib" and not Path(args.text).exists():
        raise UserError(f"--text {args.text}: there is no such file or folder\nfix: a text, or leave it out")
    check_data_path(args.text, "text")
    require_kernel(args.kernel, device)
    if args.dtype not in (None, "bfloat16", "float32"):
        raise UserError(f"--dtype {args.dtype}: the trainer has no such weights\nallowed: bfloat16, float32")
    cells = list_cells(
        Choice(
            ranks=ranks,
            device=device,
            dtype=args.dtype,
            presets=None if args.preset is None else tuple(args.preset.split(",")),
            layers=None if args.layers is None else numbers("--layers", args.layers),
            tokens=None if args.tokens is None else numbers("--tokens", args.tokens, tokens),
            methods=chosen(args.methods, list(METHODS)),
            recompute=args.recompute,
            globs=tuple(args.cells.split(",")),
        )
    )
    starts: dict[tuple[int, int], list[TrainCell]] = {}
    for cell in cells:
        starts.setdefault((cell.ranks, METHODS[cell.method].tensor(cell)), []).append(cell)

    def jobs(output: str, deadline: float) -> list[tuple[int, Any]]:
        return [
            (
                size,
                TrainJob(
                    cells=tuple(own),
                    tensor=tensor,
                    steps=args.steps or 0,
                    text=args.text if args.text == "stdlib" else str(Path(args.text).absolute()),
                    **of_jobs(args, output, deadline),
                ),
            )
            for (size, tensor), own in starts.items()
        ]

    return Prepared(cells=cells, refusal=lambda cell: METHODS[cell.method].refusal(cell), jobs=jobs)


def _shown() -> Shown:
    from bmburst.bench.training.figure import draw
    from bmburst.bench.training.results import TrainResults
    from bmburst.bench.training.table import markdown

    return Shown(TrainResults, markdown, draw)


KIND = Kind(
    options=("preset", "layers", "recompute", "steps", "text"),
    defaults={"repeats": 5, "cell_seconds": 30.0, "cell_timeout": 600.0},
    prepare=_prepare,
    shown=_shown,
)

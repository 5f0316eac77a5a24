"""The command `bmburst bench`: reads its options, and measures cells, lists them, or shows saved results."""

import argparse
import glob
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine import kinds
from benchmarks.engine.kinds import Kind, Results, load_kind
from benchmarks.engine.rows import ROWS, configure_rows, require_record, run_rows
from bmburst.amounts import TOKENS_TOO, numbers
from bmburst.errors import UserError
from bmburst.outputs import is_picture, require_folder, require_own

_USAGE = (
    "bmburst bench attention|train|inference [--gpus N | --ranks N] [--cells GLOB,...] [--budget SECONDS]\n"
    "                                        [--output FILE]\n"
    "       bmburst bench attention|train|inference --list [...]\n"
    "       bmburst bench attention|train|inference --table --plot --output FILE\n"
    "       bmburst bench NAME --help"
)
_EPILOG = (
    f"NAME is a benchmark of rows with options of its own: {', '.join(ROWS)}. A cell of attention is named "
    "SUITE/TOKENS/HEADS/MASK/METHOD, for example sequence/65536/mha/causal/ulysses. The suites documents and window "
    "have no MASK: documents/131072/gqa/ours. A cell of train is named "
    "SUITE/MODEL/TOKENS/METHOD, for example step/llama-3-8b-x2/131072/ours with two of the model's layers. A cell of "
    "inference is named SUITE/MODEL/TOKENS/MASK/METHOD, for example prompt/llama-3-8b/131072/causal/heads or "
    "batch/llama-3-8b/8x4096/causal/heads. In --cells, * also matches slashes. If the file of --output exists, its "
    "cells are skipped unless --again is given, and the others are added. Tables (.md) and pictures are written next "
    "to it."
)
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of all benchmarks of cells, or of the benchmark of rows that the command names."""
    words = getattr(parser, "words", ())
    parser.set_defaults(words=words)
    if words and words[0] in ROWS:
        configure_rows(parser, words[0])
        return
    parser.usage, parser.epilog = _USAGE, _EPILOG
    add = parser.add_argument
    add("what", choices=(*kinds.KINDS, *ROWS), help="what to measure")
    add("--gpus", metavar="N", help="GPUs that share a sequence; train, inference: also N,... (default: all GPUs)")
    add("--ranks", metavar="N", help="use N ranks on the CPU over gloo instead of GPUs")
    add("--cells", metavar="GLOB,...", default="*", help="cells to measure (default: all)")
    add("--methods", metavar="GLOB,...", default="*", help="methods to measure, in the order of --list (default: all)")
    add("--tokens", metavar="N,...", help=f"sequence lengths, {TOKENS_TOO}, instead of those of each suite")
    add("--dtype", choices=_DTYPES, help="dtype of inputs or weights (default: bfloat16 on GPUs, float32 on CPUs)")
    add("--kernel", metavar="NAME", default="auto", help="attention kernel of all methods (default: auto)")
    add(
        "--repeats",
        type=int,
        metavar="N",
        help="pairs of calls (method, one GPU) per direction (default: 9); train: steps (default: 5); inference: "
        "answers (default: 3)",
    )
    add(
        "--cell-seconds",
        type=float,
        metavar="S",
        help="time to measure a cell; at least 3 calls (train: 2 steps; inference: 1 answer) are measured (default: "
        "10; train, inference: 30)",
    )
    add(
        "--cell-timeout",
        type=float,
        metavar="S",
        help="seconds without progress after which a cell is ended (default: 300; train, inference: 600)",
    )
    add("--budget", type=float, metavar="SECONDS", help="start no cell that would end after this time")
    add("--output", type=Path, metavar="FILE", help="file of the results, .json; continued if it exists")
    add("--again", action="store_true", help="also measure cells that the file already has")
    add("--trace", type=Path, metavar="DIR", help="folder for profiler timelines, of one call or step of each cell")
    add("--list", action="store_true", help="print the cells without measuring")
    add("--table", action="store_true", help="print the tables of --output without measuring")
    add("--plot", action="store_true", help="draw the pictures of --output without measuring")
    for name in kinds.KINDS:
        load_kind(name).configure(parser.add_argument_group(name))
    parser.set_defaults(given=parser.get_default)


def run(args: argparse.Namespace) -> int:
    """Measure, list or redraw, and return the exit status."""
    if args.what in ROWS:
        return run_rows(args, args.words)
    kind = load_kind(args.what)
    if args.table or args.plot:
        return _redraw(args, kind)
    if "RANK" in os.environ:
        raise UserError("RANK is set, but bench starts its own ranks\nfix: run it without a launcher, or unset RANK")
    _settle(args, kind)
    if args.ranks is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for this process and its ranks
    device, ranks = _place(args)
    cells = kind.select(args, device, ranks)
    if not cells:
        raise UserError(f"--cells {args.cells} matches no cell\nfix: bmburst bench {args.what} --list prints the names")
    if args.list:
        _print_cells(kind, cells, args.output)
        return 0
    if args.trace is not None:
        from benchmarks.engine.timing import require_timelines

        require_timelines(args.trace, [name for cell in cells for name in kind.timelines(cell)])
    return _measure(args, kind, cells, device, ranks)


def _settle(args: argparse.Namespace, kind: Kind[Any]) -> None:
    """Fill in the benchmark's defaults; refuse options of other benchmarks and invalid values."""
    for what in kinds.KINDS:
        for name in load_kind(what).own_options:
            if what != kind.name and getattr(args, name) != args.given(name):
                raise UserError(f"--{name.replace('_', '-')} is an option of bench {what}\nfix: leave it out")
    for name, value in kind.defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.repeats < 1:
        raise UserError(f"--repeats {args.repeats}\nallowed: at least 1\nfix: --repeats 5, or leave it out")
    for name in ("cell_seconds", "cell_timeout", "budget"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(
                f"--{name.replace('_', '-')} {value:g}\nallowed: seconds above 0\nfix: leave it out for the default"
            )
    if args.gpus is not None and args.ranks is not None:
        raise UserError("--gpus and --ranks cannot be combined\nfix: --gpus for GPUs, --ranks for ranks on the CPU")
    if args.list:
        return
    if args.output is not None:
        _require_output(args.output, kind)
    if args.trace is not None:
        require_folder("--trace", args.trace)


def _require_output(path: Path, kind: Kind[Any]) -> None:
    """Refuse to overwrite a file that no benchmark wrote, including the tables and pictures with the same name."""
    is_new = not path.exists()
    require_record(path, "results of this benchmark", lambda file: bool(Results.read(kind, file)))
    if is_new:  # pictures of existing results may be replaced
        for picture in path.parent.glob(f"{glob.escape(path.stem)}-*.png"):
            require_own("--output", picture, "a picture of bmburst", is_picture)


def _place(args: argparse.Namespace) -> tuple[str, tuple[int, ...]]:
    """Return the device and the numbers of ranks."""
    import torch

    if args.ranks is not None:
        return "cpu", numbers("--ranks", args.ranks)
    wanted = None if args.gpus is None else numbers("--gpus", args.gpus)
    if args.list and wanted is not None:
        return "cuda", wanted  # lists the cells for any machine
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus and args.list:
        raise UserError(
            "this machine has no GPU\nfix: --list --gpus 2 lists cells of GPUs, --list --ranks 2 of CPU ranks"
        )
    if not gpus:
        raise UserError("this machine has no GPU\nfix: --ranks 2 --tokens 1024 measures on CPU ranks over gloo")
    if wanted is not None and max(wanted) > gpus:
        raise UserError(f"--gpus {args.gpus}, but this machine has {gpus}\nallowed: 1 to {gpus}\nfix: --gpus {gpus}")
    return "cuda", wanted or (gpus,)


def _print_cells(kind: Kind[Any], cells: Sequence[Any], output: Path | None) -> None:
    results = Results(kind) if output is None else Results.read(kind, output)
    for cell in cells:
        row = results.rows.get(cell.key)
        reason = kind.refusal(cell)
        state = f"  cannot run: {reason}" if reason else "" if row is None else f"  {row['status']}"
        print(f"{cell.key}{state}")


def _measure(
    args: argparse.Namespace, kind: Kind[Any], cells: Sequence[Any], device: str, ranks: tuple[int, ...]
) -> int:
    from benchmarks.engine.job import Job, run_job
    from benchmarks.engine.machine import describe_run
    from benchmarks.engine.report import markdown

    status = 0
    with tempfile.TemporaryDirectory(prefix="bmburst-bench-") as folder:
        output = Path(folder) / "results.json" if args.output is None else args.output.absolute()
        shared = {name: getattr(args, name) for name in ("again", "repeats", "cell_seconds", "kernel")} | {
            "kind": kind.name,
            "output": str(output),
            "deadline": 0.0 if args.budget is None else time.time() + args.budget,
            "trace": "" if args.trace is None else str(args.trace.absolute()),
        }
        header: dict[str, Any] | None = describe_run(["bmburst", *sys.argv[1:]], device, max(ranks))
        for start in kind.starts(args, cells, ranks):
            status = run_job(Job(**shared, **start), header=header, cell_timeout=args.cell_timeout)
            header = None  # the next starts continue this run
            if status:
                break
        results = Results.read(kind, output)
        left = sum(cell.key not in results.rows for cell in cells)
        if left:
            print(f"{left} of {len(cells)} cells are not measured yet\nfix: run the command again", file=sys.stderr)
        text = markdown(results)
        print(text)
        if args.output is not None:
            args.output.with_suffix(".md").write_text(text, encoding="utf-8")
            kind.draw(results, args.output.with_suffix(""))
    return status


def _redraw(args: argparse.Namespace, kind: Kind[Any]) -> int:
    from benchmarks.engine.report import markdown

    if args.output is None:
        raise UserError("--table and --plot need a file of results\nfix: --output FILE")
    if not args.output.is_file():
        raise UserError(f"--output {args.output} does not exist\nfix: name a file that bmburst bench --output wrote")
    results = Results.read(kind, args.output)
    try:
        if args.table:
            print(markdown(results))
        if args.plot:
            for path in kind.draw(results, args.output.with_suffix("")):
                print(path)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # invalid values in a row
        raise UserError(
            f"--output {args.output} has an invalid row: {type(error).__name__} {error}\n"
            "fix: measure the row again, or delete it"
        ) from error
    return 0

"""`bmburst bench attention`: measure attention against one GPU's kernel and every peer, and show what was measured."""

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from bmburst.bench.cells import HEAD_DIM, MASKS, Cell, Choice, list_cells
from bmburst.bench.job import RUNTIMES, Job
from bmburst.bench.results import Results
from bmburst.errors import UserError, require_known, unknown

if TYPE_CHECKING:
    from bmburst.bench.methods import Method

HELP = (
    "Measure attention over ranks, cell by cell: burst_attention by every strategy and transport, its peers, and "
    "beside each, in turns, one GPU's kernel on the same FLOPs. Suites: sequence (32K to 1M tokens), batch (1 to 8), "
    "block (with projections and rotary), documents (packed, 128K and 512K tokens), window (of 4,096 tokens in 256K), "
    "accuracy (errors against fp64)."
)
_USAGE = (
    "bmburst bench attention [--gpus N | --ranks N] [--cells GLOB,...] [--budget SECONDS] [--output FILE]\n"
    "       bmburst bench attention --list [...]\n"
    "       bmburst bench attention --table --plot --output FILE"
)
_EPILOG = (
    "A cell is SUITE/TOKENS/HEADS/MASK/METHOD, for example sequence/65536/mha/causal/ulysses; the suites documents and "
    "window are their mask's and leave it out: documents/131072/gqa/ours. In --cells a * also stands for slashes. With "
    "--output the file is continued: cells that it has measured are skipped (--again measures them anew), tables go to "
    "FILE with .md in place of .json and pictures beside it. Ratios are rates over those of one GPU's kernel; exposed "
    "time is a method's less the kernel's for the same FLOPs."
)
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.usage, parser.epilog = _USAGE, _EPILOG
    add = parser.add_argument
    add("what", choices=("attention",), help="what to measure")
    add("--gpus", type=int, metavar="N", help="GPUs that share a sequence, a rank each (default: all of this machine)")
    add("--ranks", type=int, metavar="N", help="run N ranks on the CPU over gloo instead")
    add("--runtime", choices=RUNTIMES, default="torch", help="what starts the ranks (default: torch)")
    add("--cells", metavar="GLOB,...", default="*", help="which cells (default: all)")
    add("--methods", metavar="GLOB,...", default="*", help="which methods, in the order given by --list (default: all)")
    add("--tokens", metavar="N,...", help="sequence lengths, in place of each suite's own")
    add("--heads", type=int, metavar="N", help="query heads, in place of 32/32 and 32/8")
    add("--kv-heads", type=int, metavar="N", help="key/value heads (default: as --heads)")
    add("--head-dim", type=int, metavar="N", default=HEAD_DIM, help=f"features of a head (default: {HEAD_DIM})")
    add("--mask", choices=(*MASKS, "all"), default="all", help="which masks (default: all)")
    add("--dtype", choices=_DTYPES, help="of the inputs (default: bfloat16 on GPUs, float32 on CPUs)")
    add("--kernel", metavar="NAME", default="auto", help="kernel under test, for all methods (default: auto)")
    add("--deterministic", action="store_true", help="ask burst_attention for gradients that repeat bit for bit")
    add("--repeats", type=int, metavar="N", default=9, help="pairs of calls a direction (default: 9)")
    add("--cell-seconds", type=float, metavar="S", default=10.0, help="fewer pairs, 3 at least, beyond (default: 10)")
    add("--cell-timeout", type=float, metavar="S", default=300.0, help="give a cell up that stands (default: 300)")
    add("--budget", type=float, metavar="SECONDS", help="begin no cell that would end later than this from now")
    add("--output", type=Path, metavar="FILE", help="JSON file of results, continued if it exists")
    add("--again", action="store_true", help="measure also what the file has")
    add("--trace", type=Path, metavar="DIR", help="write a profiler timeline of one call of each cell")
    add("--list", action="store_true", help="print the cells and run nothing")
    add("--table", action="store_true", help="print the tables of --output and run nothing")
    add("--plot", action="store_true", help="draw the pictures of --output and run nothing")


def run(args: argparse.Namespace) -> int:
    """Measure, list or redraw, and return the exit status.

    Raises:
        UserError: Something given cannot work.
    """
    if args.table or args.plot:
        return _redraw(args)
    if "RANK" in os.environ:
        raise UserError("bench starts its ranks itself, but RANK is set\nfix: run it without a launcher, or unset RANK")
    _check(args)
    if args.ranks is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for this process and its ranks
    device, ranks = _place(args)

    from bmburst.bench.methods import all_methods

    methods = all_methods(device)
    cells = list_cells(_choice(args, device, ranks, _chosen(args.methods, list(methods))))
    if not cells:
        raise UserError(f"--cells {args.cells} fits no cell\nfix: bmburst bench attention --list shows the names")
    if args.list:
        _print_cells(cells, methods, args.output)
        return 0
    return _measure(args, cells, device, ranks)


def _check(args: argparse.Namespace) -> None:
    for name in ("gpus", "ranks", "heads", "kv_heads", "head_dim", "repeats"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}\nallowed: 1 and more")
    for name in ("cell_seconds", "cell_timeout", "budget"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {value:g}\nallowed: seconds above 0")
    if args.gpus is not None and args.ranks is not None:
        raise UserError("--gpus and --ranks exclude each other\nfix: --gpus for GPUs, --ranks for ranks on the CPU")
    if args.output is not None and not args.output.absolute().parent.is_dir():
        raise UserError(f"--output {args.output}: there is no such folder\nfix: make it, or another file")


def _place(args: argparse.Namespace) -> tuple[str, int]:
    """Return the device and the number of ranks."""
    import torch

    if args.ranks is not None:
        return "cpu", args.ranks
    if args.list and args.gpus is not None:
        return "cuda", args.gpus  # of any machine
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        raise UserError("there is no GPU here\nfix: --ranks 2 --tokens 1024 measures on the CPU, over gloo")
    if args.gpus is not None and args.gpus > gpus:
        raise UserError(f"--gpus {args.gpus} is more than the {gpus} of this machine\nallowed: 1 to {gpus}")
    return "cuda", args.gpus or gpus


def _choice(args: argparse.Namespace, device: str, ranks: int, methods: tuple[str, ...]) -> Choice:
    heads = None
    if args.heads is not None or args.kv_heads is not None:
        queries = args.heads or max(32, args.kv_heads)
        heads = ((queries, args.kv_heads or queries),)
    from bmburst_ops.flash import NAMES

    require_known("kernel", args.kernel, NAMES)
    return Choice(
        ranks=ranks,
        device=device,
        dtype=args.dtype or ("bfloat16" if device == "cuda" else "float32"),
        tokens=None if args.tokens is None else _numbers("--tokens", args.tokens),
        heads=heads,
        head_dim=args.head_dim,
        masks=MASKS if args.mask == "all" else (args.mask,),
        methods=methods,
        globs=tuple(args.cells.split(",")),
    )


def _chosen(globs: str, names: Sequence[str]) -> tuple[str, ...]:
    patterns = globs.split(",")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise unknown("method", pattern, names)
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdigit() for word in words):
        raise UserError(f"{option} {text}\nallowed: whole numbers with commas between, for example 65536,131072")
    return tuple(int(word) for word in words)


def _print_cells(cells: Sequence[Cell], methods: "dict[str, Method]", output: Path | None) -> None:
    results = Results() if output is None else Results.read(output)
    for cell in cells:
        row = results.rows.get(cell.key)
        reason = methods[cell.method].refusal(cell)
        state = f"  cannot run: {reason}" if reason else "" if row is None else f"  {row['status']}"
        print(f"{cell.key}{state}")


def _measure(args: argparse.Namespace, cells: tuple[Cell, ...], device: str, ranks: int) -> int:
    from bmburst.bench.machine import describe
    from bmburst.bench.start import run_job

    with tempfile.TemporaryDirectory(prefix="bmburst-bench-") as folder:
        output = Path(folder) / "results.json" if args.output is None else args.output.absolute()
        job = Job(
            cells=cells,
            output=str(output),
            deadline=0.0 if args.budget is None else time.time() + args.budget,
            again=args.again,
            repeats=args.repeats,
            cell_seconds=args.cell_seconds,
            kernel=args.kernel,
            deterministic=args.deterministic,
            runtime=args.runtime,
            trace="" if args.trace is None else str(args.trace.absolute()),
        )
        header = describe(sys.argv[1:], device, ranks)
        status = run_job(job, ranks=ranks, header=header, cell_timeout=args.cell_timeout)
        results = Results.read(output)
        left = sum(cell.key not in results.rows for cell in cells)
        if left:
            print(f"{left} of {len(cells)} cells are left; the same command goes on with them", file=sys.stderr)
        _show(results, args.output)
    return status


def _show(results: Results, output: Path | None) -> None:
    from bmburst.bench.figure import draw
    from bmburst.bench.table import markdown

    text = markdown(results)
    print(text)
    if output is not None:
        output.with_suffix(".md").write_text(text, encoding="utf-8")
        draw(results, output.with_suffix(""))


def _redraw(args: argparse.Namespace) -> int:
    if args.output is None or not args.output.is_file():
        raise UserError("--table and --plot show a file of results, and --output names none\nfix: --output FILE")
    from bmburst.bench.figure import draw
    from bmburst.bench.table import markdown

    results = Results.read(args.output)
    if args.table:
        print(markdown(results))
    if args.plot:
        for path in draw(results, args.output.with_suffix("")):
            print(path)
    return 0

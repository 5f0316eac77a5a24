"""Benchmarks that measure rows: those of `bmburst bench` whose measurements are not cells of methods and shapes.

A `RowBenchmark` yields rows. This module starts its ranks, prints a line for each row and the table at the end, and
writes the record: machine, command, facts and rows as JSON, and the table beside it. The record is written after each
row, since the next one may run out of memory.
"""

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bmburst.config import read_json
from bmburst.errors import UserError
from bmburst.outputs import replacing, require_file, require_own

Row = dict[str, Any]
Measured = tuple[dict[str, Any], Iterator[Row]]
_BEGINNING = 5  # characters of a table's first line that `notes_above` searches for
ROWS: Mapping[str, str] = MappingProxyType(
    {
        "biased": "benchmarks.biased",
        "bmtrain-tests": "benchmarks.bmtrain_tests",
        "block-sparse": "benchmarks.sparse_cross",
        "block-sparse-errors": "benchmarks.sparse_cross",
        "cross": "benchmarks.sparse_cross",
        "double-ring": "benchmarks.slow_links",
        "elementwise": "benchmarks.operators",
        "families": "benchmarks.families",
        "grpo": "benchmarks.grpo",
        "hugging-face": "benchmarks.hugging_face",
        "hybrid": "benchmarks.hybrid",
        "large-models": "benchmarks.large_models",
        "linear": "benchmarks.linear",
        "links": "benchmarks.links",
        "logprobs": "benchmarks.logprobs",
        "lora-peers": "benchmarks.lora_peers",
        "mixed-lengths": "benchmarks.mixed_lengths",
        "shared-prefixes": "benchmarks.shared_prefixes",
        "step-parts": "benchmarks.operators",
        "steps": "benchmarks.predictions",
        "strategies": "benchmarks.predictions",
    }
)
"""Modules of the benchmarks by their names in `bmburst bench NAME`; each module defines `BENCHMARKS`."""


@dataclass(frozen=True, kw_only=True)
class RowBenchmark:
    """One benchmark of rows.

    `configure` adds its options, besides `--output` and, with `ranks`, `--gpus`. `measure` starts the rank, and returns
    the facts of the record beside its rows, and the rows. All ranks call it.
    """

    name: str  # a name of `ROWS`
    about: str  # its description in help
    configure: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace], Measured]
    table: Callable[[Mapping[str, Any]], str]  # returns a record as Markdown
    line: Callable[[Row], str] = json.dumps  # returns a row in one line, printed when it is measured
    ranks: int = 0  # default number of ranks. 0: there are none, and the command itself measures.
    needs_gpu: bool = False  # whether it cannot run without a GPU
    is_wrong: Callable[[Row], bool] = lambda _: False  # returns whether a row shows a fault: the exit status is then 1


def load_rows(name: str) -> RowBenchmark:
    """Return a benchmark by its name in `ROWS`."""
    found: dict[str, RowBenchmark] = {each.name: each for each in importlib.import_module(ROWS[name]).BENCHMARKS}
    return found[name]


def configure_rows(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the options of a benchmark of rows, after its name."""
    benchmark = load_rows(name)
    parser.description, parser.formatter_class = benchmark.about, argparse.RawDescriptionHelpFormatter
    parser.prog = f"{parser.prog} {name}"
    parser.add_argument("what", choices=(name,), help=argparse.SUPPRESS)
    benchmark.configure(parser)
    if benchmark.ranks:
        text = f"GPUs, or ranks on the CPU without GPUs (default: {benchmark.ranks})"
        parser.add_argument("--gpus", type=int, default=benchmark.ranks, metavar="N", help=text)
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file of the record; its table is also .md")


def run_rows(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure in this process, as one of the ranks or starting them, and return the exit status.

    `words` is the command line, beginning with the name.

    Raises:
        UserError: An option is invalid, there is no GPU, or another file would be overwritten.
    """
    import torch
    import torch.distributed as dist

    from benchmarks.engine.machine import describe_run

    benchmark = load_rows(args.what)
    if benchmark.needs_gpu and not torch.cuda.is_available():
        raise UserError(f"bench {args.what} needs a GPU, but torch finds none\nfix: run it on a machine with CUDA")
    if args.output is not None and os.environ.get("RANK", "0") == "0":
        require_record(args.output, "a record of this benchmark", lambda file: "machine" in read_json(file))
    if benchmark.ranks and "RANK" not in os.environ:
        from bmburst.launch.launcher import LaunchSpec, launch

        return launch(LaunchSpec(nproc=args.gpus, host_runtime=True), ["-m", "bmburst", "bench", *words])
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = describe_run(["bmburst", "bench", *words], device, ranks)
    facts, measured = benchmark.measure(args)
    record: dict[str, Any] = {"machine": machine, **facts, "rows": []}
    for row in measured:
        record["rows"].append(row)
        if rank == 0:
            print(benchmark.line(row), file=sys.stderr, flush=True)
            write_record(args.output, record)
    if rank == 0:
        publish(args.output, record, benchmark.table(record))
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(any(map(benchmark.is_wrong, record["rows"])))


def require_record(path: Path, what: str, is_own: Callable[[Path], bool]) -> None:
    """Refuse to overwrite a file that is no record, and a page beside a new record; arguments as for `require_own`."""
    if path.suffix != ".json":  # tables and pictures have the same name with other suffixes
        raise UserError(f"--output {path}\nallowed: a .json file\nfix: --output results.json")
    is_new = not path.exists()
    require_file("--output", path, what, is_own)
    if is_new:
        require_own("--output", path.with_suffix(".md"), "a table of this benchmark", lambda _: False)


def write_record(path: Path | None, record: Mapping[str, Any]) -> None:
    """Replace a record; do nothing without a path."""
    if path is not None:
        with replacing(path) as partial:
            partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def publish(path: Path | None, record: Mapping[str, Any], table: str) -> None:
    """Print the table of a record. With a path, also write the record, and the table as .md.

    Text that was written by hand above the table of an earlier run is kept.
    """
    write_record(path, record)
    print(table)
    if path is not None:
        page = path.with_suffix(".md")
        notes = notes_above(page.read_text(encoding="utf-8"), table) if page.exists() else ""
        page.write_text(f"{notes}{table}\n", encoding="utf-8")


def notes_above(text: str, table: str) -> str:
    """Return the text above the table of a record; empty if the file contains only the table.

    The old table begins with the first line of the new one, or with its first row if it has no title.
    """
    begins = re.search(rf"(?m)^(\| |{re.escape(table[:_BEGINNING])})", text)
    head = (text if begins is None else text[: begins.start()]).rstrip()
    return f"{head}\n\n" if head else ""

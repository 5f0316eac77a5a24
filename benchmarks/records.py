"""Regenerates tables after a JSON file in `results/` has changed: `python -m benchmarks.records`.

- The tables of the benchmarks, from the JSON next to them. Text above the first table is written by hand and kept.
- The numbers of this project's runs in `benchmarks/runs/measured.toml`. Rows are added by hand.
- The output of `python -m benchmarks.accuracy`, below the line in `results/plan_accuracy_*.md`.

It prints each file that changed. With `--check` it writes nothing, and exits with 1 if a file would change.
"""

import argparse
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import accuracy
from benchmarks.engine.kinds import KINDS, Results, load_kind
from benchmarks.engine.report import markdown
from benchmarks.engine.rows import ROWS, load_rows, notes_above

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
_MEASURED = _ROOT / "benchmarks" / "runs" / "measured.toml"


def main(arguments: Sequence[str] | None = None, files: Iterable[tuple[Path, str]] | None = None) -> int:
    """Update the files, or with `--check` print those that are out of date; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    args = parser.parse_args(arguments)
    is_old = False
    for path, text in derived() if files is None else files:
        if path.read_text(encoding="utf-8") == text:
            continue
        is_old = True
        print(os.path.relpath(path))
        if not args.check:
            path.write_text(text, encoding="utf-8")
    return int(is_old and args.check)


def derived() -> Iterator[tuple[Path, str]]:
    """Yield each derived file and its new content. The planner's rows come before its accuracy, which reads them."""
    yield from tables(_RESULTS)
    yield _MEASURED, _with_rows(_MEASURED.read_text(encoding="utf-8"))
    for path in sorted(_RESULTS.glob("plan_accuracy_*.md")):
        head, line, _ = path.read_text(encoding="utf-8").partition("\n---\n")
        yield path, f"{head}{line}\n{accuracy.markdown(accuracy.compare_predictions())}\n"


def tables(results: Path) -> Iterator[tuple[Path, str]]:
    """Yield each table of the records in a folder, with its new content."""
    for name in KINDS:
        for path in sorted(results.glob(f"{name}_*.md")):
            text = path.read_text(encoding="utf-8")
            head = "" if text.startswith("## ") else text.partition("\n## ")[0] + "\n"  # no text was added by hand
            text = markdown(Results.read(load_kind(name), path.with_suffix(".json")))
            yield path, f"{head}{text.rstrip()}\n"
    for path, name, record in row_records(results):
        text = load_rows(name).table(record)
        yield path, f"{notes_above(path.read_text(encoding='utf-8'), text)}{text}\n"


def row_records(results: Path) -> Iterator[tuple[Path, str, Any]]:
    """Yield each page of a benchmark of rows in a folder, the name of the benchmark, and its record."""
    for path in sorted(results.glob("*.json")):
        if (name := _benchmark_of(path.name)) is not None:
            record = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(record.get("rows"), list):  # the oldest have none
                yield path.with_suffix(".md"), name, record


def _benchmark_of(record: str) -> str | None:
    """Return the benchmark of rows whose name, with underscores, begins the name of a record; None if there is none."""
    if record.startswith("sparse_errors_"):
        return "block-sparse-errors"
    names = [name for name in ROWS if record.startswith(f"{name.replace('-', '_')}_")]
    return max(names, key=len, default=None)


def _with_rows(text: str) -> str:
    """Return the planner's data with numbers taken from the records."""
    blocks = re.split(r"(?m)^(?=\[\[)", text)
    return "".join(_with_numbers(block, _numbers(tomllib.loads(block))) for block in blocks)


def _with_numbers(block: str, numbers: Mapping[str, str]) -> str:
    for key, number in numbers.items():
        block = re.sub(rf"(?m)^{key} = .*$", f"{key} = {number}", block)
    return block


def _numbers(block: Mapping[str, Any]) -> dict[str, str]:
    """Return the numbers of a row's record by key; empty if its source is not a record."""
    for kind, read in (("attention", _attention), ("training", _training)):
        for row in block.get(kind, ()):
            if row["source"].endswith(".json"):
                return read(row, _rows(row["source"]))
            if row["source"].endswith(".jsonl"):
                return _run(row)
    return {}


def _run(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the time of a run's last step, and the peak memory of all its steps."""
    lines = (_RESULTS / row["source"]).read_text(encoding="utf-8").splitlines()
    steps = [step for step in map(json.loads, filter(None, lines)) if step.get("run") == row.get("run")]
    peak = max(step["memory_gib"] for step in steps)
    return {"seconds": f"{steps[-1]['seconds']:.4f}", "memory_gib": f"{peak:.3f}"}


@cache
def _rows(name: str) -> Any:
    """Return the rows of a record: a mapping by cell, or the list of `bmburst bench steps`."""
    return json.loads((_RESULTS / name).read_text(encoding="utf-8"))["rows"]


def _attention(row: Mapping[str, Any], rows: Any) -> dict[str, str]:
    found = rows[row["cell"]]
    times = {
        f"{prefix}{name}_ms": found[direction][key]["median"]
        for name, direction in (("forward", "forward"), ("both", "forward_backward"))
        for prefix, key in (("", "milliseconds"), ("one_", "one_gpu_milliseconds"))
    }
    return {key: f"{value:.3f}" for key, value in {**times, "peak_gib": found["peak_memory_gib"]}.items()}


def _training(row: Mapping[str, Any], rows: Any) -> dict[str, str]:
    if isinstance(rows, dict):
        found = rows[row["name"]]
        seconds = found["milliseconds"]["median"] / 1e3
    else:
        case = [row[key] for key in ("preset", "layers", "sequence", "recompute", "zero")]
        (found,) = (found for found in rows if found["case"] == case)
        seconds = found["seconds"]
    numbers = {"seconds": f"{seconds:.4f}", "memory_gib": f"{found['allocated_gib']:.3f}"}
    return numbers | ({"outside_gib": f"{found['outside_gib']:.3f}"} if "outside_gib" in found else {})


if __name__ == "__main__":
    sys.exit(main())

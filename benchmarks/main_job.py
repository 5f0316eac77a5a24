"""Runs a whole training job on 1, 2, ... ranks: `python -m benchmarks.main_job --ranks 1 2 --output DIR`.

The record (`main_job_<device>_<date>.md`) contains the command, the machine, each run's output and a table. The runs'
metrics.jsonl are written next to it. Arguments after `--` are passed to `bmburst train`.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.engine.machine import describe_run
from benchmarks.engine.report import versions

_WARM_UP = 10  # steps that are not timed: kernels are chosen and memory is taken


class FinishedRun(NamedTuple):
    """One finished run of the main job."""

    ranks: int
    command: str
    output: str
    seconds: float
    metrics: list[dict[str, Any]]
    held_out: dict[str, Any]


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks to run on")
    parser.add_argument("--output", type=Path, required=True, help="folder of the record")
    parser.add_argument("options", nargs="*", help="options of bmburst train, after --")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    runs = [train(ranks, args.options) for ranks in args.ranks]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = describe_run(["python", "-m", "benchmarks.main_job", *sys.argv[1:]], device, max(args.ranks))
    name = f"main_job_{machine['device'].split()[-1].lower() if device == 'cuda' else 'cpu'}_{time.strftime('%Y%m')}"
    for run in runs:
        lines = "".join(json.dumps(line) + "\n" for line in run.metrics)
        (args.output / f"{name}_{run.ranks}_ranks.jsonl").write_text(lines)
    (args.output / f"{name}.md").write_text(record(runs, machine))
    print(f"{args.output / name}.md")
    return 0


def train(ranks: int, options: list[str]) -> FinishedRun:
    """Run the main job on some ranks of this machine.

    Raises:
        RuntimeError: It failed; the message is its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "--nproc", str(ranks), *options]
        command = [sys.executable, "-m", "bmburst", *words, "--output", f"{folder}/run"]
        started = time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        seconds = time.perf_counter() - started
        if done.returncode != 0:
            raise RuntimeError(done.stdout)
        run = Path(folder) / "run"
        metrics, evals = (
            [json.loads(line) for line in (run / name).read_text().splitlines()]
            for name in ("metrics.jsonl", "evals.jsonl")
        )
        output = "\n".join(line.split("\r")[-1].rstrip() for line in done.stdout.splitlines() if folder not in line)
        return FinishedRun(ranks, shlex.join(["bmburst", *words]), output, seconds, metrics, evals[-1])


def record(runs: list[FinishedRun], machine: dict[str, Any]) -> str:
    """Return the record of runs on a machine as Markdown."""
    lines = [
        "# The main job",
        "",
        f"{machine['date']}, {machine['device']}: {versions(machine)}. Recorded by `{machine['command']}`.",
        "",
        f"Tokens/s is the median over the steps after the first {_WARM_UP}. A model of a million parameters and 4,096",
        "tokens are bound by launches, not by arithmetic: this shows that the path works, not how fast it is.",
        "",
        "| ranks | held-out bits per byte | last loss (nats/token) | tokens/s | GiB a rank | whole command (s) |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        speed = statistics.median(line["tokens_per_second"] for line in run.metrics[_WARM_UP:])
        lines.append(
            f"| {run.ranks} | {run.held_out['bits_per_byte']:.4f} | {run.metrics[-1]['loss']:.4f} | {speed:,.0f} | "
            f"{run.metrics[-1]['memory_gib']:.2f} | {run.seconds:.0f} |"
        )
    for run in runs:
        lines += [
            "",
            f"## {run.ranks} {'rank' if run.ranks == 1 else 'ranks'}",
            "",
            "```",
            f"$ {run.command}",
            run.output,
            "```",
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

"""`bmburst check`: runs a few steps of a configuration on its ranks and on one rank, and compares every tensor."""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bmburst.amounts import bytes_text, finite
from bmburst.cli import training
from bmburst.config import from_dict, hide_rare, read_json, to_dict
from bmburst.errors import UserError
from bmburst.launch.handover import Request, run_command, run_on_ranks
from bmburst.launch.spec import LaunchSpec
from bmburst.outputs import require_file
from bmburst.train.config import TrainConfig
from bmburst.train.resolve import check_run

if TYPE_CHECKING:
    from bmburst.train.check import CheckReport, Deviation, StepReport, TensorReport

HELP = (
    "Run a few steps of a training configuration on its ranks and on one rank, with the same data and seed, and print "
    "the difference of every tensor's gradient and update. Takes the options of bmburst train. Exit status: 0 if the "
    "results agree, 1 if not."
)
_EPILOG = (
    "One rank must hold the whole model and a whole sequence. If it cannot, check fewer layers, for example "
    "--model.num_layers 2 (with --preset instead of --init-from), or a shorter --sequence-length. Results are kept in "
    "a temporary folder ($TMPDIR), about 12 bytes a parameter for each run. No run folder is written: --output, "
    "checkpoints, evaluations and the sample are ignored. --resume takes the configuration of the run in --output, not "
    "its weights. Rounding errors grow with the steps, so a few steps tell the most."
)
_SHOWN = 20
_RARE = frozenset({"epochs", "output", "checkpoint_every", "eval_every", "resume"})
"""Common settings of a run without effect here, or whose effect here is the epilog's."""
# Exit statuses: 2 is bad input, already explained; 128 and above means that a signal ended the run.
_BAD_INPUT, _SIGNALS = 2, 128


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _CheckRun:
    """One run: name of its folder, number of ranks, and configuration."""

    name: str
    nproc: int
    config: TrainConfig

    def __str__(self) -> str:
        ranks = "one rank" if self.nproc == 1 else f"{self.nproc} ranks ({self.config.mesh_shape(self.nproc)})"
        return f"{ranks} in {self.config.dtype}"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bmburst train` and --check-steps, --all and --json."""
    training.configure(parser)
    parser.usage = (
        "bmburst check [--check-steps N] [--all] [--json FILE] [--config FILE] [--FIELD VALUE ...]\n"
        "       bmburst check --help all"
    )
    parser.epilog = _EPILOG
    hide_rare(parser, _RARE)
    add = parser.add_argument
    add("--check-steps", type=int, default=2, metavar="N", help="number of steps, at least 1 [steps; default 2]")
    add("--all", action="store_true", help=f"print every tensor, not only the {_SHOWN} with the largest difference")
    add("--json", metavar="FILE", type=Path, help="write all results as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run and compare. Return 0 if the ranks agree with one rank, 1 if not, or the status of a run that failed."""
    try:
        return run_command(__name__, partial(settle, args))
    except SystemExit as stop:  # a run on one rank failed
        return int(stop.code or 0)


@contextlib.contextmanager
def settle(args: argparse.Namespace, world_size: int | None = None) -> Iterator[tuple[Request, LaunchSpec]]:
    """Check the runs, and run those on one rank.

    Raises:
        UserError: The configuration cannot work.
        SystemExit: A run on one rank failed, with its status.
    """
    config = resolve_options(args)
    ranks, *others = runs_to_compare(config, world_size or training.ranks_of(config))
    if world_size is None:
        from bmburst.train.machine import check_host_memory  # here, because the help does not need the planner

        for each in (ranks, *others):
            check_host_memory(each.config, each.nproc)
    with tempfile.TemporaryDirectory(prefix="bmburst-check-") as name:
        folder = Path(name)
        _require_space(folder, (ranks, *others))
        for each in (ranks, *others):
            (folder / each.name).mkdir()
        titles = [f"{each}: {args.check_steps} steps of {_tokens(config)}" for each in (*others, ranks)]
        for number, (each, title) in enumerate(zip(others, titles, strict=False), start=1):
            _print_progress(f"[{number}/{len(titles)}] {title}")
            if status := run_on_ranks(__name__, _request(each, folder, args), _spec(each)):
                if status != _BAD_INPUT and status < _SIGNALS:
                    _print_progress(
                        "if one rank has too little memory for it: --model.num_layers 2, or a shorter --sequence-length"
                    )
                raise SystemExit(status)
        _print_progress(f"[{len(titles)}/{len(titles)}] {titles[-1]}")
        compared = ["ranks", *(each.name for each in others)]
        yield _request(ranks, folder, args) | {"compared": compared}, _spec(ranks)


def _request(run: _CheckRun, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "config": to_dict(run.config.replace(output=folder / run.name)),
        "ranks": run.nproc,
        "steps": args.check_steps,
        "compared": [],
        "shown": None if args.all else _SHOWN,
        "json": None if args.json is None else str(args.json),
    }


def _spec(run: _CheckRun) -> LaunchSpec:
    config = run.config
    return LaunchSpec(nproc=run.nproc, hang_timeout=config.hang_timeout, start_timeout=config.start_timeout)


def run_rank(request: Request) -> int:
    """Run one rank of one run. Rank 0 of the last run compares all, and returns 1 if they do not agree, else 0."""
    from bmburst.train.check import compare_runs, record_steps

    config = from_dict(TrainConfig, request["config"], "request")
    record_steps(config, request["steps"], valid_for=request["ranks"])
    if not request["compared"] or os.environ["RANK"] != "0":
        return 0
    assert config.output is not None  # `_request` sets it
    ranks, *single, exact = (config.output.with_name(name) for name in request["compared"])
    report, nproc = compare_runs(ranks, exact, *single), int(os.environ["WORLD_SIZE"])
    print(to_text(report, nproc, shown=request["shown"]))
    if request["json"] is not None:
        text = json.dumps(to_json(report, config.replace(output=None), nproc), indent=2) + "\n"
        Path(request["json"]).write_text(text, encoding="utf-8")
    return 0 if report.ok else 1


def resolve_options(args: argparse.Namespace) -> TrainConfig:
    """Return the configuration that `bmburst train` would use, without a run folder; UserError for a bad value."""
    if args.check_steps < 1:
        raise UserError(f"--check-steps {args.check_steps}\nallowed: at least 1\nfix: --check-steps 2, or leave it out")
    if args.json is not None:
        require_file("--json", args.json, "a report of bmburst check", _is_report)
    config = training.resolve_options(args)
    if config.dtype == "float16":
        raise UserError(
            "dtype float16: a gradient that overflows on one number of ranks may not overflow on another\n"
            "allowed: float32, bfloat16\n"
            "fix: --dtype bfloat16, or float32 on GPUs without it; ranks split the work in the same way"
        )
    return config.replace(output=None, resume=False, sample_tokens=0, epochs=None)


def runs_to_compare(config: TrainConfig, nproc: int) -> tuple[_CheckRun, ...]:
    """Return the runs to compare: on all ranks, on one rank, and for bfloat16 also on one rank in float32.

    Raises:
        UserError: There is only one rank, or the configuration does not fit the ranks.
    """
    check_run(config, nproc)
    # Imported here because it imports numpy, which the help does not need.
    from bmburst.train.text import check_text

    check_text(config, config.data.cache)
    if nproc == 1:
        raise UserError(
            "check compares several ranks with one, but this run has 1 rank\n"
            "fix: --nproc 2; or CUDA_VISIBLE_DEVICES= (empty) to check on the CPU"
        )
    alone = dataclasses.replace(
        config.parallel,
        pipeline_parallel=1,
        data_parallel=1,
        sequence_parallel=1,
        tensor_parallel=1,
        head_parallel=None,
        transport="auto",
        zero_group="world",
    )
    runs = [
        _CheckRun(name="ranks", nproc=nproc, config=config),
        _CheckRun(name="single", nproc=1, config=config.replace(parallel=alone)),
    ]
    if config.dtype != "float32":
        # A kernel chosen for 16-bit inputs may not support fp32.
        optimizer = dataclasses.replace(config.optimizer, kernel="auto")
        exact = config.replace(parallel=dataclasses.replace(alone, kernel="auto"), optimizer=optimizer, dtype="float32")
        runs.append(_CheckRun(name="exact", nproc=1, config=exact))
    for single in runs[1:]:
        single.config.validate(single.nproc)
    return tuple(runs)


def to_text(report: "CheckReport", nproc: int, *, shown: int | None) -> str:
    """Return the tables and the verdict as text.

    Args:
        report: The comparison.
        nproc: Number of ranks that were compared with one rank.
        shown: Number of tensors to show, the worst first; None for all.
    """
    tensors = sorted(report.tensors, key=lambda tensor: -tensor.severity)[:shown]
    lines = list(_tensor_table(report, tensors, nproc))
    if len(tensors) < len(report.tensors):
        lines.append(f"the worst {len(tensors)} of {len(report.tensors)} tensors; --all shows all")
    return "\n".join([*lines, "", *_step_table(report, nproc), "", verdict(report, nproc)])


def verdict(report: "CheckReport", nproc: int) -> str:
    """Return the last line: whether the ranks agree, what differs, and the tolerances."""
    from bmburst.train.check import BF16_FACTOR, TOLERANCES

    tolerance = TOLERANCES[report.dtype]
    limits = (
        f"gradient {tolerance['gradient']:g}, change {tolerance['change']:g}, loss {tolerance['loss']:g}, "
        f"gradient norm {tolerance['norm']:g}"
    )
    asked = f"relative error at most: {limits}"
    if report.dtype != "float32":
        asked = (
            f"relative error against one rank in float32 at most {BF16_FACTOR:g} times that of one rank in "
            f"{report.dtype}, plus {limits}, or plus 0 for the gradient of all tensors together"
        )
    if report.ok:
        return f"ok: {nproc} ranks train as one does ({asked})"
    bad_tensors = sum(bool(tensor.faults) for tensor in report.tensors)
    bad_steps = sum(bool(step.faults) for step in report.steps)
    parts = [
        *([f"{bad_tensors} of {len(report.tensors)} tensors"] if bad_tensors else []),
        *(["all tensors together"] if report.total.faults else []),
        *([f"{bad_steps} of {len(report.steps)} steps"] if bad_steps else []),
    ]
    return f"not ok: too far from one rank: {', '.join(parts)} ({asked})"


def to_json(report: "CheckReport", config: TrainConfig, nproc: int) -> dict[str, Any]:
    """Return the comparison as plain data for JSON, with null for infinity and NaN."""
    from bmburst.train.check import BF16_FACTOR, TOLERANCES

    return {
        "ok": report.ok,
        "verdict": verdict(report, nproc),
        "ranks": nproc,
        "dtype": report.dtype,
        "tolerances": dict(TOLERANCES[report.dtype]),
        "factor": None if report.dtype == "float32" else BF16_FACTOR,
        "tensors": [finite(dataclasses.asdict(tensor)) for tensor in report.tensors],
        "all_tensors": finite(dataclasses.asdict(report.total)),
        "steps": [finite(dataclasses.asdict(step)) for step in report.steps],
        "config": to_dict(config),
    }


def _is_report(path: Path) -> bool:
    return {"verdict", "tolerances", "tensors"} <= read_json(path).keys()


def _require_space(folder: Path, runs: Sequence[_CheckRun]) -> None:
    # Initial weights and gradients in the run's dtype, and final weights in fp32.
    needed = sum(run.config.model.num_parameters * (12 if run.config.dtype == "float32" else 8) for run in runs)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder.parent} has {bytes_text(free)} free, the check writes {bytes_text(needed)}\n"
            "fix: TMPDIR=another folder, or fewer layers, for example --model.num_layers 2"
        )


def _tensor_table(report: "CheckReport", tensors: "Sequence[TensorReport]", nproc: int) -> Iterator[str]:
    is_pair = report.dtype != "float32"
    width = max(len(tensor.name) for tensor in (*tensors, report.total))
    shape_width = max(5, *(len(_shape(tensor)) for tensor in tensors))
    against = "one rank in float32" if is_pair else "one rank"
    yield f"relative error of {nproc} ranks against {against}" + (
        f"; after the slash: error of one rank in {report.dtype}" if is_pair else ""
    )
    column = 19 if is_pair else 10
    heads = "".join(f"{head:>{column}}" for head in ("gradient", "parameter", "change"))
    yield f"{'tensor':{width}}  {'shape':{shape_width}}{heads}"
    for tensor in (*tensors, report.total):
        cells = "".join(f"{_error(d):>{column}}" for d in (tensor.gradient, tensor.parameter, tensor.change))
        yield f"{tensor.name:{width}}  {_shape(tensor):{shape_width}}{cells}{_mark(tensor)}"


def _step_table(report: "CheckReport", nproc: int) -> Iterator[str]:
    columns = [f"{nproc} ranks", "one rank", *(["float32"] if report.dtype != "float32" else [])]
    column = 19 if report.dtype != "float32" else 10
    for title, values, deviation in (("loss", "losses", "loss"), ("gradient norm", "grad_norms", "grad_norm")):
        yield f"{title:15}" + "".join(f"{name:>12}" for name in columns) + f"{'error':>{column}}"
        for number, step in enumerate(report.steps, start=1):
            cells = "".join(f"{value:#12.7g}" for value in getattr(step, values))
            found = getattr(step, deviation)
            yield f"step {number:<10}{cells}{_error(found):>{column}}" + ("" if found.ok else "  not ok")


def _error(deviation: "Deviation") -> str:
    single = "" if deviation.single is None else f" / {deviation.single:.1e}"
    return f"{deviation.error:.1e}{single}"


def _mark(part: "TensorReport | StepReport") -> str:
    return f"  not ok: {', '.join(part.faults)}" if part.faults else ""


def _shape(tensor: "TensorReport") -> str:
    return "x".join(map(str, tensor.shape))


def _tokens(config: TrainConfig) -> str:
    return f"{config.batch_size} x {config.sequence_length:,} tokens"


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

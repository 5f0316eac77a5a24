"""Steps of large models in the ways that `bmburst plan` plans: `bmburst bench large-models SUITE --output FILE.json`.

SUITE is one of:

adapters: LoRA and QLoRA of llama-3-70b at 32K and 128K on 1, 2 and 4 GPUs, and QLoRA of llama-3-8b in 40 GB of a GPU
data: llama-3-8b with one sequence of 4K or 8K a GPU
full: all weights of qwen3-32b on 2 and 4 GPUs, with small optimizer states in host memory
pipeline: llama-3-8b in two stages, beside ZeRO-3 over the same GPUs
long: one step of llama-3-8b at 1M tokens on 4 GPUs

Weights are random, and so are tokens. The planner chooses mesh, recompute policy and offload of each case on a machine
with the host memory of the case. Each run of a suite starts its own ranks and trains one case after another: a first
step, which creates states and compiles kernels, and some measured ones. Runs that fit side by side on the machine's
GPUs run at the same time, unless one needs the host's processors or memory alone.

A row has the median seconds of a step, the peak of torch's allocator on the fullest rank, and the first step, beside
the planner's numbers. `--list` shows the plans without running them. `--small` runs the same plans with narrow layers
and short sequences, also on a CPU.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

import bmburst
from benchmarks.engine.machine import beside_peak
from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Measured, RowBenchmark
from bmburst.amounts import GIB, short
from bmburst.blocks.config import LlamaConfig, LoRAConfig
from bmburst.blocks.presets import PRESETS
from bmburst.cli.recipe import settings_of
from bmburst.config import build_config, overlay, to_dict
from bmburst.errors import require_known
from bmburst.launch.launcher import LaunchSpec, launch
from bmburst.memory import peak_bytes
from bmburst.optim.config import State
from bmburst.plan.candidates import ZERO, Offload, Task
from bmburst.plan.presentation import command
from bmburst.plan.search import Prediction, remedy, search
from bmburst.recompute.policy import POLICIES
from bmburst.schedule.hardware import load_hardware
from bmburst.train.config import TrainConfig

MODULE = "benchmarks.large_models"
K = 1024
_LORA = LoRAConfig(rank=16, alpha=32.0, targets=("all-linear",))
_QLORA = replace(_LORA, base="4bit")
_SHORTER = 256  # times, with --small
_SMALL = MappingProxyType(
    {"hidden_size": 64, "intermediate_size": 128, "num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "vocab_size": 256}
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to train a model; what is not given, the planner chooses."""

    preset: str
    tokens: int  # tokens of a sequence
    gpus: int  # number of GPUs
    layers: int | None = None  # number of layers; None: those of the preset
    batch: int = 1  # sequences of a step, each a micro-batch
    lora: LoRAConfig | None = None  # adapters; None: all weights are trained
    state: State = "float32"  # type of the optimizer's moments
    pipe: int = 1  # stages of a pipeline
    zero: tuple[int, ...] = ZERO
    recompute: tuple[str, ...] = POLICIES
    offload: tuple[Offload, ...] = tuple(Offload)  # what may be in host memory
    host: float = 230.0  # GiB of host memory that the run may count on
    gpu: float | None = None  # GB of a GPU that torch may take; None: all
    steps: int = 3  # measured steps; 0: the first one is measured

    @property
    def name(self) -> str:
        """The case in a few words."""
        layers = "" if self.layers is None else f" x{self.layers}"
        kind = "full" if self.lora is None else "QLoRA" if self.lora.is_4bit else "LoRA"
        state = "" if self.state == "float32" else f", states {self.state}"
        batch = f"{self.batch} x " if self.batch > 1 else ""
        gpus = f"{self.gpus} GPUs" if self.gpus > 1 else "1 GPU"
        limit = "" if self.gpu is None else f", {self.gpu:g} GB"
        return f"{self.preset}{layers} {kind}{state}, {batch}{short(self.tokens)}, {gpus}{limit}"

    @property
    def model(self) -> LlamaConfig:
        """The model's configuration."""
        whole = PRESETS[self.preset]
        longest = max(self.tokens, whole.max_position_embeddings)
        return replace(whole, num_layers=self.layers or whole.num_layers, max_position_embeddings=longest)


@dataclass(frozen=True)
class Run:
    """Cases whose ranks are started once."""

    cases: tuple[Case, ...]  # on the same number of GPUs and stages
    alone: bool = False  # whether no other run may use the machine: for the host's processors or memory
    limit: float = 280.0  # seconds after which it is stopped

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.cases[0].gpus


_70B = partial(Case, preset="llama-3-70b")
_32B = partial(Case, preset="qwen3-32b", tokens=32 * K)
_8B = partial(Case, preset="llama-3-8b", batch=8, state="bfloat16", offload=(Offload.NOTHING,))


def _beside(gpus: int, kept: Mapping[int, tuple[str, ...]], steps: int) -> tuple[Run, Run]:
    """Return runs of two stages and of ZeRO-3, over sequence lengths, with the recompute policies to choose from."""
    several = [(tokens, policies, max(1, steps if tokens < 64 * K else 1)) for tokens, policies in kept.items()]
    stages = tuple(_8B(tokens=t, gpus=gpus, recompute=policies, steps=n, pipe=2) for t, policies, n in several)
    shards = tuple(_8B(tokens=t, gpus=gpus, recompute=policies, steps=n, zero=(3,)) for t, policies, n in several)
    return Run(stages), Run(shards)


_KEEP = "block-keep-attention"
_A_SEQUENCE_A_GPU: Mapping[str, Any] = MappingProxyType(
    {"batch": 2, "state": "float32", "recompute": ("none",), "zero": (3,), "steps": 10}
)
_STATES: tuple[State, ...] = ("bfloat16", "8bit")
SUITES: Mapping[str, tuple[Run, ...]] = MappingProxyType(
    {
        "adapters": (
            Run((_70B(tokens=32 * K, gpus=1, lora=_LORA, host=300.0, steps=2),), limit=420.0),
            Run((_70B(tokens=32 * K, gpus=1, lora=_QLORA, host=110.0, steps=2),)),
            Run((Case(preset="llama-3-8b", tokens=64 * K, gpus=1, lora=_QLORA, host=60.0, gpu=40.0),)),
            Run((_70B(tokens=32 * K, gpus=2, lora=_LORA),)),
            Run((_70B(tokens=32 * K, gpus=2, lora=_QLORA),)),
            Run((_70B(tokens=128 * K, gpus=2, lora=_LORA, steps=1),), limit=420.0),
            Run((_70B(tokens=128 * K, gpus=2, lora=_QLORA, steps=1),), limit=420.0),
            Run((_70B(tokens=128 * K, gpus=1, lora=_LORA, steps=0),), alone=True, limit=580.0),
            Run((_70B(tokens=128 * K, gpus=1, lora=_QLORA, steps=0),), alone=True, limit=580.0),
            Run((_70B(tokens=32 * K, gpus=4, lora=_LORA),)),
        ),
        "data": (Run(tuple(_8B(tokens=tokens, gpus=2, **_A_SEQUENCE_A_GPU) for tokens in (4 * K, 8 * K))),),
        "full": tuple(
            Run((_32B(gpus=gpus, state=state, host=256.0),), alone=True) for gpus, state in product((2, 4), _STATES)
        ),
        "pipeline": (
            *_beside(2, {4 * K: ("none",), 16 * K: ("none", _KEEP)}, steps=3),
            *_beside(4, {4 * K: ("none",), 16 * K: (_KEEP,), 64 * K: (_KEEP,)}, steps=3),
        ),
        "long": (Run((Case(preset="llama-3-8b", tokens=1024 * K, gpus=4, steps=0),), limit=580.0),),
    }
)


def _configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("suite", choices=SUITES, metavar="SUITE", help=", ".join(SUITES))
    add("--runs", type=_numbers, metavar="N,...", help="runs of the suite, from 0 (default: all)")
    add("--gpus", type=int, default=4, metavar="N", help="GPUs of this machine (default: 4)")
    add("--hardware", default="h100", help="machine of the plans (default: h100)")
    add("--layers", type=int, metavar="N", help="layers of all models (default: those of the cases)")
    add("--steps", type=int, metavar="N", help="measured steps of all cases (default: their own)")
    add("--list", action="store_true", help="show the plans only")
    add("--small", action="store_true", help="narrow layers and short sequences, also on a CPU")


def _measure(options: argparse.Namespace) -> Measured:
    runs = _chosen(options)
    facts = {"hardware": load_hardware(options.hardware).name, "gpus": options.gpus, "small": options.small}
    if options.list:
        return facts, (_planned(case, options.hardware) for run in runs.values() for case in run.cases)
    return facts, _measured(runs, options)


def _main() -> int:
    """Start the ranks of a run, or train its cases as one of them."""
    parser = argparse.ArgumentParser()
    _configure(parser)
    parser.add_argument("--rank", type=Path)
    parser.add_argument("--start", type=Path)
    options = parser.parse_args()
    if options.rank is not None:
        return _rank(options)
    ((number, run),) = _chosen(options).items()
    words = ["-m", MODULE, *_words(options, number), "--rank", str(options.start)]
    return launch(LaunchSpec(nproc=run.gpus), words)


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _chosen(options: argparse.Namespace) -> dict[int, Run]:
    """Return the runs that fit on the machine, by number, with given layers and steps; UserError for no run."""
    runs = dict(enumerate(SUITES[options.suite]))
    for number in options.runs or ():
        require_known("run", str(number), map(str, runs))
    chosen = {number: runs[number] for number in options.runs or runs}
    given = {name: value for name in ("layers", "steps") if (value := getattr(options, name)) is not None}
    return {
        number: replace(run, cases=tuple(replace(case, **given) for case in run.cases))
        for number, run in chosen.items()
        if run.gpus <= options.gpus
    }


def _words(options: argparse.Namespace, number: int) -> list[str]:
    """Return the options of a started run."""
    words = [options.suite, "--hardware", options.hardware, "--runs", str(number)]
    for name in ("layers", "steps"):
        words += [f"--{name}", str(value)] if (value := getattr(options, name)) is not None else []
    return [*words, *(["--small"] if options.small else [])]


@cache
def _plan(case: Case, hardware: str) -> Prediction:
    """Return the planner's first choice for a case, which may not fit."""
    machine = load_hardware(hardware)
    memory = machine.memory if case.gpu is None else case.gpu * 1e9
    machine = replace(machine, memory=memory, host_memory=case.host * GIB)
    return search(_task(case), machine, **_limits(case))[0]


def _limits(case: Case) -> dict[str, Any]:
    limits = {"zero": case.zero, "tensor": (1,), "pipe": (case.pipe,)}
    return limits | {"recompute": case.recompute, "offload": case.offload}


def _task(case: Case) -> Task:
    return Task(
        model=case.model,
        preset=case.preset,
        sequence=case.tokens,
        gpus=case.gpus,
        batch=case.batch,
        state=case.state,
        lora=case.lora,
        host_memory=case.host,
    )


def _measured(runs: Mapping[int, Run], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run everything, in waves of runs that fit side by side, and yield the rows in the order of the runs."""
    for wave in waves(runs, options.gpus if torch.cuda.is_available() else 0):
        with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="bmburst-large-") as folder:
            started, first = [], 0
            for number in wave:
                log = stack.enter_context((Path(folder) / f"{number}.log").open("w+"))
                visible = range(first, first + runs[number].gpus)
                started.append((number, log, _started(number, options, Path(folder) / f"{number}", visible, log)))
                first = visible.stop
            begun = time.monotonic()
            for number, log, process in started:
                ends = begun + runs[number].limit
                yield from _ended(runs[number], process, log, Path(folder) / f"{number}", ends, options)


def waves(runs: Mapping[int, Run], gpus: int) -> Iterator[list[int]]:
    """Yield the numbers of the runs in order; as many at once as `gpus` GPUs have place for, at least one."""
    wave: list[int] = []
    for number, run in runs.items():
        at_once = [*(runs[each] for each in wave), run]
        if wave and (any(each.alone for each in at_once) or sum(each.gpus for each in at_once) > gpus):
            yield wave
            wave = []
        wave.append(number)
    if wave:
        yield wave


def _started(
    number: int, options: argparse.Namespace, folder: Path, visible: range, log: Any
) -> subprocess.Popen[bytes]:
    folder.mkdir()
    environment = dict(os.environ)
    if torch.cuda.is_available():
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, visible))
    words = [sys.executable, "-m", MODULE, *_words(options, number), "--start", str(folder)]
    return subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _ended(
    run: Run, process: subprocess.Popen[bytes], log: Any, folder: Path, ends: float, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Wait for a run, and return a row for each case: what was measured, or the end of the output."""
    late = ""
    try:
        process.wait(max(0.0, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its ranks
        process.wait()
        late = f"not done after {run.limit:.0f} s"
    log.seek(0)
    output = log.read()
    print(output, end="", flush=True)
    file = folder / "rows.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    rows += [{"failed": late or " ".join(output.split()[-60:])}] * (len(run.cases) - len(rows))
    return [_planned(case, options.hardware) | row for case, row in zip(run.cases, rows, strict=True)]


def _planned(case: Case, hardware: str) -> dict[str, Any]:
    plan = _plan(case, hardware)
    memory = plan.memory
    needs = "" if memory.fits else f", does not fit: it needs {remedy(_task(case), plan.hardware, **_limits(case))}"
    return {
        "case": case.name,
        "layers": case.model.num_layers,
        "way": f"{plan.candidate.name}{needs}",
        "command": command(plan.candidate),
        "planned": {
            "fits": memory.fits,
            "seconds": plan.seconds,
            "allocated_gib": memory.allocated / GIB,
            "total_gib": memory.total / GIB,
            "host_gib": memory.in_host / GIB,
            "parts": asdict(plan.time),
            "lines": {name: nbytes / GIB for name, nbytes in {**memory.lines, **memory.host}.items()},
        },
    }


def _rank(options: argparse.Namespace) -> int:
    """Train the cases of a run, and write a row of each on rank 0."""
    (run,) = _chosen(options).values()
    for number, case in enumerate(run.cases):
        if case.gpu is not None and torch.cuda.is_available():
            device = int(os.environ["LOCAL_RANK"])
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(case.gpu * 1e9 / total, device)
        row = _trained(case, options, options.rank / str(number))
        if int(os.environ["RANK"]) == 0:
            with (options.rank / "rows.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{case.name}: {row['seconds']:.3f} s a step, first {row['seconds_of_steps'][0]:.1f} s", flush=True)
        gc.collect()
        bmburst.empty_cache()
    return 0


def _trained(case: Case, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train a case's steps, and return its row. All ranks must call it."""
    from bmburst.train.memory_plan import explained
    from bmburst.train.trainer import Trainer

    config = _config(case, options, folder)
    begun = time.perf_counter()
    with explained(config):
        trainer = Trainer(config)
        trainer.optimizer.prepare(after=trainer.model.host_memory.wait)
        ready = time.perf_counter() - begun
        steps = [trainer.step() for _ in range(config.steps)]
    seconds = [step.seconds for step in steps]
    row: dict[str, Any] = {
        "seconds": statistics.median(seconds[1:] or seconds),
        "seconds_of_steps": seconds,
        "ready_seconds": ready,
        "losses": [step.loss for step in steps],
        "grad_norms": [step.grad_norm for step in steps],
        "exposed_seconds": [step.exposed_seconds for step in steps],
        "process_gib": peak_bytes()[0] / GIB,
    }
    if torch.cuda.is_available():
        row["allocated_gib"] = max(step.memory_gib for step in steps)
        row["reserved_gib"] = max(step.reserved_gib or 0.0 for step in steps)
        row["beside_gib"] = beside_peak(torch.device("cuda", torch.cuda.current_device())) / GIB
    return row


def _config(case: Case, options: argparse.Namespace, folder: Path) -> TrainConfig:
    """Return the configuration of a case: the planned command, with random tokens and without files."""
    from benchmarks.training.measure import write_random_tokens

    way = _plan(case, options.hardware).candidate
    if options.small:
        task = replace(way.task, model=_narrow(way.task.model), sequence=case.tokens // _SHORTER, host_memory=None)
        way = replace(way, task=task)
    task = way.task
    tokens = folder.parent / f"{folder.name}.tokens"
    if os.environ["RANK"] == "0":
        partial_file = tokens.with_suffix(".part")
        write_random_tokens(partial_file, tokens=task.sequence * task.batch, vocab_size=task.model.vocab_size)
        partial_file.rename(tokens)
    while not tokens.exists():
        time.sleep(0.1)
    more = {
        "model": to_dict(task.model),
        "steps": 1 + case.steps,
        "output": folder,
        "data": {"source": str(tokens)},
        "checkpoint_every": None,
        "sample_tokens": 0,
    }
    return build_config(TrainConfig, overlay(settings_of(way), more))


def _narrow(model: LlamaConfig) -> LlamaConfig:
    """Return a model with the same layers, each of them tiny."""
    return replace(model, **_SMALL)  # type: ignore[arg-type]


def table(record: Mapping[str, Any]) -> str:
    """Return a record as Markdown; errors of the plans only if the models were not small."""
    columns = ["case", "s a step", "planned", "error", "first step, s", "ready after, s"]
    columns += ["GiB allocated", "planned", "error", "first loss", "way"]
    lines, reasons = [], []
    for row in record["rows"]:
        planned, seconds, held = row["planned"], row.get("seconds"), row.get("allocated_gib")
        cells = [
            _number(seconds, ".3f"),
            f"{planned['seconds']:.3f}",
            _error(planned["seconds"], None if record["small"] else seconds),
        ]
        cells += [_number(row.get("seconds_of_steps", [None])[0], ".1f"), _number(row.get("ready_seconds"), ".0f")]
        cells += [_number(held, ".1f"), f"{planned['allocated_gib']:.1f}"]
        cells += [_error(planned["allocated_gib"], held), _number(row.get("losses", [None])[0], ".3f"), row["way"]]
        lines.append([row["case"], *cells])
        reasons += [f"{row['case']}: {row['failed']}"] if "failed" in row else []
    return "\n".join([*markdown_table(columns, lines), *(["", *reasons] if reasons else [])])


def line_of(row: Mapping[str, Any]) -> str:
    """Return a row in one line, printed when a case is done."""
    planned, seconds = row["planned"], row.get("seconds")
    measured = "" if seconds is None else f"{seconds:.3f} s a step, "
    memory = f"{planned['total_gib']:.1f} GiB, {planned['host_gib']:.0f} GiB of the host"
    return f"{row['case']}: {measured}planned {planned['seconds']:.2f} s, {memory}: {row.get('failed', row['way'])}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _error(planned: float, measured: float | None) -> str:
    return "-" if not measured else f"{planned / measured - 1:+.1%}"


BENCHMARKS = (
    RowBenchmark(
        name="large-models", about=__doc__, configure=_configure, measure=_measure, table=table, line=line_of,
        is_wrong=lambda row: "failed" in row,
    ),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(_main())

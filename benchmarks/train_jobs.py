"""Jobs of `bmburst train`: runs the default one and records it, and writes the recipes of others.

    python -m benchmarks.train_jobs main-job --ranks 1 2 --output DIR
    python -m benchmarks.train_jobs states --output DIR
    python -m benchmarks.train_jobs recipes

main-job: a whole training job on 1, 2, ... ranks. The record (`main_job_<device>_<date>.md`) contains the command, the
machine, each run's output and a table. The runs' metrics.jsonl are written next to it. Arguments after `--` are passed
to `bmburst train`.

states: the same job with each type of the optimizer's moments, one after another or each on GPUs of its own, and their
held-out losses (`states_<device>_<date>.md`). On a GPU it is 300 steps of a model of 95 million parameters.

recipes: the recipes of real models (recipes/*.yaml) and their table in docs/recipes.md, generated with the planner. Toy
recipes (recipes/toy_*.yaml) are written by hand. tests/train/test_recipes.py recomputes the numbers.
"""

import argparse
import dataclasses
import functools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from benchmarks.engine.machine import describe_run
from benchmarks.engine.report import markdown_table, recorded
from benchmarks.training.cells import SHAPES
from bmburst.blocks.config import LlamaConfig, LoRAConfig
from bmburst.blocks.families import RopeScaling
from bmburst.blocks.presets import PRESETS
from bmburst.cli.recipe import FIRST_LINE, recipe, settings_of
from bmburst.config import overlay, to_dict
from bmburst.optim.config import MOMENT_BYTES
from bmburst.plan.candidates import Task
from bmburst.plan.search import search
from bmburst.schedule.hardware import load_hardware
from bmburst.train.sources import PLACEHOLDER

ROOT = Path(__file__).parents[1]
FOLDER, PAGE = ROOT / "recipes", ROOT / "docs" / "recipes.md"
LORA = LoRAConfig(rank=16, alpha=32.0, targets=("all-linear",))
K, M = 1 << 10, 1 << 20
NATIVE = {"qwen3-8b": 32 * K}
"""Trained context lengths of models whose config.json allows more tokens. For Qwen3, from its model card."""
_BEGIN, _END = "<!-- table: python -m benchmarks.train_jobs recipes -->", "<!-- end of table -->"
_WARM_UP = 10  # untimed steps, in which kernels are selected and memory is allocated


_95M = SHAPES["llama-95m"]
_OF_95M = [
    *(word for name, value in to_dict(_95M).items() if value is not None for word in (f"--model.{name}", str(value))),
    *("--steps", "300", "--sequence-length", "4096", "--batch-size", "8", "--micro-batch-size", "4"),
    *("--dtype", "bfloat16", "--optimizer.lr", "1e-3", "--eval-every", "0", "--eval-sequences", "64"),
    *("--sample-tokens", "0", "--checkpoint-every", "never"),
]
"""Options of `bmburst train` for the comparison of states on GPUs."""
_MOST_WORSE = 0.005
"""Fraction by which the held-out loss with small moments may be above that with fp32 moments."""


class FinishedRun(NamedTuple):
    """One finished run of `bmburst train`."""

    ranks: int
    command: str
    output: str
    seconds: float
    metrics: list[dict[str, Any]]
    held_out: dict[str, Any]


def main() -> int:
    """Run the command line and return the exit status."""
    args = parser().parse_args()
    return int(args.run(args) or 0)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    programs = made.add_subparsers(required=True, metavar="WHAT")
    main_job, states, recipes = map(programs.add_parser, ("main-job", "states", "recipes"))
    main_job.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks to run on")
    main_job.add_argument("--output", type=Path, required=True, help="folder of the record")
    main_job.add_argument("options", nargs="*", help="options of bmburst train, after --")
    main_job.set_defaults(run=_main_job)
    states.add_argument("--ranks", type=int, default=1, help="ranks of each run (default: 1)")
    states.add_argument("--output", type=Path, required=True, help="folder of the record")
    states.add_argument("options", nargs="*", help="options of bmburst train, after --, in place of the default job")
    states.set_defaults(run=_states)
    recipes.set_defaults(run=_recipes)
    return made


def _main_job(args: argparse.Namespace) -> None:
    """Run the main job on each number of ranks, and write its record."""
    args.output.mkdir(parents=True, exist_ok=True)
    runs = [run_train(ranks, args.options) for ranks in args.ranks]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = describe_run(["python", "-m", "benchmarks.train_jobs", *sys.argv[1:]], device, max(args.ranks))
    name = _name("main_job", machine, device)
    for run in runs:
        lines = "".join(json.dumps(line) + "\n" for line in run.metrics)
        (args.output / f"{name}_{run.ranks}_ranks.jsonl").write_text(lines)
    (args.output / f"{name}.md").write_text(main_job_record(runs, machine))
    print(f"{args.output / name}.md")


def _name(job: str, machine: dict[str, Any], device: str) -> str:
    return f"{job}_{machine['device'].split()[-1].lower() if device == 'cuda' else 'cpu'}_{time.strftime('%Y%m')}"


def _states(args: argparse.Namespace) -> int:
    """Run a job with each type of moments and write the record; return 1 if a small one is worse by `_MOST_WORSE`."""
    args.output.mkdir(parents=True, exist_ok=True)
    gpus, ranks = torch.cuda.device_count(), args.ranks
    options = args.options or (_OF_95M if gpus else [])
    at_once = max(1, gpus // ranks)

    def run(number: int, state: str) -> FinishedRun:
        first = number % at_once * ranks
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + ranks)))} if gpus else {}
        return run_train(ranks, [*options, "--optimizer.state", state], visible)

    with ThreadPoolExecutor(at_once) as threads:
        runs = dict(zip(MOMENT_BYTES, threads.map(run, range(len(MOMENT_BYTES)), MOMENT_BYTES), strict=True))
    device = "cuda" if gpus else "cpu"
    machine = describe_run(["python", "-m", "benchmarks.train_jobs", *sys.argv[1:]], device, ranks)
    name = _name("states", machine, device)
    (args.output / f"{name}.md").write_text(states_record(runs, machine))
    print(states_table(runs))
    whole = runs["float32"].held_out["loss"]
    return int(any(run.held_out["loss"] > whole * (1 + _MOST_WORSE) for run in runs.values()))


def states_table(runs: Mapping[str, FinishedRun]) -> str:
    """Return the held-out losses of runs by the type of their moments, as Markdown."""
    columns = ["moments", "held-out loss", "to fp32", "bits per byte", "last loss", "tokens/s", "GiB a rank"]
    whole, rows = runs["float32"].held_out["loss"], []
    for state, run in runs.items():
        loss, last = run.held_out["loss"], run.metrics[-1]
        speed = statistics.median(line["tokens_per_second"] for line in run.metrics[_WARM_UP:] or run.metrics)
        cells = [f"{loss:.5f}", f"{loss / whole - 1:+.3%}", f"{run.held_out['bits_per_byte']:.4f}"]
        rows.append([state, *cells, f"{last['loss']:.4f}", f"{speed:,.0f}", f"{last['memory_gib']:.2f}"])
    return "\n".join(markdown_table(columns, rows))


def states_record(runs: Mapping[str, FinishedRun], machine: dict[str, Any]) -> str:
    """Return the record of runs by the type of their moments as Markdown."""
    lines = [
        "# Types of optimizer moments",
        "",
        recorded(machine),
        "",
        states_table(runs),
        *("", "```", *(f"$ {run.command}" for run in runs.values()), "```"),
    ]
    return "\n".join(lines) + "\n"


def run_train(ranks: int, options: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> FinishedRun:
    """Run `bmburst train` with these options on some ranks of this machine, in this environment with some variables.

    Raises:
        RuntimeError: It failed; the message is its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "--nproc", str(ranks), *options]
        command = [sys.executable, "-m", "bmburst", *words, "--output", f"{folder}/run"]
        started = time.perf_counter()
        whole = {**os.environ, **environment}
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=whole
        )
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


def main_job_record(runs: list[FinishedRun], machine: dict[str, Any]) -> str:
    """Return the record of runs on a machine as Markdown."""
    lines = [
        "# The main job",
        "",
        recorded(machine),
        "",
        f"Tokens/s is the median over the steps after the first {_WARM_UP}. A model of a million parameters and 4,096",
        "tokens are bound by launches, not by arithmetic: this shows that the path works, not how fast it is.",
        "",
    ]
    columns = ["ranks", "held-out bits per byte", "last loss (nats/token)"]
    columns += ["tokens/s", "GiB a rank", "whole command (s)"]
    rows = []
    for run in runs:
        speed = statistics.median(line["tokens_per_second"] for line in run.metrics[_WARM_UP:])
        last = run.metrics[-1]
        cells = [str(run.ranks), f"{run.held_out['bits_per_byte']:.4f}", f"{last['loss']:.4f}", f"{speed:,.0f}"]
        rows.append([*cells, f"{last['memory_gib']:.2f}", f"{run.seconds:.0f}"])
    lines += markdown_table(columns, rows)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeJob:
    """The job of a recipe."""

    kind: str  # "pretrain", "extend" or "chat"
    model: str  # preset
    tokens: int  # tokens per sequence
    gpus: int  # GPUs, on one node
    hardware: str  # a name for `load_hardware`
    batch: int = 1  # sequences per step
    lora: bool = False  # whether adapters are trained
    base: str = ""  # placeholder for the initial weights; "": the name of the model

    @property
    def name(self) -> str:
        """Name of the file, without .yaml."""
        parts = [self.kind, self.model, f"{self.tokens // M}m" if self.tokens >= M else f"{self.tokens // K}k"]
        parts += ["lora"] if self.lora else ["full"] if self.kind != "pretrain" else []
        return "_".join([*parts, f"{self.gpus}x{self.hardware}"])

    @property
    def title(self) -> str:
        """The title of the recipe."""
        what = {"pretrain": "continued pretraining of", "extend": "a longer context for", "chat": "conversations for"}
        how = ", LoRA" if self.lora else ""
        return f"{what[self.kind]} {self.model}, sequences of {self.tokens:,} tokens{how}"

    def longer(self) -> dict[str, Any]:
        """Return the model fields that extend its context to `tokens`; empty if it is long enough."""
        model = PRESETS[self.model]
        native = NATIVE.get(self.model, model.max_position_embeddings)
        if self.tokens <= native:
            return {}
        scaling = {"kind": "yarn", "factor": self.tokens / native, "original_max_position_embeddings": native}
        return {"max_position_embeddings": self.tokens, "rope_scaling": scaling}

    def settings(self) -> dict[str, Any]:
        """Return the fields of the configuration that the planner does not set."""
        data = {"source": f"{PLACEHOLDER}{'CHATS.jsonl' if self.kind == 'chat' else 'TEXT'}"}
        if self.kind == "chat":  # the tokenizer is that of init_from
            own: dict[str, Any] = {"pack": "documents", "steps": 500}
        else:
            own, data = {"steps": 1000}, {**data, "tokenizer": PLACEHOLDER + self.model}
        lr = 1e-4 if self.lora else 1e-5
        own |= {"optimizer": {"lr": lr}, "schedule": {"kind": "cosine", "warmup_steps": own["steps"] // 20}}
        longer = self.longer()
        return {**own, "data": data, "checkpoint_every": 100} | ({"model": longer} if longer else {})


_pretrain = functools.partial(RecipeJob, kind="pretrain")
_extend = functools.partial(RecipeJob, kind="extend", model="llama-3-8b", gpus=8, hardware="h200")
_chat = functools.partial(RecipeJob, kind="chat", tokens=8 * K, hardware="h100")
JOBS = (
    _pretrain(model="llama-3-8b", tokens=32 * K, gpus=1, hardware="h100"),
    _pretrain(model="llama-3-8b", tokens=32 * K, gpus=2, hardware="h200", batch=2),
    _pretrain(model="llama-3-8b", tokens=128 * K, gpus=2, hardware="h200"),
    _pretrain(model="llama-3-8b", tokens=128 * K, gpus=8, hardware="h100", batch=2),
    _pretrain(model="llama-3-8b", tokens=512 * K, gpus=8, hardware="h200"),
    _pretrain(model="minicpm5-1b", tokens=128 * K, gpus=1, hardware="h200"),
    _pretrain(model="qwen3-8b", tokens=128 * K, gpus=8, hardware="h100", batch=2),
    _extend(tokens=128 * K, batch=2),
    _extend(tokens=128 * K, batch=2, lora=True),
    _extend(tokens=M, base="CHECKPOINT_OF_128K"),
    _chat(model="llama-3-8b", gpus=1, batch=4, lora=True),
    _chat(model="qwen3-8b", gpus=8, batch=16),
)
"""The job of each recipe of a real model. `bmburst plan --write` makes a recipe of any other job."""


def text_of_recipe(job: RecipeJob) -> str:
    """Return the recipe of a job: the fastest candidate of the planner that fits in memory."""
    hardware = load_hardware(job.hardware)
    task = Task(
        model=_model(job),
        preset=job.model,
        init_from=PLACEHOLDER + (job.base or job.model),
        sequence=job.tokens,
        gpus=job.gpus,
        batch=job.batch,
        lora=LORA if job.lora else None,
    )
    best = search(task, hardware)[0]
    assert best.memory.fits, job.name
    settings = overlay(settings_of(best.candidate), job.settings())
    return recipe(best, settings, f"recipes/{job.name}.yaml", job.title)


def _model(job: RecipeJob) -> LlamaConfig:
    fields = job.longer()
    scaling = {"rope_scaling": RopeScaling(**fields["rope_scaling"])} if "rope_scaling" in fields else {}
    return dataclasses.replace(PRESETS[job.model], **{**fields, **scaling})


def recipes_table() -> str:
    """Return the table of all recipes of real models, from the comments in their files."""
    lines = []
    for path in sorted(FOLDER.glob("*.yaml")):
        if not path.name.startswith("toy_"):
            found = expectation(path.read_text())
            memory = [f"{found[key]:.1f}" for key in ("gpu", "host")]
            numbers = [f"{found['tokens/s']:,.0f}", f"{found['seconds']:.4g}", *memory]
            lines.append([f"[{path.stem}](../recipes/{path.name})", *numbers])
    columns = ["recipe", "tokens/s", "s a step", "GiB of a GPU", "GiB of the host"]
    return "\n".join(markdown_table(columns, lines))


def expectation(text: str) -> dict[str, float]:
    """Return the numbers in a recipe's comments: tokens/s, seconds per step, GiB of a GPU and of the host."""
    comments = (line.removeprefix("#   ").partition(": ") for line in text.splitlines() if line.startswith("#   "))
    lines = {name: numbers.replace(",", "").split() for name, _, numbers in comments}
    speed, gpu, host = lines["speed"], lines["memory of a GPU"], lines["memory of a host"]
    return {"tokens/s": float(speed[0]), "seconds": float(speed[-4]), "gpu": float(gpu[0]), "host": float(host[0])}


def _recipes(_args: argparse.Namespace) -> None:
    """Write the recipes, and their table in the page."""
    for path in FOLDER.glob("*.yaml"):
        if not path.name.startswith("toy_") and path.read_text().startswith(FIRST_LINE):
            path.unlink()
    for job in JOBS:
        (FOLDER / f"{job.name}.yaml").write_text(text_of_recipe(job))
    if PAGE.is_file():
        before, _, rest = PAGE.read_text().partition(_BEGIN)
        PAGE.write_text(f"{before}{_BEGIN}\n\n{recipes_table()}\n\n{_END}{rest.partition(_END)[2]}")


if __name__ == "__main__":
    sys.exit(main())

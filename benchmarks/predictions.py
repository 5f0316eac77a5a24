"""Compares predictions of the planner with measurements: `bmburst bench WHAT`.

WHAT is one of:

steps: time and memory of training steps, compared with `bmburst plan`. Each case trains some layers of a preset for a
few steps. Measured and predicted are the median time of a step, the peak of torch's allocator, and the memory outside
the allocator. No case starts after `--budget`.

strategies: `strategy="auto"`, compared with all strategies. In the cases, the predicted times of the strategies on 2
GPUs are close: short sequences, windows and packed documents. A time is the median of forward and backward of one call,
on the slowest rank; calls of the strategies alternate. Without GPUs the sequences are shorter, and the numbers only
show that the program runs.
"""

import argparse
import dataclasses
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import bmburst
from benchmarks.attention.method import both
from benchmarks.engine.machine import RankGroup, beside_peak, start_ranks
from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Row, RowBenchmark
from benchmarks.engine.timing import in_turns
from bmburst.amounts import GIB
from bmburst.attention.call import head_shapes
from bmburst.blocks.presets import preset
from bmburst.comm.communicator import gather_objects
from bmburst.launch.start import start
from bmburst.plan.candidates import Candidate, Task
from bmburst.plan.search import predict
from bmburst.schedule.cost import Placement, Problem
from bmburst.schedule.hardware import HOST, hardware_like, load_hardware
from bmburst.schedule.layout import make_layout
from bmburst.schedule.mask import Mask
from bmburst.schedule.parallelism import Strategy
from bmburst.schedule.strategy import choose_strategy
from bmburst.train.config import DataConfig, ParallelConfig, TrainConfig


class StepCase(NamedTuple):
    """A case of `steps`: preset, number of layers, tokens per sequence, recompute policy, ZeRO stage."""

    preset: str
    layers: int
    tokens: int
    recompute: str
    zero: int

    @property
    def name(self) -> str:
        """The case in one line."""
        return f"{self.preset} x{self.layers}, {self.tokens // 1024}K, {self.recompute}, ZeRO-{self.zero}"


STEP_CASES = (
    StepCase("llama-2-7b", 4, 8192, "block-keep-attention", 3),
    StepCase("llama-2-7b", 4, 32768, "block-keep-attention", 3),
    StepCase("llama-2-7b", 4, 32768, "block", 3),
    StepCase("llama-2-7b", 4, 32768, "none", 3),
    StepCase("llama-2-7b", 4, 32768, "block-keep-attention", 2),
    StepCase("llama-3-8b", 2, 65536, "block-keep-attention", 3),
    StepCase("llama-2-7b", 2, 131072, "block-keep-attention", 3),
    StepCase("llama-2-7b", 8, 65536, "block-keep-attention", 3),
    StepCase("llama-2-7b", 4, 16384, "none", 2),
)
SMALL_STEP_CASES = (StepCase("llama-tiny", 2, 512, "block", 3), StepCase("llama-tiny", 3, 512, "none", 2))
HEAD_DIM, WINDOW = 128, 4096
LENGTHS = (1024, 4096, 16384, 700, 9000)  # lengths of packed documents, repeated
STRATEGY_CASES = (
    *((heads, 8192, "documents") for heads in ((32, 32), (40, 40))),
    *(((7, 7), 8192, mask) for mask in ("causal", "full", "window")),
    *((heads, tokens, "window") for heads in ((32, 32), (32, 8)) for tokens in (131072, 262144)),
    *(((8, 1), tokens, mask) for tokens in (65536, 131072, 524288) for mask in ("window", "documents")),
    *((heads, 524288, "window") for heads in ((12, 4), (28, 4))),
    ((32, 8), 131072, "documents"),
)
STRATEGIES = ("heads", "gather", "ring")
_META: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
WARM_UP, REPEATS, SECONDS = 5, 31, 2.0


def _configure_steps(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--hardware", default="h200", help="machine of the predictions (default: h200)")
    add("--steps", type=int, default=4, help="measured steps (default: 4)")
    add("--budget", type=float, default=85.0, help="seconds after which no case starts (default: 85)")
    add("--small", action="store_true", help="two tiny cases for a quick test, also on a CPU")


def _configure_strategies(parser: argparse.ArgumentParser) -> None:
    count = len(STRATEGY_CASES)
    parser.add_argument("--cases", type=int, default=count, help="how many of the cases (default: all)")


def _steps(options: argparse.Namespace) -> Iterator[Row]:
    """Train the cases on this rank, and yield their measurements with the predictions. All ranks must call it."""
    begun = time.monotonic()
    start()
    world = bmburst.Mesh.over_bmtrain().world
    with tempfile.TemporaryDirectory(prefix="bmburst-plan-") as folder:
        for case in SMALL_STEP_CASES if options.small else STEP_CASES:
            # Rank 0 decides whether there is time for the case, and where its files are, for all ranks.
            late, here = gather_objects(world, (time.monotonic() - begun > options.budget, folder))[0]
            if late:
                break
            measured = _measured_steps(case, options.steps, world.size, Path(here))
            yield {"case": list(case), **measured} | predicted_step(case, world.size, options.hardware)
        gather_objects(world, None)  # the folder is in use until all ranks are here


def predicted_step(case: StepCase, gpus: int, hardware: str) -> dict[str, Any]:
    """Return the planner's prediction for a case."""
    model = dataclasses.replace(preset(case.preset), num_layers=case.layers)
    task = Task(model=model, preset=case.preset, sequence=case.tokens, gpus=gpus)
    way = Candidate(task=task, ulysses_degree=gpus, recompute=case.recompute, zero=case.zero)
    found = predict(way, load_hardware(hardware))
    return {
        "predicted_seconds": found.seconds,
        "predicted_allocated_gib": found.memory.allocated / GIB,
        "predicted_moment": found.memory.moment,
        "predicted_outside_gib": sum(found.memory.outside.values()) / GIB,
        "predicted_parts": dataclasses.asdict(found.time),
        "predicted_lines": dict(found.memory.lines),
    }


def steps_table(record: Mapping[str, Any]) -> str:
    """Return measured and predicted values as Markdown."""
    rows, gpus = record["rows"], record["machine"]["ranks"]
    columns = [f"{gpus} GPU{'s' if gpus > 1 else ''}", "s a step", "predicted", "error"]
    columns += ["GiB allocated", "predicted", "error", "GiB beside torch", "predicted"]
    lines = []
    for row in rows:
        seconds, memory = row["seconds"], row["allocated_gib"]
        wrong = row["predicted_seconds"] / seconds - 1
        more = row["predicted_allocated_gib"] / memory - 1 if memory else 0.0
        cells = [StepCase(*row["case"]).name, f"{seconds:.3f}", f"{row['predicted_seconds']:.3f}", f"{wrong:+.1%}"]
        cells += [f"{memory:.2f}", f"{row['predicted_allocated_gib']:.2f}", f"{more:+.1%}"]
        lines.append([*cells, f"{row['outside_gib']:.2f}", f"{row['predicted_outside_gib']:.2f}"])
    return "\n".join(markdown_table(columns, lines))


def _measured_steps(case: StepCase, steps: int, gpus: int, folder: Path) -> dict[str, Any]:
    from bmburst.train.trainer import Trainer  # it imports BMTrain, which `start` has made importable

    model = dataclasses.replace(preset(case.preset), num_layers=case.layers, max_position_embeddings=1 << 20)
    config = TrainConfig(
        preset=None,
        model=model,
        sequence_length=case.tokens,
        steps=steps + 2,
        dtype="bfloat16",
        recompute=case.recompute,
        output=folder / "run",
        data=DataConfig(source="stdlib", tokenizer="bytes"),
        parallel=ParallelConfig(
            sequence_parallel=gpus,
            strategy="auto",
            zero_level=case.zero,  # type: ignore[arg-type]  # check_fields validates it
        ),
    )
    on_gpu = torch.cuda.is_available()
    trainer = Trainer(config)
    for _ in range(2):  # warm-up: compiles kernels, creates gradients and optimizer states
        trainer.step()
    measured = [trainer.step() for _ in range(steps)]
    seconds = [step.seconds for step in measured]
    found = {
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "allocated_gib": max(step.memory_gib for step in measured) if on_gpu else 0.0,  # each step resets the peak
        "outside_gib": 0.0,
    }
    if on_gpu:
        found["outside_gib"] = beside_peak(torch.device("cuda", torch.cuda.current_device())) / GIB
    del trainer
    gc.collect()
    bmburst.empty_cache()  # buffers of this case would count as memory outside the allocator in the next ones
    return found


def _strategies(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the times of the strategies in each case, with the choice of "auto". All ranks must call it."""
    device = start_ranks()
    is_cuda = device.type == "cuda"
    for heads, tokens, mask in STRATEGY_CASES[: options.cases]:
        yield _measured_strategies(heads, tokens if is_cuda else tokens // 64, mask, device)
        if is_cuda:
            bmburst.empty_cache()
            torch.cuda.empty_cache()


def predicted_choice(row: Mapping[str, Any], ranks: int) -> tuple[str, dict[str, float]]:
    """Return the choice of "auto" in a recorded case on H200s, and predicted milliseconds of measured strategies."""
    layout = make_layout("zigzag", ranks, row["tokens"] // ranks)
    q, k = (torch.empty(1, layout.tokens, row[heads], HEAD_DIM, **_META) for heads in ("query_heads", "kv_heads"))
    mask, machine = _mask(row["mask"], row["tokens"]), load_hardware("h200")
    problem = Problem(head_shapes(layout, q, k, k), row["tokens"], mask, Placement("peer"), machine)

    def choose(strategy: str) -> Strategy:
        return choose_strategy(strategy, problem.shapes, problem.length, mask, problem.placement, machine)

    costs = {strategy: 1e3 * problem.cost(choose(strategy)).total for strategy in STRATEGIES if strategy in row}
    return _name(choose("auto"), ranks), costs


def _mask(name: str, tokens: int) -> Mask:
    if name == "documents":
        ends = itertools.takewhile(lambda end: end < tokens, itertools.accumulate(itertools.cycle(LENGTHS)))
        return bmburst.Documents.from_cu_seqlens([0, *ends, tokens])
    return {"window": bmburst.SlidingWindow(WINDOW), "causal": bmburst.Causal(), "full": bmburst.Full()}[name]


def _measured_strategies(heads: tuple[int, int], tokens: int, name: str, device: torch.device) -> dict[str, Any]:
    """Return a case's row: the choice of "auto", and milliseconds of each strategy that supports the case."""
    group, mask = RankGroup.world(device), _mask(name, tokens)
    local = tokens // group.size
    torch.manual_seed(group.rank)
    q, k, v, grad = (
        torch.randn(1, local, count, HEAD_DIM, device=device, dtype=torch.bfloat16)
        for count in (heads[0], heads[1], heads[1], heads[0])
    )
    inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad
    shapes = head_shapes(make_layout("zigzag", group.size, local), q, k, k)
    placement = Placement("peer" if device.type == "cuda" else "gloo")
    machine = hardware_like(torch.cuda.get_device_name(device) if device.type == "cuda" else HOST)
    taken = _name(choose_strategy("auto", shapes, tokens, mask, placement, machine), group.size)
    can = [each for each in STRATEGIES if each != "heads" or not heads[0] % group.size]

    ways = (partial(bmburst.burst_attention, mask=mask, strategy=strategy) for strategy in can)
    calls = [partial(both, way, *inputs) for way in ways]
    for call in calls * WARM_UP:
        call()
    times = in_turns(*calls, group=group, repeats=REPEATS, seconds=SECONDS)
    row = {"query_heads": heads[0], "kv_heads": heads[1], "tokens": tokens, "mask": name, "auto": taken}
    return row | {strategy: statistics.median(found) for strategy, found in zip(can, times, strict=True)}


def _name(strategy: Strategy, ranks: int) -> str:
    return "heads" if strategy.ulysses_degree == ranks else strategy.outer


def strategies_table(record: Mapping[str, Any]) -> str:
    """Return a record as Markdown. The last column is the time of "auto" divided by that of the best strategy."""
    names = (f"{name}, ms" for name in STRATEGIES)
    lines = []
    for row in record["rows"]:
        found = {name: row[name] for name in STRATEGIES if name in row}
        cells = (f"{found[name]:.3f}" if name in found else "-" for name in STRATEGIES)
        ratio = found[row["auto"]] / min(found.values())
        own = f"{row['query_heads']} / {row['kv_heads']}"
        lines.append([own, row["tokens"], row["mask"], *cells, row["auto"], f"{ratio:.3f}"])
    return "\n".join(markdown_table(["query / KV heads", "tokens", "mask", *names, "auto takes", "auto / best"], lines))


BENCHMARKS = (
    RowBenchmark(
        name="steps", about=__doc__, configure=_configure_steps, measure=lambda options: ({}, _steps(options)),
        table=steps_table, line=lambda row: f"{StepCase(*row['case']).name}: {row['seconds']:.3f} s a step", ranks=1,
    ),
    RowBenchmark(
        name="strategies", about=__doc__, configure=_configure_strategies,
        measure=lambda options: ({}, _strategies(options)), table=strategies_table, ranks=2,
    ),
)  # fmt: skip
